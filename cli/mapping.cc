#include "cli/mapping.h"

#include <algorithm>
#include <string_view>

#include <fmt/format.h>

#include "cli/command.h"
#include "spolia/base/text.h"

namespace spolia::cli {

CLI::Option* add_map_option(CLI::App& verb, MappingArguments& arguments) {
  return verb
      .add_option("--map", arguments.file,
                  "a file that says what becomes of the tensors: other names, joined, cut, turned; see "
                  "docs/mapping.md")
      ->type_name("FILE");
}

void add_mapping_options(CLI::App& verb, MappingArguments& arguments, CLI::Option* map) {
  const std::vector<CLI::Option*> options = {
      verb.add_flag("--reverse", arguments.reverse, "run the mapping backwards"),
      verb.add_option("--map-root", arguments.root, "the key below which the mapping's names lie: model")
          ->type_name("KEY"),
      verb.add_option("--base", arguments.base,
                      "a checkpoint that has the tensors which the mapping calls new (_ -> NAME)")
          ->type_name("CHECKPOINT")};
  for (CLI::Option* option : options) {
    if (map != nullptr) option->needs(map);
  }
}

std::optional<MappingChoice> read_mapping(const MappingArguments& arguments) {
  if (!arguments.file) return std::nullopt;
  return MappingChoice{parse_mapping(read_text(*arguments.file, "a mapping")), arguments.reverse,
                       arguments.root};
}

void print_mapping(const MappingReport& mapping) {
  for (const std::string& note : mapping.notes) print_note(note);
  auto list = [](const std::vector<std::string>& names, std::string_view what) {
    if (names.empty()) return;
    print_note(
        fmt::format("{} tensor{} {}:{}", names.size(), names.size() == 1 ? "" : "s", what, shortened(names)));
  };
  list(mapping.dropped, "dropped by the mapping");
  list(mapping.unused, "not used by the mapping");
}

std::string shortened(const std::vector<std::string>& names) {
  std::string text;
  constexpr size_t kShown = 5;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) text += " " + printable(names[i]);
  return text + (names.size() > kShown ? " ..." : "");
}

}  // namespace spolia::cli
