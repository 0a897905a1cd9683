#include "spolia/optim/mesh_tensors.h"

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

std::string packed(const std::vector<MeshTensor>& tensors) {
  Packer packer;
  packer.number(std::ssize(tensors));
  for (const MeshTensor& tensor : tensors) {
    packer.text(tensor.name);
    packer.number(static_cast<int64_t>(tensor.dtype));
    packer.number(static_cast<int64_t>(tensor.update));
    packer.numbers(tensor.shape);
    packer.text(tensor.layout->text());
    packer.number(tensor.frozen);
    packer.number(tensor.row_moments);
    packer.number(tensor.matrices ? static_cast<int64_t>(tensor.matrices->kind) : -1);
    if (!tensor.matrices) continue;
    packer.number(std::ssize(tensor.matrices->parts));
    for (const RowPart& part : tensor.matrices->parts) {
      packer.number(std::ssize(part));
      for (const RowRange& range : part) {
        packer.number(range.begin);
        packer.number(range.end);
      }
    }
  }
  return packer.take();
}

std::vector<MeshTensor> unpacked(std::string_view bytes) {
  Unpacker in(bytes);
  std::map<std::string, std::shared_ptr<const Layout>> layouts;
  std::vector<MeshTensor> tensors(in.count());
  for (MeshTensor& tensor : tensors) {
    tensor.name = in.text();
    tensor.dtype = static_cast<DType>(in.number());
    tensor.update = static_cast<DType>(in.number());
    tensor.shape.resize(in.count());
    for (int64_t& size : tensor.shape) size = in.number();
    const std::string text(in.text());
    std::shared_ptr<const Layout>& layout = layouts[text];
    if (!layout) layout = std::make_shared<const Layout>(parse_layout(text));
    tensor.layout = layout;
    tensor.frozen = in.number() != 0;
    tensor.row_moments = in.number() != 0;
    const int64_t kind = in.number();
    if (kind < 0) continue;
    MatrixRule& rule = tensor.matrices.emplace();
    rule.kind = static_cast<MatrixKind>(kind);
    rule.parts.resize(in.count());
    for (RowPart& part : rule.parts) {
      part.resize(in.count());
      for (RowRange& range : part) {
        range.begin = in.number();
        range.end = in.number();
      }
    }
  }
  return tensors;
}

bool same(const MeshTensor& a, const MeshTensor& b) {
  return a.dtype == b.dtype && a.update == b.update && a.shape == b.shape && *a.layout == *b.layout &&
         a.frozen == b.frozen && a.row_moments == b.row_moments && a.matrices == b.matrices;
}

}  // namespace

std::vector<MeshTensor> tensors_of_all(Group& all, const std::vector<MeshTensor>& own) {
  const std::string text = packed(own);
  const std::vector<int64_t> hashes = all_gather_number(all, static_cast<int64_t>(xxh3_64(bytes_of(text))));
  const int64_t mine = hashes[static_cast<size_t>(all.place())];
  const bool first = std::find(hashes.begin(), hashes.end(), mine) - hashes.begin() == all.place();
  std::vector<MeshTensor> result;
  std::map<std::string, size_t> by_name;
  const std::vector<std::string> texts = all_gather_texts(all, first ? text : "");
  for (size_t place = 0; place < texts.size(); ++place) {
    if (texts[place].empty()) continue;
    for (MeshTensor& tensor : unpacked(texts[place])) {
      const auto [found, fresh] = by_name.emplace(tensor.name, result.size());
      if (fresh) {
        result.push_back(std::move(tensor));
      } else if (!same(result[found->second], tensor)) {
        throw MismatchError("rank {} describes the parameter {} otherwise than a lower rank",
                            all.ranks()[place], quote(tensor.name));
      }
    }
  }
  return result;
}

}  // namespace spolia
