// The assembler: whole tensors, one after the other, out of state that ranks hold in parts.
//
//   Assembler whole(*world.all(), state, {.memory = int64_t{1} << 30});
//   while (std::optional<StreamItem> item = whole.next()) use(item->name, item->memory);
//
// Every rank of the groups makes one, and pulls. docs/streaming.md is the guide, stream_plan.h says how.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "spolia/assemble/stream_plan.h"
#include "spolia/comm/group.h"
#include "spolia/device/buffer.h"
#include "spolia/mapping/mapping.h"
#include "spolia/state/state_dict.h"

namespace spolia {

struct AssemblerOptions {
  /// Bytes on this rank, of the host's memory and the device's together, for units that are on their way or
  /// not let go of yet; the state is not counted, nor is what take() has handed out. Hard. The same on all
  /// ranks, as are the next four.
  int64_t memory = int64_t{256} << 20;
  bool pieces = false;  // outputs that are too large for it come in pieces; otherwise they are an error
  int64_t round_bytes = StreamLimits().round_bytes;
  const Mapping* mapping = nullptr;  // what outputs are made of; nullptr: the tensors as they are
  MappingOptions mapping_options;

  /// Whose memory items come in, on this rank; nothing: that which the groups move.
  std::optional<Device> device;

  /// Which outputs this rank wants: these, or part `part` of `parts` of all, in order of their names. Each
  /// rank has its own answer.
  std::optional<std::vector<std::string>> names;
  int64_t part = 0, parts = 1;
  /// Instead, alike on every rank: sets StreamOutput::wanted_by. Pure.
  std::function<void(const StreamGrid& grid, std::span<StreamOutput> outputs)> assign;
};

/// An output, or a piece of one.
struct StreamItem {
  std::string_view name;
  DType dtype = DType::kFloat32;
  Dims shape;  // of the output
  Box box;     // of its addressable shape (catalog.h): which elements these are
  /// Dense, and ready to be read. Of a whole output it has the shape; of a piece the box's sizes, which count
  /// bytes where elements are finer: its dtype is uint8 then.
  ConstView memory;
  bool whole = true;
  bool last = true;  // of the output's pieces
};

struct StreamReport {
  int64_t items = 0;       // handed out on this rank
  int64_t bytes = 0;       // theirs
  int64_t sent = 0;        // by this rank, over all receivers, in the whole stream
  int64_t peak_bytes = 0;  // what this rank held at most, of its memory
  double seconds = 0;      // in next(), which is not the consumer's
};

/// How a stream has come to its end.
enum class StreamEnd : uint8_t {
  kNot,    // it goes on
  kDone,   // everything has been handed out
  kEnded,  // a consumer has stopped early, on this rank or another
};

/// One rank's end of a stream. Used by one thread. The groups, the state and its memory outlive it, and the
/// state does not change meanwhile. Its tensors may be in the host's memory or on devices, wherever the
/// groups reach; what a device still has to do for them is done before.
class Assembler {
 public:
  /// Plans the stream and checks that all is there, on all ranks, before a byte of a tensor is sent.
  /// Collective. Throws on all ranks what one throws: MismatchError naming a part that no rank has;
  /// UnsupportedError stating the least memory; NotFoundError for an output that is not there;
  /// InvalidArgumentError for a part out of range; compile_mapping()'s errors.
  Assembler(Group& group, const StateDict& state, const AssemblerOptions& options = {});
  /// The ranks in rows and columns (stream_groups.h): parts go down the columns, then along the rows.
  Assembler(Group* row, Group* column, const StateDict& state, const AssemblerOptions& options = {});
  /// Where the stream is not over, as stop(); while an exception passes, as fail(). Says nothing of errors.
  ~Assembler();
  Assembler(const Assembler&) = delete;
  Assembler& operator=(const Assembler&) = delete;

  /// The next item; nothing at the end, of which end() says how it came. The item is the caller's until the
  /// next call. Collective at the boundaries of rounds: ranks wait there for slower consumers, at most as
  /// long as the group's time-out; between boundaries where 32 MiB or 64 operations are on their way. Throws
  /// where a consumer has failed, on every rank, naming it; so where a rank has failed by itself, out of
  /// memory say. A rank that can take part no more breaks the groups.
  std::optional<StreamItem> next();
  /// The memory of the item that next() has handed out last, to keep: the item's elements, where they are,
  /// and maybe more bytes behind them. Nothing is copied. Once for each item.
  Buffer take();

  /// Ends the stream on all ranks: they are told at the next boundary. Returns when they are.
  void stop();
  /// Fails it on all ranks; throws the error here too.
  [[noreturn]] void fail(std::exception_ptr why);

  StreamEnd end() const;
  /// The rank that has stopped it, where end() is kEnded.
  int64_t ended_by() const;

  const StreamPlan& plan() const;
  std::string plan_text() const;
  std::span<const StreamOutput> outputs() const;
  const StreamGrid& grid() const;
  StreamReport report() const;

 private:
  class Stream;
  std::unique_ptr<Stream> stream_;
};

/// Pulls to the end. `use` returns whether it wants more; what it throws fails the stream on all ranks.
void for_each_item(Assembler& assembler, const std::function<bool(const StreamItem& item)>& use);

}  // namespace spolia
