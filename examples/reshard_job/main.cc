// A job's state on a 2x2 mesh, then on three ranks, then on one: saved and loaded each time by all ranks
// together, and proved equal. Alone it runs on four threads; under `mpirun -n 4` on four processes.
#include <filesystem>

#include <fmt/format.h>

#include "spolia/checkpoint/digest.h"
#include "spolia/checkpoint/layout_option.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"
#include "spolia/comm/mpi/mpi_job.h"

using namespace spolia;

namespace {

/// Loads a checkpoint into what each rank holds by the rules, and saves that.
void reshard(World& world, const std::filesystem::path& from, const std::filesystem::path& to,
             const std::string& rules_text) {
  const LayoutRules rules = read_layout_rules(rules_text);
  const auto source = open_together(*world.all(), posix_store(), from);
  OwnedState job = state_for(source->catalog(), world.rank(), &rules);
  const Report loaded = load(world, *source, job.state);
  const Report saved = save(*world.all(), job.state, *posix_store(), to);
  if (world.rank() != 0) return;
  fmt::print("{}\n  loaded {} keys; the busiest rank read {} bytes and wrote {}, the mean {} and {}\n",
             rules_text, loaded.used.size(), loaded.busiest_rank_bytes, saved.busiest_rank_bytes,
             loaded.mean_rank_bytes, saved.mean_rank_bytes);
}

/// One line a tensor: what it is called, and what its bytes hash to.
std::string digests(const std::filesystem::path& checkpoint) {
  const auto source = open_source(posix_store(), checkpoint);
  const std::vector<std::string> hashes = digest_tensors(*source, {});
  std::string lines;
  for (size_t t = 0; t < hashes.size(); ++t) {
    lines += fmt::format("{} {}\n", hashes[t], source->catalog().tensors[t].name);
  }
  return lines;
}

void run(World& world, const std::filesystem::path& checkpoint, const std::filesystem::path& work) {
  reshard(world, checkpoint, work / "on-2x2", "mesh = 2x2 (replica, shard); *: [replicate, shard(0)]");
  reshard(world, work / "on-2x2", work / "on-3", "mesh = 3 (shard); *: [shard(0)]");
  reshard(world, work / "on-3", work / "on-1", "mesh = 1; *: [replicate]");
  if (world.rank() != 0) return;
  const std::string expected = digests(checkpoint);
  for (const char* name : {"on-2x2", "on-3", "on-1"}) {
    if (digests(work / name) != expected) throw CorruptError("{} holds other bytes", name);
  }
  fmt::print("every tensor of all three is equal to the first\n");
}

}  // namespace

int main(int argc, char** argv) try {
  if (argc != 3) {
    fmt::print(stderr, "usage: reshard_job CHECKPOINT FOLDER\n");
    return 2;
  }
  const auto body = [&](World& world) { run(world, argv[1], argv[2]); };
  is_under_mpi() ? run_world(body) : launch(4, body);
} catch (const Error& error) {
  fmt::print(stderr, "reshard_job: {}\n", error.what());
  return 2;
}
