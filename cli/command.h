// What the verbs of the command share: how they are added, run and talk. Only cli/ prints.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <string_view>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "spolia/base/cancel.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/selection.h"
#include "spolia/format/source.h"

namespace spolia::cli {

// Exit codes; `--help` and the README state them.
inline constexpr int kFine = 0;
inline constexpr int kDifference = 1;  // a fault or a difference found in something that could be read
inline constexpr int kFailure = 2;     // wrong use, or input that cannot be read

struct Context {
  CancelToken cancel;        // set by SIGINT and SIGTERM
  bool quiet = false;        // no progress, no summaries
  std::function<int()> run;  // what the parsed verb does; returns the exit code
};

// One verb a file: NAME_command.cc.
void add_inspect_command(CLI::App& app, Context& context);
void add_digest_command(CLI::App& app, Context& context);
void add_verify_command(CLI::App& app, Context& context);
void add_diff_command(CLI::App& app, Context& context);
void add_convert_command(CLI::App& app, Context& context);
void add_map_command(CLI::App& app, Context& context);
void add_stream_command(CLI::App& app, Context& context);

std::unique_ptr<Source> open(const std::string& path);

/// Shared by the verbs that read tensors: --threads, with a sensible default.
void add_threads_option(CLI::App& verb, size_t& threads);
/// An option that takes a byte count: "64MiB".
CLI::Option* add_bytes_option(CLI::App& verb, const std::string& name, int64_t& bytes,
                              const std::string& help);

/// Shared by the verbs that take part of a checkpoint: --root, --select, --drop, --strip-prefix,
/// --add-prefix.
void add_selection_options(CLI::App& verb, Selection& selection);

/// What a file of text holds that is given where `what` is expected: "a mapping". InvalidArgumentError where
/// it is too large for that.
std::string read_text(const std::string& path, std::string_view what);

/// A bar on stderr, where that is a terminal and --quiet was not given; else nothing.
ProgressSink progress_bar(const Context& context);

void print(std::string_view text);  // stdout
void print_json(const nlohmann::ordered_json& json);
void print_note(std::string_view text);  // stderr, one line

}  // namespace spolia::cli
