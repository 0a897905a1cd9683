#include "spolia/mapping/ids.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/text.h"
#include "spolia/mapping/suggest.h"

namespace spolia {
namespace {

// Ids in the order in which they vary, the slowest first. The longest comes before what it begins with.
enum Id : size_t { kExpert, kLayerOffset, kLayer };
constexpr std::array<std::string_view, 3> kIds = {"$EXPERT_ID", "$LAYER_ID_OFFSET", "$LAYER_ID"};
using IdSet = std::array<bool, 3>;
using IdValues = std::array<int64_t, 3>;

/// A pattern's text, cut at its ids.
struct Pattern {
  std::vector<std::string_view> texts;  // one more than there are ids
  std::vector<size_t> ids;
  IdSet has{};
};

Pattern cut_pattern(std::string_view name, Position at) {
  Pattern pattern;
  size_t begin = 0;
  for (size_t i = name.find('$'); i != std::string_view::npos; i = name.find('$', i)) {
    const auto id = std::ranges::find_if(kIds, [&](auto text) { return name.substr(i).starts_with(text); });
    if (id == kIds.end()) {
      fail_at(at,
              "{} in {} is none of $LAYER_ID, $EXPERT_ID and $LAYER_ID_OFFSET; put the name in quotes if "
              "it is to stand for itself",
              quote(name.substr(i)), quote(name));
    }
    pattern.texts.push_back(name.substr(begin, i - begin));
    pattern.ids.push_back(static_cast<size_t>(id - kIds.begin()));
    pattern.has[pattern.ids.back()] = true;
    begin = i += id->size();
  }
  pattern.texts.push_back(name.substr(begin));
  return pattern;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The number at the start of `text`, which is cut off; as it would be written, so that one name has one
/// number.
std::optional<int64_t> take_number(std::string_view& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const size_t length = static_cast<size_t>(end - text.data());
  if (error != std::errc() || !is_digit(text[0]) || (length > 1 && text[0] == '0')) return std::nullopt;
  if (value > std::numeric_limits<int32_t>::max()) return std::nullopt;  // there is room for one more
  text.remove_prefix(length);
  return value;
}

/// Takes `text` off the start of `name`, where each * of it is a number; false where it is not there.
bool take_text(std::string_view text, std::string_view& name) {
  for (size_t star = text.find('*'); star != std::string_view::npos; star = text.find('*')) {
    if (!name.starts_with(text.substr(0, star))) return false;
    name.remove_prefix(star);
    const size_t digits = std::min(name.find_first_not_of("0123456789"), name.size());
    if (digits == 0) return false;
    name.remove_prefix(digits);
    text.remove_prefix(star + 1);
  }
  if (!name.starts_with(text)) return false;
  name.remove_prefix(text.size());
  return true;
}

/// The ids with which the pattern is `name`.
std::optional<IdValues> match(const Pattern& pattern, std::string_view name) {
  IdValues values{};
  IdSet seen{};
  if (!take_text(pattern.texts[0], name)) return std::nullopt;
  for (size_t i = 0; i < pattern.ids.size(); ++i) {
    const std::optional<int64_t> value = name.empty() ? std::nullopt : take_number(name);
    const size_t id = pattern.ids[i];
    if (!value || (seen[id] && values[id] != *value)) return std::nullopt;
    seen[id] = true;
    values[id] = *value;
    if (!take_text(pattern.texts[i + 1], name)) return std::nullopt;
  }
  return name.empty() ? std::optional(values) : std::nullopt;
}

std::string with_ids(const Pattern& pattern, const IdValues& values) {
  std::string name(pattern.texts[0]);
  for (size_t i = 0; i < pattern.ids.size(); ++i) {
    name += std::to_string(values[pattern.ids[i]]);
    name += pattern.texts[i + 1];
  }
  return name;
}

/// Calls f(operand, on the left?) for both sides.
template <class Statement, class F>
void for_each_operand(Statement& statement, F f) {
  for (auto& operand : statement.left) f(operand, true);
  for (auto& operand : statement.right) f(operand, false);
}

struct NumberedName {
  std::string_view number;  // without leading zeros
  std::string_view name;
};

/// Calls f(name) for the names that begin with `prefix`, in order.
template <class F>
void for_each_with_prefix(const WrittenNames& names, std::string_view prefix, F f) {
  for (auto it = names.lower_bound(prefix); it != names.end() && it->starts_with(prefix); ++it) f(*it);
}
template <class F>
void for_each_with_prefix(const NameList& names, std::string_view prefix, F f) {
  for (std::string_view name : names.with_prefix(prefix)) f(name);
}

/// The names that are the pattern with a number for its star, by that number.
template <class Names>
std::vector<std::string> names_with_numbers(std::string_view pattern, const Names& names) {
  const size_t star = pattern.find('*');
  const std::string_view prefix = pattern.substr(0, star), suffix = pattern.substr(star + 1);
  std::vector<NumberedName> found;
  for_each_with_prefix(names, prefix, [&](std::string_view name) {
    if (name.size() <= prefix.size() + suffix.size() || !name.ends_with(suffix)) return;
    std::string_view number = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
    if (!std::ranges::all_of(number, is_digit)) return;
    number.remove_prefix(std::min(number.find_first_not_of('0'), number.size() - 1));
    found.push_back({number, name});
  });
  std::ranges::sort(found, {},
                    [](const NumberedName& n) { return std::tuple(n.number.size(), n.number, n.name); });
  std::vector<std::string> sorted;
  for (const NumberedName& one : found) sorted.emplace_back(one.name);
  return sorted;
}

std::vector<Operand> expand_star(const Operand& operand, const MacroContext& context,
                                 const WrittenNames& written, bool left) {
  if (operand.name.find('*', operand.name.find('*') + 1) != std::string::npos) {
    fail_at(operand.at, "{} has more than one *; use $LAYER_ID or $EXPERT_ID for the others",
            quote(operand.name));
  }
  std::vector<std::string> names = names_with_numbers(operand.name, left ? context.left : context.right);
  if (names.empty() && left) names = names_with_numbers(operand.name, written);
  if (names.empty()) {
    const std::string_view side = left ? "left" : "right";
    if (!(left ? context.left_known : context.right_known)) {
      fail_at(operand.at,
              "the tensors on the {}-hand side are not known, so that {} can match none of them; write "
              "the names, as a range [0:8] or with $EXPERT_ID",
              side, quote(operand.name));
    }
    fail_at(operand.at, "no tensor on the {}-hand side matches {}", side, quote(operand.name));
  }
  std::vector<Operand> operands;
  for (std::string& name : names)
    operands.push_back({std::move(name), true, operand.transposed, {}, operand.at});
  return operands;
}

/// What stands between a name and the numbers of its range: name[0:2] is name_0 and name_1, name.[0:2] is
/// name.0 and name.1.
std::string_view joint(const Operand& operand) { return operand.name.ends_with('.') ? "" : "_"; }

std::vector<Operand> expand_range(const Operand& operand) {
  const NameRange& range = *operand.range;
  std::vector<Operand> operands;
  for (int64_t i = range.begin; i < range.end; ++i) {
    operands.push_back({fmt::format("{}{}{}{}", operand.name, joint(operand), i, range.suffix),
                        operand.literal,
                        operand.transposed,
                        {},
                        operand.at});
  }
  return operands;
}

/// The operand's name as it was written.
std::string written_name(const Operand& operand) {
  if (!operand.range) return operand.name;
  return fmt::format("{}[{}:{}]{}", operand.name, operand.range->begin, operand.range->end,
                     operand.range->suffix);
}

template <class Expand>
void expand_side(std::vector<Operand>& side, Expand expand) {
  std::vector<Operand> operands;
  for (Operand& operand : side) {
    std::vector<Operand> several = expand(operand);
    if (several.empty()) {
      operands.push_back(std::move(operand));
    } else {
      std::ranges::move(several, std::back_inserter(operands));
    }
    if (std::ssize(operands) > kMostStatements) {
      fail_at(operands.back().at, "the statement names more than {} tensors", kMostStatements);
    }
  }
  side = std::move(operands);
}

}  // namespace

std::vector<Statement> expand_ids(const Statement& statement, const MacroContext& context,
                                  const WrittenNames& written, std::vector<std::string>& notes) {
  std::vector<Pattern> patterns;                    // of all operands
  const Operand* first_of[2] = {nullptr, nullptr};  // the first with ids on the right, and on the left
  for_each_operand(statement, [&](const Operand& operand, bool left) {
    patterns.push_back(operand.literal ? Pattern{{operand.name}, {}, {}}
                                       : cut_pattern(operand.name, operand.at));
    if (!patterns.back().ids.empty() && first_of[left] == nullptr) first_of[left] = &operand;
  });
  if (first_of[0] == nullptr && first_of[1] == nullptr) return {statement};
  const bool asked_left = !context.backwards;
  const Operand* first = first_of[asked_left] != nullptr ? first_of[asked_left] : first_of[!asked_left];
  const IdSet ids = cut_pattern(first->name, first->at).has;
  if (ids[kLayer] && ids[kLayerOffset]) {
    fail_at(first->at, "$LAYER_ID and $LAYER_ID_OFFSET do not go together in one statement");
  }
  size_t n = 0;
  for_each_operand(statement, [&](const Operand& operand, bool left) {
    const Pattern& pattern = patterns[n++];
    for (size_t id = 0; id < ids.size(); ++id) {
      if (pattern.has[id] && !ids[id]) {
        fail_at(operand.at, "{} has {}, which {} lacks", quote(operand.name), kIds[id], quote(first->name));
      }
      if (ids[id] && !pattern.has[id] && left != asked_left && !operand.is_nothing()) {
        fail_at(operand.at, "{} lacks {}, so that it would be written once for every id", quote(operand.name),
                kIds[id]);
      }
    }
  });

  std::array<std::set<int64_t>, 3> values;
  auto collect = [&](const Operand* operand, bool left, const auto& names) {
    if (operand == nullptr || std::ranges::any_of(values, [](const auto& v) { return !v.empty(); })) return;
    // The numbers of a range are, as those of a star, any.
    std::string text = operand->name;
    if (operand->range) text += fmt::format("{}*{}", joint(*operand), operand->range->suffix);
    const Pattern pattern = cut_pattern(text, operand->at);
    if (pattern.has != ids) return;
    const std::string_view prefix = pattern.texts[0].substr(0, pattern.texts[0].find('*'));
    for_each_with_prefix(names, prefix, [&](std::string_view name) {
      const std::optional<IdValues> matched = match(pattern, name);
      for (size_t id = 0; matched && id < ids.size(); ++id) {
        if (ids[id]) values[id].insert((*matched)[id] + (id == kLayerOffset && !left ? 1 : 0));
      }
    });
  };
  if (context.backwards) collect(first_of[0], false, context.right);
  collect(first_of[1], true, context.left);
  collect(first_of[1], true, written);
  if (first_of[1] == nullptr && !context.backwards) {  // _ -> B
    collect(first_of[0], false, context.left);
    collect(first_of[0], false, context.right);
    collect(first_of[0], false, context.base);
  }
  for (size_t id = 0; id < ids.size(); ++id) {
    if (ids[id] && values[id].empty()) {
      notes.push_back(fmt::format("line {}: no tensor matches {}; the statement does nothing",
                                  statement.at.line, quote(written_name(*first))));
      return {};
    }
    if (!ids[id]) values[id].insert(0);
  }

  std::vector<Statement> statements;
  for (int64_t expert : values[kExpert]) {
    for (int64_t offset : values[kLayerOffset]) {
      for (int64_t layer : values[kLayer]) {
        Statement& one = statements.emplace_back(statement);
        if (std::ssize(statements) > kMostStatements) {
          fail_at(statement.at, "the statement stands for more than {} ones", kMostStatements);
        }
        n = 0;
        for_each_operand(one, [&](Operand& operand, bool left) {
          const Pattern& cut = patterns[n++];
          if (cut.ids.empty()) return;
          const int64_t shifted = left ? offset : offset - 1;
          if (cut.has[kLayerOffset] && shifted < 0) {
            fail_at(operand.at, "$LAYER_ID_OFFSET makes layer 0 of {} layer -1; the first layer is 1",
                    quote(statement.left[0].name));
          }
          operand.name = with_ids(cut, {expert, shifted, layer});
        });
      }
    }
  }
  return statements;
}

void expand_names(Statement& statement, const MacroContext& context, const WrittenNames& written) {
  for (bool left : {true, false}) {
    std::vector<Operand>& side = left ? statement.left : statement.right;
    expand_side(side, [](const Operand& operand) {
      return operand.range ? expand_range(operand) : std::vector<Operand>();
    });
    expand_side(side, [&](const Operand& operand) {
      const bool pattern = !operand.literal && operand.name.find('*') != std::string::npos;
      return pattern ? expand_star(operand, context, written, left) : std::vector<Operand>();
    });
  }
}

}  // namespace spolia
