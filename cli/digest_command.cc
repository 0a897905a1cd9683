// spolia digest: a SHA-256 for each tensor, the same in every format and layout.
#include <fmt/format.h>

#include "cli/command.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/digest.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string path;
  bool json = false;
  int64_t memory = int64_t{256} << 20;
  size_t threads = 1;
};

int run(const Context& context, const Options& options) {
  const auto source = open(options.path);
  DigestOptions digest;
  digest.plan = {options.memory, options.threads};
  digest.cancel = &context.cancel;
  digest.progress = progress_bar(context);
  const std::vector<std::string> digests = digest_tensors(*source, digest);

  const std::vector<TensorEntry>& tensors = source->catalog().tensors;
  nlohmann::ordered_json::object_t document;
  document.reserve(tensors.size());
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorEntry& tensor = tensors[t];
    if (options.json) {
      nlohmann::ordered_json entry = {
          {"dtype", name_of(tensor.dtype)},
          {"shape", std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end())},
          {"sha256", digests[t]}};
      document.emplace_back(tensor.name, std::move(entry));  // operator[] would search for the name
    } else {
      print(fmt::format("{}  {}  {}  {}\n", digests[t], name_of(tensor.dtype), shape_text(tensor.shape),
                        printable(tensor.name)));
    }
  }
  if (options.json) print_json(std::move(document));
  return kFine;
}

}  // namespace

void add_digest_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand("digest",
                                      "Prints for each tensor the SHA-256 of its whole, row-major, "
                                      "little-endian bytes, however it is stored.");
  verb->add_option("PATH", options->path, "a checkpoint: a folder or a file")->required();
  verb->add_flag("--json", options->json, "print JSON");
  add_bytes_option(*verb, "--memory", options->memory, "bytes for buffers [256MiB]");
  add_threads_option(*verb, options->threads);
  verb->add_flag("--quiet", context.quiet, "show no progress");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
