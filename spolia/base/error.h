// Errors: one exception type per kind, each with a message that says what, where and what to do.
//
// Every failure of the library is an exception derived from spolia::Error. A message is one sentence or two
// without a trailing newline; names that come from files go through quote() (text.h) so that control bytes
// in a hostile name cannot reach a terminal.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <fmt/format.h>

namespace spolia {

enum class ErrorKind {
  kInvalidArgument,  // the caller asked for something that makes no sense
  kNotFound,         // a file, tensor or key that is not there
  kCorrupt,          // bytes that break their format's own rules, or fail a checksum
  kUnsupported,      // well-formed, but something Spolia does not do
  kMismatch,         // two descriptions that should agree do not
  kIo,               // the operating system refused
  kTimeout,          // a peer did not arrive in time
  kPeerFailed,       // another rank threw or died
  kCancelled,        // the operation was asked to stop
};

/// The kind's name as it stands in reports: "corrupt", "not found", ...
std::string_view name_of(ErrorKind kind);

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <ErrorKind K>
class ErrorOf : public Error {
 public:
  template <class... Args>
  explicit ErrorOf(fmt::format_string<Args...> format, Args&&... args)
      : Error(K, fmt::format(format, std::forward<Args>(args)...)) {}
};

using InvalidArgumentError = ErrorOf<ErrorKind::kInvalidArgument>;
using NotFoundError = ErrorOf<ErrorKind::kNotFound>;
using CorruptError = ErrorOf<ErrorKind::kCorrupt>;
using UnsupportedError = ErrorOf<ErrorKind::kUnsupported>;
using MismatchError = ErrorOf<ErrorKind::kMismatch>;
using IoError = ErrorOf<ErrorKind::kIo>;
using TimeoutError = ErrorOf<ErrorKind::kTimeout>;
using PeerFailedError = ErrorOf<ErrorKind::kPeerFailed>;
using CancelledError = ErrorOf<ErrorKind::kCancelled>;

/// Throws an IoError (NotFoundError for ENOENT) "WHAT: <reason of error_number>".
[[noreturn]] void throw_system_error(int error_number, std::string_view what);

/// Rethrows `error` with `context` put before its message ("CONTEXT: message"); the kind stays.
[[noreturn]] void rethrow_with_context(const Error& error, std::string_view context);

}  // namespace spolia
