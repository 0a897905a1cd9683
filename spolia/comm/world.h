// The world: all ranks of a job, as one of them sees it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>

#include "spolia/comm/group.h"

namespace spolia {

/// Used by one thread, its rank's. Groups may go to other threads, each to one at a time.
class World {
 public:
  virtual ~World() = default;

  int64_t rank() const { return all()->place(); }
  int64_t size() const { return all()->size(); }
  /// The group of all ranks.
  virtual const std::shared_ptr<Group>& all() const = 0;

  /// A new group, with the time-out of all(). Collective over the world: every rank calls it with the same
  /// ranks (rising, distinct, at least one), also those that are not among them, which get nullptr.
  /// InvalidArgumentError where they are not so; MismatchError on every rank where they differ.
  virtual std::shared_ptr<Group> create(std::span<const int64_t> ranks) = 0;

  /// A number for the host of each rank: ranks of one host share it. From 0 up, in the order of the ranks.
  virtual std::span<const int64_t> hosts() const = 0;
};

/// For implementations of World::create(): throws what it throws. Collective over `all`.
void check_same_ranks(Group& all, std::span<const int64_t> ranks);

/// What goes around each rank's end of each group, say to log it or to inject faults (decorators.h).
using Decorator = std::function<std::shared_ptr<GroupBackend>(std::shared_ptr<GroupBackend> backend)>;

struct LaunchOptions {
  milliseconds timeout = std::chrono::minutes(5);  // of all groups
  int ranks_per_host = 0;                          // as hosts() tells; 0: all are on one host
  Decorator decorate;                              // called on the rank's thread
};

/// Runs `body` on `ranks` ranks, which are threads of this process, and returns when all have returned.
///
/// Where some throw, the groups they are in are broken, so that none waits for them, and one error is thrown:
/// that of the lowest rank that did not merely suffer from another's failure, neither as a PeerFailedError
/// nor, if there is anything else, as a TimeoutError. An Error keeps its kind, and its message names the
/// rank unless all ranks say the same; another exception is rethrown as it is. A rank that has returned
/// breaks the groups whose operations still need it. InvalidArgumentError where there are no ranks.
void launch(int ranks, const std::function<void(World& world)>& body, const LaunchOptions& options = {});

}  // namespace spolia
