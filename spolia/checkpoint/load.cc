#include "spolia/checkpoint/load.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <set>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "spolia/base/error.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/load_plan.h"
#include "spolia/checkpoint/memory_sink.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/checkpoint/rank_loads.h"
#include "spolia/checkpoint/value_text.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/engine/executor.h"

namespace spolia {
namespace {

/// What all ranks have to give alike.
std::string options_text(const LoadOptions& options) {
  const Speeds speeds = options.speeds.value_or(Speeds());
  return fmt::format(
      "partial {}, may_be_missing {}, cast {}, rank_keyed {}, mode {}, speeds {} {} {}, batch_bytes {}, in "
      "flight {} or {}",
      options.partial, fmt::join(options.may_be_missing, ","), options.cast,
      fmt::join(options.rank_keyed, ","), name_of(options.mode), speeds.read_bytes, speeds.sent_bytes,
      speeds.send_seconds, options.batches.batch_bytes, options.batches.max_in_flight,
      options.batches.max_bytes_in_flight);
}

/// The rank's own view of a box of a tensor.
View view_of(const StateDict& state, const std::string& name, const Box& box, int64_t rank) {
  for (const LocalTensor::Piece& piece : state.find(name)->tensor()->pieces(rank)) {
    if (contains(piece.global, box)) return view_of_box(piece.view, piece.global, box);
  }
  throw InvalidArgumentError("tensor {}: its memory has not the box {}", quote(name), box_text(box));
}

/// The plan of the mode that was asked for, or of the cheapest. Collective.
LoadPlan choose_plan(Group& group, const JobState& job, const Matched& matched, const Source& source,
                     const LoadOptions& options, std::vector<std::string>& notes) {
  const int64_t rank = group.place(), ranks = group.size();
  const auto plan_with = [&](ReadMode mode) {
    return plan_load(job, matched, source.catalog(), rank, ranks, mode, options.plan);
  };
  LoadPlan plan;
  if (options.mode != ReadMode::kCheapest || ranks == 1) {
    const ReadMode mode = ranks == 1 ? ReadMode::kEachRank : options.mode;
    agree(group, "planning", [&] { plan = plan_with(mode); });
    return plan;
  }
  LoadPlan each, whole, parts;
  agree(group, "planning", [&] {
    each = plan_with(ReadMode::kEachRank);
    whole = plan_with(ReadMode::kOneReader);
    parts = plan_with(ReadMode::kParts);
  });
  int64_t sent = 0;
  for (const LoadPlan::Send& send : whole.sends) {
    if (send.root == rank) sent += byte_size(job.shared[send.tensor].dtype, send.box.sizes);
  }
  const std::vector<int64_t> own = {each.bytes(), whole.bytes(), parts.bytes(), sent,
                                    std::ssize(whole.sends)};
  ReadCosts costs;
  for (const std::vector<int64_t>& of_rank : all_gather_lists(group, own)) {
    costs.busiest_each = std::max(costs.busiest_each, of_rank[0]);
    costs.busiest_whole = std::max(costs.busiest_whole, of_rank[1]);
    costs.busiest_parts = std::max(costs.busiest_parts, of_rank[2]);
    costs.sent += of_rank[3];
    costs.broadcasts = std::max(costs.broadcasts, of_rank[4]);
  }
  if (costs.sent == 0) return each;  // nothing is wanted twice
  const Speeds speeds = options.speeds ? *options.speeds : measure_speeds(group, source);
  const ReadMode mode = cheapest_mode(speeds, costs, ranks);
  notes.push_back(fmt::format("{}: reading {}/s, sending {}/s and {:.0f} us", name_of(mode),
                              human_bytes(static_cast<int64_t>(speeds.read_bytes)),
                              human_bytes(static_cast<int64_t>(speeds.sent_bytes)),
                              speeds.send_seconds * 1e6));
  if (mode == ReadMode::kEachRank) return each;
  return mode == ReadMode::kOneReader ? std::move(whole) : std::move(parts);
}

/// Reads on a thread of its own while this one sends what is complete. A failure is kept until all is sent:
/// the others wait for this rank's broadcasts, and what they get is worth nothing anyway when this throws.
void read_and_send(const LoadPlan& plan, const Source& source, MemorySink& sink,
                   const ExecuteOptions& options, const ResolvedGroups& groups,
                   const std::function<View(const LoadPlan::Send&)>& view, BroadcastBatches& batches,
                   Report& report) {
  auto read = [&] { report = execute(plan.transfer, source, plan.targets, sink, options); };
  if (plan.sends.empty()) return read();

  std::exception_ptr reading, sending;
  std::thread reader([&] {
    try {
      read();
    } catch (...) {
      reading = std::current_exception();
    }
    sink.give_up();
  });
  try {
    for (const LoadPlan::Send& send : plan.sends) {
      Group& group = groups.at(send.ranks);
      const int root = group.place_of(send.root);
      if (root == group.place()) sink.wait_for(send.read);
      batches.add(group, root, view(send));
    }
    batches.wait_all();
  } catch (...) {
    sending = std::current_exception();
  }
  reader.join();
  if (reading) std::rethrow_exception(reading);
  if (sending) std::rethrow_exception(sending);
}

/// The values that the ranks want, read by place 0; those without a text, by each rank. Collective.
void load_values(Group& group, const JobState& job, const Matched& matched, const Source& source,
                 StateDict& state) {
  std::string packed;
  agree(group, "reading values", [&] {
    if (group.place() != 0) return;
    Packer out;
    for (const std::optional<size_t>& value : matched.values) {
      if (!value) continue;
      const auto text = value_text(source.value(*value));
      out.text(text.value_or(""));
    }
    packed = out.take();
  });
  const std::vector<std::string> texts = all_gather_texts(group, packed);
  agree(group, "reading values", [&] {
    Unpacker in(texts[0]);
    for (size_t v = 0; v < job.values.size(); ++v) {
      if (!matched.values[v]) continue;
      const std::string_view text = in.text();
      StateDict::Entry* entry = state.find(job.values[v].name);
      if (entry == nullptr) continue;
      entry->content = text.empty() ? source.value(*matched.values[v]) : value_of_text(text);
    }
  });
}

/// What became of the rank's own keys.
void note_keys(const StateDict& entries, const JobState& job, const Matched& matched, Report& report) {
  auto note = [&](const std::string& name, bool found) {
    if (entries.find(name) != nullptr) (found ? report.used : report.kept).push_back(name);
  };
  for (size_t t = 0; t < job.tensors.size(); ++t) note(job.tensors[t].name, matched.tensors[t].has_value());
  for (size_t v = 0; v < job.values.size(); ++v) note(job.values[v].name, matched.values[v].has_value());
  std::ranges::sort(report.used);
  std::ranges::sort(report.kept);
  for (const std::string& name : matched.missing) {
    if (entries.find(name) != nullptr) report.missing.push_back(name);
  }
  report.unexpected = matched.unexpected;
}

}  // namespace

Report load(World& world, const Source& source, StateDict& state, const LoadOptions& options) {
  Group& group = *world.all();
  const int64_t rank = world.rank();
  require_equal(group, "the options of a load", options_text(options));
  ChosenEntries chosen;
  StateDict& entries = chosen.state;
  Description own;
  agree(group, "describing the state", [&] {
    chosen = choose_entries(state, rank, options.rank_keyed, options.hook);
    own = describe(entries, rank, {});
  });
  const Descriptions descriptions = exchange_descriptions(group, own);
  JobState job;
  Matched matched;
  agree(group, "checking", [&] {
    job = join(descriptions, Purpose::kLoad);
    matched = match(job, source.catalog(), options);
  });
  std::vector<std::string> notes;
  const LoadPlan plan = choose_plan(group, job, matched, source, options, notes);

  std::optional<MemorySink> sink;
  const auto view = [&](size_t tensor, const Box& box) {
    return view_of(entries, job.tensors[tensor].name, box, rank);
  };
  agree(group, "finding the memory", [&] {
    std::vector<View> views;
    for (const LoadPlan::Read& read : plan.reads) views.push_back(view(read.tensor, read.box));
    for (const LoadPlan::Send& send : plan.sends) view(send.tensor, send.box);
    sink.emplace(std::move(views));
  });

  std::set<Ranks> needed;
  for (const LoadPlan::Send& send : plan.sends) needed.insert(send.ranks);
  GroupRegistry own_registry(world);
  GroupRegistry& registry = options.registry != nullptr ? *options.registry : own_registry;
  ResolvedGroups groups = registry.resolve(std::vector<Ranks>(needed.begin(), needed.end()), options.groups);

  Report report;
  BroadcastBatches batches(options.batches);
  std::exception_ptr failure;
  try {
    agree(group, "reading (what the tensors hold is unspecified now)", [&] {
      read_and_send(
          plan, source, *sink, {options.check_source, options.cancel, options.progress}, groups,
          [&](const LoadPlan::Send& send) { return view(send.tensor, send.box); }, batches, report);
    });
  } catch (...) {
    failure = std::current_exception();
  }
  for (const ResolvedGroup& resolved : groups.all()) {
    if (resolved.group != nullptr) ++(resolved.made ? report.groups_made : report.groups_reused);
  }
  if (options.registry != nullptr && !failure) {
    groups.keep();
  } else {
    for (std::string& warning : groups.release()) notes.push_back(std::move(warning));
  }
  if (failure) std::rethrow_exception(failure);

  load_values(group, job, matched, source, entries);
  for (size_t e = 0; e < entries.size(); ++e) {
    if (Value* value = entries.entries()[e].value()) state.find(chosen.originals[e])->content = *value;
  }
  note_keys(entries, job, matched, report);
  note_loads(group, report.bytes_written, report);
  report.items_batched = batches.counts().batched;
  for (const LoadPlan::Send& send : plan.sends) {
    if (send.root == rank) report.bytes_sent += byte_size(job.shared[send.tensor].dtype, send.box.sizes);
  }
  report.notes.insert(report.notes.end(), notes.begin(), notes.end());
  return report;
}

OwnedState state_for(const Catalog& catalog, int64_t rank, const LayoutRules* rules) {
  OwnedState owned;
  auto path_of = [](const auto& entry) { return entry.path.empty() ? KeyPath{entry.name} : entry.path; };
  for (const TensorEntry& tensor : catalog.tensors) {
    std::shared_ptr<const Layout> layout;
    if (rules != nullptr) layout = rules->layout_of(tensor.name, tensor.shape);
    const Dims shape = layout != nullptr ? layout->shard(tensor.shape, rank).local_shape : tensor.shape;
    Buffer& memory = owned.memory.emplace_back(byte_size(tensor.dtype, shape));
    const View view = dense_view(memory.data(), tensor.dtype, shape);
    LocalTensor local = plain_tensor(view);
    if (layout != nullptr) local = sharded_tensor(view, tensor.shape, std::move(layout));
    local.requires_grad = tensor.requires_grad;
    owned.state.add({tensor.name, path_of(tensor), std::move(local)});
  }
  for (const ValueEntry& value : catalog.values) owned.state.add({value.name, path_of(value), Value()});
  return owned;
}

}  // namespace spolia
