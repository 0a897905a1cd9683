#include "spolia/mapping/macros.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <set>
#include <unordered_map>

#include <fmt/format.h>

#include "spolia/base/text.h"
#include "spolia/mapping/ids.h"
#include "spolia/mapping/suggest.h"

namespace spolia {
namespace {

constexpr uint32_t kMostTemporaries = uint32_t{1} << 21;

const std::string& text_of(const Attribute& attribute) {
  if (const auto* text = std::get_if<std::string>(&attribute.value)) return *text;
  fail_at(attribute.at, "{} takes text in quotes", attribute.key);
}

/// "[1, 0]" as numbers.
Dims list_of(const Attribute& attribute) {
  std::string_view text = text_of(attribute);
  auto accept = [&](std::string_view token) {
    text.remove_prefix(std::min(text.find_first_not_of(" \t"), text.size()));
    if (!text.starts_with(token)) return false;
    text.remove_prefix(token.size());
    return true;
  };
  Dims numbers;
  bool sound = accept("[");
  bool closed = accept("]");
  while (sound && !closed) {
    int64_t number = 0;
    accept("");
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    text.remove_prefix(static_cast<size_t>(end - text.data()));
    numbers.push_back(number);
    closed = accept("]");
    sound = error == std::errc() && (closed || accept(","));
  }
  accept("");
  if (!sound || !text.empty()) {
    fail_at(attribute.at, "{}={} is no list of integers; write one like {}='[1, 0]'", attribute.key,
            quote(text_of(attribute)), attribute.key);
  }
  return numbers;
}

int64_t integer_of(const Attribute& attribute) {
  if (const auto* number = std::get_if<int64_t>(&attribute.value)) return *number;
  fail_at(attribute.at, "{} takes an integer without quotes", attribute.key);
}

DType dtype_of(const Attribute& attribute) {
  std::string_view name = text_of(attribute);
  for (std::string_view prefix : {"torch.", "paddle."}) {
    if (name.starts_with(prefix)) name.remove_prefix(prefix.size());
  }
  if (const std::optional<DType> dtype = dtype_from_name(name)) return *dtype;
  std::vector<std::string_view> names;
  for (size_t i = 0; i < kDTypeCount; ++i) names.push_back(name_of(static_cast<DType>(i)));
  fail_at(attribute.at, "there is no dtype {}{}", quote(name), did_you_mean(name, names));
}

double number_of(const Attribute& attribute) {
  if (const auto* number = std::get_if<int64_t>(&attribute.value)) return static_cast<double>(*number);
  const std::string& text = text_of(attribute);
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (text.empty() || end != text.c_str() + text.size()) {
    fail_at(attribute.at, "{}={} is no number", attribute.key, quote(text));
  }
  return number;
}

/// The attributes of a statement by key, each at most once; knows which of them nobody has asked for.
class Attributes {
 public:
  explicit Attributes(const Statement& statement) : statement_(statement) {
    for (size_t i = 0; i < all().size(); ++i) {
      for (size_t j = 0; j < i; ++j) {
        if (all()[i].key == all()[j].key) {
          fail_at(all()[i].at, "the statement has {} twice", all()[i].key);
        }
      }
    }
    used_.resize(all().size());
  }

  const std::vector<Attribute>& all() const { return statement_.attributes; }

  const Attribute* find(std::string_view key) {
    for (size_t i = 0; i < all().size(); ++i) {
      if (all()[i].key != key) continue;
      used_[i] = true;
      return &all()[i];
    }
    return nullptr;
  }

  int64_t integer(std::string_view key, std::optional<int64_t> otherwise, std::string_view why) {
    if (const Attribute* attribute = find(key)) return integer_of(*attribute);
    if (!otherwise) fail_at(statement_.at, "{} {}; write {}=...", why, key, key);
    return *otherwise;
  }

  /// Refuses what nobody asked for.
  void expect_no_more(std::string_view what) const {
    for (size_t i = 0; i < all().size(); ++i) {
      if (!used_[i]) fail_at(all()[i].at, "{} takes no {}", what, all()[i].key);
    }
  }

 private:
  const Statement& statement_;
  std::vector<bool> used_;
};

/// Where names come from or go to through other statements: the nearest tensor that has parts.
class Chains {
 public:
  Chains(const std::vector<Statement>& statements, const MacroContext& context) : context_(context) {
    for (const Statement& statement : statements) {
      for (const Operand& left : statement.left) {
        to_.insert_or_assign(left.name, statement.right.front().name);
      }
      for (const Operand& right : statement.right) {
        from_.insert_or_assign(right.name, statement.left.front().name);
      }
    }
  }

  int64_t left_parts(std::string_view name) const {
    return parts(resolved(name, from_, context_.left), context_.left_parts);
  }
  int64_t right_parts(std::string_view name) const {
    return parts(resolved(name, to_, context_.right), context_.right_parts);
  }

 private:
  using Links = std::unordered_map<std::string_view, std::string_view>;

  static std::string_view resolved(std::string_view name, const Links& links, const NameList& known) {
    // A chain is never longer than there are links; one that is, runs in a circle.
    for (size_t steps = 0; steps <= links.size() && !known.has(name); ++steps) {
      const auto next = links.find(name);
      if (next == links.end()) break;
      name = next->second;
    }
    return name;
  }
  static int64_t parts(std::string_view name, const std::function<int64_t(std::string_view)>& count) {
    return count ? std::max<int64_t>(count(name), 1) : 1;
  }

  const MacroContext& context_;
  Links to_, from_;
};

class Lowering {
 public:
  Lowering(Program& program, const Chains& chains) : program_(program), chains_(chains) {}

  void run(const Statement& statement) {
    statement_ = &statement;
    Attributes attributes(statement);
    for (const Operand& right : statement.right) {
      if (right.transposed) {
        fail_at(right.at,
                "{}^T on the right-hand side is only a view; write two statements: A -> {}, then {}^T -> {}",
                right.name, right.name, right.name, right.name);
      }
    }
    if (attributes.find("fused_qkv")) return fused_qkv(attributes);
    if (attributes.find("fused_qkv_old")) return fused_qkv_old(attributes);
    if (attributes.find("fused_ffn")) return fused_ffn(attributes);
    for (std::string_view key : {"num_heads", "num_key_value_groups", "src_tp", "dst_tp"}) {
      if (const Attribute* stray = attributes.find(key)) {
        fail_at(stray->at,
                "{} belongs to the flags fused_qkv, fused_qkv_old and fused_ffn, and the statement has "
                "none of them",
                key);
      }
    }
    plain(attributes);
  }

 private:
  // ---- Pieces of steps ----

  Variable temporary(std::string name) {
    if (program_.temporaries == kMostTemporaries)
      fail_at(statement_->at, "the mapping expands to too many parts");
    return {std::move(name), ++program_.temporaries, statement_->at};
  }

  std::vector<Variable> temporaries(std::string_view name, int64_t count) {
    std::vector<Variable> variables;
    for (int64_t i = 0; i < count; ++i) variables.push_back(temporary(fmt::format("{} {}", name, i)));
    return variables;
  }

  /// The left operand as a variable, transposed first where it says so.
  Variable source(const Operand& operand) {
    Variable variable = named(operand);
    if (!operand.transposed) return variable;
    Variable turned = temporary(operand.name + "^T");
    ProgramStep& step = add(ProgramStep::kMove, {std::move(variable)}, {turned});
    step.operations.push_back({TensorOperation::kPermute, {}, {}, {}});
    return turned;
  }

  Variable named(const Operand& operand) const {
    if (operand.is_nothing()) {
      fail_at(operand.at, "_ stands alone on its side, and takes no attribute of other statements");
    }
    return {operand.name, 0, operand.at};
  }

  std::vector<Variable> sources() {
    std::vector<Variable> variables;
    for (const Operand& operand : statement_->left) variables.push_back(source(operand));
    return variables;
  }
  std::vector<Variable> targets() const {
    std::vector<Variable> variables;
    std::set<std::string_view> names;
    for (const Operand& operand : statement_->right) {
      variables.push_back(named(operand));
      if (!names.insert(operand.name).second) {
        fail_at(operand.at, "{} is written twice in one statement", quote(operand.name));
      }
    }
    return variables;
  }

  ProgramStep& add(ProgramStep::Kind kind, std::vector<Variable> left, std::vector<Variable> right) {
    ProgramStep& step = program_.steps.emplace_back();
    step.kind = kind;
    step.left = std::move(left);
    step.right = std::move(right);
    step.at = statement_->at;
    return step;
  }
  void split(Variable whole, std::vector<Variable> parts, int64_t axis) {
    ProgramStep& step = add(parts.size() == 1 ? ProgramStep::kMove : ProgramStep::kSplit, {std::move(whole)},
                            std::move(parts));
    step.axis = axis;
    step.equal_parts = true;
  }
  /// `equal`: the parts have to be of one size, so that a split gives them back.
  void concat(std::vector<Variable> parts, Variable whole, int64_t axis) {
    ProgramStep& step = add(parts.size() == 1 ? ProgramStep::kMove : ProgramStep::kConcat, std::move(parts),
                            {std::move(whole)});
    step.axis = axis;
    step.equal_parts = true;
  }

  // ---- Statements without flags ----

  void plain(Attributes& attributes) {
    const Statement& s = *statement_;
    const bool from_nothing = s.left.size() == 1 && s.left[0].is_nothing();
    const bool to_nothing = s.right.size() == 1 && s.right[0].is_nothing();
    if (from_nothing && to_nothing) fail_at(s.at, "_ -> _ says nothing");
    if (to_nothing) {
      for (const Operand& operand : s.left) {
        if (operand.transposed) fail_at(operand.at, "a tensor that is dropped need not be transposed");
        add(ProgramStep::kDrop, {named(operand)}, {});
      }
      attributes.expect_no_more("dropping a tensor");
    } else if (from_nothing) {
      made_new(attributes);
    } else if (s.left.size() > 1 && s.right.size() > 1) {
      fail_at(s.at, "{} tensors cannot become {} in one statement: either side has to be a single one{}",
              s.left.size(), s.right.size(),
              s.left.size() == s.right.size()
                  ? "; use $LAYER_ID or $EXPERT_ID, which make a statement for each id"
                  : "");
    } else if (s.left.size() == 1 && s.right.size() == 1) {
      move(attributes);
    } else {
      parts(attributes);
    }
  }

  void made_new(Attributes& attributes) {
    std::optional<Dims> shape;
    std::optional<DType> dtype;
    std::optional<double> fill;
    if (const Attribute* a = attributes.find("shape")) {
      shape = list_of(*a);
      if (std::ranges::any_of(*shape, [](int64_t size) { return size < 0; })) {
        fail_at(a->at, "the shape {} has a negative size", list_text(*shape));
      }
    }
    if (const Attribute* a = attributes.find("dtype")) dtype = dtype_of(*a);
    if (const Attribute* a = attributes.find("fill")) fill = number_of(*a);
    attributes.expect_no_more("a new tensor");
    for (Variable& variable : targets()) {
      ProgramStep& step = add(ProgramStep::kNew, {}, {std::move(variable)});
      step.shape = shape;
      step.dtype = dtype;
      step.fill = fill;
    }
  }

  void move(Attributes& attributes) {
    std::vector<TensorOperation> operations;
    if (statement_->left[0].transposed) operations.push_back({TensorOperation::kPermute, {}, {}, {}});
    for (const Attribute& a : attributes.all()) {
      if (a.key == "permute") {
        attributes.find(a.key);
        operations.push_back({TensorOperation::kPermute, list_of(a), {}, {}});
        check_permute(a, operations.back().dims);
      } else if (a.key == "reshape") {
        attributes.find(a.key);
        operations.push_back({TensorOperation::kReshape, list_of(a), {}, {}});
        check_canonical(a, operations.back().dims);
      } else if (a.key == "dtype") {
        attributes.find(a.key);
        operations.push_back({TensorOperation::kCast, {}, {}, dtype_of(a)});
      } else if (a.key == "dst_dtype" || a.key == "src_dtype") {
        const Attribute* from = attributes.find("src_dtype");
        const Attribute* to = attributes.find("dst_dtype");
        if (from == nullptr || to == nullptr) {
          fail_at(a.at,
                  "src_dtype and dst_dtype go together; dtype='...' alone is a cast from whatever it is");
        }
        if (&a == from) operations.push_back({TensorOperation::kCast, {}, dtype_of(*from), dtype_of(*to)});
      }
    }
    const bool has_axis = attributes.find("axis") != nullptr;  // of a single part: says nothing
    const int64_t axis = has_axis ? integer_of(*attributes.find("axis")) : 0;
    attributes.expect_no_more("a single tensor that becomes another");
    Operand operand = statement_->left[0];
    operand.transposed = false;
    ProgramStep& step = add(ProgramStep::kMove, {named(operand)}, {named(statement_->right[0])});
    step.operations = std::move(operations);
    step.axis = axis;
  }

  static void check_permute(const Attribute& attribute, const Dims& permute) {
    Dims sorted = permute;
    std::ranges::sort(sorted);
    for (size_t d = 0; d < sorted.size(); ++d) {
      if (sorted[d] != static_cast<int64_t>(d)) {
        fail_at(attribute.at, "the permute {} does not name each of the dims 0 to {} once",
                list_text(permute), sorted.size() - 1);
      }
    }
  }

  static void check_canonical(const Attribute& attribute, const Dims& shape) {
    if (shape.size() < 3) {
      fail_at(attribute.at,
              "reshape takes the shape with more dims, [d0, d1, ...] with at least 3, and not {}; "
              "its other side is [d0*d1, product of the rest]",
              list_text(shape));
    }
    if (std::ranges::any_of(shape, [](int64_t size) { return size < 0; })) {
      fail_at(attribute.at, "the shape {} has a negative size", list_text(shape));
    }
  }

  void parts(Attributes& attributes) {
    const bool concat = statement_->left.size() > 1;
    const size_t count = concat ? statement_->left.size() : statement_->right.size();
    ProgramStep step;
    step.kind = concat ? ProgramStep::kConcat : ProgramStep::kSplit;
    step.axis = attributes.integer("axis", {}, concat ? "a concatenation needs" : "a split needs");
    if (const Attribute* a = attributes.find("sizes")) {
      if (text_of(*a) == "equal") {
        step.equal_parts = true;
      } else {
        step.sizes = list_of(*a);
        if (step.sizes.size() != count) {
          fail_at(a->at, "sizes has {} numbers for {} parts", step.sizes.size(), count);
        }
        if (std::ranges::any_of(step.sizes, [](int64_t size) { return size < 0; })) {
          fail_at(a->at, "the sizes {} hold a negative one", list_text(step.sizes));
        }
      }
    }
    if (!concat && step.sizes.empty()) step.equal_parts = true;
    attributes.expect_no_more(concat ? "a concatenation" : "a split");
    step.left = sources();
    step.right = targets();
    step.at = statement_->at;
    program_.steps.push_back(std::move(step));
  }

  // ---- fused_qkv ----

  struct Heads {
    int64_t query = 0, groups = 0, axis = 0;
    int64_t per_group() const { return query / groups; }
    int64_t blocks() const { return query + 2 * groups; }
  };

  Heads heads(Attributes& attributes, std::string_view flag) {
    Heads heads;
    heads.query = attributes.integer("num_heads", {}, fmt::format("{} needs", flag));
    heads.groups = attributes.integer("num_key_value_groups", {}, fmt::format("{} needs", flag));
    heads.axis = attributes.integer("axis", 1, "");
    if (heads.query <= 0 || heads.groups <= 0 || heads.query > kMostNames ||
        heads.query % heads.groups != 0) {
      fail_at(statement_->at,
              "num_heads={} and num_key_value_groups={} (the number of key and value heads): both "
              "are above 0, and the second divides the first",
              heads.query, heads.groups);
    }
    return heads;
  }

  void expect_sides(std::string_view flag, bool fits, std::string_view forms) const {
    if (fits) return;
    fail_at(statement_->at, "{} is of the form {}; here {} tensors become {}", flag, forms,
            statement_->left.size(), statement_->right.size());
  }

  bool sides_are(size_t left, size_t right) const {
    return statement_->left.size() == left && statement_->right.size() == right;
  }

  /// The order in which the blocks of q, k and v lie in a fused tensor.
  template <class T>
  static std::vector<T> grouped(const Heads& h, const std::vector<T>& q, const std::vector<T>& k,
                                const std::vector<T>& v) {
    std::vector<T> order;
    for (int64_t g = 0; g < h.groups; ++g) {
      for (int64_t i = 0; i < h.per_group(); ++i) order.push_back(q[g * h.per_group() + i]);
      order.push_back(k[g]);
      order.push_back(v[g]);
    }
    return order;
  }

  /// Of every rank its query, key and value heads, one after the other.
  std::vector<Variable> ranked(const Heads& h, int64_t ranks,
                               const std::array<std::vector<Variable>, 3>& qkv) const {
    if (h.query % ranks != 0 || h.groups % ranks != 0) {
      fail_at(statement_->at,
              "{} query heads and {} key and value heads cannot be shared evenly by {} "
              "tensor-parallel ranks",
              h.query, h.groups, ranks);
    }
    std::vector<Variable> order;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      for (const std::vector<Variable>& one : qkv) {
        const int64_t share = std::ssize(one) / ranks;
        for (int64_t i = 0; i < share; ++i) order.push_back(one[rank * share + i]);
      }
    }
    return order;
  }

  std::array<std::vector<Variable>, 3> head_blocks(const Heads& h) {
    return {temporaries("Q", h.query), temporaries("K", h.groups), temporaries("V", h.groups)};
  }

  /// Cuts q, k and v into their heads.
  void split_into(const std::array<std::vector<Variable>, 3>& blocks, int64_t axis) {
    std::vector<Variable> from = sources();
    for (size_t i = 0; i < 3; ++i) split(std::move(from[i]), blocks[i], axis);
  }
  void concat_from(const std::array<std::vector<Variable>, 3>& blocks, int64_t axis) {
    std::vector<Variable> to = targets();
    for (size_t i = 0; i < 3; ++i) concat(blocks[i], std::move(to[i]), axis);
  }

  void fused_qkv(Attributes& attributes) {
    const Heads h = heads(attributes, "fused_qkv");
    attributes.expect_no_more("fused_qkv");
    expect_sides("fused_qkv", sides_are(1, 3) || sides_are(3, 1), "Q, K, V -> FUSED or FUSED -> Q, K, V");
    const bool fusing = statement_->right.size() == 1;
    const auto blocks = head_blocks(h);
    if (fusing) {
      split_into(blocks, h.axis);
      concat(grouped(h, blocks[0], blocks[1], blocks[2]), targets()[0], h.axis);
    } else {
      split(source(statement_->left[0]), grouped(h, blocks[0], blocks[1], blocks[2]), h.axis);
      concat_from(blocks, h.axis);
    }
  }

  /// The tensor-parallel degrees: what the statement says, else what the tensors have.
  int64_t left_parts(Attributes& attributes, bool fused) {
    const int64_t said = attributes.integer("src_tp", 0, "");
    return fused ? checked_parts(said != 0 ? said : chains_.left_parts(statement_->left[0].name)) : 1;
  }
  int64_t right_parts(Attributes& attributes, bool fused) {
    const int64_t said = attributes.integer("dst_tp", 0, "");
    return fused ? checked_parts(said != 0 ? said : chains_.right_parts(statement_->right[0].name)) : 1;
  }
  int64_t checked_parts(int64_t parts) const {
    if (parts < 1 || parts > kMostNames) {
      fail_at(statement_->at, "{} is no number of tensor-parallel ranks", parts);
    }
    return parts;
  }

  void fused_qkv_old(Attributes& attributes) {
    const Heads h = heads(attributes, "fused_qkv_old");
    expect_sides("fused_qkv_old", sides_are(1, 1) || sides_are(1, 3) || sides_are(3, 1),
                 "FUSED -> FUSED, FUSED -> Q, K, V or Q, K, V -> FUSED");
    const int64_t from = left_parts(attributes, statement_->left.size() == 1);
    const int64_t to = right_parts(attributes, statement_->right.size() == 1);
    attributes.expect_no_more("fused_qkv_old");
    const auto blocks = head_blocks(h);
    if (statement_->left.size() == 1) {
      split(source(statement_->left[0]), ranked(h, from, blocks), h.axis);
    } else {
      split_into(blocks, h.axis);
    }
    if (statement_->right.size() == 1) {
      concat(ranked(h, to, blocks), targets()[0], h.axis);
    } else {
      concat_from(blocks, h.axis);
    }
  }

  void fused_ffn(Attributes& attributes) {
    const int64_t axis = attributes.integer("axis", 1, "");
    expect_sides("fused_ffn", sides_are(1, 1) || sides_are(1, 2) || sides_are(2, 1),
                 "FUSED -> FUSED, FUSED -> GATE, UP or GATE, UP -> FUSED");
    const int64_t from = left_parts(attributes, statement_->left.size() == 1);
    const int64_t to = right_parts(attributes, statement_->right.size() == 1);
    attributes.expect_no_more("fused_ffn");
    const int64_t pieces = checked_parts(from / std::gcd(from, to) * to);
    const std::array<std::vector<Variable>, 2> blocks = {temporaries("gate", pieces),
                                                         temporaries("up", pieces)};
    auto order = [&](int64_t ranks) {
      std::vector<Variable> ordered;
      const int64_t share = pieces / ranks;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        for (const std::vector<Variable>& one : blocks) {
          for (int64_t i = 0; i < share; ++i) ordered.push_back(one[rank * share + i]);
        }
      }
      return ordered;
    };
    if (statement_->left.size() == 1) {
      split(source(statement_->left[0]), order(from), axis);
    } else {
      std::vector<Variable> gate_up = sources();
      for (size_t i = 0; i < 2; ++i) split(std::move(gate_up[i]), blocks[i], axis);
    }
    if (statement_->right.size() == 1) {
      concat(order(to), targets()[0], axis);
    } else {
      std::vector<Variable> gate_up = targets();
      for (size_t i = 0; i < 2; ++i) concat(blocks[i], std::move(gate_up[i]), axis);
    }
  }

  Program& program_;
  const Chains& chains_;
  const Statement* statement_ = nullptr;
};

}  // namespace

Program expand_macros(const Mapping& mapping, const MacroContext& context) {
  Program program;
  std::vector<Statement> statements;
  WrittenNames written;
  for (const Statement& statement : mapping.statements) {
    for (Statement& one : expand_ids(statement, context, written, program.notes)) {
      expand_names(one, context, written);
      for (const Operand& operand : one.right) written.insert(operand.name);
      statements.push_back(std::move(one));
    }
    if (std::ssize(statements) > kMostStatements) {
      fail_at(statement.at, "the mapping expands to too many statements");
    }
  }
  const Chains chains(statements, context);
  Lowering lowering(program, chains);
  for (const Statement& statement : statements) lowering.run(statement);
  return program;
}

}  // namespace spolia
