#include "spolia/checkpoint/read_mode.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "spolia/comm/exchange.h"

namespace spolia {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The slowest rank's time.
double slowest(Group& group, double seconds) {
  const std::vector<int64_t> all = all_gather_number(group, static_cast<int64_t>(seconds * 1e9));
  return std::max(static_cast<double>(std::ranges::max(all)), 1.0) / 1e9;
}

/// Chunks of the largest tensor, one a rank.
Extent sample_of(const Catalog& catalog, int64_t rank) {
  const auto largest = std::ranges::max_element(catalog.tensors, {}, &TensorEntry::bytes);
  if (largest == catalog.tensors.end() || largest->chunks() == 0) return {};
  return largest->extents[static_cast<size_t>(rank) % largest->chunks()];
}

double broadcast_seconds(Group& group, std::vector<std::byte>& bytes, int times) {
  const auto start = Clock::now();
  for (int i = 0; i < times; ++i) group.broadcast(byte_view(std::span(bytes)), 0).wait();
  return slowest(group, seconds_since(start)) / times;
}

}  // namespace

std::string_view name_of(ReadMode mode) {
  switch (mode) {
    case ReadMode::kCheapest:
      return "the cheapest way";
    case ReadMode::kEachRank:
      return "each rank reads";
    case ReadMode::kOneReader:
      return "one rank reads a shard and sends it";
    case ReadMode::kParts:
      return "each rank reads a part of a shard and sends it";
  }
  return "unknown";
}

Speeds measure_speeds(Group& group, const Source& source) {
  constexpr int64_t kSampleBytes = int64_t{4} << 20;
  Speeds speeds;
  const Extent sample = sample_of(source.catalog(), group.place());
  std::vector<std::byte> bytes(static_cast<size_t>(std::min(sample.length, kSampleBytes)));
  group.barrier().wait();
  const auto start = Clock::now();
  if (!bytes.empty()) source.file(sample.file).read(sample.offset, bytes);
  const double reading = slowest(group, seconds_since(start));
  int64_t read = 0;
  for (int64_t of_rank : all_gather_number(group, std::ssize(bytes))) read += of_rank;
  speeds.read_bytes = static_cast<double>(std::max<int64_t>(read, 1)) / reading;

  std::vector<std::byte> small(4096), large(kSampleBytes);
  broadcast_seconds(group, large, 1);  // touches the memory
  speeds.send_seconds = broadcast_seconds(group, small, 8);
  speeds.sent_bytes = static_cast<double>(kSampleBytes) / broadcast_seconds(group, large, 2);
  return speeds;
}

ReadMode cheapest_mode(const Speeds& speeds, const ReadCosts& costs, int64_t ranks) {
  const auto reading = [&](int64_t busiest) {
    return static_cast<double>(busiest) * static_cast<double>(ranks) / speeds.read_bytes;
  };
  // What is sent is read meanwhile, but both want the same memory: the sum is the safer guess.
  const double sending = static_cast<double>(costs.sent) / speeds.sent_bytes +
                         static_cast<double>(costs.broadcasts) * speeds.send_seconds;
  const std::pair<double, ReadMode> modes[] = {
      {reading(costs.busiest_each), ReadMode::kEachRank},
      {reading(costs.busiest_whole) + sending, ReadMode::kOneReader},
      {reading(costs.busiest_parts) + sending, ReadMode::kParts},
  };
  return std::ranges::min_element(modes, {}, &std::pair<double, ReadMode>::first)->second;
}

}  // namespace spolia
