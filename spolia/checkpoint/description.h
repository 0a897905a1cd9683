// Descriptions: what each rank has of a job's state, without the bytes, and what that makes together.
//
// Saving and loading are planned by every rank alike, from the descriptions of all. Most ranks of a job have
// the same one, so hashes are gathered, and each distinct description is sent once.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/comm/group.h"
#include "spolia/plan/ownership.h"
#include "spolia/state/state_dict.h"

namespace spolia {

struct DescribedTensor {
  std::string name;
  KeyPath path;
  DType dtype = DType::kFloat32;
  Dims shape;
  bool requires_grad = false;
  bool on_device = false;                // in memory that the host does not reach
  std::shared_ptr<const Layout> layout;  // or
  Box box;                               // what this rank holds
  uint64_t contents = 0;                 // a hash of what all ranks should have alike; 0: not compared
  friend bool operator==(const DescribedTensor&, const DescribedTensor&);
};

struct DescribedValue {
  std::string name;
  KeyPath path;
  uint64_t contents = 0;  // likewise
  friend bool operator==(const DescribedValue&, const DescribedValue&) = default;
};

/// Sorted by name.
struct Description {
  std::vector<DescribedTensor> tensors;
  std::vector<DescribedValue> values;
  friend bool operator==(const Description&, const Description&) = default;
};

struct DescribeOptions {
  /// Whether values are hashed, and with them tensors that one rank holds whole in the host's memory, of at
  /// most so many bytes: those that ranks hold alike have to be alike.
  bool contents = false;
  int64_t hashed_bytes = int64_t{64} << 10;
};

/// Checks that memory suits what is said of it, on this rank. InvalidArgumentError naming the tensor.
Description describe(const StateDict& state, int64_t rank, const DescribeOptions& options);

/// As bytes, equal exactly where the descriptions are; and back. CorruptError where they are none.
std::string encode(const Description& description);
Description decode_description(std::string_view bytes);

/// Those of all ranks.
struct Descriptions {
  std::vector<Description> distinct;  // in the order of the lowest rank that has each
  std::vector<uint32_t> of_rank;      // which of them
  std::string fingerprint;            // a hash of all of it, but the hashes of contents

  int64_t ranks() const { return std::ssize(of_rank); }
  const Description& of(int64_t rank) const { return distinct[of_rank[static_cast<size_t>(rank)]]; }
  /// The lowest rank with one of the distinct descriptions.
  int64_t first_rank(uint32_t description) const;
};

/// Collective over the group, whose places are the ranks.
Descriptions exchange_descriptions(Group& group, const Description& own);

/// What the ranks have together, sorted by name.
struct JobState {
  struct Tensor {
    std::string name;
    KeyPath path;
    bool requires_grad = false;
    bool on_device = false;  // on some rank
  };
  struct NamedValue {
    std::string name;
    KeyPath path;
    int64_t rank = 0;  // the lowest that has it
  };
  std::vector<Tensor> tensors;
  std::vector<SharedTensor> shared;  // how ranks share each of them
  std::vector<NamedValue> values;
};

/// What a job's ranks hold is all of each tensor, in boxes that are equal or disjoint, where they save it;
/// they may load any boxes.
enum class Purpose : uint8_t { kSave, kLoad };

/// Pure. MismatchError naming the entry and two ranks where they disagree about its dtype, shape, layout or
/// contents, or whether it is a tensor; where a rank lacks a tensor that its layout gives it a part of; where
/// boxes that are to be saved overlap or leave a gap. InvalidArgumentError where a layout has a rank that the
/// job has not, or is Partial.
JobState join(const Descriptions& descriptions, Purpose purpose);

}  // namespace spolia
