#include "spolia/format/tensor_size.h"

#include <algorithm>

#include "spolia/base/checked.h"
#include "spolia/tensor/shape.h"

namespace spolia {

int64_t checked_tensor_size(DType dtype, std::span<const int64_t> shape) {
  int64_t bytes = byte_size(dtype, shape);
  int64_t stride_bits = info(dtype).bits;
  for (int64_t size : shape) {
    stride_bits = checked_mul(stride_bits, std::max<int64_t>(size, 1), "the size of a tensor in bits");
  }
  return bytes;
}

}  // namespace spolia
