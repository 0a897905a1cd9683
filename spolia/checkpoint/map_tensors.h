// A mapping applied to what is selected of a checkpoint.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "spolia/checkpoint/selection.h"
#include "spolia/format/source.h"
#include "spolia/mapping/mapping.h"

namespace spolia {

/// A mapping and how it is to be read.
struct MappingChoice {
  Mapping mapping;
  bool reverse = false;
  /// The key below which all names of the mapping lie: "model" where the checkpoint calls "model.embed" what
  /// the mapping calls "embed". Empty: names are whole.
  std::string root;
};

/// A mapping compiled against selected tensors, which have their final names.
struct SelectedMapping {
  std::vector<TensorDescription> tensors;  // the selected, in order of their names; what copies count
  CompiledMapping compiled;
};

/// `selected` is in order of names. `base`: where new tensors come from that the mapping does not fill, by
/// the names that the result has. `target`: the tensors to make, and no others; those that nothing makes are
/// listed as missing. Throws what compile_mapping() does.
SelectedMapping compile_selected(const Catalog& source, std::span<const SelectedEntry> selected,
                                 const MappingChoice& choice, const Catalog* base = nullptr,
                                 const Catalog* target = nullptr);

/// InvalidArgumentError where the mapping has statements, but makes and drops nothing: it is then probably
/// for other names.
void require_effect(const SelectedMapping& mapping, const MappingChoice& choice);

/// What a person should know of how a mapping was applied.
struct MappingReport {
  std::vector<std::string> unused;   // names of tensors that nothing is made of, though nothing drops them
  std::vector<std::string> dropped;  // that the mapping drops
  std::vector<std::string> notes;
};
MappingReport report_of(const SelectedMapping& mapping);

/// The tensors that a mapping makes.
struct MappedTensors {
  std::vector<TensorEntry> tensors;      // in order of names, without chunks
  std::vector<Position> positions;       // of the statements that make them; line 0: none does
  std::vector<RegionCopy> copies;        // by tensor; of `joined`, where that is set, else of the source
  std::unique_ptr<const Source> joined;  // the source with what is new; borrows source and base
  MappingReport report;
};

/// As compile_selected() and require_effect(), from the source whose tensors were selected.
MappedTensors map_tensors(const Source& source, std::span<const SelectedEntry> selected,
                          const MappingChoice& choice, const Source* base);

}  // namespace spolia
