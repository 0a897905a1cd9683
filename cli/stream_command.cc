// spolia stream: a checkpoint as ranks hold it, streamed whole to all of them.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/ranks.h"
#include "spolia/assemble/assembler.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/layout_text.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string source, map_root;
  std::optional<std::string> mesh, map;
  std::optional<int> ranks;
  int64_t memory = AssemblerOptions().memory;
  bool reverse = false, digest = false, dry_run = false, json = false;
};

/// The rows and columns of --mesh, or one row.
Dims mesh_of(const Options& options) {
  if (!options.mesh) return {1, rank_count(options.ranks)};
  const DeviceMesh mesh = parse_mesh(*options.mesh);
  if (mesh.ndim() != 2) {
    throw InvalidArgumentError("--mesh {}: write rows and columns, as in 2x4", quote(*options.mesh));
  }
  const int64_t size = numel(mesh.shape());
  if ((options.ranks || ranks_are_processes()) && size != rank_count(options.ranks)) {
    throw InvalidArgumentError("--mesh {} has {} ranks, but there are {}", quote(*options.mesh), size,
                               rank_count(options.ranks));
  }
  return mesh.shape();
}

/// Each row of the mesh has all of the tensors, its ranks a run of their rows each.
LayoutRules rules_for(const Catalog& catalog, const Dims& mesh) {
  const Placement rows = Shard{0};
  std::vector<LayoutRule> rules = {{"*", {Replicate{}, rows}, std::nullopt, {}, "*"}};
  for (const TensorEntry& tensor : catalog.tensors) {
    if (!is_sub_byte(tensor.dtype)) continue;
    rules.push_back({tensor.name, {Replicate{}, Replicate{}}, std::nullopt, {}, tensor.name});
  }
  return LayoutRules(DeviceMesh(mesh), std::move(rules));
}

/// The rank's row and column, where there is more than one row.
struct Lines {
  std::shared_ptr<Group> row, column;

  Lines(World& world, const Dims& mesh) {
    if (mesh[0] == 1) return;
    const auto make = [&](std::vector<int64_t> ranks, std::shared_ptr<Group>& own) {
      if (auto group = world.create(ranks)) own = std::move(group);
    };
    for (int64_t r = 0; r < mesh[0]; ++r) {
      std::vector<int64_t> ranks;
      for (int64_t c = 0; c < mesh[1]; ++c) ranks.push_back(r * mesh[1] + c);
      make(std::move(ranks), row);
    }
    for (int64_t c = 0; c < mesh[1]; ++c) {
      std::vector<int64_t> ranks;
      for (int64_t r = 0; r < mesh[0]; ++r) ranks.push_back(r * mesh[1] + c);
      make(std::move(ranks), column);
    }
  }
};

/// Digests of tensors that come whole or in pieces, a line each.
class DigestLines {
 public:
  void add(const StreamItem& item) {
    Open& open = open_[std::string(item.name)];
    open.hash.update({item.memory.data, static_cast<size_t>(item.memory.bytes())});
    if (!item.last) return;
    lines_[std::string(item.name)] =
        fmt::format("{}  {}  {}  {}\n", open.hash.finish_hex(), name_of(item.dtype), shape_text(item.shape),
                    printable(item.name));
    open_.erase(std::string(item.name));
  }
  void print_all() const {
    for (const auto& [name, line] : lines_) print(line);
  }

 private:
  struct Open {
    Sha256 hash;
  };
  std::map<std::string, Open> open_;
  std::map<std::string, std::string> lines_;
};

void print_summary(const Options& options, const Assembler& assembler, int64_t peak, double seconds) {
  const StreamPlan& plan = assembler.plan();
  if (options.json) {
    print_json({{"outputs", assembler.outputs().size()},
                {"delivered", plan.delivered},
                {"sent", plan.sent},
                {"least", plan.least},
                {"peak_bytes", peak},
                {"seconds", seconds}});
    return;
  }
  print(fmt::format(
      "{} tensors to {} ranks: {} delivered, {} sent, {} at the least; peak {} on a rank; {:.3f} s, {}/s\n",
      assembler.outputs().size(), assembler.grid().seats(), human_bytes(plan.delivered),
      human_bytes(plan.sent), human_bytes(plan.least), human_bytes(peak), seconds,
      human_bytes(static_cast<int64_t>(static_cast<double>(plan.delivered) / std::max(seconds, 1e-9)))));
}

void stream_on_rank(const Context& context, const Options& options, const Dims& mesh, const Mapping* mapping,
                    World& world, const Source& source) {
  const LayoutRules rules = rules_for(source.catalog(), mesh);
  OwnedState owned = state_for(source.catalog(), world.rank(), &rules);
  LoadOptions how;
  how.cancel = &context.cancel;
  if (world.rank() == 0) how.progress = progress_bar(context);
  if (!options.dry_run) load(world, source, owned.state, how);

  const Lines lines(world, mesh);
  AssemblerOptions choice;
  choice.memory = options.memory;
  choice.pieces = true;
  choice.mapping = mapping;
  choice.mapping_options.reverse = options.reverse;
  choice.mapping_options.prefix = options.map_root.empty() ? "" : options.map_root + ".";
  const auto start = std::chrono::steady_clock::now();
  const auto assembler = lines.row == nullptr ? std::make_unique<Assembler>(*world.all(), owned.state, choice)
                                              : std::make_unique<Assembler>(
                                                    lines.row.get(), lines.column.get(), owned.state, choice);
  if (options.dry_run) {
    if (world.rank() == 0) print(assembler->plan_text());
    assembler->stop();
    return;
  }
  DigestLines digests;
  for_each_item(*assembler, [&](const StreamItem& item) {
    context.cancel.check();
    if (options.digest && world.rank() == 0) digests.add(item);
    return true;
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::vector<int64_t> peaks = all_gather_number(*world.all(), assembler->report().peak_bytes);
  if (world.rank() != 0) return;
  if (options.digest) {
    digests.print_all();
  } else if (!context.quiet || options.json) {
    print_summary(options, *assembler, std::ranges::max(peaks), seconds);
  }
}

int run(const Context& context, const Options& options) {
  const Dims mesh = mesh_of(options);
  std::optional<Mapping> mapping;
  if (options.map) mapping = parse_mapping(read_text(*options.map, "a mapping"));
  const auto store = posix_store();
  std::unique_ptr<Source> shared;
  if (!ranks_are_processes()) shared = open(options.source);
  const std::optional<int> ranks =
      ranks_are_processes() ? options.ranks : std::optional(static_cast<int>(numel(mesh)));
  return run_on_ranks(ranks, [&](World& world) {
    std::unique_ptr<Source> own;
    if (!shared) own = open_together(*world.all(), store, options.source);
    stream_on_rank(context, options, mesh, mapping ? &*mapping : nullptr, world, shared ? *shared : *own);
  });
}

}  // namespace

void add_stream_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("stream",
                         "Loads a checkpoint in shards over ranks and streams its tensors whole to all of "
                         "them, within a budget of memory.");
  verb->add_option("SRC", options->source, "the checkpoint to read: a folder or a file")->required();
  add_ranks_option(*verb, options->ranks);
  verb->add_option(
          "--mesh", options->mesh,
          "the ranks in rows and columns: each row holds all, and parts travel down columns, then along rows")
      ->type_name("RxC");
  auto* map = verb->add_option("--map", options->map,
                               "a file that says what becomes of the tensors; see docs/mapping.md")
                  ->type_name("FILE");
  verb->add_flag("--reverse", options->reverse, "run the mapping backwards")->needs(map);
  verb->add_option("--map-root", options->map_root, "the key below which the mapping's names lie: model")
      ->type_name("KEY")
      ->needs(map);
  add_bytes_option(
      *verb, "--memory", options->memory,
      "bytes on each rank for tensors on their way, 128KiB or more; larger ones come in pieces [256MiB]");
  auto* digest =
      verb->add_flag("--digest", options->digest, "print what `spolia digest` prints, of what was streamed");
  verb->add_flag("--dry-run", options->dry_run, "print the plan: who sends what to whom, and when")
      ->excludes(digest);
  verb->add_flag("--json", options->json, "print the summary as JSON")->excludes(digest);
  verb->add_flag("--quiet", context.quiet, "show no progress and no summary");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
