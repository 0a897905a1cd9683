// Folders of per-rank torch.save files, whose names differ in a rank's number alone:
// model_world_size_2_rank_0.pt, model_world_size_2_rank_1.pt; rank0.pt, rank1.pt, ...
//
// A DTensor's parts come from all ranks: its layout says which boxes a rank's local tensor holds. Of
// replicas the one of the lowest rank is taken. A plain tensor is taken from the lowest rank that has it; its
// dtype and shape must be the same everywhere. Where a plain tensor's bytes differ between ranks (a random
// generator's state, say) that is noted; but where no file has a DTensor it is refused, since then nobody
// says how the ranks' tensors belong together.
//
// Several kinds of file in one folder (model_*, optim_*, extra_state_*) are told apart by their names'
// beginning, which becomes the first key: "model.", "optim.", "extra_state.". One kind alone gets none.
#pragma once

#include <filesystem>
#include <memory>
#include <string_view>

#include "spolia/format/source.h"

namespace spolia {

/// Whether a file's name is one of these: a number follows its last "rank", then .pt, .pth, .bin or .ckpt.
bool is_rank_file_name(std::string_view name);

/// CorruptError where a rank's file is missing. MismatchError, naming tensor and file, where files disagree,
/// or a local tensor has another shape than its layout says. UnsupportedError for Partial DTensors.
std::unique_ptr<Source> open_rank_files(std::shared_ptr<const Store> store,
                                        const std::filesystem::path& folder);

}  // namespace spolia
