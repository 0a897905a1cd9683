// The `.metadata` file of torch.distributed.checkpoint, read into a catalog.
//
// It is a pickle of a Metadata object: `state_dict_metadata` (each tensor's dtype, shape and chunks; each
// value's name), `planner_data` (the path of each name in the nested state dict) and `storage_data` (for each
// chunk and value the file, offset and length of its item). The pickle is read, never run.
//
// Whether the chunks tile the shapes is not checked here, nor whether the files exist.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <vector>

#include "spolia/state/catalog.h"

namespace spolia {

/// The catalog that `bytes`, the contents of the metadata file at `path`, describe. Its format is "dcp", its
/// root the file's folder, its files in the order in which `storage_data` first names them, as named there.
/// Every item's extent is within 64 bits and every chunk within its tensor's shape.
///
/// A chunk and its item are joined by tensor and offset; where several chunks share an offset, by the index
/// that PyTorch notes as well. Of chunks that were recorded without an item of their own, an empty one is
/// left out, as is a replica of a chunk that has an item.
///
/// Unknown attributes, subclasses of Metadata and transforms of items go into the notes. CorruptError naming
/// the file and tensor: bytes that are no pickle or end early, a chunk without an item or an item without a
/// chunk, two items for one, numbers that are negative, overflow or leave the shape, a name that is there
/// twice. UnsupportedError: layouts other than strided, unknown dtypes and kinds of entries.
///
/// Costs about 1 s a million chunks and, besides `bytes`, 200 bytes a chunk while it runs.
Catalog read_dcp_metadata(std::span<const std::byte> bytes, const std::filesystem::path& path);

/// One catalog of the parts that ranks wrote each for itself (`__0.metadata`, `__1.metadata`, ...), all in
/// one folder. `paths` are the files the parts were read from, for messages. A chunk or value that several
/// ranks recorded is kept as the first one has it. MismatchError, naming both files, where a name's dtype or
/// shape differs, or is a tensor here and a value there. Precondition: as many paths as parts, at least one.
Catalog merge_dcp_metadata(std::vector<Catalog> parts, std::span<const std::filesystem::path> paths);

}  // namespace spolia
