#include "spolia/optim/optimizer.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/optim/chained_optimizer.h"
#include "spolia/optim/local_optimizer.h"
#include "spolia/optim/testing_elements.h"
#include "spolia/optim/testing_reference.h"

namespace spolia {
namespace {

/// Parameters of a small model with their gradients, and optimizers over them.
struct Model {
  DType dtype;
  std::map<std::string, Elements> values, gradients;

  explicit Model(DType type = DType::kFloat32) : dtype(type) {
    for (const auto& [name, shape] : std::map<std::string, Dims>{{"embed.weight", {6, 4}},
                                                                 {"layers.0.weight", {4, 4}},
                                                                 {"layers.1.weight", {3, 5}},
                                                                 {"norm", {4}}}) {
      const auto count = static_cast<size_t>(numel(shape));
      values.emplace(name, Elements(dtype, shape, random_values(count, values.size() + 1)));
      gradients.emplace(name, Elements(dtype, shape, random_values(count, values.size() + 50)));
    }
  }
  OptimizerParameter parameter(const std::string& name) {
    return {name, values.at(name).view(), gradients.at(name).view(), {}, false, {}};
  }
  AdamWOptions adamw_options() const { return {.lr = .01}; }
  MuonOptions muon_options() const {
    MuonOptions options{.lr = .02};
    options.newton_schulz.precision = NewtonSchulzPrecision::kInput;
    return options;
  }
  std::unique_ptr<AdamW> adamw(const LocalOptions& options = {}) {
    std::vector<AdamWGroup> groups;
    groups.push_back({{parameter("embed.weight")}, adamw_options()});
    groups.push_back({{parameter("norm")}, {.lr = .01, .weight_decay = 0}});
    return std::make_unique<AdamW>(std::move(groups), options);
  }
  std::unique_ptr<Muon> muon(const LocalOptions& options = {}) {
    std::vector<MuonGroup> groups;
    groups.push_back({{parameter("layers.0.weight"), parameter("layers.1.weight")}, muon_options()});
    return std::make_unique<Muon>(std::move(groups), options);
  }
  ChainedOptimizer chained(const LocalOptions& options = {}) {
    std::vector<std::unique_ptr<Optimizer>> children;
    children.push_back(muon(options));
    children.push_back(adamw(options));
    return ChainedOptimizer(std::move(children));
  }
  bool operator==(const Model& other) const {
    for (const auto& [name, value] : values)
      if (value.bytes != other.values.at(name).bytes) return false;
    return true;
  }
};

std::vector<std::string> names_of(const StateDict& dict) {
  std::vector<std::string> names;
  for (const StateDict::Entry& entry : dict.entries()) names.push_back(entry.name);
  return names;
}

TEST(Optimizer, StepsAreThoseOfTheFunctions) {
  Model model, by_hand;
  ChainedOptimizer optimizer = model.chained();
  Elements momentum(DType::kFloat32, {3, 5}), update(momentum), m(DType::kFloat32, {6, 4}), v(m);
  MuonCalculator calculator;
  for (int step = 1; step <= 3; ++step) {
    optimizer.step();
    Elements& p = by_hand.values.at("layers.1.weight");
    muon_momentum(by_hand.muon_options(), by_hand.gradients.at("layers.1.weight").view(), momentum.view(),
                  update.view());
    calculator.update(by_hand.muon_options(), {}, update.view(), update.view());
    muon_apply(by_hand.muon_options(), p.view(), {}, update.view());
    EXPECT_EQ(model.values.at("layers.1.weight").bytes, p.bytes);
    Elements& e = by_hand.values.at("embed.weight");
    adamw_step(by_hand.adamw_options(), step,
               {e.view(), {}, by_hand.gradients.at("embed.weight").view(), m.view(), v.view(), {}});
    EXPECT_EQ(model.values.at("embed.weight").bytes, e.bytes);
  }
  EXPECT_EQ(dynamic_cast<Muon&>(optimizer[0]).newton_schulz().matrices(), 6);
  EXPECT_EQ(optimizer.steps(), std::vector<int64_t>{3});
}

TEST(Optimizer, TheClosureIsEvaluatedOnce) {
  Model model;
  ChainedOptimizer optimizer = model.chained();
  int calls = 0;
  const Model before = model;
  auto loss = optimizer.step([&] {
    EXPECT_TRUE(model == before);
    return static_cast<double>(++calls);
  });
  EXPECT_EQ(loss, 1);
  EXPECT_EQ(calls, 1);
  EXPECT_FALSE(model == before);
  EXPECT_FALSE(optimizer.step().has_value());
}

TEST(Optimizer, MissingGradientsAndFrozenParametersAreLeftAlone) {
  Model model;
  OptimizerParameter frozen = model.parameter("layers.0.weight");
  frozen.frozen = true;
  std::vector<MuonGroup> groups;
  groups.push_back({{frozen, model.parameter("layers.1.weight")}, model.muon_options()});
  Muon optimizer(std::move(groups));
  optimizer.set_gradient("layers.1.weight", {});
  const Model before = model;
  optimizer.step();
  EXPECT_TRUE(model == before);
  EXPECT_TRUE(optimizer.state().empty());
  EXPECT_EQ(optimizer.newton_schulz().matrices(), 0);
  optimizer.set_gradient("layers.1.weight", model.gradients.at("layers.1.weight").view());
  optimizer.set_gradient("layers.0.weight", model.gradients.at("layers.0.weight").view());
  optimizer.step();
  EXPECT_EQ(optimizer.newton_schulz().matrices(), 1);
  EXPECT_EQ(model.values.at("layers.0.weight").bytes, before.values.at("layers.0.weight").bytes);
  EXPECT_NE(model.values.at("layers.1.weight").bytes, before.values.at("layers.1.weight").bytes);
  EXPECT_EQ(optimizer.state().size(), 1u);
  EXPECT_THROW(optimizer.set_gradient("layers.1.weight", model.gradients.at("norm").view()),
               InvalidArgumentError);
  EXPECT_THROW(optimizer.set_gradient("layers", {}), NotFoundError);
}

TEST(Optimizer, ZeroGrad) {
  Model model;
  ChainedOptimizer optimizer = model.chained();
  optimizer.zero_grad(false);
  for (const auto& [name, gradient] : model.gradients)
    for (double value : gradient.values()) EXPECT_EQ(value, 0) << name;
  optimizer.zero_grad();
  const Model before = model;
  optimizer.step();
  EXPECT_TRUE(model == before);
}

TEST(Optimizer, EmptyParametersCountTheirSteps) {
  Elements empty(DType::kFloat32, {0, 4});
  std::vector<AdamWGroup> groups;
  groups.push_back({{{"empty", empty.view(), empty.view(), {}, false, {}}}, {}});
  AdamW adamw(std::move(groups));
  adamw.step();
  adamw.step();
  EXPECT_EQ(adamw.steps(), std::vector<int64_t>{2});
  std::vector<MuonGroup> muon_groups(2);  // one without parameters
  muon_groups[1].parameters.push_back({"empty", empty.view(), empty.view(), {}, false, {}});
  Muon muon(std::move(muon_groups));
  muon.step();
  EXPECT_EQ(muon.state_dict(StateForm::kNested).size(), 1u + 2 * 9);
}

TEST(Optimizer, StateDictsHavePyTorchsNames) {
  Model model;
  ChainedOptimizer optimizer = model.chained();
  optimizer.allocate_state();
  const Model before = model;
  EXPECT_TRUE(model == before);
  const std::vector<std::string> state{"state.layers.0.weight.momentum_buffer",
                                       "state.layers.1.weight.momentum_buffer",
                                       "state.embed.weight.step",
                                       "state.embed.weight.exp_avg",
                                       "state.embed.weight.exp_avg_sq",
                                       "state.norm.step",
                                       "state.norm.exp_avg",
                                       "state.norm.exp_avg_sq"};
  const std::vector<std::string> muon{"lr",  "weight_decay", "momentum",    "nesterov", "ns_coefficients",
                                      "eps", "ns_steps",     "adjust_lr_fn"};
  const std::vector<std::string> adamw{
      "lr",         "betas",          "eps",   "weight_decay",          "amsgrad", "maximize", "foreach",
      "capturable", "differentiable", "fused", "decoupled_weight_decay"};
  std::vector<std::string> flattened = state, nested = state;
  for (const char* name : {"layers.0.weight", "layers.1.weight", "embed.weight", "norm"})
    for (const std::string& key : name[0] == 'l' ? muon : adamw)
      flattened.push_back(std::string("param_groups.") + name + "." + key);
  for (int group = 0; group < 3; ++group) {
    for (const std::string& key : group == 0 ? muon : adamw)
      nested.push_back("param_groups." + std::to_string(group) + "." + key);
    nested.push_back("param_groups." + std::to_string(group) + ".params");
  }
  EXPECT_EQ(names_of(optimizer.state_dict(StateForm::kFlattened)), flattened);
  const StateDict dict = optimizer.state_dict(StateForm::kNested);
  EXPECT_EQ(names_of(dict), nested);
  EXPECT_EQ(dict.find("param_groups.2.betas")->value()->text(), "(0.9, 0.999)");
  EXPECT_EQ(dict.find("param_groups.0.params")->value()->text(), R"(["layers.0.weight", "layers.1.weight"])");
  EXPECT_EQ(dict.find("param_groups.0.adjust_lr_fn")->value()->python_type(), "NoneType");
  const LocalTensor* step = dict.find("state.norm.step")->tensor();
  EXPECT_EQ(step->memory.dtype, DType::kFloat32);
  EXPECT_TRUE(step->shape.empty());
}

/// A run that is broken, saved in either form, and taken up by fresh optimizers equals one that is not.
TEST(Optimizer, ResumedEqualsUnbroken) {
  for (StateForm form : {StateForm::kFlattened, StateForm::kNested})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (bool masters : {false, true}) {
        const LocalOptions options{.masters = masters};
        Model unbroken(dtype), broken(dtype);
        ChainedOptimizer whole = unbroken.chained(options), first = broken.chained(options);
        for (int i = 0; i < 2; ++i) whole.step(), first.step();
        Model resumed = broken;
        ChainedOptimizer second = resumed.chained(options);
        const StateDict dict = first.state_dict(form);
        const LoadReport report = second.load_state_dict(dict);
        EXPECT_TRUE(report.missing.empty());
        EXPECT_TRUE(report.unexpected.empty());
        for (int i = 0; i < 2; ++i) whole.step(), second.step();
        EXPECT_TRUE(resumed == unbroken);
        EXPECT_FALSE(broken == unbroken);
      }
}

TEST(Optimizer, LoadsAnotherSplitIntoGroups) {
  Model saved_from, loaded_to;
  ChainedOptimizer saved = saved_from.chained();
  saved.step();
  std::vector<ParamGroup> options = saved.param_groups();
  options[2].set("weight_decay", Value(.01));  // so that the two groups are alike and may become one
  saved.set_param_groups(options);
  for (StateForm form : {StateForm::kFlattened, StateForm::kNested}) {
    // layers.0.weight was Muon's: its options are not AdamW's, and what AdamW needs of it is missing.
    AdamW optimizer({{{loaded_to.parameter("norm"), loaded_to.parameter("embed.weight"),
                       loaded_to.parameter("layers.0.weight")},
                      {}}});
    const LoadReport report = optimizer.load_state_dict(saved.state_dict(form));
    EXPECT_EQ(report.missing.size(), 3u);
    EXPECT_GE(report.unexpected.size(), 2u);  // momentum buffers, and in the flattened form options
    EXPECT_EQ(optimizer.options(0).lr, .01);
    EXPECT_EQ(optimizer.steps(), std::vector<int64_t>{1});
    optimizer.step();
    EXPECT_EQ(optimizer.steps(), (std::vector<int64_t>{1, 2}));
  }
  options[2].set("lr", Value(.5));
  saved.set_param_groups(options);
  AdamW optimizer({{{loaded_to.parameter("norm"), loaded_to.parameter("embed.weight")}, {}}});
  EXPECT_THROW(optimizer.load_state_dict(saved.state_dict()), MismatchError);
  EXPECT_EQ(optimizer.options(0).lr, 1e-3);
  EXPECT_TRUE(optimizer.steps().empty());
}

TEST(Optimizer, LoadsCountedParameters) {
  // {"state": {0: {...}, 1: {...}}, "param_groups": [{..., "params": [0, 1]}]}, the step a plain number.
  Model model;
  AdamW optimizer({{{model.parameter("norm"), model.parameter("embed.weight")}, {}}});
  Elements m(DType::kFloat64, {4}, {1, 2, 3, 4}), v(DType::kFloat16, {4}, {5, 6, 7, 8});
  StateDict dict;
  dict.add({"state", int64_t{0}, "step"}, Value(int64_t{7}));
  dict.add({"state", int64_t{0}, "exp_avg"}, plain_tensor(m.view()));
  dict.add({"state", int64_t{0}, "exp_avg_sq"}, plain_tensor(v.view()));
  dict.add({"param_groups", int64_t{0}, "lr"}, Value(.5));
  dict.add({"param_groups", int64_t{0}, "initial_lr"}, Value(.75));
  List params;
  params.items.emplace_back(int64_t{0});
  params.items.emplace_back(int64_t{1});
  dict.add({"param_groups", int64_t{0}, "params"}, Value(std::move(params)));
  const LoadReport report = optimizer.load_state_dict(dict);
  EXPECT_EQ(report.missing, (std::vector<std::string>{"state.embed.weight.step", "state.embed.weight.exp_avg",
                                                      "state.embed.weight.exp_avg_sq"}));
  EXPECT_TRUE(report.unexpected.empty());
  EXPECT_EQ(optimizer.options(0).lr, .5);
  EXPECT_EQ(optimizer.param_groups()[0].find("initial_lr")->text(), "0.75");  // kept for who reads it
  const StateDict again = optimizer.state_dict();
  EXPECT_EQ(again.find("state.norm.exp_avg_sq")->tensor()->memory.dtype, DType::kFloat16);  // the saved dtype
  EXPECT_EQ(again.find("state.norm.step")->tensor()->memory.dtype, DType::kFloat32);
  EXPECT_EQ(optimizer.steps(), std::vector<int64_t>{7});
  optimizer.step();
  EXPECT_EQ(optimizer.steps(), (std::vector<int64_t>{1, 8}));
}

TEST(Optimizer, MomentumOfTheOtherRuleIsConverted) {
  // The same training under both rules: the directions are the same, the buffers differ by a factor.
  Model model, other;
  auto average = model.muon();
  MuonOptions options = other.muon_options();
  options.momentum_rule = MomentumRule::kSum;
  Muon sum({{{other.parameter("layers.0.weight"), other.parameter("layers.1.weight")}, options}});
  for (int i = 0; i < 3; ++i) average->step(), sum.step();
  Muon resumed({{{other.parameter("layers.0.weight"), other.parameter("layers.1.weight")}, options}});
  resumed.load_state_dict(average->state_dict());
  auto values = [](Optimizer& optimizer) {
    const View view = optimizer.state()[0].tensor.memory;
    std::vector<double> found(static_cast<size_t>(numel(view.shape)));
    cast(DType::kFloat64, found.data(), view.dtype, view.data, std::ssize(found));
    return found;
  };
  EXPECT_LT(distance(values(resumed), values(sum)), 1e-6);
  EXPECT_EQ(resumed.options(0).momentum_rule, MomentumRule::kSum);
  // One that says so itself, and one that does not but the caller knows.
  StateDict dict = sum.state_dict();
  EXPECT_EQ(dict.find("param_groups.layers.0.weight.momentum_rule")->value()->text(), R"("sum")");
  average->load_state_dict(dict);
  resumed.load_state_dict(average->state_dict());
  EXPECT_LT(distance(values(resumed), values(sum)), 1e-6);
  StateDict silent;
  silent.add("state.layers.0.weight.momentum_buffer", plain_tensor(sum.state()[0].tensor.memory));
  resumed.load_state_dict(silent, {.momentum_rule = MomentumRule::kSum});
  EXPECT_EQ(values(resumed), values(sum));
}

TEST(Optimizer, SetsGroups) {
  Model model;
  ChainedOptimizer optimizer = model.chained();
  std::vector<ParamGroup> groups = optimizer.param_groups();
  ASSERT_EQ(groups.size(), 3u);
  groups[0].set("lr", Value(.5));
  groups[0].set("adjust_lr_fn", Value(std::string("match_rms_adamw")));
  groups[1].set("lr", Value(int64_t{2}));
  groups[2].set("initial_lr", Value(.25));
  optimizer.set_param_groups(groups);
  EXPECT_EQ(dynamic_cast<Muon&>(optimizer[0]).options(0).lr, .5);
  EXPECT_EQ(dynamic_cast<Muon&>(optimizer[0]).options(0).scale, MuonScale::kMatchRmsAdamW);
  EXPECT_EQ(dynamic_cast<AdamW&>(optimizer[1]).options(0).lr, 2);
  EXPECT_EQ(dynamic_cast<AdamW&>(optimizer[1]).options(1).weight_decay, 0);
  EXPECT_EQ(optimizer.param_groups()[2].find("initial_lr")->text(), "0.25");

  groups.pop_back();
  EXPECT_THROW(optimizer.set_param_groups(groups), InvalidArgumentError);
  groups = optimizer.param_groups();
  groups[0].params.pop_back();
  EXPECT_THROW(optimizer.set_param_groups(groups), InvalidArgumentError);
  for (auto [key, value] : std::vector<std::pair<std::string, Value>>{{"lr", Value(-1.)},
                                                                      {"lr", Value(std::string("x"))},
                                                                      {"betas", Value(Tuple{})},
                                                                      {"amsgrad", Value(1.)}}) {
    groups = optimizer.param_groups();
    groups[0].set("lr", Value(.125));
    groups[1].set(key, value);
    EXPECT_THROW(optimizer.set_param_groups(groups), InvalidArgumentError) << key;
    EXPECT_EQ(dynamic_cast<Muon&>(optimizer[0]).options(0).lr, .5);
  }
}

TEST(Optimizer, MuonsOptionsSurviveAsValues) {
  Model model;
  MuonOptions options = hyperparallel_muon_options();
  options.newton_schulz.norm_factor = 1.02;
  options.scale = MuonScale::kSpectral;
  options.normuon = NorMuonOptions{.9, 1e-8};
  Muon from({{{model.parameter("layers.0.weight")}, options}}),
      to({{{model.parameter("layers.0.weight")}, {}}});
  to.set_param_groups(from.param_groups());
  EXPECT_TRUE(to.options(0) == options);
  from.step();
  EXPECT_EQ(names_of(from.state_dict())[1], "state.layers.0.weight.row_moments");
}

TEST(Optimizer, ChainsNestAndIterate) {
  Model model;
  std::vector<std::unique_ptr<Optimizer>> inner, outer;
  inner.push_back(model.adamw());
  outer.push_back(std::make_unique<ChainedOptimizer>(std::move(inner)));
  outer.push_back(model.muon());
  ChainedOptimizer optimizer(std::move(outer));
  EXPECT_EQ(optimizer.size(), 2u);
  EXPECT_EQ(optimizer.param_groups().size(), 3u);
  size_t seen = 0;
  for (const auto& child : optimizer) seen += child->param_groups().size();
  EXPECT_EQ(seen, 3u);
  optimizer.step();
  Model other;
  ChainedOptimizer flat = other.chained();
  flat.step();
  EXPECT_TRUE(other == model);
  const LoadReport report = flat.load_state_dict(optimizer.state_dict());
  EXPECT_TRUE(report.missing.empty() && report.unexpected.empty());
}

TEST(Optimizer, StepsAreSynchronised) {
  Model model;
  auto one = [&](const char* name) {
    return std::make_unique<AdamW>(std::vector<AdamWGroup>{{{model.parameter(name)}, {}}});
  };
  std::vector<std::unique_ptr<Optimizer>> children;
  children.push_back(one("norm"));
  children.push_back(one("embed.weight"));
  ChainedOptimizer optimizer(std::move(children));
  EXPECT_EQ(optimizer.synchronise_steps(), 0);
  optimizer.allocate_state();
  EXPECT_EQ(optimizer.steps(), std::vector<int64_t>{0});
  optimizer[0].step();
  optimizer[0].step();
  EXPECT_EQ(optimizer.steps(), (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(optimizer.synchronise_steps(), 2);
  EXPECT_EQ(optimizer.steps(), std::vector<int64_t>{2});
  optimizer[1].step();
  EXPECT_THROW(optimizer.synchronise_steps(), MismatchError);
}

TEST(Optimizer, ClashesAreRefused) {
  Model model;
  std::vector<std::unique_ptr<Optimizer>> children;
  children.push_back(model.adamw());
  children.push_back(model.adamw());
  EXPECT_THROW(ChainedOptimizer{std::move(children)}, InvalidArgumentError);
  OptimizerParameter tied = model.parameter("norm");
  tied.name = "other";
  EXPECT_THROW(AdamW({{{model.parameter("norm"), tied}, {}}}), InvalidArgumentError);
  EXPECT_THROW(AdamW({{{model.parameter("norm")}, {}}, {{model.parameter("norm")}, {}}}),
               InvalidArgumentError);
  EXPECT_THROW(Muon({{{model.parameter("norm")}, {}}}), InvalidArgumentError);
  OptimizerParameter gaps = model.parameter("embed.weight");
  gaps.value.shape = {6, 2};
  EXPECT_THROW(AdamW({{{gaps}, {}}}), InvalidArgumentError);
}

TEST(Optimizer, WrongShapesAreRefusedAndChangeNothing) {
  Model model;
  auto optimizer = model.adamw();
  optimizer->step();
  Elements wrong(DType::kFloat32, {5});
  StateDict dict;
  dict.add("state.norm.exp_avg", plain_tensor(wrong.view()));
  dict.add("state.embed.weight.step", Value(int64_t{9}));
  dict.add("param_groups.norm.lr", Value(.75));
  dict.add("param_groups.norm.odd", Value(int64_t{3}));
  const std::vector<ParamGroup> before = optimizer->param_groups();
  EXPECT_THROW(optimizer->load_state_dict(dict), MismatchError);
  EXPECT_EQ(optimizer->steps(), std::vector<int64_t>{1});
  const std::vector<ParamGroup> after = optimizer->param_groups();
  ASSERT_EQ(after.size(), before.size());
  for (size_t g = 0; g < after.size(); ++g) EXPECT_EQ(after[g].options, before[g].options);

  Elements value(DType::kFloat32, {4, 2}), flat(DType::kFloat32, {8});
  EXPECT_THROW(AdamW({{{{"w", value.view(), flat.view(), {}, false, {}}}, {}}}), InvalidArgumentError);
  EXPECT_THROW(AdamW({{{{"w", value.view(), {}, flat.view(), false, {}}}, {}}}), InvalidArgumentError);
}

TEST(Optimizer, TheHookSeesTheUpdateBeforeItIsApplied) {
  Model model;
  auto optimizer = model.muon();
  const Model before = model;
  std::vector<std::string> seen;
  optimizer->set_update_hook([&](const OptimizerParameter& parameter, const MatrixUnit&, const View& update) {
    seen.push_back(parameter.name);
    EXPECT_EQ(model.values.at(parameter.name).bytes, before.values.at(parameter.name).bytes);
    auto* values = reinterpret_cast<float*>(update.data);
    std::fill(values, values + numel(update.shape), 0.f);
  });
  optimizer->step();
  EXPECT_EQ(seen, (std::vector<std::string>{"layers.0.weight", "layers.1.weight"}));
  const std::vector<double> was = before.values.at("layers.0.weight").values(),
                            is = model.values.at("layers.0.weight").values();
  for (size_t i = 0; i < is.size(); ++i) EXPECT_NEAR(is[i], was[i] * (1 - .02 * .1), 1e-6);  // decayed alone
}

TEST(Optimizer, StateDtypes) {
  Model model(DType::kBFloat16);
  auto plain = model.adamw(), wide = model.adamw({.state_dtype = DType::kFloat32}),
       mastered = model.adamw({.masters = true});
  for (AdamW* optimizer : {plain.get(), wide.get(), mastered.get()}) optimizer->allocate_state();
  EXPECT_EQ(plain->state()[1].tensor.memory.dtype, DType::kBFloat16);
  EXPECT_EQ(wide->state()[1].tensor.memory.dtype, DType::kFloat32);
  EXPECT_EQ(mastered->state()[1].tensor.memory.dtype, DType::kFloat32);
  EXPECT_EQ(mastered->state()[3].field, "master_param");
  wide->load_state_dict(plain->state_dict());  // asked for float32, so cast
  EXPECT_EQ(wide->state()[1].tensor.memory.dtype, DType::kFloat32);
}

}  // namespace
}  // namespace spolia
