#include "spolia/base/packing.h"

#include <limits>

#include <gtest/gtest.h>

namespace spolia {
namespace {

TEST(Packing, GivesBackWhatWasPacked) {
  Packer out;
  const int64_t numbers[] = {std::numeric_limits<int64_t>::min(), -1, 0, 1,
                             std::numeric_limits<int64_t>::max()};
  for (int64_t number : numbers) out.number(number);
  out.text("");
  out.text(std::string_view("a\0b", 3));
  out.numbers(numbers);
  out.numbers({});
  const std::string bytes = out.take();
  EXPECT_EQ(bytes.size(), 8u * (5 + 1 + 1 + 1 + 5 + 1) + 3);

  Unpacker in(bytes);
  for (int64_t number : numbers) EXPECT_EQ(in.number(), number);
  EXPECT_EQ(in.text(), "");
  EXPECT_EQ(in.text(), std::string_view("a\0b", 3));
  ASSERT_EQ(in.count(), 5u);
  EXPECT_THROW(in.end(), CorruptError);
  for (int64_t number : numbers) EXPECT_EQ(in.number(), number);
  EXPECT_EQ(in.count(), 0u);
  EXPECT_TRUE(in.at_end());
  in.end();
}

TEST(Packing, NeverReadsPastTheEnd) {
  Packer out;
  out.number(7);
  out.text("some text");
  const std::string bytes = out.take();
  for (size_t length = 0; length < bytes.size(); ++length) {
    Unpacker in(std::string_view(bytes).substr(0, length));
    EXPECT_THROW((in.number(), in.text()), CorruptError) << length;
  }
  // Lengths and counts that are no lengths of what is left.
  for (int64_t length :
       {int64_t{-1}, int64_t{10}, std::numeric_limits<int64_t>::max(), std::numeric_limits<int64_t>::min()}) {
    Packer wrong;
    wrong.number(length);
    const std::string text = wrong.take() + "nine byte";
    EXPECT_THROW(Unpacker(text).text(), CorruptError) << length;
    EXPECT_THROW(Unpacker(text).count(), CorruptError) << length;
  }
}

}  // namespace
}  // namespace spolia
