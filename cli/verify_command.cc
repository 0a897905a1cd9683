// spolia verify: names all that is wrong with a checkpoint.
#include <fmt/format.h>

#include "cli/command.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/verify.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string path;
  bool json = false;
  size_t threads = 1;
};

int run(const Context& context, const Options& options) {
  const auto source = open(options.path);
  const Verdict verdict = verify(*source, {options.threads, &context.cancel, progress_bar(context)});
  const Report& report = verdict.report;
  if (options.json) {
    print_json({{"faults", verdict.faults},
                {"tensors", report.tensors},
                {"values", source->catalog().values.size()},
                {"bytes_read", report.bytes_read},
                {"checksums_checked", report.crcs_checked},
                {"checksums_absent", report.crcs_absent},
                {"seconds", report.seconds.at("verify")}});
  } else {
    for (const std::string& fault : verdict.faults) print(fmt::format("FAULT {}\n", printable(fault)));
    if (!context.quiet) {
      const double seconds = report.seconds.at("verify");
      print(fmt::format(
          "{} tensors, {} values, {} read; {} checksums right, {} chunks carry none; {} faults; {:.3f} s, "
          "{}/s\n",
          report.tensors, source->catalog().values.size(), human_bytes(report.bytes_read),
          report.crcs_checked, report.crcs_absent, verdict.faults.size(), seconds,
          human_bytes(
              static_cast<int64_t>(static_cast<double>(report.bytes_read) / std::max(seconds, 1e-9)))));
    }
  }
  return verdict.faults.empty() ? kFine : kDifference;
}

}  // namespace

void add_verify_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "verify",
      "Checks that every chunk can be read, every checksum is right and every tensor is tiled exactly once.");
  verb->add_option("PATH", options->path, "a checkpoint: a folder or a file")->required();
  verb->add_flag("--json", options->json, "print JSON");
  add_threads_option(*verb, options->threads);
  verb->add_flag("--quiet", context.quiet, "show no progress and no summary");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
