#include "spolia/checkpoint/save.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/save_plan.h"
#include "spolia/checkpoint/value_text.h"
#include "spolia/checkpoint/write_together.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/format/file_names.h"
#include "spolia/format/native/merged_manifest.h"
#include "spolia/format/native/native_target.h"
#include "spolia/format/torch/dcp_target.h"

namespace spolia {
namespace {

bool is_replicated(const Layout& layout) { return layout.replicas(layout.mesh().ranks().front()).size() > 1; }

TensorEntry describe_target(const JobState::Tensor& tensor, const SharedTensor& shared) {
  TensorEntry entry;
  entry.name = tensor.name;
  entry.path = tensor.path;
  entry.dtype = shared.dtype;
  entry.shape = shared.shape;
  entry.boxes = BoxList(shared.shape.size());
  entry.requires_grad = tensor.requires_grad;
  entry.layout = shared.layout;
  // Of shards without replicas the boxes follow from the layout.
  if (shared.layout != nullptr && !is_replicated(*shared.layout)) entry.replica = 0;
  return entry;
}

/// The target with the chunks that `parts` are.
std::unique_ptr<Target> make_target(const JobState& job, std::span<const OwnedPart> parts, bool with_values,
                                    int64_t ranks, const SaveOptions& options,
                                    std::optional<uint32_t> alone = std::nullopt) {
  TargetContents contents;
  contents.alone = alone;
  contents.writers = static_cast<size_t>(ranks);
  contents.checksums = options.checksums;
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    contents.catalog.tensors.push_back(describe_target(job.tensors[t], job.shared[t]));
    if (alone) contents.catalog.tensors.back().replica.reset();
  }
  contents.order.resize(job.tensors.size());
  std::iota(contents.order.begin(), contents.order.end(), size_t{0});
  for (const OwnedPart& part : parts) {
    TensorEntry& tensor = contents.catalog.tensors[part.tensor];
    tensor.boxes.add(part.box);
    tensor.extents.push_back({static_cast<uint32_t>(part.owner), 0, byte_size(tensor.dtype, part.box.sizes)});
  }
  for (size_t v = 0; with_values && v < job.values.size(); ++v) {
    contents.values.push_back({job.values[v].name, job.values[v].path, v});
  }
  switch (options.to) {
    case TargetFormat::kSpolia:
      return make_spolia_target(std::move(contents));
    case TargetFormat::kDcp:
      if (options.replicas == Replicas::kEachHost || options.replicas == Replicas::kEvery) {
        throw InvalidArgumentError(
            "DCP's metadata has one place for each box; copies on several ranks can be kept in a spolia "
            "folder");
      }
      return make_dcp_target(std::move(contents));
    case TargetFormat::kSafetensors:
      break;
  }
  throw InvalidArgumentError(
      "ranks' shards are saved as spolia or dcp; a Hugging Face folder holds whole tensors: convert, or "
      "stream");
}

/// What all ranks have to give alike.
std::string options_text(const SaveOptions& options) {
  return fmt::format(
      "to {}, replicas {}, hosts {}, rank_keyed {}, compare_contents {}, checksums {}, durable {}",
      static_cast<int>(options.to), static_cast<int>(options.replicas), fmt::join(options.hosts, ","),
      fmt::join(options.rank_keyed, ","), options.compare_contents, options.checksums, options.durable);
}

/// What of the options is in a plan.
std::string plan_text(const SaveOptions& options) {
  return fmt::format("{} memory {} threads {} tile {}", options_text(options), options.plan.memory,
                     options.plan.threads, options.plan.largest_tile);
}

/// The view of the part's box, in the memory of the entry.
View view_of(const LocalTensor& tensor, const OwnedPart& part, int64_t rank) {
  for (const LocalTensor::Piece& piece : tensor.pieces(rank)) {
    if (contains(piece.global, part.box)) return view_of_box(piece.view, piece.global, part.box);
  }
  return dense_view(tensor.memory.data, tensor.memory.dtype, part.box.sizes);  // it has no elements
}

std::vector<MemoryTensor> memory_of(const SavePlan& plan, const StateDict& state, int64_t rank) {
  std::vector<MemoryTensor> tensors;
  for (const OwnedPart& part : plan.parts) {
    const StateDict::Entry& entry = *state.find(plan.job.tensors[part.tensor].name);
    tensors.push_back({entry.name, view_of(*entry.tensor(), part, rank)});
  }
  return tensors;
}

/// On place 0, the values of all: its own, and what others alone have. Collective.
std::vector<ValueEntry> gather_values(Group& group, const JobState& job, const StateDict& state) {
  std::vector<int64_t> lengths;
  std::string texts;
  agree(group, "gathering values", [&] {
    for (const JobState::NamedValue& value : job.values) {
      if (value.rank == 0 || value.rank != group.place()) continue;
      const auto text = value_text(*state.find(value.name)->value());
      if (!text) {
        throw UnsupportedError("value {} is an object that cannot be sent to rank 0, which writes values",
                               quote(value.name));
      }
      lengths.push_back(std::ssize(*text));
      texts += *text;
    }
  });
  const bool all_at_home = std::ranges::all_of(job.values, [](const auto& value) { return value.rank == 0; });
  std::vector<std::vector<int64_t>> all_lengths;
  std::vector<std::string> all_texts;
  if (!all_at_home) {
    all_lengths = all_gather_lists(group, lengths);
    all_texts = all_gather_texts(group, texts);
  }

  std::vector<ValueEntry> values;
  if (group.place() != 0) return values;
  std::map<int64_t, std::pair<size_t, size_t>> next;  // of each rank: the value, and where its text begins
  for (const JobState::NamedValue& value : job.values) {
    if (value.rank == 0) {
      values.push_back({value.name, std::nullopt, *state.find(value.name)->value(), value.path});
      continue;
    }
    auto& [number, begin] = next[value.rank];
    const auto from = static_cast<size_t>(value.rank);
    const auto length = static_cast<size_t>(all_lengths[from][number++]);
    values.push_back({value.name, std::nullopt,
                      value_of_text(std::string_view(all_texts[from]).substr(begin, length)), value.path});
    begin += length;
  }
  return values;
}

/// The plan of a rank that writes those of the parts that are its own; `known`: all that its target lists.
SavePlan plan_writing(JobState job, std::vector<OwnedPart> known, int64_t rank, int64_t ranks,
                      const SaveOptions& options, std::optional<uint32_t> alone) {
  SavePlan plan;
  plan.target = make_target(job, known, rank == 0 || alone, ranks, options, alone);
  std::vector<PieceTarget::Piece> pieces;
  std::map<size_t, size_t> next_chunk;  // of each tensor
  for (OwnedPart& part : known) {
    const size_t chunk = next_chunk[part.tensor]++;
    if (part.owner != rank) continue;
    pieces.push_back({part.tensor, chunk});
    plan.parts.push_back(std::move(part));
  }
  plan.pieces = std::make_unique<const PieceTarget>(*plan.target, std::move(pieces));
  plan.files = files_of(*plan.pieces);
  const bool writes_values_in_file =
      options.to == TargetFormat::kDcp && (rank == 0 || alone) && !job.values.empty();
  if (writes_values_in_file && (plan.files.empty() || plan.files.front() != 0)) {
    plan.files.insert(plan.files.begin(), 0);
  }

  const Catalog& catalog = plan.pieces->catalog();
  std::vector<RegionCopy> copies;
  for (size_t p = 0; p < catalog.tensors.size(); ++p) copies.push_back(copy_whole(p, p));
  plan.transfer = plan_transfer(catalog, catalog, std::move(copies), plan.pieces->order(), options.plan);
  plan.job = std::move(job);
  return plan;
}

/// The plan, from the cache where all ranks have it there.
std::shared_ptr<const SavePlan> plan_for(Group& group, const Descriptions& descriptions,
                                         const SaveOptions& options) {
  const std::string key = descriptions.fingerprint + plan_text(options);
  std::shared_ptr<const SavePlan> plan;
  if (options.cache != nullptr) plan = options.cache->find(key);
  const std::vector<int64_t> found = all_gather_number(group, plan != nullptr ? 1 : 0);
  const bool everywhere = std::ranges::find(found, 0) == found.end();
  // Contents are not in the plan: where descriptions differ, they are compared at every save.
  if (everywhere && descriptions.distinct.size() == 1) return plan;
  agree(group, "planning", [&] {
    JobState job = join(descriptions, Purpose::kSave);
    if (everywhere) return;
    plan = std::make_shared<const SavePlan>(
        plan_save(std::move(job), group.place(), descriptions.ranks(), options));
  });
  if (options.cache != nullptr && !everywhere) options.cache->put(key, plan);
  return plan;
}

}  // namespace

std::shared_ptr<const SavePlan> SavePlanCache::find(const std::string& fingerprint) {
  const auto at = std::ranges::find(plans_, fingerprint, &decltype(plans_)::value_type::first);
  if (at == plans_.end()) return nullptr;
  ++hits_;
  std::rotate(at, at + 1, plans_.end());
  return plans_.back().second;
}

void SavePlanCache::put(std::string fingerprint, std::shared_ptr<const SavePlan> plan) {
  std::erase_if(plans_, [&](const auto& known) { return known.first == fingerprint; });
  plans_.emplace_back(std::move(fingerprint), std::move(plan));
  if (plans_.size() > capacity_) plans_.erase(plans_.begin());
}

ChosenEntries choose_entries(const StateDict& state, int64_t rank, std::span<const std::string> rank_keyed,
                             const EntryHook& hook) {
  ChosenEntries entries;
  for (const StateDict::Entry& entry : state.entries()) {
    std::optional<StateDict::Entry> chosen = hook ? hook(entry) : entry;
    if (!chosen) continue;
    const bool is_ranks_own = std::ranges::any_of(
        rank_keyed, [&](const std::string& pattern) { return glob_match(pattern, chosen->name); });
    if (is_ranks_own) {
      const std::string key = fmt::format("rank_{}", rank);
      chosen->name += "." + key;
      chosen->path.emplace_back(key);
    }
    entries.state.add(*std::move(chosen));
    entries.originals.push_back(entry.name);
  }
  return entries;
}

SavePlan plan_save(JobState job, int64_t rank, int64_t ranks, const SaveOptions& options) {
  const OwnershipOptions ownership{.replicas = options.replicas, .hosts = options.hosts};
  // The one that writes DCP's metadata has to know where everything lies.
  const bool knows_all = rank == 0 && options.to == TargetFormat::kDcp;
  std::vector<OwnedPart> known = knows_all ? assign_owners(job.shared, ranks, ownership)
                                           : assign_owners(job.shared, ranks, ownership, rank);
  if (!knows_all) std::erase_if(known, [&](const OwnedPart& part) { return part.owner != rank; });

  return plan_writing(std::move(job), std::move(known), rank, ranks, options, std::nullopt);
}

Report save(Group& group, const StateDict& state, Store& store, const std::filesystem::path& destination,
            const SaveOptions& options) {
  require_equal(group, "the options of a save", options_text(options));
  require_equal(group, "the destination of a save", destination.string());
  StateDict entries;
  Description own;
  agree(group, "describing the state", [&] {
    entries = choose_entries(state, group.place(), options.rank_keyed, options.hook).state;
    own = describe(entries, group.place(), {.contents = options.compare_contents});
  });
  const Descriptions descriptions = exchange_descriptions(group, own);
  const std::shared_ptr<const SavePlan> plan = plan_for(group, descriptions, options);

  std::unique_ptr<const Source> values = source_in_memory({}, gather_values(group, plan->job, entries));
  std::unique_ptr<const Source> memory;
  agree(group, "finding the memory",
        [&] { memory = source_in_memory(memory_of(*plan, entries, group.place()), {}); });
  const RankShare share{*plan->target, *plan->pieces, plan->transfer, *memory, *values, plan->files};
  return write_together(group, share, store, destination,
                        {options.existing, options.durable, {true, options.cancel, options.progress}, {}});
}

Report save_alone(int64_t rank, const StateDict& state, Store& store,
                  const std::filesystem::path& destination, const SaveOptions& options) {
  const StateDict entries = choose_entries(state, rank, options.rank_keyed, options.hook).state;
  const Description own = describe(entries, rank, {});
  JobState job;
  std::vector<OwnedPart> parts;
  for (const DescribedTensor& tensor : own.tensors) {
    job.tensors.push_back({tensor.name, tensor.path, tensor.requires_grad, tensor.on_device});
    job.shared.push_back({tensor.dtype, tensor.shape, tensor.layout, {}});
    const size_t t = job.tensors.size() - 1;
    for (const LocalTensor::Piece& piece : entries.find(tensor.name)->tensor()->pieces(rank)) {
      parts.push_back({t, 0, piece.global, rank});
    }
    if (numel(tensor.shape) == 0) parts.push_back({t, 0, whole(tensor.shape), rank});
  }
  std::vector<ValueEntry> values;
  for (const DescribedValue& value : own.values) {
    job.values.push_back({value.name, value.path, rank});
    values.push_back({value.name, std::nullopt, *entries.find(value.name)->value(), value.path});
  }
  const auto writer = checked_cast<uint32_t>(rank, "a rank");
  const SavePlan plan = plan_writing(std::move(job), std::move(parts), rank, rank + 1, options, writer);

  if (!store.exists(destination)) {
    try {
      store.create_folder(destination);
    } catch (const IoError&) {
      if (!store.is_folder(destination)) throw;  // another rank was faster
    }
  }
  const auto memory = source_in_memory(memory_of(plan, entries, rank), {});
  const auto own_values = source_in_memory({}, std::move(values));
  const RankShare share{*plan.target, *plan.pieces, plan.transfer, *memory, *own_values, plan.files};
  Report report;
  OutputFolder data(store, destination);
  std::vector<OutputFile*> files;
  std::string finished =
      write_share(share, data, files,
                  {options.existing, options.durable, {true, options.cancel, options.progress}, {}}, report);

  // Metadata is written aside, and gets its name when everything is durable.
  const std::filesystem::path aside = destination / fmt::format("rank_{}.partial", rank);
  store.remove_all(aside);
  store.create_folder(aside);
  OutputFolder metadata(store, aside);
  std::vector<std::string> all_finished;
  if (!plan.files.empty()) {
    finished.pop_back();  // what stands between the texts of several files
    all_finished.push_back(std::move(finished));
  }
  report.left_out =
      plan.target->finish(*own_values, all_finished, files.empty() ? nullptr : files.front(), metadata);
  for (OutputFolder* folder : {&data, &metadata}) {
    options.durable ? folder->sync(options.plan.threads, options.cancel) : folder->close();
  }
  std::vector<FolderEntry> entries_aside = store.list(aside);
  std::ranges::stable_partition(entries_aside, [](const FolderEntry& entry) {
    return !is_own_manifest_name(entry.name) && !is_dcp_name(entry.name);
  });
  for (const FolderEntry& entry : entries_aside) store.rename(aside / entry.name, destination / entry.name);
  store.remove_all(aside);
  if (options.durable) store.sync_folder(destination);
  return report;
}

}  // namespace spolia
