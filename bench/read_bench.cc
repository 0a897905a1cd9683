// `spolia verify` and `spolia digest` of a checkpoint in the page cache, beside what bounds them: reading the
// files, and hashing memory, by as many threads.
#include <cstring>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <openssl/evp.h>

#include "bench/child_process.h"
#include "bench/make_dcp.h"
#include "bench/measure.h"
#include "spolia/base/hash.h"
#include "spolia/base/threads.h"
#include "spolia/device/buffer.h"
#include "spolia/store/store.h"

namespace spolia::bench {
namespace {

namespace fs = std::filesystem;

struct Options {
  std::string command = SPOLIA_COMMAND;
  std::string work = SPOLIA_BENCH_FOLDER;
  double gib = 1;
  int rounds = 7;
};

constexpr int64_t kPiece = int64_t{512} << 10;

/// Reads all files in pieces, on all threads.
void read_all(const std::vector<fs::path>& files, size_t threads) {
  struct Piece {
    const InputFile* file;
    int64_t offset, length;
  };
  std::vector<std::unique_ptr<InputFile>> open;
  std::vector<Piece> pieces;
  for (const fs::path& path : files) {
    open.push_back(posix_store()->open(path));
    const int64_t size = open.back()->size();
    for (int64_t at = 0; at < size; at += kPiece)
      pieces.push_back({open.back().get(), at, std::min(kPiece, size - at)});
  }
  std::vector<Buffer> buffers;
  for (size_t t = 0; t < threads; ++t) buffers.emplace_back(kPiece);
  parallel_for(threads, pieces.size(), [&](size_t worker, size_t i) {
    const Piece& piece = pieces[i];
    piece.file->read(piece.offset, buffers[worker].bytes().first(static_cast<size_t>(piece.length)));
  });
}

/// Calls body(bytes, other) for pieces of `bytes` bytes of memory altogether, each thread in its own memory,
/// which is larger than its caches. `other` is as large a piece of other memory.
Sample over_memory(std::vector<Buffer>& memories, int64_t bytes,
                   const std::function<void(std::span<const std::byte>, std::byte* other)>& body) {
  return {timed([&] {
    parallel_for(memories.size(), static_cast<size_t>(bytes / kPiece), [&](size_t worker, size_t i) {
      Buffer& memory = memories[worker];
      const int64_t half = memory.size() / 2;
      const int64_t at = static_cast<int64_t>(i) * kPiece % half;
      body({memory.data() + at, static_cast<size_t>(kPiece)}, memory.data() + half + at);
    });
  })};
}

void openssl_sha256(std::span<const std::byte> bytes) {
  unsigned char digest[EVP_MAX_MD_SIZE];
  if (EVP_Digest(bytes.data(), bytes.size(), digest, nullptr, EVP_sha256(), nullptr) != 1) std::abort();
}

void run(const Options& options) {
  const size_t threads = std::max<size_t>(hardware_threads(), 2);  // what the command takes
  const fs::path folder = fs::path(options.work) / "dcp";
  fs::remove_all(folder);
  fs::create_directories(options.work);
  const int64_t bytes =
      make_dcp(folder, llama_like_shapes(static_cast<int64_t>(options.gib * (1 << 30))), Sharding::kRows, 2);
  const std::vector<fs::path> files = files_in(folder);
  std::vector<Buffer> memories;
  for (size_t t = 0; t < threads; ++t) {
    memories.emplace_back(int64_t{256} << 20);
    std::memset(memories.back().data(), 1, static_cast<size_t>(memories.back().size()));
  }

  auto ready = [&] { prime(files, int64_t{64} << 20); };
  auto command = [&](const char* verb) {
    return [&, verb]() -> Sample { return {run_child({options.command, verb, folder}).seconds}; };
  };
  auto memory = [&](auto body) { return [&, body] { return over_memory(memories, bytes, body); }; };
  auto show = [&](const std::string& title, const std::vector<Contender>& contenders) {
    print_table(fmt::format("{}: {:.2f} GB, {} threads, {} rounds", title, static_cast<double>(bytes) / 1e9,
                            threads, options.rounds),
                contenders, take_turns(contenders, options.rounds), bytes);
  };
  using Bytes = std::span<const std::byte>;
  show("verify from the page cache",
       {{"spolia verify", command("verify"), ready},
        {"pread of the files", [&]() -> Sample { return {timed([&] { read_all(files, threads); })}; }, ready},
        {"CRC-32 of memory", memory([](Bytes from, std::byte*) { crc32(0, from); })},
        {"memcpy", memory([](Bytes from, std::byte* to) { std::memcpy(to, from.data(), from.size()); })}});
  show("digest from the page cache",
       {{"spolia digest", command("digest"), ready},
        {"OpenSSL's SHA-256 of memory", memory([](Bytes from, std::byte*) { openssl_sha256(from); })}});
  fs::remove_all(folder);
}

}  // namespace
}  // namespace spolia::bench

int main(int argc, char** argv) {
  spolia::bench::Options options;
  CLI::App app("Times `spolia verify` and `spolia digest` beside what bounds them.");
  app.add_option("--gib", options.gib, "the size of the checkpoint")->check(CLI::PositiveNumber);
  app.add_option("--rounds", options.rounds, "how often each runs")->check(CLI::PositiveNumber);
  app.add_option("--work", options.work, "a folder for the checkpoint");
  app.add_option("--command", options.command, "the spolia to measure");
  CLI11_PARSE(app, argc, argv);
  try {
    spolia::bench::print_load();
    spolia::bench::run(options);
  } catch (const std::exception& error) {
    fmt::print(stderr, "read_bench: {}\n", error.what());
    return 1;
  }
  return 0;
}
