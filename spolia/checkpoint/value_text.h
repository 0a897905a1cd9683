// Values as bytes that travel between ranks, or are hashed.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "spolia/state/value.h"

namespace spolia {

/// Equal for equal values. Nothing where a value has no such form: an object that Python could not make
/// again.
std::optional<std::string> value_text(const Value& value);

/// The value of value_text(). CorruptError where the text is none.
Value value_of_text(std::string_view text);

}  // namespace spolia
