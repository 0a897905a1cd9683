// Steps that fail on every rank or on none, and options that are the same everywhere.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <string_view>

#include "spolia/base/error.h"
#include "spolia/comm/group.h"

namespace spolia {

// Collective over the group. What is thrown here for all ranks does not break the group.

/// Runs `body` on this rank, and returns where it returned on all. Where it threw on some, the same error is
/// thrown on every rank: that of the lowest rank that did not merely suffer from another's failure, neither
/// by a PeerFailedError nor, if there is anything else, by a TimeoutError. The message is
/// "STEP: rank R: the error's message (N other ranks failed too)", the kind is the error's; std::bad_alloc
/// becomes an IoError, an exception that is not an Error a PeerFailedError.
///
/// Costs one all-gather of a number where nothing fails. Where the group itself breaks, in `body` or in the
/// exchange, a rank throws its own error if it has one, else what the exchange met.
void agree(Group& group, std::string_view step, const std::function<void()>& body);

/// MismatchError on every rank where `value` (text or any bytes) is not the same on all, naming two ranks and
/// what each has; of a long one the bytes around the first difference.
void require_equal(Group& group, std::string_view what, std::string_view value);

/// What any exception says of itself. Precondition: there is one.
std::string text_of(const std::exception_ptr& error);

/// How much an error is another rank's doing: 2 for a PeerFailedError, 1 for a TimeoutError, 0 for all else.
/// Of several ranks' errors the one with the least is told. Precondition: there is one.
int suffering(const std::exception_ptr& error);

/// What a rank threw, as it is told to the others: std::bad_alloc as an IoError, what is no Error as a
/// PeerFailedError.
struct Failure {
  ErrorKind kind = ErrorKind::kPeerFailed;
  int suffering = 0;
  std::string message;
};
/// Precondition: there is one.
Failure failure_of(const std::exception_ptr& error);

}  // namespace spolia
