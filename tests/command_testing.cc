#include "tests/command_testing.h"

#include <linux/securebits.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

constexpr const char* kProgram = SPOLIA_COMMAND;

/// A file without a name: unlike a pipe it takes any amount of output while nobody reads.
FileDescriptor make_capture() {
  FileDescriptor file(::memfd_create("output", MFD_CLOEXEC));
  if (file.get() < 0) throw_system_error(errno, "cannot make a file for output");
  return file;
}

std::string contents(const FileDescriptor& file) {
  std::string text(static_cast<size_t>(::lseek(file.get(), 0, SEEK_END)), '\0');
  if (::pread(file.get(), text.data(), text.size(), 0) != std::ssize(text)) {
    throw_system_error(errno, "cannot read what a command printed");
  }
  return text;
}

}  // namespace

Command::Command(const std::vector<std::string>& arguments, const std::function<void()>& in_child)
    : out_(make_capture()), err_(make_capture()) {
  std::vector<char*> words = {const_cast<char*>(kProgram)};
  for (const std::string& argument : arguments) words.push_back(const_cast<char*>(argument.c_str()));
  words.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw_system_error(errno, "cannot start a process");
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // Whatever ignores signals above us, a nohup or a shell's background, is not under test.
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) std::signal(signal, SIG_DFL);
    ::dup2(out_.get(), STDOUT_FILENO);
    ::dup2(err_.get(), STDERR_FILENO);
    if (in_child) in_child();
    ::execv(kProgram, words.data());
    ::_exit(127);
  }
}

Command::~Command() {
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Command::send(int signal) {
  if (pid_ != 0) ::kill(pid_, signal);
}

bool Command::pause() {
  send(SIGSTOP);
  if (pid_ == 0) return false;
  rusage usage{};
  if (::wait4(pid_, &status_, WUNTRACED, &usage) != pid_) throw_system_error(errno, "cannot wait");
  if (WIFSTOPPED(status_)) return true;
  peak_resident_bytes_ = int64_t{usage.ru_maxrss} * 1024;
  pid_ = 0;
  return false;
}

void Command::resume() { send(SIGCONT); }

Outcome Command::wait() {
  if (pid_ != 0) {
    rusage usage{};
    if (::wait4(pid_, &status_, 0, &usage) != pid_) throw_system_error(errno, "cannot wait");
    peak_resident_bytes_ = int64_t{usage.ru_maxrss} * 1024;
    pid_ = 0;
  }
  Outcome outcome;
  if (WIFEXITED(status_)) outcome.exit_code = WEXITSTATUS(status_);
  if (WIFSIGNALED(status_)) outcome.signal = WTERMSIG(status_);
  outcome.peak_resident_bytes = peak_resident_bytes_;
  outcome.out = contents(out_);
  outcome.err = contents(err_);
  return outcome;
}

Outcome spolia(const std::vector<std::string>& arguments, const std::function<void()>& in_child) {
  return Command(arguments, in_child).wait();
}

void drop_privileges() {
  // Root keeps its user id, but a program that it starts is no longer given root's capabilities.
  if (::geteuid() == 0 && ::prctl(PR_SET_SECUREBITS, SECBIT_NOROOT) != 0) ::_exit(126);
}

Json json_of(const std::vector<std::string>& arguments) {
  const Outcome outcome = spolia(arguments);
  EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
  return Json::parse(outcome.out);
}

void expect_contains(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nlacks " << part;
}

void expect_refused(const Outcome& outcome, const std::vector<std::string>& parts) {
  EXPECT_EQ(outcome.exit_code, 2);
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(lines_of(outcome.err).size(), 1u) << outcome.err;
  EXPECT_TRUE(outcome.err.starts_with("spolia: ")) << outcome.err;
  for (const std::string& part : parts) expect_contains(outcome.err, part);
}

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw IoError("cannot open {}", path.string());
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const fs::path& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

void flip_bit(const fs::path& path, int64_t offset) {
  std::string bytes = read_file(path);
  bytes.at(static_cast<size_t>(offset < 0 ? std::ssize(bytes) + offset : offset)) ^= 1;
  write_file(path, bytes);
}

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

Snapshot snapshot(const fs::path& folder) {
  Snapshot files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files[entry.path()] = {read_file(entry.path()), entry.last_write_time()};
  }
  return files;
}

fs::path checkpoint(const std::string& name) { return fs::path(SPOLIA_TEST_DATA) / name / "checkpoint"; }

Json expected_tensors(const std::string& name) {
  return Json::parse(read_file(checkpoint(name).parent_path() / "expected.json"))["tensors"];
}

fs::path fsdp() { return checkpoint("torch-2.14/fsdp2-4"); }

void copy_checkpoint(const fs::path& from, const fs::path& to) {
  fs::create_directory(to);
  for (const auto& entry : fs::directory_iterator(from)) {
    write_file(to / entry.path().filename(), read_file(entry.path()));
  }
}

}  // namespace spolia
