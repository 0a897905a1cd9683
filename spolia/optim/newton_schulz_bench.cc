// Newton-Schulz beside the rate of the library's own products, by useful operations of the form used: of a
// symmetric product only one triangle counts. One thread.
#include <time.h>

#include <algorithm>
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

  // Beside it the plain product that dominates, of the dtype that is multiplied: QX.
  const bool narrow = dtype == DType::kBFloat16 && bfloat16_products_are_fast();
  const DType multiplied = narrow ? DType::kBFloat16 : DType::kFloat32;
  Gemm gemm;
  auto q = random_elements(multiplied, r * r), x = random_elements(multiplied, r * c);
  std::vector<std::byte> qx(x.size());

  double best = 1e30, best_product = 1e30;
  for (auto _ : state) {
    keep_best(best, [&] {
      calculator.orthogonalise(options, dense_view<const std::byte>(input.data(), dtype, shape),
                               dense_view(output.data(), dtype, shape));
    });
    state.PauseTiming();
    for (int64_t i = 0; i < 3; ++i)
      keep_best(best_product, [&] {
        for (int64_t k = 0; k < batch; ++k)
          gemm.multiply(multiplied, multiplied, r, c, r, {q.data(), r}, {x.data(), c}, qx.data(), c);
      });
    state.ResumeTiming();
  }
  const NewtonSchulzForm form = options.form == NewtonSchulzForm::kByShape
                                    ? newton_schulz_form(r, c, options.steps, narrow)
                                    : options.form;
  const double wide = static_cast<double>(c) / static_cast<double>(r),
               cube = std::pow(static_cast<double>(r), 3);
  const double useful =
      (form == NewtonSchulzForm::kGram ? 6 * wide + 14 : 15 * wide + 5) * cube * static_cast<double>(batch);
  const double rate = 2 * wide * cube * static_cast<double>(batch) / best_product;
  state.counters["useful_gflops"] = useful / best * 1e-9;
  state.counters["product_gflops"] = rate * 1e-9;
  state.counters["share"] = useful / best / rate;
  state.counters["best_ms"] = best * 1e3;
  state.SetLabel(std::string(name_of(dtype)) + (form == NewtonSchulzForm::kGram ? " gram" : " standard"));
}
BENCHMARK(bench_newton_schulz)
    ->ArgNames({"dtype", "batch", "r", "c", "form"})
    ->ArgsProduct({{1, 3}, {1}, {1024}, {1024}, {0}})
    ->ArgsProduct({{1, 3}, {1}, {1024}, {4096}, {0, 1}})
    ->ArgsProduct({{1, 3}, {64}, {128}, {512}, {0, 1}})
    ->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace spolia
