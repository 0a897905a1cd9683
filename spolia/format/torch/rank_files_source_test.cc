#include "spolia/format/torch/rank_files_source.h"

#include <numeric>
#include <random>

#include <gtest/gtest.h>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/format/torch/testing_pickle.h"
#include "spolia/store/memory_store.h"

namespace spolia {
namespace {

using namespace testing;

const std::filesystem::path kData = SPOLIA_TEST_DATA;

TEST(RankFilesSource, ReadsWhatPyTorchWrote) {
  auto folder = kData / "torch-2.14" / "rank-files-2";
  auto source = open_rank_files(posix_store(), folder / "checkpoint");
  EXPECT_EQ(source->catalog().format, "rank files");
  expect_matches(*source, folder / "expected.json");
}

// ------------------------------------------------------------- DTensors made by hand, by another rule

/// A placement as these tests make it: of a tensor dim, or none.
struct Cut {
  int dim = -1;              // -1: replicate
  int64_t split_factor = 1;  // > 1: strided
};

std::vector<int64_t> part_of(const std::vector<int64_t>& list, int64_t parts, int64_t part) {
  int64_t length = ceil_div(std::ssize(list), parts);
  int64_t begin = std::min(part * length, std::ssize(list));
  return {list.begin() + begin, list.begin() + std::min(begin + length, std::ssize(list))};
}

/// Which indices of a dim the `part`-th of `parts` keeps.
std::vector<int64_t> cut(const std::vector<int64_t>& list, int64_t split_factor, int64_t parts,
                         int64_t part) {
  std::vector<int64_t> kept;
  for (int64_t chunk = 0; chunk < split_factor; ++chunk) {
    auto piece = part_of(part_of(list, split_factor, chunk), parts, part);
    kept.insert(kept.end(), piece.begin(), piece.end());
  }
  return kept;
}

std::string py_placement(const Cut& c) {
  const char* module = "torch.distributed.tensor.placement_types";
  if (c.dim < 0) return py_object(module, "Replicate", py_fields({}));
  if (c.split_factor == 1) return py_object(module, "Shard", py_fields({{"dim", py_int(c.dim)}}));
  return py_object(module, "_StridedShard",
                   py_fields({{"dim", py_int(c.dim)}, {"split_factor", py_int(c.split_factor)}}));
}

/// The mesh of ranks 0, 1, ... as PyTorch 2.6 has it, or as 2.14.
std::string py_mesh(const std::vector<int64_t>& shape, bool old_form) {
  Dims strides = row_major_strides(shape);
  int64_t count = numel(shape);
  if (old_form) {
    std::string ranks =
        py_tensor(py_storage("IntStorage", "mesh", count), 0, shape, {strides.begin(), strides.end()});
    return py_object(
        "torch.distributed.device_mesh", "DeviceMesh",
        py_fields({{"device_type", py_text("cpu")}, {"mesh", ranks}, {"mesh_dim_names", py_none()}}));
  }
  std::vector<std::string> axes;
  for (size_t d = 0; d < shape.size(); ++d) {
    axes.push_back(py_object(
        "torch.distributed._mesh_layout", "_FlatLayout",
        py_fields({{"shape", py_tuple({py_int(shape[d])})}, {"stride", py_tuple({py_int(strides[d])})}})));
  }
  std::string layout =
      py_object("torch.distributed._mesh_layout", "_MeshLayout", py_fields({{"axes", py_tuple(axes)}}));
  std::string map = py_tensor(py_storage("IntStorage", "mesh", count), 0, {count}, {1});
  return py_object("torch.distributed.device_mesh", "DeviceMesh",
                   py_fields({{"_layout", layout}, {"_rank_map", map}, {"_mesh_dim_names", py_none()}}));
}

std::string py_dtensor(const std::string& local, const std::string& mesh,
                       const std::vector<std::string>& placements, const std::vector<int64_t>& shape) {
  Dims strides = row_major_strides(shape);
  std::string size = py_call(py_global("torch", "Size"), {py_ints(shape)});
  std::string meta = py_global("torch.distributed.tensor._dtensor_spec", "TensorMeta") +
                     py_tuple({size, py_ints(strides), py_global("torch", "int32")}) + "\x81";
  std::string spec =
      py_object("torch.distributed.tensor._dtensor_spec", "DTensorSpec",
                py_fields({{"mesh", mesh}, {"placements", py_tuple(placements)}, {"tensor_meta", meta}}));
  std::string type = py_global("torch.distributed.tensor", "DTensor");
  std::string args = py_tuple({type, py_global("torch", "int32"), py_ints(shape), py_ints(strides), py_int(0),
                               py_none(), py_none(), py_bool(true)});
  return py_call(py_global("torch._tensor", "_rebuild_from_type_v2"),
                 {py_global("torch._utils", "_rebuild_wrapper_subclass"), type, args,
                  py_tuple({py_none(), py_fields({{"_local_tensor", local}, {"_spec", spec}})})});
}

/// A matrix whose elements are 0, 1, 2, ... as the DTensor of one rank: its file's bytes.
std::string rank_file(const std::vector<int64_t>& shape, const std::vector<int64_t>& mesh,
                      const std::vector<Cut>& cuts, int64_t rank, bool old_form, bool transposed) {
  std::vector<std::vector<int64_t>> kept(2);
  for (size_t d = 0; d < 2; ++d) {
    kept[d].resize(static_cast<size_t>(shape[d]));
    std::iota(kept[d].begin(), kept[d].end(), 0);
  }
  Dims mesh_strides = row_major_strides(mesh);
  for (size_t m = 0; m < mesh.size(); ++m) {
    if (cuts[m].dim < 0) continue;
    auto& list = kept[static_cast<size_t>(cuts[m].dim)];
    list = cut(list, cuts[m].split_factor, mesh[m], rank / mesh_strides[m] % mesh[m]);
  }
  int64_t rows = std::ssize(kept[0]), columns = std::ssize(kept[1]);
  std::vector<int32_t> values(static_cast<size_t>(rows * columns) + 3);  // three elements before the tensor's
  std::vector<int64_t> strides =
      transposed ? std::vector<int64_t>{1, rows} : std::vector<int64_t>{columns, 1};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < columns; ++c) {
      int64_t element = kept[0][static_cast<size_t>(r)] * shape[1] + kept[1][static_cast<size_t>(c)];
      values[static_cast<size_t>(3 + r * strides[0] + c * strides[1])] = static_cast<int32_t>(element);
    }
  }
  std::vector<int32_t> ranks(static_cast<size_t>(numel(mesh)));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::string local =
      py_tensor(py_storage("IntStorage", "0", std::ssize(values)), 3, {rows, columns}, strides);
  std::vector<std::string> placements;
  for (const Cut& c : cuts) placements.push_back(py_placement(c));
  return make_archive(py_fields({{"w", py_dtensor(local, py_mesh(mesh, old_form), placements, shape)}}),
                      {{"0", raw(values)}, {"mesh", raw(ranks)}});
}

/// A folder "/m" with one file a rank.
std::shared_ptr<MemoryStore> folder_of(const std::vector<std::string>& files,
                                       const std::string& before = "rank_") {
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/m");
  for (size_t r = 0; r < files.size(); ++r) {
    put_file(*store, "/m/" + before + std::to_string(r) + ".pt", files[r]);
  }
  return store;
}

TEST(RankFilesSource, EveryLayoutGivesTheWhole) {
  const std::vector<Cut> kinds{{-1, 1}, {0, 1}, {1, 1}, {0, 2}, {1, 2}, {0, 3}};
  std::mt19937 random(5);
  for (const std::vector<int64_t>& mesh : {std::vector<int64_t>{3}, {2, 2}, {2, 3}, {2, 1, 2}}) {
    for (int round = 0; round < 40; ++round) {
      std::vector<int64_t> shape{static_cast<int64_t>(random() % 8), static_cast<int64_t>(random() % 5 + 1)};
      std::vector<Cut> cuts;
      for (size_t m = 0; m < mesh.size(); ++m) cuts.push_back(kinds[random() % kinds.size()]);
      std::vector<std::string> files;
      for (int64_t rank = 0; rank < numel(mesh); ++rank) {
        files.push_back(rank_file(shape, mesh, cuts, rank, round % 2, round % 3 == 0));
      }
      auto source = open_rank_files(folder_of(files), "/m");
      ASSERT_EQ(source->catalog().tensors.size(), 1u);
      const TensorEntry& entry = source->catalog().tensors[0];
      EXPECT_TRUE(entry.requires_grad);
      EXPECT_EQ(entry.shape, Dims(shape.begin(), shape.end()));
      int64_t held = 0;
      for (size_t c = 0; c < entry.chunks(); ++c) held += entry.boxes[c].numel();
      EXPECT_EQ(held, numel(shape));  // replicas are kept once
      std::vector<int32_t> expected(static_cast<size_t>(numel(shape)));
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(gather(*source, 0), to_bytes(raw(expected)));
    }
  }
}

std::optional<ErrorKind> kind_of(const std::vector<std::string>& files, const std::vector<std::string>& words,
                                 const std::string& before = "rank_") {
  return kind_thrown([&] { open_rank_files(folder_of(files, before), "/m"); }, words);
}

TEST(RankFilesSource, LocalTensorsMustFitTheirLayouts) {
  std::string first = rank_file({4, 2}, {2}, {{0, 1}}, 0, true, false);
  EXPECT_EQ(kind_of({first, rank_file({4, 2}, {2}, {{0, 1}}, 1, true, false)}, {}), std::nullopt);
  EXPECT_EQ(kind_of({first, rank_file({6, 2}, {2}, {{0, 1}}, 1, true, false)}, {"\"w\"", "rank_1.pt"}),
            ErrorKind::kMismatch);
  // The file of rank 0 of a tensor whose ranks hold 2 and 1 rows, in the place of rank 1's.
  std::string uneven = rank_file({3, 2}, {2}, {{0, 1}}, 0, true, false);
  EXPECT_EQ(kind_of({uneven, uneven}, {"\"w\"", "rank_1.pt"}), ErrorKind::kMismatch);
}

TEST(RankFilesSource, PartialTensorsAreRefused) {
  std::string partial = py_object("torch.distributed.tensor.placement_types", "Partial",
                                  py_fields({{"reduce_op", py_text("sum")}}));
  std::string local = py_tensor(py_storage("IntStorage", "0", 2), 0, {2}, {1});
  std::string file = make_archive(py_fields({{"w", py_dtensor(local, py_mesh({2}, true), {partial}, {2})}}),
                                  {{"0", std::string(8, 'a')}, {"mesh", raw<int32_t>({0, 1})}});
  EXPECT_EQ(kind_of({file, file}, {"\"w\"", "partial"}), ErrorKind::kUnsupported);
}

TEST(RankFilesSource, SenselessSpecsAreCorrupt) {
  std::string local = py_tensor(py_storage("IntStorage", "0", 2), 0, {2}, {1});
  auto file = [&](const std::vector<std::string>& placements, const std::vector<int32_t>& ranks) {
    return make_archive(py_fields({{"w", py_dtensor(local, py_mesh({2}, false), placements, {2})}}),
                        {{"0", std::string(8, 'a')}, {"mesh", raw(ranks)}});
  };
  EXPECT_EQ(kind_of({file({py_placement({-1, 1})}, {0, 1}), file({py_placement({-1, 1})}, {0, 1})}, {}),
            std::nullopt);
  EXPECT_EQ(kind_of({file({py_placement({7, 1})}, {0, 1})}, {}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({file({}, {0, 1})}, {}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({file({py_placement({0, 1}), py_placement({0, 1})}, {0, 1})}, {}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({file({py_placement({0, 1})}, {1, 1})}, {}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({file({py_placement({0, 1})}, {-1, 1})}, {}), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({file({py_object("torch", "Spiral", py_fields({}))}, {0, 1})}, {"Spiral"}),
            ErrorKind::kUnsupported);
}

// ------------------------------------------------------------- plain tensors, values, names

std::string plain_file(const std::string& name, const std::string& bytes, const Pairs& more = {}) {
  Pairs fields{
      {name, py_tensor(py_storage("ByteStorage", "0", std::ssize(bytes)), 0, {std::ssize(bytes)}, {1})}};
  fields.insert(fields.end(), more.begin(), more.end());
  return make_archive(py_fields(fields), {{"0", bytes}});
}

TEST(RankFilesSource, PlainTensorsAreKeptOnce) {
  auto source = open_rank_files(
      folder_of({plain_file("a", "same"), plain_file("a", "same"), plain_file("b", "only here")}), "/m");
  ASSERT_EQ(source->catalog().tensors.size(), 2u);
  EXPECT_EQ(gather(*source, 0), to_bytes("same"));
  EXPECT_EQ(gather(*source, 1), to_bytes("only here"));
  EXPECT_EQ(kind_of({plain_file("a", "same"), plain_file("a", "longer")}, {"\"a\"", "rank_1.pt"}),
            ErrorKind::kMismatch);
  EXPECT_EQ(kind_of({plain_file("a", "same"), plain_file("a", "else")}, {"\"a\"", "no file has a DTensor"}),
            ErrorKind::kUnsupported);
}

TEST(RankFilesSource, DifferencesAreNotedWhereThereAreDTensors) {
  auto file = [](int64_t rank) {
    std::string local = py_tensor(py_storage("IntStorage", "0", 1), 0, {1}, {1});
    std::string state = py_tensor(py_storage("ByteStorage", "1", 4), 0, {4}, {1});
    return make_archive(py_fields({{"w", py_dtensor(local, py_mesh({2}, true), {py_placement({0, 1})}, {2})},
                                   {"rng", state},
                                   {"rank", py_int(rank)}}),
                        {{"0", std::string(4, static_cast<char>('a' + rank))},
                         {"1", std::string(4, static_cast<char>('x' + rank))},
                         {"mesh", raw<int32_t>({0, 1})}});
  };
  auto source = open_rank_files(folder_of({file(0), file(1)}), "/m");
  ASSERT_EQ(source->catalog().tensors.size(), 2u);
  EXPECT_EQ(gather(*source, 0), to_bytes("xxxx"));
  EXPECT_EQ(gather(*source, 1), to_bytes("aaaabbbb"));
  EXPECT_EQ(source->value(0).to_json(), 0);
  EXPECT_EQ(source->catalog().notes.size(), 2u);
}

TEST(RankFilesSource, KindsBecomeKeys) {
  auto store = std::make_shared<MemoryStore>();
  store->create_folder("/m");
  for (const char* kind : {"model", "optim", "extra_state"}) {
    for (int r : {0, 1}) {
      put_file(*store, fmt::format("/m/{}_world_size_2_rank_{}.pt", kind, r), plain_file("w", kind));
    }
  }
  put_file(*store, "/m/fsdp_config.json", "{}");
  auto source = open_rank_files(store, "/m");
  ASSERT_EQ(source->catalog().tensors.size(), 3u);
  EXPECT_EQ(source->catalog().tensors[0].name, "extra_state.w");
  EXPECT_EQ(source->catalog().tensors[1].name, "model.w");
  EXPECT_EQ(joined(source->catalog().tensors[2].path), "optim.w");
  EXPECT_EQ(gather(*source, 1), to_bytes("model"));
}

TEST(RankFilesSource, EveryRankMustBeThere) {
  std::string file = plain_file("w", "x");
  EXPECT_EQ(kind_of({file, file}, {}, "model_world_size_2_rank_"), std::nullopt);
  EXPECT_EQ(kind_of({file, file}, {"rank 2"}, "model_world_size_3_rank_"), ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({file, file}, {}, "model_world_size_1_rank_"), ErrorKind::kCorrupt);
  auto store = folder_of({file, file, file});
  store->remove_all("/m/rank_1.pt");
  EXPECT_EQ(kind_thrown([&] { open_rank_files(store, "/m"); }, {"rank 1"}), ErrorKind::kCorrupt);
  put_file(*store, "/m/rank_01.pt", file);
  EXPECT_EQ(kind_thrown([&] { open_rank_files(store, "/m"); }), std::nullopt);
  put_file(*store, "/m/rank_1.pt", file);
  EXPECT_EQ(kind_thrown([&] { open_rank_files(store, "/m"); }, {"rank_01.pt", "rank_1.pt"}),
            ErrorKind::kCorrupt);
  EXPECT_EQ(kind_of({}, {}), ErrorKind::kNotFound);
  for (const char* number : {"9223372036854775807", "99999999999999999999"}) {
    auto huge = folder_of({file});
    put_file(*huge, fmt::format("/m/rank_{}.pt", number), file);
    EXPECT_NE(kind_thrown([&] { open_rank_files(huge, "/m"); }), ErrorKind::kInvalidArgument);
  }
}

TEST(RankFilesSource, KnowsItsFilesByName) {
  for (const char* name : {"model_world_size_2_rank_0.pt", "rank0.pt", "x-rank-12.pth", "rank.3.ckpt",
                           "mp_rank_00_model_states.pt"}) {
    EXPECT_TRUE(is_rank_file_name(name)) << name;
  }
  for (const char* name : {"model.pt", "rank.pt", "rank_x.pt", "rank_0.json", "0_rank.pt", ""}) {
    EXPECT_FALSE(is_rank_file_name(name)) << name;
  }
}

}  // namespace
}  // namespace spolia
