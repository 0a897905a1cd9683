#include "spolia/tensor/cast_kernels.h"

#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <optional>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#define SPOLIA_AVX2 __attribute__((target("avx2,f16c"), always_inline)) static inline
#endif

namespace spolia {
namespace {

// Elements as they lie in memory.
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

/// The kernels' order of dtypes; nothing for those that cannot be cast.
std::optional<size_t> index_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
      return 0;
    case DType::kFloat32:
      return 1;
    case DType::kFloat16:
      return 2;
    case DType::kBFloat16:
      return 3;
    default:
      return std::nullopt;
  }
}

float to_float(double value) { return static_cast<float>(value); }
float to_float(float value) { return value; }
float to_float(BFloat16 value) { return std::bit_cast<float>(uint32_t{value.bits} << 16); }
float to_float(Float16 value) {
  uint32_t sign = uint32_t{value.bits & 0x8000u} << 16, magnitude = value.bits & 0x7FFFu;
  if (magnitude > 0x7C00)
    return std::bit_cast<float>(sign | 0x7FC00000 | magnitude << 13);  // NaN, made quiet
  if (magnitude == 0x7C00) return std::bit_cast<float>(sign | 0x7F800000);
  if (magnitude >= 0x0400) return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
  float subnormal = static_cast<float>(magnitude) * 0x1p-24f;  // exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
}

void from_float(float value, double& out) { out = value; }
void from_float(float value, float& out) { out = value; }
void from_float(float value, BFloat16& out) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  out.bits = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
}
void from_float(float value, Float16& out) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  uint32_t magnitude = bits & 0x7FFFFFFF, half;
  if (magnitude > 0x7F800000) {
    half = 0x7E00 | (magnitude >> 13 & 0x3FF);
  } else if (magnitude >= 0x477FF000) {  // 65520, half-way from the largest to what would be next
    half = 0x7C00;
  } else if (magnitude >= 0x38800000) {  // 2^-14, the smallest normal
    uint32_t rebiased = magnitude - (112u << 23);
    half = (rebiased + 0xFFF + (rebiased >> 13 & 1)) >> 13;
  } else {
    // A multiple of 2^-24, which is 0.5's last place: the addition rounds just as is needed.
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - std::bit_cast<uint32_t>(0.5f);
  }
  out.bits = static_cast<uint16_t>((bits >> 16 & 0x8000) | half);
}

template <class To, class From>
void cast_scalar(void* dst, const void* src, int64_t count) {
  auto* to = static_cast<std::byte*>(dst);
  auto* from = static_cast<const std::byte*>(src);
  for (int64_t i = 0; i < count; ++i) {
    From value;
    To result;
    std::memcpy(&value, from + i * sizeof(From), sizeof(From));
    from_float(to_float(value), result);
    std::memcpy(to + i * sizeof(To), &result, sizeof(To));
  }
}

#if defined(SPOLIA_AVX2)

// Eight elements at once, as eight float32. The last parameter picks the dtype.
SPOLIA_AVX2 __m256 load8(const std::byte* from, double) {
  auto* at = reinterpret_cast<const double*>(from);
  return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_loadu_pd(at + 4)), _mm256_cvtpd_ps(_mm256_loadu_pd(at)));
}
SPOLIA_AVX2 __m256 load8(const std::byte* from, float) {
  return _mm256_loadu_ps(reinterpret_cast<const float*>(from));
}
SPOLIA_AVX2 __m256 load8(const std::byte* from, Float16) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
SPOLIA_AVX2 __m256 load8(const std::byte* from, BFloat16) {
  __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

SPOLIA_AVX2 void store8(std::byte* to, __m256 values, double) {
  auto* at = reinterpret_cast<double*>(to);
  _mm256_storeu_pd(at, _mm256_cvtps_pd(_mm256_castps256_ps128(values)));
  _mm256_storeu_pd(at + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(values, 1)));
}
SPOLIA_AVX2 void store8(std::byte* to, __m256 values, float) {
  _mm256_storeu_ps(reinterpret_cast<float*>(to), values);
}
SPOLIA_AVX2 void store8(std::byte* to, __m256 values, Float16) {
  __m128i halves = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}
SPOLIA_AVX2 void store8(std::byte* to, __m256 values, BFloat16) {
  __m256i bits = _mm256_castps_si256(values);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(values, values, _CMP_UNORD_Q));
  __m256i wide = _mm256_blendv_epi8(_mm256_srli_epi32(rounded, 16), _mm256_set1_epi32(0x7FC0), is_nan);
  __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
}

template <class To, class From>
__attribute__((target("avx2,f16c"))) void cast_avx2(void* dst, const void* src, int64_t count) {
  auto* to = static_cast<std::byte*>(dst);
  auto* from = static_cast<const std::byte*>(src);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) store8(to + i * sizeof(To), load8(from + i * sizeof(From), From{}), To{});
  cast_scalar<To, From>(to + i * sizeof(To), from + i * sizeof(From), count - i);
}

bool has_avx2_and_f16c() {
  unsigned a, b, c = 0, d;  // clang 16's __builtin_cpu_supports does not know F16C
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C) != 0;
}

#endif

template <class T>
void copy_bits(void* dst, const void* src, int64_t count) {
  std::memcpy(dst, src, static_cast<size_t>(count) * sizeof(T));
}

using Table = std::array<std::array<CastKernel, 4>, 4>;  // [to][from]

// clang-format off
constexpr Table kScalar = {{
    {copy_bits<double>, cast_scalar<double, float>, cast_scalar<double, Float16>, cast_scalar<double, BFloat16>},
    {cast_scalar<float, double>, copy_bits<float>, cast_scalar<float, Float16>, cast_scalar<float, BFloat16>},
    {cast_scalar<Float16, double>, cast_scalar<Float16, float>, copy_bits<Float16>, cast_scalar<Float16, BFloat16>},
    {cast_scalar<BFloat16, double>, cast_scalar<BFloat16, float>, cast_scalar<BFloat16, Float16>, copy_bits<BFloat16>},
}};
#if defined(SPOLIA_AVX2)
constexpr Table kAvx2 = {{
    {copy_bits<double>, cast_avx2<double, float>, cast_avx2<double, Float16>, cast_avx2<double, BFloat16>},
    {cast_avx2<float, double>, copy_bits<float>, cast_avx2<float, Float16>, cast_avx2<float, BFloat16>},
    {cast_avx2<Float16, double>, cast_avx2<Float16, float>, copy_bits<Float16>, cast_avx2<Float16, BFloat16>},
    {cast_avx2<BFloat16, double>, cast_avx2<BFloat16, float>, cast_avx2<BFloat16, Float16>, copy_bits<BFloat16>},
}};
#endif
// clang-format on

CastKernel look_up(const Table& table, DType to, DType from) {
  std::optional<size_t> t = index_of(to), f = index_of(from);
  return t && f ? table[*t][*f] : nullptr;
}

}  // namespace

CastKernel scalar_cast_kernel(DType to, DType from) { return look_up(kScalar, to, from); }

CastKernel simd_cast_kernel([[maybe_unused]] DType to, [[maybe_unused]] DType from) {
#if defined(SPOLIA_AVX2)
  static const bool available = has_avx2_and_f16c();
  if (available) return look_up(kAvx2, to, from);
#endif
  return nullptr;
}

}  // namespace spolia
