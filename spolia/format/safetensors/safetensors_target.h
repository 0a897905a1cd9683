// A Hugging Face folder of safetensors files, to be written.
#pragma once

#include <cstdint>
#include <memory>

#include "spolia/format/target.h"

namespace spolia {

/// The tensors of `contents`, whole, in its order, as lay_out_hugging_face_folder() places them; its chunks
/// and writers are not looked at. Throws what that throws. No value is kept.
std::unique_ptr<Target> make_safetensors_target(TargetContents contents, int64_t max_shard_bytes);

}  // namespace spolia
