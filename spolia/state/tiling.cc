#include "spolia/state/tiling.h"

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/layout/coverage.h"

namespace spolia {

std::optional<std::string> find_tiling_fault(const TensorEntry& tensor) {
  const Coverage coverage = check_coverage(tensor.boxes, tensor.shape);
  if (!coverage.fault) return std::nullopt;
  return fmt::format("tensor {} of shape {} is not whole: {}", quote(tensor.name), list_text(tensor.shape),
                     fault_text(*coverage.fault, tensor.shape));
}

void require_tiled(const TensorEntry& tensor) {
  if (auto fault = find_tiling_fault(tensor)) throw CorruptError("{}", *fault);
}

}  // namespace spolia
