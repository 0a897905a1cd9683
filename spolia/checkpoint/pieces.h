// Pieces: boxes of tensors, each treated as a tensor of its own.
//
// A rank that saves or loads moves some boxes of each tensor and does not see the rest. So its catalogs list
// those boxes as whole tensors, and plans prove of them what they prove of any: that each is filled exactly.
// Pieces of one tensor have its name, so that nothing can be found by name in such a catalog.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "spolia/format/source.h"
#include "spolia/format/target.h"
#include "spolia/tensor/view.h"

namespace spolia {

/// Some chunks of a target, as tensors of one chunk each, in the same files. The target outlives it.
class PieceTarget final : public Target {
 public:
  struct Piece {
    size_t tensor = 0;  // of the target's catalog
    size_t chunk = 0;   // of that tensor
  };
  PieceTarget(const Target& whole, std::vector<Piece> pieces);

  std::span<const Piece> pieces() const { return pieces_; }
  /// Puts the checksums of pieces where those of the target's chunks belong.
  void put_checksums(const BlockChecksums& of_pieces, BlockChecksums& of_target) const;

  int64_t checksum_block() const override { return whole_.checksum_block(); }
  Frame frame(size_t tensor, size_t chunk, std::span<const uint32_t> checksums) const override;
  /// The target's own, which knows all of it.
  std::string finish_file(uint32_t file, const BlockChecksums& checksums, OutputFile& open_file,
                          OutputFolder& folder) const override;
  std::vector<std::string> finish(const Source& source, std::span<const std::string> finished,
                                  OutputFile* first, OutputFolder& folder) const override;

 private:
  const Target& whole_;
  std::vector<Piece> pieces_;
};

/// Memory as a source: its tensors are views, each a whole tensor stored in "files" that are the memory.
struct MemoryTensor {
  std::string name;
  View memory;
};

/// `values` are handed out as they are. The memory is read while the source is used. InvalidArgumentError,
/// naming the tensor, for a stride that is negative or no multiple of the element.
std::unique_ptr<Source> source_in_memory(std::vector<MemoryTensor> tensors, std::vector<ValueEntry> values);

/// The view of `box` in a view that holds the box `all`. Precondition: contains(all, box).
View view_of_box(const View& memory, const Box& all, const Box& box);

}  // namespace spolia
