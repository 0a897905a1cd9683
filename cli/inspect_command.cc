// spolia inspect: what a checkpoint holds.
#include <algorithm>
#include <set>

#include <fmt/format.h>

#include "cli/command.h"
#include "spolia/base/text.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string path;
  bool json = false;
  bool chunks = false;
  bool quiet = false;
};

std::vector<int64_t> list(std::span<const int64_t> numbers) { return {numbers.begin(), numbers.end()}; }

nlohmann::ordered_json value_json(const Value& value) {
  if (value.is_json()) return value.to_json();
  return {{"python", value.python_type()}};
}

nlohmann::ordered_json chunk_list(const Catalog& catalog, const TensorEntry& tensor) {
  nlohmann::ordered_json chunks = nlohmann::ordered_json::array();
  for (size_t c = 0; c < tensor.chunks(); ++c) {
    const Extent& extent = tensor.extents[c];
    chunks.push_back({{"offsets", list(tensor.boxes.offsets(c))},
                      {"sizes", list(tensor.boxes.sizes(c))},
                      {"file", catalog.files[extent.file]},
                      {"offset", extent.offset},
                      {"length", extent.length}});
  }
  return chunks;
}

std::vector<std::string> notes_of(const Catalog& catalog) {
  std::vector<std::string> notes = catalog.notes;
  for (const std::string& file : catalog.unknown_files) {
    notes.push_back(fmt::format("nothing in the checkpoint refers to the file {}", quote(file)));
  }
  return notes;
}

void print_as_json(const Source& source, const Options& options) {
  const Catalog& catalog = source.catalog();
  // Filled with emplace_back(), since operator[] would search for each name among those before it.
  nlohmann::ordered_json::object_t tensors, values;
  tensors.reserve(catalog.tensors.size());
  values.reserve(catalog.values.size());
  for (const TensorEntry& tensor : catalog.tensors) {
    nlohmann::ordered_json entry = {{"dtype", name_of(tensor.dtype)},
                                    {"shape", list(tensor.shape)},
                                    {"bytes", tensor.bytes()},
                                    {"chunks", tensor.chunks()}};
    if (options.chunks) entry["chunk_list"] = chunk_list(catalog, tensor);
    tensors.emplace_back(tensor.name, std::move(entry));
  }
  for (size_t v = 0; v < catalog.values.size(); ++v)
    values.emplace_back(catalog.values[v].name, value_json(source.value(v)));
  nlohmann::ordered_json document;
  document["format"] = catalog.format;
  document["tensors"] = std::move(tensors);
  document["values"] = std::move(values);
  print_json(document);
  if (options.quiet) return;
  for (const std::string& note : notes_of(catalog)) print_note(printable(note));
}

void print_as_text(const Source& source, const Options& options) {
  const Catalog& catalog = source.catalog();
  size_t dtype_width = 5, shape_width = 5, chunks_width = 6;
  for (const TensorEntry& tensor : catalog.tensors) {
    dtype_width = std::max(dtype_width, name_of(tensor.dtype).size());
    shape_width = std::max(shape_width, shape_text(tensor.shape).size());
    chunks_width = std::max(chunks_width, std::to_string(tensor.chunks()).size());
  }
  print(fmt::format("{}: {}\n\n", printable(options.path), catalog.format));
  print(fmt::format("{:<{}}  {:<{}}  {:>{}}  {:>10}  tensor\n", "dtype", dtype_width, "shape", shape_width,
                    "chunks", chunks_width, "bytes"));
  int64_t bytes = 0;
  size_t chunks = 0;
  for (const TensorEntry& tensor : catalog.tensors) {
    print(fmt::format("{:<{}}  {:<{}}  {:>{}}  {:>10}  {}\n", name_of(tensor.dtype), dtype_width,
                      shape_text(tensor.shape), shape_width, tensor.chunks(), chunks_width,
                      human_bytes(tensor.bytes()), printable(tensor.name)));
    bytes += tensor.bytes();
    chunks += tensor.chunks();
    for (size_t c = 0; options.chunks && c < tensor.chunks(); ++c) {
      const Extent& extent = tensor.extents[c];
      print(fmt::format("    {}  {} at {} ({} bytes)\n", box_text(tensor.boxes[c]),
                        printable(catalog.files[extent.file]), extent.offset, extent.length));
    }
  }
  if (!catalog.values.empty()) print("\nvalue\n");
  for (size_t v = 0; v < catalog.values.size(); ++v) {
    print(fmt::format("{} = {}\n", printable(catalog.values[v].name), printable(source.value(v).text())));
  }
  if (options.quiet) return;
  print(fmt::format("\n{} tensors in {} chunks, {} ({} bytes); {} values; {} files\n", catalog.tensors.size(),
                    chunks, human_bytes(bytes), bytes, catalog.values.size(), catalog.files.size()));
  for (const std::string& note : notes_of(catalog)) print(fmt::format("note: {}\n", printable(note)));
}

}  // namespace

void add_inspect_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb =
      app.add_subcommand("inspect", "Shows what a checkpoint holds: tensors, chunks, values, totals.");
  verb->add_option("PATH", options->path, "a checkpoint: a folder or a file")->required();
  verb->add_flag("--json", options->json, "print JSON");
  verb->add_flag("--chunks", options->chunks, "list every tensor's chunks and where they lie");
  verb->add_flag("--quiet", options->quiet, "show no totals and no notes");
  verb->callback([&context, options] {
    context.run = [options] {
      const auto source = open(options->path);
      if (options->json) {
        print_as_json(*source, *options);
      } else {
        print_as_text(*source, *options);
      }
      return kFine;
    };
  });
}

}  // namespace spolia::cli
