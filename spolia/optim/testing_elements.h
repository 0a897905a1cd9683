// Tensors and traces for this room's tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "spolia/tensor/cast.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// `values` as elements of a dtype, which round trips hold.
struct Elements {
  DType dtype;
  Dims shape;
  std::vector<std::byte> bytes;

  Elements(DType type, Dims sizes)
      : dtype(type), shape(sizes), bytes(static_cast<size_t>(byte_size(type, sizes))) {}
  Elements(DType type, Dims sizes, const std::vector<double>& values) : Elements(type, sizes) {
    cast(dtype, bytes.data(), DType::kFloat64, values.data(), std::ssize(values));
  }
  View view() { return dense_view(bytes.data(), dtype, shape); }
  std::vector<double> values() const {
    std::vector<double> result(static_cast<size_t>(numel(shape)));
    cast(DType::kFloat64, result.data(), dtype, bytes.data(), std::ssize(result));
    return result;
  }
};

inline double distance(const std::vector<double>& a,
                       const std::vector<double>& b) {  // relative, in the norm of Frobenius
  double difference = 0, size = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    difference += (a[i] - b[i]) * (a[i] - b[i]);
    size += b[i] * b[i];
  }
  return size == 0 ? std::sqrt(difference) : std::sqrt(difference / size);
}

inline std::vector<double> random_values(size_t count, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::normal_distribution<double> normal;
  std::vector<double> values(count);
  // Values that bfloat16 holds, so that every dtype starts from the same ones.
  for (double& value : values) value = std::round(normal(random) * 32) / 32;
  return values;
}

/// What PyTorch's optimizer did in a few steps: the tensors p0, g1, p1, ... and state.NAME, all float32, by
/// name.
inline std::map<std::string, Elements> read_trace(const std::string& name) {
  std::ifstream file(std::filesystem::path(SPOLIA_TEST_DATA) / "optim" / (name + ".safetensors"),
                     std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  uint64_t length = 0;
  std::memcpy(&length, bytes.data(), 8);
  std::map<std::string, Elements> tensors;
  const nlohmann::json header = nlohmann::json::parse(bytes.substr(8, length));
  for (const auto& [key, entry] : header.items()) {
    if (key == "__metadata__") continue;
    const auto shape = entry.at("shape").get<std::vector<int64_t>>();
    Elements elements(DType::kFloat32, Dims(shape.begin(), shape.end()));
    std::memcpy(elements.bytes.data(),
                bytes.data() + 8 + length + entry.at("data_offsets").at(0).get<uint64_t>(),
                elements.bytes.size());
    tensors.emplace(key, std::move(elements));
  }
  return tensors;
}

}  // namespace spolia
