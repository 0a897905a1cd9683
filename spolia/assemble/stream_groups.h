// The groups of a stream: the ranks in one, or in rows and columns, and what they tell each other through
// these alone.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/assemble/stream_plan.h"
#include "spolia/comm/group.h"

namespace spolia {

/// One rank's two groups. Used by one thread; the groups outlive it.
///
/// Where an exchange fails on this rank it breaks both: the others cannot know, and would wait. So the
/// failure of a row goes on to its columns, and from there to all. Errors that all have agreed on break
/// nothing.
class StreamGroups {
 public:
  /// All ranks of the group, in a row.
  explicit StreamGroups(Group& all);
  /// `row`: the ranks of this one's row; `column`: those of its column. Collective over all rows and columns.
  /// InvalidArgumentError on every rank where only one is given, where they move the memory of two devices,
  /// or where they make no full grid: each row has to meet each column in one rank.
  StreamGroups(Group* row, Group* column);

  const StreamGrid& grid() const { return grid_; }
  size_t seat() const { return seat_; }
  Group& row() const { return *row_; }
  /// nullptr where there is one row.
  Group* column() const { return column_; }
  /// Whose memory they move.
  Device device() const { return row_->device(); }

  /// Breaks what is not broken yet, on all ranks that can be reached, for what has gone wrong on this one.
  void break_both(const std::exception_ptr& why) const;

  /// A text from each, by seat. Collective.
  std::vector<std::string> gather(std::string_view text) const;

  /// Whether a rank has ended the stream, and which.
  struct Verdict {
    bool ended = false;
    int64_t by = 0;  // a rank
  };
  /// All ranks say how they are: well, ended, or failed. One number from each where all are well. Where some
  /// have failed the error of one is thrown on every rank, as agree() does.
  Verdict settle(std::string_view step, bool ended = false, std::exception_ptr failure = nullptr) const;
  /// The same where `body` is a step that may fail.
  void agree(std::string_view step, const std::function<void()>& body) const;
  /// MismatchError on every rank where texts differ, naming two ranks.
  void require_equal(std::string_view what, std::string_view text) const;

 private:
  int64_t all_or(int64_t number) const;

  Group* row_;
  Group* column_ = nullptr;
  StreamGrid grid_;
  size_t seat_ = 0;
};

}  // namespace spolia
