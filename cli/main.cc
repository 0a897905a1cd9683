// The command `spolia`: parses, runs one verb, turns errors into one line and an exit code.
#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <new>

#include "cli/command.h"
#include "spolia/base/error.h"

namespace {

spolia::CancelToken* interrupted = nullptr;

/// The first signal asks the verb to stop and clean up; a second one ends the program at once.
void on_signal(int number) {
  interrupted->cancel();
  std::signal(number, SIG_DFL);
}

void handle_signals(spolia::CancelToken& cancel) {
  interrupted = &cancel;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  if (std::signal(SIGHUP, on_signal) == SIG_IGN) std::signal(SIGHUP, SIG_IGN);  // nohup
}

/// Standard streams that the caller closed stay useless, but their numbers are taken: no file that is opened
/// later gets what is printed.
void occupy_standard_streams() {
  for (int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    // Opened so that using it fails, as with a closed one.
    if (::fcntl(stream, F_GETFD) == -1) ::open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

/// A checkpoint may have thousands of files, which are all kept open; the usual limit is a modest 1024.
void allow_many_open_files() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

int run(spolia::cli::Context& context) {
  using namespace spolia::cli;
  try {
    const int code = context.run();
    if (std::fflush(stdout) != 0 || std::ferror(stdout)) {
      print_note("cannot write to standard output");
      return kFailure;
    }
    return code;
  } catch (const spolia::Error& error) {
    if (error.kind() == spolia::ErrorKind::kCancelled) {
      print_note("interrupted; nothing was left behind");
      return 130;  // what shells give for SIGINT
    }
    print_note(error.what());
  } catch (const std::bad_alloc&) {
    print_note("out of memory");
  } catch (const std::exception& error) {
    print_note(error.what());
  }
  return kFailure;
}

}  // namespace

int main(int argc, char** argv) {
  occupy_standard_streams();
  allow_many_open_files();
  spolia::cli::Context context;
  CLI::App app(
      "Spolia: reads, checks and converts the checkpoints of large models.\n"
      "Exit codes: 0 fine; 1 a fault or difference was found; 2 wrong use or unreadable input.");
  app.name("spolia");
  app.set_version_flag("--version", std::string("spolia ") + SPOLIA_VERSION);
  app.require_subcommand(1);
  spolia::cli::add_inspect_command(app, context);
  spolia::cli::add_digest_command(app, context);
  spolia::cli::add_verify_command(app, context);
  spolia::cli::add_diff_command(app, context);
  spolia::cli::add_convert_command(app, context);
  spolia::cli::add_map_command(app, context);
  spolia::cli::add_stream_command(app, context);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? spolia::cli::kFine : spolia::cli::kFailure;
  }
  handle_signals(context.cancel);
  return run(context);
}
