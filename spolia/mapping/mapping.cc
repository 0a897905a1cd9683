#include "spolia/mapping/mapping.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/mapping/macros.h"
#include "spolia/mapping/optimizer_state.h"
#include "spolia/mapping/reverse.h"
#include "spolia/mapping/runner.h"
#include "spolia/mapping/suggest.h"

namespace spolia {
namespace {

void require_sorted(std::span<const TensorDescription> tensors, std::string_view what) {
  const auto wrong = std::ranges::adjacent_find(
      tensors, [](const TensorDescription& a, const TensorDescription& b) { return a.name >= b.name; });
  if (wrong != tensors.end()) {
    throw InvalidArgumentError("the {} tensors are not in order of their names, or {} is there twice", what,
                               quote(wrong->name));
  }
}

NameList names_of(std::span<const TensorDescription> tensors) {
  std::vector<std::string_view> names;
  for (const TensorDescription& tensor : tensors) names.push_back(tensor.name);
  return NameList(std::move(names));
}

/// One of the two sides, with what the names of its tensors tell.
struct Side {
  explicit Side(std::span<const TensorDescription> listed) : tensors(listed), states(listed) {}

  NameList names() const {
    std::vector<std::string_view> all;
    for (const TensorDescription& tensor : tensors) all.push_back(tensor.name);
    for (const TensorDescription& tensor : states.virtual_parameters()) all.push_back(tensor.name);
    return NameList(std::move(all));
  }
  int64_t parts(std::string_view name) const {
    if (const auto found = find_tensor(tensors, name)) return tensors[*found].parts;
    const auto found = find_tensor(states.virtual_parameters(), name);
    return found ? states.virtual_parameters()[*found].parts : 1;
  }

  std::span<const TensorDescription> tensors;
  OptimizerStates states;
};

/// The mapping with the prefix before every name.
Mapping with_prefix(Mapping mapping, std::string_view prefix) {
  for (Statement& statement : mapping.statements) {
    for (std::vector<Operand>* side : {&statement.left, &statement.right}) {
      for (Operand& operand : *side) {
        if (!operand.is_nothing()) operand.name.insert(0, prefix);
      }
    }
  }
  return mapping;
}

Program expanded(const Mapping& mapping, const Side& source, const std::optional<Side>& target,
                 std::span<const TensorDescription> base, bool backwards) {
  MacroContext context;
  context.backwards = backwards;
  context.base = names_of(base);
  auto source_parts = [&](std::string_view name) { return source.parts(name); };
  auto target_parts = [&](std::string_view name) { return target ? target->parts(name) : 1; };
  NameList targets = target ? target->names() : NameList();
  context.left = backwards ? std::move(targets) : source.names();
  context.right = backwards ? source.names() : std::move(targets);
  context.left_known = !backwards || target.has_value();
  context.right_known = backwards || target.has_value();
  context.left_parts = backwards ? std::function<int64_t(std::string_view)>(target_parts) : source_parts;
  context.right_parts = backwards ? std::function<int64_t(std::string_view)>(source_parts) : target_parts;
  return expand_macros(mapping, context);
}

class Compiler {
 public:
  Compiler(const MappingSides& sides, const MappingOptions& options)
      : sides_(sides),
        options_(options),
        source_(sides.source),
        target_(sides.target ? std::optional<Side>(std::in_place, *sides.target) : std::nullopt),
        runner_(source_.tensors, source_.states.virtual_parameters(), options.most_pieces) {}

  CompiledMapping run(const Mapping& mapping) {
    const bool backwards = mapping.reverse != options_.reverse;
    program_ = expanded(mapping, source_, target_, sides_.base, backwards);
    if (backwards) program_ = reversed_program(program_, source_.names(), forward_facts());
    runner_.run(program_);
    result_.notes = std::move(program_.notes);
    result_.notes.insert(result_.notes.end(), runner_.notes().begin(), runner_.notes().end());
    used_.assign(source_.tensors.size(), false);
    if (target_) {
      for (const TensorDescription& wanted : target_->tensors) make_wanted(wanted);
    } else {
      make_all();
    }
    finish();
    return std::move(result_);
  }

 private:
  /// What the program's tensors are when it runs forwards, from the tensors that are to be made.
  std::optional<ForwardFacts> forward_facts() const {
    if (!target_) return std::nullopt;
    Runner forward(target_->tensors, target_->states.virtual_parameters(), options_.most_pieces);
    forward.run(program_);
    return ForwardFacts{forward.part_sizes(), forward.moved_dtypes()};
  }

  // ---- Which tensors there are in the end ----

  bool is_virtual(size_t source) const { return source >= source_.tensors.size(); }

  void make_all() {
    for (const Outcome& outcome : runner_.outcomes()) {
      if (!outcome.is_output()) continue;
      if (outcome.kind == Outcome::kNew) {
        add_new(outcome, nullptr);
      } else {
        if (!is_made_of_virtual(*outcome.tensor)) add_tensor(outcome.name, outcome.tensor, outcome.at);
        add_states(outcome);
      }
    }
    for (size_t i = 0; i < source_.tensors.size(); ++i) {
      if (passes_through(i)) add_source(i);
    }
  }

  /// Whether nothing mentions a source, nor the parameter that it is a state of.
  bool passes_through(size_t source) const {
    const std::string& name = source_.tensors[source].name;
    if (runner_.find(name) != nullptr) return false;
    const StateEntry* state = source_.states.owner(source);
    return state == nullptr || runner_.find(runner_.source(state->parameter).name) == nullptr;
  }

  bool is_made_of_virtual(const Assembly& tensor) const {
    return std::ranges::any_of(tensor.pieces, [&](const Piece& piece) { return is_virtual(piece.source); });
  }

  void make_wanted(const TensorDescription& wanted) {
    const Outcome* outcome = runner_.find(wanted.name);
    if (outcome != nullptr && outcome->kind == Outcome::kNew) {
      add_new(*outcome, &wanted);
    } else if (outcome != nullptr && outcome->kind == Outcome::kTensor &&
               (outcome->written || outcome->kept)) {
      check_wanted(wanted, *outcome->tensor, outcome->at);
      add_tensor(wanted.name, outcome->tensor, outcome->at);
    } else if (outcome != nullptr && outcome->kind == Outcome::kDropped) {
      miss(wanted.name, fmt::format("it is gone since line {}", outcome->at.line));
    } else if (!make_wanted_state(wanted)) {
      make_wanted_source(wanted);
    }
  }

  void make_wanted_source(const TensorDescription& wanted) {
    if (const std::optional<size_t> source = find_tensor(source_.tensors, wanted.name)) {
      const TensorDescription& tensor = source_.tensors[*source];
      if (tensor.shape != wanted.shape || tensor.dtype != wanted.dtype) {
        const AssemblyPtr whole = whole_source(static_cast<uint32_t>(*source), tensor.dtype, tensor.shape);
        check_wanted(wanted, *whole, {});
      }
      add_source(*source);
      return;
    }
    miss(wanted.name, "no statement makes it, and the source has no tensor of this name");
  }

  void miss(const std::string& name, std::string_view why) {
    if (options_.allow_missing) {
      result_.missing.push_back(name);
      return;
    }
    std::vector<std::string_view> names;
    for (const TensorDescription& tensor : source_.tensors) names.push_back(tensor.name);
    for (const Outcome& outcome : runner_.outcomes()) {
      if (outcome.written) names.push_back(outcome.name);
    }
    throw InvalidArgumentError("the target's tensor {} is missing: {}{}", quote(name), why,
                               did_you_mean(name, names));
  }

  static void check_wanted(const TensorDescription& wanted, const Assembly& made, Position at,
                           std::string_view whose = "target") {
    if (made.shape != wanted.shape) {
      const Dims turned(std::reverse_iterator(made.shape.end()), std::reverse_iterator(made.shape.begin()));
      fail_at(at, "{} would be of shape {}, and the {}'s is {}{}", quote(wanted.name), list_text(made.shape),
              whose, list_text(wanted.shape),
              turned == wanted.shape ? "; is a transpose missing (NAME^T)?" : "");
    }
    if (made.dtype != wanted.dtype) {
      fail_at(at, "{} would be {}, and the {}'s is {}; write dtype='{}' in its statement", quote(wanted.name),
              name_of(made.dtype), whose, name_of(wanted.dtype), name_of(wanted.dtype));
    }
  }

  // ---- Optimizer states ----

  /// The states of whatever parameters a tensor is made of, as its own.
  void add_states(const Outcome& outcome) {
    std::set<size_t> slots;
    for (const Piece& piece : outcome.tensor->pieces) {
      for (const StateEntry& state : source_.states.states_of(piece.source)) slots.insert(state.slot);
    }
    for (size_t slot : slots) {
      const std::string name = source_.states.slots()[slot].name_for(outcome.name);
      const Outcome* mentioned = runner_.find(name);
      if (mentioned != nullptr && (mentioned->written || mentioned->kept)) continue;
      if (const AssemblyPtr state = state_of(outcome, slot)) add_tensor(name, state, outcome.at);
    }
  }

  /// Where the wanted tensor is the state of a parameter that the mapping makes, makes it.
  bool make_wanted_state(const TensorDescription& wanted) {
    const size_t index = static_cast<size_t>(&wanted - target_->tensors.data());
    const StateEntry* entry = target_->states.owner(index);
    if (entry == nullptr) return false;
    const std::string& parameter =
        entry->parameter < target_->tensors.size()
            ? target_->tensors[entry->parameter].name
            : target_->states.virtual_parameters()[entry->parameter - target_->tensors.size()].name;
    const Outcome* outcome = runner_.find(parameter);
    if (outcome == nullptr) return false;
    const StateSlot& slot = target_->states.slots()[entry->slot];
    if (outcome->kind == Outcome::kNew) {
      add_initial(wanted, outcome->at);
      return true;
    }
    if (outcome->kind != Outcome::kTensor || !(outcome->written || outcome->kept)) return false;
    const std::vector<StateSlot>& slots = source_.states.slots();
    for (size_t s = 0; s < slots.size(); ++s) {
      if (slots[s].before != slot.before || slots[s].after != slot.after) continue;
      AssemblyPtr state = state_of(*outcome, s);
      if (state == nullptr) continue;
      const bool castable =
          info(state->dtype).kind == DTypeKind::kFloat && info(wanted.dtype).kind == DTypeKind::kFloat;
      PieceBudget budget(options_.most_pieces);
      if (state->dtype != wanted.dtype && castable) state = cast_to(*state, wanted.dtype, budget);
      check_wanted(wanted, *state, outcome->at);
      add_tensor(wanted.name, state, outcome->at);
      return true;
    }
    return false;
  }

  const StateEntry* state_in(size_t parameter, size_t slot) const {
    for (const StateEntry& state : source_.states.states_of(parameter)) {
      if (state.slot == slot) return &state;
    }
    return nullptr;
  }

  /// The state of a made tensor: the same pieces, of its parameters' states. nullptr where the mapping itself
  /// takes care of one of them, or where none of the parameters has it.
  AssemblyPtr state_of(const Outcome& outcome, size_t slot) {
    const Assembly& tensor = *outcome.tensor;
    const std::string name = quote(source_.states.slots()[slot].name_for(outcome.name));
    const StateEntry* first = nullptr;
    const std::string* lacking = nullptr;
    bool like_parameters = true, single_numbers = true;
    std::set<size_t> parameters;
    std::map<size_t, size_t> state_for;
    for (const Piece& piece : tensor.pieces) {
      if (!parameters.insert(piece.source).second) continue;
      const StateEntry* state = state_in(piece.source, slot);
      if (state == nullptr) {
        lacking = &runner_.source(piece.source).name;
        continue;
      }
      const TensorDescription& from = source_.tensors[state->tensor];
      if (const Outcome* mentioned = runner_.find(from.name); mentioned != nullptr) return nullptr;
      if (first == nullptr) first = state;
      state_for[piece.source] = state->tensor;
      like_parameters = like_parameters && from.shape == runner_.source(piece.source).shape;
      single_numbers = single_numbers && numel(from.shape) == 1;
    }
    if (first == nullptr) return nullptr;
    const TensorDescription& like = source_.tensors[first->tensor];
    if (lacking != nullptr) {
      fail_at(outcome.at, "the optimizer's {} cannot be made: there is {}, and {} has no such state; drop it",
              name, quote(like.name), quote(*lacking));
    }
    const bool scalar = source_.states.slots()[slot].scalar || (!like_parameters && single_numbers);
    if (scalar && single_numbers) {
      if (parameters.size() > 1 && noted_slots_.insert(slot).second) {
        result_.notes.push_back(
            fmt::format("line {}: {} is made of several parameters; the optimizer's {} is that of the first, "
                        "here and wherever it "
                        "is so",
                        outcome.at.line, quote(outcome.name), name));
      }
      return whole_source(static_cast<uint32_t>(first->tensor), like.dtype, like.shape);
    }
    const bool renamed =
        parameters.size() == 1 && tensor.pieces.size() == 1 && is_whole(tensor.pieces[0], tensor.shape);
    if (renamed) return whole_source(static_cast<uint32_t>(first->tensor), like.dtype, like.shape);
    if (!like_parameters) {
      fail_at(outcome.at,
              "the optimizer's {} cannot be made: {} is of shape {}, its parameter is not; drop it", name,
              quote(like.name), list_text(like.shape));
    }
    auto made = std::make_shared<Assembly>(tensor);
    made->dtype = like.dtype;
    for (Piece& piece : made->pieces) {
      piece.source = static_cast<uint32_t>(state_for.at(piece.source));
      const TensorDescription& from = source_.tensors[piece.source];
      if (from.dtype != like.dtype) {
        fail_at(outcome.at, "the optimizer's {} cannot be made: {} is {} and {} is {}", name,
                quote(like.name), name_of(like.dtype), quote(from.name), name_of(from.dtype));
      }
      piece.casts = {like.dtype};
    }
    return made;
  }

  // ---- The result ----

  bool is_whole(const Piece& piece, std::span<const int64_t> shape) const {
    const Region& region = piece.region;
    for (size_t d = 0; d < region.permute.size(); ++d) {
      if (region.permute[d] != static_cast<int64_t>(d)) return false;
    }
    return region.source == whole(runner_.source(piece.source).shape) && region.target == whole(shape) &&
           region.source == region.target;
  }

  MappedTensor& add(std::string name, DType dtype, const Dims& shape, Position at) {
    MappedTensor& made = result_.targets.emplace_back();
    made.name = std::move(name);
    made.dtype = dtype;
    made.shape = shape;
    made.at = at;
    return made;
  }

  void add_source(size_t source) {
    const TensorDescription& tensor = source_.tensors[source];
    result_.copies.push_back(copy_whole(source, result_.targets.size()));
    add(tensor.name, tensor.dtype, tensor.shape, {});
    used_[source] = true;
  }

  void add_tensor(const std::string& name, const AssemblyPtr& tensor, Position at) {
    std::vector<Piece> pieces = tensor->pieces;
    merge_pieces(pieces);
    const size_t target = result_.targets.size();
    for (Piece& piece : pieces) {
      const std::string& from = runner_.source(piece.source).name;
      if (is_virtual(piece.source)) {
        fail_at(at, "{} is to be made of {}, of which only the optimizer's states are there", quote(name),
                quote(from));
      }
      if (piece.casts.size() > 2) {
        std::string chain;
        for (DType dtype : piece.casts) chain += (chain.empty() ? "" : " -> ") + std::string(name_of(dtype));
        fail_at(
            at,
            "{} would be cast {} -> ..., which rounds {} more than once and so is no single cast; leave out "
            "the dtypes between, or do it in two conversions",
            quote(name), chain, quote(from));
      }
      used_[piece.source] = true;
      if (is_whole(piece, tensor->shape)) {
        result_.copies.push_back(copy_whole(piece.source, target));
      } else {
        Region& region = piece.region;
        bool identity = region.source.ndim() == region.target.ndim();
        for (size_t d = 0; d < region.permute.size(); ++d) {
          identity = identity && region.permute[d] == static_cast<int64_t>(d);
        }
        if (identity) region.permute.clear();
        result_.copies.push_back(copy_region(piece.source, target, std::move(region)));
      }
    }
    add(name, tensor->dtype, tensor->shape, at);
  }

  const TensorDescription* of_base(const std::string& name) const {
    const std::optional<size_t> found = find_tensor(sides_.base, name);
    return found ? &sides_.base[*found] : nullptr;
  }

  void add_initial(const TensorDescription& wanted, Position at) {
    if (const TensorDescription* base = of_base(wanted.name)) {
      Assembly described;
      described.shape = wanted.shape;
      described.dtype = wanted.dtype;
      check_wanted(*base, described, at, "base");
    }
    add(wanted.name, wanted.dtype, wanted.shape, at).origin = Origin::kInitial;
  }

  void add_new(const Outcome& outcome, const TensorDescription* wanted) {
    const ProgramStep& step = *outcome.made_new;
    const TensorDescription* base = of_base(outcome.name);
    const TensorDescription* like = wanted != nullptr ? wanted : base;
    if (!step.fill && like == nullptr) {
      fail_at(outcome.at,
              "{} is new: write its shape, dtype and fill, as in _ -> {}, shape='[2, 3]', "
              "dtype='float32', fill=0, or give a base that has it",
              quote(outcome.name), outcome.name);
    }
    if ((!step.shape || !step.dtype) && like == nullptr) {
      fail_at(outcome.at, "{} is new: its {} is missing, as in shape='[2, 3]', dtype='float32'",
              quote(outcome.name), step.shape ? "dtype" : "shape");
    }
    Assembly described;
    described.shape = step.shape ? *step.shape : like->shape;
    described.dtype = step.dtype ? *step.dtype : like->dtype;
    byte_size(described.dtype, described.shape);  // throws where it overflows
    if (wanted != nullptr) check_wanted(*wanted, described, outcome.at);
    if (base != nullptr) check_wanted(*base, described, outcome.at, "base");
    MappedTensor& made = add(outcome.name, described.dtype, described.shape, outcome.at);
    made.origin = step.fill ? Origin::kFill : Origin::kInitial;
    made.fill = step.fill.value_or(0);
  }

  /// Puts the targets, and their copies with them, in order of their names; lists what nothing uses.
  void finish() {
    std::vector<size_t> order(result_.targets.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::ranges::sort(order, {}, [&](size_t i) -> const std::string& { return result_.targets[i].name; });
    std::vector<size_t> first(order.size() + 1, 0);
    for (const RegionCopy& copy : result_.copies) ++first[copy.target + 1];
    for (size_t i = 0; i < order.size(); ++i) first[i + 1] += first[i];
    std::vector<MappedTensor> targets;
    std::vector<RegionCopy> copies;
    result_.first_copy = {0};
    for (size_t i : order) {
      for (size_t c = first[i]; c < first[i + 1]; ++c) {
        copies.push_back(std::move(result_.copies[c]));
        copies.back().target = targets.size();
      }
      targets.push_back(std::move(result_.targets[i]));
      result_.first_copy.push_back(copies.size());
    }
    result_.targets = std::move(targets);
    result_.copies = std::move(copies);
    for (size_t i = 0; i < source_.tensors.size(); ++i) {
      if (used_[i] || is_read_without_elements(i)) continue;
      (is_dropped(i) ? result_.dropped : result_.unused).push_back(i);
    }
  }

  /// A tensor without elements is used where a statement reads it: no piece of anything tells.
  bool is_read_without_elements(size_t source) const {
    const TensorDescription& tensor = source_.tensors[source];
    const Outcome* outcome = numel(tensor.shape) == 0 ? runner_.find(tensor.name) : nullptr;
    return outcome != nullptr && outcome->kind == Outcome::kTensor;
  }

  bool is_dropped(size_t source) const {
    const Outcome* outcome = runner_.find(source_.tensors[source].name);
    if (const StateEntry* state = source_.states.owner(source); state != nullptr && outcome == nullptr) {
      outcome = runner_.find(runner_.source(state->parameter).name);
    }
    return outcome != nullptr && outcome->kind == Outcome::kDropped;
  }

  const MappingSides& sides_;
  const MappingOptions& options_;
  Side source_;
  std::optional<Side> target_;
  Program program_;
  Runner runner_;
  CompiledMapping result_;
  std::vector<bool> used_;  // of the sources
  std::set<size_t> noted_slots_;
};

/// Where the base lies among the sources: compiled as if it did not, then what is new is copied from there.
CompiledMapping compile_with_base(const Mapping& mapping, const MappingSides& sides, MappingOptions options) {
  const std::string prefix = std::exchange(options.base_prefix, {});
  std::vector<TensorDescription> sources, base;
  std::vector<size_t> numbers, base_numbers;  // in sides.source
  for (size_t i = 0; i < sides.source.size(); ++i) {
    const bool of_base = sides.source[i].name.starts_with(prefix);
    (of_base ? base : sources).push_back(sides.source[i]);
    (of_base ? base_numbers : numbers).push_back(i);
    if (of_base) base.back().name.erase(0, prefix.size());
  }
  CompiledMapping made = compile_mapping(mapping, {sources, sides.target, base}, options);
  for (std::vector<size_t>* listed : {&made.unused, &made.dropped}) {
    for (size_t& source : *listed) source = numbers[source];
  }
  std::vector<RegionCopy> copies;
  const std::vector<size_t> first_copy = std::exchange(made.first_copy, {0});
  for (size_t t = 0; t < made.targets.size(); ++t) {
    MappedTensor& target = made.targets[t];
    for (size_t c = first_copy[t]; c < first_copy[t + 1]; ++c) {
      copies.push_back(std::move(made.copies[c]));
      copies.back().source = numbers[copies.back().source];
    }
    const std::optional<size_t> new_from =
        target.origin == Origin::kInitial ? find_tensor(base, target.name) : std::nullopt;
    if (new_from) {
      copies.push_back(copy_whole(base_numbers[*new_from], t));
      target.origin = Origin::kSources;
    }
    made.first_copy.push_back(copies.size());
  }
  made.copies = std::move(copies);
  return made;
}

}  // namespace

const MappedTensor* CompiledMapping::find(std::string_view name) const {
  const auto found = std::ranges::lower_bound(targets, name, {},
                                              [](const MappedTensor& t) { return std::string_view(t.name); });
  return found != targets.end() && found->name == name ? &*found : nullptr;
}

CompiledMapping compile_mapping(const Mapping& mapping, const MappingSides& sides,
                                const MappingOptions& options) {
  if (!options.base_prefix.empty()) return compile_with_base(mapping, sides, options);
  require_sorted(sides.source, "source's");
  if (sides.target) require_sorted(*sides.target, "target's");
  require_sorted(sides.base, "base's");
  if (options.prefix.empty()) return Compiler(sides, options).run(mapping);
  return Compiler(sides, options).run(with_prefix(mapping, options.prefix));
}

std::vector<SourceRegion> find_sources(const CompiledMapping& mapping, const MappingSides& sides,
                                       size_t target, const Box& box, CopyIndices* indices) {
  std::vector<SourceRegion> found;
  const MappedTensor& tensor = mapping.targets[target];
  if (!fits(box.offsets, box.sizes, tensor.shape)) {
    throw InvalidArgumentError("the box {} does not lie in {} of shape {}", box_text(box), quote(tensor.name),
                               list_text(tensor.shape));
  }
  auto add = [&](const RegionCopy& copy) {
    const Region all =
        copy.region ? *copy.region : Region{whole(sides.source[copy.source].shape), whole(tensor.shape), {}};
    const Box inside = intersect(all.target, box);
    if (!inside.empty()) found.push_back({copy.source, narrowed(all, inside)});
  };
  if (indices != nullptr) {
    for (size_t c : indices->overlapping(target, box)) add(mapping.copies[c]);
  } else {
    for (const RegionCopy& copy : mapping.copies_of(target)) add(copy);
  }
  return found;
}

}  // namespace spolia
