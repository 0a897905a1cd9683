#include "spolia/format/native/box_dealer.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "spolia/plan/ownership.h"

namespace spolia {

std::vector<Box> boxes_written(const Layout& layout, uint32_t replica, std::span<const int64_t> shape,
                               int64_t rank) {
  std::vector<Box> boxes;
  if (replica_number(layout, rank) != int64_t{replica}) return boxes;
  for (LocalBox& local : layout.shard(shape, rank).boxes) boxes.push_back(std::move(local.global));
  return boxes;
}

BoxDealer::BoxDealer(const Catalog& catalog)
    : group_of_(catalog.tensors.size(), kNoGroup), dealt_(catalog.tensors.size()) {
  std::map<std::tuple<const Layout*, uint32_t, std::vector<int64_t>>, uint32_t> known;
  for (size_t t = 0; t < catalog.tensors.size(); ++t) {
    const TensorEntry& tensor = catalog.tensors[t];
    if (tensor.layout == nullptr || !tensor.replica || numel(tensor.shape) == 0) continue;
    const auto [at, fresh] =
        known.try_emplace({tensor.layout.get(), *tensor.replica, {tensor.shape.begin(), tensor.shape.end()}},
                          static_cast<uint32_t>(groups_.size()));
    if (fresh) groups_.push_back({tensor.layout.get(), *tensor.replica, tensor.shape, std::nullopt});
    group_of_[t] = at->second;
  }
}

void BoxDealer::start(int64_t rank, size_t chunks) {
  for (size_t tensor : tensors_) {
    dealt_[tensor] = 0;
    groups_[group_of_[tensor]].boxes.reset();
  }
  tensors_.clear();
  rank_ = rank;
  room_ = chunks;
}

const Box* BoxDealer::next(size_t tensor) {
  Group& group = groups_[group_of_[tensor]];
  if (!group.boxes) group.boxes = boxes_written(*group.layout, group.replica, group.shape, rank_);
  size_t& dealt = dealt_[tensor];
  if (dealt == 0) {
    if (group.boxes->size() > room_) return nullptr;
    room_ -= group.boxes->size();
    tensors_.push_back(tensor);
  }
  return dealt < group.boxes->size() ? &(*group.boxes)[dealt++] : nullptr;
}

std::optional<size_t> BoxDealer::unfinished() const {
  auto at = std::ranges::find_if(tensors_,
                                 [&](size_t t) { return dealt_[t] < groups_[group_of_[t]].boxes->size(); });
  return at == tensors_.end() ? std::nullopt : std::optional(*at);
}

}  // namespace spolia
