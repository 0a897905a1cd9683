#include "spolia/checkpoint/background_save.h"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/threads.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/device/strided_copy.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kCopiedAtOnce = int64_t{8} << 20;  // bytes that one thread takes

/// A copy to be made: rows [begin, end) of dim 0, or everything of what has no dims.
struct CopyPart {
  View from, to;
};

View rows_of(const View& view, int64_t begin, int64_t end) {
  View rows = view;
  rows.data += begin * view.strides[0];
  rows.shape[0] = end - begin;
  return rows;
}

void add_parts(std::vector<CopyPart>& parts, const View& from, const View& to) {
  const int64_t bytes = to.bytes();
  if (bytes == 0) return;
  if (is_sub_byte(from.dtype)) {  // dense, and a string of bytes
    parts.push_back({byte_view(std::span(from.data, static_cast<size_t>(bytes))),
                     byte_view(std::span(to.data, static_cast<size_t>(bytes)))});
    parts.back().from.device = from.device;
    return;
  }
  const int64_t rows = to.shape.empty() ? 1 : to.shape[0];
  const int64_t at_once = std::max<int64_t>(1, kCopiedAtOnce / std::max<int64_t>(1, bytes / rows));
  if (to.shape.empty() || at_once >= rows) {
    parts.push_back({from, to});
    return;
  }
  for (int64_t begin = 0; begin < rows; begin += at_once) {
    const int64_t end = std::min(rows, begin + at_once);
    parts.push_back({rows_of(from, begin, end), rows_of(to, begin, end)});
  }
}

void run(const CopyPart& part) {
  const int64_t width = element_bytes(part.from.dtype);
  const DeviceBackend& device = backend_of(part.from.device);
  if (device.host_accessible()) {
    copy_strided(part.to.shape, width, part.to.data, part.to.strides, part.from.data, part.from.strides);
    return;
  }
  if (part.from.is_dense()) {
    device.copy_to_host(part.to.data, part.from.data, part.to.bytes());
    return;
  }
  Buffer dense(part.to.bytes(), part.from.device);
  copy_strided_on(device, part.to.shape, width, dense.data(), part.to.strides, part.from.data,
                  part.from.strides);
  device.copy_to_host(part.to.data, dense.data(), dense.size());
}

}  // namespace

StateDict SnapshotPool::copy(const StateDict& state, size_t threads) {
  int64_t total = 0;
  for (const StateDict::Entry& entry : state.entries()) {
    if (const LocalTensor* tensor = entry.tensor()) {
      total = checked_add(total, align_up(tensor->memory.bytes(), kAlignment));
    }
  }
  if (total > memory_.size()) {
    memory_ = Buffer();  // never both at once
    memory_ = Buffer(total);
    memory_.prefault();
  }

  StateDict copied;
  std::vector<CopyPart> parts;
  std::byte* next = memory_.data();
  for (StateDict::Entry entry : state.entries()) {
    if (LocalTensor* tensor = entry.tensor()) {
      const View from = tensor->memory;
      tensor->memory = dense_view(next, from.dtype, from.shape);
      next += align_up(from.bytes(), kAlignment);
      add_parts(parts, from, tensor->memory);
    }
    copied.add(std::move(entry));
  }
  parallel_for(std::max<size_t>(threads, 1), parts.size(), [&](size_t, size_t i) { run(parts[i]); });
  return copied;
}

BackgroundSaver::BackgroundSaver(World& world, Options options) : options_(options) {
  std::vector<int64_t> ranks(static_cast<size_t>(world.size()));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  caller_group_ = world.create(ranks);
  saver_group_ = world.create(ranks);
  thread_ = std::thread([this] { run(); });
}

BackgroundSaver::~BackgroundSaver() {
  {
    const std::lock_guard lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void BackgroundSaver::start(const StateDict& state, Save save, Callback callback) {
  if (options_.when_busy == WhenBusy::kRefuse) {
    const std::vector<int64_t> busy = all_gather_number(*caller_group_, done() ? 0 : 1);
    const auto first = std::ranges::find(busy, 1);
    if (first != busy.end()) {
      throw InvalidArgumentError("a save is still under way on rank {}; wait for it", first - busy.begin());
    }
  }
  agree(*caller_group_, "the save before, in the background", [&] {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !busy_; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  });
  agree(*caller_group_, "copying the state", [&] { copy_ = pool_.copy(state, options_.copy_threads); });
  save_ = std::move(save);
  callback_ = std::move(callback);
  {
    const std::lock_guard lock(mutex_);
    report_.reset();
    busy_ = true;
  }
  changed_.notify_all();
}

bool BackgroundSaver::done() const {
  const std::lock_guard lock(mutex_);
  return !busy_;
}

std::optional<Report> BackgroundSaver::wait(std::optional<std::chrono::milliseconds> timeout) {
  std::unique_lock lock(mutex_);
  const auto ended = [&] { return !busy_; };
  if (!timeout) {
    changed_.wait(lock, ended);
  } else if (!changed_.wait_for(lock, *timeout, ended)) {
    throw TimeoutError("the save in the background has not ended after {} ms; it goes on", timeout->count());
  }
  if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  return std::exchange(report_, std::nullopt);
}

void BackgroundSaver::run() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return busy_ || ends_; });
      if (!busy_) return;
    }
    Report report;
    std::exception_ptr failure;
    try {
      report = save_(*saver_group_, copy_);
    } catch (...) {
      failure = std::current_exception();
    }
    try {
      if (callback_) callback_(report, failure);
    } catch (...) {
      if (!failure) failure = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      failure_ = failure;
      if (!failure) report_ = std::move(report);
      busy_ = false;
    }
    changed_.notify_all();
  }
}

}  // namespace spolia
