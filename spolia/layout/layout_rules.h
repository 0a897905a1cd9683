// Layout rules: how the ranks of a job are to share the tensors of a checkpoint, by patterns of their names.
//
//   mesh = 2x2 (dp, tp)                        # the ranks 0, 1, ...; or: on [0, 1, 6, 7]
//   *.weight: [shard(0), replicate]            # a placement for each dim of the mesh
//   *.bias: [shard(0)] over (tp)               # for some of its dims; replicated along the others
//   experts.*: [shard(0)] over 4 (ep) on [4, 5, 6, 7]
//
// The last rule that matches a tensor's name holds; what none matches is replicated over the mesh. A tensor
// without dims is replicated, whatever its rule says. docs/layouts.md is the tutorial.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/layout/layout.h"

namespace spolia {

/// One rule, as it is written.
struct LayoutRule {
  std::string pattern;  // of tensors' names, for glob_match()
  std::vector<Placement> placements;
  std::optional<DeviceMesh> mesh;  // its own; else placements are for the common mesh
  std::vector<std::string> over;   // or for these of its dims, named in their order; empty: for all
  std::string origin;              // where it stands, for messages: `line 3, "*.bias: [shard(0)] over (tp)"`
};

/// A checked set of rules. Immutable; may be used by any thread.
class LayoutRules {
 public:
  /// InvalidArgumentError, naming the rule, where placements and mesh dims do not match, one is Partial
  /// (there is no tensor to store before the reduction), or a rank is kMaxRanks or more.
  LayoutRules(DeviceMesh mesh, std::vector<LayoutRule> rules);
  static constexpr int64_t kMaxRanks = int64_t{1} << 20;

  /// The layout of the tensor `name`; one object for all tensors that a rule gives one layout.
  /// InvalidArgumentError, naming rule, tensor and shape, where the rule names a dim that the tensor lacks.
  std::shared_ptr<const Layout> layout_of(std::string_view name, std::span<const int64_t> shape) const;

  /// The rule that gives it, and the tensor, for messages where the layout does not suit the shape after all
  /// (Layout::shard() says so).
  std::string context(std::string_view name, std::span<const int64_t> shape) const;

  /// InvalidArgumentError naming a rule whose pattern matches none of the names (it is probably mistyped),
  /// unless it is `*`.
  void check_patterns(std::span<const std::string_view> names) const;

  /// One more than the highest rank of any mesh.
  int64_t ranks() const { return ranks_; }

 private:
  struct Resolved {
    std::string pattern, origin;
    std::shared_ptr<const Layout> layout;
    std::shared_ptr<const Layout> replicated;  // over the same mesh
  };
  const Resolved& rule_of(std::string_view name) const;

  std::vector<Resolved> rules_;  // the first replicates everything over the mesh
  int64_t ranks_ = 0;
};

/// The rules of a text as above. Statements end with a line or a `;`, and `#` starts a comment that ends with
/// the line; neither does in double quotes, where a pattern may have blanks and colons. The mesh comes first.
/// InvalidArgumentError naming the line.
LayoutRules parse_layout_rules(std::string_view text);

}  // namespace spolia
