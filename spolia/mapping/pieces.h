// Slice algebra: a tensor as pieces of source tensors. Splitting, joining, permuting, reshaping and casting
// change the description; no element is touched.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "spolia/layout/box.h"
#include "spolia/mapping/syntax.h"
#include "spolia/state/region_copy.h"
#include "spolia/tensor/dtype.h"

namespace spolia {

/// The dtypes an element goes through, from the source's to the tensor's own. Steps that lose nothing are
/// merged with the one behind them, so that what is left is shortest: one dtype where nothing happens, two
/// where one cast does it.
using CastChain = InlineVector<DType, 4>;

/// Whether every value of the one dtype is a value of the other.
bool is_lossless(DType from, DType to);

/// The chain with one more cast.
CastChain with_cast(CastChain chain, DType to);

struct Piece {
  uint32_t source = 0;  // which source tensor
  Region region;        // of it and of the tensor; not empty
  CastChain casts;
};

/// A tensor made of pieces that fill it exactly. Immutable once made, and shared.
struct Assembly {
  DType dtype = DType::kFloat32;
  Dims shape;
  std::vector<Piece> pieces;
  /// All of one source as it is. Elements finer than a byte, which have no addresses, can be no more than
  /// that.
  bool sub_byte() const { return is_sub_byte(dtype); }
};
using AssemblyPtr = std::shared_ptr<const Assembly>;

/// Source number `source`, whole.
AssemblyPtr whole_source(uint32_t source, DType dtype, std::span<const int64_t> shape);

/// How many pieces all the assemblies of a mapping may have, together: what a hostile mapping may cost.
class PieceBudget {
 public:
  explicit PieceBudget(int64_t pieces) : left_(pieces) {}
  /// UnsupportedError where the budget is spent.
  void take(int64_t pieces);

 private:
  int64_t left_;
};

// Preconditions (the callers check, and can say where): dims and sizes fit the shapes, dtypes agree.

AssemblyPtr concat_assemblies(std::span<const AssemblyPtr> parts, size_t axis, PieceBudget& budget);
std::vector<AssemblyPtr> split_assembly(const Assembly& whole, size_t axis, std::span<const int64_t> sizes,
                                        PieceBudget& budget);
/// Dim d of the result is dim permute[d].
AssemblyPtr permuted(const Assembly& tensor, std::span<const int64_t> permute, PieceBudget& budget);
AssemblyPtr cast_to(const Assembly& tensor, DType to, PieceBudget& budget);
/// Between [d0, d1, rest...] and [d0 * d1, product of rest]: `canonical` is the one with more dims, and the
/// tensor has the one shape or the other.
AssemblyPtr reshaped(const Assembly& tensor, std::span<const int64_t> canonical, PieceBudget& budget);

/// [d0 * d1, product of the rest]. CorruptError where that overflows.
Dims flat_shape(std::span<const int64_t> canonical);

/// Joins pieces that lie side by side in source and target alike, and puts them in row-major order of where
/// they lie.
void merge_pieces(std::vector<Piece>& pieces);

}  // namespace spolia
