#include "spolia/store/memory_store.h"

#include <algorithm>
#include <cerrno>
#include <map>
#include <string_view>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/store/checks.h"

namespace spolia {

namespace fs = std::filesystem;

namespace {

std::string cannot(std::string_view action, const fs::path& path) {
  return fmt::format("cannot {} {}", action, quote(path.native()));
}

/// The one way to write a path: absolute, without `.`, `..` or a slash at its end.
fs::path normal(const fs::path& path) {
  fs::path result = (fs::path("/") / path).lexically_normal();
  return result.has_filename() ? result : result.parent_path();
}

/// Whether `path` is `folder` or lies in it; both are normal.
bool is_inside(const fs::path& path, const fs::path& folder) {
  return std::mismatch(folder.begin(), folder.end(), path.begin(), path.end()).first == folder.end();
}

}  // namespace

/// A file or a folder.
struct MemoryStore::Node {
  using Names = std::map<std::string, std::shared_ptr<Node>>;

  explicit Node(bool folder) : is_folder(folder) {}

  bool is_folder;
  std::vector<std::byte> bytes, durable_bytes;  // of a file
  Names names, durable_names;                   // in a folder

  /// The node as it is after a crash.
  std::shared_ptr<Node> recovered(UnsyncedNames which) const {
    auto node = std::make_shared<Node>(is_folder);
    node->bytes = node->durable_bytes = durable_bytes;
    for (const auto& [name, child] : which == UnsyncedNames::kKept ? names : durable_names) {
      node->names.emplace(name, child->recovered(which));
    }
    node->durable_names = node->names;
    return node;
  }
};

class MemoryStore::Input : public InputFile {
 public:
  Input(std::shared_ptr<std::mutex> mutex, std::shared_ptr<const Node> file, fs::path path)
      : mutex_(std::move(mutex)),
        file_(std::move(file)),
        path_(std::move(path)),
        size_(std::ssize(file_->bytes)) {}

  const fs::path& path() const override { return path_; }
  int64_t size() const override { return size_; }

  void read(int64_t offset, std::span<std::byte> out) const override {
    check_read_range(path_, offset, std::ssize(out), size_);
    const std::lock_guard lock(*mutex_);
    std::copy_n(file_->bytes.begin() + offset, out.size(), out.begin());
  }

 private:
  std::shared_ptr<std::mutex> mutex_;
  std::shared_ptr<const Node> file_;
  fs::path path_;
  int64_t size_;
};

class MemoryStore::Output : public OutputFile {
 public:
  Output(std::shared_ptr<std::mutex> mutex, std::shared_ptr<Node> file, fs::path path)
      : mutex_(std::move(mutex)), file_(std::move(file)), path_(std::move(path)) {}

  const fs::path& path() const override { return path_; }

  void write(int64_t offset, std::span<const std::byte> bytes) override {
    check_write_range(path_, offset, std::ssize(bytes));
    if (bytes.empty()) return;
    const std::lock_guard lock(*mutex_);
    check_open("write");
    const size_t end = static_cast<size_t>(offset) + bytes.size();
    if (end > file_->bytes.size()) file_->bytes.resize(end);
    std::copy(bytes.begin(), bytes.end(), file_->bytes.begin() + offset);
  }

  void start_writeback(int64_t, int64_t) override {}

  void sync() override {
    const std::lock_guard lock(*mutex_);
    check_open("sync");
    file_->durable_bytes = file_->bytes;
  }

  void drop_cached() override {}

  void close() override {
    const std::lock_guard lock(*mutex_);
    check_open("close");
    file_ = nullptr;
  }

 private:
  void check_open(std::string_view action) const {
    if (!file_) throw_system_error(EBADF, cannot(action, path_));
  }

  std::shared_ptr<std::mutex> mutex_;
  std::shared_ptr<Node> file_;  // until it is closed
  fs::path path_;
};

MemoryStore::MemoryStore() : mutex_(std::make_shared<std::mutex>()), root_(std::make_shared<Node>(true)) {}

void MemoryStore::crash(UnsyncedNames names) {
  const std::lock_guard lock(*mutex_);
  root_ = root_->recovered(names);
}

/// What is at `path`; nothing, and ENOENT or ENOTDIR, where that is nothing.
std::shared_ptr<MemoryStore::Node> MemoryStore::find(const fs::path& path, int& error_number) const {
  std::shared_ptr<Node> node = root_;
  for (const fs::path& name : normal(path).relative_path()) {
    if (!node->is_folder) {
      error_number = ENOTDIR;
      return nullptr;
    }
    const auto found = node->names.find(name);
    if (found == node->names.end()) {
      error_number = ENOENT;
      return nullptr;
    }
    node = found->second;
  }
  return node;
}

std::shared_ptr<MemoryStore::Node> MemoryStore::get(const fs::path& path, std::string_view what) const {
  int error_number = 0;
  std::shared_ptr<Node> node = find(path, error_number);
  if (!node) throw_system_error(error_number, what);
  return node;
}

MemoryStore::Node& MemoryStore::get_folder(const fs::path& path, std::string_view what) const {
  const std::shared_ptr<Node> node = get(path, what);
  if (!node->is_folder) throw_system_error(ENOTDIR, what);
  return *node;  // the tree holds it
}

/// Puts `node` at `path`, whose parent must be there and whose name must be free.
void MemoryStore::add(const fs::path& path, std::shared_ptr<Node> node, std::string_view what) {
  const fs::path place = normal(path);
  Node& parent = get_folder(place.parent_path(), what);
  const bool is_free = place != "/" && parent.names.emplace(place.filename(), std::move(node)).second;
  if (!is_free) throw_system_error(EEXIST, what);
}

std::unique_ptr<InputFile> MemoryStore::open(const fs::path& path) const {
  const std::lock_guard lock(*mutex_);
  const std::string what = cannot("open", path);
  const std::shared_ptr<Node> node = get(path, what);
  if (node->is_folder) throw_system_error(EISDIR, what);
  return std::make_unique<Input>(mutex_, node, path);
}

std::unique_ptr<InputFile> MemoryStore::open_inside(const fs::path& folder,
                                                    const std::string& relative) const {
  check_relative_name(folder, relative);
  {
    const std::lock_guard lock(*mutex_);
    get_folder(folder, cannot("open", folder / relative));
  }
  return open(folder / relative);
}

std::unique_ptr<OutputFile> MemoryStore::create(const fs::path& path) {
  const std::lock_guard lock(*mutex_);
  const auto node = std::make_shared<Node>(false);
  add(path, node, cannot("create", path));
  return std::make_unique<Output>(mutex_, node, path);
}

bool MemoryStore::exists(const fs::path& path) const {
  const std::lock_guard lock(*mutex_);
  int ignored;
  return find(path, ignored) != nullptr;
}

bool MemoryStore::is_folder(const fs::path& path) const {
  const std::lock_guard lock(*mutex_);
  int ignored;
  const std::shared_ptr<Node> node = find(path, ignored);
  return node && node->is_folder;
}

std::vector<FolderEntry> MemoryStore::list(const fs::path& folder) const {
  const std::lock_guard lock(*mutex_);
  std::vector<FolderEntry> entries;
  for (const auto& [name, node] : get_folder(folder, cannot("list", folder)).names) {
    entries.push_back({name, node->is_folder, std::ssize(node->bytes)});
  }
  return entries;
}

void MemoryStore::create_folder(const fs::path& folder) {
  const std::lock_guard lock(*mutex_);
  add(folder, std::make_shared<Node>(true), cannot("create the folder", folder));
}

void MemoryStore::rename(const fs::path& from, const fs::path& to) {
  const std::lock_guard lock(*mutex_);
  const fs::path source = normal(from), target = normal(to);
  const std::string what = fmt::format("{} to {}", cannot("rename", from), quote(to.native()));
  Node& parent = get_folder(source.parent_path(), what);
  get_folder(target.parent_path(), what);
  // A folder cannot move into itself, and so the root nowhere.
  if (is_inside(target, source) && source != target) throw_system_error(EINVAL, what);
  add(target, get(source, what), what);
  parent.names.erase(source.filename());
}

void MemoryStore::replace(const fs::path& from, const fs::path& to) {
  const std::lock_guard lock(*mutex_);
  const fs::path source = normal(from), target = normal(to);
  const std::string what = fmt::format("{} to {}", cannot("rename", from), quote(to.native()));
  Node& source_parent = get_folder(source.parent_path(), what);
  const std::shared_ptr<Node> node = get(source, what);
  if (node->is_folder) throw_system_error(EISDIR, what);
  Node& target_parent = get_folder(target.parent_path(), what);
  const auto there = target_parent.names.find(target.filename());
  if (there != target_parent.names.end() && there->second->is_folder) throw_system_error(EISDIR, what);
  if (source == target) return;
  target_parent.names[target.filename()] = node;
  source_parent.names.erase(source.filename());
}

void MemoryStore::forbid_exchange() {
  const std::lock_guard lock(*mutex_);
  can_exchange_ = false;
}

void MemoryStore::exchange(const fs::path& a, const fs::path& b) {
  const std::lock_guard lock(*mutex_);
  if (!can_exchange_) throw_cannot_exchange(a, b);
  const fs::path place_a = normal(a), place_b = normal(b);
  const std::string what = fmt::format("{} with {}", cannot("exchange", a), quote(b.native()));
  Node& parent_a = get_folder(place_a.parent_path(), what);
  Node& parent_b = get_folder(place_b.parent_path(), what);
  get(place_a, what);
  get(place_b, what);
  if (place_a == place_b) return;
  if (is_inside(place_a, place_b) || is_inside(place_b, place_a)) throw_system_error(EINVAL, what);
  std::swap(parent_a.names[place_a.filename()], parent_b.names[place_b.filename()]);
}

void MemoryStore::sync_folder(const fs::path& folder) {
  const std::lock_guard lock(*mutex_);
  Node& node = get_folder(folder, cannot("sync", folder));
  node.durable_names = node.names;
}

void MemoryStore::remove_all(const fs::path& path) {
  const std::lock_guard lock(*mutex_);
  const fs::path place = normal(path);
  if (place == "/") throw_system_error(EBUSY, cannot("remove", path));
  int ignored;
  const std::shared_ptr<Node> parent = find(place.parent_path(), ignored);
  if (parent) parent->names.erase(place.filename());
}

}  // namespace spolia
