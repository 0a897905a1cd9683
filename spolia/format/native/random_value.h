// Random trees of values for property tests: all that tagged JSON can hold.
#pragma once

#include <limits>
#include <string>
#include <vector>

#include "spolia/layout/test_random.h"
#include "spolia/state/value.h"

namespace spolia {

inline std::string random_text() {
  const std::vector<std::string> pieces = {"a",  "é", "\xff", std::string(1, '\0'), "$", "\"", "\\",
                                           "\n", "/", "\x7f"};
  std::string text;
  for (int64_t i = pick(0, 5); i > 0; --i) text += pieces[static_cast<size_t>(pick(0, std::ssize(pieces)))];
  return text;
}

inline double random_double() {
  const std::vector<double> odd = {0.0,
                                   -0.0,
                                   1.0,
                                   0.1,
                                   1e300,
                                   -1e-310,
                                   5e-324,
                                   std::numeric_limits<double>::max(),
                                   std::numeric_limits<double>::infinity(),
                                   -std::numeric_limits<double>::infinity(),
                                   std::numeric_limits<double>::quiet_NaN()};
  int64_t i = pick(0, std::ssize(odd) + 2);
  if (i < std::ssize(odd)) return odd[static_cast<size_t>(i)];
  return static_cast<double>(pick(-1'000'000, 1'000'000)) / static_cast<double>(pick(1, 1000));
}

inline Value random_value(int64_t depth);

inline std::vector<Value> random_values(int64_t depth) {
  std::vector<Value> values;
  for (int64_t i = pick(0, 4); i > 0; --i) values.push_back(random_value(depth));
  return values;
}

inline Value random_value(int64_t depth) {
  switch (pick(0, depth > 0 ? 14 : 9)) {
    case 0:
      return Value();
    case 1:
      return Value(pick(0, 2) == 1);
    case 2:
      return Value(pick(-5, 5));
    case 3:
      return Value(pick(0, 2) == 1 ? std::numeric_limits<int64_t>::max()
                                   : std::numeric_limits<int64_t>::min());
    case 4:
      return Value(BigInt{pick(0, 2) == 1 ? "9223372036854775808" : "-123456789012345678901234567890"});
    case 5:
      return Value(random_double());
    case 6:
      return Value(random_text());
    case 7: {
      Bytes bytes;
      for (int64_t i = pick(0, 4); i > 0; --i) bytes.data.push_back(static_cast<std::byte>(pick(0, 256)));
      return Value(std::move(bytes));
    }
    case 8:
      return Value(Global{random_text(), random_text()});
    case 9:
      return Value(List{random_values(depth - 1)});
    case 10:
      return Value(Tuple{random_values(depth - 1)});
    case 11:
      return Value(Set{random_values(depth - 1)});
    default: {
      const bool text_keys = pick(0, 2) == 1;
      Dict dict;
      for (int64_t i = pick(0, 4); i > 0; --i) {
        Value key = text_keys ? Value(random_text()) : random_value(0);
        dict.items.emplace_back(std::move(key), random_value(depth - 1));
      }
      return Value(std::move(dict));
    }
  }
}

}  // namespace spolia
