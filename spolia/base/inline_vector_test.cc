#include "spolia/base/inline_vector.h"

#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

namespace spolia {
namespace {

using Small = InlineVector<int64_t, 3>;

std::vector<int64_t> listed(const Small& values) { return {values.begin(), values.end()}; }

// Every operation against std::vector, through sizes in place and on the heap.
RC_GTEST_PROP(InlineVector, BehavesLikeAVector, ()) {
  Small ours;
  std::vector<int64_t> truth;
  for (int step = 0; step < 40; ++step) {
    auto value = *rc::gen::arbitrary<int64_t>();
    auto at = *rc::gen::inRange<size_t>(0, truth.size() + 1);
    switch (*rc::gen::inRange(0, 9)) {
      case 0:
      case 1:
        ours.push_back(value);
        truth.push_back(value);
        break;
      case 2:
        RC_ASSERT(*ours.insert(ours.begin() + at, value) == value);
        truth.insert(truth.begin() + at, value);
        break;
      case 3:
        if (at == truth.size()) break;
        ours.erase(ours.begin() + at);
        truth.erase(truth.begin() + at);
        break;
      case 4:
        ours.resize(at + 2, value);
        truth.resize(at + 2, value);
        break;
      case 5:
        if (truth.empty()) break;
        ours.pop_back();
        truth.pop_back();
        break;
      case 6: {
        Small copy = ours;
        RC_ASSERT(copy == ours);
        ours.push_back(1);  // the copy is its own
        ours = copy;
        break;
      }
      case 7: {
        Small moved = std::move(ours);
        RC_ASSERT(ours.empty());
        ours = std::move(moved);
        break;
      }
      case 8:
        if (!truth.empty()) ours.push_back(ours.front()), truth.push_back(truth.front());
        break;
    }
    RC_ASSERT(listed(ours) == truth);
    RC_ASSERT(ours.size() == truth.size());
  }
}

RC_GTEST_PROP(InlineVector, ComparesLikeAVector,
              (const std::vector<int64_t>& a, const std::vector<int64_t>& b)) {
  Small x(a.begin(), a.end()), y(b.begin(), b.end());
  RC_ASSERT((x == y) == (a == b));
  RC_ASSERT((x <=> y) == (a <=> b));
}

TEST(InlineVector, IsMadeFromListsCountsAndSpans) {
  std::vector<int64_t> five = {1, 2, 3, 4, 5};
  EXPECT_EQ(listed(Small{1, 2, 3, 4, 5}), five);
  EXPECT_EQ(listed(Small(std::span<const int64_t>(five))), five);
  EXPECT_EQ(listed(Small(4, 7)), std::vector<int64_t>(4, 7));
  Small small = {1, 2};
  std::span<const int64_t> span = small;
  EXPECT_EQ(span.data(), small.data());
  EXPECT_EQ(span.size(), 2u);
}

TEST(InlineVector, AssignsToItself) {
  Small values = {1, 2, 3, 4};
  Small& same = values;
  values = same;
  EXPECT_EQ(listed(values), (std::vector<int64_t>{1, 2, 3, 4}));
  values = std::move(same);
  EXPECT_EQ(listed(values), (std::vector<int64_t>{1, 2, 3, 4}));
}

TEST(InlineVector, RefusesWhatItCannotCount) {
  Small values;
  EXPECT_THROW(values.reserve(size_t{1} << 32), std::length_error);
  EXPECT_TRUE(values.empty());
}

}  // namespace
}  // namespace spolia
