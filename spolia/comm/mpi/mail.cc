#include "spolia/comm/mpi/mail.h"

#include <utility>

#include "spolia/base/error.h"

namespace spolia {

using Lane = Transport::Lane;

void Mail::check(int error) {
  if (error != 0) throw IoError("MPI: {}", transport_.error_text(error));
}

void Mail::send(Lane lane, int to, int tag, std::vector<std::byte> message) {
  Kept& kept = leaving_.emplace_back();
  kept.memory = std::move(message);
  const int error =
      transport_.send(lane, kept.memory.data(), std::ssize(kept.memory), to, tag, &kept.request);
  if (error == 0) return;
  leaving_.pop_back();
  check(error);
}

Expected Mail::expect(int from, int tag, size_t most_bytes) {
  Expected expected{.from = from, .request = {}, .memory = std::vector<std::byte>(most_bytes)};
  check(transport_.receive(Lane::kGroups, expected.memory.data(), std::ssize(expected.memory), from, tag,
                           &expected.request));
  return expected;
}

std::optional<std::vector<std::byte>> Mail::take(Expected& expected) {
  bool done = false;
  int64_t bytes = 0;
  check(transport_.test(&expected.request, &done, &bytes));
  if (!done) return std::nullopt;
  expected.memory.resize(static_cast<size_t>(bytes));
  return std::move(expected.memory);
}

void Mail::forget(Expected expected) {
  transport_.cancel(&expected.request);
  forgotten_.push_back({expected.request, std::move(expected.memory)});
}

std::optional<std::pair<int, std::vector<std::byte>>> Mail::next_control() {
  int from = Transport::kAnyone;
  int64_t bytes = 0;
  check(transport_.probe(Lane::kControl, 0, &from, &bytes));
  if (from == Transport::kAnyone) return std::nullopt;
  std::vector<std::byte> message(static_cast<size_t>(bytes));
  Transport::Request request;
  check(transport_.receive(Lane::kControl, message.data(), bytes, from, 0, &request));
  while (!is_done(request)) {  // it has come already
  }
  return std::pair(from, std::move(message));
}

Transport::Request Mail::start(bool sends, std::byte* data, int64_t bytes, int peer, int tag) {
  Transport::Request request;
  check(sends ? transport_.send(Lane::kGroups, data, bytes, peer, tag, &request)
              : transport_.receive(Lane::kGroups, data, bytes, peer, tag, &request));
  return request;
}

bool Mail::is_done(Transport::Request& request) {
  bool done = false;
  check(transport_.test(&request, &done, nullptr));
  return done;
}

bool Mail::sweep(std::deque<Kept>& list) {
  const size_t before = list.size();
  std::erase_if(list, [&](Kept& kept) {
    bool done = false;
    // What failed is over too.
    return transport_.test(&kept.request, &done, nullptr) != 0 || done;
  });
  return list.size() != before;
}

bool Mail::sweep() {
  const bool left = sweep(leaving_);
  return sweep(forgotten_) || left;
}

}  // namespace spolia
