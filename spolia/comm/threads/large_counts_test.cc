// Operations of more than 2^31 bytes and elements, in memory that is small: 2 MiB of it, mapped over and
// over.
#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "spolia/base/checked.h"
#include "spolia/comm/testing_tensors.h"
#include "spolia/comm/world.h"

namespace spolia {
namespace {

/// Byte i lies where byte i + kFold does.
class FoldedMemory {
 public:
  static constexpr int64_t kFold = int64_t{2} << 20;

  explicit FoldedMemory(int64_t bytes) : bytes_(align_up(bytes, kFold)) {
    const int file = memfd_create("folded", 0);
    require(file >= 0 && ftruncate(file, kFold) == 0, "memfd_create");
    void* base = mmap(nullptr, static_cast<size_t>(bytes_), PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    require(base != MAP_FAILED, "no address space");
    data_ = static_cast<std::byte*>(base);
    for (int64_t at = 0; at < bytes_; at += kFold) {
      void* fold = mmap(data_ + at, kFold, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
      require(fold != MAP_FAILED, "mmap of a fold");
    }
    close(file);
  }
  ~FoldedMemory() { munmap(data_, static_cast<size_t>(bytes_)); }
  FoldedMemory(const FoldedMemory&) = delete;
  FoldedMemory& operator=(const FoldedMemory&) = delete;

  std::byte* data() const { return data_; }

 private:
  const int64_t bytes_;
  std::byte* data_ = nullptr;
};

constexpr int64_t kMany = (int64_t{1} << 31) + 10;

TEST(LargeCounts, SlowBroadcast) {
  launch(2, [](World& world) {
    FoldedMemory memory(kMany);
    const auto content = noise(1, FoldedMemory::kFold);
    if (world.rank() == 0) std::ranges::copy(content, memory.data());
    world.all()->broadcast(dense_view(memory.data(), DType::kUInt8, Dims{kMany}), 0).wait();
    require(std::equal(content.begin(), content.end(), memory.data()), "the bytes");
  });
}

// More than 2^31 elements, and more than 2^32 bytes, from each of three.
TEST(LargeCounts, SlowAllGather) {
  launch(3, [](World& world) {
    FoldedMemory piece(kMany * 2), all(kMany * 6);
    // What differs by rank lies at the end: where the pieces lie in `all` does not depend on the fold.
    std::fill_n(piece.data(), FoldedMemory::kFold, std::byte{7});
    world.all()
        ->all_gather(dense_view(piece.data(), DType::kInt16, Dims{kMany}),
                     dense_view(all.data(), DType::kInt16, Dims{3, kMany}))
        .wait();
    require(std::all_of(all.data(), all.data() + FoldedMemory::kFold,
                        [](std::byte b) { return b == std::byte{7}; }),
            "the bytes");
  });
}

TEST(LargeCounts, SlowAllToAllAndReduceScatter) {
  launch(2, [](World& world) {
    FoldedMemory send(kMany + 8), receive(kMany + 8);
    std::fill_n(send.data(), FoldedMemory::kFold, std::byte{3});
    // All but a few elements go to rank 1.
    const int64_t few = 8;
    const std::vector<int64_t> counts = {few, kMany};
    const std::vector<int64_t> from_each(2, counts[static_cast<size_t>(world.rank())]);
    const std::vector<int64_t> to_each = {few, kMany / 2};
    const std::vector<int64_t> received(2, to_each[static_cast<size_t>(world.rank())]);
    const auto view = [](FoldedMemory& memory, int64_t count) {
      return dense_view(memory.data(), DType::kUInt8, Dims{count});
    };
    world.all()
        ->all_to_all(view(send, few + kMany / 2), to_each, view(receive, received[0] + received[1]), received)
        .wait();
    require(receive.data()[0] == std::byte{3}, "the bytes of an all-to-all");
    world.all()->reduce_scatter(view(send, few + kMany), counts, view(receive, from_each[0])).wait();
    require(receive.data()[from_each[0] - 1] == std::byte{6}, "the bytes of a reduce-scatter");
  });
}

}  // namespace
}  // namespace spolia
