// Runs a program over descriptions of tensors: what every name is in the end, in pieces of the sources.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "spolia/mapping/pieces.h"
#include "spolia/mapping/program.h"
#include "spolia/mapping/tensor_list.h"

namespace spolia {

/// What became of a name that the program mentions.
struct Outcome {
  enum Kind : uint8_t { kTensor, kDropped, kNew };
  Kind kind = kTensor;
  std::string name;
  AssemblyPtr tensor;                     // kTensor
  const ProgramStep* made_new = nullptr;  // kNew: the step, in the program
  bool written = false;                   // by a step; else it is the source of that name
  bool kept = false;                      // A -> A says that A stays, whatever else reads it
  bool consumed = false;                  // a step has read it since
  Position at;                            // of the step that wrote or dropped it

  bool is_output() const { return kind != kDropped && (written || kept) && (!consumed || kept); }
};

class Runner {
 public:
  /// `sources` are in order of their names, `more` likewise; indices go through the one and on through the
  /// other. Both are borrowed.
  Runner(std::span<const TensorDescription> sources, std::span<const TensorDescription> more,
         int64_t most_pieces);

  /// Runs the steps in order. InvalidArgumentError that names line, column, the tensors and their shapes.
  /// The program is borrowed.
  void run(const Program& program);

  /// The names that the program mentions, in the order in which it does first.
  const std::deque<Outcome>& outcomes() const { return outcomes_; }
  const Outcome* find(std::string_view name) const;
  /// For every concatenation of the program the sizes of its parts; empty for other steps.
  const std::vector<Dims>& part_sizes() const { return part_sizes_; }
  /// For every move the dtype it started from.
  const std::vector<DType>& moved_dtypes() const { return moved_dtypes_; }
  const std::vector<std::string>& notes() const { return notes_; }

  const TensorDescription& source(size_t index) const {
    return index < sources_.size() ? sources_[index] : more_[index - sources_.size()];
  }
  size_t source_count() const { return sources_.size() + more_.size(); }
  std::optional<size_t> find_source(std::string_view name) const;

 private:
  void step(const ProgramStep& step);
  AssemblyPtr read(const Variable& variable);
  void write(const Variable& variable, AssemblyPtr tensor, const ProgramStep& step);
  Outcome& outcome(const std::string& name);

  void move(const ProgramStep& step);
  AssemblyPtr operated(const TensorOperation& operation, const AssemblyPtr& tensor, const ProgramStep& step);
  AssemblyPtr concatenated(const ProgramStep& step);
  void split(const ProgramStep& step);
  void drop(const ProgramStep& step);
  void make_new(const ProgramStep& step);
  size_t axis_of(const ProgramStep& step, const Variable& variable, const Assembly& tensor) const;
  std::string suggestion(std::string_view name) const;

  std::span<const TensorDescription> sources_, more_;
  PieceBudget budget_;
  std::deque<Outcome> outcomes_;
  std::unordered_map<std::string_view, Outcome*> index_;  // the keys lie in outcomes_
  std::vector<AssemblyPtr> temporaries_;
  size_t at_step_ = 0;
  bool suggested_ = false;
  std::vector<Dims> part_sizes_;
  std::vector<DType> moved_dtypes_;
  std::vector<std::string> notes_;
};

}  // namespace spolia
