// Placements: what one dim of a device mesh does to a tensor.
//
// A placement says which part of a tensor the i-th of n ranks along a mesh dim holds. Dims of the tensor may
// be counted from the end (-1 is the last) until normalized() resolves them.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "spolia/tensor/shape.h"

namespace spolia {

/// Every rank holds all of it.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};

/// How a dim of some size is cut into n parts.
enum class Split : uint8_t {
  kCeil,      // torch.chunk: parts of ceil(size / n); the last ones smaller or empty. 7 over 3 is 3, 3, 1
  kBalanced,  // sizes differ by at most one, larger ones first. 7 over 3 is 3, 2, 2
};

/// Rank i holds the i-th part of `dim`.
struct Shard {
  int64_t dim = 0;
  Split split = Split::kCeil;
  friend bool operator==(const Shard&, const Shard&) = default;
};

/// How StridedShard cuts a last chunk that is shorter than the others.
enum class StridedSplit : uint8_t {
  kAligned,  // like a full chunk: as if it were padded to the others' size. [0..4]: [0, 1, 3, 4] and [2]
  kChunked,  // on its own, by ceil: what PyTorch (2.14, and FSDP2) does. [0..4]: [0, 1, 3] and [2, 4]
};

/// `dim` is cut into `split_factor` chunks by ceil and each chunk is cut over the ranks by ceil; rank i holds
/// the i-th piece of every chunk, one after the other. PyTorch's _StridedShard: what a later mesh dim has
/// already sharded into `split_factor` parts (FSDP after tensor parallelism on the same dim). The two ways to
/// cut differ only where the chunks are uneven; the examples have split factor 2 and two ranks.
struct StridedShard {
  int64_t dim = 0;
  int64_t split_factor = 1;
  StridedSplit split = StridedSplit::kAligned;
  friend bool operator==(const StridedShard&, const StridedShard&) = default;
};

/// The elements of the flattened leading `dims` (0, 1, ..., k - 1) are shared out in order, in proportion to
/// `units`: one number >= 0 a rank, not all 0, whose sum divides the number of those elements.
struct RaggedShard {
  Dims dims;
  std::vector<int64_t> units;
  friend bool operator==(const RaggedShard&, const RaggedShard&) = default;
};

/// Every rank holds one operand, in full size, of a reduction that has not happened yet. Nothing to store:
/// reduce first.
struct Partial {
  std::string reduce_op = "sum";
  friend bool operator==(const Partial&, const Partial&) = default;
};

using Placement = std::variant<Replicate, Shard, StridedShard, RaggedShard, Partial>;

inline bool is_replicate(const Placement& p) { return std::holds_alternative<Replicate>(p); }
inline bool is_partial(const Placement& p) { return std::holds_alternative<Partial>(p); }

class TextReader;

/// "replicate", "shard(0)", "shard(0, balanced)", "strided(0, 2)", "strided(0, 2, chunked)",
/// "ragged([0, 1], [3, 1, 0])", "partial(sum)".
std::string placement_text(const Placement& placement);

/// The placement that placement_text() gives this text for; blanks are free, lists may stand in round
/// brackets, and a list of one number needs none. InvalidArgumentError, quoting the text, for any other. (A
/// reduce_op that is no word of small letters has a text to look at, but none to read.)
Placement parse_placement(std::string_view text);
/// The one that the reader comes to, as a part of a longer text.
Placement read_placement(TextReader& reader);

/// The same with dims counted from the front. InvalidArgumentError where a dim is none of a tensor with
/// `ndim` dims (a 0-d tensor has none), ragged dims are not the leading ones in order, a split factor is not
/// positive, or units are negative, all 0, or too large.
Placement normalized(const Placement& placement, size_t ndim);

}  // namespace spolia
