// The functions of NCCL that Spolia uses, as a table: filled from libnccl when it is asked for, or by a test.
//
// Source: NCCL's user guide, version 2.14 and later, which keep these functions and numbers as they are;
// nothing of NCCL is needed to build Spolia. Communicators and streams are opaque pointers, results are ints.
#pragma once

#include <cstddef>

namespace spolia {

// ncclResult_t
inline constexpr int kNcclSuccess = 0;
inline constexpr int kNcclInvalidUsage = 5;
inline constexpr int kNcclRemoteError = 6;
inline constexpr int kNcclInProgress = 7;

/// ncclDataType_t
enum NcclType : int {
  kNcclInt8 = 0,
  kNcclUInt8 = 1,
  kNcclInt32 = 2,
  kNcclUInt32 = 3,
  kNcclInt64 = 4,
  kNcclUInt64 = 5,
  kNcclFloat16 = 6,
  kNcclFloat32 = 7,
  kNcclFloat64 = 8,
  kNcclBFloat16 = 9,
};
/// ncclRedOp_t
enum NcclOp : int { kNcclSum = 0, kNcclMax = 2, kNcclMin = 3 };

/// ncclUniqueId
struct NcclUniqueId {
  char bytes[128] = {};
};

/// ncclConfig_t as it was in 2.17: later versions read the fields that there are.
struct NcclConfig {
  static constexpr int kUndefined = -2147483647 - 1;

  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21700;
  int blocking = 0;
  int cga_cluster_size = kUndefined;
  int min_ctas = kUndefined;
  int max_ctas = kUndefined;
  const char* net_name = nullptr;
};

struct NcclLibrary {
  using Comm = void*;

  int (*get_version)(int* version) = nullptr;
  const char* (*error_text)(int result) = nullptr;
  const char* (*last_error)(Comm comm) = nullptr;

  int (*get_unique_id)(NcclUniqueId* id) = nullptr;
  int (*init)(Comm* comm, int ranks, NcclUniqueId id, int rank, NcclConfig* config) = nullptr;
  int (*finalize)(Comm comm) = nullptr;
  int (*destroy)(Comm comm) = nullptr;
  int (*abort)(Comm comm) = nullptr;
  int (*get_async_error)(Comm comm, int* result) = nullptr;

  int (*group_start)() = nullptr;
  int (*group_end)() = nullptr;
  int (*broadcast)(const void* send, void* receive, size_t count, int type, int root, Comm comm,
                   void* stream) = nullptr;
  int (*all_gather)(const void* send, void* receive, size_t send_count, int type, Comm comm,
                    void* stream) = nullptr;
  int (*all_reduce)(const void* send, void* receive, size_t count, int type, int op, Comm comm,
                    void* stream) = nullptr;
  int (*reduce)(const void* send, void* receive, size_t count, int type, int op, int root, Comm comm,
                void* stream) = nullptr;
  int (*reduce_scatter)(const void* send, void* receive, size_t receive_count, int type, int op, Comm comm,
                        void* stream) = nullptr;
  int (*send)(const void* from, size_t count, int type, int peer, Comm comm, void* stream) = nullptr;
  int (*receive)(void* to, size_t count, int type, int peer, Comm comm, void* stream) = nullptr;
};

/// What libnccl.so.2 gives, loaded by the first call. UnsupportedError that says why where it is not there,
/// or too old. Thread-safe.
const NcclLibrary& nccl_library();

}  // namespace spolia
