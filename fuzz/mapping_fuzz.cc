// The mapping language. Zero bytes separate the mapping's text, the source's tensors and the target's: words,
// each a name, a letter for the dtype and a digit a dim ("w:f24"). Without a target's tensors there is no
// target.
#include <optional>
#include <string>
#include <vector>

#include "fuzz/fuzzing.h"
#include "spolia/layout/coverage.h"
#include "spolia/mapping/mapping.h"

namespace spolia::fuzzing {
namespace {

constexpr int64_t kPieces = 20'000;

std::string_view take_until(std::string_view& text, char end) {
  const size_t length = std::min(text.find(end), text.size());
  const std::string_view taken = text.substr(0, length);
  text.remove_prefix(std::min(length + 1, text.size()));
  return taken;
}

std::vector<TensorDescription> parse_tensors(std::string_view text) {
  std::vector<TensorDescription> tensors;
  while (!text.empty() && tensors.size() < 50) {
    std::string_view word = take_until(text, ' ');
    TensorDescription tensor;
    tensor.name = take_until(word, ':');
    for (char c : word) {
      if (c == 'h') tensor.dtype = DType::kFloat16;
      if (c == 'b') tensor.dtype = DType::kBFloat16;
      if (c == 'i') tensor.dtype = DType::kInt64;
      if (c == '4') tensor.parts = 2;
      if (c >= '0' && c <= '9' && tensor.shape.size() < 6) tensor.shape.push_back(c - '0');
    }
    tensors.push_back(std::move(tensor));
  }
  return sorted_by_name(tensors);
}

/// What compiles, is sound: every target covered exactly, from within its sources, by boxes of the same
/// sizes.
void check_sound(const CompiledMapping& made, const MappingSides& sides) {
  require(made.first_copy.size() == made.targets.size() + 1 && made.first_copy.back() == made.copies.size());
  require(std::ranges::is_sorted(made.targets, {}, &MappedTensor::name));
  for (size_t t = 0; t < made.targets.size(); ++t) {
    const MappedTensor& target = made.targets[t];
    if (target.origin != Origin::kSources) continue;
    BoxList boxes(target.shape.size());
    for (const RegionCopy& copy : made.copies_of(t)) {
      const TensorDescription& source = sides.source[copy.source];
      require(copy.target == t);
      if (copy.region == nullptr) {
        require(source.shape == target.shape);
        boxes.add(whole(target.shape));
        continue;
      }
      const Region& region = *copy.region;
      require(fits(region.source.offsets, region.source.sizes, source.shape));
      require(region.source.numel() == region.target.numel());
      for (size_t d = 0; d < target.shape.size(); ++d) {
        const int64_t from = source_dim(region, d);
        require(region.target.sizes[d] == (from < 0 ? 1 : region.source.sizes[from]));
      }
      boxes.add(region.target);
    }
    require(!check_coverage(boxes, target.shape).fault);
    int64_t found = 0;
    const Box all = whole(target.shape);
    for (const SourceRegion& one : find_sources(made, sides, t, all)) found += one.region.target.numel();
    require(found == all.numel());
  }
}

void check_mapping(const Mapping& mapping, const MappingSides& sides) {
  std::optional<CompiledMapping> made;
  MappingOptions options;
  options.most_pieces = kPieces;
  // Those sources as the base whose names begin so.
  std::optional<CompiledMapping> based;
  MappingOptions with_base = options;
  with_base.base_prefix = "b";
  MappingSides joined = sides;
  joined.base = {};
  if (accepts([&] { based = compile_mapping(mapping, joined, with_base); })) check_sound(*based, joined);
  if (!accepts([&] { made = compile_mapping(mapping, sides, options); })) return;
  check_sound(*made, sides);
  std::vector<TensorDescription> there;
  for (const MappedTensor& target : made->targets)
    there.push_back({target.name, target.dtype, target.shape, 1});
  options.reverse = true;
  for (bool known : {false, true}) {
    MappingSides back{there, {}, sides.source};
    if (known) back.target = sides.source;
    std::optional<CompiledMapping> again;
    if (accepts([&] { again = compile_mapping(mapping, back, options); })) check_sound(*again, back);
  }
}

}  // namespace

void run(Bytes bytes) {
  std::string_view text = text_of(bytes);
  const std::string_view statements = take_until(text, '\0'), source_text = take_until(text, '\0');
  Mapping mapping;
  if (!accepts([&] { mapping = parse_mapping(statements); })) return;
  std::vector<TensorDescription> sources, targets;
  if (!accepts([&] {
        sources = parse_tensors(source_text);
        targets = parse_tensors(text);
      })) {
    return;
  }
  MappingSides sides{sources, {}, sources};
  if (!targets.empty()) sides.target = targets;
  check_mapping(mapping, sides);
}

}  // namespace spolia::fuzzing
