// What the name of a file says about the format it belongs to.
#pragma once

#include <string_view>

namespace spolia {

/// Whether a part of a name is digits alone, at least one: the number of a rank or an iteration.
bool is_number(std::string_view text);

/// A file of a DCP folder: `.metadata`, `__0_0.distcp`, `__3.metadata` of one rank.
bool is_dcp_name(std::string_view name);

/// A file of Hugging Face's `pytorch_model*.bin`, or their index.
bool is_torch_bin_name(std::string_view name);

/// What people call the files that torch.save writes: .pt, .pth, .bin, .ckpt.
bool is_torch_name(std::string_view name);

/// A file that belongs to a checkpoint which is a folder: whoever finds nothing but such names in a folder
/// may take it for a checkpoint and no more. A single torch.save file is not enough: it may be anyone's.
bool is_checkpoint_name(std::string_view name);

}  // namespace spolia
