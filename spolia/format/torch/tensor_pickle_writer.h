// The other direction of tensor_pickle.h: the data.pkl of a torch.save archive of one tensor.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "spolia/tensor/dtype.h"

namespace spolia {

/// The pickle of a row-major tensor that has storage "0" to itself, byte for byte PyTorch's.
/// UnsupportedError, naming the dtype, for one that torch.save cannot hold: those PyTorch lacks, integers of
/// fewer than 8 bits, and quantized ones, which need more than their elements.
std::string write_tensor_pickle(DType dtype, std::span<const int64_t> shape, bool requires_grad = false);

}  // namespace spolia
