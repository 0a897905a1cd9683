// What torch.distributed.checkpoint puts into `__metadata__` of the safetensors files of its ranks: where in
// the whole tensor the part lies that the file holds.
//
//   "DCP_SHARDING_INFO": "{\"w\": {\"saved_offsets\": [2, 0]}, ...}"     a JSON text within a JSON string
//
// The whole tensor's shape is written nowhere.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "spolia/tensor/shape.h"

namespace spolia {

inline constexpr std::string_view kShardingInfoKey = "DCP_SHARDING_INFO";

/// Tensor -> offsets of its part.
using ShardingInfo = std::map<std::string, Dims, std::less<>>;

/// Reads the text of a file's DCP_SHARDING_INFO; `file` is its name, for messages. CorruptError where the
/// text is not of the form above, or names a tensor twice.
ShardingInfo parse_sharding_info(std::string_view json, std::string_view file);

}  // namespace spolia
