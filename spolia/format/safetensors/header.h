// The header of a safetensors file: read from strangers, and built for our own files.
//
//   u64 little-endian N <= 100,000,000 | N bytes of JSON | data
//   {"__metadata__": {str: str}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ...}
//
// Offsets count from 8 + N. The ranges of the tensors tile the data: they start at 0, have no holes and no
// overlaps and end at the end of the file.
//
// Dtypes and shapes are the catalog's. They differ from the file's in one place: an F4 whose last size is
// even is what PyTorch calls float4_e2m1fn_x2, whose shape counts bytes of two elements; F4 [3, 8] in the
// file is float4_e2m1fn_x2 [3, 4] here. Other F4 tensors are float4_e2m1fn, counted in elements.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/format/tensor_size.h"
#include "spolia/store/store.h"
#include "spolia/tensor/dtype.h"
#include "spolia/tensor/shape.h"

namespace spolia {

inline constexpr int64_t kMaxSafetensorsHeaderBytes = 100'000'000;

/// What `__metadata__` holds.
using SafetensorsMetadata = std::map<std::string, std::string, std::less<>>;

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  int64_t offset = 0;  // of its bytes, from the start of the file
  int64_t length = 0;
};

struct SafetensorsHeader {
  SafetensorsMetadata metadata;
  std::vector<SafetensorsTensor> tensors;  // in the order of their bytes; names unique
};

/// Reads and checks a file's header. Afterwards every tensor's bytes are known to lie in the file, to match
/// its dtype and shape, and to be no other tensor's; strides of its shape do not overflow. CorruptError
/// naming file and tensor where the rules above are broken, UnsupportedError for a dtype or a number of dims
/// Spolia does not know. Memory is proportional to the header's bytes.
SafetensorsHeader read_safetensors_header(const InputFile& file);

/// The same from the N bytes of JSON and the size of the whole file; `name` is the file's, for messages.
SafetensorsHeader parse_safetensors_header(std::string_view json, int64_t file_size, std::string_view name);

/// Whether bytes from the start of a file look like safetensors: a length that is allowed, then a '{'.
bool looks_like_safetensors(std::span<const std::byte> start);

/// A tensor to be written.
struct SafetensorsSpec {
  std::string_view name;
  DType dtype = DType::kFloat32;
  std::span<const int64_t> shape;
};

struct SafetensorsLayout {
  std::string header;            // all bytes before the data, N included; a multiple of 8
  std::vector<int64_t> offsets;  // of each tensor's bytes, from the start of the file
  int64_t file_size = 0;
};

/// Lays out a file that holds the tensors in the given order; equal arguments give equal bytes. What
/// parse_safetensors_header() reads back is what was given. UnsupportedError naming the tensor where
/// safetensors has no such dtype (it must be dropped), shape or name, or where the header would be
/// larger than allowed (the tensors must be split over more files). InvalidArgumentError for a name given
/// twice.
SafetensorsLayout lay_out_safetensors(std::span<const SafetensorsSpec> tensors,
                                      const SafetensorsMetadata& metadata = {{"format", "pt"}});

}  // namespace spolia
