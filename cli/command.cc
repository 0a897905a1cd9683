#include "cli/command.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/store/store.h"

namespace spolia::cli {
namespace {

/// Unlike fmt::print() it does not throw where a stream is closed or full: main() looks at stdout in the end,
/// and nobody could be told about stderr.
void put(FILE* stream, std::string_view text) { std::fwrite(text.data(), 1, text.size(), stream); }

}  // namespace

std::unique_ptr<Source> open(const std::string& path) { return open_source(posix_store(), path); }

void add_threads_option(CLI::App& verb, size_t& threads) {
  threads = std::clamp<size_t>(hardware_threads(), 2, 16);
  verb.add_option("--threads", threads, "threads that read, check and write")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
}

CLI::Option* add_bytes_option(CLI::App& verb, const std::string& name, int64_t& bytes,
                              const std::string& help) {
  auto parse = [&bytes, name](const std::string& text) {
    try {
      bytes = parse_bytes(text);
    } catch (const Error& error) {
      throw CLI::ValidationError(name, error.what());
    }
  };
  return verb.add_option_function<std::string>(name, parse, help)->type_name("BYTES");
}

void add_selection_options(CLI::App& verb, Selection& selection) {
  verb.add_option("--root", selection.root, "only what lies below this key, without the key: model")
      ->type_name("KEY");
  verb.add_option("--select", selection.select,
                  "only tensors whose name in SRC matches a pattern (*, ?); repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  verb.add_option("--drop", selection.drop, "without tensors whose name in SRC matches; repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  verb.add_option("--strip-prefix", selection.strip_prefix, "take this off the front of names")
      ->type_name("PREFIX");
  verb.add_option("--add-prefix", selection.add_prefix, "put this before names")->type_name("PREFIX");
}

std::string read_text(const std::string& path, std::string_view what) {
  constexpr int64_t kMost = int64_t{64} << 20;
  const auto file = posix_store()->open(path);
  if (file->size() > kMost) {
    throw InvalidArgumentError("{} is too large for {}: {}", quote(path), what, human_bytes(file->size()));
  }
  std::string content(static_cast<size_t>(file->size()), '\0');
  file->read(0, std::as_writable_bytes(std::span(content)));
  return content;
}

ProgressSink progress_bar(const Context& context) {
  if (context.quiet || !isatty(STDERR_FILENO)) return nullptr;
  using Clock = std::chrono::steady_clock;
  return [start = Clock::now(), shown = Clock::time_point()](int64_t done, int64_t total) mutable {
    const auto now = Clock::now();
    if (done < total && now - shown < std::chrono::milliseconds(100)) return;
    shown = now;
    constexpr int kWidth = 30;
    const double part = total > 0 ? static_cast<double>(done) / static_cast<double>(total) : 1;
    const double seconds = std::max(1e-3, std::chrono::duration<double>(now - start).count());
    const int filled = static_cast<int>(part * kWidth);
    put(stderr, fmt::format("\r[{:=<{}}{:{}}] {:3.0f} %  {} of {}  {}/s ", "", filled, "", kWidth - filled,
                            part * 100, human_bytes(done), human_bytes(total),
                            human_bytes(static_cast<int64_t>(static_cast<double>(done) / seconds))));
    if (done >= total) put(stderr, "\n");
    std::fflush(stderr);
  };
}

void print(std::string_view text) { put(stdout, text); }

void print_json(const nlohmann::ordered_json& json) {
  // Names may be any bytes. As ASCII, with \u escapes, they do no harm to a terminal.
  print(json.dump(2, ' ', true, nlohmann::json::error_handler_t::replace) + "\n");
}

void print_note(std::string_view text) {
  // A progress bar may stand in the line.
  put(stderr, fmt::format("{}spolia: {}\n", isatty(STDERR_FILENO) ? "\r\x1b[K" : "", text));
}

}  // namespace spolia::cli
