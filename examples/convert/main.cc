// Exports what lies below one key of a checkpoint, say its model, as a Hugging Face folder.
#include <fmt/format.h>

#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/checkpoint/convert.h"

int main(int argc, char** argv) try {
  if (argc != 4) {
    fmt::print(stderr, "usage: export_model CHECKPOINT KEY NEW_FOLDER\n");
    return 2;
  }
  const auto store = spolia::posix_store();
  const auto source = spolia::open_source(store, argv[1]);
  for (const spolia::TensorEntry& tensor : source->catalog().tensors) {
    fmt::print("{}: {} in {} chunks\n", spolia::printable(tensor.name), spolia::human_bytes(tensor.bytes()),
               tensor.chunks());
  }

  spolia::ConvertOptions what;
  what.selection.root = argv[2];
  what.plan = {.memory = 256 << 20, .threads = spolia::hardware_threads()};
  const spolia::Conversion conversion = spolia::plan_conversion(*source, what);
  fmt::print("{} to write\n", spolia::human_bytes(conversion.plan.cost.bytes_written));

  const spolia::Report report = spolia::run_conversion(*source, conversion, *store, argv[3], {});
  fmt::print("{} tensors written, {} checksums right\n", report.tensors, report.crcs_checked);
} catch (const spolia::Error& error) {
  fmt::print(stderr, "export_model: {}\n", error.what());
  return 2;
}
