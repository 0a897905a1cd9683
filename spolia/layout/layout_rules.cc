#include "spolia/layout/layout_rules.h"

#include <algorithm>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

constexpr std::string_view kMeshExpected =
    "the mesh of layout rules; write it first, like mesh = 2x2 (dp, tp)";
constexpr std::string_view kRuleExpected =
    "a layout rule; write one like *.weight: [shard(0), replicate] or *.bias: [shard(0)] over (tp), patterns "
    "with blanks or colons in double quotes";

// ---- From rules as they are written to layouts ----

/// The placements for all dims of `mesh`, given those for the dims named in `over`; replicate for the others.
std::vector<Placement> spread(const DeviceMesh& mesh, const LayoutRule& rule) {
  if (rule.placements.size() != rule.over.size()) {
    throw InvalidArgumentError("({}) needs {} placements, not {}", fmt::join(rule.over, ", "),
                               rule.over.size(), rule.placements.size());
  }
  std::vector<Placement> placements(mesh.ndim(), Replicate{});
  size_t next = 0;
  for (size_t i = 0; i < rule.over.size(); ++i) {
    const size_t dim = mesh.dim_named(rule.over[i]);
    if (dim < next) {
      throw InvalidArgumentError("name mesh dims once and in the order of {}, in which they cut a tensor",
                                 mesh.text());
    }
    placements[dim] = rule.placements[i];
    next = dim + 1;
  }
  return placements;
}

Layout resolve(const DeviceMesh& common, const LayoutRule& rule) {
  if (std::ranges::any_of(rule.placements, is_partial)) {
    throw InvalidArgumentError("a partial placement has no tensor to store; reduce it first");
  }
  if (rule.mesh) return Layout(*rule.mesh, rule.placements);
  return Layout(common, rule.over.empty() ? rule.placements : spread(common, rule));
}

std::shared_ptr<const Layout> replicated_over(const DeviceMesh& mesh) {
  return std::make_shared<Layout>(mesh, std::vector<Placement>(mesh.ndim(), Replicate{}));
}

/// One more than the mesh's highest rank.
int64_t ranks_of(const DeviceMesh& mesh) {
  const int64_t highest = std::ranges::max(mesh.ranks());
  if (highest >= LayoutRules::kMaxRanks) {
    throw InvalidArgumentError("rank {} is too high; ranks are below {}", highest, LayoutRules::kMaxRanks);
  }
  return highest + 1;
}

// ---- From text to rules ----

struct Statement {
  size_t line = 0;
  std::string_view text;
};

/// Where the statement at the front of a line ends: before a `;` or `#` outside quotes, or with the line.
size_t end_of_statement(std::string_view line) {
  bool quoted = false;
  for (size_t i = 0; i < line.size(); ++i) {
    if (line[i] == '"') quoted = !quoted;
    if (!quoted && (line[i] == ';' || line[i] == '#')) return i;
  }
  return line.size();
}

std::string_view without_blanks_around(std::string_view text) {
  constexpr std::string_view kBlanks = " \t\r";
  text = text.substr(0, text.find_last_not_of(kBlanks) + 1);
  return text.substr(std::min(text.find_first_not_of(kBlanks), text.size()));
}

/// The statements of a text; none is empty.
std::vector<Statement> split_statements(std::string_view text) {
  std::vector<Statement> statements;
  for (size_t line_number = 1; !text.empty(); ++line_number) {
    std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    while (!line.empty() && line[0] != '#') {
      const size_t end = end_of_statement(line);
      const std::string_view statement = without_blanks_around(line.substr(0, end));
      if (!statement.empty()) statements.push_back({line_number, statement});
      line.remove_prefix(end);
      if (line.starts_with(';')) line.remove_prefix(1);
    }
  }
  return statements;
}

/// The mesh, where the statement is "mesh = MESH".
std::optional<DeviceMesh> read_mesh_statement(std::string_view statement) {
  TextReader reader(statement, kMeshExpected);
  if (!reader.accept("mesh") || !reader.accept("=")) return std::nullopt;
  DeviceMesh mesh = read_mesh(reader);
  reader.expect_end();
  return mesh;
}

LayoutRule read_rule(std::string_view statement) {
  TextReader reader(statement, kRuleExpected);
  LayoutRule rule;
  rule.pattern = reader.pattern();
  reader.expect(":");
  rule.placements = read_placements(reader);
  if (reader.accept("over")) {
    if (reader.accept("("))
      rule.over = read_dim_names(reader);
    else
      rule.mesh = read_mesh(reader);
  }
  reader.expect_end();
  return rule;
}

}  // namespace

LayoutRules::LayoutRules(DeviceMesh mesh, std::vector<LayoutRule> rules) : ranks_(ranks_of(mesh)) {
  const auto replicated = replicated_over(mesh);
  rules_.push_back({"*", "replicate by default", replicated, replicated});
  for (LayoutRule& rule : rules) {
    try {
      const auto layout = std::make_shared<const Layout>(resolve(mesh, rule));
      ranks_ = std::max(ranks_, ranks_of(layout->mesh()));
      rules_.push_back({std::move(rule.pattern), std::move(rule.origin), layout,
                        rule.mesh ? replicated_over(*rule.mesh) : replicated});
    } catch (const Error& error) {
      rethrow_with_context(error, rule.origin);
    }
  }
}

const LayoutRules::Resolved& LayoutRules::rule_of(std::string_view name) const {
  size_t last = rules_.size() - 1;
  while (!glob_match(rules_[last].pattern, name)) --last;  // the first matches everything
  return rules_[last];
}

std::string LayoutRules::context(std::string_view name, std::span<const int64_t> shape) const {
  return fmt::format("{}: tensor {} of shape {}", rule_of(name).origin, quote(name), shape_text(shape));
}

std::shared_ptr<const Layout> LayoutRules::layout_of(std::string_view name,
                                                     std::span<const int64_t> shape) const {
  const Resolved& rule = rule_of(name);
  if (shape.empty()) return rule.replicated;
  try {
    for (const Placement& placement : rule.layout->placements()) normalized(placement, shape.size());
  } catch (const Error& error) {
    rethrow_with_context(error, context(name, shape));
  }
  return rule.layout;
}

void LayoutRules::check_patterns(std::span<const std::string_view> names) const {
  for (const Resolved& rule : rules_) {
    const auto matches = [&](std::string_view name) { return glob_match(rule.pattern, name); };
    if (rule.pattern == "*" || std::ranges::any_of(names, matches)) continue;
    throw InvalidArgumentError("{}: no tensor has a name that matches {}", rule.origin, quote(rule.pattern));
  }
}

LayoutRules parse_layout_rules(std::string_view text) {
  std::optional<DeviceMesh> mesh;
  std::vector<LayoutRule> rules;
  for (const Statement& statement : split_statements(text)) {
    try {
      std::optional<DeviceMesh> stated = read_mesh_statement(statement.text);
      if (stated && mesh) throw InvalidArgumentError("{} is a second mesh", quote(statement.text));
      if (!stated && !mesh) TextReader(statement.text, kMeshExpected).fail();
      if (stated) {
        mesh = std::move(stated);
        continue;
      }
      rules.push_back(read_rule(statement.text));
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("line {}", statement.line));
    }
    rules.back().origin = fmt::format("line {}, {}", statement.line, quote(statement.text));
  }
  if (!mesh)
    throw InvalidArgumentError("layout rules without a mesh; write it first, like mesh = 2x2 (dp, tp)");
  return LayoutRules(std::move(*mesh), std::move(rules));
}

}  // namespace spolia
