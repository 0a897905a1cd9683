#include "spolia/mapping/pieces.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"

namespace spolia {
namespace {

/// The permute with every dim written out.
Dims explicit_permute(const Region& region) {
  if (!region.permute.empty()) return region.permute;
  Dims permute(region.target.ndim());
  std::iota(permute.begin(), permute.end(), 0);
  return permute;
}

std::shared_ptr<Assembly> empty_like(const Assembly& tensor) {
  auto made = std::make_shared<Assembly>();
  made->dtype = tensor.dtype;
  made->shape = tensor.shape;
  return made;
}

/// Dims of two shapes that hold the same elements: [begin, end) of the many, `flat` of the few.
struct DimGroup {
  size_t begin, end;
  size_t flat;
};

/// The last dim of the group along which there is more than one element: the one that neighbours in the flat
/// dim differ in.
size_t running_dim(const DimGroup& group, std::span<const int64_t> shape) {
  size_t dim = group.end - 1;
  while (dim > group.begin && shape[dim] == 1) --dim;
  return dim;
}

/// Cuts a piece of a tensor of shape `shape` along `dim` into slices of size 1, but at most as the budget
/// allows.
std::vector<Piece> cut_in_slices(const std::vector<Piece>& pieces, size_t dim, PieceBudget& budget) {
  std::vector<Piece> slices;
  for (const Piece& piece : pieces) {
    const Box& target = piece.region.target;
    budget.take(target.sizes[dim]);
    for (int64_t i = 0; i < target.sizes[dim]; ++i) {
      Box slice = target;
      slice.offsets[dim] += i;
      slice.sizes[dim] = 1;
      slices.push_back({piece.source, narrowed(piece.region, slice), piece.casts});
    }
  }
  return slices;
}

/// The piece with the group's dims made one. In all of them but the running one it has size 1.
Region with_dims_merged(const Region& region, std::span<const DimGroup> groups,
                        std::span<const int64_t> shape) {
  const Dims permute = explicit_permute(region);
  Region merged{region.source, {}, {}};
  for (const DimGroup& group : groups) {
    int64_t offset = 0;
    for (size_t d = group.begin; d < group.end; ++d) offset = offset * shape[d] + region.target.offsets[d];
    const size_t running = running_dim(group, shape);
    merged.target.offsets.push_back(offset);
    merged.target.sizes.push_back(region.target.sizes[running]);
    merged.permute.push_back(permute[running]);
  }
  return merged;
}

/// The piece with each flat dim made several. In the flat dims it lies in one row of the running dim.
Region with_dims_parted(const Region& region, std::span<const DimGroup> groups,
                        std::span<const int64_t> shape) {
  const Dims permute = explicit_permute(region);
  Region parted{region.source, {Dims(shape.size()), Dims(shape.size(), 1)}, Dims(shape.size(), -1)};
  for (const DimGroup& group : groups) {
    int64_t rest = region.target.offsets[group.flat];
    for (size_t d = group.end; d-- > group.begin; rest /= shape[d])
      parted.target.offsets[d] = rest % shape[d];
    const size_t running = running_dim(group, shape);
    parted.target.sizes[running] = region.target.sizes[group.flat];
    parted.permute[running] = permute[group.flat];
  }
  return parted;
}

/// Cuts pieces where the flat dim goes from one row of length `row` to the next.
std::vector<Piece> cut_at_rows(const std::vector<Piece>& pieces, size_t flat, int64_t row,
                               PieceBudget& budget) {
  std::vector<Piece> cut;
  for (const Piece& piece : pieces) {
    const Box& target = piece.region.target;
    const int64_t end = target.offsets[flat] + target.sizes[flat];
    for (int64_t begin = target.offsets[flat]; begin < end;) {
      const int64_t next = std::min(end, (begin / row + 1) * row);
      budget.take(1);
      Box part = target;
      part.offsets[flat] = begin;
      part.sizes[flat] = next - begin;
      cut.push_back({piece.source, narrowed(piece.region, part), piece.casts});
      begin = next;
    }
  }
  return cut;
}

/// The dim of the source along which `b` goes on behind `a`, where the target does so along `dim`; or -1. A
/// dim in which a piece is one element wide may stand for any dim of the source that no other does.
int64_t linked_source_dim(const Region& a, const Region& b, size_t dim) {
  const Dims permute = explicit_permute(a), other = explicit_permute(b);
  for (size_t d = 0; d < permute.size(); ++d) {
    if (d != dim && permute[d] != other[d]) return -1;
  }
  if (permute[dim] >= 0 && other[dim] >= 0) return permute[dim] == other[dim] ? permute[dim] : -1;
  if (permute[dim] >= 0 || other[dim] >= 0) return std::max(permute[dim], other[dim]);
  for (size_t s = 0; s < a.source.ndim(); ++s) {
    const bool free = std::ranges::find(permute, static_cast<int64_t>(s)) == permute.end();
    if (free && a.source.offsets[s] + 1 == b.source.offsets[s]) return static_cast<int64_t>(s);
  }
  return -1;
}

/// Makes `a` the union of both where `b` goes on behind it along `dim`, in the source as well.
bool join(Piece& a, const Piece& b, size_t dim) {
  Region& to = a.region;
  const Region& more = b.region;
  if (a.source != b.source || a.casts != b.casts) return false;
  for (size_t d = 0; d < to.target.ndim(); ++d) {
    const int64_t offset = to.target.offsets[d] + (d == dim ? to.target.sizes[d] : 0);
    if (more.target.offsets[d] != offset) return false;
    if (d != dim && more.target.sizes[d] != to.target.sizes[d]) return false;
  }
  const int64_t from = linked_source_dim(to, more, dim);
  if (from < 0) return false;
  for (size_t s = 0; s < to.source.ndim(); ++s) {
    const bool along = static_cast<int64_t>(s) == from;
    if (more.source.offsets[s] != to.source.offsets[s] + (along ? to.source.sizes[s] : 0)) return false;
    if (!along && more.source.sizes[s] != to.source.sizes[s]) return false;
  }
  to.target.sizes[dim] += more.target.sizes[dim];
  to.source.sizes[from] += more.source.sizes[from];
  if (source_dim(to, dim) < 0) to.permute[dim] = from;
  return true;
}

/// In the order of all offsets but the dim's, then of the dim's.
bool lies_before_along(const Piece& a, const Piece& b, size_t dim) {
  const Box &x = a.region.target, &y = b.region.target;
  for (size_t d = 0; d < x.ndim(); ++d) {
    if (d != dim && x.offsets[d] != y.offsets[d]) return x.offsets[d] < y.offsets[d];
  }
  return x.ndim() > dim && x.offsets[dim] < y.offsets[dim];
}

}  // namespace

bool is_lossless(DType from, DType to) {
  if (from == to) return true;
  const bool half = from == DType::kFloat16 || from == DType::kBFloat16;
  return (half && (to == DType::kFloat32 || to == DType::kFloat64)) ||
         (from == DType::kFloat32 && to == DType::kFloat64);
}

CastChain with_cast(CastChain chain, DType to) {
  // What held every value it was given, as cast, is passed over.
  while (chain.size() >= 2 && is_lossless(chain[chain.size() - 2], chain.back())) chain.pop_back();
  if (chain.back() != to) chain.push_back(to);
  return chain;
}

void PieceBudget::take(int64_t pieces) {
  if (pieces > left_) {
    throw UnsupportedError("the mapping cuts its tensors into too many pieces; reshape or split less finely");
  }
  left_ -= pieces;
}

AssemblyPtr whole_source(uint32_t source, DType dtype, std::span<const int64_t> shape) {
  auto made = std::make_shared<Assembly>();
  made->dtype = dtype;
  made->shape = Dims(shape);
  Box box = whole(shape);
  if (!box.empty()) made->pieces.push_back({source, {box, box, {}}, {dtype}});
  return made;
}

AssemblyPtr concat_assemblies(std::span<const AssemblyPtr> parts, size_t axis, PieceBudget& budget) {
  auto made = empty_like(*parts[0]);
  made->shape[axis] = 0;
  for (const AssemblyPtr& part : parts) {
    budget.take(std::ssize(part->pieces));
    for (const Piece& piece : part->pieces) {
      Piece& moved = made->pieces.emplace_back(piece);
      moved.region.target.offsets[axis] += made->shape[axis];
      if (made->pieces.size() > 1 && join(made->pieces[made->pieces.size() - 2], moved, axis)) {
        made->pieces.pop_back();
      }
    }
    made->shape[axis] = checked_add(made->shape[axis], part->shape[axis]);
  }
  return made;
}

std::vector<AssemblyPtr> split_assembly(const Assembly& tensor, size_t axis, std::span<const int64_t> sizes,
                                        PieceBudget& budget) {
  std::vector<std::shared_ptr<Assembly>> parts;
  std::vector<int64_t> begins = {0};
  for (int64_t size : sizes) {
    parts.push_back(empty_like(tensor));
    parts.back()->shape[axis] = size;
    begins.push_back(begins.back() + size);
  }
  for (const Piece& piece : tensor.pieces) {
    const Box& box = piece.region.target;
    const int64_t end = box.offsets[axis] + box.sizes[axis];
    size_t part =
        static_cast<size_t>(std::ranges::upper_bound(begins, box.offsets[axis]) - begins.begin()) - 1;
    for (; part < parts.size() && begins[part] < end; ++part) {
      if (sizes[part] == 0) continue;
      budget.take(1);
      Box inside = box;
      inside.offsets[axis] = std::max(box.offsets[axis], begins[part]);
      inside.sizes[axis] = std::min(end, begins[part + 1]) - inside.offsets[axis];
      Piece& cut =
          parts[part]->pieces.emplace_back(Piece{piece.source, narrowed(piece.region, inside), piece.casts});
      cut.region.target.offsets[axis] -= begins[part];
    }
  }
  return {parts.begin(), parts.end()};
}

AssemblyPtr permuted(const Assembly& tensor, std::span<const int64_t> permute, PieceBudget& budget) {
  auto reordered = [&](const Dims& dims) {
    Dims result;
    for (int64_t d : permute) result.push_back(dims[d]);
    return result;
  };
  auto made = empty_like(tensor);
  made->shape = reordered(tensor.shape);
  budget.take(std::ssize(tensor.pieces));
  for (const Piece& piece : tensor.pieces) {
    const Region& region = piece.region;
    const Box target{reordered(region.target.offsets), reordered(region.target.sizes)};
    made->pieces.push_back(
        {piece.source, {region.source, target, reordered(explicit_permute(region))}, piece.casts});
  }
  return made;
}

AssemblyPtr cast_to(const Assembly& tensor, DType to, PieceBudget& budget) {
  auto made = empty_like(tensor);
  made->dtype = to;
  budget.take(std::ssize(tensor.pieces));
  made->pieces = tensor.pieces;
  for (Piece& piece : made->pieces) piece.casts = with_cast(piece.casts, to);
  return made;
}

Dims flat_shape(std::span<const int64_t> canonical) {
  return {numel(canonical.first(2)), numel(canonical.subspan(2))};
}

AssemblyPtr reshaped(const Assembly& tensor, std::span<const int64_t> canonical, PieceBudget& budget) {
  const bool merging = tensor.shape.size() == canonical.size();
  const DimGroup groups[] = {{0, 2, 0}, {2, canonical.size(), 1}};
  auto made = empty_like(tensor);
  made->shape = merging ? flat_shape(canonical) : Dims(canonical);
  std::vector<Piece> pieces = tensor.pieces;
  for (const DimGroup& group : groups) {
    const size_t running = running_dim(group, canonical);
    if (!merging) {
      pieces = cut_at_rows(pieces, group.flat, canonical[running], budget);
      continue;
    }
    for (size_t d = group.begin; d < group.end; ++d) {
      if (d != running && canonical[d] != 1) pieces = cut_in_slices(pieces, d, budget);
    }
  }
  for (Piece& piece : pieces) {
    piece.region = merging ? with_dims_merged(piece.region, groups, canonical)
                           : with_dims_parted(piece.region, groups, canonical);
  }
  merge_pieces(pieces);
  made->pieces = std::move(pieces);
  return made;
}

void merge_pieces(std::vector<Piece>& pieces) {
  if (pieces.size() < 2) return;
  const size_t ndim = pieces[0].region.target.ndim();
  for (size_t dim = ndim; dim-- > 0;) {
    auto before = [&](const Piece& a, const Piece& b) { return lies_before_along(a, b, dim); };
    if (!std::ranges::is_sorted(pieces, before)) std::ranges::sort(pieces, before);
    size_t kept = 0;
    for (size_t i = 1; i < pieces.size(); ++i) {
      if (!join(pieces[kept], pieces[i], dim)) pieces[++kept] = std::move(pieces[i]);
    }
    pieces.resize(kept + 1);
  }
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.region.target.offsets; });
}

}  // namespace spolia
