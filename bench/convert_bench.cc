// `spolia convert` of a DCP checkpoint, to safetensors and to DCP for other ranks, beside copying its files,
// writing as many bytes to the disk as fast as it takes them, and, where a command for it is given, PyTorch.
// All results are durable inside the timing and have fresh names.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include "bench/child_process.h"
#include "bench/make_dcp.h"
#include "bench/measure.h"
#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/device/buffer.h"
#include "spolia/format/source.h"
#include "spolia/store/file_descriptor.h"

namespace spolia::bench {
namespace {

namespace fs = std::filesystem;

/// A checkpoint to be made, and what is done with it.
struct Case {
  std::string name;
  std::string title;
  std::vector<std::string> arguments;  // of convert, besides source, target and memory
};

const std::vector<Case>& cases() {
  static const std::vector<std::string> to_safetensors = {"--to", "safetensors"};
  auto to_dcp = [](const std::string& layout) {
    return std::vector<std::string>{"--to", "dcp", "--layout", layout};
  };
  static const std::vector<Case> all = {
      {"rows", "2 ranks by rows, to safetensors", to_safetensors},
      {"columns", "2 ranks by columns, to safetensors", to_safetensors},
      {"rows-to-rows", "2 ranks by rows, to DCP for 3 by rows", to_dcp("mesh = 3; *: [shard(0)]")},
      {"rows-to-columns", "2 ranks by rows, to DCP for 4 by columns", to_dcp("mesh = 4; *: [shard(-1)]")},
      {"columns-to-rows", "2 ranks by columns, to DCP for 3 by rows", to_dcp("mesh = 3; *: [shard(0)]")},
      {"to-spolia",
       "2 ranks by rows, to Spolia's folder for 3 by rows",
       {"--to", "spolia", "--layout", "mesh = 3; *: [shard(0)]"}},
      {"small", "100,000 tensors of 4 KiB, to safetensors", to_safetensors},
      {"small-to-dcp", "100,000 tensors of 4 KiB, to DCP", {"--to", "dcp"}},
  };
  return all;
}

std::vector<std::string> case_names() {
  std::vector<std::string> names;
  for (const Case& c : cases()) names.push_back(c.name);
  names.push_back("mapped");
  names.push_back("large");
  return names;
}

struct Options {
  std::string command = SPOLIA_COMMAND;
  std::string work = SPOLIA_BENCH_FOLDER;
  std::string checkpoint;
  std::string peer;
  std::string memory = "64MiB";
  std::vector<std::string> cases = case_names();
  double gib = 1;
  int rounds = 7;
};

/// What is converted.
struct Input {
  std::string title;
  fs::path folder;
  int64_t bytes = 0;
  int64_t chunks = 0;
};

Input describe(std::string title, const fs::path& folder) {
  const auto source = open_source(posix_store(), folder);
  Input input{std::move(title), folder};
  for (const TensorEntry& tensor : source->catalog().tensors) {
    input.bytes += tensor.bytes();
    input.chunks += static_cast<int64_t>(tensor.chunks());
  }
  return input;
}

/// The rule of how much `spolia convert` may have resident.
int64_t allowed_memory(const Input& input, const Options& options) {
  return (int64_t{64} << 20) + 150 * input.chunks + parse_bytes(options.memory);
}

std::string quoted_for_shell(const fs::path& path) { return "'" + path.string() + "'"; }

/// cp of the files, each of them and the folder fsynced.
Sample copy_and_sync(const std::vector<fs::path>& files, const fs::path& target) {
  std::vector<std::string> from, to;
  for (const fs::path& file : files) {
    from.push_back(quoted_for_shell(file));
    to.push_back(quoted_for_shell(target / file.filename()));
  }
  const std::string folder = quoted_for_shell(target);
  const Finished finished = run_shell(fmt::format("mkdir {0} && cp {1} {0} && sync {2} {0}", folder,
                                                  fmt::join(from, " "), fmt::join(to, " ")));
  return {finished.seconds, finished.peak_resident_bytes};
}

/// `bytes` from memory past the page cache into a new file, by two threads.
Sample write_directly(const fs::path& target, int64_t bytes) {
  constexpr int64_t kBlock = int64_t{4} << 20;
  Buffer block(kBlock);
  block.prefault();
  return {timed([&] {
    FileDescriptor file(::open(target.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_DIRECT, 0666));
    if (!file) throw_system_error(errno, "cannot open a file for direct writing");
    parallel_for(2, static_cast<size_t>(ceil_div(bytes, kBlock)), [&](size_t, size_t i) {
      if (::pwrite(file.get(), block.data(), kBlock, static_cast<int64_t>(i) * kBlock) != kBlock) {
        throw_system_error(errno, "cannot write directly");
      }
    });
    if (::fdatasync(file.get()) != 0) throw_system_error(errno, "cannot sync");
  })};
}

/// The peer's command reports in one line of JSON, as its own clock has it: loading Python does not count.
Sample run_peer(const std::string& command) {
  const nlohmann::json said = nlohmann::json::parse(run_shell(command).output);
  return {said.at("median_s").get<double>(), said.value("peak_rss", int64_t{0})};
}

/// Proves that the conversion has the tensors of its source.
void check_equal(const Options& options, const fs::path& source, const fs::path& converted) {
  auto digest = [&](const fs::path& path) { return run_child({options.command, "digest", path}).output; };
  if (digest(source) != digest(converted)) {
    throw MismatchError("{} and {} differ", source.string(), converted.string());
  }
}

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream file(path);
  file << text;
  if (!file.flush()) throw IoError("cannot write {}", quote(path.string()));
}

Sample convert(const Options& options, const fs::path& source, const fs::path& target,
               const std::string& memory, const std::vector<std::string>& arguments) {
  std::vector<std::string> command = {options.command, "convert", source,   target,
                                      "--memory",      memory,    "--quiet"};
  command.insert(command.end(), arguments.begin(), arguments.end());
  const Finished finished = run_child(command);
  return {finished.seconds, finished.peak_resident_bytes};
}

void compare(const Options& options, const Input& input, const std::vector<std::string>& arguments) {
  const fs::path target = fs::path(options.work) / "target";
  const std::vector<fs::path> files = files_in(input.folder);
  fs::remove_all(target);
  run_child({options.command, "verify", input.folder, "--quiet"});
  convert(options, input.folder, target, options.memory, arguments);
  check_equal(options, input.folder, target);

  auto ready = [&](double times_output) {
    return [&, times_output] {
      fs::remove_all(target);
      prime(files, static_cast<int64_t>(times_output * static_cast<double>(input.bytes)));
    };
  };
  std::vector<Contender> contenders{
      {fmt::format("spolia convert --memory {}", options.memory),
       [&] { return convert(options, input.folder, target, options.memory, arguments); }, ready(1.5)},
      {"cp of the same files, and sync", [&] { return copy_and_sync(files, target); }, ready(1.5)},
      {"as many bytes straight to the disk", [&] { return write_directly(target, input.bytes); }, ready(0.1)},
  };
  if (!options.peer.empty()) {
    contenders.push_back({"the peer (--peer)", [&] { return run_peer(options.peer); }, ready(5)});
  }
  const auto samples = take_turns(contenders, options.rounds);
  print_table(fmt::format("{}: {:.2f} GB in {} chunks, {} rounds", input.title,
                          static_cast<double>(input.bytes) / 1e9, input.chunks, options.rounds),
              contenders, samples, input.bytes);
  fmt::print("by the rule, spolia may take {} of memory\n", human_bytes(allowed_memory(input, options)));
  fs::remove_all(target);
}

Input make_input(const Options& options, const Case& c) {
  const fs::path folder = fs::path(options.work) / c.name;
  fs::remove_all(folder);
  constexpr int64_t kRanks = 2;
  if (c.name.starts_with("small")) {
    make_dcp(folder, small_shapes(100'000, 4096), Sharding::kWhole, kRanks);
  } else {
    const auto shapes = llama_like_shapes(static_cast<int64_t>(options.gib * (1 << 30)));
    make_dcp(folder, shapes, c.name.starts_with("columns") ? Sharding::kColumns : Sharding::kRows, kRanks);
  }
  return describe(c.title, folder);
}

/// What a mapping costs: rows joined, cut and put in another order, and matrices transposed, beside no
/// mapping.
void compare_mapped(const Options& options) {
  const fs::path work = options.work, source = work / "mapped", target = work / "target",
                 back = work / "back";
  for (const fs::path& folder : {source, target, back}) fs::remove_all(folder);
  const auto shapes = llama_like_shapes(static_cast<int64_t>(options.gib * (1 << 30)));
  make_dcp(source, shapes, Sharding::kRows, 2);
  const Input input = describe("2 ranks by rows", source);
  const int64_t heads = shapes[0].shape[0] / 64;
  const std::string layer = "model.layers.$LAYER_ID.";
  const std::vector<std::pair<std::string, std::string>> mappings = {
      {"joined by rows",
       "{0}mlp.up_proj.weight, {0}self_attn.o_proj.weight -> {0}joined, axis=0, sizes='[{2}, {3}]'\n"},
      {"cut by rows", "{0}mlp.up_proj.weight -> {0}a, {0}b, {0}c, {0}d, axis=0\n"},
      {"rows of 64 in another order",
       "{0}self_attn.q_proj.weight, {0}self_attn.k_proj.weight, {0}self_attn.v_proj.weight -> "
       "{0}self_attn.qkv.weight, "
       "fused_qkv, num_heads={1}, num_key_value_groups={1}, axis=0\n"},
      {"every matrix transposed",
       "{0}self_attn.q_proj.weight^T -> {0}q\n{0}self_attn.k_proj.weight^T -> {0}k\n"
       "{0}self_attn.v_proj.weight^T -> {0}v\n{0}self_attn.o_proj.weight^T -> {0}o\n"
       "{0}mlp.up_proj.weight^T -> {0}up\n{0}mlp.down_proj.weight^T -> {0}down\n"},
  };
  const std::vector<std::string> plain = {"--to", "safetensors"};
  auto ready = [&] {
    fs::remove_all(target);
    prime(files_in(source), input.bytes / 2 * 3);
  };
  std::vector<Contender> contenders{
      {"without a mapping", [&] { return convert(options, source, target, options.memory, plain); }, ready}};
  for (size_t m = 0; m < mappings.size(); ++m) {
    const fs::path file = work / fmt::format("mapping-{}", m);
    write_text(file, fmt::format(fmt::runtime(mappings[m].second), layer, heads, 4 * heads * 64, heads * 64));
    std::vector<std::string> mapped = plain, reversed = plain;
    mapped.insert(mapped.end(), {"--map", file});
    reversed.insert(reversed.end(), {"--map", file, "--reverse"});
    convert(options, source, target, options.memory, mapped);
    convert(options, target, back, options.memory, reversed);
    check_equal(options, source, back);
    for (const fs::path& folder : {target, back}) fs::remove_all(folder);
    contenders.push_back({mappings[m].first,
                          [&, mapped] { return convert(options, source, target, options.memory, mapped); },
                          ready});
  }
  print_table(fmt::format("mapped, {}, to safetensors: {:.2f} GB, --memory {}, {} rounds", input.title,
                          static_cast<double>(input.bytes) / 1e9, options.memory, options.rounds),
              contenders, take_turns(contenders, options.rounds), input.bytes);
  for (const fs::path& folder : {source, target}) fs::remove_all(folder);
}

/// One tensor of 4 GiB through 32 MiB: does it matter which way it is cut?
void compare_large(const Options& options) {
  const fs::path work = options.work, target = work / "target";
  const std::vector<NamedShape> shapes = {{"w", {32768, 32768}}};
  const int64_t bytes = int64_t{4} << 30;
  const fs::path rows = work / "large-rows", columns = work / "large-columns";
  for (const fs::path& folder : {rows, columns, target}) fs::remove_all(folder);
  make_dcp(rows, shapes, Sharding::kRows, 2);
  make_dcp(columns, shapes, Sharding::kColumns, 2);
  auto contender = [&](const std::string& name, const fs::path& source,
                       const std::vector<std::string>& arguments) {
    return Contender{name, [=, &options] { return convert(options, source, target, "32MiB", arguments); },
                     [=] {
                       fs::remove_all(target);
                       prime(files_in(source), bytes / 2 * 3);
                     }};
  };
  auto layout = [](const std::string& placement) {
    return std::vector<std::string>{"--to", "dcp", "--layout", "mesh = 8; *: [" + placement + "]"};
  };
  const std::vector<Contender> contenders = {
      contender("from 2 ranks by rows to 8 by rows", rows, layout("shard(0)")),
      contender("from 2 ranks by rows to 8 by columns", rows, layout("shard(1)")),
      contender("from 2 ranks by columns to 8 by rows", columns, layout("shard(0)")),
      contender("from 2 ranks by columns to 8 by columns", columns, layout("shard(1)")),
      contender("from 2 ranks by columns to safetensors", columns, {"--to", "safetensors"}),
  };
  print_table(fmt::format("one tensor of 4 GiB, --memory 32MiB, {} rounds", options.rounds), contenders,
              take_turns(contenders, options.rounds), bytes);
  for (const fs::path& folder : {rows, columns, target}) fs::remove_all(folder);
}

void run(const Options& options) {
  fs::create_directories(options.work);
  if (!options.checkpoint.empty()) {
    compare(options, describe(options.checkpoint, options.checkpoint), {"--to", "safetensors"});
    return;
  }
  for (const Case& c : cases()) {
    if (std::ranges::find(options.cases, c.name) == options.cases.end()) continue;
    const Input input = make_input(options, c);
    compare(options, input, c.arguments);
    fs::remove_all(input.folder);
  }
  if (std::ranges::find(options.cases, "mapped") != options.cases.end()) compare_mapped(options);
  if (std::ranges::find(options.cases, "large") != options.cases.end()) compare_large(options);
}

}  // namespace
}  // namespace spolia::bench

int main(int argc, char** argv) {
  spolia::bench::Options options;
  CLI::App app("Times `spolia convert` beside cp, the disk and, if wished, PyTorch.");
  app.add_option("--case", options.cases, "which of these; all unless told")
      ->check(CLI::IsMember(spolia::bench::case_names()));
  app.add_option("--checkpoint", options.checkpoint, "a DCP checkpoint to convert instead");
  app.add_option("--gib", options.gib, "the size of the inputs sharded by rows and columns")
      ->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "how often each runs")->check(CLI::PositiveNumber);
  app.add_option("--memory", options.memory, "the budget given to spolia");
  app.add_option("--peer", options.peer,
                 "a shell command to compare with; prints one line of JSON: median_s, peak_rss");
  app.add_option("--work", options.work, "a folder for inputs and outputs, on the disk to be measured");
  app.add_option("--command", options.command, "the spolia to measure");
  CLI11_PARSE(app, argc, argv);
  try {
    spolia::bench::print_load();
    spolia::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "convert_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
