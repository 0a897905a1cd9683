// Mappings: what the tensors of one layout are in terms of those of another, as region copies.
//
// A mapping is a short text (docs/mapping.md) that renames, drops, joins, cuts, turns, reshapes and casts
// tensors. Compiled against the tensors that are there, it says of every tensor of the result which boxes of
// which sources it is made of. No tensor in between exists, and no element is touched.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/layout/box.h"
#include "spolia/mapping/syntax.h"
#include "spolia/mapping/tensor_list.h"
#include "spolia/state/copy_index.h"
#include "spolia/state/region_copy.h"

namespace spolia {

/// The tensors that a mapping is compiled against. All lists are borrowed and in order of their names, as a
/// catalog's are (describe_tensors(), sorted_by_name()).
struct MappingSides {
  std::span<const TensorDescription> source;
  /// The tensors to make, and no others; one that the mapping does not mention comes from the source of the
  /// same name. Without: all that are there in the end.
  std::optional<std::span<const TensorDescription>> target;
  /// Where tensors that the mapping calls new (`_ -> B`) take their values from, and their shapes and dtypes,
  /// where neither the mapping nor `target` says.
  std::span<const TensorDescription> base;
};

struct MappingOptions {
  /// Runs the mapping backwards (or forwards, where the text itself asks to be run backwards).
  bool reverse = false;
  /// Stands before every name in the mapping: "model." where a checkpoint has the parameters below that.
  std::string prefix;
  /// Sources whose names begin with this are none, but the base, by what follows in their names: so that a
  /// job that streams can hold both. MappingSides::base is then empty. Empty: there are no such.
  std::string base_prefix;
  /// Lists targets that nothing makes in CompiledMapping::missing; without, the first one is an error.
  bool allow_missing = false;
  /// How many pieces may be handled in all; bounds what a stranger's mapping costs (about 300 bytes each).
  int64_t most_pieces = int64_t{1} << 22;
};

enum class Origin : uint8_t {
  kSources,  // copies fill it
  kFill,     // every element is MappedTensor::fill
  kInitial,  // it keeps what it has in `target`, or takes what `base` has
};

struct MappedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  Origin origin = Origin::kSources;
  double fill = 0;
  Position at;  // of the statement that makes it; line 0: nothing mentions it, it is the source of its name
};

struct CompiledMapping {
  std::vector<MappedTensor> targets;  // in order of their names
  /// By target. RegionCopy::source counts MappingSides::source, RegionCopy::target counts `targets`. The
  /// regions of a target fill it exactly; where a source's dtype is not the target's, elements are cast.
  std::vector<RegionCopy> copies;
  std::vector<size_t> first_copy;  // copies of target t: [first_copy[t], first_copy[t + 1])
  std::vector<size_t> unused;      // sources that no target has anything of, and nothing drops
  std::vector<size_t> dropped;     // sources that the mapping drops
  std::vector<std::string> missing;
  std::vector<std::string> notes;  // what is allowed, but may surprise

  std::span<const RegionCopy> copies_of(size_t target) const {
    return std::span(copies).subspan(first_copy[target], first_copy[target + 1] - first_copy[target]);
  }
  const MappedTensor* find(std::string_view name) const;
};

/// Compiles a mapping. Shapes and dtypes are checked; every target is covered exactly. The states of an
/// optimizer (optimizer_state.h) go where their parameters go, unless the mapping itself mentions them.
///
/// InvalidArgumentError with line, column, the tensor and the shapes, and the nearest name where one is
/// unknown; UnsupportedError where there are more than MappingOptions::most_pieces. Takes time in proportion
/// to statements, tensors and pieces, up to a logarithm. Pure.
CompiledMapping compile_mapping(const Mapping& mapping, const MappingSides& sides,
                                const MappingOptions& options = {});

/// What a box of a target is made of: of each copy the part that lies in the box, in the copies' order.
/// Composes with any layout: `box` is what a rank is to hold, and the boxes of the sources can be cut further
/// by what ranks hold of them. Takes time in proportion to the target's copies; with `indices`, which are of
/// the mapping's copies and serve any number of boxes, to those found.
struct SourceRegion {
  size_t source = 0;
  Region region;
};
std::vector<SourceRegion> find_sources(const CompiledMapping& mapping, const MappingSides& sides,
                                       size_t target, const Box& box, CopyIndices* indices = nullptr);

}  // namespace spolia
