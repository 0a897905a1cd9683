// Memory for what is assembled: blocks that one unit after the other uses, within a limit.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "spolia/device/buffer.h"

namespace spolia {

/// A block that is fresh costs more than to fill it, so blocks are used again, also by units that are
/// smaller; by those of less than half their size only where there is no room for a fresh one, for whoever
/// keeps a unit's block keeps all of it. Used by one thread.
class UnitPool {
 public:
  UnitPool() = default;
  /// `limit`: bytes of all blocks together, used or not.
  UnitPool(int64_t limit, Device device) : limit_(limit), device_(device) {}

  /// Blocks of at least these sizes (> 0). `later`: bytes that will be asked for while these are in use.
  /// IoError where there is not so much memory; then nothing is in use that was not before. Precondition: the
  /// sizes, what is in use and what was said to come `later` are within the limit.
  std::vector<Buffer> take(std::span<const int64_t> sizes, int64_t later);
  /// What take() gave is free.
  void give_back(Buffer block);
  /// What take() gave belongs to somebody else now, and is no more counted.
  void forget(const Buffer& block) { in_use_ -= block.size(); }

  int64_t held() const { return in_use_ + free_bytes_; }
  /// The most that was held at once.
  int64_t peak() const { return peak_; }

 private:
  int64_t limit_ = 0;
  Device device_;
  std::multimap<int64_t, Buffer> free_;  // by their sizes
  int64_t free_bytes_ = 0, in_use_ = 0, peak_ = 0;
};

}  // namespace spolia
