#include "spolia/checkpoint/checkpoints.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"

namespace spolia {
namespace {

using std::filesystem::path;

constexpr std::string_view kPrefix = "step-";
constexpr const char* kLatest = "latest";
// How names of what is not for good go on: partial and old ones are a save's (staged_folder.h), the last is a
// file that says who loads.
constexpr std::string_view kPartial = ".partial-", kOld = ".old-", kLoading = ".loading-";

std::string name_of_step(int64_t step) { return fmt::format("{}{:08}", kPrefix, step); }

/// The step of such a name, if it is exactly one.
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kPrefix)) return std::nullopt;
  const std::string_view digits = name.substr(kPrefix.size());
  int64_t step = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), step);
  if (error != std::errc() || step < 0 || name != name_of_step(step)) return std::nullopt;
  return step;
}

std::string host_name() {
  std::array<char, 256> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "unknown";
  return name.data();
}

/// "4711 of node-3": the process that a marker's file names is this host's and gone.
bool is_gone(std::string_view who) {
  const size_t between = who.find('@');
  if (between == std::string_view::npos || who.substr(between + 1) != host_name()) return false;
  int64_t process = 0;
  const auto [end, error] = std::from_chars(who.data(), who.data() + between, process);
  return error == std::errc() && ::kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH;
}

/// While it is there, the checkpoint is not deleted: a file beside it, `step-00000100.loading-0.4711@node-3`.
class LoadingMark {
 public:
  LoadingMark(Store& store, const path& folder) : store_(store) {
    static std::atomic<int64_t> number{0};
    file_ = folder.string() + fmt::format("{}{}.{}@{}", kLoading, number++, ::getpid(), host_name());
    store_.create(file_)->close();
  }
  ~LoadingMark() {
    try {
      store_.remove_all(file_);
    } catch (const Error&) {
      // It stays, and says by its name that it can go.
    }
  }
  LoadingMark(const LoadingMark&) = delete;
  LoadingMark& operator=(const LoadingMark&) = delete;

 private:
  Store& store_;
  path file_;
};

}  // namespace

Checkpoints::Checkpoints(path root, size_t keep, std::shared_ptr<Store> store)
    : root_(std::move(root)), keep_(keep), store_(std::move(store)) {}

path Checkpoints::folder_of(int64_t step) const { return root_ / name_of_step(step); }

Report Checkpoints::save(Group& group, const StateDict& state, int64_t step, const SaveOptions& options) {
  const bool is_first = group.place() == 0;
  require_equal(group, "the step of a save", std::to_string(step));
  agree(group, "preparing the folder of checkpoints", [&] {
    if (step < 0) throw InvalidArgumentError("a step is 0 or more, not {}", step);
    if (!is_first) return;
    if (!store_->exists(root_)) {
      store_->create_folder(root_);
      store_->sync_folder(root_.has_parent_path() ? root_.parent_path() : ".");
    }
    clear_leftovers();
  });
  Report report = spolia::save(group, state, *store_, folder_of(step), options);
  agree(group, "naming the latest checkpoint", [&] {
    if (!is_first) return;
    set_latest(step);
    delete_old(report.notes);
  });
  return report;
}

Report Checkpoints::load(World& world, StateDict& state, std::optional<int64_t> step,
                         const LoadOptions& options) {
  Group& group = *world.all();
  std::optional<LoadingMark> mark;
  int64_t chosen = -1;
  agree(group, "finding the checkpoint", [&] {
    if (group.place() != 0) return;
    if (!step) step = latest();
    const std::vector<int64_t> there = steps();
    if (!step) throw NotFoundError("{} holds no checkpoint", quote(root_.string()));
    if (!std::ranges::binary_search(there, *step)) {
      throw NotFoundError("{} holds no checkpoint of step {}; there are: {}", quote(root_.string()), *step,
                          fmt::join(there, ", "));
    }
    mark.emplace(*store_, folder_of(*step));
    chosen = *step;
  });
  chosen = all_gather_number(group, chosen)[0];
  const auto source = open_together(group, store_, folder_of(chosen));
  Report report = spolia::load(world, *source, state, options);
  group.barrier().wait();  // the mark stays until all have read
  return report;
}

std::vector<int64_t> Checkpoints::steps() const {
  std::vector<int64_t> steps;
  if (!store_->exists(root_)) return steps;
  for (const FolderEntry& entry : store_->list(root_)) {
    const auto step = step_of(entry.name);
    if (step && entry.is_folder) steps.push_back(*step);
  }
  std::ranges::sort(steps);
  return steps;
}

std::optional<int64_t> Checkpoints::latest() const {
  if (!store_->exists(root_ / kLatest)) {
    const std::vector<int64_t> all = steps();
    return all.empty() ? std::nullopt : std::optional(all.back());
  }
  const auto file = store_->open(root_ / kLatest);
  std::string text(static_cast<size_t>(std::min<int64_t>(file->size(), 64)), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  text.erase(text.find_last_not_of(" \r\n") + 1);
  if (const auto step = step_of(text)) return step;
  throw CorruptError("{} should name a checkpoint, such as {}, not {}", quote((root_ / kLatest).string()),
                     name_of_step(100), quote(text));
}

/// Removes what crashed saves and dead processes left.
void Checkpoints::clear_leftovers() {
  for (const FolderEntry& entry : store_->list(root_)) {
    const size_t dot = entry.name.find('.');
    if (dot == std::string::npos) continue;
    const std::string_view name = std::string_view(entry.name).substr(0, dot);
    const std::string_view rest = std::string_view(entry.name).substr(dot);
    if (!step_of(name) && name != kLatest) continue;
    if (rest.starts_with(kOld) && !store_->exists(root_ / name)) {
      // A replacement in two steps crashed between them: nothing has the name, and what had it is whole.
      store_->rename(root_ / entry.name, root_ / name);
      store_->sync_folder(root_);
      continue;
    }
    const bool is_saves = rest.starts_with(kPartial) || rest.starts_with(kOld);
    const bool is_dead_mark = rest.starts_with(kLoading) && is_gone(rest.substr(rest.rfind('.') + 1));
    if (is_saves || is_dead_mark) store_->remove_all(root_ / entry.name);
  }
}

void Checkpoints::set_latest(int64_t step) {
  const path partial = root_ / fmt::format("{}{}{}", kLatest, kPartial, ::getpid());
  {
    const auto file = store_->create(partial);
    file->write(0, bytes_of(name_of_step(step) + "\n"));
    file->sync();
    file->close();
  }
  store_->replace(partial, root_ / kLatest);
  store_->sync_folder(root_);
}

bool Checkpoints::is_being_loaded(const std::string& name) const {
  const std::vector<FolderEntry> entries = store_->list(root_);
  return std::ranges::any_of(entries, [&](const FolderEntry& entry) {
    const std::string_view mark = entry.name;
    return mark.starts_with(name + std::string(kLoading)) && !is_gone(mark.substr(mark.rfind('.') + 1));
  });
}

/// A checkpoint first loses its name, then whoever came to load it before that is looked for.
void Checkpoints::delete_old(std::vector<std::string>& notes) {
  std::vector<int64_t> all = steps();
  if (keep_ == 0 || all.size() <= keep_) return;
  all.resize(all.size() - keep_);
  for (int64_t step : all) {
    if (step == latest()) continue;
    const std::string name = name_of_step(step);
    const path old = root_ / fmt::format("{}{}{}", name, kPartial, ::getpid());  // cleared after a crash
    store_->rename(root_ / name, old);
    if (is_being_loaded(name)) {
      store_->rename(old, root_ / name);
      notes.push_back(fmt::format("{} is kept: it is being loaded", name));
      continue;
    }
    store_->remove_all(old);
  }
}

}  // namespace spolia
