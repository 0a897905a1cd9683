// Running the built command as a stranger would: as a child process.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "spolia/store/file_descriptor.h"

namespace spolia {

struct Outcome {
  int exit_code = -1;  // -1 where a signal ended it
  int signal = 0;      // that signal
  std::string out, err;
  int64_t peak_resident_bytes = 0;  // what this process held when it started the child counts into it
};

/// `spolia ARGUMENTS...`, running. Dies with the object.
class Command {
 public:
  /// `in_child` runs in the new process just before the command does: to limit it, to close its streams.
  explicit Command(const std::vector<std::string>& arguments, const std::function<void()>& in_child = {});
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;
  ~Command();

  void send(int signal);
  /// Stops it where it is, until resume(). False where it has ended.
  bool pause();
  void resume();
  /// Waits for its end.
  Outcome wait();

 private:
  pid_t pid_ = 0;  // 0 once it has ended
  int status_ = 0;
  int64_t peak_resident_bytes_ = 0;
  FileDescriptor out_, err_;
};

/// Runs the command to its end.
Outcome spolia(const std::vector<std::string>& arguments, const std::function<void()>& in_child = {});

/// For `in_child`: what follows has the rights of its user and no more, even if that user is root.
void drop_privileges();

void expect_contains(const std::string& text, const std::string& part);

/// The names in a folder.
std::set<std::string> names_in(const std::filesystem::path& folder);

}  // namespace spolia
