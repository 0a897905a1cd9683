// Newton-Schulz beside the rates of the library's own products, by useful operations of the form used, each
// in the dtype that it is computed in: of a symmetric product only one triangle counts. One thread.
#include <time.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include <benchmark/benchmark.h>

#include "spolia/optim/newton_schulz.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

std::vector<std::byte> random_elements(DType dtype, int64_t count) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  std::vector<std::byte> bytes(static_cast<size_t>(count * element_bytes(dtype)));
  cast(dtype, bytes.data(), DType::kFloat32, values.data(), count);
  return bytes;
}

/// Of this thread alone, so that other programs count less.
double seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

template <class Work>
void keep_best(double& best, Work work) {
  const double began = seconds();
  work();
  best = std::min(best, seconds() - began);
}

void bench_newton_schulz(benchmark::State& state) {
  const auto dtype = static_cast<DType>(state.range(0));
  const int64_t batch = state.range(1), r = state.range(2), c = state.range(3);
  NewtonSchulz calculator;
  NewtonSchulzOptions options;
  options.form = static_cast<NewtonSchulzForm>(state.range(4));
  const std::vector<int64_t> shape{batch, r, c};
  auto input = random_elements(dtype, batch * r * c);
  std::vector<std::byte> output(input.size());

  // Beside it the library's plain product of the same shape, QX, in each dtype that is multiplied.
  const bool narrow = dtype == DType::kBFloat16 && bfloat16_products_are_fast();
  const std::array multiplied{DType::kFloat32, DType::kBFloat16};
  Gemm library(1, true);
  std::array<std::vector<std::byte>, 2> q, x;
  for (size_t i = 0; i < 2; ++i) {
    q[i] = random_elements(multiplied[i], r * r);
    x[i] = random_elements(multiplied[i], r * c);
  }
  std::vector<float> qx(static_cast<size_t>(r * c));

  auto orthogonalise = [&] {
    calculator.orthogonalise(options, dense_view<const std::byte>(input.data(), dtype, shape),
                             dense_view(output.data(), dtype, shape));
  };
  orthogonalise();  // makes its buffers, and the library its kernels
  double best = 1e30;
  std::array<double, 2> best_product{1e30, 1e30};
  for (auto _ : state) {
    keep_best(best, orthogonalise);
    state.PauseTiming();
    for (size_t i = narrow ? 0 : 1; i < 3; ++i) {
      const size_t which = narrow ? std::min<size_t>(i, 1) : 0;
      keep_best(best_product[which], [&] {
        for (int64_t k = 0; k < batch; ++k)
          library.multiply(multiplied[which], r, c, r, {q[which].data(), r}, {x[which].data(), c}, qx.data(),
                           c);
      });
    }
    state.ResumeTiming();
  }
  const bool gram = (options.form == NewtonSchulzForm::kByShape ? newton_schulz_form(r, c, options, narrow)
                                                                : options.form) == NewtonSchulzForm::kGram;
  const double wide = static_cast<double>(c) / static_cast<double>(r),
               cubes = std::pow(static_cast<double>(r), 3) * static_cast<double>(batch);
  // In r³: what five steps take; with these coefficients none of it stays float32 in bfloat16.
  const double useful = gram ? 6 * wide + 14 : 15 * wide + 5, in_float32 = narrow ? 0 : useful;
  const std::array rates{2 * wide * cubes / best_product[0], 2 * wide * cubes / best_product[1]};
  state.counters["useful_gflops"] = useful * cubes / best * 1e-9;
  state.counters["library_f32"] = rates[0] * 1e-9;
  if (narrow) state.counters["library_bf16"] = rates[1] * 1e-9;
  // The time that the library's rates would take for the useful operations, of the time taken.
  state.counters["share"] = cubes * (in_float32 / rates[0] + (useful - in_float32) / rates[1]) / best;
  state.counters["best_ms"] = best * 1e3;
  state.SetLabel(std::string(name_of(dtype)) + (gram ? " gram" : " standard"));
}
BENCHMARK(bench_newton_schulz)
    ->ArgNames({"dtype", "batch", "r", "c", "form"})
    ->ArgsProduct({{1, 3}, {1}, {1024}, {1024}, {0}})
    ->ArgsProduct({{1, 3}, {1}, {1024}, {4096}, {0, 1}})
    ->ArgsProduct({{1, 3}, {64}, {128}, {512}, {0, 1}})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spolia
