#include "spolia/checkpoint/description.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/value_text.h"
#include "spolia/comm/exchange.h"
#include "spolia/layout/coverage.h"
#include "spolia/layout/layout_text.h"
#include "spolia/tensor/copy.h"

namespace spolia {
namespace {

void pack(Packer& out, const KeyPath& path) {
  out.number(std::ssize(path));
  for (const PathKey& key : path) {
    const std::string* name = std::get_if<std::string>(&key);
    out.number(name != nullptr ? 1 : 0);
    name != nullptr ? out.text(*name) : out.number(std::get<int64_t>(key));
  }
}

KeyPath unpack_path(Unpacker& in) {
  KeyPath path;
  for (size_t left = in.count(); left > 0; --left) {
    if (in.number() != 0) {
      path.emplace_back(std::string(in.text()));
    } else {
      path.emplace_back(in.number());
    }
  }
  return path;
}

Dims unpack_dims(Unpacker& in) {
  Dims dims;
  for (size_t left = in.count(); left > 0; --left) {
    dims.push_back(in.number());
    if (dims.back() < 0) throw CorruptError("what a rank sent has a size of {}", dims.back());
  }
  return dims;
}

std::shared_ptr<const Layout> unpack_layout(Unpacker& in) {
  try {
    return std::make_shared<const Layout>(parse_layout(in.text()));
  } catch (const InvalidArgumentError& error) {
    throw CorruptError("what a rank sent has no layout: {}", error.what());
  }
}

DType dtype_of(std::string_view name) {
  if (const auto dtype = dtype_from_name(name)) return *dtype;
  throw CorruptError("a rank has a tensor of the dtype {}, which is not known here", quote(name));
}

bool same_layout(const std::shared_ptr<const Layout>& a, const std::shared_ptr<const Layout>& b) {
  return a == b || (a != nullptr && b != nullptr && *a == *b);
}

bool is_whole(const DescribedTensor& tensor) {
  return tensor.layout == nullptr && tensor.box == whole(tensor.shape);
}

/// A hash of the elements, whatever their strides; never 0.
uint64_t hash_of(const View& memory) {
  std::vector<std::byte> dense;
  std::span<const std::byte> bytes(memory.data, static_cast<size_t>(memory.bytes()));
  if (!memory.is_dense()) {
    dense.resize(bytes.size());
    const View target = dense_view(dense.data(), memory.dtype, memory.shape);
    copy_strided(memory.shape, element_bytes(memory.dtype), dense.data(), target.strides, memory.data,
                 memory.strides);
    bytes = dense;
  }
  return std::max<uint64_t>(xxh3_64(bytes), 1);
}

std::string hash_of(std::string_view text) {
  Sha256 hash;
  hash.update(bytes_of(text));
  return hash.finish_hex();
}

uint64_t hash_of(const Value& value) {
  const std::string text = value_text(value).value_or(value.text());
  return std::max<uint64_t>(xxh3_64(bytes_of(text)), 1);
}

DescribedTensor describe_tensor(const StateDict::Entry& entry, const LocalTensor& tensor, int64_t rank,
                                const DescribeOptions& options) {
  tensor.pieces(rank);  // checks them
  DescribedTensor described{
      entry.name, entry.path, tensor.memory.dtype, tensor.shape, tensor.requires_grad, false, tensor.layout,
      {},         0};
  described.on_device = !backend_of(tensor.memory.device).host_accessible();
  if (tensor.layout == nullptr) described.box = tensor.box ? *tensor.box : whole(tensor.shape);
  const bool compared = options.contents && is_whole(described) && !described.on_device &&
                        tensor.memory.bytes() <= options.hashed_bytes;
  if (compared) described.contents = hash_of(tensor.memory);
  return described;
}

}  // namespace

bool operator==(const DescribedTensor& a, const DescribedTensor& b) {
  return a.name == b.name && a.path == b.path && a.dtype == b.dtype && a.shape == b.shape &&
         a.requires_grad == b.requires_grad && a.on_device == b.on_device &&
         same_layout(a.layout, b.layout) && a.box == b.box && a.contents == b.contents;
}

Description describe(const StateDict& state, int64_t rank, const DescribeOptions& options) {
  Description description;
  for (const StateDict::Entry& entry : state.entries()) {
    if (const LocalTensor* tensor = entry.tensor()) {
      try {
        description.tensors.push_back(describe_tensor(entry, *tensor, rank, options));
      } catch (const Error& error) {
        rethrow_with_context(error, fmt::format("tensor {}", quote(entry.name)));
      }
    } else {
      const uint64_t contents = options.contents ? hash_of(*entry.value()) : 0;
      description.values.push_back({entry.name, entry.path, contents});
    }
  }
  std::ranges::sort(description.tensors, {}, &DescribedTensor::name);
  std::ranges::sort(description.values, {}, &DescribedValue::name);
  return description;
}

std::string encode(const Description& description) {
  // Most tensors share a few layouts.
  std::map<std::string, int64_t> layouts;
  std::map<const Layout*, int64_t> numbers;
  Packer layout_texts;
  for (const DescribedTensor& tensor : description.tensors) {
    if (tensor.layout == nullptr || numbers.contains(tensor.layout.get())) continue;
    const auto [at, fresh] = layouts.try_emplace(tensor.layout->text(), std::ssize(layouts));
    if (fresh) layout_texts.text(at->first);
    numbers[tensor.layout.get()] = at->second;
  }
  Packer out;
  out.number(std::ssize(layouts));
  std::string head = out.take() + layout_texts.take();
  out.number(std::ssize(description.tensors));
  for (const DescribedTensor& tensor : description.tensors) {
    out.text(tensor.name);
    pack(out, tensor.path);
    out.text(name_of(tensor.dtype));
    out.numbers(tensor.shape);
    out.number((tensor.requires_grad ? 1 : 0) + (tensor.on_device ? 2 : 0));
    out.number(tensor.layout == nullptr ? -1 : numbers.at(tensor.layout.get()));
    if (tensor.layout == nullptr) {
      out.numbers(tensor.box.offsets);
      out.numbers(tensor.box.sizes);
    }
    out.number(static_cast<int64_t>(tensor.contents));
  }
  out.number(std::ssize(description.values));
  for (const DescribedValue& value : description.values) {
    out.text(value.name);
    pack(out, value.path);
    out.number(static_cast<int64_t>(value.contents));
  }
  return head + out.take();
}

Description decode_description(std::string_view bytes) {
  Unpacker in(bytes);
  std::vector<std::shared_ptr<const Layout>> layouts;
  for (size_t left = in.count(); left > 0; --left) layouts.push_back(unpack_layout(in));
  Description description;
  for (size_t left = in.count(); left > 0; --left) {
    DescribedTensor& tensor = description.tensors.emplace_back();
    tensor.name = in.text();
    tensor.path = unpack_path(in);
    tensor.dtype = dtype_of(in.text());
    tensor.shape = unpack_dims(in);
    byte_size(tensor.dtype, tensor.shape);  // checks it
    const int64_t flags = in.number();
    tensor.requires_grad = (flags & 1) != 0;
    tensor.on_device = (flags & 2) != 0;
    const int64_t layout = in.number();
    if (layout >= std::ssize(layouts))
      throw CorruptError("a rank has a tensor with a layout that it did not send");
    if (layout < 0) {
      tensor.box.offsets = unpack_dims(in);
      tensor.box.sizes = unpack_dims(in);
      if (!fits(tensor.box.offsets, tensor.box.sizes, tensor.shape)) {
        throw CorruptError("a rank has a box of tensor {} that leaves its shape", quote(tensor.name));
      }
    } else {
      tensor.layout = layouts[static_cast<size_t>(layout)];
    }
    tensor.contents = static_cast<uint64_t>(in.number());
  }
  for (size_t left = in.count(); left > 0; --left) {
    DescribedValue& value = description.values.emplace_back();
    value.name = in.text();
    value.path = unpack_path(in);
    value.contents = static_cast<uint64_t>(in.number());
  }
  in.end();
  return description;
}

int64_t Descriptions::first_rank(uint32_t description) const {
  return std::ranges::find(of_rank, description) - of_rank.begin();
}

Descriptions exchange_descriptions(Group& group, const Description& own) {
  Description structure = own;
  for (DescribedTensor& tensor : structure.tensors) tensor.contents = 0;
  for (DescribedValue& value : structure.values) value.contents = 0;
  const std::string text = encode(own);
  const std::vector<std::string> hashes = all_gather_texts(group, hash_of(encode(structure)) + hash_of(text));

  Descriptions descriptions;
  std::map<std::string_view, uint32_t> numbers;
  std::vector<int64_t> first;
  std::string structures;
  for (size_t rank = 0; rank < hashes.size(); ++rank) {
    const auto [at, fresh] = numbers.try_emplace(hashes[rank], static_cast<uint32_t>(numbers.size()));
    if (fresh) first.push_back(static_cast<int64_t>(rank));
    descriptions.of_rank.push_back(at->second);
    structures += hashes[rank].substr(0, hashes[rank].size() / 2);
  }
  descriptions.fingerprint = hash_of(structures);
  if (first.size() == 1) {
    descriptions.distinct.push_back(own);
    return descriptions;
  }
  const bool sends = first[descriptions.of_rank[static_cast<size_t>(group.place())]] == group.place();
  const std::vector<std::string> texts = all_gather_texts(group, sends ? std::string_view(text) : "");
  for (int64_t rank : first) {
    descriptions.distinct.push_back(decode_description(texts[static_cast<size_t>(rank)]));
  }
  return descriptions;
}

namespace {

/// Joins what distinct descriptions say of one tensor.
class Joiner {
 public:
  explicit Joiner(const Descriptions& descriptions)
      : descriptions_(descriptions), ranks_(descriptions.distinct.size()) {
    for (size_t rank = 0; rank < descriptions.of_rank.size(); ++rank) {
      ranks_[descriptions.of_rank[rank]].push_back(static_cast<int64_t>(rank));
    }
  }

  struct Said {
    uint32_t by;  // which description
    const DescribedTensor* tensor;
  };

  SharedTensor join(std::span<const Said> all, Purpose purpose) const {
    const Said& first = all.front();
    for (const Said& other : all.subspan(1)) compare(first, other);
    SharedTensor shared{first.tensor->dtype, first.tensor->shape, first.tensor->layout, {}};
    if (shared.layout != nullptr) {
      check_layout(first, all);
    } else {
      shared.boxes = held_boxes(all);
      if (purpose == Purpose::kSave) check_boxes(first, shared);
    }
    return shared;
  }

 private:
  int64_t rank_of(const Said& said) const { return ranks_[said.by].front(); }

  void compare(const Said& a, const Said& b) const {
    const DescribedTensor &x = *a.tensor, &y = *b.tensor;
    auto differ = [&](std::string_view what, const std::string& has_a, const std::string& has_b) {
      throw MismatchError("tensor {}: rank {} has the {} {}, rank {} {}", quote(x.name), rank_of(a), what,
                          has_a, rank_of(b), has_b);
    };
    if (x.dtype != y.dtype) differ("dtype", std::string(name_of(x.dtype)), std::string(name_of(y.dtype)));
    if (x.shape != y.shape) differ("shape", list_text(x.shape), list_text(y.shape));
    if (!same_layout(x.layout, y.layout)) differ("layout", layout_text(x), layout_text(y));
    if (x.contents != y.contents && x.contents != 0 && y.contents != 0 && is_whole(x) && is_whole(y)) {
      throw MismatchError(
          "tensor {} is not the same on all ranks: ranks {} and {} have other bytes. Give it a layout, or "
          "keep it under a name for each rank (rank_keyed)",
          quote(x.name), rank_of(a), rank_of(b));
    }
  }

  static std::string layout_text(const DescribedTensor& tensor) {
    if (tensor.layout != nullptr) return tensor.layout->text();
    return is_whole(tensor) ? "of a whole tensor" : "of a box";
  }

  /// Every rank of the mesh is there and has the tensor.
  void check_layout(const Said& first, std::span<const Said> all) const {
    const DescribedTensor& tensor = *first.tensor;
    const Layout& layout = *tensor.layout;
    if (layout.is_partial()) {
      throw InvalidArgumentError(
          "tensor {}: its layout {} holds operands of a sum or the like; reduce them first",
          quote(tensor.name), layout.text());
    }
    std::set<uint32_t> has_it;
    for (const Said& said : all) has_it.insert(said.by);
    for (int64_t rank : layout.mesh().ranks()) {
      if (rank >= descriptions_.ranks()) {
        throw InvalidArgumentError("tensor {}: its layout {} speaks of rank {}, but the job has {} ranks",
                                   quote(tensor.name), layout.text(), rank, descriptions_.ranks());
      }
      if (has_it.contains(descriptions_.of_rank[static_cast<size_t>(rank)])) continue;
      throw MismatchError("tensor {}: its layout {} on rank {} gives a part of it to rank {}, which has none",
                          quote(tensor.name), layout.text(), rank_of(first), rank);
    }
  }

  std::vector<HeldBox> held_boxes(std::span<const Said> all) const {
    std::vector<HeldBox> boxes;
    std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, size_t> known;
    for (const Said& said : all) {
      const Box& box = said.tensor->box;
      const auto [at, fresh] = known.try_emplace(
          {{box.offsets.begin(), box.offsets.end()}, {box.sizes.begin(), box.sizes.end()}}, boxes.size());
      if (fresh) boxes.push_back({box, {}});
      std::vector<int64_t>& ranks = boxes[at->second].ranks;
      ranks.insert(ranks.end(), ranks_[said.by].begin(), ranks_[said.by].end());
    }
    for (HeldBox& held : boxes) std::ranges::sort(held.ranks);
    return boxes;
  }

  void check_boxes(const Said& first, const SharedTensor& shared) const {
    BoxList boxes(shared.shape.size());
    for (const HeldBox& held : shared.boxes) boxes.add(held.box);
    const Coverage coverage = check_coverage(boxes, shared.shape);
    if (!coverage.fault) return;
    const CoverageFault& fault = *coverage.fault;
    const std::string& name = first.tensor->name;
    if (fault.kind == FaultKind::kGap) {
      throw MismatchError("tensor {}: no rank has the box {} of the shape {}", quote(name),
                          box_text(fault.box), list_text(shared.shape));
    }
    throw MismatchError(
        "tensor {}: the box {} of rank {} and the box {} of rank {} overlap; ranks hold equal "
        "boxes or disjoint ones",
        quote(name), box_text(shared.boxes[fault.first].box), shared.boxes[fault.first].ranks.front(),
        box_text(shared.boxes[fault.second].box), shared.boxes[fault.second].ranks.front());
  }

  const Descriptions& descriptions_;
  std::vector<std::vector<int64_t>> ranks_;  // of each description
};

}  // namespace

JobState join(const Descriptions& descriptions, Purpose purpose) {
  const Joiner joiner(descriptions);
  struct Entry {
    std::vector<Joiner::Said> tensors;
    std::vector<std::pair<uint32_t, const DescribedValue*>> values;
  };
  std::map<std::string_view, Entry> entries;
  for (uint32_t d = 0; d < descriptions.distinct.size(); ++d) {
    for (const DescribedTensor& tensor : descriptions.distinct[d].tensors) {
      entries[tensor.name].tensors.push_back({d, &tensor});
    }
    for (const DescribedValue& value : descriptions.distinct[d].values) {
      entries[value.name].values.emplace_back(d, &value);
    }
  }

  JobState state;
  for (const auto& [name, entry] : entries) {
    if (!entry.tensors.empty() && !entry.values.empty()) {
      throw MismatchError("{} is a tensor on rank {} and a value on rank {}", quote(name),
                          descriptions.first_rank(entry.tensors.front().by),
                          descriptions.first_rank(entry.values.front().first));
    }
    if (!entry.tensors.empty()) {
      const DescribedTensor& first = *entry.tensors.front().tensor;
      const bool on_device =
          std::ranges::any_of(entry.tensors, [](const auto& said) { return said.tensor->on_device; });
      state.tensors.push_back({first.name, first.path, first.requires_grad, on_device});
      state.shared.push_back(joiner.join(entry.tensors, purpose));
      continue;
    }
    const auto& [by, first] = entry.values.front();
    for (const auto& [other_by, other] : entry.values) {
      if (other->contents == first->contents) continue;
      throw MismatchError(
          "value {} is not the same on ranks {} and {}. Keep it under a name for each rank (rank_keyed)",
          quote(name), descriptions.first_rank(by), descriptions.first_rank(other_by));
    }
    state.values.push_back({first->name, first->path, descriptions.first_rank(by)});
  }
  return state;
}

}  // namespace spolia
