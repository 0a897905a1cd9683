// What an operation did, handed back to its caller; and the sinks it tells while it runs. The library never
// prints.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace spolia {

/// Seconds, bytes and counts of one finished operation.
struct Report {
  std::map<std::string, double> seconds;  // a phase ("plan", "transfer", "sync", ...) -> wall seconds
  int64_t bytes_read = 0;                 // from the source's files
  int64_t decoders_reopened = 0;          // compressed items decoded again, as memory kept too few open
  int64_t bytes_written = 0;
  int64_t tensors = 0;
  int64_t crcs_checked = 0;             // stored checksums that were compared
  int64_t crcs_absent = 0;              // payloads that carry no checksum
  int64_t buffer_bytes = 0;             // what the executor's buffers held at most
  int64_t bytes_sent = 0;               // to other ranks: of each broadcast its root's bytes
  int64_t busiest_rank_bytes = 0;       // of the ranks, the most that one read or wrote
  int64_t mean_rank_bytes = 0;          // and what they did on average
  int64_t groups_made = 0;              // for this operation
  int64_t groups_reused = 0;            // that were there before
  int64_t items_batched = 0;            // of the pieces sent, those that travelled with others
  std::vector<std::string> used;        // keys that were loaded
  std::vector<std::string> kept;        // keys that kept what they had, as the checkpoint lacks them
  std::vector<std::string> missing;     // of those, the ones that nobody said may be missing
  std::vector<std::string> unexpected;  // keys of the checkpoint that nobody asked for
  std::vector<std::string> left_out;    // names of values that the format written cannot hold
  std::vector<std::string> notes;       // things a person should know
};

/// Called now and then, from any one thread at a time, with the bytes done and the bytes to do.
using ProgressSink = std::function<void(int64_t done, int64_t total)>;

}  // namespace spolia
