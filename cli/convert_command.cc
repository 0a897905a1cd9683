// spolia convert: a checkpoint into another format, whole or not at all.
#include <sys/resource.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <optional>
#include <system_error>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/mapping.h"
#include "cli/ranks.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/checkpoint/layout_option.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/staged_folder.h"
#include "spolia/comm/agree.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string source, destination, format;
  std::optional<std::string> dtype, layout;
  MappingArguments mapping;
  std::optional<int> ranks;
  Selection selection;
  int64_t memory = int64_t{1} << 30;
  int64_t max_shard_bytes = ConvertOptions().max_shard_bytes;
  size_t threads = 1;
  bool overwrite = false, non_atomic = false;
  bool verify = false, no_verify = false, no_sync = false;
  bool dry_run = false, json = false;
};

const std::map<std::string, TargetFormat>& formats() {
  static const std::map<std::string, TargetFormat> formats = {{"safetensors", TargetFormat::kSafetensors},
                                                              {"dcp", TargetFormat::kDcp},
                                                              {"spolia", TargetFormat::kSpolia}};
  return formats;
}

DType parse_dtype(const std::string& name) {
  const std::optional<DType> dtype = dtype_from_name(name);
  if (!dtype)
    throw InvalidArgumentError("--dtype {}: there is no such dtype; say float32, bfloat16, ...", quote(name));
  return *dtype;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

void print_left_out(const std::vector<std::string>& names, const std::string& format) {
  if (names.empty()) return;
  print_note(fmt::format("{} value{} left out, which {} cannot hold:{}", names.size(),
                         names.size() == 1 ? "" : "s", format, shortened(names)));
}

/// Layout rules as they were given: in the file of that name, or, where there is none, in the text itself.
std::string layout_text(const std::string& given) {
  const bool may_be_rules = given.empty() || given.find_first_of("={[(:;") != std::string::npos;
  std::error_code too_long;  // for a name, not for rules
  if (may_be_rules && !std::filesystem::exists(given, too_long)) return given;
  return read_text(given, "layout rules");
}

ConvertOptions convert_options(const Options& options, int ranks) {
  ConvertOptions convert;
  convert.selection = options.selection;
  convert.mapping = read_mapping(options.mapping);
  if (options.dtype) convert.dtype = parse_dtype(*options.dtype);
  convert.to = formats().at(options.format);
  if (options.layout) convert.layout = read_layout_rules(layout_text(*options.layout));
  convert.max_shard_bytes = options.max_shard_bytes;
  convert.files = ranks;
  convert.checksums = !options.no_verify;
  convert.plan = {options.memory, options.threads};
  return convert;
}

RunOptions run_options(const Context& context, const Options& options) {
  RunOptions run;
  run.cancel = &context.cancel;
  run.progress = progress_bar(context);
  run.check_source = !options.no_verify;
  run.read_back = options.verify;
  run.durable = !options.no_sync;
  if (options.overwrite) {
    run.existing = options.non_atomic ? Existing::kReplaceInTwoSteps : Existing::kExchange;
  }
  return run;
}

void add_mapping(const MappingReport& mapping, nlohmann::ordered_json& json) {
  json["dropped"] = mapping.dropped;
  json["unused"] = mapping.unused;
  json["mapping_notes"] = mapping.notes;
}

void print_plan(const Context& context, const Options& options, const Conversion& conversion,
                const Source& from) {
  const Target& target = *conversion.target;
  const Catalog& source = conversion.read_from(from).catalog();
  if (options.json) {
    nlohmann::ordered_json plan = plan_json(conversion.plan, source, target.catalog());
    plan["left_out"] = target.left_out();
    if (options.mapping.file) add_mapping(conversion.mapping, plan);
    print_json(plan);
  } else {
    print(plan_text(conversion.plan, source, target.catalog()));
    if (context.quiet) return;
    print_left_out(target.left_out(), options.format);
    print_mapping(conversion.mapping);
  }
}

void print_report(const Context& context, const Options& options, const Report& report,
                  const Conversion& conversion, double seconds) {
  const std::vector<std::string>& files = conversion.target->catalog().files;
  if (options.json) {
    nlohmann::ordered_json json = {{"tensors", report.tensors},
                                   {"files", files},
                                   {"bytes_read", report.bytes_read},
                                   {"bytes_written", report.bytes_written},
                                   {"checksums_checked", report.crcs_checked},
                                   {"decoders_reopened", report.decoders_reopened},
                                   {"read_back", options.verify},
                                   {"seconds", seconds},
                                   {"peak_resident_bytes", peak_resident_bytes()},
                                   {"left_out", report.left_out},
                                   {"notes", report.notes}};
    if (options.mapping.file) add_mapping(conversion.mapping, json);
    print_json(json);
  } else if (!context.quiet) {
    print_left_out(report.left_out, options.format);
    print_mapping(conversion.mapping);
    for (const std::string& note : report.notes) print_note(note);
    if (report.decoders_reopened > 0) {
      print_note(fmt::format("compressed items were decoded again {} times; more --memory avoids that",
                             report.decoders_reopened));
    }
    print(fmt::format(
        "{} tensors, {} in {} file{}; {} checksums right; {:.3f} s, {}/s, of which {:.3f} s waiting for the "
        "disk; peak memory {}\n",
        report.tensors, human_bytes(report.bytes_written), files.size(), files.size() == 1 ? "" : "s",
        report.crcs_checked, seconds,
        human_bytes(
            static_cast<int64_t>(static_cast<double>(report.bytes_written) / std::max(seconds, 1e-9))),
        report.seconds.at("sync"), human_bytes(peak_resident_bytes())));
    if (options.verify) print("read back: every digest as it should be\n");
  }
}

/// Each rank's part of the memory and the threads.
PlanOptions part_of_a_rank(const PlanOptions& all, int ranks) {
  if (ranks_are_processes()) return all;
  PlanOptions part = all;
  part.memory = all.memory / ranks;
  part.threads = std::max<size_t>(1, all.threads / static_cast<size_t>(ranks));
  if (part.memory >= kLeastMemory) return part;
  throw InvalidArgumentError("--memory {} is too small for {} ranks; give {} or more, or fewer ranks",
                             human_bytes(all.memory), ranks, human_bytes(kLeastMemory * ranks));
}

/// On several ranks. Those that are threads share the source and the plan; processes make the same each.
int run_together(const Context& context, const Options& options, int ranks) {
  const auto start = std::chrono::steady_clock::now();
  const auto store = posix_store();
  const ConvertOptions convert = convert_options(options, ranks);
  const PlanOptions part = part_of_a_rank(convert.plan, ranks);
  std::unique_ptr<Source> shared, shared_base;
  std::optional<Conversion> planned;
  if (!ranks_are_processes()) {
    shared = open(options.source);
    if (options.mapping.base) shared_base = open(*options.mapping.base);
    planned = plan_conversion(*shared, convert, shared_base.get());
  }
  return run_on_ranks(options.ranks, [&](World& world) {
    std::unique_ptr<Source> own, own_base;
    if (!shared) own = open_together(*world.all(), store, options.source);
    if (!shared && options.mapping.base) own_base = open_together(*world.all(), store, *options.mapping.base);
    const Source& source = shared ? *shared : *own;
    std::optional<Conversion> own_plan;
    agree(*world.all(), "planning", [&] {
      if (!planned) own_plan = plan_conversion(source, convert, own_base.get());
    });
    const Conversion& conversion = planned ? *planned : *own_plan;
    RunOptions how = run_options(context, options);
    if (world.rank() != 0) how.progress = {};
    const Report report =
        convert_together(*world.all(), source, conversion, part, *store, options.destination, how);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    if (world.rank() == 0) {
      print_report(context, options, report, conversion, seconds);
    }
  });
}

int run(const Context& context, const Options& options) {
  const int ranks = rank_count(options.ranks);
  if (ranks > 1 && !options.dry_run) {
    refuse_inside(*posix_store(), options.source, options.destination);
    return run_together(context, options, ranks);
  }
  const auto start = std::chrono::steady_clock::now();
  const auto store = posix_store();
  refuse_inside(*store, options.source, options.destination);
  const auto source = open(options.source);
  const auto base = options.mapping.base ? open(*options.mapping.base) : nullptr;
  const Conversion conversion = plan_conversion(*source, convert_options(options, ranks), base.get());
  const RunOptions how = run_options(context, options);
  if (options.dry_run) {
    // Refused where the conversion would be. What that makes to find out goes away at once.
    const StagedFolder destination(*store, options.destination, how.existing);
    print_plan(context, options, conversion, *source);
    return kFine;
  }
  const Report report = run_conversion(*source, conversion, *store, options.destination, how);
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  print_report(context, options, report, conversion, seconds);
  return kFine;
}

}  // namespace

void add_convert_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("convert", "Writes a checkpoint in another format, whole or not at all.");
  verb->add_option("SRC", options->source, "the checkpoint to read: a folder or a file")->required();
  verb->add_option("DST", options->destination, "the folder to create")->required();
  verb->add_option("--to", options->format,
                   "the format to write: safetensors (a Hugging Face folder), dcp "
                   "(torch.distributed.checkpoint), spolia (Spolia's own folder)")
      ->required()
      ->check(CLI::IsMember(formats()));
  verb->add_option(
          "--layout", options->layout,
          "how ranks will share the tensors, for dcp and spolia: a file, or text such as 'mesh = 2x2 "
          "(dp, tp); *.weight: [shard(0), shard(1)]'; see docs/layouts.md")
      ->type_name("LAYOUT");
  add_bytes_option(*verb, "--memory", options->memory, "bytes for buffers, 16MiB or more [1GiB]");
  add_bytes_option(*verb, "--max-shard-size", options->max_shard_bytes,
                   "most bytes of tensors in a file, without --layout [5GB]");
  add_selection_options(*verb, options->selection);
  add_mapping_options(*verb, options->mapping, add_map_option(*verb, options->mapping));
  verb->add_option("--dtype", options->dtype,
                   "cast floating-point tensors, last of all: float64, float32, float16, bfloat16");
  auto* overwrite = verb->add_flag("--overwrite", options->overwrite,
                                   "replace a checkpoint at DST, in one step when all is written");
  verb->add_flag("--non-atomic", options->non_atomic,
                 "with --overwrite, where the file system cannot exchange two folders: replace in two steps")
      ->needs(overwrite);
  auto* check = verb->add_flag("--verify", options->verify,
                               "read back what was written and compare digests before it is published");
  verb->add_flag("--no-verify", options->no_verify,
                 "neither check nor write checksums; bytes are copied inside the kernel where they can be")
      ->excludes(check);
  verb->add_flag("--no-sync", options->no_sync, "do not wait until everything is on the disk");
  verb->add_flag("--dry-run", options->dry_run,
                 "print the plan, see whether DST could be written, leave nothing");
  verb->add_flag("--json", options->json, "print the plan or the report as JSON");
  add_threads_option(*verb, options->threads);
  add_ranks_option(*verb, options->ranks);
  verb->add_flag("--quiet", context.quiet, "show no progress and no summary");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
