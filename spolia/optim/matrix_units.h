// The matrices of a parameter, one by one, and what a shard has of each. Pure.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "spolia/layout/layout.h"
#include "spolia/optim/muon.h"

namespace spolia {

/// A matrix that is orthogonalised by itself.
struct MatrixUnit {
  std::vector<Box> boxes;  // of the tensor, one below the other in the matrix
  int64_t rows = 0, columns = 0;
  int64_t work = 0;     // newton_schulz_work()
  RowPart moment_rows;  // its rows among those of all matrices of the tensor
};
/// The matrices of a tensor that have elements: batch by batch, part by part.
std::vector<MatrixUnit> matrix_units(const MatrixRule& rule, std::span<const int64_t> shape);

/// Common elements of a matrix and a rank's shard. Offsets and strides count elements.
struct UnitPiece {
  Dims sizes;
  int64_t local_offset = 0;
  Dims local_strides;
  int64_t unit_offset = 0;
  Dims unit_strides;
};
std::vector<UnitPiece> unit_pieces(const MatrixUnit& unit, const RankShard& shard);

/// Whether such a layout leaves matrices whole, each on one rank of a row: it cuts dims of the batch alone.
bool leaves_whole(const MatrixRule& rule, std::span<const int64_t> shape, const Layout& layout);

/// Copies them from a shard to a dense matrix on the same rank, or back. `width`: bytes of an element.
void copy_pieces(std::span<const UnitPiece> pieces, int64_t width, std::byte* local, std::byte* unit,
                 bool to_unit);
/// Strides of elements as strides of bytes.
Dims in_bytes(Dims strides, int64_t width);

}  // namespace spolia
