#include "spolia/comm/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

constexpr int64_t kTileElements = 1024;

/// Elements that are computed in as they are.
template <class T>
struct Plain {
  using Number = T;
  static constexpr int64_t kBytes = sizeof(T);
  static void load(T* tile, const std::byte* from, int64_t count) {
    std::memcpy(tile, from, static_cast<size_t>(count * kBytes));
  }
  static void store(std::byte* to, const T* tile, int64_t count) {
    std::memcpy(to, tile, static_cast<size_t>(count * kBytes));
  }
};

/// Elements of 16 bits that are computed in as float32.
template <DType kDType>
struct Half {
  using Number = float;
  static constexpr int64_t kBytes = 2;
  static void load(float* tile, const std::byte* from, int64_t count) {
    cast(DType::kFloat32, tile, kDType, from, count);
  }
  static void store(std::byte* to, const float* tile, int64_t count) {
    cast(kDType, to, DType::kFloat32, tile, count);
  }
};

struct Sum {
  template <class T>
  T operator()(T a, T b) const {
    if constexpr (std::is_integral_v<T>) {
      using Unsigned = std::make_unsigned_t<T>;  // which wraps
      return static_cast<T>(static_cast<Unsigned>(static_cast<Unsigned>(a) + static_cast<Unsigned>(b)));
    } else {
      return a + b;
    }
  }
};
struct Min {
  template <class T>
  T operator()(T a, T b) const {
    return b < a || (b != b && a == a) ? b : a;
  }
};
struct Max {
  template <class T>
  T operator()(T a, T b) const {
    return a < b || (b != b && a == a) ? b : a;
  }
};
struct Or {
  uint8_t operator()(uint8_t a, uint8_t b) const { return (a | b) != 0; }
};
struct And {
  uint8_t operator()(uint8_t a, uint8_t b) const { return (a != 0) & (b != 0); }
};

template <class Elements, class Op>
void reduce_tiles(std::span<const std::byte* const> from, std::span<std::byte* const> to, int64_t begin,
                  int64_t end, Op op) {
  using Number = typename Elements::Number;
  alignas(64) std::array<Number, kTileElements> total, next;
  for (int64_t at = begin; at < end; at += kTileElements * Elements::kBytes) {
    const int64_t count = std::min(kTileElements, (end - at) / Elements::kBytes);
    Elements::load(total.data(), from[0] + at, count);
    for (const std::byte* source : from.subspan(1)) {
      Elements::load(next.data(), source + at, count);
      for (int64_t i = 0; i < count; ++i) total[i] = op(total[i], next[i]);
    }
    for (std::byte* target : to) Elements::store(target + at, total.data(), count);
  }
}

template <class Elements>
void reduce_numbers(ReduceOp op, std::span<const std::byte* const> from, std::span<std::byte* const> to,
                    int64_t begin, int64_t end) {
  switch (op) {
    case ReduceOp::kSum:
      return reduce_tiles<Elements>(from, to, begin, end, Sum());
    case ReduceOp::kMin:
      return reduce_tiles<Elements>(from, to, begin, end, Min());
    case ReduceOp::kMax:
      return reduce_tiles<Elements>(from, to, begin, end, Max());
  }
}

void reduce_bools(ReduceOp op, std::span<const std::byte* const> from, std::span<std::byte* const> to,
                  int64_t begin, int64_t end) {
  if (op == ReduceOp::kMin) return reduce_tiles<Plain<uint8_t>>(from, to, begin, end, And());
  reduce_tiles<Plain<uint8_t>>(from, to, begin, end, Or());
}

}  // namespace

std::string_view name_of(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      return "sum";
    case ReduceOp::kMin:
      return "min";
    case ReduceOp::kMax:
      return "max";
  }
  return "unknown";
}

bool can_reduce(DType dtype, ReduceOp op) {
  switch (info(dtype).kind) {
    case DTypeKind::kFloat:
    case DTypeKind::kInteger:
    case DTypeKind::kBool:
      return true;
    case DTypeKind::kComplex:
      return op == ReduceOp::kSum;
    case DTypeKind::kOpaque:
      return false;
  }
  return false;
}

void reduce(DType dtype, ReduceOp op, std::span<const std::byte* const> from, std::span<std::byte* const> to,
            int64_t begin, int64_t end) noexcept {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kComplex128:  // sums by parts
      return reduce_numbers<Plain<double>>(op, from, to, begin, end);
    case DType::kFloat32:
    case DType::kComplex64:
      return reduce_numbers<Plain<float>>(op, from, to, begin, end);
    case DType::kFloat16:
    case DType::kComplex32:
      return reduce_numbers<Half<DType::kFloat16>>(op, from, to, begin, end);
    case DType::kBFloat16:
      return reduce_numbers<Half<DType::kBFloat16>>(op, from, to, begin, end);
    case DType::kInt64:
      return reduce_numbers<Plain<int64_t>>(op, from, to, begin, end);
    case DType::kInt32:
      return reduce_numbers<Plain<int32_t>>(op, from, to, begin, end);
    case DType::kInt16:
      return reduce_numbers<Plain<int16_t>>(op, from, to, begin, end);
    case DType::kInt8:
      return reduce_numbers<Plain<int8_t>>(op, from, to, begin, end);
    case DType::kUInt64:
      return reduce_numbers<Plain<uint64_t>>(op, from, to, begin, end);
    case DType::kUInt32:
      return reduce_numbers<Plain<uint32_t>>(op, from, to, begin, end);
    case DType::kUInt16:
      return reduce_numbers<Plain<uint16_t>>(op, from, to, begin, end);
    case DType::kUInt8:
      return reduce_numbers<Plain<uint8_t>>(op, from, to, begin, end);
    case DType::kBool:
      return reduce_bools(op, from, to, begin, end);
    default:
      return;
  }
}

}  // namespace spolia
