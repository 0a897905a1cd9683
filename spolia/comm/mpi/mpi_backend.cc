#include "spolia/comm/mpi/mpi_backend.h"

#include <exception>

namespace spolia {
namespace {

using Stage = MpiOperation::Stage;

[[noreturn]] void rethrow(const std::pair<ErrorKind, std::string>& error) {
  if (error.first == ErrorKind::kMismatch) throw MismatchError("{}", error.second);
  if (error.first == ErrorKind::kTimeout) throw TimeoutError("{}", error.second);
  throw PeerFailedError("{}", error.second);
}

ChannelName channel_of(const Collective& collective, int place) {
  if (collective.kind == CollectiveKind::kSend) return {place, collective.peer};
  if (collective.kind == CollectiveKind::kReceive) return {collective.peer, place};
  return {};
}

}  // namespace

class MpiWork final : public Work {
 public:
  MpiWork(MpiBackend& backend, std::shared_ptr<MpiOperation> operation)
      : backend_(backend), operation_(std::move(operation)) {}

  bool test() override {
    const Stage stage = operation_->stage.load(std::memory_order_acquire);
    if (stage == Stage::kFailed) rethrow({operation_->error, operation_->reason});
    return stage == Stage::kLanded;
  }

  void wait(Deadline deadline) override {
    Bell& bell = backend_.face_->bell();
    while (true) {
      const uint32_t rings = bell.rings();
      if (test()) return;
      if (std::chrono::steady_clock::now() >= deadline) {
        // Fails soon, unless all ranks have arrived.
        backend_.engine_->give_up(backend_.id_, operation_);
        deadline = Deadline::max();
      }
      bell.wait(rings, deadline);
    }
  }

 private:
  MpiBackend& backend_;
  const std::shared_ptr<MpiOperation> operation_;
};

MpiBackend::MpiBackend(std::shared_ptr<MpiEngine> engine, int64_t id, std::vector<int64_t> ranks)
    : engine_(std::move(engine)), id_(id), face_(engine_->make_group(id, std::move(ranks))) {}

MpiBackend::~MpiBackend() {
  if (std::uncaught_exceptions() == 0) engine_->leave(id_);
}

std::unique_ptr<Work> MpiBackend::start(const Collective& collective) {
  auto operation = std::make_shared<MpiOperation>();
  operation->collective = collective;
  operation->channel = channel_of(collective, place());
  const bool receives = collective.kind == CollectiveKind::kReceive;
  operation->number = started_[{operation->channel, receives}]++;
  if (!face_->broken().reason.empty()) rethrow(face_->error_of(*operation));
  engine_->start(id_, operation);
  return std::make_unique<MpiWork>(*this, std::move(operation));
}

void MpiBackend::break_group(const std::string& reason) {
  const Broken broken{.reason = reason};
  face_->break_with(broken);
  engine_->break_group(id_, broken);
}

}  // namespace spolia
