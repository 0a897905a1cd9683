// spolia map: what a mapping makes of a checkpoint. Writes nothing.
#include <algorithm>
#include <optional>

#include <fmt/format.h>

#include "cli/command.h"
#include "cli/mapping.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/map_tensors.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string source;
  std::optional<std::string> target;
  MappingArguments mapping;
  Selection selection;
  bool json = false;
};

std::vector<int64_t> list(std::span<const int64_t> numbers) { return {numbers.begin(), numbers.end()}; }

bool takes_all(const RegionCopy& copy, const TensorDescription& from) {
  return copy.region == nullptr || copy.region->source == whole(from.shape);
}

bool fills_all(const RegionCopy& copy, const MappedTensor& tensor) {
  return copy.region == nullptr || copy.region->target == whole(tensor.shape);
}

/// "q_proj [4, 0] + [2, 8], dims [1, 0], cast from float32": what a copy takes.
std::string taken_text(const RegionCopy& copy, const TensorDescription& from, const MappedTensor& tensor) {
  std::string text = printable(from.name);
  if (!takes_all(copy, from)) text += " " + box_text(copy.region->source);
  if (copy.region != nullptr && !copy.region->permute.empty()) {
    text += fmt::format(", dims {}", list_text(copy.region->permute));
  }
  if (from.dtype != tensor.dtype) text += fmt::format(", cast from {}", name_of(from.dtype));
  return text;
}

void print_tensor(const SelectedMapping& mapping, size_t t) {
  const MappedTensor& tensor = mapping.compiled.targets[t];
  const std::span<const RegionCopy> copies = mapping.compiled.copies_of(t);
  std::string text =
      fmt::format("{}  {}  {}", name_of(tensor.dtype), shape_text(tensor.shape), printable(tensor.name));
  const bool one = copies.size() == 1 && fills_all(copies[0], tensor);
  if (tensor.origin == Origin::kFill) text += fmt::format(" <- {} everywhere", tensor.fill);
  if (tensor.origin == Origin::kInitial) text += " <- as the base has it";
  if (one) text += " <- " + taken_text(copies[0], mapping.tensors[copies[0].source], tensor);
  if (tensor.at.line > 0) text += fmt::format("  (line {})", tensor.at.line);
  print(text + "\n");
  if (one) return;
  constexpr size_t kShown = 12;  // of hundreds, where heads are fused
  for (size_t c = 0; c < std::min(kShown, copies.size()); ++c) {
    print(fmt::format("    {} <- {}\n", box_text(copies[c].region->target),
                      taken_text(copies[c], mapping.tensors[copies[c].source], tensor)));
  }
  if (copies.size() > kShown)
    print(fmt::format("    ... {} more, which --json lists\n", copies.size() - kShown));
}

void print_as_text(const Context& context, const SelectedMapping& mapping, const MappingReport& report) {
  for (size_t t = 0; t < mapping.compiled.targets.size(); ++t) print_tensor(mapping, t);
  auto names = [](std::string_view what, const std::vector<std::string>& listed) {
    for (const std::string& name : listed) print(fmt::format("{}: {}\n", what, printable(name)));
  };
  names("dropped", report.dropped);
  names("unused", report.unused);
  names("missing", mapping.compiled.missing);
  if (context.quiet) return;
  for (const std::string& note : report.notes) print(fmt::format("note: {}\n", printable(note)));
  const size_t made = mapping.compiled.targets.size();
  print(fmt::format("\n{} tensor{} of {}; {} dropped, {} unused, {} missing\n", made, made == 1 ? "" : "s",
                    mapping.tensors.size(), report.dropped.size(), report.unused.size(),
                    mapping.compiled.missing.size()));
}

nlohmann::ordered_json copy_json(const RegionCopy& copy, const TensorDescription& from,
                                 const MappedTensor& tensor) {
  const Region region =
      copy.region != nullptr ? *copy.region : Region{whole(from.shape), whole(tensor.shape), {}};
  nlohmann::ordered_json json = {{"from", from.name},
                                 {"offsets", list(region.target.offsets)},
                                 {"sizes", list(region.target.sizes)},
                                 {"from_offsets", list(region.source.offsets)},
                                 {"from_sizes", list(region.source.sizes)}};
  if (!region.permute.empty()) json["permute"] = list(region.permute);
  if (from.dtype != tensor.dtype) json["from_dtype"] = name_of(from.dtype);
  return json;
}

void print_as_json(const SelectedMapping& mapping, const MappingReport& report) {
  nlohmann::ordered_json::object_t tensors;
  for (size_t t = 0; t < mapping.compiled.targets.size(); ++t) {
    const MappedTensor& tensor = mapping.compiled.targets[t];
    nlohmann::ordered_json entry = {{"dtype", name_of(tensor.dtype)}, {"shape", list(tensor.shape)}};
    if (tensor.at.line > 0) entry["line"] = tensor.at.line;
    if (tensor.origin == Origin::kFill) entry["fill"] = tensor.fill;
    if (tensor.origin == Origin::kInitial) entry["base"] = true;
    entry["copies"] = nlohmann::ordered_json::array();
    for (const RegionCopy& copy : mapping.compiled.copies_of(t)) {
      entry["copies"].push_back(copy_json(copy, mapping.tensors[copy.source], tensor));
    }
    tensors.emplace_back(tensor.name, std::move(entry));  // operator[] would search for the name
  }
  nlohmann::ordered_json json;
  json["tensors"] = std::move(tensors);
  json["dropped"] = report.dropped;
  json["unused"] = report.unused;
  json["missing"] = mapping.compiled.missing;
  json["notes"] = report.notes;
  print_json(json);
}

int run(const Context& context, const Options& options) {
  const MappingChoice choice = *read_mapping(options.mapping);
  const auto source = open(options.source);
  const auto base = options.mapping.base ? open(*options.mapping.base) : nullptr;
  const auto target = options.target ? open(*options.target) : nullptr;
  SelectedEntries selected = select_entries(source->catalog(), options.selection);
  std::ranges::sort(selected.tensors, {}, &SelectedEntry::name);
  const SelectedMapping mapping =
      compile_selected(source->catalog(), selected.tensors, choice, base ? &base->catalog() : nullptr,
                       target ? &target->catalog() : nullptr);
  const MappingReport report = report_of(mapping);
  if (options.json) {
    print_as_json(mapping, report);
  } else {
    print_as_text(context, mapping, report);
  }
  return mapping.compiled.missing.empty() ? kFine : kDifference;
}

}  // namespace

void add_map_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "map", "Shows what a mapping (docs/mapping.md) makes of a checkpoint's tensors. Writes nothing.");
  verb->add_option("FILE", options->mapping.file, "the mapping")->required();
  verb->add_option("SRC", options->source, "the checkpoint: a folder or a file")->required();
  add_selection_options(*verb, options->selection);
  add_mapping_options(*verb, options->mapping);
  verb->add_option(
          "--target", options->target,
          "a checkpoint whose tensors are to be made, and no others; tells what is missing, and exits "
          "with 1 if anything is")
      ->type_name("CHECKPOINT");
  verb->add_flag("--json", options->json, "print JSON, with every copy");
  verb->add_flag("--quiet", context.quiet, "show no totals and no notes");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
