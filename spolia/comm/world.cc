#include "spolia/comm/world.h"

#include <algorithm>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

ConstView numbers_view(std::span<const int64_t> numbers, std::span<const int64_t> shape) {
  return dense_view(std::as_bytes(numbers).data(), DType::kInt64, shape);
}

/// What every rank gave, one rank after the other. All give as many.
std::vector<int64_t> gather_numbers(Group& all, std::span<const int64_t> numbers) {
  const int64_t count = std::ssize(numbers);
  const int64_t piece[] = {count}, stacked[] = {all.size(), count};
  std::vector<int64_t> gathered(static_cast<size_t>(all.size() * count));
  View target = dense_view(std::as_writable_bytes(std::span(gathered)).data(), DType::kInt64, stacked);
  all.all_gather(numbers_view(numbers, piece), target).wait();
  return gathered;
}

void check_rising(Group& all, std::span<const int64_t> ranks) {
  const bool in_range = !ranks.empty() && ranks.front() >= 0 && ranks.back() < all.size();
  const bool rising = std::ranges::adjacent_find(ranks, std::greater_equal<>()) == ranks.end();
  if (in_range && rising) return;
  throw InvalidArgumentError("a group of the ranks {}; they have to rise, below {}", list_text(ranks),
                             all.size());
}

[[noreturn]] void throw_difference(size_t a, size_t b, const std::string& what_a, const std::string& what_b) {
  throw MismatchError("the ranks make different groups: rank {} one of {}, rank {} one of {}", a, what_a, b,
                      what_b);
}

}  // namespace

void check_same_ranks(Group& all, std::span<const int64_t> ranks) {
  check_rising(all, ranks);
  const int64_t count = std::ssize(ranks);
  const std::vector<int64_t> counts = gather_numbers(all, std::span(&count, 1));
  for (size_t r = 1; r < counts.size(); ++r) {
    if (counts[r] == counts[0]) continue;
    throw_difference(0, r, fmt::format("{} ranks", counts[0]), fmt::format("{}", counts[r]));
  }
  const std::vector<int64_t> lists = gather_numbers(all, ranks);
  const std::span<const int64_t> first(lists.data(), ranks.size());
  for (size_t r = 1; r < counts.size(); ++r) {
    const std::span<const int64_t> list(lists.data() + r * ranks.size(), ranks.size());
    if (!std::ranges::equal(first, list)) throw_difference(0, r, list_text(first), list_text(list));
  }
}

}  // namespace spolia
