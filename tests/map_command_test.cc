// spolia convert --map and spolia map: other names and shapes, there and back, on checkpoints of PyTorch and
// on made ones.
#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <stdexcept>

#include <gtest/gtest.h>

#include "spolia/format/safetensors/header.h"
#include "spolia/store/store_testing.h"
#include "tests/command_testing.h"

namespace spolia {
namespace {

const std::vector<std::string> kFormats = {"safetensors", "dcp", "spolia"};
const fs::path kMappings = fs::path(SPOLIA_TEST_DATA) / "../../mappings";

/// A tensor's elements as numbers, whatever its dtype.
struct Tensor {
  std::string dtype;
  std::vector<int64_t> shape;
  std::vector<double> numbers;
  friend bool operator==(const Tensor&, const Tensor&) = default;

  /// Rows [begin, end) of a matrix, row-major.
  std::vector<double> rows(int64_t begin, int64_t end) const {
    return {numbers.begin() + begin * shape[1], numbers.begin() + end * shape[1]};
  }
  double at(int64_t row, int64_t column) const {
    return numbers[static_cast<size_t>(row * shape[1] + column)];
  }
};
using Tensors = std::map<std::string, Tensor>;

template <class T>
double number_at(const char* bytes) {
  T number;
  std::memcpy(&number, bytes, sizeof number);
  return static_cast<double>(number);
}

double number_of(const std::string& dtype, const char* bytes) {
  if (dtype == "F32") return number_at<float>(bytes);
  if (dtype == "I64") return number_at<int64_t>(bytes);
  if (dtype == "I32") return number_at<int32_t>(bytes);
  if (dtype == "BOOL") return number_at<uint8_t>(bytes);
  if (dtype != "BF16") throw std::runtime_error("no test has " + dtype);
  const char wide[4] = {0, 0, bytes[0], bytes[1]};
  return number_at<float>(wide);
}

/// What a folder of safetensors holds, read here.
Tensors read_tensors(const fs::path& folder) {
  Tensors tensors;
  for (const std::string& name : names_in(folder)) {
    if (!name.ends_with(".safetensors")) continue;
    const std::string file = read_file(folder / name);
    uint64_t length;
    std::memcpy(&length, file.data(), 8);
    const Json header = Json::parse(file.substr(8, length));
    for (const auto& [key, entry] : header.items()) {
      if (key == "__metadata__") continue;
      Tensor& tensor = tensors[key];
      tensor.dtype = entry["dtype"];
      tensor.shape = entry["shape"].get<std::vector<int64_t>>();
      int64_t count = 1;
      for (const int64_t size : tensor.shape) count *= size;
      const size_t begin = entry["data_offsets"][0], end = entry["data_offsets"][1];
      const size_t width = count == 0 ? 1 : (end - begin) / static_cast<size_t>(count);
      for (size_t at = begin; at < end; at += width) {
        tensor.numbers.push_back(number_of(tensor.dtype, file.data() + 8 + length + at));
      }
    }
  }
  return tensors;
}

class MapCommand : public testing::Test {
 protected:
  fs::path at(const std::string& name) const { return temp_.path() / name; }

  /// A safetensors file in which every float32 is another number.
  fs::path numbered(const std::string& name, const std::vector<std::pair<std::string, Dims>>& tensors) const {
    std::vector<SafetensorsSpec> specs;
    int64_t count = 0;
    for (const auto& [tensor, shape] : tensors) {
      specs.push_back({tensor, DType::kFloat32, shape});
      count += numel(shape);
    }
    std::string bytes = lay_out_safetensors(specs).header;
    for (int64_t n = 0; n < count; ++n) {
      const auto number = static_cast<float>(n);
      bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
    }
    fs::create_directory(at(name));
    write_file(at(name) / "model.safetensors", bytes);
    return at(name);
  }

  fs::path mapping(const std::string& text) const {
    write_file(at("mapping"), text);
    return at("mapping");
  }

  Outcome convert(const fs::path& source, const fs::path& out, const std::string& format, const fs::path& map,
                  const std::vector<std::string>& options = {}) const {
    std::vector<std::string> arguments = {"convert", source, out, "--to", format, "--map", map, "--no-sync"};
    arguments.insert(arguments.end(), options.begin(), options.end());
    return spolia(arguments);
  }
  fs::path made(const fs::path& source, const std::string& name, const std::string& format,
                const fs::path& map, const std::vector<std::string>& options = {}) const {
    const Outcome outcome = convert(source, at(name), format, map, options);
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return at(name);
  }
  /// What a mapping makes of a checkpoint, as safetensors.
  Tensors mapped(const fs::path& source, const std::string& text,
                 const std::vector<std::string>& options = {}) const {
    fs::remove_all(at("mapped"));
    return read_tensors(made(source, "mapped", "safetensors", mapping(text), options));
  }
  std::string digest(const fs::path& path) const { return spolia({"digest", path}).out; }

  const TempFolder temp_;
  const fs::path llama_ = kMappings / "llama-like.map", moe_ = kMappings / "moe.map";
};

// ---- families of models

TEST_F(MapCommand, FusesAModelOfPyTorchAndTakesItApart) {
  const Outcome plain =
      spolia({"convert", fsdp(), at("plain"), "--to", "safetensors", "--root", "model", "--no-sync"});
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  const Tensors separate = read_tensors(at("plain"));
  const Tensors fused =
      read_tensors(made(fsdp(), "fused", "safetensors", llama_, {"--root", "model", "--verify"}));
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    std::vector<double> qkv, gate_up;
    const Tensor &q = separate.at(layer + "self_attn.q_proj.weight"),
                 &k = separate.at(layer + "self_attn.k_proj.weight"),
                 &v = separate.at(layer + "self_attn.v_proj.weight");
    for (int64_t group = 0; group < 2; ++group) {  // three query heads of 8 rows, a key head, a value head
      for (const auto& part : {q.rows(24 * group, 24 * group + 24), k.rows(8 * group, 8 * group + 8),
                               v.rows(8 * group, 8 * group + 8)}) {
        qkv.insert(qkv.end(), part.begin(), part.end());
      }
    }
    for (const std::string name : {"mlp.gate_proj.weight", "mlp.up_proj.weight"}) {
      const std::vector<double>& part = separate.at(layer + name).numbers;
      gate_up.insert(gate_up.end(), part.begin(), part.end());
    }
    EXPECT_EQ(fused.at(layer + "self_attn.qkv_proj.weight"), (Tensor{"F32", {80, 48}, qkv}));
    EXPECT_EQ(fused.at(layer + "mlp.gate_up_proj.weight"), (Tensor{"F32", {200, 48}, gate_up}));
    EXPECT_EQ(fused.at(layer + "self_attn.o_proj.weight"), separate.at(layer + "self_attn.o_proj.weight"));
    EXPECT_FALSE(fused.contains(layer + "self_attn.q_proj.weight"));
  }
}

TEST_F(MapCommand, GoesThereAndBackInEveryFormatLayoutAndNumberOfRanks) {
  const Json tensors = expected_tensors("torch-2.14/fsdp2-4");
  const std::string fused = digest(made(fsdp(), "fused", "safetensors", llama_, {"--map-root", "model"}));
  int number = 0;
  for (const std::string& format : kFormats) {
    for (const std::string ranks : {"1", "2"}) {
      for (const std::string layout :
           {"", "mesh = 3; *: [shard(0)]", "mesh = 2x2; *.weight: [shard(0), shard(-1)]"}) {
        if (format == "safetensors" && !layout.empty()) continue;
        SCOPED_TRACE(format + " on " + ranks + " ranks, " + layout);
        std::vector<std::string> options = {"--map-root", "model", "--ranks", ranks, "--verify"};
        if (!layout.empty()) options.insert(options.end(), {"--layout", layout});
        const std::string name = std::to_string(++number);
        const fs::path there = made(fsdp(), name + " there", format, llama_, options);
        EXPECT_EQ(digest(there), fused);
        options.push_back("--reverse");
        const fs::path back = made(there, name + " back", format, llama_, options);
        EXPECT_EQ(json_of({"digest", "--json", back}), tensors);
        EXPECT_EQ(spolia({"verify", back}).exit_code, 0);
      }
    }
  }
}

TEST_F(MapCommand, KeepsWhereTensorsStandInAStateDict) {
  const std::string model = digest(made(fsdp(), "model", "safetensors", llama_, {"--root", "model"}));
  const fs::path whole = made(fsdp(), "whole", "dcp", llama_, {"--map-root", "model"});
  const Json shown = json_of({"inspect", "--json", whole});
  EXPECT_EQ(shown["values"], json_of({"inspect", "--json", fsdp()})["values"]);
  EXPECT_TRUE(shown["tensors"].contains("optimizer.state.model.layers.0.self_attn.qkv_proj.weight.exp_avg"));
  const auto below = [&](const std::string& key, const std::string& name) {
    const Outcome outcome =
        spolia({"convert", whole, at(name), "--to", "dcp", "--root", key, "--no-sync", "--quiet"});
    EXPECT_EQ(outcome.exit_code, 0) << outcome.err;
    return at(name);
  };
  EXPECT_EQ(digest(below("model", "below model")), model);
  // Every parameter's states stand below its name, which has dots of its own.
  const fs::path state = below("optimizer.state.model.layers.1.self_attn.qkv_proj.weight", "below state");
  EXPECT_EQ(json_of({"digest", "--json", state}).size(), 3u);
}

TEST_F(MapCommand, StacksExpertsAndSeparatesThem) {
  std::vector<std::pair<std::string, Dims>> tensors = {{"model.norm.weight", {5}}};
  for (int layer = 0; layer < 2; ++layer) {
    const std::string block = "model.layers." + std::to_string(layer) + ".block_sparse_moe.";
    tensors.push_back({block + "gate.weight", {8, 6}});
    for (int expert = 7; expert >= 0; --expert) {
      const std::string name = block + "experts." + std::to_string(expert);
      tensors.push_back({name + ".w1.weight", {4, 6}});
      tensors.push_back({name + ".w2.weight", {6, 4}});
      tensors.push_back({name + ".w3.weight", {4, 6}});
    }
  }
  const fs::path source = numbered("separate", tensors);
  const Tensors separate = read_tensors(source),
                stacked = read_tensors(made(source, "stacked", "safetensors", moe_));
  EXPECT_EQ(stacked.size(), 1u + 2 * 4);
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    for (const std::string w : {"w1", "w2", "w3"}) {
      Tensor expected{"F32", w == "w2" ? std::vector<int64_t>{48, 4} : std::vector<int64_t>{32, 6}, {}};
      for (int expert = 0; expert < 8; ++expert) {
        const Tensor& one =
            separate.at(layer + "block_sparse_moe.experts." + std::to_string(expert) + "." + w + ".weight");
        expected.numbers.insert(expected.numbers.end(), one.numbers.begin(), one.numbers.end());
      }
      EXPECT_EQ(stacked.at(layer + "mlp.experts." + w), expected);
    }
    EXPECT_EQ(stacked.at(layer + "mlp.router.weight"), separate.at(layer + "block_sparse_moe.gate.weight"));
  }
  for (const std::string& format : kFormats) {
    const fs::path there = made(source, "there " + format, format, moe_, {"--ranks", "2"});
    EXPECT_EQ(digest(there), digest(at("stacked")));
    EXPECT_EQ(digest(made(there, "back " + format, format, moe_, {"--reverse"})), digest(source));
  }
}

TEST_F(MapCommand, StacksTheExpertsOfAJobOfPyTorchWithTheirMomentum) {
  const fs::path source = checkpoint("torch-2.14/moe-2");
  const Json tensors = expected_tensors("torch-2.14/moe-2");
  const Outcome plain =
      spolia({"convert", source, at("plain"), "--to", "safetensors", "--drop", "*.seen_tokens", "--no-sync"});
  ASSERT_EQ(plain.exit_code, 0) << plain.err;
  const Tensors separate = read_tensors(at("plain"));
  const Tensors stacked = read_tensors(
      made(source, "stacked", "safetensors", moe_, {"--map-root", "model", "--drop", "*.seen_tokens"}));
  EXPECT_EQ(stacked.size(), separate.size() - 2 * 2 * 3 * 7);  // layers, states, kinds of weights
  for (const std::string layer : {"model.layers.0.", "model.layers.1."}) {
    for (const auto& [before, after] : std::vector<std::pair<std::string, std::string>>{
             {"model.", ""}, {"optimizer.state.", ".momentum_buffer"}}) {
      const std::string block = before + layer + "block_sparse_moe.";
      for (const std::string w : {"w1", "w2", "w3"}) {
        Tensor expected{"F32", w == "w2" ? std::vector<int64_t>{64, 12} : std::vector<int64_t>{96, 8}, {}};
        for (int expert = 0; expert < 8; ++expert) {
          const Tensor& one =
              separate.at(block + "experts." + std::to_string(expert) + "." + w + ".weight" + after);
          expected.numbers.insert(expected.numbers.end(), one.numbers.begin(), one.numbers.end());
        }
        EXPECT_EQ(stacked.at(before + layer + "mlp.experts." + w + after), expected);
      }
      EXPECT_EQ(stacked.at(before + layer + "mlp.router.weight" + after),
                separate.at(block + "gate.weight" + after));
    }
  }
  for (const std::string& format : kFormats) {
    for (const std::string ranks : {"1", "3"}) {
      const fs::path there =
          made(source, "there" + format + ranks, format, moe_, {"--map-root", "model", "--ranks", ranks});
      EXPECT_EQ(
          json_of({"digest", "--json",
                   made(there, "back" + format + ranks, format, moe_, {"--map-root", "model", "--reverse"})}),
          tensors);
    }
  }
}

// ---- every operation, worked out by hand

TEST_F(MapCommand, JoinsCutsTurnsReshapesCastsAndDrops) {
  const fs::path source = numbered("source", {{"a", {2, 3}}, {"b", {2, 3}}, {"c", {6, 4}}, {"d", {3}}});
  const Tensors tensors = mapped(source, R"(a^T, b^T -> joined, axis=1
c -> c0, c1, axis=0, sizes='[2, 4]'
c -> cube, reshape='[2, 3, 4]', permute='[2, 0, 1]', dtype='bfloat16'
d -> _)");
  EXPECT_EQ(tensors.size(), 4u);
  EXPECT_EQ(tensors.at("joined"), (Tensor{"F32", {3, 4}, {0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11}}));
  EXPECT_EQ(tensors.at("c0"), (Tensor{"F32", {2, 4}, {12, 13, 14, 15, 16, 17, 18, 19}}));
  EXPECT_EQ(tensors.at("c1").numbers.front(), 20);
  Tensor cube{"BF16", {4, 2, 3}, {}};
  for (int k = 0; k < 4; ++k) {
    for (int row = 0; row < 6; ++row) cube.numbers.push_back(12 + row * 4 + k);
  }
  EXPECT_EQ(tensors.at("cube"), cube);
}

TEST_F(MapCommand, LargeTensorsAreTurnedInBlocks) {
  const fs::path source = numbered("source", {{"a", {700, 900}}, {"b", {700, 900}}});
  const Tensors before = read_tensors(source),
                after = mapped(source, "a^T, b^T -> c, axis=0", {"--memory", "16MiB", "--threads", "3"});
  const Tensor &a = before.at("a"), &b = before.at("b"), &c = after.at("c");
  ASSERT_EQ(c.shape, (std::vector<int64_t>{1800, 700}));
  int64_t wrong = 0;
  for (int64_t row = 0; row < 900; ++row) {
    for (int64_t column = 0; column < 700; ++column) {
      wrong += c.at(row, column) != a.at(column, row);
      wrong += c.at(900 + row, column) != b.at(column, row);
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(MapCommand, RowsThatAreMuchLongerThanABlockAreTurnedInRuns) {
  const fs::path source = numbered("source", {{"a", {900, 2600}}});
  const Tensors before = read_tensors(source),
                after = mapped(source,
                               "a^T -> turned\na -> half, permute='[1, 0]', dtype='bfloat16'\n"
                               "a -> plain, dtype='bfloat16'",
                               {"--memory", "16MiB", "--threads", "3"});
  const Tensor &a = before.at("a"), &turned = after.at("turned"), &half = after.at("half"),
               &plain = after.at("plain");
  ASSERT_EQ(turned.shape, (std::vector<int64_t>{2600, 900}));
  ASSERT_EQ(half.shape, turned.shape);
  int64_t wrong = 0;
  for (int64_t row = 0; row < 2600; ++row) {
    for (int64_t column = 0; column < 900; ++column) {
      wrong += turned.at(row, column) != a.at(column, row);
      wrong += half.at(row, column) != plain.at(column, row);
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(MapCommand, MakesNewTensorsFilledOrFromABase) {
  const fs::path source = numbered("source", {{"a", {2}}});
  const fs::path base = numbered("base", {{"a", {2}}, {"head", {3, 2}}, {"norm", {2}}});
  const std::string text = R"(_ -> half, shape='[3]', dtype='bfloat16', fill='0.5'
_ -> count, shape='[2, 2]', dtype='int32', fill=-7
_ -> flags, shape='[2]', dtype='bool', fill=1
_ -> nothing, shape='[0, 3]', dtype='float32', fill=1
_ -> head
_ -> norm, shape='[2]', dtype='float32')";
  for (const std::string ranks : {"1", "2"}) {
    const Tensors tensors = mapped(source, text, {"--base", base, "--ranks", ranks});
    EXPECT_EQ(tensors.size(), 7u);
    EXPECT_EQ(tensors.at("a"), (Tensor{"F32", {2}, {0, 1}}));
    EXPECT_EQ(tensors.at("half"), (Tensor{"BF16", {3}, {0.5, 0.5, 0.5}}));
    EXPECT_EQ(tensors.at("count"), (Tensor{"I32", {2, 2}, {-7, -7, -7, -7}}));
    EXPECT_EQ(tensors.at("flags"), (Tensor{"BOOL", {2}, {1, 1}}));
    EXPECT_EQ(tensors.at("nothing"), (Tensor{"F32", {0, 3}, {}}));
    EXPECT_EQ(tensors.at("head"), (Tensor{"F32", {3, 2}, {2, 3, 4, 5, 6, 7}}));
    EXPECT_EQ(tensors.at("norm"), (Tensor{"F32", {2}, {8, 9}}));
  }
  // Into formats with checksums and values, and read back from the disk.
  const fs::path map = mapping("_ -> half, shape='[3]', dtype='bfloat16', fill='0.5'\n_ -> head");
  std::set<std::string> all;
  for (const std::string& format : kFormats) {
    all.insert(digest(made(fsdp(), format, format, map, {"--base", base, "--verify"})));
  }
  EXPECT_EQ(all.size(), 1u);
  EXPECT_NE(all.begin()->find("bfloat16  3  half"), std::string::npos);
}

TEST_F(MapCommand, SelectsBeforeAndCastsAfterwards) {
  const fs::path source = numbered("source", {{"model.a", {2}}, {"model.b", {2}}, {"other", {2}}});
  const Tensors tensors = mapped(source, "a -> c\na -> d, dtype='bfloat16'",
                                 {"--root", "model", "--drop", "*.b", "--dtype", "bfloat16"});
  EXPECT_EQ(tensors, (Tensors{{"c", {"BF16", {2}, {0, 1}}}, {"d", {"BF16", {2}, {0, 1}}}}));
  // Casting to bfloat16 rounds, so that casting on is not one cast.
  expect_refused(convert(source, at("out"), "safetensors", mapping("other -> o, dtype='bfloat16'"),
                         {"--dtype", "float32"}),
                 {"line 1", "\"o\"", "float32 to bfloat16", "leave out"});
}

// ---- what is refused

TEST_F(MapCommand, NamesLineAndColumnOfWhatIsWrong) {
  const fs::path source = numbered("source", {{"layer.q", {4, 6}}, {"layer.k", {2, 6}}, {"x", {3}}});
  const std::vector<std::pair<std::string, std::vector<std::string>>> wrong = {
      {"layer.q layer.k -> qk", {"line 1, column 9"}},
      {"# fused\nlayer.q, layer.v -> qk, axis=0", {"line 2, column 10", "\"layer.v\"", "layer.k"}},
      {"layer.q, layer.k -> qk, axis=1", {"line 1", "[4, 6]", "[2, 6]"}},
      {"layer.q -> a, b, axis=0, sizes='[3, 2]'", {"line 1", "layer.q"}},
      {"layer.q -> q, permute='[0, 0]'", {"line 1"}},
      {"layer.q -> q, dtype='float23'", {"line 1", "float23"}},
      {"layer.q -> q, spin=1", {"line 1, column 15", "spin"}},
      {"_ -> n", {"line 1", "\"n\"", "base"}},
      {"_ -> n, shape='[2]', dtype='int32', fill='0.5'", {"line 1", "\"n\"", "int32", "0.5"}},
      {"x ->", {"line 1"}},
      {"{\"aoa_statements\": [\"x -> y\", \"z -> w\"]}", {"line 2", "\"z\""}},
  };
  for (const auto& [text, parts] : wrong) {
    SCOPED_TRACE(text);
    expect_refused(convert(source, at("out"), "safetensors", mapping(text)), parts);
  }
  EXPECT_FALSE(fs::exists(at("out")));
}

TEST_F(MapCommand, RefusesWhatCannotBeMeant) {
  const fs::path source = numbered("source", {{"model.a", {2}}, {"model.b", {3}}});
  // A mapping for other names changes nothing, silently, unless somebody says so.
  expect_refused(convert(source, at("out"), "safetensors", mapping("layers.$LAYER_ID.x -> y.$LAYER_ID.x")),
                 {"no statement", "--map-root"});
  expect_refused(convert(source, at("out"), "safetensors", mapping("model.a -> _\nmodel.b -> _")),
                 {"nothing would be left"});
  expect_refused(convert(source, at("out"), "safetensors", at("none.map")), {"none.map"});
  // A value is called so.
  const Outcome taken =
      convert(fsdp(), at("out"), "dcp", mapping("model.model.seen_tokens -> optimizer.param_groups.0.lr"));
  expect_refused(taken, {"\"optimizer.param_groups.0.lr\"", "a value"});
  for (const std::vector<std::string>& alone :
       std::vector<std::vector<std::string>>{{"--reverse"}, {"--base", source}, {"--map-root", "model"}}) {
    std::vector<std::string> arguments = {"convert", source, at("out"), "--to", "safetensors"};
    arguments.insert(arguments.end(), alone.begin(), alone.end());
    EXPECT_EQ(spolia(arguments).exit_code, 2);
  }
  // Sizes are not known on the way back.
  expect_refused(convert(source, at("out"), "safetensors", mapping("p, q -> model.a, axis=0"), {"--reverse"}),
                 {"line 1", "sizes"});
  EXPECT_FALSE(fs::exists(at("out")));
}

// ---- what it tells

TEST_F(MapCommand, TellsWhatTensorsAreMadeOf) {
  const fs::path source =
      numbered("source", {{"a", {2, 3}}, {"b", {1, 3}}, {"c", {4}}, {"gone", {1}}, {"more", {4, 2}}});
  const std::string text = R"(a, b -> ab, axis=0
more^T -> turned, dtype='bfloat16'
gone -> _
_ -> n, shape='[2]', dtype='int32', fill=3
more -> upper, lower, axis=0)";
  const Outcome shown = spolia({"map", mapping(text), source});
  EXPECT_EQ(shown.exit_code, 0) << shown.err;
  EXPECT_EQ(shown.out, R"(float32  3x3  ab  (line 1)
    [0, 0] + [2, 3] <- a
    [2, 0] + [1, 3] <- b
float32  4  c <- c
float32  2x2  lower <- more [2, 0] + [2, 2]  (line 5)
int32  2  n <- 3 everywhere  (line 4)
bfloat16  2x4  turned <- more, dims [1, 0], cast from float32  (line 2)
float32  2x2  upper <- more [0, 0] + [2, 2]  (line 5)
dropped: gone

6 tensors of 5; 1 dropped, 0 unused, 0 missing
)");
  const Json json = json_of({"map", at("mapping"), source, "--json"});
  EXPECT_EQ(json["tensors"]["ab"], Json::parse(R"({"dtype": "float32", "shape": [3, 3], "line": 1, "copies": [
    {"from": "a", "offsets": [0, 0], "sizes": [2, 3], "from_offsets": [0, 0], "from_sizes": [2, 3]},
    {"from": "b", "offsets": [2, 0], "sizes": [1, 3], "from_offsets": [0, 0], "from_sizes": [1, 3]}]})"));
  EXPECT_EQ(json["tensors"]["turned"]["copies"][0]["permute"], Json::parse("[1, 0]"));
  EXPECT_EQ(json["tensors"]["turned"]["copies"][0]["from_dtype"], "float32");
  EXPECT_EQ(json["tensors"]["n"]["fill"], 3);
  EXPECT_FALSE(json["tensors"]["c"].contains("line"));
  EXPECT_EQ(json["dropped"], Json::parse(R"(["gone"])"));
  EXPECT_EQ(json["missing"], Json::array());
}

TEST_F(MapCommand, TellsWhatATargetMisses) {
  const fs::path source = numbered("source", {{"a", {2}}, {"b", {3}}});
  const fs::path target = numbered("target", {{"c", {2}}, {"d", {5}}});
  const fs::path map = mapping("a -> c");
  const Outcome shown = spolia({"map", map, source, "--target", target});
  EXPECT_EQ(shown.exit_code, 1);
  EXPECT_EQ(shown.out,
            "float32  2  c <- a  (line 1)\nunused: b\nmissing: d\n\n"
            "1 tensor of 2; 0 dropped, 1 unused, 1 missing\n");
  const Outcome json = spolia({"map", map, source, "--target", target, "--json"});
  EXPECT_EQ(json.exit_code, 1);
  EXPECT_EQ(Json::parse(json.out)["missing"], Json::parse(R"(["d"])"));
  EXPECT_EQ(spolia({"map", mapping("a -> c\n_ -> d, shape='[5]', dtype='float32', fill=0"), source,
                    "--target", target})
                .exit_code,
            0);
  expect_refused(spolia({"map", mapping("b -> c"), source, "--target", target}), {"line 1", "[3]", "[2]"});
}

TEST_F(MapCommand, TellsOfThePlanAndOfWhatWasDropped) {
  const fs::path source = numbered("source", {{"a", {2, 2}}, {"b", {3}}});
  const fs::path map = mapping("a -> c, d, axis=0\nb -> _");
  const Outcome plan = convert(source, at("out"), "safetensors", map, {"--dry-run", "--json"});
  EXPECT_EQ(plan.exit_code, 0) << plan.err;
  EXPECT_EQ(Json::parse(plan.out)["tensors"]["d"]["from"], Json::parse(R"(["a"])"));
  EXPECT_EQ(Json::parse(plan.out)["dropped"], Json::parse(R"(["b"])"));
  EXPECT_FALSE(fs::exists(at("out")));
  const Outcome done = convert(source, at("out"), "safetensors", map);
  EXPECT_EQ(done.exit_code, 0);
  expect_contains(done.err, "1 tensor dropped by the mapping: b");
  expect_contains(spolia({"--help"}).out, "docs/mapping.md");
}

}  // namespace
}  // namespace spolia
