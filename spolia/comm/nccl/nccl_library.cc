#include "spolia/comm/nccl/nccl_library.h"

#include "spolia/base/error.h"
#include "spolia/device/dynamic_library.h"

namespace spolia {
namespace {

constexpr int kOldestVersion = 21700;

NcclLibrary load() {
  const DynamicLibrary nccl("NCCL", {"libnccl.so.2"});
  NcclLibrary library;
  nccl.find("ncclGetVersion", library.get_version);
  int version = 0;
  if (library.get_version(&version) != kNcclSuccess || version < kOldestVersion) {
    throw UnsupportedError("NCCL is too old: version {}, and it has to be 2.17 ({}) or later", version,
                           kOldestVersion);
  }
  nccl.find("ncclGetErrorString", library.error_text);
  nccl.find("ncclGetLastError", library.last_error);
  nccl.find("ncclGetUniqueId", library.get_unique_id);
  nccl.find("ncclCommInitRankConfig", library.init);
  nccl.find("ncclCommFinalize", library.finalize);
  nccl.find("ncclCommDestroy", library.destroy);
  nccl.find("ncclCommAbort", library.abort);
  nccl.find("ncclCommGetAsyncError", library.get_async_error);
  nccl.find("ncclGroupStart", library.group_start);
  nccl.find("ncclGroupEnd", library.group_end);
  nccl.find("ncclBroadcast", library.broadcast);
  nccl.find("ncclAllGather", library.all_gather);
  nccl.find("ncclAllReduce", library.all_reduce);
  nccl.find("ncclReduce", library.reduce);
  nccl.find("ncclReduceScatter", library.reduce_scatter);
  nccl.find("ncclSend", library.send);
  nccl.find("ncclRecv", library.receive);
  return library;
}

}  // namespace

const NcclLibrary& nccl_library() {
  static const NcclLibrary loaded = load();  // where it throws, the next call tries again
  return loaded;
}

}  // namespace spolia
