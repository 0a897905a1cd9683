#include "spolia/device/device.h"

#include <cstring>
#include <numeric>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

TEST(Device, HasPyTorchsNames) {
  EXPECT_EQ(name_of(Device{}), "cpu");
  EXPECT_EQ(name_of(Device{DeviceKind::kCuda, 1}), "cuda:1");
}

TEST(Device, OneThatIsNotThereIsNamed) {
  for (Device device :
       {Device{DeviceKind::kCuda, 4711}, Device{DeviceKind::kCuda, -1}, Device{DeviceKind::kCpu, 1}}) {
    try {
      backend_of(device);
      FAIL() << "a backend for " << name_of(device);
    } catch (const UnsupportedError& error) {
      EXPECT_NE(std::string(error.what()).find(name_of(device)), std::string::npos) << error.what();
    }
  }
}

TEST(Device, CpuIsReachedFromTheHost) { EXPECT_TRUE(backend_of(Device{}).host_accessible()); }

TEST(Device, CopiesRowsAndNothingBetweenThem) {
  for (int64_t row_bytes : {0, 1, 7, 64, 255, 256, 300, 2048, 9000}) {
    for (int64_t gap : {0, 1, 64}) {
      for (int64_t rows : {0, 1, 5}) {
        int64_t src_pitch = row_bytes + gap, dst_pitch = row_bytes + 2 * gap;
        std::vector<std::byte> src(rows * src_pitch + 1), dst(rows * dst_pitch + 1, std::byte{0xEE});
        for (size_t i = 0; i < src.size(); ++i) src[i] = static_cast<std::byte>(i * 7 % 200);
        std::vector<std::byte> expected = dst;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t i = 0; i < row_bytes; ++i) expected[r * dst_pitch + i] = src[r * src_pitch + i];
        }
        backend_of(Device{}).copy_rows(dst.data(), dst_pitch, src.data(), src_pitch, row_bytes, rows);
        EXPECT_EQ(dst, expected) << row_bytes << " " << gap << " " << rows;
      }
    }
  }
}

}  // namespace
}  // namespace spolia
