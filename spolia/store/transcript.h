// Transcripts: what a store was asked, and what it said, so that another rank can be answered the same
// without asking the disk.
//
// One rank opens a checkpoint through a RecordingStore; the others open it through ReplayingStores that are
// given its transcript. Opening asks the same questions everywhere, so that metadata is read once, and all
// ranks see the same.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>

#include "spolia/store/store.h"

namespace spolia {

/// Questions and answers, as texts. Thread-safe.
class Transcript {
 public:
  void add(std::string question, std::string answer);
  /// What comes after that is not kept.
  void close();
  bool is_closed() const;
  /// nullptr where nobody asked; good as long as the transcript.
  const std::string* find(const std::string& question) const;

  /// As bytes, and back. CorruptError where they are none.
  std::string encode() const;
  static std::shared_ptr<const Transcript> decode(std::string_view bytes);

 private:
  mutable std::mutex mutex_;
  std::map<std::string, std::string> answers_;
  bool closed_ = false;
};

/// Passes on to `store` what it is asked, and writes down every answer until the transcript is closed. What
/// would change something is an UnsupportedError.
std::shared_ptr<const Store> recording_store(std::shared_ptr<const Store> store,
                                             std::shared_ptr<Transcript> transcript);

/// Answers from the transcript what is in it, and asks `store` the rest. A file is opened there when
/// something is read that the transcript has not.
std::shared_ptr<const Store> replaying_store(std::shared_ptr<const Store> store,
                                             std::shared_ptr<const Transcript> transcript);

}  // namespace spolia
