#include "spolia/optim/matrix_units.h"

#include <algorithm>

#include "spolia/optim/newton_schulz.h"
#include "spolia/tensor/copy.h"

namespace spolia {

std::vector<MatrixUnit> matrix_units(const MatrixRule& rule, std::span<const int64_t> shape) {
  const MatrixShape matrices = matrix_shape(rule, shape);
  std::vector<MatrixUnit> units;
  if (numel(shape) == 0) return units;
  const std::vector<RowPart> parts =
      rule.parts.empty() ? std::vector<RowPart>{{{0, matrices.rows}}} : rule.parts;
  const size_t row_dim = rule.kind == MatrixKind::kBatch ? shape.size() - 2 : 0;
  const Dims batch_strides = row_major_strides(shape.first(row_dim));
  for (int64_t number = 0; number < matrices.batch; ++number) {
    Box matrix = whole(shape);
    for (size_t d = 0; d < row_dim; ++d) {
      matrix.offsets[d] = number / batch_strides[d] % shape[d];
      matrix.sizes[d] = 1;
    }
    for (const RowPart& part : parts) {
      MatrixUnit unit;
      unit.columns = matrices.columns;
      for (const RowRange& range : part) {
        if (range.begin == range.end) continue;
        Box box = matrix;
        box.offsets[row_dim] = range.begin;
        box.sizes[row_dim] = range.end - range.begin;
        unit.boxes.push_back(std::move(box));
        unit.rows += range.end - range.begin;
        unit.moment_rows.push_back(
            {number * matrices.rows + range.begin, number * matrices.rows + range.end});
      }
      if (unit.rows == 0) continue;
      unit.work = newton_schulz_work(unit.rows, unit.columns);
      units.push_back(std::move(unit));
    }
  }
  return units;
}

std::vector<UnitPiece> unit_pieces(const MatrixUnit& unit, const RankShard& shard) {
  std::vector<UnitPiece> pieces;
  int64_t before = 0;  // elements of the boxes before
  for (const Box& box : unit.boxes) {
    const Dims strides = row_major_strides(box.sizes);
    for (const LocalBox& local : shard.boxes) {
      const Box common = intersect(box, local.global);
      if (common.empty()) continue;
      UnitPiece piece{common.sizes, local.local_offset, local.local_strides, before, strides};
      for (size_t d = 0; d < common.ndim(); ++d) {
        piece.local_offset += (common.offsets[d] - local.global.offsets[d]) * local.local_strides[d];
        piece.unit_offset += (common.offsets[d] - box.offsets[d]) * strides[d];
      }
      pieces.push_back(std::move(piece));
    }
    before += box.numel();
  }
  return pieces;
}

bool leaves_whole(const MatrixRule& rule, std::span<const int64_t> shape, const Layout& layout) {
  if (rule.kind != MatrixKind::kBatch) return false;
  const auto batch_dims = static_cast<int64_t>(shape.size()) - 2;
  const auto placements = layout.placements();
  return std::all_of(placements.begin(), placements.end(), [&](const Placement& given) {
    const Placement placement = normalized(given, shape.size());
    if (const auto* shard = std::get_if<Shard>(&placement)) return shard->dim < batch_dims;
    if (const auto* strided = std::get_if<StridedShard>(&placement)) return strided->dim < batch_dims;
    if (const auto* ragged = std::get_if<RaggedShard>(&placement))
      return std::ssize(ragged->dims) <= batch_dims;
    return true;
  });
}

Dims in_bytes(Dims strides, int64_t width) {
  for (int64_t& stride : strides) stride *= width;
  return strides;
}

void copy_pieces(std::span<const UnitPiece> pieces, int64_t width, std::byte* local, std::byte* unit,
                 bool to_unit) {
  for (const UnitPiece& piece : pieces) {
    const Dims here = in_bytes(piece.local_strides, width), there = in_bytes(piece.unit_strides, width);
    std::byte *a = local + piece.local_offset * width, *b = unit + piece.unit_offset * width;
    if (to_unit) {
      copy_strided(piece.sizes, width, b, there, a, here);
    } else {
      copy_strided(piece.sizes, width, a, here, b, there);
    }
  }
}

}  // namespace spolia
