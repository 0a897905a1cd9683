#include "spolia/comm/agree.h"

#include <chrono>
#include <mutex>
#include <new>
#include <set>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/comm/decorators.h"
#include "spolia/comm/exchange.h"

namespace spolia {
namespace {

/// What agree() throws, which has to be the same on all ranks: its kind and message. The group goes on after
/// it.
std::pair<ErrorKind, std::string> failure(int ranks, const std::function<void(int64_t rank)>& body) {
  std::mutex mutex;
  std::set<std::pair<ErrorKind, std::string>> failures;
  int thrown = 0;
  launch(ranks, [&](World& world) {
    try {
      agree(*world.all(), "reading", [&] { body(world.rank()); });
    } catch (const Error& error) {
      std::lock_guard lock(mutex);
      failures.emplace(error.kind(), error.what());
      ++thrown;
    }
    EXPECT_EQ(all_gather_number(*world.all(), world.rank()).back(), ranks - 1);
  });
  EXPECT_EQ(thrown, ranks);
  EXPECT_EQ(failures.size(), 1u);
  return failures.empty() ? std::pair(ErrorKind::kIo, std::string()) : *failures.begin();
}

using Thrown = std::pair<ErrorKind, std::string>;

TEST(Agree, ReturnsWhereAllReturn) {
  OperationLog log;
  for (int ranks : {1, 2, 8}) {
    launch(ranks,
           [](World& world) {
             int runs = 0;
             agree(*world.all(), "reading", [&] { ++runs; });
             EXPECT_EQ(runs, 1);
           },
           {.decorate = logging(log)});
  }
  EXPECT_EQ(log.lines(7),
            std::vector<std::string>{"[0, 1, 2, 3, 4, 5, 6, 7] all-gather of 64 bytes (int64)"});
}

TEST(Agree, OneRanksErrorIsThrownOnAllWithItsKind) {
  for (int ranks : {1, 3, 8}) {
    const int64_t culprit = ranks - 1;
    for (ErrorKind kind : {ErrorKind::kInvalidArgument, ErrorKind::kNotFound, ErrorKind::kCorrupt,
                           ErrorKind::kUnsupported, ErrorKind::kMismatch, ErrorKind::kIo, ErrorKind::kTimeout,
                           ErrorKind::kPeerFailed, ErrorKind::kCancelled}) {
      const Thrown expected = {kind, fmt::format("reading: rank {}: a.bin is odd", culprit)};
      EXPECT_EQ(failure(ranks,
                        [&](int64_t rank) {
                          if (rank == culprit) throw Error(kind, "a.bin is odd");
                        }),
                expected);
    }
  }
}

TEST(Agree, IsThrownAsTheTypeThatCallersCatch) {
  launch(2, [](World& world) {
    EXPECT_THROW(agree(*world.all(), "reading",
                       [&] {
                         if (world.rank() == 1) throw CorruptError("odd");
                       }),
                 CorruptError);
    EXPECT_THROW(agree(*world.all(), "reading",
                       [&] {
                         if (world.rank() == 0) throw CancelledError("enough");
                       }),
                 CancelledError);
  });
}

TEST(Agree, TheLowestRankWinsAndTheOthersAreCounted) {
  const Thrown three = failure(5, [](int64_t rank) {
    if (rank == 1) throw IoError("disk full");
    if (rank >= 3) throw CorruptError("odd");
  });
  EXPECT_EQ(three, Thrown(ErrorKind::kIo, "reading: rank 1: disk full (2 other ranks failed too)"));
  const Thrown all = failure(2, [](int64_t rank) { throw NotFoundError("no {}", rank); });
  EXPECT_EQ(all, Thrown(ErrorKind::kNotFound, "reading: rank 0: no 0 (1 other rank failed too)"));
}

TEST(Agree, TheCulpritComesBeforeThoseWhoSuffer) {
  const auto body = [](int64_t culprit) {
    return [culprit](int64_t rank) {
      if (rank == 0) throw PeerFailedError("somebody is gone");
      if (rank == 1) throw TimeoutError("somebody is late");
      if (rank == culprit) throw CorruptError("odd");
    };
  };
  EXPECT_EQ(failure(4, body(3)),
            Thrown(ErrorKind::kCorrupt, "reading: rank 3: odd (2 other ranks failed too)"));
  EXPECT_EQ(failure(4, body(9)),
            Thrown(ErrorKind::kTimeout, "reading: rank 1: somebody is late (1 other rank failed too)"));
}

TEST(Agree, OtherExceptionsTravelToo) {
  EXPECT_EQ(failure(3,
                    [](int64_t rank) {
                      if (rank == 1) throw std::bad_alloc();
                    }),
            Thrown(ErrorKind::kIo, "reading: rank 1: not enough memory"));
  EXPECT_EQ(failure(3,
                    [](int64_t rank) {
                      if (rank == 2) throw std::out_of_range("at");
                    }),
            Thrown(ErrorKind::kPeerFailed, "reading: rank 2: at"));
  EXPECT_EQ(failure(3,
                    [](int64_t rank) {
                      if (rank == 0) throw 7;
                    }),
            Thrown(ErrorKind::kPeerFailed, "reading: rank 0: an unknown exception"));
  // Foreign, but nobody else's doing.
  EXPECT_EQ(failure(3, [](int64_t rank) { rank == 2 ? throw 7 : throw PeerFailedError("gone"); }).second,
            "reading: rank 2: an unknown exception (2 other ranks failed too)");
}

TEST(Agree, MessagesWithoutTextAndOfAnyLength) {
  EXPECT_EQ(failure(2,
                    [](int64_t rank) {
                      if (rank == 1) throw IoError("");
                    })
                .second,
            "reading: rank 1: ");
  const std::string cut = failure(2, [](int64_t) { throw IoError("{}", std::string(1 << 20, 'x')); }).second;
  EXPECT_LT(cut.size(), 20000u);
  EXPECT_EQ(cut.substr(0, 20), "reading: rank 0: xxx");
}

TEST(Agree, RanksAreTheWorlds) {
  launch(4, [](World& world) {
    const auto group = world.create(std::vector<int64_t>{1, 3});
    if (!group) return;
    try {
      agree(*group, "step", [&] {
        if (world.rank() == 3) throw IoError("odd");
      });
      ADD_FAILURE();
    } catch (const IoError& error) {
      EXPECT_STREQ(error.what(), "step: rank 3: odd");
    }
  });
}

TEST(Agree, AnOwnErrorIsNotHiddenByABrokenGroup) {
  launch(2, [](World& world) {
    const auto step = [&] {
      agree(*world.all(), "reading", [&] {
        if (world.rank() == 0) return;
        world.all()->backend().break_group("for the test");
        throw CorruptError("odd");
      });
    };
    if (world.rank() == 0) {
      EXPECT_THROW(step(), PeerFailedError);
    } else {
      EXPECT_THROW(step(), CorruptError);
    }
  });
}

std::string difference(int ranks, const std::function<std::string(int64_t rank)>& value) {
  std::mutex mutex;
  std::set<std::string> messages;
  launch(ranks, [&](World& world) {
    std::string message;
    try {
      require_equal(*world.all(), "batch_bytes", value(world.rank()));
    } catch (const MismatchError& error) {
      message = error.what();
    }
    EXPECT_EQ(all_gather_number(*world.all(), 0).size(), static_cast<size_t>(ranks));
    std::lock_guard lock(mutex);
    messages.insert(message);
  });
  EXPECT_EQ(messages.size(), 1u);
  return *messages.begin();
}

TEST(RequireEqual, EqualValues) {
  for (int ranks : {1, 4}) {
    EXPECT_EQ(difference(ranks, [](int64_t) { return ""; }), "");
    EXPECT_EQ(difference(ranks, [](int64_t) { return std::string(5000, '\xff'); }), "");
  }
  OperationLog log;
  launch(2, [](World& world) { require_equal(*world.all(), "x", "long or not"); },
         {.decorate = logging(log)});
  EXPECT_EQ(log.lines(0).size(), 1u);
}

TEST(RequireEqual, NamesTwoRanksAndWhatTheyHave) {
  EXPECT_EQ(difference(4, [](int64_t rank) { return rank < 2 ? "6 MiB" : "8\n"; }),
            "batch_bytes: rank 0 has \"6 MiB\", rank 2 has \"8\\n\"; they have to be the same");
  EXPECT_EQ(difference(3, [](int64_t rank) { return rank == 0 ? "" : "a"; }),
            "batch_bytes: rank 0 has \"\", rank 1 has \"a\"; they have to be the same");
}

TEST(RequireEqual, ShowsWhereLongValuesDiffer) {
  const std::string message = difference(3, [](int64_t rank) {
    std::string value(100000, 'a');
    if (rank == 1) value.replace(60000, 4, "HERE");
    return value;
  });
  EXPECT_NE(message.find("rank 1 has \"aaa"), std::string::npos) << message;
  EXPECT_NE(message.find("aHEREa"), std::string::npos);
  EXPECT_NE(message.find("(from byte 59920)"), std::string::npos);
  EXPECT_LT(message.size(), 600u);
  // Past what is compared, and one that ends before the other.
  EXPECT_NE(difference(2, [](int64_t rank) { return std::string((3 << 20) + rank, 'a'); }), "");
  EXPECT_NE(difference(2, [](int64_t rank) { return std::string(1000 + rank, 'a'); }).find("(from byte 920)"),
            std::string::npos);
}

}  // namespace
}  // namespace spolia
