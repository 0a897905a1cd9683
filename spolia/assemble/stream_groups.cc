#include "spolia/assemble/stream_groups.h"

#include <algorithm>
#include <map>
#include <new>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"

namespace spolia {
namespace {

int64_t own_rank(const Group& group) { return group.ranks()[static_cast<size_t>(group.place())]; }

std::vector<int64_t> ranks_of(const Group& group) { return {group.ranks().begin(), group.ranks().end()}; }

void break_groups(Group& row, Group* column, const std::exception_ptr& why) {
  const std::string reason = fmt::format("streaming failed on rank {}: {}", own_rank(row), text_of(why));
  for (Group* group : {&row, column}) {
    if (group != nullptr && group->backend().broken().empty()) group->backend().break_group(reason);
  }
}

/// What the groups do together. Where it fails on this rank they break.
template <class Exchange>
auto exchanged(Group& row, Group* column, const Exchange& exchange) {
  try {
    return exchange();
  } catch (...) {
    break_groups(row, column, std::current_exception());
    throw;
  }
}

/// What each rank of a row or column has, down the columns first.
std::map<int64_t, std::string> gather_by_rank(Group& row, Group* column, std::string_view text) {
  std::string of_column;
  if (column == nullptr) {
    Packer one;
    one.number(own_rank(row));
    one.text(text);
    of_column = one.take();
  } else {
    const std::vector<std::string> texts = all_gather_texts(*column, text);
    Packer all;
    for (size_t place = 0; place < texts.size(); ++place) {
      all.number(column->ranks()[place]);
      all.text(texts[place]);
    }
    of_column = all.take();
  }
  std::map<int64_t, std::string> by_rank;
  for (const std::string& packed : all_gather_texts(row, of_column)) {
    for (Unpacker in(packed); !in.at_end();) {
      const int64_t rank = in.number();
      by_rank[rank] = in.text();
    }
  }
  return by_rank;
}

/// The grid that rows and columns make.
StreamGrid grid_of(const std::map<int64_t, std::string>& ties) {
  std::set<std::vector<int64_t>> rows, columns;
  for (const auto& [rank, packed] : ties) {
    Unpacker in(packed);
    for (std::set<std::vector<int64_t>>* sets : {&rows, &columns}) {
      std::vector<int64_t> ranks;
      for (size_t left = in.count(); left > 0; --left) ranks.push_back(in.number());
      sets->insert(std::move(ranks));
    }
  }
  StreamGrid grid;
  size_t seats = 0;
  for (const std::vector<int64_t>& row : rows) {
    std::vector<int64_t>& in_order = grid.rows.emplace_back();
    for (const std::vector<int64_t>& column : columns) {
      std::vector<int64_t> both;
      std::ranges::set_intersection(row, column, std::back_inserter(both));
      if (both.size() != 1) {
        throw InvalidArgumentError(
            "rows and columns of a stream: the row {} and the column {} have {} ranks in "
            "common; in a full grid it is one",
            list_text(row), list_text(column), both.size());
      }
      in_order.push_back(both.front());
    }
    seats += row.size();
  }
  if (seats != ties.size() || seats != grid.seats()) {
    throw InvalidArgumentError(
        "rows and columns of a stream: {} ranks in {} rows and {} columns make no full grid", ties.size(),
        rows.size(), columns.size());
  }
  return grid;
}

}  // namespace

StreamGroups::StreamGroups(Group& all) : row_(&all) {
  grid_.rows.push_back(ranks_of(all));
  seat_ = static_cast<size_t>(all.place());
}

StreamGroups::StreamGroups(Group* row, Group* column) : row_(row), column_(column) {
  if (row == nullptr || column == nullptr) {
    throw InvalidArgumentError("a stream over rows and columns takes both groups, but the {} is missing",
                               row == nullptr ? "row's" : "column's");
  }
  if (own_rank(*row) != own_rank(*column)) {
    throw InvalidArgumentError("the row's group is rank {}'s, the column's rank {}'s", own_rank(*row),
                               own_rank(*column));
  }
  if (row->device() != column->device()) {
    throw InvalidArgumentError("the row's group moves memory on {}, the column's on {}",
                               name_of(row->device()), name_of(column->device()));
  }
  Packer ties;
  ties.numbers(row->ranks());
  ties.numbers(column->ranks());
  grid_ = grid_of(exchanged(*row, column, [&] { return gather_by_rank(*row, column, ties.take()); }));
  seat_ = *grid_.seat_of(own_rank(*row));
  if (column->size() == 1) column_ = nullptr;
}

void StreamGroups::break_both(const std::exception_ptr& why) const { break_groups(*row_, column_, why); }

std::vector<std::string> StreamGroups::gather(std::string_view text) const {
  std::map<int64_t, std::string> by_rank =
      exchanged(*row_, column_, [&] { return gather_by_rank(*row_, column_, text); });
  std::vector<std::string> by_seat;
  for (size_t seat = 0; seat < grid_.seats(); ++seat)
    by_seat.push_back(std::move(by_rank[grid_.rank_of(seat)]));
  return by_seat;
}

int64_t StreamGroups::all_or(int64_t number) const {
  return exchanged(*row_, column_, [&] {
    for (Group* group : {column_, row_}) {
      if (group == nullptr || group->size() == 1) continue;
      for (int64_t other : all_gather_number(*group, number)) number |= other;
    }
    return number;
  });
}

StreamGroups::Verdict StreamGroups::settle(std::string_view step, bool ended,
                                           std::exception_ptr failure) const {
  constexpr int64_t kEnded = 1, kFailed = 2;
  int64_t all = 0;
  std::vector<std::string> said;
  try {
    all = all_or((ended ? kEnded : 0) | (failure ? kFailed : 0));
    if (all == 0) return {};
    Packer own;
    own.number(failure ? kFailed : ended ? kEnded : 0);
    const Failure why = failure ? failure_of(failure) : Failure();
    own.number(static_cast<int64_t>(why.kind));
    own.number(why.suffering);
    own.text(std::string_view(why.message).substr(0, size_t{16} << 10));
    said = gather(own.take());
  } catch (...) {
    if (failure) std::rethrow_exception(failure);
    throw;
  }
  Verdict verdict;
  std::optional<Failure> chosen;
  int64_t failed = 0, by = 0;
  for (size_t seat = 0; seat < said.size(); ++seat) {
    Unpacker in(said[seat]);
    const int64_t how = in.number();
    Failure why{static_cast<ErrorKind>(in.number()), static_cast<int>(in.number()), std::string(in.text())};
    if (how == kEnded && !verdict.ended) verdict = {true, grid_.rank_of(seat)};
    if (how != kFailed) continue;
    ++failed;
    if (chosen && chosen->suffering <= why.suffering) continue;
    chosen = std::move(why);
    by = grid_.rank_of(seat);
  }
  if (!chosen) return verdict;
  if (failed > 1)
    chosen->message += fmt::format(" ({} other rank{} failed too)", failed - 1, failed == 2 ? "" : "s");
  rethrow_with_context(Error(chosen->kind, chosen->message), fmt::format("{}: rank {}", step, by));
}

void StreamGroups::agree(std::string_view step, const std::function<void()>& body) const {
  std::exception_ptr failure;
  try {
    body();
  } catch (...) {
    failure = std::current_exception();
  }
  settle(step, false, failure);
}

void StreamGroups::require_equal(std::string_view what, std::string_view text) const {
  const std::vector<std::string> texts = gather(text);
  for (size_t seat = 1; seat < texts.size(); ++seat) {
    if (texts[seat] == texts[0]) continue;
    throw MismatchError("{}: rank {} has {}, rank {} has {}; they have to be the same", what,
                        grid_.rank_of(0), quote(texts[0]), grid_.rank_of(seat), quote(texts[seat]));
  }
}

}  // namespace spolia
