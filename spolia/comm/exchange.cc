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

/// Every rank's own elements, one after the other; counts[r] come from rank r. Through memory of the group's
/// device where the group does not reach the host's.
void gather_elements(Group& group, DType dtype, std::span<const std::byte> own,
                     std::span<const int64_t> counts, std::span<std::byte> all) {
  const auto view = [&](auto* data, size_t bytes, Device device) {
    const int64_t shape[] = {static_cast<int64_t>(bytes) / element_bytes(dtype)};
    return dense_view(data, dtype, shape, device);
  };
  if (group.backend().reaches({})) {
    group.all_gather(view(own.data(), own.size(), {}), counts, view(all.data(), all.size(), {})).wait();
    return;
  }
  const Device device = group.device();
  const DeviceBackend& memory = backend_of(device);
  Buffer sent(std::ssize(own), device), received(std::ssize(all), device);
  memory.copy_from_host(sent.data(), own.data(), sent.size());
  const View gathered = view(received.data(), all.size(), device);
  group.all_gather(view(sent.data(), own.size(), device), counts, gathered).wait();
  memory.copy_to_host(all.data(), received.data(), received.size());
}

/// The elements of every rank, as strings or vectors of them.
template <class List>
std::vector<List> all_gather(Group& group, std::span<const std::byte> own, int64_t limit) {
  const std::vector<int64_t> sizes = all_gather_number(group, std::ssize(own));
  check_total(group, sizes, limit);
  std::vector<std::byte> bytes;
  for (int64_t size : sizes) bytes.resize(bytes.size() + static_cast<size_t>(size));
  if (!bytes.empty()) gather_elements(group, DType::kUInt8, own, sizes, bytes);

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
  const std::vector<int64_t> counts(numbers.size(), 1);
  gather_elements(group, DType::kInt64, std::as_bytes(std::span(&number, 1)), counts,
                  std::as_writable_bytes(std::span(numbers)));
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
