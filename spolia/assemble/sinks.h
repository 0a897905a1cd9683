// Where a stream goes: memory, or a folder of safetensors. A callback is for_each_item() (assembler.h).
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

#include "spolia/assemble/assembler.h"
#include "spolia/base/report.h"
#include "spolia/checkpoint/staged_folder.h"

namespace spolia {

/// A whole tensor in the host's memory.
struct StreamedTensor {
  DType dtype = DType::kFloat32;
  Dims shape;
  Buffer memory;  // dense
};

/// Pulls to the end and keeps everything, also what comes in pieces. Collective, as next() is.
std::map<std::string, StreamedTensor> stream_to_memory(Assembler& assembler);

/// Which ranks write a folder.
enum class Writers : uint8_t {
  kOne,  // the grid's first rank, to which everything is sent
  kAll,  // each some of the files, balanced by their bytes; nothing is sent to a rank that does not write it
};

struct SafetensorsOptions {
  Writers writers = Writers::kAll;
  int64_t max_shard_bytes = 5'000'000'000;  // of tensors in a file; smaller ones where ranks would have none
  Existing existing = Existing::kRefuse;
  bool durable = true;
};

/// The groups of a stream (Assembler's): one, or the row's and the column's.
struct StreamEnds {
  Group* row = nullptr;     // or the only group
  Group* column = nullptr;  // nullptr: there is one group
};

/// Streams whole tensors into a Hugging Face folder, which appears under `destination` when it is whole.
/// Collective; every rank sees one file system. Outputs larger than the memory are written in pieces.
/// `options` say nothing of names and parts. Throws on all ranks what one throws, and leaves nothing then.
Report stream_to_safetensors(const StreamEnds& groups, const StateDict& state, AssemblerOptions options,
                             Store& store, const std::filesystem::path& destination,
                             const SafetensorsOptions& how = {});

}  // namespace spolia
