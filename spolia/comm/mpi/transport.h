// Messages between the processes of a job: all that is asked of MPI, and what the plugin hands out.
//
// Nothing of Spolia's library stands in here, and no exception crosses: the plugin is built against this
// header alone, and the library never sees MPI. Whoever changes it changes kTransportVersion.
#pragma once

#include <cstddef>
#include <cstdint>

namespace spolia {

inline constexpr uint32_t kTransportVersion = 1;

/// Used by one thread, the one that has opened it. Functions return 0, or an error that error_text()
/// explains.
class Transport {
 public:
  /// Messages of one lane do not meet those of the other.
  enum class Lane { kGroups, kControl };
  static constexpr int kAnyone = -1;
  /// More bytes than that do not go into one message.
  static constexpr int64_t kMostBytes = int64_t{1} << 30;

  /// A message on its way.
  struct Request {
    uint64_t handle = 0;
  };

  /// Precondition: closed.
  virtual ~Transport() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  /// Tags are from 0 to this.
  virtual int greatest_tag() const = 0;
  /// Of each rank, the lowest rank on its host.
  virtual const int* hosts() const = 0;

  /// Starts a message. Between two ranks, those of one lane and tag arrive in the order they were sent, in
  /// the order in which they are asked for. The memory is the request's until test() says that it is done.
  virtual int send(Lane lane, const void* data, int64_t bytes, int to, int tag, Request* request) = 0;
  virtual int receive(Lane lane, void* data, int64_t bytes, int from, int tag, Request* request) = 0;
  /// Whether it is done. `bytes`, if given: how many have come, or -1 where it was cancelled.
  virtual int test(Request* request, bool* done, int64_t* bytes) = 0;
  /// Asks for an end of a receive to which nothing has come. It is done when test() says so.
  virtual int cancel(Request* request) = 0;
  /// A message that has come and nobody has asked for yet: who sent it, kAnyone where there is none.
  virtual int probe(Lane lane, int tag, int* from, int64_t* bytes) = 0;

  /// Text for an error, valid until the next call.
  virtual const char* error_text(int error) = 0;
  /// `together`: every rank does it now, and MPI is finalised, if it was initialised here. Else other ranks
  /// may be lost, and MPI is left as it is; the process ends soon.
  virtual void close(bool together) = 0;
  /// Ends all processes of the job.
  virtual void abort(int code) = 0;
};

/// What a plugin exports as `spolia_open_transport`. Opens `*transport` on the calling thread, and is called
/// once. Null where it is fine, else why not: text that stays.
using OpenTransport = const char* (*)(uint32_t version, Transport** transport);
inline constexpr char kOpenTransport[] = "spolia_open_transport";

}  // namespace spolia
