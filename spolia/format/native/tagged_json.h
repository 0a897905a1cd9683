// Values as tagged JSON: what JSON has is written as it is, what it lacks as an object with one key that
// starts with '$'. docs/formats/spolia.md lists the tags.
//
// Nothing is lost: the value read back is equal to the one written, but that all NaNs are one.
#pragma once

#include <string>
#include <string_view>

#include "spolia/state/value.h"

namespace spolia {

/// Deeper values are written in another way. What pickles hold is not deeper than 200.
inline constexpr size_t kMaxTaggedDepth = 250;

/// Whether the value has such a form: there is no record in it, and it is at most kMaxTaggedDepth deep.
bool can_tag(const Value& value);

/// Precondition: can_tag(value).
std::string tagged_json(const Value& value);
void append_tagged_json(std::string& out, const Value& value);
/// The same for a text, which need not be UTF-8.
void append_tagged_json(std::string& out, std::string_view text);

/// The value of a tree of plain JSON (json_records.h). CorruptError where a tag is unknown or misused.
Value untagged(const Value& json);
/// The same where only a text will do.
std::string untagged_text(const Value& json);

}  // namespace spolia
