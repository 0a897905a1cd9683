#include "spolia/layout/layout_text.h"

namespace spolia {
namespace {

constexpr std::string_view kMeshExpected =
    "a device mesh; write one like 2x2 (dp, tp) or 2x2 on [0, 1, 6, 7]";
constexpr std::string_view kLayoutExpected =
    "a layout; write one like [shard(0), replicate] over 2x2 (dp, tp)";

}  // namespace

std::vector<std::string> read_dim_names(TextReader& reader) {
  std::vector<std::string> names;
  do {
    names.emplace_back(reader.name());
  } while (reader.accept(","));
  reader.expect(")");
  return names;
}

std::vector<Placement> read_placements(TextReader& reader) {
  std::vector<Placement> placements;
  reader.expect("[");
  if (reader.accept("]")) return placements;
  do {
    placements.push_back(read_placement(reader));
  } while (reader.accept(","));
  reader.expect("]");
  return placements;
}

DeviceMesh read_mesh(TextReader& reader) {
  Dims shape;
  if (!reader.accept("0-d")) {
    do {
      shape.push_back(reader.integer());
    } while (reader.accept("x"));
  }
  std::vector<std::string> names;
  if (reader.accept("(")) names = read_dim_names(reader);
  if (!reader.accept("on")) return DeviceMesh(std::move(shape), std::move(names));
  return DeviceMesh(std::move(shape), std::move(names), reader.integers());
}

DeviceMesh parse_mesh(std::string_view text) {
  TextReader reader(text, kMeshExpected);
  DeviceMesh mesh = read_mesh(reader);
  reader.expect_end();
  return mesh;
}

Layout parse_layout(std::string_view text) {
  TextReader reader(text, kLayoutExpected);
  std::vector<Placement> placements = read_placements(reader);
  reader.expect("over");
  DeviceMesh mesh = read_mesh(reader);
  reader.expect_end();
  return Layout(std::move(mesh), std::move(placements));
}

}  // namespace spolia
