// Checkpoints to measure on, of any size, as PyTorch's torch.distributed.checkpoint lays them out: a
// `.metadata` pickle and a data file a rank, in which each chunk is a torch.save archive with its CRCs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include "spolia/tensor/shape.h"

namespace spolia::bench {

struct NamedShape {
  std::string name;
  Dims shape;
};

/// The weights of a llama-like model of about `bytes` bytes of float32 in 8 layers.
std::vector<NamedShape> llama_like_shapes(int64_t bytes);

/// `count` vectors of `bytes` bytes of float32 each.
std::vector<NamedShape> small_shapes(int64_t count, int64_t bytes);

enum class Sharding {
  kRows,     // dim 0 over the ranks
  kColumns,  // dim 1 over the ranks; vectors by dim 0
  kWhole,    // each tensor whole, on one rank after the other
};

/// Writes the checkpoint, random float32 bits, into the new folder `path`, and gives the bytes of its
/// tensors. The same arguments give the same bytes.
int64_t make_dcp(const std::filesystem::path& path, const std::vector<NamedShape>& tensors, Sharding sharding,
                 int64_t ranks);

}  // namespace spolia::bench
