// States for tests of saving and loading: tensors whose every element says which one it is.
#pragma once

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "spolia/base/hash.h"
#include "spolia/checkpoint/pieces.h"
#include "spolia/state/state_dict.h"

namespace spolia {

/// A tensor as a test wants it: by a layout, in a box for each rank, or whole on some ranks.
struct WantedTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  Dims shape;
  std::shared_ptr<const Layout> layout;
  std::vector<Box> boxes;         // of each rank; empty boxes: the rank has none
  std::vector<int64_t> on_ranks;  // that have the tensor at all; empty: all
};

/// The bytes of the element `index` (row-major) of a tensor.
inline void write_element(const std::string& name, int64_t index, int64_t width, std::byte* out) {
  const std::string text = name + "#" + std::to_string(index);
  const uint64_t low = xxh3_64(bytes_of(text)), high = low * 0x9E3779B97F4A7C15ull;
  std::byte bytes[16];
  std::memcpy(bytes, &low, 8);
  std::memcpy(bytes + 8, &high, 8);
  std::memcpy(out, bytes, static_cast<size_t>(width));
}

/// Calls `use(row-major index in the whole tensor, place of the element)` for every element of a piece.
template <class Use>
void for_each_element(const LocalTensor::Piece& piece, std::span<const int64_t> shape, const Use& use) {
  const Dims global = row_major_strides(shape);
  Dims index(piece.global.ndim());
  for (int64_t left = piece.global.numel(); left > 0; --left) {
    int64_t at = 0;
    std::byte* place = piece.view.data;
    for (size_t d = 0; d < index.size(); ++d) {
      at += (piece.global.offsets[d] + index[d]) * global[d];
      place += index[d] * piece.view.strides[d];
    }
    use(at, place);
    for (size_t d = index.size(); d-- > 0;) {
      if (++index[d] < piece.global.sizes[d]) break;
      index[d] = 0;
    }
  }
}

/// One rank's state, with its memory. Every other tensor of two or more dims that may be lies at strides: in
/// memory whose rows are longer than they have to be.
class RankState {
 public:
  static constexpr std::byte kPoison{0xA5};

  /// `salt`: other ones make other elements.
  RankState(const std::vector<WantedTensor>& tensors, int64_t rank, std::string salt = "")
      : rank_(rank), salt_(std::move(salt)) {
    for (const WantedTensor& wanted : tensors) add(wanted);
  }

  StateDict& dict() { return state_; }

  void fill() {
    for_each_tensor([&](const std::string& name, const LocalTensor& tensor, const LocalTensor::Piece& piece) {
      for_each_element(piece, tensor.shape, [&](int64_t at, std::byte* place) {
        write_element(salt_ + name, at, element_bytes(tensor.memory.dtype), place);
      });
    });
  }
  void poison() {
    for (std::vector<std::byte>& memory : memory_) std::ranges::fill(memory, kPoison);
  }

  void expect_poisoned() const {
    for (const auto& [name, block] : block_of_) {
      const auto other = std::ranges::find_if(memory_[block], [](std::byte b) { return b != kPoison; });
      EXPECT_TRUE(other == memory_[block].end()) << "rank " << rank_ << ", tensor " << name;
    }
  }

  /// Every element is what fill() makes it, and what lies between elements still poisoned.
  void expect_filled() const {
    for (const std::string& name : differing()) ADD_FAILURE() << "rank " << rank_ << ", tensor " << name;
  }
  /// The tensors of which that is not true.
  std::vector<std::string> differing() const {
    std::deque<std::vector<std::byte>> expected = memory_;
    for (auto& memory : expected) std::ranges::fill(memory, kPoison);
    for_each_tensor([&](const std::string& name, const LocalTensor& tensor, const LocalTensor::Piece& piece) {
      const int64_t width = element_bytes(tensor.memory.dtype);
      const size_t block = block_of_.at(name);
      const std::byte* begin = memory_[block].data();
      for_each_element(piece, tensor.shape, [&](int64_t at, const std::byte* place) {
        write_element(salt_ + name, at, width, expected[block].data() + (place - begin));
      });
    });
    std::vector<std::string> names;
    for (const auto& [name, block] : block_of_) {
      if (memory_[block] != expected[block]) names.push_back(name);
    }
    return names;
  }

 private:
  void add(const WantedTensor& wanted) {
    if (!wanted.on_ranks.empty() && std::ranges::find(wanted.on_ranks, rank_) == wanted.on_ranks.end())
      return;
    Dims local = wanted.shape;
    if (wanted.layout != nullptr) {
      local = wanted.layout->shard(wanted.shape, rank_).local_shape;
    } else if (!wanted.boxes.empty()) {
      const Box& box = wanted.boxes[static_cast<size_t>(rank_)];
      if (box.empty() && numel(wanted.shape) > 0) return;
      local = box.sizes;
    }
    const bool strided = local.size() >= 2 && local.size() == wanted.shape.size() &&
                         memory_.size() % 2 == 1 && !is_sub_byte(wanted.dtype);
    Dims padded = local;
    if (strided) padded.back() += 3;
    memory_.emplace_back(static_cast<size_t>(byte_size(wanted.dtype, padded)), kPoison);
    View view = dense_view(memory_.back().data(), wanted.dtype, padded);
    view.shape = local;
    block_of_[wanted.name] = memory_.size() - 1;
    LocalTensor tensor = plain_tensor(view);
    if (wanted.layout != nullptr) tensor = sharded_tensor(view, wanted.shape, wanted.layout);
    if (!wanted.boxes.empty()) {
      tensor = tensor_part(view, wanted.shape, wanted.boxes[static_cast<size_t>(rank_)]);
    }
    state_.add(wanted.name, std::move(tensor));
  }

  /// Each piece; a tensor whose elements are finer than a byte is one piece of bytes.
  template <class Use>
  void for_each_tensor(const Use& use) const {
    for (const StateDict::Entry& entry : state_.entries()) {
      const LocalTensor* tensor = entry.tensor();
      if (tensor == nullptr) continue;
      if (is_sub_byte(tensor->memory.dtype)) {
        const View& memory = tensor->memory;
        const View bytes = byte_view(std::span(memory.data, static_cast<size_t>(memory.bytes())));
        const LocalTensor all = plain_tensor(bytes);
        use(entry.name, all, LocalTensor::Piece{whole(bytes.shape), bytes});
        continue;
      }
      for (const LocalTensor::Piece& piece : tensor->pieces(rank_)) use(entry.name, *tensor, piece);
    }
  }

  int64_t rank_;
  std::string salt_;
  StateDict state_;
  std::deque<std::vector<std::byte>> memory_;
  std::map<std::string, size_t> block_of_;
};

}  // namespace spolia
