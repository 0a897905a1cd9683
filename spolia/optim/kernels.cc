#include "spolia/optim/kernels.h"

#include <bit>
#include <cmath>
#include <cstring>

#define SPOLIA_INLINE __attribute__((always_inline)) static inline

namespace spolia {
namespace {

// Each body is compiled once for every level below: it is inlined into a function of that level.

template <class Real>
SPOLIA_INLINE void momentum_body(int64_t count, const MomentumFactors& factors, const Real* gradient,
                                 Real* __restrict buffer, Real* update) {
  const Real keep = static_cast<Real>(factors.keep), add = static_cast<Real>(factors.add);
  const Real of_gradient = static_cast<Real>(factors.of_gradient),
             of_buffer = static_cast<Real>(factors.of_buffer);
  if (!gradient) {
    for (int64_t i = 0; i < count; ++i) buffer[i] *= keep;
    if (update)
      for (int64_t i = 0; i < count; ++i) update[i] = of_buffer * buffer[i];
    return;
  }
  if (!update) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = keep * buffer[i] + add * gradient[i];
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    Real g = gradient[i], fresh = keep * buffer[i] + add * g;
    buffer[i] = fresh;
    update[i] = of_gradient * g + of_buffer * fresh;
  }
}

template <class Real>
SPOLIA_INLINE void scale_add_body(int64_t count, double factor, Real* __restrict values, double add,
                                  const Real* __restrict update) {
  const Real f = static_cast<Real>(factor), a = static_cast<Real>(add);
  for (int64_t i = 0; i < count; ++i) values[i] = f * values[i] + a * update[i];
}

template <class Real>
SPOLIA_INLINE void adamw_body(int64_t count, const AdamWFactors& factors, const Real* __restrict gradient,
                              Real* __restrict parameter, Real* __restrict mean, Real* __restrict square,
                              Real* __restrict maximum) {
  const Real decay = static_cast<Real>(factors.decay), step_size = static_cast<Real>(factors.step_size);
  const Real keep1 = static_cast<Real>(factors.beta1), keep2 = static_cast<Real>(factors.beta2);
  const Real add1 = static_cast<Real>((1 - factors.beta1) * (factors.maximize ? -1 : 1));
  const Real add2 = static_cast<Real>(1 - factors.beta2);
  const Real correction = static_cast<Real>(factors.second_correction),
             epsilon = static_cast<Real>(factors.epsilon);
  if (maximum) {
    for (int64_t i = 0; i < count; ++i) {
      Real g = gradient[i], m = keep1 * mean[i] + add1 * g, v = keep2 * square[i] + add2 * (g * g);
      Real largest = v <= maximum[i] ? maximum[i] : v;  // a NaN is kept
      mean[i] = m;
      square[i] = v;
      maximum[i] = largest;
      parameter[i] = decay * parameter[i] - step_size * (m / (std::sqrt(largest) * correction + epsilon));
    }
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    Real g = gradient[i], m = keep1 * mean[i] + add1 * g, v = keep2 * square[i] + add2 * (g * g);
    mean[i] = m;
    square[i] = v;
    parameter[i] = decay * parameter[i] - step_size * (m / (std::sqrt(v) * correction + epsilon));
  }
}

template <class Real>
SPOLIA_INLINE double sum_of_squares_body(int64_t count, const Real* values) {
  constexpr int64_t kLanes = 32;  // sums of their own, for the order of a sum is part of the result
  double sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t lane = 0; lane < kLanes; ++lane) {
      double value = values[i + lane];
      sums[lane] += value * value;
    }
  double total = 0;
  for (; i < count; ++i) total += static_cast<double>(values[i]) * static_cast<double>(values[i]);
  for (double sum : sums) total += sum;
  return total;
}

template <class Real>
SPOLIA_INLINE void scale_body(int64_t count, double factor, Real* values) {
  for (int64_t i = 0; i < count; ++i) values[i] = static_cast<Real>(static_cast<double>(values[i]) * factor);
}

template <class Real>
SPOLIA_INLINE void combine_body(int64_t count, double b, const Real* __restrict linear, double c,
                                Real* __restrict square) {
  const Real of_linear = static_cast<Real>(b), of_square = static_cast<Real>(c);
  for (int64_t i = 0; i < count; ++i) square[i] = of_linear * linear[i] + of_square * square[i];
}

template <class Real>
SPOLIA_INLINE void mirror_body(int64_t size, Real* matrix, int64_t stride) {
  constexpr int64_t kTile = 16;
  for (int64_t i = 0; i < size; i += kTile)
    for (int64_t j = 0; j <= i; j += kTile) {
      if (i + kTile > size || i == j) {
        for (int64_t k = i; k < size && k < i + kTile; ++k)
          for (int64_t l = j; l < j + kTile && l < k; ++l) matrix[l * stride + k] = matrix[k * stride + l];
        continue;
      }
      Real tile[kTile][kTile];
      for (int64_t k = 0; k < kTile; ++k)
        for (int64_t l = 0; l < kTile; ++l) tile[l][k] = matrix[(i + k) * stride + j + l];
      for (int64_t l = 0; l < kTile; ++l)
        for (int64_t k = 0; k < kTile; ++k) matrix[(j + l) * stride + i + k] = tile[l][k];
    }
}

SPOLIA_INLINE void widen_body(int64_t count, const void* from, float* __restrict to) {
  auto* bytes = static_cast<const char*>(from);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t half;
    std::memcpy(&half, bytes + 2 * i, 2);
    to[i] = std::bit_cast<float>(uint32_t{half} << 16);
  }
}

SPOLIA_INLINE void narrow_body(int64_t count, const float* __restrict from, void* to) {
  auto* bytes = static_cast<char*>(to);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = std::bit_cast<uint32_t>(from[i]);
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const auto half = static_cast<uint16_t>((bits & 0x7FFFFFFF) > 0x7F800000 ? 0x7FC0 : rounded);
    std::memcpy(bytes + 2 * i, &half, 2);
  }
}

// One level: all bodies, compiled for the processors that `TARGET` names.
#define SPOLIA_LEVEL(NAME, TARGET)                                                                       \
  template <class Real>                                                                                  \
  struct NAME {                                                                                          \
    TARGET static void momentum(int64_t n, const MomentumFactors& f, const Real* g, Real* b, Real* u) {  \
      momentum_body(n, f, g, b, u);                                                                      \
    }                                                                                                    \
    TARGET static void scale_add(int64_t n, double f, Real* v, double a, const Real* u) {                \
      scale_add_body(n, f, v, a, u);                                                                     \
    }                                                                                                    \
    TARGET static void adamw(int64_t n, const AdamWFactors& f, const Real* g, Real* p, Real* m, Real* s, \
                             Real* x) {                                                                  \
      adamw_body(n, f, g, p, m, s, x);                                                                   \
    }                                                                                                    \
    TARGET static double sum_of_squares(int64_t n, const Real* v) { return sum_of_squares_body(n, v); }  \
    TARGET static void scale(int64_t n, double f, Real* v) { scale_body(n, f, v); }                      \
    TARGET static void combine(int64_t n, double b, const Real* l, double c, Real* s) {                  \
      combine_body(n, b, l, c, s);                                                                       \
    }                                                                                                    \
    TARGET static void mirror(int64_t n, Real* m, int64_t s) { mirror_body(n, m, s); }                   \
    TARGET static void widen(int64_t n, const void* f, float* t) { widen_body(n, f, t); }                \
    TARGET static void narrow(int64_t n, const float* f, void* t) { narrow_body(n, f, t); }              \
    static constexpr BFloat16Kernels kBFloat16 = {widen, narrow};                                        \
    static constexpr Kernels<Real> kAll = {momentum, scale_add, adamw, sum_of_squares,                   \
                                           scale,    combine,   mirror};                                 \
  }

SPOLIA_LEVEL(Plain, );
#if defined(__x86_64__)
SPOLIA_LEVEL(Avx2, __attribute__((target("avx2,fma"))));
#if defined(__clang__)
SPOLIA_LEVEL(Avx512,
             __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma"), min_vector_width(512))));
#else
SPOLIA_LEVEL(Avx512,
             __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512"))));
#endif
#endif

enum class Level { kPlain, kAvx2, kAvx512 };

Level level() {
#if defined(__x86_64__)
  static const Level found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw")
                                 ? Level::kAvx512
                             : __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")
                                 ? Level::kAvx2
                                 : Level::kPlain;
  return found;
#else
  return Level::kPlain;
#endif
}

}  // namespace

template <class Real>
const Kernels<Real>& kernels() {
#if defined(__x86_64__)
  if (level() == Level::kAvx512) return Avx512<Real>::kAll;
  if (level() == Level::kAvx2) return Avx2<Real>::kAll;
#endif
  return Plain<Real>::kAll;
}
template const Kernels<float>& kernels();
template const Kernels<double>& kernels();

const BFloat16Kernels& bfloat16_kernels() {
#if defined(__x86_64__)
  if (level() == Level::kAvx512) return Avx512<float>::kBFloat16;
  if (level() == Level::kAvx2) return Avx2<float>::kBFloat16;
#endif
  return Plain<float>::kBFloat16;
}

}  // namespace spolia
