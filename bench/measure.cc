#include "bench/measure.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include <fmt/format.h>

#include "spolia/base/text.h"
#include "spolia/base/threads.h"
#include "spolia/device/buffer.h"
#include "spolia/store/store.h"

namespace spolia::bench {
namespace {

void read_through(const std::filesystem::path& path) {
  const auto file = posix_store()->open(path);
  Buffer piece(int64_t{1} << 20);
  for (int64_t offset = 0; offset < file->size(); offset += piece.size()) {
    const int64_t length = std::min(piece.size(), file->size() - offset);
    file->read(offset, piece.bytes().first(static_cast<size_t>(length)));
  }
}

}  // namespace

void prime(std::span<const std::filesystem::path> files, int64_t bytes) {
  ::sync();
  for (const std::filesystem::path& file : files) read_through(file);
  Buffer memory(bytes);
  memory.prefault();
}

std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> files;
  for (const FolderEntry& entry : posix_store()->list(folder)) {
    if (!entry.is_folder) files.push_back(folder / entry.name);
  }
  return files;
}

std::vector<std::vector<Sample>> take_turns(std::span<const Contender> contenders, int rounds) {
  std::vector<std::vector<Sample>> samples(contenders.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t c = 0; c < contenders.size(); ++c) {
      contenders[c].before();
      samples[c].push_back(contenders[c].run());
    }
  }
  return samples;
}

double median(std::vector<double> values) {
  std::ranges::sort(values);
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

double timed(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void print_load() {
  double load = 0;
  if (getloadavg(&load, 1) != 1) return;
  fmt::print("{} hardware threads; load average before the start: {:.2f}\n", hardware_threads(), load);
}

void print_table(const std::string& title, std::span<const Contender> contenders,
                 const std::vector<std::vector<Sample>>& samples, int64_t bytes) {
  fmt::print("\n{}\n{:<42} {:>8} {:>8} {:>8} {:>7} {:>7}  {}\n", title, "", "median s", "least", "most",
             "GB/s", "ratio", "peak memory");
  for (size_t c = 0; c < contenders.size(); ++c) {
    std::vector<double> seconds, ratios;
    int64_t peak = 0;
    for (size_t r = 0; r < samples[c].size(); ++r) {
      seconds.push_back(samples[c][r].seconds);
      ratios.push_back(samples[c][r].seconds / samples[0][r].seconds);
      peak = std::max(peak, samples[c][r].peak_resident_bytes);
    }
    const double middle = median(seconds);
    fmt::print("{:<42} {:>8.3f} {:>8.3f} {:>8.3f} {:>7.2f} {:>7.2f}  {}\n", contenders[c].name, middle,
               std::ranges::min(seconds), std::ranges::max(seconds),
               static_cast<double>(bytes) / 1e9 / middle, median(ratios), peak > 0 ? human_bytes(peak) : "");
  }
  std::fflush(stdout);
}

}  // namespace spolia::bench
