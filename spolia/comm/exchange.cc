#include "spolia/comm/exchange.h"

#include <algorithm>
#include <cstring>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

void check_total(Group& group, std::span<const int64_t> sizes, int64_t limit) {
  int64_t total = 0;
  for (int64_t size : sizes) total = checked_add(total, size, "what the ranks exchange");
  if (total <= limit) return;
  const auto longest = std::ranges::max_element(sizes);
  throw InvalidArgumentError(
      "the ranks exchange {} together, and {} is the limit; most of them, {}, are rank {}'s",
      human_bytes(total), human_bytes(limit), human_bytes(*longest),
      group.ranks()[static_cast<size_t>(longest - sizes.begin())]);
}

/// The elements of every rank, as strings or vectors of them.
template <class List>
std::vector<List> all_gather(Group& group, std::span<const std::byte> own, int64_t limit) {
  const std::vector<int64_t> sizes = all_gather_number(group, std::ssize(own));
  check_total(group, sizes, limit);
  std::vector<std::byte> bytes;
  for (int64_t size : sizes) bytes.resize(bytes.size() + static_cast<size_t>(size));
  if (!bytes.empty()) group.all_gather(byte_view(own), sizes, byte_view(std::span(bytes))).wait();

  std::vector<List> lists;
  const std::byte* from = bytes.data();
  for (int64_t size : sizes) {
    List& list = lists.emplace_back();
    list.resize(static_cast<size_t>(size) / sizeof(list[0]));
    if (size > 0) std::memcpy(list.data(), from, static_cast<size_t>(size));
    from += size;
  }
  return lists;
}

}  // namespace

std::vector<int64_t> all_gather_number(Group& group, int64_t number) {
  std::vector<int64_t> numbers(static_cast<size_t>(group.size()));
  const int64_t shape[] = {group.size()};
  group
      .all_gather(dense_view(std::as_bytes(std::span(&number, 1)).data(), DType::kInt64, {}),
                  dense_view(std::as_writable_bytes(std::span(numbers)).data(), DType::kInt64, shape))
      .wait();
  return numbers;
}

std::vector<std::string> all_gather_texts(Group& group, std::string_view text, int64_t limit) {
  return all_gather<std::string>(group, bytes_of(text), limit);
}

std::vector<std::vector<int64_t>> all_gather_lists(Group& group, std::span<const int64_t> numbers,
                                                   int64_t limit) {
  return all_gather<std::vector<int64_t>>(group, std::as_bytes(numbers), limit);
}

}  // namespace spolia
