#include "spolia/optim/adamw.h"

#include <array>
#include <cmath>

#include "spolia/base/error.h"
#include "spolia/optim/element_blocks.h"
#include "spolia/optim/kernels.h"

namespace spolia {
namespace {

template <class Real>
void step_in(const AdamWFactors& factors, int64_t count, const AdamWTensors& t) {
  const bool mastered = t.master.data != nullptr;
  const View& leading = mastered ? t.master : t.parameter;
  const auto& kernel = kernels<Real>().adamw;
  constexpr DType kComputed = sizeof(Real) == 8 ? DType::kFloat64 : DType::kFloat32;
  auto narrow = [](const ConstView& view) { return view.dtype != kComputed; };
  // One loop reads and writes what is of the computing type or, in its place, of bfloat16.
  auto direct = [&](const ConstView& view) {
    return !view.data || (sizeof(Real) == 4 && view.dtype == DType::kBFloat16) ||
           (view.dtype == kComputed && reinterpret_cast<uintptr_t>(view.data) % sizeof(Real) == 0);
  };
  auto like_mean = [&](const View& view) { return !view.data || view.dtype == t.mean.dtype; };
  if (direct(t.gradient) && direct(leading) && direct(t.mean) && direct(t.square) && direct(t.maximum) &&
      like_mean(t.square) && like_mean(t.maximum) &&
      (!mastered || (leading.dtype == kComputed && t.parameter.dtype == DType::kBFloat16))) {
    return kernel[narrow(t.gradient)][narrow(leading)][narrow(t.mean)](
        count, factors, t.gradient.data, leading.data, t.mean.data, t.square.data, t.maximum.data,
        mastered ? t.parameter.data : nullptr);
  }
  const std::array runs{read_run(t.gradient),  update_run(leading),
                        update_run(t.mean),    update_run(t.square),
                        update_run(t.maximum), mastered ? write_run(t.parameter) : ElementRun{}};
  for_each_block<Real>(count, runs, [&](const std::array<Real*, 6>& p, int64_t n) {
    kernel[0][0][0](n, factors, p[0], p[1], p[2], p[3], p[4], nullptr);
    if (p[5]) std::copy_n(p[1], n, p[5]);
  });
}

}  // namespace

void check(const AdamWOptions& options) {
  if (!(options.lr >= 0) || !(options.epsilon >= 0) || !(options.weight_decay >= 0))
    throw InvalidArgumentError("AdamW's lr, eps and weight_decay are not negative: {}, {}, {}", options.lr,
                               options.epsilon, options.weight_decay);
  for (double beta : {options.beta1, options.beta2})
    if (!(beta >= 0 && beta < 1)) throw InvalidArgumentError("AdamW's betas are in [0, 1), not {}", beta);
}

void adamw_step(const AdamWOptions& options, int64_t step, const AdamWTensors& tensors) {
  check(options);
  if (step < 1) throw InvalidArgumentError("AdamW's steps are counted from 1, not {}", step);
  AdamWTensors t = tensors;
  if (!options.amsgrad) t.maximum = {};
  const int64_t count = numel(t.parameter.shape);
  check_elements(t.parameter, count, "AdamW's parameter");
  check_elements(t.master, count, "the parameter's master", true);
  check_elements(t.gradient, count, "the parameter's gradient");
  check_elements(t.mean, count, "exp_avg");
  check_elements(t.square, count, "exp_avg_sq");
  check_elements(t.maximum, count, "max_exp_avg_sq", !options.amsgrad);
  const double t_step = static_cast<double>(step);
  const AdamWFactors factors{.decay = 1 - options.lr * options.weight_decay,
                             .beta1 = options.beta1,
                             .beta2 = options.beta2,
                             .step_size = options.lr / (1 - std::pow(options.beta1, t_step)),
                             .second_correction = 1 / std::sqrt(1 - std::pow(options.beta2, t_step)),
                             .epsilon = options.epsilon,
                             .maximize = options.maximize};
  const DType leading = t.master.data ? t.master.dtype : t.parameter.dtype;
  if (leading == DType::kFloat64) {
    step_in<double>(factors, count, t);
  } else {
    step_in<float>(factors, count, t);
  }
}

}  // namespace spolia
