#include "spolia/mapping/reverse.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/text.h"
#include "spolia/mapping/pieces.h"
#include "spolia/mapping/suggest.h"

namespace spolia {
namespace {

constexpr size_t kNone = static_cast<size_t>(-1);

/// What a name holds from one writing to the next.
struct Version {
  std::string name;
  bool temporary = false;
  size_t made_by = kNone;    // a step; kNone: the program starts from it
  std::vector<size_t> uses;  // the steps that read it, in order
  bool is_last = false;      // nothing is written over it
  bool kept = false;         // A -> A says that it stays, whatever else reads it
  bool is_new = false;
  size_t dropped_by = kNone;
  // How it is made again, where it can be.
  bool possible = false;
  bool direct = false;  // it is there
  size_t from = kNone;  // the step, one of `uses`, whose results it is made of
  bool needed = false;
  bool made = false;  // by taking a concatenation apart
};

/// The program as a graph: every version is written once, and by a step before all that read it.
class Reversal {
 public:
  Reversal(const Program& program, const NameList& there, const std::optional<ForwardFacts>& facts)
      : program_(program), there_(there), facts_(facts) {}

  Program run() {
    number_versions();
    for (size_t v = versions_.size(); v-- > 0;) choose(versions_[v]);
    for (size_t v = 0; v < versions_.size(); ++v) mark_needed(versions_[v]);
    result_.temporaries = static_cast<uint32_t>(versions_.size());
    read_what_is_there();
    for (size_t v = versions_.size(); v-- > 0;) make(versions_[v]);
    write_roots();
    return std::move(result_);
  }

 private:
  const ProgramStep& step(size_t i) const { return program_.steps[i]; }

  // ---- The graph ----

  static bool is_identity(const ProgramStep& step) {
    return step.kind == ProgramStep::kMove && step.operations.empty() && step.left[0].temporary == 0 &&
           step.right[0].temporary == 0 && step.left[0].name == step.right[0].name;
  }

  size_t add_version(const Variable& variable, size_t made_by) {
    Version& version = versions_.emplace_back();
    version.name = variable.name;
    version.temporary = variable.temporary != 0;
    version.made_by = made_by;
    return versions_.size() - 1;
  }

  size_t& current(const Variable& variable) {
    if (variable.temporary != 0) return temporaries_[variable.temporary];
    return names_.try_emplace(variable.name, kNone).first->second;
  }

  void number_versions() {
    temporaries_.assign(size_t{program_.temporaries} + 1, kNone);
    reads_.resize(program_.steps.size());
    writes_.resize(program_.steps.size());
    for (size_t i = 0; i < program_.steps.size(); ++i) {
      const ProgramStep& one = step(i);
      for (const Variable& variable : one.left) {
        size_t& version = current(variable);
        if (version == kNone) version = add_version(variable, kNone);
        if (is_identity(one)) {
          versions_[version].kept = true;
          continue;
        }
        reads_[i].push_back(version);
        if (one.kind == ProgramStep::kDrop) {
          versions_[version].dropped_by = i;
        } else if (versions_[version].uses.empty() || versions_[version].uses.back() != i) {
          versions_[version].uses.push_back(i);
        }
      }
      if (is_identity(one)) continue;
      for (const Variable& variable : one.right) {
        const size_t version = add_version(variable, i);
        versions_[version].is_new = one.kind == ProgramStep::kNew;
        current(variable) = version;
        writes_[i].push_back(version);
      }
    }
    for (const auto& [name, version] : names_) versions_[version].is_last = true;
  }

  // ---- What is made of what ----

  /// Whether the way there leaves it, and it is here. What it has read is none of its results, even if a
  /// tensor of that name is here.
  bool is_there(const Version& version) const {
    return !version.temporary && version.is_last && !version.is_new && version.dropped_by == kNone &&
           (version.uses.empty() || version.kept) && there_.has(version.name);
  }

  bool sizes_known(size_t i) const { return facts_ || !step(i).sizes.empty() || step(i).equal_parts; }

  /// The dtype that the cast number `operation` of a move started from, where it is known.
  std::optional<DType> dtype_before(size_t i, size_t operation) const {
    for (size_t o = operation; o-- > 0;) {
      if (step(i).operations[o].kind == TensorOperation::kCast) return step(i).operations[o].to;
    }
    if (facts_) return facts_->moved_dtypes[i];
    return step(i).operations[operation].from;
  }

  /// The first cast of a move that nothing can undo; kNone where there is none.
  size_t endless_cast(size_t i) const {
    for (size_t o = 0; o < step(i).operations.size(); ++o) {
      if (step(i).operations[o].kind == TensorOperation::kCast && !dtype_before(i, o)) return o;
    }
    return kNone;
  }

  bool is_undoable(size_t i) const {
    const bool results = std::ranges::all_of(writes_[i], [&](size_t w) { return versions_[w].possible; });
    if (!results) return false;
    if (step(i).kind == ProgramStep::kConcat) return sizes_known(i);
    return step(i).kind != ProgramStep::kMove || endless_cast(i) == kNone;
  }

  void choose(Version& version) {
    version.direct = is_there(version);
    if (!version.direct) {
      const auto use = std::ranges::find_if(version.uses, [&](size_t i) { return is_undoable(i); });
      if (use != version.uses.end()) version.from = *use;
    }
    version.possible = version.direct || version.from != kNone;
  }

  /// Why nothing makes the version again.
  [[noreturn]] void refuse(const Version& root) const {
    const Version* version = &root;
    // Down to the first thing that is in the way; uses are later steps, so that this ends.
    while (!version->uses.empty()) {
      const size_t i = version->uses.front();
      const auto missing = std::ranges::find_if(writes_[i], [&](size_t w) { return !versions_[w].possible; });
      if (missing != writes_[i].end()) {
        version = &versions_[*missing];
        continue;
      }
      if (step(i).kind == ProgramStep::kConcat) {
        fail_at(step(i).at,
                "{} cannot be taken apart again: nothing says how large {} is in it; write sizes='equal' "
                "or sizes='[...]'",
                quote(step(i).right[0].name), quote(version->name));
      }
      fail_at(step(i).at,
              "the cast to {} cannot be undone, as nothing says what {} was before; write "
              "src_dtype='...', dst_dtype='...'",
              name_of(step(i).operations[endless_cast(i)].to), quote(version->name));
    }
    const Position at = version->made_by != kNone ? step(version->made_by).at : step(root.uses.front()).at;
    if (version->dropped_by != kNone) {
      fail_at(at, "{} cannot be made again: {} of it was dropped on line {}", quote(root.name),
              quote(version->name), step(version->dropped_by).at.line);
    }
    if (!version->is_last) {
      fail_at(at, "{} cannot be made again: {} of it was written over", quote(root.name),
              quote(version->name));
    }
    fail_at(at, "there is no tensor {}, of which {} is to be made{}", quote(version->name), quote(root.name),
            did_you_mean(version->name, there_.all()));
  }

  bool is_root(const Version& version) const { return version.made_by == kNone && !version.uses.empty(); }

  void mark_needed(Version& version) {
    if (is_root(version)) {
      if (!version.possible) refuse(version);
      version.needed = true;
    }
    if (!version.needed || version.direct) return;
    for (size_t w : writes_[version.from]) versions_[w].needed = true;
  }

  // ---- The steps back ----

  Variable temporary(size_t version, Position at) const {
    return {versions_[version].name, static_cast<uint32_t>(version) + 1, at};
  }
  size_t index(const Version& version) const { return static_cast<size_t>(&version - versions_.data()); }

  ProgramStep& add(ProgramStep::Kind kind, Position at) {
    ProgramStep& made = result_.steps.emplace_back();
    made.kind = kind;
    made.at = at;
    return made;
  }

  Position place(const Version& version) const {
    return step(version.made_by != kNone ? version.made_by : version.uses.front()).at;
  }

  void drop(const Version& version) {
    ProgramStep& drop = add(ProgramStep::kDrop, place(version));
    drop.left = {{version.name, 0, drop.at}};
  }

  void read_what_is_there() {
    for (size_t v = 0; v < versions_.size(); ++v) {
      const Version& version = versions_[v];
      if (version.needed && version.direct) {
        ProgramStep& read = add(ProgramStep::kMove, place(version));
        read.left = {{version.name, 0, read.at}};
        read.right = {temporary(v, read.at)};
        // The name is free again: unless the way back makes a tensor of it, there is none.
        if (version.made_by != kNone) drop(version);
      }
    }
    // What was made of the sources and is not wanted: the results of the way there are none of the way back.
    for (const Version& version : versions_) {
      const bool result =
          !version.temporary && version.made_by != kNone && version.is_last && !version.needed;
      if (!result || version.dropped_by != kNone || !there_.has(version.name)) continue;
      drop(version);
      result_.notes.push_back(
          fmt::format("line {}: {} is dropped: it {}", place(version).line, quote(version.name),
                      version.is_new ? "was new" : "is a copy of what is made from another tensor"));
    }
  }

  void make(const Version& version) {
    if (!version.needed || version.direct) return;
    const size_t i = version.from;
    if (step(i).kind == ProgramStep::kConcat) {
      take_apart(i);
    } else if (step(i).kind == ProgramStep::kSplit) {
      put_together(i, index(version));
    } else {
      move_back(i, index(version));
    }
  }

  void take_apart(size_t i) {
    if (std::exchange(taken_apart_[i], true)) return;
    const ProgramStep& forward = step(i);
    ProgramStep& back = add(ProgramStep::kSplit, forward.at);
    back.axis = forward.axis;
    back.sizes = facts_ ? facts_->part_sizes[i] : forward.sizes;
    back.equal_parts = back.sizes.empty();
    back.left = {temporary(writes_[i][0], forward.at)};
    for (size_t part : reads_[i]) back.right.push_back(temporary(part, forward.at));
    // A tensor that is several of the parts, or that is made of something else, is not made by this.
    for (size_t p = 0; p < reads_[i].size(); ++p) {
      Version& part = versions_[reads_[i][p]];
      if (!part.needed || part.direct || part.from != i || std::exchange(part.made, true)) {
        back.right[p].temporary = ++result_.temporaries;
      }
    }
  }

  void put_together(size_t i, size_t version) {
    const ProgramStep& forward = step(i);
    ProgramStep& back = add(ProgramStep::kConcat, forward.at);
    back.axis = forward.axis;
    back.sizes = forward.sizes;
    back.equal_parts = forward.sizes.empty();
    for (size_t part : writes_[i]) back.left.push_back(temporary(part, forward.at));
    back.right = {temporary(version, forward.at)};
  }

  void move_back(size_t i, size_t version) {
    const ProgramStep& forward = step(i);
    ProgramStep& back = add(ProgramStep::kMove, forward.at);
    back.left = {temporary(writes_[i][0], forward.at)};
    back.right = {temporary(version, forward.at)};
    for (size_t o = forward.operations.size(); o-- > 0;) {
      const TensorOperation& operation = forward.operations[o];
      TensorOperation undone = operation;
      if (operation.kind == TensorOperation::kPermute) {
        for (size_t d = 0; d < operation.dims.size(); ++d) {
          undone.dims[operation.dims[d]] = static_cast<int64_t>(d);
        }
      } else if (operation.kind == TensorOperation::kCast) {
        undone.from = operation.to;
        undone.to = *dtype_before(i, o);
        if (!is_lossless(undone.to, operation.to)) {
          result_.notes.push_back(fmt::format(
              "line {}: {} was rounded to {}; the way back restores the dtype {}, not the bits",
              forward.at.line, quote(forward.left[0].name), name_of(operation.to), name_of(undone.to)));
        }
      }
      back.operations.push_back(std::move(undone));
    }
  }

  void write_roots() {
    for (size_t v = 0; v < versions_.size(); ++v) {
      const Version& version = versions_[v];
      if (version.made_by != kNone) continue;
      if (is_root(version)) {
        ProgramStep& write = add(ProgramStep::kMove, place(version));
        write.left = {temporary(v, write.at)};
        write.right = {{version.name, 0, write.at}};
      } else if (version.dropped_by != kNone) {
        result_.notes.push_back(fmt::format("line {}: {} was dropped on the way there, and is not made",
                                            step(version.dropped_by).at.line, quote(version.name)));
      }
    }
  }

  const Program& program_;
  const NameList& there_;
  const std::optional<ForwardFacts>& facts_;
  Program result_;
  std::vector<Version> versions_;                    // in the order in which they are made
  std::vector<std::vector<size_t>> reads_, writes_;  // of every step, versions
  std::vector<size_t> temporaries_;
  std::unordered_map<std::string_view, size_t> names_;
  std::unordered_map<size_t, bool> taken_apart_;
};

}  // namespace

Program reversed_program(const Program& program, const NameList& there,
                         const std::optional<ForwardFacts>& facts) {
  Program result = Reversal(program, there, facts).run();
  result.notes.insert(result.notes.begin(), program.notes.begin(), program.notes.end());
  return result;
}

}  // namespace spolia
