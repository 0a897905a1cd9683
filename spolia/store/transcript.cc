#include "spolia/store/transcript.h"

#include <cstring>
#include <functional>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

using std::filesystem::path;

// How an answer begins: with what was said, or with an error's kind and message.
constexpr char kSaid = 's';
constexpr char kFailed = 'f';

/// What was said; throws where that was an error.
std::string_view said(std::string_view answer) {
  if (answer.front() == kSaid) return answer.substr(1);
  const auto kind = static_cast<ErrorKind>(answer[1]);
  const std::string message(answer.substr(2));
  if (kind == ErrorKind::kNotFound) throw NotFoundError("{}", message);  // what readers may catch
  throw Error(kind, message);
}

[[noreturn]] void refuse() { throw CorruptError("what a rank sent is no transcript of a store"); }

/// Asks, writes the answer down, and gives it; an error as well.
std::string record(Transcript& transcript, std::string question, const std::function<std::string()>& ask) {
  try {
    std::string answer = ask();
    transcript.add(std::move(question), kSaid + answer);
    return answer;
  } catch (const Error& error) {
    transcript.add(std::move(question), std::string{kFailed, static_cast<char>(error.kind())} + error.what());
    throw;
  }
}

std::string question(std::string_view verb, const path& about) {
  return fmt::format("{} {}", verb, about.string());
}
std::string read_question(const path& file, int64_t offset, size_t length) {
  return fmt::format("read {} {} {}", offset, length, file.string());
}

std::string encode_entries(const std::vector<FolderEntry>& entries) {
  Packer out;
  for (const FolderEntry& entry : entries) {
    out.text(entry.name);
    out.number(entry.is_folder ? 1 : 0);
    out.number(entry.size);
  }
  return out.take();
}

std::vector<FolderEntry> decode_entries(std::string_view text) {
  std::vector<FolderEntry> entries;
  for (Unpacker in(text); !in.at_end();) {
    FolderEntry& entry = entries.emplace_back();
    entry.name = in.text();
    entry.is_folder = in.number() != 0;
    entry.size = in.number();
  }
  return entries;
}

/// A store that is only read.
class ReadOnlyStore : public Store {
 public:
  std::unique_ptr<OutputFile> create(const path& file) override { refuse(file); }
  void create_folder(const path& folder) override { refuse(folder); }
  void rename(const path& from, const path&) override { refuse(from); }
  void replace(const path& from, const path&) override { refuse(from); }
  void exchange(const path& a, const path&) override { refuse(a); }
  void sync_folder(const path& folder) override { refuse(folder); }
  void remove_all(const path& about) override { refuse(about); }

 private:
  [[noreturn]] static void refuse(const path& about) {
    throw UnsupportedError("{}: this store is only read", quote(about.string()));
  }
};

class RecordingFile final : public InputFile {
 public:
  RecordingFile(std::unique_ptr<InputFile> file, std::shared_ptr<Transcript> transcript)
      : file_(std::move(file)), transcript_(std::move(transcript)) {}

  const std::filesystem::path& path() const override { return file_->path(); }
  int64_t size() const override { return file_->size(); }
  void read(int64_t offset, std::span<std::byte> out) const override {
    if (transcript_->is_closed()) return file_->read(offset, out);  // tensors, which need not be copied
    record(*transcript_, read_question(path(), offset, out.size()), [&] {
      file_->read(offset, out);
      return std::string(reinterpret_cast<const char*>(out.data()), out.size());
    });
  }

 private:
  std::unique_ptr<InputFile> file_;
  std::shared_ptr<Transcript> transcript_;
};

class RecordingStore final : public ReadOnlyStore {
 public:
  RecordingStore(std::shared_ptr<const Store> store, std::shared_ptr<Transcript> transcript)
      : store_(std::move(store)), transcript_(std::move(transcript)) {}

  std::unique_ptr<InputFile> open(const path& file) const override {
    return record_open(question("open", file), [&] { return store_->open(file); });
  }
  std::unique_ptr<InputFile> open_inside(const path& folder, const std::string& relative) const override {
    return record_open(question("open inside " + relative + " of", folder),
                       [&] { return store_->open_inside(folder, relative); });
  }
  bool exists(const path& about) const override {
    return record_flag(question("exists", about), [&] { return store_->exists(about); });
  }
  bool is_folder(const path& about) const override {
    return record_flag(question("is folder", about), [&] { return store_->is_folder(about); });
  }
  bool is_link(const path& about) const override {
    return record_flag(question("is link", about), [&] { return store_->is_link(about); });
  }
  std::vector<FolderEntry> list(const path& folder) const override {
    return decode_entries(
        record(*transcript_, question("list", folder), [&] { return encode_entries(store_->list(folder)); }));
  }

 private:
  std::unique_ptr<InputFile> record_open(std::string asked,
                                         const std::function<std::unique_ptr<InputFile>()>& open) const {
    std::unique_ptr<InputFile> file;
    record(*transcript_, std::move(asked), [&] {
      file = open();
      Packer answer;
      answer.number(file->size());
      answer.text(file->path().string());
      return answer.take();
    });
    return std::make_unique<RecordingFile>(std::move(file), transcript_);
  }
  bool record_flag(std::string asked, const std::function<bool()>& ask) const {
    return record(*transcript_, std::move(asked), [&] { return std::string(1, ask() ? '1' : '0'); }) == "1";
  }

  std::shared_ptr<const Store> store_;
  std::shared_ptr<Transcript> transcript_;
};

/// Opened for real at the first read that the transcript has not.
class ReplayingFile final : public InputFile {
 public:
  ReplayingFile(std::string_view opened, std::shared_ptr<const Transcript> transcript,
                std::function<std::unique_ptr<InputFile>()> open)
      : transcript_(std::move(transcript)), open_(std::move(open)) {
    Unpacker in(opened);
    size_ = in.number();
    path_ = in.text();
  }

  const std::filesystem::path& path() const override { return path_; }
  int64_t size() const override { return size_; }
  void read(int64_t offset, std::span<std::byte> out) const override {
    if (const std::string* answer = transcript_->find(read_question(path_, offset, out.size()))) {
      const std::string_view bytes = said(*answer);
      if (bytes.size() != out.size()) refuse();
      if (!out.empty()) std::memcpy(out.data(), bytes.data(), out.size());
      return;
    }
    std::call_once(once_, [&] { file_ = open_(); });
    if (file_->size() != size_) {
      throw MismatchError("{}: the file has {} bytes here, and {} on the rank that opened it first",
                          quote(path_.string()), file_->size(), size_);
    }
    file_->read(offset, out);
  }

 private:
  std::shared_ptr<const Transcript> transcript_;
  std::function<std::unique_ptr<InputFile>()> open_;
  std::filesystem::path path_;
  int64_t size_ = 0;
  mutable std::once_flag once_;
  mutable std::unique_ptr<InputFile> file_;
};

class ReplayingStore final : public ReadOnlyStore {
 public:
  ReplayingStore(std::shared_ptr<const Store> store, std::shared_ptr<const Transcript> transcript)
      : store_(std::move(store)), transcript_(std::move(transcript)) {}

  std::unique_ptr<InputFile> open(const path& file) const override {
    return replay_open(question("open", file), [store = store_, file] { return store->open(file); });
  }
  std::unique_ptr<InputFile> open_inside(const path& folder, const std::string& relative) const override {
    return replay_open(question("open inside " + relative + " of", folder),
                       [store = store_, folder, relative] { return store->open_inside(folder, relative); });
  }
  bool exists(const path& about) const override {
    const std::string* answer = transcript_->find(question("exists", about));
    return answer != nullptr ? said(*answer) == "1" : store_->exists(about);
  }
  bool is_folder(const path& about) const override {
    const std::string* answer = transcript_->find(question("is folder", about));
    return answer != nullptr ? said(*answer) == "1" : store_->is_folder(about);
  }
  bool is_link(const path& about) const override {
    const std::string* answer = transcript_->find(question("is link", about));
    return answer != nullptr ? said(*answer) == "1" : store_->is_link(about);
  }
  std::vector<FolderEntry> list(const path& folder) const override {
    const std::string* answer = transcript_->find(question("list", folder));
    return answer != nullptr ? decode_entries(said(*answer)) : store_->list(folder);
  }

 private:
  std::unique_ptr<InputFile> replay_open(const std::string& asked,
                                         std::function<std::unique_ptr<InputFile>()> open) const {
    const std::string* answer = transcript_->find(asked);
    if (answer == nullptr) return open();
    return std::make_unique<ReplayingFile>(said(*answer), transcript_, std::move(open));
  }

  std::shared_ptr<const Store> store_;
  std::shared_ptr<const Transcript> transcript_;
};

}  // namespace

void Transcript::add(std::string question, std::string answer) {
  const std::lock_guard lock(mutex_);
  if (!closed_) answers_.insert_or_assign(std::move(question), std::move(answer));
}

void Transcript::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
}

bool Transcript::is_closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

const std::string* Transcript::find(const std::string& question) const {
  const std::lock_guard lock(mutex_);
  const auto at = answers_.find(question);
  return at == answers_.end() ? nullptr : &at->second;
}

std::string Transcript::encode() const {
  const std::lock_guard lock(mutex_);
  Packer out;
  for (const auto& [asked, answer] : answers_) {
    out.text(asked);
    out.text(answer);
  }
  return out.take();
}

std::shared_ptr<const Transcript> Transcript::decode(std::string_view bytes) {
  auto transcript = std::make_shared<Transcript>();
  for (Unpacker in(bytes); !in.at_end();) {
    std::string asked(in.text()), answer(in.text());
    const bool is_error = answer.starts_with(kFailed) && answer.size() > 1;
    if (!is_error && !answer.starts_with(kSaid)) refuse();
    transcript->add(std::move(asked), std::move(answer));
  }
  return transcript;
}

std::shared_ptr<const Store> recording_store(std::shared_ptr<const Store> store,
                                             std::shared_ptr<Transcript> transcript) {
  return std::make_shared<const RecordingStore>(std::move(store), std::move(transcript));
}

std::shared_ptr<const Store> replaying_store(std::shared_ptr<const Store> store,
                                             std::shared_ptr<const Transcript> transcript) {
  return std::make_shared<const ReplayingStore>(std::move(store), std::move(transcript));
}

}  // namespace spolia
