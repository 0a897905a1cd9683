#include "spolia/layout/box.h"

#include <algorithm>
#include <cmath>

#include <fmt/format.h>

#include "spolia/base/checked.h"

namespace spolia {
namespace {

/// `box` with the range [begin, end) in `dim`.
Box with_range(Box box, size_t dim, int64_t begin, int64_t end) {
  box.offsets[dim] = begin;
  box.sizes[dim] = end - begin;
  return box;
}

}  // namespace

bool Box::empty() const { return std::ranges::find(sizes, 0) != sizes.end(); }

int64_t Box::numel() const { return spolia::numel(sizes); }

Box whole(std::span<const int64_t> shape) { return {Dims(shape.size(), 0), Dims(shape)}; }

std::string box_text(const Box& box) {
  return fmt::format("{} + {}", list_text(box.offsets), list_text(box.sizes));
}

bool fits(std::span<const int64_t> offsets, std::span<const int64_t> sizes, std::span<const int64_t> shape) {
  if (offsets.size() != shape.size() || sizes.size() != shape.size()) return false;
  for (size_t d = 0; d < shape.size(); ++d) {
    if (offsets[d] < 0 || sizes[d] < 0 || sizes[d] > shape[d]) return false;
    if (offsets[d] > shape[d] - sizes[d]) return false;
  }
  return true;
}

bool contains(const Box& outer, const Box& inner) {
  if (inner.empty()) return true;
  for (size_t d = 0; d < outer.ndim(); ++d) {
    if (inner.offsets[d] < outer.offsets[d]) return false;
    if (inner.offsets[d] + inner.sizes[d] > outer.offsets[d] + outer.sizes[d]) return false;
  }
  return true;
}

Box intersect(const Box& a, const Box& b) {
  Box common = a;
  for (size_t d = 0; d < a.ndim(); ++d) {
    int64_t begin = std::max(a.offsets[d], b.offsets[d]);
    int64_t end = std::min(a.offsets[d] + a.sizes[d], b.offsets[d] + b.sizes[d]);
    common.offsets[d] = begin;
    common.sizes[d] = std::max<int64_t>(end - begin, 0);
  }
  return common;
}

std::vector<Box> subtract(const Box& a, const Box& b) {
  if (a.empty()) return {};
  Box common = intersect(a, b);
  if (common.empty()) return {a};

  // Peel off what lies before and after the common box, a dim at a time; `core` is what is left to peel.
  // The parts before come out in rising order of their offsets, the parts after in falling order.
  std::vector<Box> before, after;
  Box core = a;
  for (size_t d = 0; d < a.ndim(); ++d) {
    int64_t begin = common.offsets[d], end = begin + common.sizes[d];
    int64_t core_end = core.offsets[d] + core.sizes[d];
    if (core.offsets[d] < begin) before.push_back(with_range(core, d, core.offsets[d], begin));
    if (end < core_end) after.push_back(with_range(core, d, end, core_end));
    core = with_range(core, d, begin, end);
  }
  before.insert(before.end(), after.rbegin(), after.rend());
  return before;
}

std::vector<Box> split(const Box& box, size_t dim, int64_t size) {
  std::vector<Box> pieces;
  int64_t left = box.sizes[dim];
  for (int64_t begin = box.offsets[dim]; left > 0;) {
    int64_t taken = std::min(left, size);
    pieces.push_back(with_range(box, dim, begin, begin + taken));
    begin += taken;
    left -= taken;
  }
  return pieces;
}

std::vector<Box> split_row_major(const Box& box, int64_t elements) {
  if (box.empty()) return {};
  Dims slices = row_major_strides(box.sizes);  // the elements of one slice of each dim
  size_t dim = 0;
  while (dim < box.ndim() && slices[dim] > elements) ++dim;
  if (dim == box.ndim()) return {box};  // 0-d: the innermost slice of any other box is one element

  // One row of slices for each index of the dims before `dim`, counted up like an odometer.
  std::vector<Box> pieces;
  Box row = box;
  for (size_t d = 0; d < dim; ++d) row.sizes[d] = 1;
  while (true) {
    std::ranges::copy(split(row, dim, elements / slices[dim]), std::back_inserter(pieces));
    size_t d = dim;
    while (d > 0 && ++row.offsets[d - 1] == box.offsets[d - 1] + box.sizes[d - 1]) {
      row.offsets[d - 1] = box.offsets[d - 1];
      --d;
    }
    if (d == 0) return pieces;
  }
}

std::vector<Box> split_in_blocks(const Box& box, size_t dim, int64_t elements) {
  if (box.empty()) return {};
  const size_t last = box.ndim() - 1;
  Dims block(box.ndim(), 1);
  int64_t room = elements;
  auto grow = [&](size_t d, int64_t most) {
    block[d] = std::clamp<int64_t>(most, 1, box.sizes[d]);
    room = std::max<int64_t>(room / block[d], 1);
  };
  constexpr int64_t kShort = 512;
  const auto side = static_cast<int64_t>(std::sqrt(static_cast<double>(elements)));
  const int64_t least = std::min({kShort, side, box.sizes[dim]});
  grow(last, ceil_div(box.sizes[last], ceil_div(box.sizes[last], elements / least)));  // alike in length
  grow(dim, room);
  for (size_t d = box.ndim(); d-- > 0;) {
    if (d != dim && d != last) grow(d, room);
  }
  std::vector<Box> blocks = {box};
  for (size_t d = 0; d < box.ndim(); ++d) {
    std::vector<Box> finer;
    for (const Box& wide : blocks) std::ranges::copy(split(wide, d, block[d]), std::back_inserter(finer));
    blocks = std::move(finer);
  }
  return blocks;
}

std::vector<Box> boxes_of_flat_range(std::span<const int64_t> shape, int64_t begin, int64_t end) {
  if (begin >= end) return {};
  if (shape.empty()) return {Box{}};

  // From `begin` on, always the largest run of whole slices that starts here: slices grow until the outermost
  // dim that the range spans, then shrink towards `end`.
  Dims slices = row_major_strides(shape);
  std::vector<Box> boxes;
  while (begin < end) {
    size_t dim = 0;
    while (begin % slices[dim] != 0 || slices[dim] > end - begin) ++dim;  // a slice of the last dim has 1
    Box box = whole(shape);
    for (size_t d = 0; d <= dim; ++d) {
      box.offsets[d] = begin / slices[d] % shape[d];
      box.sizes[d] = 1;
    }
    box.sizes[dim] = std::min((end - begin) / slices[dim], shape[dim] - box.offsets[dim]);
    begin += box.sizes[dim] * slices[dim];
    boxes.push_back(std::move(box));
  }
  return boxes;
}

void BoxList::add(std::span<const int64_t> offsets, std::span<const int64_t> sizes) {
  numbers_.insert(numbers_.end(), offsets.begin(), offsets.end());
  numbers_.insert(numbers_.end(), sizes.begin(), sizes.end());
  ++count_;
}

}  // namespace spolia
