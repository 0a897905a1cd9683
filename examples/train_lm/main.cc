// Trains a small language model on the bytes of a text, on R x S ranks: R replicas of S shards. Hidden
// matrices are stepped by Muon, the rest by AdamW; the state is saved in the background and resumed on any
// other mesh.
//
//   train_lm TEXT --mesh 2x2 --steps 20 --save run --every 10
//   train_lm TEXT --mesh 1x3 --steps 40 --resume run
//   mpirun -n 4 train_lm TEXT --mesh 2x2 --steps 20
#include <charconv>
#include <chrono>
#include <fstream>
#include <iterator>
#include <optional>

#include <fmt/format.h>

#include "job.h"
#include "spolia/base/error.h"
#include "spolia/checkpoint/background_save.h"
#include "spolia/checkpoint/checkpoints.h"
#include "spolia/comm/mpi/mpi_job.h"

namespace train_lm {
namespace {

using namespace spolia;
using Clock = std::chrono::steady_clock;

constexpr const char* kUsage =
    "usage: train_lm TEXT [--mesh RxS] [--steps N] [--batch B] [--seed N] [--normuon] [--qk-clip T]\n"
    "                [--save DIR] [--every K] [--resume DIR]\n"
    "  TEXT      a file, whose bytes the model learns\n"
    "  --mesh    replicas x shards of each [1x1]; under mpirun their product is the number of processes\n"
    "  --steps   the step after which to stop, counted from the beginning [20]\n"
    "  --batch   sequences of a step, on all ranks together [16]\n"
    "  --seed    of the first values [1]\n"
    "  --normuon Muon with a second moment for each row\n"
    "  --qk-clip keep the logits of attention about below T: queries and keys shrink where they were larger\n"
    "  --save    a folder for checkpoints, of which the three newest stay\n"
    "  --every   a checkpoint each so many steps, and one at the end [10]\n"
    "  --resume  go on from the latest checkpoint in this folder, whatever mesh it was saved on\n";

struct Options {
  std::string text;
  JobOptions job;
  int64_t steps = 20, batch = 16, every = 10;
  std::optional<std::string> save, resume;
};

template <class Number>
Number parse_number(std::string_view option, std::string_view text) {
  Number number{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error == std::errc() && end == text.data() + text.size() && number > 0) return number;
  throw InvalidArgumentError("{} takes a number above 0, not {}", option, text);
}

Options parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string_view word = argv[i];
    if (!word.starts_with("--")) {
      if (!options.text.empty()) throw InvalidArgumentError("one text only, and not {} too", word);
      options.text = word;
      continue;
    }
    if (word == "--normuon") {
      options.job.normuon = true;
      continue;
    }
    if (i + 1 == argc) throw InvalidArgumentError("{} wants a value", word);
    const std::string_view value = argv[++i];
    if (word == "--mesh") {
      const size_t cross = value.find('x');
      if (cross == value.npos) throw InvalidArgumentError("--mesh is RxS, say 2x2, not {}", value);
      options.job.replicas = parse_number<int64_t>(word, value.substr(0, cross));
      options.job.shards = parse_number<int64_t>(word, value.substr(cross + 1));
    } else if (word == "--steps") {
      options.steps = parse_number<int64_t>(word, value);
    } else if (word == "--batch") {
      options.batch = parse_number<int64_t>(word, value);
    } else if (word == "--every") {
      options.every = parse_number<int64_t>(word, value);
    } else if (word == "--seed") {
      options.job.seed = parse_number<uint64_t>(word, value);
    } else if (word == "--qk-clip") {
      options.job.qk_clip = parse_number<double>(word, value);
    } else if (word == "--save") {
      options.save = value;
    } else if (word == "--resume") {
      options.resume = value;
    } else {
      throw InvalidArgumentError("there is no option {}", word);
    }
  }
  if (options.text.empty()) throw InvalidArgumentError("which text?");
  return options;
}

std::vector<uint8_t> read_text(const std::string& path, const ModelShape& shape) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw NotFoundError("the text {} cannot be opened", path);
  std::vector<uint8_t> text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (std::ssize(text) > shape.context) return text;
  throw InvalidArgumentError("the text {} has {} bytes, and at least {} are needed", path, text.size(),
                             shape.context + 1);
}

void print_summary(const JobCounters& counters, int64_t steps, double seconds) {
  const auto count = static_cast<double>(std::max<int64_t>(steps, 1));
  fmt::print(
      "{} steps of {:.4f} s, {:.1f} % of it Newton-Schulz; {:.0f} bytes a step sent by the optimizers of all "
      "ranks; {:.0f} % of the broadcasts' time hidden behind arithmetic\n",
      steps, seconds / count, 100 * counters.newton_schulz_seconds / std::max(seconds, 1e-9),
      static_cast<double>(counters.sent_bytes) / count, 100 * counters.hidden_share);
}

void train(World& world, const Options& options) {
  const ModelShape shape;
  const std::vector<uint8_t> text = read_text(options.text, shape);
  Job job(world, shape, options.job);
  int64_t step = 0;
  if (options.resume) {
    step = job.load(*options.resume);
    if (world.rank() == 0) fmt::print("resumed after step {}\n", step);
  }

  std::optional<Checkpoints> checkpoints;
  if (options.save) checkpoints.emplace(*options.save, 3);
  BackgroundSaver saver(world);
  const auto start = Clock::now();
  const int64_t first = step;
  while (step < options.steps) {
    const double loss = job.step(text, options.batch, step++);
    if (world.rank() == 0) fmt::print("step={} loss={:.8f}\n", step, loss);
    if (checkpoints && (step % options.every == 0 || step == options.steps)) {
      saver.start(job.state(step), [&checkpoints, step](Group& group, const StateDict& copy) {
        return checkpoints->save(group, copy, step, {.existing = Existing::kExchange});
      });
    }
  }
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  saver.wait();
  const JobCounters counters = job.counters();
  if (world.rank() == 0) print_summary(counters, step - first, seconds);
}

}  // namespace
}  // namespace train_lm

int main(int argc, char** argv) {
  using namespace spolia;
  if (argc == 2 && std::string_view(argv[1]) == "--help") {
    fmt::print("{}", train_lm::kUsage);
    return 0;
  }
  train_lm::Options options;
  try {
    options = train_lm::parse(argc, argv);
  } catch (const Error& error) {
    fmt::print(stderr, "train_lm: {}\n{}", error.what(), train_lm::kUsage);
    return 2;
  }
  try {
    const auto body = [&](World& world) { train_lm::train(world, options); };
    is_under_mpi() ? run_world(body)
                   : launch(static_cast<int>(options.job.replicas * options.job.shards), body);
  } catch (const std::exception& error) {
    fmt::print(stderr, "train_lm: {}\n", error.what());
    return 2;
  }
  return 0;
}
