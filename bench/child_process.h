// Running a command and looking at what it took.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace spolia::bench {

struct Finished {
  double seconds = 0;               // from before it was started until after it was gone
  int64_t peak_resident_bytes = 0;  // of the largest of its processes
  std::string output;               // its stdout
};

/// Runs a program to its end; stderr is ours. IoError where it cannot be run or does not exit with 0.
/// The kernel counts what this process has resident at the start into the child's peak.
Finished run_child(const std::vector<std::string>& command);

/// The same for a line of shell.
Finished run_shell(const std::string& line);

}  // namespace spolia::bench
