#include "spolia/state/state_dict.h"

#include <array>
#include <cstring>

#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

Value integer(int64_t value) { return Value(value); }
Value list(std::vector<Value> items) { return Value(List{std::move(items)}); }
Value dict(std::vector<std::pair<std::string, Value>> items) {
  Dict made;
  for (auto& [key, item] : items) made.items.emplace_back(Value(key), std::move(item));
  return Value(std::move(made));
}

std::shared_ptr<const Layout> layout(std::string_view text) {
  return std::make_shared<const Layout>(parse_layout(text));
}

std::vector<std::string> names_of(const StateDict& state) {
  std::vector<std::string> names;
  for (const StateDict::Entry& entry : state.entries()) names.push_back(entry.name);
  return names;
}

template <class Call>
std::string refused(const Call& call) {
  try {
    call();
  } catch (const InvalidArgumentError& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST(StateDict, FlattensAsPyTorchDoes) {
  StateDict state;
  const Value nested =
      dict({{"state", dict({{"w", dict({{"step", integer(3)}})}})},
            {"param_groups", list({dict({{"lr", Value(0.5)}, {"params", list({integer(0), integer(1)})}})})},
            {"betas", list({Value(0.9), Value(0.99)})},
            {"deep", list({list({dict({{"x", integer(1)}})}), integer(2)})},
            {"flat", list({list({integer(1)})})},
            {"pair", Value(Tuple{{dict({{"y", integer(1)}})}})},
            {"nothing", dict({})},
            {"none", list({})}});
  state.add("optimizer", nested);
  state.add("step", integer(7));
  EXPECT_EQ(names_of(state),
            (std::vector<std::string>{"optimizer.state.w.step", "optimizer.param_groups.0.lr",
                                      "optimizer.param_groups.0.params", "optimizer.betas",
                                      "optimizer.deep.0.0.x", "optimizer.deep.1", "optimizer.flat",
                                      "optimizer.pair", "optimizer.nothing", "optimizer.none", "step"}));
  EXPECT_EQ(state.find("optimizer.param_groups.0.lr")->path,
            (KeyPath{std::string("optimizer"), std::string("param_groups"), int64_t{0}, std::string("lr")}));
  EXPECT_EQ(*state.find("optimizer.param_groups.0.params")->value(), list({integer(0), integer(1)}));
  EXPECT_EQ(*state.find("optimizer.nothing")->value(), dict({}));
  EXPECT_EQ(state.find("optimizer"), nullptr);
  EXPECT_EQ(state.find("step")->tensor(), nullptr);
}

TEST(StateDict, KeepsValuesWholeWhereItDoesNotFlatten) {
  StateDict state(Flatten::kNo);
  std::vector<std::byte> bytes(8);
  const Value nested = dict({{"a", dict({{"b", integer(1)}})}});
  state.add("all", nested);
  state.add("w", plain_tensor(byte_view(std::span(bytes))));
  EXPECT_EQ(names_of(state), (std::vector<std::string>{"all", "w"}));
  EXPECT_EQ(*state.find("all")->value(), nested);
  const std::string text = refused([&] {
    state.add({std::string("model"), std::string("w")}, plain_tensor(byte_view(std::span(bytes))));
  });
  EXPECT_NE(text.find("\"model.w\" lies below a key"), std::string::npos) << text;
  EXPECT_EQ(state.size(), 2u);
}

TEST(StateDict, TwoPathsWithOneNameAreAnError) {
  StateDict state;
  state.add({std::string("a"), std::string("b")}, integer(1));
  EXPECT_NE(refused([&] { state.add("a.b", integer(2)); }).find("two entries with the name \"a.b\""),
            std::string::npos);
  EXPECT_NE(refused([&] {
              state.add({std::string("a"), std::string("b")}, integer(2));
            }).find("two entries"),
            std::string::npos);
  state.add({std::string("list"), int64_t{0}}, integer(1));
  EXPECT_NE(refused([&] {
              state.add({std::string("list"), std::string("0")}, integer(1));
            }).find("list.0"),
            std::string::npos);
  EXPECT_NE(refused([&] { state.add(KeyPath{}, integer(1)); }).find("needs a key"), std::string::npos);
  EXPECT_EQ(*state.find("a.b")->value(), integer(1));
  EXPECT_EQ(state.size(), 2u);
}

TEST(StateDict, NestsAnother) {
  std::vector<std::byte> bytes(8);
  StateDict model, all;
  model.add("w", plain_tensor(byte_view(std::span(bytes))));
  model.add("v", integer(3));
  all.add("model", model);
  all.add("v", integer(4));
  EXPECT_EQ(names_of(all), (std::vector<std::string>{"model.w", "model.v", "v"}));
  EXPECT_EQ(all.find("model.w")->tensor()->memory.data, bytes.data());
  EXPECT_EQ(all.find("model.v")->path, (KeyPath{std::string("model"), std::string("v")}));
}

/// The numbers of the elements of each piece, read from memory where element i is the number i.
std::vector<std::vector<int>> read_pieces(const LocalTensor& tensor, int64_t rank) {
  std::vector<std::vector<int>> all;
  for (const LocalTensor::Piece& piece : tensor.pieces(rank)) {
    EXPECT_EQ(piece.view.shape, piece.global.sizes);
    std::vector<int>& numbers = all.emplace_back();
    Dims index(piece.global.ndim());
    for (int64_t left = piece.global.numel(); left > 0; --left) {
      const std::byte* at = piece.view.data;
      for (size_t d = 0; d < index.size(); ++d) at += index[d] * piece.view.strides[d];
      numbers.push_back(static_cast<int>(*at));
      for (size_t d = index.size(); d-- > 0;) {
        if (++index[d] < piece.global.sizes[d]) break;
        index[d] = 0;
      }
    }
  }
  return all;
}

TEST(LocalTensor, PiecesOfLayoutsLieInTheBuffersOrder) {
  std::array<std::byte, 64> memory;
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  const auto view = [&](Dims shape) { return dense_view(memory.data(), DType::kUInt8, shape); };
  const Dims shape = {6, 4};

  // Rank 1 of two: rows 3 to 5.
  auto tensor = sharded_tensor(view({3, 4}), shape, layout("[shard(0)] over 2"));
  auto pieces = tensor.pieces(1);
  ASSERT_EQ(pieces.size(), 1u);
  EXPECT_EQ(pieces[0].global, (Box{{3, 0}, {3, 4}}));
  EXPECT_EQ(read_pieces(tensor, 1)[0][5], 5);

  // A ragged shard of rank 1: elements 5 to 14 of 24, in rows 1, 2 and 3: a flat buffer of ten.
  tensor = sharded_tensor(view({10}), shape, layout("[ragged([0, 1], [5, 10, 9])] over 3"));
  pieces = tensor.pieces(1);
  std::vector<int> numbers;
  int64_t elements = 0;
  for (const auto& piece : pieces) elements += piece.global.numel();
  EXPECT_EQ(elements, 10);
  for (const auto& piece : read_pieces(tensor, 1)) numbers.insert(numbers.end(), piece.begin(), piece.end());
  EXPECT_EQ(numbers, (std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}));
  EXPECT_EQ(pieces.front().global.offsets, (Dims{1, 1}));

  // A rank outside the mesh has none, whatever its memory.
  tensor = sharded_tensor(view({0}), shape, layout("[shard(0)] over 2 on [4, 5]"));
  EXPECT_TRUE(tensor.pieces(1).empty());
  // Nor has an empty shard.
  tensor = sharded_tensor(view({0, 4}), Dims{1, 4}, layout("[shard(0)] over 2"));
  EXPECT_TRUE(tensor.pieces(1).empty());
}

TEST(LocalTensor, PiecesOfStridedMemoryKeepItsStrides) {
  std::array<std::byte, 64> memory;
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  // Three rows of four in memory whose rows are ten long; strided shards in two slices of its own.
  View view{memory.data(), DType::kUInt8, {4, 4}, {10, 2}, {}};
  const auto tensor = sharded_tensor(view, Dims{8, 4}, layout("[strided(0, 2)] over 2"));
  const auto pieces = tensor.pieces(0);
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].view.data, memory.data());
  EXPECT_EQ(pieces[1].view.data, memory.data() + 2 * 10);
  EXPECT_EQ(read_pieces(tensor, 0)[1], (std::vector<int>{20, 22, 24, 26, 30, 32, 34, 36}));

  view = View{memory.data(), DType::kUInt8, {12}, {2}, {}};
  EXPECT_NE(refused([&] {
              sharded_tensor(view, Dims{6, 4}, layout("[ragged([0, 1], [1, 1])] over 2")).pieces(0);
            }).find("has to be dense"),
            std::string::npos);
}

TEST(LocalTensor, MemoryHasTheShapeThatIsSaidOfIt) {
  std::array<std::byte, 64> memory{};
  const auto view = [&](Dims shape) { return dense_view(memory.data(), DType::kUInt8, shape); };
  EXPECT_NE(refused([&] {
              sharded_tensor(view({3, 3}), Dims{6, 4}, layout("[shard(0)] over 2")).pieces(0);
            }).find("has the shape [3, 3], but its shard has [3, 4]"),
            std::string::npos);
  EXPECT_NE(refused([&] {
              tensor_part(view({2, 2}), Dims{6, 4}, Box{{0, 0}, {2, 3}}).pieces(0);
            }).find("its box"),
            std::string::npos);
  EXPECT_NE(refused([&] {
              tensor_part(view({2, 2}), Dims{6, 4}, Box{{5, 0}, {2, 2}}).pieces(0);
            }).find("leaves the shape"),
            std::string::npos);
  LocalTensor tensor = plain_tensor(view({2, 2}));
  tensor.shape = {2, 3};
  EXPECT_NE(refused([&] { tensor.pieces(0); }).find("the tensor"), std::string::npos);
  EXPECT_EQ(tensor_part(view({2, 2}), Dims{6, 4}, Box{{4, 2}, {2, 2}}).pieces(0).size(), 1u);
  EXPECT_TRUE(plain_tensor(view({0, 2})).pieces(0).empty());
  EXPECT_EQ(plain_tensor(view({})).pieces(0).size(), 1u);
}

}  // namespace
}  // namespace spolia
