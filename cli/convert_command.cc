// spolia convert: a checkpoint into another format, whole or not at all.
#include <sys/resource.h>

#include <chrono>

#include <fmt/format.h>

#include "cli/command.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/convert.h"
#include "spolia/checkpoint/staged_folder.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string source, destination, format, dtype;
  Selection selection;
  int64_t memory = int64_t{1} << 30;
  int64_t max_shard_bytes = ConvertOptions().max_shard_bytes;
  size_t threads = 1;
  bool dry_run = false, json = false;
};

std::optional<DType> parse_dtype(const std::string& name) {
  if (name.empty()) return std::nullopt;
  const std::optional<DType> dtype = dtype_from_name(name);
  if (!dtype)
    throw InvalidArgumentError("--dtype {}: there is no such dtype; say float32, bfloat16, ...", quote(name));
  return dtype;
}

int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return int64_t{usage.ru_maxrss} * 1024;
}

void print_left_out(const std::vector<std::string>& names) {
  if (names.empty()) return;
  std::string text = fmt::format("{} values left out, which safetensors cannot hold:", names.size());
  constexpr size_t kShown = 5;
  for (size_t i = 0; i < std::min(kShown, names.size()); ++i) text += " " + printable(names[i]);
  print_note(text + (names.size() > kShown ? " ..." : ""));
}

int run(const Context& context, const Options& options) {
  const auto start = std::chrono::steady_clock::now();
  const auto store = posix_store();
  refuse_inside(*store, options.source, options.destination);
  const auto source = open(options.source);
  ConvertOptions convert;
  convert.selection = options.selection;
  convert.dtype = parse_dtype(options.dtype);
  convert.max_shard_bytes = options.max_shard_bytes;
  convert.plan = {options.memory, options.threads};
  const Conversion conversion = plan_conversion(source->catalog(), convert);
  const Catalog& target = conversion.target.catalog;
  if (options.dry_run) {
    if (options.json) {
      nlohmann::ordered_json plan = plan_json(conversion.plan, source->catalog(), target);
      plan["left_out"] = conversion.left_out;
      print_json(plan);
    } else {
      print(plan_text(conversion.plan, source->catalog(), target));
      if (!context.quiet) print_left_out(conversion.left_out);
    }
    return kFine;
  }

  const Report report = run_conversion(*source, conversion, *store, options.destination,
                                       {&context.cancel, progress_bar(context)});
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  if (options.json) {
    print_json({{"tensors", report.tensors},
                {"files", target.files},
                {"bytes_read", report.bytes_read},
                {"bytes_written", report.bytes_written},
                {"checksums_checked", report.crcs_checked},
                {"decoders_reopened", report.decoders_reopened},
                {"seconds", seconds},
                {"peak_resident_bytes", peak_resident_bytes()},
                {"left_out", conversion.left_out},
                {"notes", report.notes}});
  } else if (!context.quiet) {
    print_left_out(conversion.left_out);
    for (const std::string& note : report.notes) print_note(note);
    if (report.decoders_reopened > 0) {
      print_note(fmt::format("compressed items were decoded again {} times; more --memory avoids that",
                             report.decoders_reopened));
    }
    print(fmt::format(
        "{} tensors, {} in {} file{}; {} checksums right; {:.3f} s, {}/s, of which {:.3f} s waiting for the "
        "disk; "
        "peak memory {}\n",
        report.tensors, human_bytes(report.bytes_written), target.files.size(),
        target.files.size() == 1 ? "" : "s", report.crcs_checked, seconds,
        human_bytes(
            static_cast<int64_t>(static_cast<double>(report.bytes_written) / std::max(seconds, 1e-9))),
        report.seconds.at("sync"), human_bytes(peak_resident_bytes())));
  }
  return kFine;
}

}  // namespace

void add_convert_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("convert", "Writes a checkpoint in another format, whole or not at all.");
  verb->add_option("SRC", options->source, "the checkpoint to read: a folder or a file")->required();
  verb->add_option("DST", options->destination, "the folder to create; it must not exist")->required();
  verb->add_option("--to", options->format, "the format to write: safetensors (a Hugging Face folder)")
      ->required()
      ->check(CLI::IsMember({"safetensors"}));
  add_bytes_option(*verb, "--memory", options->memory, "bytes for buffers, 16MiB or more [1GiB]");
  add_bytes_option(*verb, "--max-shard-size", options->max_shard_bytes,
                   "most bytes of tensors in a file [5GB]");
  verb->add_option("--root", options->selection.root, "only what lies below this key, without the key: model")
      ->type_name("KEY");
  verb->add_option("--select", options->selection.select,
                   "only tensors whose name in SRC matches a pattern (*, ?); repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  verb->add_option("--drop", options->selection.drop, "without tensors whose name in SRC matches; repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  verb->add_option("--strip-prefix", options->selection.strip_prefix, "take this off the front of names")
      ->type_name("PREFIX");
  verb->add_option("--add-prefix", options->selection.add_prefix, "put this before names")
      ->type_name("PREFIX");
  verb->add_option("--dtype", options->dtype,
                   "cast floating-point tensors: float64, float32, float16, bfloat16");
  verb->add_flag("--dry-run", options->dry_run, "print the plan, write nothing");
  verb->add_flag("--json", options->json, "print the plan or the report as JSON");
  add_threads_option(*verb, options->threads);
  verb->add_flag("--quiet", context.quiet, "show no progress and no summary");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
