// Small facts of every rank, gathered on every rank: what the ranks decide from, so that they decide alike.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/comm/group.h"

namespace spolia {

// Collective over the group. Where it does not reach the host's memory, what is said passes through its
// device's. Results are by place. What a broken group throws is thrown.

/// One number from each.
std::vector<int64_t> all_gather_number(Group& group, int64_t number);

/// What the lists or texts of a group's ranks may take together, where nothing else is said.
inline constexpr int64_t kExchangeBytes = int64_t{256} << 20;

/// A text from each, of any size: bytes, not characters. Where there is none but empty ones, sizes alone
/// travel. InvalidArgumentError on every rank, naming the one with the longest, where they are more than
/// `limit` bytes together; every rank gives the same limit.
std::vector<std::string> all_gather_texts(Group& group, std::string_view text,
                                          int64_t limit = kExchangeBytes);

/// The same for numbers: any count from each.
std::vector<std::vector<int64_t>> all_gather_lists(Group& group, std::span<const int64_t> numbers,
                                                   int64_t limit = kExchangeBytes);

}  // namespace spolia
