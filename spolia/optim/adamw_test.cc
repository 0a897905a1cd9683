#include "spolia/optim/adamw.h"

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck.h>

#include "spolia/base/error.h"
#include "spolia/layout/test_random.h"
#include "spolia/optim/testing_elements.h"

namespace spolia {
namespace {

TEST(AdamW, Vectors) {
  for (DType dtype : {DType::kFloat64, DType::kFloat32}) {
    for (bool amsgrad : {false, true}) {
      AdamWOptions options;
      options.amsgrad = amsgrad;
      Elements p(dtype, {}, {1}), m(dtype, {}), v(dtype, {}), x(dtype, {});
      const std::array gradients{.5, -.3, 0.};
      const std::array wanted{.9989900000, .9987885121, amsgrad ? .9986305697 : .9986304957};
      for (size_t i = 0; i < 3; ++i) {
        Elements g(dtype, {}, {gradients[i]});
        adamw_step(options, static_cast<int64_t>(i) + 1,
                   {p.view(), {}, g.view(), m.view(), v.view(), x.view()});
        EXPECT_NEAR(p.values()[0], wanted[i], dtype == DType::kFloat64 ? 1e-10 : 1.2e-7);
      }
    }
  }
}

TEST(AdamW, PyTorchsTraces) {
  for (const std::string name : {"adamw-default", "adamw-amsgrad"}) {
    auto trace = read_trace(name);
    AdamWOptions options;
    if (name == "adamw-amsgrad")
      options = {.lr = .003, .beta1 = .8, .beta2 = .95, .weight_decay = .1, .amsgrad = true};
    Elements p = trace.at("p0"), m(p.dtype, p.shape), v(p.dtype, p.shape), x(p.dtype, p.shape);
    for (int step = 1; step <= 5; ++step) {
      Elements& g = trace.at("g" + std::to_string(step));
      adamw_step(options, step, {p.view(), {}, g.view(), m.view(), v.view(), x.view()});
      EXPECT_LT(distance(p.values(), trace.at("p" + std::to_string(step)).values()), 2e-7) << name << step;
    }
    EXPECT_LT(distance(m.values(), trace.at("state.exp_avg").values()), 2e-7);
    EXPECT_LT(distance(v.values(), trace.at("state.exp_avg_sq").values()), 2e-7);
    if (options.amsgrad) {
      EXPECT_LT(distance(x.values(), trace.at("state.max_exp_avg_sq").values()), 2e-7);
    }
  }
}

/// The formula, in float64, with each result rounded as its tensor's dtype would.
struct Reference {
  std::vector<double> p, m, v, x;
  void step(const AdamWOptions& o, int t, const std::vector<double>& gradients) {
    for (size_t i = 0; i < p.size(); ++i) {
      double g = o.maximize ? -gradients[i] : gradients[i];
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      x[i] = std::max(x[i], v[i]);
      double root = std::sqrt(o.amsgrad ? x[i] : v[i]) / std::sqrt(1 - std::pow(o.beta2, t));
      p[i] =
          p[i] * (1 - o.lr * o.weight_decay) - o.lr / (1 - std::pow(o.beta1, t)) * m[i] / (root + o.epsilon);
    }
  }
};

TEST(AdamW, EveryDtypeIsTheReference) {
  EXPECT_TRUE(rc::check([] {
    const int64_t count = pick(0, 3000);
    auto any = [] { return static_cast<DType>(pick(0, 4)); };
    const bool mastered = pick(0, 2) == 1;
    const DType p_type = any(), m_type = any(), v_type = any();
    AdamWOptions options{.lr = .01, .weight_decay = .1};
    options.amsgrad = pick(0, 2) == 1;
    options.maximize = pick(0, 2) == 1;
    const std::vector<double> start = random_values(static_cast<size_t>(count));
    Elements p(p_type, {count}, start), master(DType::kFloat32, {count}, start), m(m_type, {count}),
        v(v_type, {count}), x(v_type, {count});
    Reference reference{start, std::vector<double>(start.size()), std::vector<double>(start.size()),
                        std::vector<double>(start.size())};
    for (int step = 1; step <= 4; ++step) {
      Elements g(any(), {count}, random_values(static_cast<size_t>(count), static_cast<uint64_t>(step)));
      adamw_step(options, step,
                 {p.view(), mastered ? master.view() : View{}, g.view(), m.view(), v.view(),
                  options.amsgrad ? x.view() : View{}});
      reference.step(options, step, g.values());
    }
    auto precision = [](DType dtype) {
      return dtype == DType::kBFloat16 ? 2e-2 : dtype == DType::kFloat16 ? 2e-3 : 1e-6;
    };
    RC_ASSERT(distance(m.values(), reference.m) <= precision(m_type));
    RC_ASSERT(distance(v.values(), reference.v) <= precision(v_type));
    const double state = 4 * .01 * std::max(precision(m_type), precision(v_type)) * 2;
    RC_ASSERT(distance(p.values(), reference.p) <= precision(p_type) + state);
    if (mastered) {
      RC_ASSERT(distance(master.values(), reference.p) <= 1e-6 + state);
      Elements rounded(p_type, {count}, master.values());
      RC_ASSERT(rounded.bytes == p.bytes);
    }
  }));
}

TEST(AdamW, ShardsAreTheWholeBitForBit) {
  const int64_t count = 5000;
  Elements p(DType::kFloat32, {count}, random_values(5000)), m(p),
      v(p.dtype, p.shape, std::vector<double>(5000, .5));
  const Elements g(DType::kBFloat16, {count}, random_values(5000, 9));
  Elements p2(p), m2(p2), v2(v);
  auto part = [](const Elements& of, int64_t begin, int64_t end) {
    Elements& elements = const_cast<Elements&>(of);
    return dense_view(elements.bytes.data() + begin * element_bytes(of.dtype), of.dtype,
                      std::array{end - begin});
  };
  adamw_step({}, 3, {p.view(), {}, part(g, 0, count), m.view(), v.view(), {}});
  for (auto [begin, end] : {std::pair<int64_t, int64_t>{0, 1}, {1, 1}, {1, 1030}, {1030, 4999}, {4999, 5000}})
    adamw_step(
        {}, 3,
        {part(p2, begin, end), {}, part(g, begin, end), part(m2, begin, end), part(v2, begin, end), {}});
  for (auto [of_parts, of_whole] : {std::pair{&p2, &p}, {&m2, &m}, {&v2, &v}})
    EXPECT_EQ(of_parts->bytes, of_whole->bytes);
}

/// Tensors of narrower dtypes are stepped as their casts to float32 are, and rounded once.
TEST(AdamW, EveryMixIsFloat32RoundedBitForBit) {
  EXPECT_TRUE(rc::check([] {
    const int64_t count = pick(0, 300);
    const DType computed = DType::kFloat32;
    auto any = [] { return std::array{DType::kFloat32, DType::kBFloat16, DType::kFloat16}[pick(0, 3)]; };
    const bool mastered = pick(0, 2) == 1, alike = pick(0, 2) == 1;
    AdamWOptions options{.lr = .01, .weight_decay = .1};
    options.amsgrad = pick(0, 2) == 1;
    auto values = [&](uint64_t seed) { return random_values(static_cast<size_t>(count), seed); };
    auto squares = [&](uint64_t seed) {
      std::vector<double> all = values(seed);
      for (double& value : all) value *= value;
      return all;
    };
    const DType state = any();
    Elements g(any(), {count}, values(1)), p(any(), {count}, values(2)), m(state, {count}, values(3)),
        v(alike ? state : any(), {count}, squares(4)), x(alike ? state : any(), {count}, squares(5)),
        master(any(), {count}, values(2));
    if (count > 2) {  // an infinite gradient, and one that is none
      const std::vector<double> odd{HUGE_VAL, NAN};
      cast(g.dtype, g.bytes.data(), DType::kFloat64, odd.data(), 2);
    }
    auto widened = [&](const Elements& from) { return Elements(computed, from.shape, from.values()); };
    Elements wide_g = widened(g), wide_p = widened(mastered ? master : p), wide_m = widened(m),
             wide_v = widened(v), wide_x = widened(x);
    auto maximum = [&](Elements& of) { return options.amsgrad ? of.view() : View{}; };
    adamw_step(options, 7,
               {p.view(), mastered ? master.view() : View{}, g.view(), m.view(), v.view(), maximum(x)});
    adamw_step(options, 7, {wide_p.view(), {}, wide_g.view(), wide_m.view(), wide_v.view(), maximum(wide_x)});
    auto rounds_to = [](const Elements& wide, const Elements& found) {
      std::vector<std::byte> wanted(found.bytes.size());
      cast(found.dtype, wanted.data(), wide.dtype, wide.bytes.data(), numel(wide.shape));
      return wanted == found.bytes;
    };
    RC_ASSERT(rounds_to(wide_p, p));  // once, also beside a narrow master
    RC_ASSERT(!mastered || rounds_to(wide_p, master));
    RC_ASSERT(rounds_to(wide_m, m));
    RC_ASSERT(rounds_to(wide_v, v));
    RC_ASSERT(rounds_to(wide_x, x));
  }));
}

TEST(AdamW, SaysWhatIsWrong) {
  Elements p(DType::kFloat32, {4}), other(DType::kFloat32, {5}), whole(DType::kInt32, {4});
  const View v = p.view();
  EXPECT_THROW(adamw_step({}, 0, {v, {}, v, v, v, {}}), InvalidArgumentError);
  EXPECT_THROW(adamw_step({}, 1, {v, {}, other.view(), v, v, {}}), InvalidArgumentError);
  EXPECT_THROW(adamw_step({}, 1, {v, {}, {}, v, v, {}}), InvalidArgumentError);
  EXPECT_THROW(adamw_step({}, 1, {whole.view(), {}, v, v, v, {}}), UnsupportedError);
  EXPECT_THROW(adamw_step({.amsgrad = true}, 1, {v, {}, v, v, v, {}}), InvalidArgumentError);
  EXPECT_THROW(adamw_step({.beta1 = 1}, 1, {v, {}, v, v, v, {}}), InvalidArgumentError);
  EXPECT_THROW(adamw_step({.lr = -1}, 1, {v, {}, v, v, v, {}}), InvalidArgumentError);
}

}  // namespace
}  // namespace spolia
