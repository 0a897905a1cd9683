#include "spolia/mapping/optimizer_state.h"

#include <algorithm>
#include <array>
#include <map>

namespace spolia {
namespace {

// Words that are states wherever they are met behind "state.", even where the parameter itself is not there.
constexpr std::array<std::string_view, 12> kTorchWords = {
    "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "step",         "exp_inf",
    "sum",     "square_avg", "acc_delta",      "grad_avg",        "exp_avg_slow", "master_param"};
constexpr std::array<std::string_view, 8> kPaddleWords = {
    "w_0",        "moment1_0",       "moment2_0",       "moment2_max_0",
    "velocity_0", "beta1_pow_acc_0", "beta2_pow_acc_0", "fp32_master_0"};
constexpr std::array<std::string_view, 3> kScalarWords = {"step", "beta1_pow_acc_0", "beta2_pow_acc_0"};

bool is_one_of(std::string_view word, std::span<const std::string_view> words) {
  return std::ranges::find(words, word) != words.end();
}

struct Found {
  std::string parameter;
  StateSlot slot;
  bool may_be_virtual = false;
};

class Finder {
 public:
  explicit Finder(std::span<const TensorDescription> tensors) : tensors_(tensors) {}

  std::optional<Found> find(std::string_view name) const {
    if (std::optional<Found> found = torch_style(name)) return found;
    return paddle_style(name);
  }

 private:
  bool has(std::string_view name) const { return find_tensor(tensors_, name).has_value(); }

  std::optional<Found> torch_style(std::string_view name) const {
    constexpr std::string_view kState = "state.";
    size_t begin = name.starts_with(kState) ? 0 : name.find(".state.");
    if (begin == std::string_view::npos) return std::nullopt;
    begin += begin == 0 && name.starts_with(kState) ? 0 : 1;
    std::string_view before = name.substr(0, begin + kState.size());
    const std::string_view rest = name.substr(before.size());
    const size_t dot = rest.rfind('.');
    if (dot == std::string_view::npos || dot == 0) return std::nullopt;
    const std::string_view parameter = rest.substr(0, dot), word = rest.substr(dot + 1);

    std::string_view root = before.substr(0, begin);
    for (std::string_view folder : {"optimizer.", "optim."}) {
      if (root.ends_with(folder)) root.remove_suffix(folder.size());
    }
    Found found{{}, {std::string(before), "." + std::string(word), {}, is_one_of(word, kScalarWords)}, false};
    for (std::string_view folder : {"", "model.", "module."}) {
      for (std::string_view base : {root, std::string_view()}) {
        found.slot.stripped = std::string(base) + std::string(folder);
        found.parameter = found.slot.stripped + std::string(parameter);
        if (has(found.parameter)) return found;
      }
    }
    if (!is_one_of(word, kTorchWords)) return std::nullopt;
    // States that are listed by number say nothing of their parameters.
    if (parameter.find_first_not_of("0123456789") == std::string_view::npos) return std::nullopt;
    found.slot.stripped.clear();
    found.parameter = parameter;
    found.may_be_virtual = true;
    return found;
  }

  std::optional<Found> paddle_style(std::string_view name) const {
    for (std::string_view word : kPaddleWords) {
      if (!name.ends_with(word) || name.size() < word.size() + 2) continue;
      const std::string_view base = name.substr(0, name.size() - word.size() - 1);
      const char joint = name[base.size()];
      if (joint != '.' && joint != '_') continue;
      const std::string after(name.substr(base.size()));
      // A state of the parameter's master weights is a state of the parameter.
      if (joint == '_' && has(base)) {
        if (std::optional<Found> through = paddle_style(base); through && has(through->parameter)) {
          through->slot.after += after;
          through->slot.scalar = is_one_of(word, kScalarWords);
          return through;
        }
      }
      // "linear_0.w_0" is what Paddle calls a parameter; it is a state only beside others.
      const bool beside = word != "w_0" || has(std::string(base) + ".moment1_0") ||
                          has(std::string(base) + ".moment2_0") || has(std::string(base) + ".velocity_0");
      const bool known = has(base);
      if (!known && (joint == '_' || !beside)) return std::nullopt;
      return Found{std::string(base), {"", after, "", is_one_of(word, kScalarWords)}, !known};
    }
    return std::nullopt;
  }

  std::span<const TensorDescription> tensors_;
};

}  // namespace

std::string StateSlot::name_for(std::string_view parameter) const {
  if (parameter.starts_with(stripped)) parameter.remove_prefix(stripped.size());
  return before + std::string(parameter) + after;
}

OptimizerStates::OptimizerStates(std::span<const TensorDescription> tensors) {
  const Finder finder(tensors);
  std::vector<std::pair<size_t, Found>> found;
  std::map<std::string, size_t, std::less<>> virtuals;  // name to an index into `found`
  std::map<StateSlot, size_t> slots;
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::optional<Found> one = finder.find(tensors[i].name);
    if (!one) continue;
    slots.emplace(one->slot, 0);
    if (one->may_be_virtual) {
      const auto [known, fresh] = virtuals.try_emplace(one->parameter, i);
      // The shape is that of a state that has the parameter's.
      if (!fresh && tensors[known->second].shape.size() < tensors[i].shape.size()) known->second = i;
    }
    found.emplace_back(i, std::move(*one));
  }
  for (auto& [slot, index] : slots) {
    index = slots_.size();
    slots_.push_back(slot);
  }
  for (const auto& [name, shaped_like] : virtuals) {
    virtual_.push_back(
        {name, tensors[shaped_like].dtype, tensors[shaped_like].shape, tensors[shaped_like].parts});
  }
  for (const auto& [tensor, one] : found) {
    const std::optional<size_t> real = find_tensor(tensors, one.parameter);
    const size_t parameter = real ? *real : tensors.size() + *find_tensor(virtual_, one.parameter);
    entries_.push_back({parameter, slots.at(one.slot), tensor});
  }
  std::ranges::sort(entries_);
  entry_of_.assign(tensors.size(), entries_.size());
  for (size_t e = 0; e < entries_.size(); ++e) entry_of_[entries_[e].tensor] = e;
}

const StateEntry* OptimizerStates::owner(size_t tensor) const {
  return tensor < entry_of_.size() && entry_of_[tensor] < entries_.size() ? &entries_[entry_of_[tensor]]
                                                                          : nullptr;
}

std::span<const StateEntry> OptimizerStates::states_of(size_t parameter) const {
  const auto range = std::ranges::equal_range(entries_, parameter, {}, &StateEntry::parameter);
  return {range.begin(), range.end()};
}

}  // namespace spolia
