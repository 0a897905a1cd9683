#include "spolia/comm/world.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/comm/exchange.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

void check_rising(Group& all, std::span<const int64_t> ranks) {
  const bool in_range = !ranks.empty() && ranks.front() >= 0 && ranks.back() < all.size();
  const bool rising = std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (in_range && rising) return;
  throw InvalidArgumentError("a group of the ranks {}; they have to rise, below {}", list_text(ranks),
                             all.size());
}

}  // namespace

void check_same_ranks(Group& all, std::span<const int64_t> ranks) {
  check_rising(all, ranks);
  const std::vector<std::vector<int64_t>> lists =
      all_gather_lists(all, ranks, std::numeric_limits<int64_t>::max());
  for (size_t r = 1; r < lists.size(); ++r) {
    if (lists[r] == lists[0]) continue;
    throw MismatchError("the ranks make different groups: rank 0 one of {}, rank {} one of {}",
                        list_text(lists[0]), r, list_text(lists[r]));
  }
}

}  // namespace spolia
