// Macros: from statements with patterns and flags to a program of plain steps.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

#include "spolia/mapping/program.h"
#include "spolia/mapping/syntax.h"
#include "spolia/mapping/tensor_list.h"

namespace spolia {

/// What the macros ask of the two sides. Forward, the statements' left-hand side is the source. When the
/// mapping is to be run backwards the same macros are expanded with the sides' roles swapped: ids are then
/// collected from the right-hand names, among the tensors that lie there.
struct MacroContext {
  NameList left;   // the tensors on the statements' left-hand side
  NameList right;  // ... and on their right-hand side
  NameList base;   // and those that what is new is taken from
  bool left_known = false;
  bool right_known = false;
  bool backwards = false;
  /// The number of tensor-parallel parts of a tensor on either side; 1 where nothing is known of it.
  std::function<int64_t(std::string_view)> left_parts, right_parts;
};

/// Expands, in this order and each over all statements before the next: $LAYER_ID, $EXPERT_ID and
/// $LAYER_ID_OFFSET; name[a:b]; *; ^T; fused_qkv, fused_qkv_old, fused_ffn. Attributes are checked.
/// InvalidArgumentError with line and column. Pure.
Program expand_macros(const Mapping& mapping, const MacroContext& context);

}  // namespace spolia
