#include "spolia/checkpoint/load_plan.h"

#include <algorithm>
#include <numeric>
#include <set>
#include <string_view>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/name_list.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

/// Where entries of a catalog are, by name. Catalogs are sorted.
template <class Entry>
std::optional<size_t> index_of(const std::vector<Entry>& entries, std::string_view name) {
  const auto at =
      std::ranges::lower_bound(entries, name, {}, [](const Entry& e) { return std::string_view(e.name); });
  if (at == entries.end() || at->name != name) return std::nullopt;
  return static_cast<size_t>(at - entries.begin());
}

void check_tensor(const std::string& name, const SharedTensor& wanted, const TensorEntry& stored, bool cast) {
  if (wanted.shape != stored.shape) {
    throw MismatchError("tensor {} has the shape {} in the checkpoint, and {} here", quote(name),
                        list_text(stored.shape), list_text(wanted.shape));
  }
  if (wanted.dtype == stored.dtype) return;
  if (cast && can_cast(wanted.dtype, stored.dtype)) return;
  throw MismatchError(
      "tensor {} is {} in the checkpoint, and {} here{}", quote(name), name_of(stored.dtype),
      name_of(wanted.dtype),
      can_cast(wanted.dtype, stored.dtype) ? "; ask for a cast, or give memory of that dtype" : "");
}

bool may_be_missing(const std::string& name, const LoadOptions& options) {
  return std::ranges::any_of(options.may_be_missing,
                             [&](const std::string& pattern) { return glob_match(pattern, name); });
}

/// The ranks that hold a part's shard; `rank` is one of them.
std::vector<int64_t> holders_of(const SharedTensor& tensor, const OwnedPart& part, int64_t rank) {
  std::vector<int64_t> ranks =
      tensor.layout != nullptr ? tensor.layout->replicas(rank) : tensor.boxes[part.shard].ranks;
  std::ranges::sort(ranks);
  return ranks;
}

/// What the rank holds of a tensor.
std::vector<Box> boxes_of(const SharedTensor& tensor, int64_t rank) {
  std::vector<Box> boxes;
  if (tensor.layout != nullptr) {
    for (LocalBox& box : tensor.layout->shard(tensor.shape, rank).boxes)
      boxes.push_back(std::move(box.global));
  }
  for (const HeldBox& held : tensor.boxes) {
    if (std::ranges::binary_search(held.ranks, rank)) boxes.push_back(held.box);
  }
  return boxes;
}

RegionCopy copy_of(const LoadPlan::Read& read, size_t source, size_t target, DType dtype) {
  if (is_sub_byte(dtype)) return copy_whole(source, target);  // only whole ones are read
  return copy_region(source, target, {read.box, whole(read.box.sizes), {}});
}

}  // namespace

Matched match(const JobState& job, const Catalog& source, const LoadOptions& options) {
  Matched matched;
  std::vector<std::string> missing;
  auto note_missing = [&](const std::string& name) {
    if (!may_be_missing(name, options)) missing.push_back(name);
  };
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    const std::string& name = job.tensors[t].name;
    matched.tensors.push_back(index_of(source.tensors, name));
    if (matched.tensors.back()) {
      check_tensor(name, job.shared[t], source.tensors[*matched.tensors.back()], options.cast);
    } else if (index_of(source.values, name)) {
      throw MismatchError("{} is a value in the checkpoint, and a tensor here", quote(name));
    } else {
      note_missing(name);
    }
  }
  for (const JobState::NamedValue& value : job.values) {
    matched.values.push_back(index_of(source.values, value.name));
    if (matched.values.back()) continue;
    if (index_of(source.tensors, value.name)) {
      throw MismatchError("{} is a tensor in the checkpoint, and a value here", quote(value.name));
    }
    note_missing(value.name);
  }
  if (!missing.empty() && !options.partial) {
    std::ranges::sort(missing);
    throw NotFoundError(
        "the checkpoint lacks {} of the keys to be loaded: {}. Load partially to keep what they "
        "have, or name those that may be missing",
        missing.size(), name_list(missing));
  }
  matched.missing = std::move(missing);

  std::set<std::string_view> wanted;
  for (const JobState::Tensor& tensor : job.tensors) wanted.insert(tensor.name);
  for (const JobState::NamedValue& value : job.values) wanted.insert(value.name);
  for (const TensorEntry& tensor : source.tensors) {
    if (!wanted.contains(tensor.name)) matched.unexpected.push_back(tensor.name);
  }
  for (const ValueEntry& value : source.values) {
    if (!wanted.contains(value.name)) matched.unexpected.push_back(value.name);
  }
  std::ranges::sort(matched.unexpected);
  return matched;
}

LoadPlan plan_load(const JobState& job, const Matched& matched, const Catalog& source, int64_t rank,
                   int64_t ranks, ReadMode mode, const PlanOptions& options) {
  LoadPlan plan;
  std::vector<LoadPlan::Read> alone;  // what is read for this rank only
  std::vector<SharedTensor> sent;     // tensors that ranks may read for each other
  std::vector<size_t> number_of;      // of these, among the job's
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    if (!matched.tensors[t]) continue;
    if (mode != ReadMode::kEachRank && !job.tensors[t].on_device) {
      sent.push_back(job.shared[t]);
      number_of.push_back(t);
      continue;
    }
    for (Box& box : boxes_of(job.shared[t], rank)) {
      if (!box.empty()) alone.push_back({t, std::move(box)});
    }
  }
  const OwnershipOptions ownership{.cut = mode == ReadMode::kParts ? CutShards::kAlways : CutShards::kNever};
  for (OwnedPart& part : assign_owners(sent, ranks, ownership, rank)) {
    const size_t tensor = number_of[part.tensor];
    if (part.box.empty()) continue;
    LoadPlan::Send send{tensor, part.box, part.owner, holders_of(job.shared[tensor], part, rank),
                        plan.reads.size()};
    if (send.ranks.size() == 1) {
      alone.push_back({tensor, std::move(part.box)});
      continue;
    }
    if (part.owner == rank) plan.reads.push_back({tensor, std::move(part.box)});
    plan.sends.push_back(std::move(send));
  }
  plan.reads.insert(plan.reads.end(), std::make_move_iterator(alone.begin()),
                    std::make_move_iterator(alone.end()));

  std::vector<RegionCopy> copies;
  for (const LoadPlan::Read& read : plan.reads) {
    const SharedTensor& shared = job.shared[read.tensor];
    copies.push_back(copy_of(read, *matched.tensors[read.tensor], plan.targets.tensors.size(), shared.dtype));
    plan.targets.tensors.push_back(
        whole_tensor(job.tensors[read.tensor].name, shared.dtype, read.box.sizes, {}));
  }
  std::vector<size_t> order(plan.reads.size());
  std::iota(order.begin(), order.end(), size_t{0});
  plan.transfer = plan_transfer(source, plan.targets, std::move(copies), order, options);
  return plan;
}

}  // namespace spolia
