// spolia stream: a checkpoint as ranks hold it, streamed whole to all of them.
#include <algorithm>
#include <chrono>
#include <map>
#include <optional>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/mapping.h"
#include "cli/ranks.h"
#include "spolia/assemble/assembler.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/layout_text.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string source;
  std::optional<std::string> mesh;
  MappingArguments mapping;
  std::optional<int> ranks;
  int64_t memory = AssemblerOptions().memory;
  bool digest = false, dry_run = false, json = false;
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

/// The mapping as the stream will compile it: faults show, and notes are told, before anything is loaded.
SelectedMapping compiled(const MappingChoice& choice, const Catalog& source, const Source* base) {
  SelectedEntries all = select_entries(source, {});
  std::ranges::sort(all.tensors, {}, &SelectedEntry::name);
  SelectedMapping mapping =
      compile_selected(source, all.tensors, choice, base != nullptr ? &base->catalog() : nullptr);
  require_effect(mapping, choice);
  return mapping;
}

/// What the mapping takes of the base: values, or shapes and dtypes, of tensors that it calls new.
Catalog taken_of_base(const CompiledMapping& mapping, const Catalog& base) {
  Catalog taken;
  for (const MappedTensor& made : mapping.targets) {
    const TensorEntry* tensor = made.origin == Origin::kSources ? nullptr : base.find_tensor(made.name);
    if (tensor != nullptr) taken.tensors.push_back(*tensor);
  }
  return taken;
}

/// The rank's part of all that is in the catalog, loaded.
OwnedState loaded(const Context& context, const Options& options, const Dims& mesh, World& world,
                  const Source& source, const Catalog& catalog) {
  const LayoutRules rules = rules_for(catalog, mesh);
  OwnedState owned = state_for(catalog, world.rank(), &rules);
  LoadOptions how;
  how.cancel = &context.cancel;
  if (world.rank() == 0) how.progress = progress_bar(context);
  if (!options.dry_run) load(world, source, owned.state, how);
  return owned;
}

/// Adds a state under names that begin with the prefix that is returned, and none of `state` does.
std::string add_base(StateDict& state, const StateDict& base) {
  std::string prefix = "base:";
  while (std::ranges::any_of(state.entries(), [&](const auto& e) { return e.name.starts_with(prefix); })) {
    prefix += ':';
  }
  for (const StateDict::Entry& entry : base.entries()) state.add(prefix + entry.name, *entry.tensor());
  return prefix;
}

/// `mapped`: the mapping compiled, where there is one.
void stream_on_rank(const Context& context, const Options& options, const Dims& mesh,
                    const MappingChoice* mapping, const SelectedMapping& mapped, World& world,
                    const Source& source, const Source* base) {
  if (mapping != nullptr && world.rank() == 0 && !context.quiet) print_mapping(report_of(mapped));
  OwnedState owned = loaded(context, options, mesh, world, source, source.catalog());

  const Lines lines(world, mesh);
  AssemblerOptions choice;
  choice.memory = options.memory;
  choice.pieces = true;
  OwnedState owned_base;
  if (mapping != nullptr) {
    choice.mapping = &mapping->mapping;
    choice.mapping_options.reverse = mapping->reverse;
    choice.mapping_options.prefix = mapping->root.empty() ? "" : mapping->root + ".";
  }
  if (base != nullptr) {
    const Catalog taken = taken_of_base(mapped.compiled, base->catalog());
    owned_base = loaded(context, options, mesh, world, *base, taken);
    choice.mapping_options.base_prefix = add_base(owned.state, owned_base.state);
  }
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
  const std::optional<MappingChoice> mapping = read_mapping(options.mapping);
  const auto store = posix_store();
  std::unique_ptr<Source> shared, shared_base;
  SelectedMapping shared_mapped;
  if (!ranks_are_processes()) {
    shared = open(options.source);
    if (options.mapping.base) shared_base = open(*options.mapping.base);
    if (mapping) shared_mapped = compiled(*mapping, shared->catalog(), shared_base.get());
  }
  const std::optional<int> ranks =
      ranks_are_processes() ? options.ranks : std::optional(static_cast<int>(numel(mesh)));
  return run_on_ranks(ranks, [&](World& world) {
    if (shared) {
      stream_on_rank(context, options, mesh, mapping ? &*mapping : nullptr, shared_mapped, world, *shared,
                     shared_base.get());
      return;
    }
    const auto own = open_together(*world.all(), store, options.source);
    const auto own_base =
        options.mapping.base ? open_together(*world.all(), store, *options.mapping.base) : nullptr;
    SelectedMapping own_mapped;
    agree(*world.all(), "mapping", [&] {
      if (mapping) own_mapped = compiled(*mapping, own->catalog(), own_base.get());
    });
    stream_on_rank(context, options, mesh, mapping ? &*mapping : nullptr, own_mapped, world, *own,
                   own_base.get());
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
  add_mapping_options(*verb, options->mapping, add_map_option(*verb, options->mapping));
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
