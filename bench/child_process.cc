#include "bench/child_process.h"

#include <malloc.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "spolia/base/error.h"

namespace spolia::bench {

Finished run_child(const std::vector<std::string>& command) {
  std::vector<char*> arguments;
  for (const std::string& word : command) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  malloc_trim(0);  // what we have resident at the fork counts into the child's peak
  int ends[2];
  if (pipe(ends) != 0) throw_system_error(errno, "cannot make a pipe");

  Finished finished;
  const auto start = std::chrono::steady_clock::now();
  const pid_t child = fork();
  if (child < 0) throw_system_error(errno, "cannot start a process");
  if (child == 0) {
    dup2(ends[1], STDOUT_FILENO);
    close(ends[0]);
    close(ends[1]);
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(ends[1]);
  char bytes[4096];
  for (ssize_t count; (count = read(ends[0], bytes, sizeof bytes)) > 0;) {
    finished.output.append(bytes, static_cast<size_t>(count));
  }
  close(ends[0]);
  int status = 0;
  rusage usage{};
  if (wait4(child, &status, 0, &usage) != child) throw_system_error(errno, "cannot wait for a process");
  finished.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  finished.peak_resident_bytes = int64_t{usage.ru_maxrss} * 1024;
  if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) {
    throw IoError("this failed: {}", fmt::join(command, " "));
  }
  return finished;
}

Finished run_shell(const std::string& line) { return run_child({"/bin/sh", "-c", line}); }

}  // namespace spolia::bench
