// Running the built command as a stranger would: as a child process.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "spolia/store/file_descriptor.h"

namespace spolia {

namespace fs = std::filesystem;
using Json = nlohmann::json;

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

/// Runs the command, which must do fine, and parses what it prints.
Json json_of(const std::vector<std::string>& arguments);

void expect_contains(const std::string& text, const std::string& part);

/// The command said what is wrong in one line that has all of `parts`, printed nothing else, and exited
/// with 2.
void expect_refused(const Outcome& outcome, const std::vector<std::string>& parts);

std::vector<std::string> lines_of(const std::string& text);

std::string read_file(const fs::path& path);
void write_file(const fs::path& path, std::string_view bytes);
/// Changes a bit of a byte; a negative offset counts from the file's end.
void flip_bit(const fs::path& path, int64_t offset);

/// The names in a folder.
std::set<std::string> names_in(const fs::path& folder);
/// Every file below a folder: its bytes and when it was written.
using Snapshot = std::map<fs::path, std::pair<std::string, fs::file_time_type>>;
Snapshot snapshot(const fs::path& folder);

/// A checkpoint that PyTorch wrote, "torch-2.14/fsdp2-4", and what PyTorch says of its tensors: as
/// `spolia digest --json` does.
fs::path checkpoint(const std::string& name);
Json expected_tensors(const std::string& name);
fs::path fsdp();  // that one
/// A copy that may be written to: the stored ones are read-only.
void copy_checkpoint(const fs::path& from, const fs::path& to);

}  // namespace spolia
