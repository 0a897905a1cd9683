// The communication thread of a process: it alone calls MPI, from its initialisation to the end.
//
// Others hand it jobs through a queue. Between jobs it carries its groups' operations on, and answers other
// ranks' communication threads, whatever its own rank is busy with.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "spolia/comm/mpi/mpi_group.h"
#include "spolia/comm/mpi/transport.h"

namespace spolia {

/// Thread-safe.
class MpiEngine {
 public:
  /// Starts the thread, which opens the transport. Throws what `open` throws.
  explicit MpiEngine(std::function<Transport*()> open);
  /// Precondition: nobody uses its groups. Ends as it was last told to by will_end_together().
  ~MpiEngine();
  MpiEngine(const MpiEngine&) = delete;
  MpiEngine& operator=(const MpiEngine&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::vector<int64_t>& hosts() const { return hosts_; }
  /// Groups have the ids from 0 to below this.
  int64_t most_groups() const { return most_groups_; }

  /// A group that all its ranks make with this id, which none of them has used before.
  std::shared_ptr<GroupFace> make_group(int64_t id, std::vector<int64_t> ranks);
  void start(int64_t group, std::shared_ptr<MpiOperation> operation);
  void give_up(int64_t group, std::shared_ptr<MpiOperation> operation);
  void break_group(int64_t group, Broken broken);
  /// This rank starts no more operations of the group.
  void leave(int64_t group);
  /// Breaks all groups from this id on that this rank is in.
  void break_groups_from(int64_t first_id, const std::string& reason);
  /// Leaves them: nobody uses their ends any more.
  void leave_groups_from(int64_t first_id);

  /// That all ranks end now (true), or that some may be lost (false, as at first).
  void will_end_together(bool together) { ends_together_ = together; }
  bool ends_together() const { return ends_together_; }
  /// Ends all processes of the job.
  void abort(int code);

 private:
  using Job = std::function<void()>;
  void post(Job job);
  void with_group(int64_t id, std::function<void(MpiGroup& group)> body);
  void leave_now(int64_t group);
  void loop();
  bool has_said_all();
  bool do_jobs();
  bool progress();
  bool hear();
  void obey(int from, const ControlMessage& message);
  void rest(int idle_rounds);
  bool is_idle() const;
  bool is_moving() const;

  int rank_ = 0, size_ = 1;
  std::vector<int64_t> hosts_;
  int64_t most_groups_ = 0;
  std::atomic<bool> ends_together_{false};

  std::mutex mutex_;  // guards the jobs
  std::condition_variable woken_;
  std::vector<Job> jobs_;
  std::atomic<bool> has_jobs_{false};
  std::atomic<bool> stops_{false};

  // The thread's own:
  Transport* transport_ = nullptr;
  std::unique_ptr<Mail> mail_;
  std::optional<Deadline> stopped_;
  std::map<int64_t, MpiGroup> groups_;
  std::map<int64_t, MpiGroup> past_;  // left, the latest of them
  std::map<int64_t, Broken> early_;   // of groups that this rank has not made yet
  int64_t greatest_id_ = -1;          // of the groups that were made here

  std::thread thread_;
};

}  // namespace spolia
