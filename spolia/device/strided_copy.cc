#include "spolia/device/strided_copy.h"

#include <algorithm>
#include <vector>

namespace spolia {
namespace {

struct Dim {
  int64_t size = 1, dst = 0, src = 0;
};

/// Takes a dim whose steps are as long as the run so far on both sides; false where there is none.
bool lengthen(std::vector<Dim>& dims, int64_t& run) {
  const auto at =
      std::ranges::find_if(dims, [&](const Dim& dim) { return dim.dst == run && dim.src == run; });
  if (at == dims.end()) return false;
  run *= at->size;
  dims.erase(at);
  return true;
}

/// Takes the longest dim whose rows do not overlap on either side; else a dim of one.
Dim take_rows(std::vector<Dim>& dims, int64_t run) {
  auto best = dims.end();
  for (auto at = dims.begin(); at != dims.end(); ++at) {
    if (std::min(at->dst, at->src) >= run && (best == dims.end() || at->size > best->size)) best = at;
  }
  if (best == dims.end()) return {1, run, run};
  const Dim rows = *best;
  dims.erase(best);
  return rows;
}

}  // namespace

void copy_strided_on(const DeviceBackend& device, std::span<const int64_t> sizes, int64_t element_bytes,
                     std::byte* dst, std::span<const int64_t> dst_strides, const std::byte* src,
                     std::span<const int64_t> src_strides) {
  std::vector<Dim> dims;
  for (size_t d = 0; d < sizes.size(); ++d) {
    if (sizes[d] == 0) return;
    if (sizes[d] == 1) continue;
    Dim dim{sizes[d], dst_strides[d], src_strides[d]};
    if (dim.dst < 0 && dim.src <= 0) {  // from the other end
      dst += (dim.size - 1) * dim.dst;
      src += (dim.size - 1) * dim.src;
      dim.dst = -dim.dst;
      dim.src = -dim.src;
    }
    dims.push_back(dim);
  }
  int64_t run = element_bytes;
  while (lengthen(dims, run)) {
  }
  const Dim rows = take_rows(dims, run);
  std::vector<int64_t> index(dims.size(), 0);
  while (true) {
    device.copy_rows(dst, rows.dst, src, rows.src, run, rows.size);
    size_t d = dims.size();
    while (d > 0) {
      const Dim& dim = dims[d - 1];
      dst += dim.dst;
      src += dim.src;
      if (++index[d - 1] < dim.size) break;
      dst -= dim.dst * dim.size;
      src -= dim.src * dim.size;
      index[--d] = 0;
    }
    if (d == 0) return;
  }
}

}  // namespace spolia
