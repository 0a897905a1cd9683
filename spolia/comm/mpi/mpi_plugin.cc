// The plugin: MPI as a Transport. The only file that MPI's headers reach.
#include <mpi.h>

#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "spolia/comm/mpi/transport.h"

namespace spolia {
namespace {

/// Of static storage: text that stays.
std::string& last_text() {
  static std::string text;
  return text;
}

std::string text_of(int error) {
  char text[MPI_MAX_ERROR_STRING] = "";
  int length = 0;
  MPI_Error_string(error, text, &length);
  return {text, static_cast<size_t>(length)};
}

static_assert(sizeof(MPI_Request) <= sizeof(Transport::Request::handle));

MPI_Request unpack(const Transport::Request& request) {
  MPI_Request unpacked;
  std::memcpy(&unpacked, &request.handle, sizeof unpacked);
  return unpacked;
}
void pack(MPI_Request unpacked, Transport::Request& request) {
  std::memcpy(&request.handle, &unpacked, sizeof unpacked);
}

class MpiTransport final : public Transport {
 public:
  /// Why it cannot be used; null where it can.
  const char* open() {
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (finalized) return "MPI was finalised in this process, and cannot be used twice";
    const char* refused = initialized ? check_thread_level() : initialize();
    if (refused) return refused;
    return open_lanes();
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  int greatest_tag() const override { return greatest_tag_; }
  const int* hosts() const override { return hosts_.data(); }

  int send(Lane lane, const void* data, int64_t bytes, int to, int tag, Request* request) override {
    MPI_Request started = MPI_REQUEST_NULL;
    const int error = MPI_Isend(data, static_cast<int>(bytes), MPI_BYTE, to, tag, comm(lane), &started);
    pack(started, *request);
    return error;
  }
  int receive(Lane lane, void* data, int64_t bytes, int from, int tag, Request* request) override {
    MPI_Request started = MPI_REQUEST_NULL;
    const int error = MPI_Irecv(data, static_cast<int>(bytes), MPI_BYTE, from, tag, comm(lane), &started);
    pack(started, *request);
    return error;
  }
  int test(Request* request, bool* done, int64_t* bytes) override {
    MPI_Request tested = unpack(*request);
    MPI_Status status;
    int flag = 0;
    const int error = MPI_Test(&tested, &flag, &status);
    pack(tested, *request);
    *done = flag != 0;
    if (error == MPI_SUCCESS && flag && bytes) *bytes = bytes_of(status);
    return error;
  }
  int cancel(Request* request) override {
    MPI_Request cancelled = unpack(*request);
    return MPI_Cancel(&cancelled);
  }
  int probe(Lane lane, int tag, int* from, int64_t* bytes) override {
    MPI_Status status;
    int flag = 0;
    const int error = MPI_Iprobe(MPI_ANY_SOURCE, tag, comm(lane), &flag, &status);
    *from = flag ? status.MPI_SOURCE : kAnyone;
    if (flag) *bytes = bytes_of(status);
    return error;
  }

  const char* error_text(int error) override {
    last_text() = text_of(error);
    return last_text().c_str();
  }

  void close(bool together) override {
    if (!together) return;
    for (MPI_Comm& lane : lanes_) MPI_Comm_free(&lane);
    if (owns_) MPI_Finalize();
  }
  void abort(int code) override { MPI_Abort(MPI_COMM_WORLD, code); }

 private:
  /// Null where the thread that asks is the one that MPI was initialised for.
  const char* initialize() {
    int provided = MPI_THREAD_SINGLE;
    if (MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided) != MPI_SUCCESS)
      return "MPI_Init_thread failed";
    owns_ = true;
    return nullptr;
  }

  static const char* check_thread_level() {
    int provided = MPI_THREAD_SINGLE, is_main = 0;
    MPI_Query_thread(&provided);
    MPI_Is_thread_main(&is_main);
    if (provided >= MPI_THREAD_SERIALIZED || is_main) return nullptr;
    return "MPI is initialised already, for calls from one thread alone (MPI_THREAD_SINGLE or _FUNNELED). "
           "Spolia "
           "calls it from a thread of its own: initialise it with MPI_THREAD_MULTIPLE, or after Spolia has";
  }

  const char* open_lanes() {
    for (MPI_Comm& lane : lanes_) {
      if (MPI_Comm_dup(MPI_COMM_WORLD, &lane) != MPI_SUCCESS) return "MPI_Comm_dup failed";
      MPI_Comm_set_errhandler(lane, MPI_ERRORS_RETURN);
    }
    MPI_Comm_rank(lanes_[0], &rank_);
    MPI_Comm_size(lanes_[0], &size_);
    void* greatest = nullptr;
    int found = 0;
    MPI_Comm_get_attr(lanes_[0], MPI_TAG_UB, static_cast<void*>(&greatest), &found);
    if (found) greatest_tag_ = *static_cast<int*>(greatest);
    return find_hosts();
  }

  const char* find_hosts() {
    MPI_Comm host = MPI_COMM_NULL;
    int lowest = 0;
    hosts_.resize(static_cast<size_t>(size_));
    const bool found =
        MPI_Comm_split_type(lanes_[0], MPI_COMM_TYPE_SHARED, rank_, MPI_INFO_NULL, &host) == MPI_SUCCESS &&
        MPI_Allreduce(&rank_, &lowest, 1, MPI_INT, MPI_MIN, host) == MPI_SUCCESS &&
        MPI_Comm_free(&host) == MPI_SUCCESS &&
        MPI_Allgather(&lowest, 1, MPI_INT, hosts_.data(), 1, MPI_INT, lanes_[0]) == MPI_SUCCESS;
    return found ? nullptr : "MPI did not say which ranks share a host";
  }

  MPI_Comm comm(Lane lane) const { return lanes_[lane == Lane::kGroups ? 0 : 1]; }

  static int64_t bytes_of(const MPI_Status& status) {
    int cancelled = 0, count = 0;
    MPI_Test_cancelled(&status, &cancelled);
    if (cancelled) return -1;
    MPI_Get_count(&status, MPI_BYTE, &count);
    return count;
  }

  MPI_Comm lanes_[2] = {MPI_COMM_NULL, MPI_COMM_NULL};
  int rank_ = 0, size_ = 1;
  int greatest_tag_ = 32767;  // the least that MPI promises
  bool owns_ = false;
  std::vector<int> hosts_;
};

}  // namespace
}  // namespace spolia

extern "C" __attribute__((visibility("default"))) const char* spolia_open_transport(
    uint32_t version, spolia::Transport** transport) {
  if (version != spolia::kTransportVersion) return "the plugin belongs to another version of Spolia";
  auto* opened = new (std::nothrow) spolia::MpiTransport;
  if (opened == nullptr) return "there is not enough memory";
  const char* refused = opened->open();
  if (refused == nullptr) {
    *transport = opened;
  } else {
    delete opened;
  }
  return refused;
}
