// What makes timings comparable: the same state of the machine before each, and contenders that take turns.
//
// A virtual machine gives freed memory back to its host, and getting it again is slow: the first program that
// needs memory pays for all that follow. Disks have caches and queues. So before each timed run we wait for
// the disk to be idle, read the inputs, and touch as much memory as the run will need (prime()). Contenders
// take turns, round by round, and ratios are those of runs of the same round.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace spolia::bench {

/// Waits for the disk, reads the files, touches `bytes` of memory and gives it back.
void prime(std::span<const std::filesystem::path> files, int64_t bytes);

/// All files directly in a folder.
std::vector<std::filesystem::path> files_in(const std::filesystem::path& folder);

struct Sample {
  double seconds = 0;
  int64_t peak_resident_bytes = 0;  // 0: not known
};

struct Contender {
  std::string name;
  std::function<Sample()> run;
  std::function<void()> before = [] {};  // not timed: makes the machine ready
};

/// Runs each contender once in each round.
/// The result's [c][r] is contender c in round r.
std::vector<std::vector<Sample>> take_turns(std::span<const Contender> contenders, int rounds);

double median(std::vector<double> values);

/// Seconds of body().
double timed(const std::function<void()>& body);

/// Prints how busy the machine is with other things: figures from a busy one say little.
void print_load();

/// Prints a line a contender: seconds (median, least, most), GB/s of `bytes`, how many times as long as the
/// first one it took (the median of the rounds' ratios), and its peak memory where known.
void print_table(const std::string& title, std::span<const Contender> contenders,
                 const std::vector<std::vector<Sample>>& samples, int64_t bytes);

}  // namespace spolia::bench
