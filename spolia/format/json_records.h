// JSON from strangers as small trees: one large object whose arrays are handed on element by element, so that
// memory holds one of them at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/state/value.h"

namespace spolia {

/// A member of the object, or an element of a member that is an array.
struct JsonRecord {
  std::string_view key;   // the member's
  bool in_array = false;  // whether the member is an array, and this one of its elements
  Value value;            // null, bool, int, BigInt, float, str, list, and dict with str keys
};

/// Calls `on_record` for all of `text` in its order; `file` is the file's name, for messages. CorruptError
/// where the text is not one JSON object in UTF-8, has a key twice in an object, or nests deeper than
/// kMaxJsonNesting. What `on_record` throws passes through, with the place put before its message.
void read_json_records(std::string_view text, std::string_view file,
                       const std::function<void(JsonRecord&)>& on_record);
inline constexpr size_t kMaxJsonNesting = 1000;

/// The members of an object in a tree of plain JSON, asked for by their names. What nobody asks for is
/// ignored. The methods throw a CorruptError, naming the key, where a member is missing or of another type.
class JsonObject {
 public:
  /// CorruptError where `value`, which must outlive the object, is none.
  explicit JsonObject(const Value& value);

  const Value* find(std::string_view key) const;
  const Value& at(std::string_view key) const;
  const std::string& text(std::string_view key) const;
  /// A whole number from 0 to `most`.
  int64_t integer(std::string_view key, int64_t most = std::numeric_limits<int64_t>::max()) const;
  const std::vector<Value>& list(std::string_view key) const;

 private:
  const Dict* dict_;
};

/// A list of whole numbers from 0 up. CorruptError, saying that `what` is none, where it is not that.
std::vector<int64_t> json_integers(const Value& value, std::string_view what);

}  // namespace spolia
