#include "spolia/optim/kernels.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <type_traits>

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

/// Elements of memory that computes in another type; no alignment.
struct BFloat16 {
  uint16_t bits;
};
SPOLIA_INLINE float load(const float* from) { return *from; }
SPOLIA_INLINE double load(const double* from) { return *from; }
SPOLIA_INLINE float load(const BFloat16* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return std::bit_cast<float>(uint32_t{bits} << 16);
}
SPOLIA_INLINE void store(float value, float* to) { *to = value; }
SPOLIA_INLINE void store(double value, double* to) { *to = value; }
SPOLIA_INLINE void store(float value, BFloat16* to) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const auto half = static_cast<uint16_t>(std::isnan(value) ? 0x7FC0 : rounded);
  std::memcpy(to, &half, 2);
}

/// a b + c, rounded once where the processor does so: said here, so that it is the same in every loop.
template <bool kFused, class Real>
SPOLIA_INLINE Real multiply_add(Real a, Real b, Real c) {
  if constexpr (!kFused) {
    return a * b + c;
  } else if constexpr (sizeof(Real) == 4) {
    return __builtin_fmaf(a, b, c);
  } else {
    return __builtin_fma(a, b, c);
  }
}

/// `rounded`, where it is not null, becomes the parameter.
template <bool kFused, class Real, class Gradient, class Parameter, class State>
SPOLIA_INLINE void adamw_body(int64_t count, const AdamWFactors& factors, const Gradient* __restrict gradient,
                              Parameter* __restrict parameter, State* __restrict mean,
                              State* __restrict square, State* __restrict maximum,
                              BFloat16* __restrict rounded) {
  const Real decay = static_cast<Real>(factors.decay), step_size = static_cast<Real>(-factors.step_size);
  const Real keep1 = static_cast<Real>(factors.beta1), keep2 = static_cast<Real>(factors.beta2);
  const Real add1 = static_cast<Real>((1 - factors.beta1) * (factors.maximize ? -1 : 1));
  const Real add2 = static_cast<Real>(1 - factors.beta2);
  const Real correction = static_cast<Real>(factors.second_correction),
             epsilon = static_cast<Real>(factors.epsilon);
  auto step = [&](int64_t i, auto amsgrad, auto mastered) __attribute__((always_inline)) {
    const Real g = load(gradient + i);
    const Real m = multiply_add<kFused>(keep1, load(mean + i), add1 * g);
    const Real v = multiply_add<kFused>(keep2, load(square + i), add2 * (g * g));
    store(m, mean + i);
    store(v, square + i);
    Real largest = v;
    if constexpr (amsgrad) {
      const Real before = load(maximum + i);
      largest = v <= before ? before : v;  // a NaN is kept
      store(largest, maximum + i);
    }
    const Real root = multiply_add<kFused>(std::sqrt(largest), correction, epsilon);
    const Real p = multiply_add<kFused>(step_size, m / root, decay * load(parameter + i));
    store(p, parameter + i);
    if constexpr (mastered) store(static_cast<float>(p), rounded + i);
  };
  constexpr std::true_type kYes;
  constexpr std::false_type kNo;
  constexpr bool kMayBeMaster = !std::is_same_v<Parameter, BFloat16>;
  if (kMayBeMaster && maximum && rounded) {
    for (int64_t i = 0; i < count; ++i) step(i, kYes, kYes);
  } else if (kMayBeMaster && rounded) {
    for (int64_t i = 0; i < count; ++i) step(i, kNo, kYes);
  } else if (maximum) {
    for (int64_t i = 0; i < count; ++i) step(i, kYes, kNo);
  } else {
    for (int64_t i = 0; i < count; ++i) step(i, kNo, kNo);
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
SPOLIA_INLINE void combine_body(int64_t size, double alpha, double beta, const Real* __restrict a,
                                double gamma, Real* __restrict out, int64_t stride) {
  const Real of_a = static_cast<Real>(beta), of_out = static_cast<Real>(gamma);
  for (int64_t i = 0; i < size; ++i, a += stride, out += stride) {
    for (int64_t j = 0; j <= i; ++j) out[j] = of_a * a[j] + of_out * out[j];
    out[i] += static_cast<Real>(alpha);
  }
}

template <class Real>
SPOLIA_INLINE void add_diagonals_body(int64_t size, const Real* diagonals, const Real* a, const Real* b,
                                      Real* __restrict out, int64_t stride) {
  const Real *of_b = diagonals, *of_a = diagonals + size;
  for (int64_t i = 0; i < size; ++i, a += stride, b += stride, out += stride) {
    for (int64_t j = 0; j < i; ++j) out[j] += of_b[i] * b[j] + of_a[j] * a[j];
    out[i] += of_b[i] * of_a[i];
  }
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

SPOLIA_INLINE void widen_body(int64_t count, const BFloat16* from, float* __restrict to) {
  for (int64_t i = 0; i < count; ++i) to[i] = load(from + i);
}

SPOLIA_INLINE void narrow_body(int64_t count, const float* __restrict from, BFloat16* to) {
  for (int64_t i = 0; i < count; ++i) store(from[i], to + i);
}

SPOLIA_INLINE void narrow_scale_add_body(int64_t count, float factor, const BFloat16* x,
                                         const float* __restrict sums, BFloat16* __restrict to) {
  for (int64_t i = 0; i < count; ++i) store(factor * load(x + i) + sums[i], to + i);
}

// One level: all bodies, compiled for the processors that `TARGET` names. FUSED: they have fused
// multiply-adds.
#define SPOLIA_LEVEL(NAME, FUSED, TARGET)                                                                    \
  template <class Real>                                                                                      \
  struct NAME {                                                                                              \
    using Narrow = std::conditional_t<sizeof(Real) == 4, BFloat16, Real>;                                    \
    TARGET static void momentum(int64_t n, const MomentumFactors& f, const Real* g, Real* b, Real* u) {      \
      momentum_body(n, f, g, b, u);                                                                          \
    }                                                                                                        \
    TARGET static void scale_add(int64_t n, double f, Real* v, double a, const Real* u) {                    \
      scale_add_body(n, f, v, a, u);                                                                         \
    }                                                                                                        \
    template <class G, class P, class S>                                                                     \
    TARGET static void adamw(int64_t n, const AdamWFactors& f, const void* g, void* p, void* m, void* s,     \
                             void* x, void* r) {                                                             \
      adamw_body<FUSED, Real>(n, f, static_cast<const G*>(g), static_cast<P*>(p), static_cast<S*>(m),        \
                              static_cast<S*>(s), static_cast<S*>(x), static_cast<BFloat16*>(r));            \
    }                                                                                                        \
    TARGET static double sum_of_squares(int64_t n, const Real* v) { return sum_of_squares_body(n, v); }      \
    TARGET static void scale(int64_t n, double f, Real* v) { scale_body(n, f, v); }                          \
    TARGET static void combine(int64_t n, double x, double y, const Real* a, double z, Real* o, int64_t s) { \
      combine_body(n, x, y, a, z, o, s);                                                                     \
    }                                                                                                        \
    TARGET static void add_diagonals(int64_t n, const Real* d, const Real* a, const Real* b, Real* o,        \
                                     int64_t s) {                                                            \
      add_diagonals_body(n, d, a, b, o, s);                                                                  \
    }                                                                                                        \
    TARGET static void mirror(int64_t n, Real* m, int64_t s) { mirror_body(n, m, s); }                       \
    TARGET static void widen(int64_t n, const void* f, float* t) {                                           \
      widen_body(n, static_cast<const BFloat16*>(f), t);                                                     \
    }                                                                                                        \
    TARGET static void narrow(int64_t n, const float* f, void* t) {                                          \
      narrow_body(n, f, static_cast<BFloat16*>(t));                                                          \
    }                                                                                                        \
    TARGET static void narrow_scale_add(int64_t n, float f, const void* x, const float* s, void* t) {        \
      narrow_scale_add_body(n, f, static_cast<const BFloat16*>(x), s, static_cast<BFloat16*>(t));            \
    }                                                                                                        \
    static constexpr BFloat16Kernels kBFloat16 = {widen, narrow, narrow_scale_add};                          \
    static constexpr Kernels<Real> kAll = {momentum,                                                         \
                                           scale_add,                                                        \
                                           {{{adamw<Real, Real, Real>, adamw<Real, Real, Narrow>},           \
                                             {adamw<Real, Narrow, Real>, adamw<Real, Narrow, Narrow>}},      \
                                            {{adamw<Narrow, Real, Real>, adamw<Narrow, Real, Narrow>},       \
                                             {adamw<Narrow, Narrow, Real>, adamw<Narrow, Narrow, Narrow>}}}, \
                                           sum_of_squares,                                                   \
                                           scale,                                                            \
                                           combine,                                                          \
                                           add_diagonals,                                                    \
                                           mirror};                                                          \
  }

#if defined(__FP_FAST_FMAF)
SPOLIA_LEVEL(Plain, true, );
#else
SPOLIA_LEVEL(Plain, false, );
#endif
#if defined(__x86_64__)
SPOLIA_LEVEL(Avx2, true, __attribute__((target("avx2,fma"))));
#if defined(__clang__)
SPOLIA_LEVEL(Avx512, true,
             __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma"), min_vector_width(512))));
#else
SPOLIA_LEVEL(Avx512, true,
             __attribute__((target("avx512f,avx512vl,avx512dq,avx512bw,fma,prefer-vector-width=512"))));
#endif
#endif

enum class Level { kPlain, kAvx2, kAvx512 };

Level level() {
#if defined(__x86_64__)
  static const Level found = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                                     __builtin_cpu_supports("avx512dq") &&
                                     __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("fma")
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
