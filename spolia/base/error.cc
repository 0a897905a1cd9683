#include "spolia/base/error.h"

#include <cerrno>
#include <system_error>

namespace spolia {

std::string_view name_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return "invalid argument";
    case ErrorKind::kNotFound:
      return "not found";
    case ErrorKind::kCorrupt:
      return "corrupt";
    case ErrorKind::kUnsupported:
      return "unsupported";
    case ErrorKind::kMismatch:
      return "mismatch";
    case ErrorKind::kIo:
      return "I/O";
    case ErrorKind::kTimeout:
      return "time-out";
    case ErrorKind::kPeerFailed:
      return "peer failed";
    case ErrorKind::kCancelled:
      return "cancelled";
  }
  return "unknown";
}

void throw_system_error(int error_number, std::string_view what) {
  std::string reason = std::generic_category().message(error_number);
  if (error_number == ENOENT) throw NotFoundError("{}: {}", what, reason);
  throw IoError("{}: {}", what, reason);
}

void rethrow_with_context(const Error& error, std::string_view context) {
  const std::string message = fmt::format("{}: {}", context, error.what());
  switch (error.kind()) {  // as the type that callers of that kind catch
    case ErrorKind::kInvalidArgument:
      throw InvalidArgumentError("{}", message);
    case ErrorKind::kNotFound:
      throw NotFoundError("{}", message);
    case ErrorKind::kCorrupt:
      throw CorruptError("{}", message);
    case ErrorKind::kUnsupported:
      throw UnsupportedError("{}", message);
    case ErrorKind::kMismatch:
      throw MismatchError("{}", message);
    case ErrorKind::kIo:
      throw IoError("{}", message);
    case ErrorKind::kCancelled:
      throw CancelledError("{}", message);
    case ErrorKind::kTimeout:
      throw TimeoutError("{}", message);
    case ErrorKind::kPeerFailed:
      throw PeerFailedError("{}", message);
  }
  throw Error(error.kind(), message);
}

}  // namespace spolia
