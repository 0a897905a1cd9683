#include "spolia/comm/agree.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/comm/exchange.h"

namespace spolia {
namespace {

/// Longer messages are cut: every rank holds those of all.
constexpr size_t kMessageBytes = size_t{16} << 10;

std::string encode(const Failure& failure) {
  std::string text = {static_cast<char>(failure.kind), static_cast<char>(failure.suffering)};
  return text + failure.message.substr(0, kMessageBytes);
}

Failure decode(std::string_view text) {
  return {static_cast<ErrorKind>(text[0]), text[1], std::string(text.substr(2))};
}

/// Throws the failure that all ranks choose from what all have sent; returns where there is none.
void throw_chosen(Group& group, std::string_view step, std::span<const std::string> outcomes) {
  std::optional<Failure> chosen;
  size_t place = 0;
  int others = -1;
  for (size_t p = 0; p < outcomes.size(); ++p) {
    if (outcomes[p].empty()) continue;
    ++others;
    Failure failure = decode(outcomes[p]);
    if (chosen && chosen->suffering <= failure.suffering) continue;
    chosen = std::move(failure);
    place = p;
  }
  if (!chosen) return;
  std::string& message = chosen->message;
  if (others > 0) message += fmt::format(" ({} other rank{} failed too)", others, others == 1 ? "" : "s");
  rethrow_with_context(Error(chosen->kind, message), fmt::format("{}: rank {}", step, group.ranks()[place]));
}

/// At most this much of a value travels to be shown.
constexpr size_t kComparedBytes = size_t{1} << 20;
/// What quote() shows whole.
constexpr size_t kShownBytes = 160;

/// The value, or what is around its byte `at`.
std::string excerpt(std::string_view value, size_t at) {
  if (value.size() <= kShownBytes) return quote(value);
  const size_t begin = at - std::min(at, kShownBytes / 2);
  return fmt::format("{} (from byte {})", quote(value.substr(begin, kShownBytes)), begin);
}

}  // namespace

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an unknown exception";
  }
}

int suffering(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return known.kind() == ErrorKind::kPeerFailed ? 2 : known.kind() == ErrorKind::kTimeout;
  } catch (...) {
    return 0;
  }
}

Failure failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {
    return {known.kind(), suffering(error), known.what()};
  } catch (const std::bad_alloc&) {
    return {ErrorKind::kIo, 0, "not enough memory"};
  } catch (...) {
    return {ErrorKind::kPeerFailed, 0, text_of(error)};
  }
}

void agree(Group& group, std::string_view step, const std::function<void()>& body) {
  std::exception_ptr own;
  std::string outcome;
  try {
    body();
  } catch (...) {
    own = std::current_exception();
    outcome = encode(failure_of(own));
  }
  std::vector<std::string> outcomes;
  try {
    outcomes = all_gather_texts(group, outcome);
  } catch (...) {
    if (own) std::rethrow_exception(own);
    throw;
  }
  throw_chosen(group, step, outcomes);
}

void require_equal(Group& group, std::string_view what, std::string_view value) {
  const auto own = static_cast<int64_t>(xxh3_64(bytes_of(value)));
  const std::vector<int64_t> hashes = all_gather_number(group, own);
  const auto other = std::ranges::find_if(hashes, [&](int64_t hash) { return hash != hashes[0]; });
  if (other == hashes.end()) return;

  const auto place = static_cast<size_t>(other - hashes.begin());
  const bool shows = group.place() == 0 || group.place() == static_cast<int>(place);
  const std::vector<std::string> values =
      all_gather_texts(group, shows ? value.substr(0, kComparedBytes) : std::string_view());
  const std::string &a = values[0], &b = values[place];
  const auto at = static_cast<size_t>(std::ranges::mismatch(a, b).in1 - a.begin());
  throw MismatchError("{}: rank {} has {}, rank {} has {}; they have to be the same", what, group.ranks()[0],
                      excerpt(a, at), group.ranks()[place], excerpt(b, at));
}

}  // namespace spolia
