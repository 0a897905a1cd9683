// usage: save_on_ranks CHECKPOINT FOLDER FORMAT RANKS LAYOUT
//
// Loads a checkpoint into what each of so many ranks holds by the rules, and saves that from all of them into
// FOLDER, as dcp or spolia: what a job would have written.
#include <cstdio>
#include <string>

#include "spolia/checkpoint/layout_option.h"
#include "spolia/checkpoint/load.h"
#include "spolia/checkpoint/open_together.h"
#include "spolia/checkpoint/save.h"

int main(int count, char** arguments) try {
  using namespace spolia;
  if (count != 6) {
    std::fprintf(stderr, "usage: save_on_ranks CHECKPOINT FOLDER FORMAT RANKS LAYOUT\n");
    return 2;
  }
  const std::string folder = arguments[2], format = arguments[3];
  const LayoutRules rules = read_layout_rules(arguments[5]);
  launch(std::stoi(arguments[4]), [&](World& world) {
    const auto source = open_together(*world.all(), posix_store(), arguments[1]);
    OwnedState job = state_for(source->catalog(), world.rank(), &rules);
    load(world, *source, job.state);
    SaveOptions options;
    options.to = format == "dcp" ? TargetFormat::kDcp : TargetFormat::kSpolia;
    options.durable = false;
    save(*world.all(), job.state, *posix_store(), folder, options);
  });
} catch (const std::exception& error) {
  std::fprintf(stderr, "save_on_ranks: %s\n", error.what());
  return 2;
}
