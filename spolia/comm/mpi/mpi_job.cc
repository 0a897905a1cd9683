#include "spolia/comm/mpi/mpi_job.h"

#include <algorithm>
#include <cstdlib>
#include <exception>
#include <numeric>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/comm/agree.h"
#include "spolia/comm/mpi/mpi_backend.h"
#include "spolia/comm/plugin.h"

namespace spolia {
namespace {

constexpr std::chrono::hours kForever{24 * 365};

Transport* open_plugin() {
  const auto open =
      reinterpret_cast<OpenTransport>(load_plugin("spolia_mpi", kOpenTransport,
                                                  "it is built with Spolia where MPI is installed (Debian: "
                                                  "libopenmpi-dev), and needs MPI's library to run "
                                                  "(openmpi-bin); SPOLIA_PLUGIN_PATH says where it is"));
  Transport* transport = nullptr;
  if (const char* refused = open(kTransportVersion, &transport)) {
    throw UnsupportedError("MPI cannot be used: {}", refused);
  }
  return transport;
}

std::vector<int64_t> ranks_below(int64_t count) {
  std::vector<int64_t> ranks(static_cast<size_t>(count));
  std::iota(ranks.begin(), ranks.end(), int64_t{0});
  return ranks;
}

View numbers_view(std::span<int64_t> numbers) {
  const int64_t shape[] = {std::ssize(numbers)};
  return dense_view(std::as_writable_bytes(numbers).data(), DType::kInt64, shape);
}

class MpiWorld final : public World {
 public:
  MpiWorld(std::shared_ptr<MpiEngine> engine, int64_t& next_id, const LaunchOptions& options)
      : engine_(std::move(engine)),
        next_id_(next_id),
        options_(options),
        all_(make(ranks_below(engine_->size()))) {
    // A host's number is the number of hosts whose lowest rank is lower than its own.
    const std::vector<int64_t>& lowest = engine_->hosts();
    std::vector<int64_t> leaders = lowest;
    std::ranges::sort(leaders);
    leaders.erase(std::unique(leaders.begin(), leaders.end()), leaders.end());
    for (int64_t leader : lowest)
      hosts_.push_back(std::ranges::lower_bound(leaders, leader) - leaders.begin());
  }

  const std::shared_ptr<Group>& all() const override { return all_; }
  std::span<const int64_t> hosts() const override { return hosts_; }

  std::shared_ptr<Group> create(std::span<const int64_t> ranks) override {
    check_same_ranks(*all_, ranks);
    if (std::ranges::binary_search(ranks, rank())) return make({ranks.begin(), ranks.end()});
    ++next_id_;
    return nullptr;
  }

 private:
  std::shared_ptr<Group> make(std::vector<int64_t> ranks) {
    if (next_id_ >= engine_->most_groups()) {
      throw UnsupportedError("this MPI has tags for {} groups in a job, and all are used up",
                             engine_->most_groups());
    }
    std::shared_ptr<GroupBackend> end = std::make_shared<MpiBackend>(engine_, next_id_++, std::move(ranks));
    if (options_.decorate) end = options_.decorate(std::move(end));
    return std::make_shared<Group>(std::move(end), options_.timeout);
  }

  const std::shared_ptr<MpiEngine> engine_;
  int64_t& next_id_;
  const LaunchOptions& options_;
  const std::shared_ptr<Group> all_;
  std::vector<int64_t> hosts_;
};

/// How a rank's run ended, for the others.
struct Outcome {
  static constexpr int64_t kFine = 3;
  int64_t suffering = kFine;  // agree.h; the least is told
  int64_t kind = 0;           // of an Error; kOther of another exception
  int64_t bytes = 0;          // of the message
  int64_t hash = 0;           // of the message
  static constexpr int64_t kOther = -1;
  friend bool operator==(const Outcome&, const Outcome&) = default;
};

Outcome outcome_of(const std::exception_ptr& error, const std::string& message) {
  Outcome outcome{.bytes = std::ssize(message), .hash = static_cast<int64_t>(xxh3_64(bytes_of(message)))};
  if (!error) return outcome;
  outcome.suffering = suffering(error);
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    outcome.kind = static_cast<int64_t>(thrown.kind());
  } catch (...) {
    outcome.kind = Outcome::kOther;
  }
  return outcome;
}

[[noreturn]] void rethrow_named(const std::exception_ptr& error, int64_t rank) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& thrown) {
    rethrow_with_context(thrown, fmt::format("rank {}", rank));
  }
}

}  // namespace

MpiJob::MpiJob() : MpiJob(open_plugin) {}

MpiJob::MpiJob(std::function<Transport*()> open) : engine_(std::make_shared<MpiEngine>(std::move(open))) {
  lobby_ = std::make_unique<Group>(std::make_shared<MpiBackend>(engine_, 0, ranks_below(size())), kForever);
}

MpiJob::~MpiJob() {
  // Whoever is late is answered until all are here.
  if (engine_->ends_together()) {
    try {
      lobby_->set_timeout(patience_);
      lobby_->barrier().wait();
    } catch (const Error&) {
      engine_->will_end_together(false);
    }
  }
}

/// Ranks count groups alike, unless one has failed where another has not.
void MpiJob::agree_on_ids() {
  const View view = numbers_view(std::span(&next_id_, 1));
  lobby_->all_reduce(view, view, ReduceOp::kMax).wait();
}

void MpiJob::run(const std::function<void(World& world)>& body, const LaunchOptions& options) {
  lobby_->set_timeout(kForever);
  engine_->will_end_together(false);
  agree_on_ids();
  const int64_t first_id = next_id_;
  std::exception_ptr error;
  try {
    MpiWorld world(engine_, next_id_, options);
    try {
      body(world);
    } catch (...) {
      engine_->break_groups_from(first_id,
                                 fmt::format("rank {}: {}", rank(), text_of(std::current_exception())));
      throw;
    }
  } catch (...) {
    error = std::current_exception();
  }
  engine_->leave_groups_from(first_id);
  end_together(error);
}

/// Throws the error of the rank that is most to blame, on all ranks.
void MpiJob::end_together(const std::exception_ptr& own) {
  if (own) lobby_->set_timeout(patience_);
  const std::string message = own ? text_of(own) : std::string();
  Outcome outcome = outcome_of(own, message);
  std::vector<Outcome> outcomes(static_cast<size_t>(size()));
  std::string said;
  int64_t culprit = 0;
  try {
    constexpr int64_t kNumbers = sizeof(Outcome) / sizeof(int64_t);
    const int64_t shape[] = {kNumbers}, all_shape[] = {size(), kNumbers};
    lobby_
        ->all_gather(dense_view(reinterpret_cast<std::byte*>(&outcome), DType::kInt64, shape),
                     dense_view(reinterpret_cast<std::byte*>(outcomes.data()), DType::kInt64, all_shape))
        .wait();
    culprit = std::ranges::min_element(outcomes, {}, &Outcome::suffering) - outcomes.begin();
    const Outcome& worst = outcomes[static_cast<size_t>(culprit)];
    said = culprit == rank() ? message : std::string(static_cast<size_t>(worst.bytes), ' ');
    lobby_->broadcast(byte_view(std::as_writable_bytes(std::span(said))), static_cast<int>(culprit)).wait();
  } catch (const Error&) {  // ranks are lost
    if (own) rethrow_named(own, rank());
    throw;
  }
  engine_->will_end_together(true);
  const Outcome& worst = outcomes[static_cast<size_t>(culprit)];
  if (worst.suffering == Outcome::kFine) return;
  // What all ranks say alike was agreed on, and names its rank if there is one to name.
  if (own && std::ranges::all_of(outcomes, [&](const Outcome& other) { return other == worst; }))
    std::rethrow_exception(own);
  if (culprit == rank()) rethrow_named(own, rank());
  if (worst.kind == Outcome::kOther) throw PeerFailedError("rank {}: {}", culprit, said);
  throw Error(static_cast<ErrorKind>(worst.kind), fmt::format("rank {}: {}", culprit, said));
}

bool is_under_mpi() {
  // Open MPI; MPICH and others that start processes by PMI; PMIx, as srun does.
  constexpr const char* kVariables[] = {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK"};
  return std::ranges::any_of(kVariables, [](const char* name) { return std::getenv(name) != nullptr; });
}

void run_world(const std::function<void(World& world)>& body, const LaunchOptions& options) {
  if (!is_under_mpi()) return launch(1, body, options);
  MpiJob().run(body, options);
}

}  // namespace spolia
