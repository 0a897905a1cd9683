#include "spolia/checkpoint/value_text.h"

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/format/json_records.h"
#include "spolia/format/native/tagged_json.h"
#include "spolia/format/torch/value_pickle.h"

namespace spolia {
namespace {

// What the first byte says the rest is.
constexpr char kTaggedJson = 'j';
constexpr char kArchive = 'p';

}  // namespace

std::optional<std::string> value_text(const Value& value) {
  if (can_tag(value)) return kTaggedJson + tagged_json(value);
  if (can_pickle(value)) return kArchive + write_value_archive(value);
  return std::nullopt;
}

Value value_of_text(std::string_view text) {
  if (text.empty()) throw CorruptError("an empty text stands for no value");
  const std::string_view rest = text.substr(1);
  if (text.front() == kArchive) {
    const std::span<const std::byte> bytes = bytes_of(rest);
    return read_value_archive({bytes.begin(), bytes.end()}, "a value");
  }
  // In a list, so that it is handed on whole, whatever it is.
  Value value;
  read_json_records(fmt::format("{{\"value\": [{}]}}", rest), "a value",
                    [&](JsonRecord& record) { value = untagged(record.value); });
  return value;
}

}  // namespace spolia
