// What the verbs that map have in common: options, and what is told of a mapping.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "spolia/checkpoint/map_tensors.h"

namespace spolia::cli {

struct MappingArguments {
  std::optional<std::string> file, base;
  std::string root;
  bool reverse = false;
};

/// --map.
CLI::Option* add_map_option(CLI::App& verb, MappingArguments& arguments);
/// --reverse, --map-root and --base, which need `map` where there is one.
void add_mapping_options(CLI::App& verb, MappingArguments& arguments, CLI::Option* map = nullptr);

/// The mapping in the file; nothing where none was given.
std::optional<MappingChoice> read_mapping(const MappingArguments& arguments);

/// On stderr: notes, and what is dropped and unused.
void print_mapping(const MappingReport& mapping);

/// Names in a line, the first few of them.
std::string shortened(const std::vector<std::string>& names);

}  // namespace spolia::cli
