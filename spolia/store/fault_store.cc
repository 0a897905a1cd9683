#include "spolia/store/fault_store.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/store/checks.h"

namespace spolia {

namespace fs = std::filesystem;

std::string_view name_of(Operation operation) {
  switch (operation) {
    case Operation::kOpen:
      return "open";
    case Operation::kRead:
      return "read";
    case Operation::kCreate:
      return "create";
    case Operation::kWrite:
      return "write";
    case Operation::kCopy:
      return "copy";
    case Operation::kStartWriteback:
      return "start writeback";
    case Operation::kSync:
      return "sync";
    case Operation::kDropCached:
      return "drop cached";
    case Operation::kClose:
      return "close";
    case Operation::kExists:
      return "exists";
    case Operation::kIsFolder:
      return "is folder";
    case Operation::kIsLink:
      return "is link";
    case Operation::kList:
      return "list";
    case Operation::kCreateFolder:
      return "create folder";
    case Operation::kRename:
      return "rename";
    case Operation::kReplace:
      return "replace";
    case Operation::kExchange:
      return "exchange";
    case Operation::kSyncFolder:
      return "sync folder";
    case Operation::kRemoveAll:
      return "remove all";
  }
  return "unknown";
}

/// The log, and what is to go wrong.
class FaultStore::Faults {
 public:
  /// Every operation starts here: it is logged, and then what was planned for it happens.
  void begin(Event event) {
    std::vector<Action> due;
    {
      const std::lock_guard lock(mutex_);
      for (Rule& rule : rules_) {
        if (rule.operation && *rule.operation != event.operation) continue;
        if (rule.wait == 0 || (rule.wait < 0 && rule.times == Times::kFromThenOn)) due.push_back(rule.action);
        if (rule.wait >= 0) --rule.wait;
      }
      log_.push_back(std::move(event));
    }
    for (const Action& action : due) action();
  }

  void add_rule(std::optional<Operation> operation, int64_t nth, Action action, Times times) {
    const std::lock_guard lock(mutex_);
    rules_.push_back({operation, nth, times, std::move(action)});
  }

  std::vector<Event> log() const {
    const std::lock_guard lock(mutex_);
    return log_;
  }

  void flip(const fs::path& path, int64_t offset) {
    const std::lock_guard lock(mutex_);
    damages_[path].flipped.push_back(offset);
  }

  void shrink(const fs::path& path, int64_t size) {
    const std::lock_guard lock(mutex_);
    damages_[path].size = size;
  }

  bool is_damaged(const fs::path& path) const {
    const std::lock_guard lock(mutex_);
    return damages_.contains(path);
  }

  /// Does to bytes that were read at `offset` what was done to their file.
  void damage(const fs::path& path, int64_t offset, std::span<std::byte> bytes) const {
    const std::lock_guard lock(mutex_);
    const auto found = damages_.find(path);
    if (found == damages_.end()) return;
    const auto& [flipped, size] = found->second;
    if (size) check_read_range(path, offset, std::ssize(bytes), *size);
    for (const int64_t at : flipped) {
      if (at < offset || at - offset >= std::ssize(bytes)) continue;
      std::byte& byte = bytes[static_cast<size_t>(at - offset)];
      byte = ~byte;
    }
  }

 private:
  struct Rule {
    std::optional<Operation> operation;
    int64_t wait;  // operations that are still to pass before it; -1 once its turn is over
    Times times;
    Action action;
  };
  struct Damage {
    std::vector<int64_t> flipped;
    std::optional<int64_t> size;
  };

  mutable std::mutex mutex_;
  std::vector<Rule> rules_;
  std::vector<Event> log_;
  std::map<fs::path, Damage> damages_;
};

class FaultStore::Input : public InputFile {
 public:
  Input(std::shared_ptr<Faults> faults, std::unique_ptr<InputFile> file)
      : faults_(std::move(faults)), file_(std::move(file)) {}

  const fs::path& path() const override { return file_->path(); }
  int64_t size() const override { return file_->size(); }

  void read(int64_t offset, std::span<std::byte> out) const override {
    faults_->begin({Operation::kRead, path()});
    file_->read(offset, out);
    faults_->damage(path(), offset, out);
  }

  /// What a copy reads: the file below, which the kernel can copy, unless it was damaged.
  const InputFile& to_copy() const {
    if (faults_->is_damaged(path())) return *this;
    return *file_;
  }

 private:
  std::shared_ptr<Faults> faults_;
  std::unique_ptr<InputFile> file_;
};

class FaultStore::Output : public OutputFile {
 public:
  Output(std::shared_ptr<Faults> faults, std::unique_ptr<OutputFile> file)
      : faults_(std::move(faults)), file_(std::move(file)) {}

  const fs::path& path() const override { return file_->path(); }

  void write(int64_t offset, std::span<const std::byte> bytes) override {
    faults_->begin({Operation::kWrite, path()});
    file_->write(offset, bytes);
  }

  void copy_from(const InputFile& from, int64_t from_offset, int64_t to_offset, int64_t length) override {
    faults_->begin({Operation::kCopy, from.path(), path()});
    const auto* input = dynamic_cast<const Input*>(&from);
    file_->copy_from(input ? input->to_copy() : from, from_offset, to_offset, length);
  }

  void start_writeback(int64_t offset, int64_t length) override {
    faults_->begin({Operation::kStartWriteback, path()});
    file_->start_writeback(offset, length);
  }

  void sync() override {
    faults_->begin({Operation::kSync, path()});
    file_->sync();
  }

  void drop_cached() override {
    faults_->begin({Operation::kDropCached, path()});
    file_->drop_cached();
  }

  void close() override {
    faults_->begin({Operation::kClose, path()});
    file_->close();
  }

 private:
  std::shared_ptr<Faults> faults_;
  std::unique_ptr<OutputFile> file_;
};

FaultStore::FaultStore(std::shared_ptr<Store> store)
    : store_(std::move(store)), faults_(std::make_shared<Faults>()) {}

std::vector<FaultStore::Event> FaultStore::log() const { return faults_->log(); }

int64_t FaultStore::count(std::optional<Operation> operation) const {
  const std::vector<Event> events = log();
  return std::count_if(events.begin(), events.end(),
                       [&](const Event& event) { return !operation || event.operation == *operation; });
}

void FaultStore::before(std::optional<Operation> operation, int64_t nth, Action action, Times times) {
  faults_->add_rule(operation, nth, std::move(action), times);
}

void FaultStore::fail(std::optional<Operation> operation, int64_t nth, int error_number, Times times) {
  before(
      operation, nth, [=] { throw_system_error(error_number, "injected fault"); }, times);
}

void FaultStore::flip(const fs::path& path, int64_t offset) { faults_->flip(path, offset); }

void FaultStore::shrink(const fs::path& path, int64_t size) { faults_->shrink(path, size); }

std::unique_ptr<InputFile> FaultStore::open(const fs::path& path) const {
  faults_->begin({Operation::kOpen, path});
  return std::make_unique<Input>(faults_, store_->open(path));
}

std::unique_ptr<InputFile> FaultStore::open_inside(const fs::path& folder,
                                                   const std::string& relative) const {
  faults_->begin({Operation::kOpen, folder / relative});
  return std::make_unique<Input>(faults_, store_->open_inside(folder, relative));
}

std::unique_ptr<OutputFile> FaultStore::create(const fs::path& path) {
  faults_->begin({Operation::kCreate, path});
  return std::make_unique<Output>(faults_, store_->create(path));
}

bool FaultStore::exists(const fs::path& path) const {
  faults_->begin({Operation::kExists, path});
  return store_->exists(path);
}

bool FaultStore::is_folder(const fs::path& path) const {
  faults_->begin({Operation::kIsFolder, path});
  return store_->is_folder(path);
}

bool FaultStore::is_link(const fs::path& path) const {
  faults_->begin({Operation::kIsLink, path});
  return store_->is_link(path);
}

std::vector<FolderEntry> FaultStore::list(const fs::path& folder) const {
  faults_->begin({Operation::kList, folder});
  return store_->list(folder);
}

void FaultStore::create_folder(const fs::path& folder) {
  faults_->begin({Operation::kCreateFolder, folder});
  store_->create_folder(folder);
}

void FaultStore::rename(const fs::path& from, const fs::path& to) {
  faults_->begin({Operation::kRename, from, to});
  store_->rename(from, to);
}

void FaultStore::replace(const fs::path& from, const fs::path& to) {
  faults_->begin({Operation::kReplace, from, to});
  store_->replace(from, to);
}

void FaultStore::exchange(const fs::path& a, const fs::path& b) {
  faults_->begin({Operation::kExchange, a, b});
  store_->exchange(a, b);
}

void FaultStore::sync_folder(const fs::path& folder) {
  faults_->begin({Operation::kSyncFolder, folder});
  store_->sync_folder(folder);
}

void FaultStore::remove_all(const fs::path& path) {
  faults_->begin({Operation::kRemoveAll, path});
  store_->remove_all(path);
}

}  // namespace spolia
