// The cases in tests/data/mapping: sources, statements, and the regions or the error they give. README.md
// there describes the files.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>

#include <fmt/format.h>
#include <gtest/gtest.h>

#include "spolia/base/error.h"
#include "spolia/mapping/mapping.h"
#include "spolia/mapping/testing_arrays.h"

namespace spolia {
namespace {

using Lines = std::vector<std::string>;

struct Section {
  std::string word, rest;
  Lines lines;  // without their indentation by two
};

struct Case {
  std::string name;
  std::vector<Section> sections;

  const Section* find(std::string_view word) const {
    const auto found = std::ranges::find(sections, word, &Section::word);
    return found == sections.end() ? nullptr : &*found;
  }
};

std::vector<Case> read_cases(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::vector<Case> cases;
  for (std::string line; std::getline(file, line);) {
    if (line.empty() || line[0] == '#') continue;
    if (line.starts_with("  ")) {
      cases.back().sections.back().lines.push_back(line.substr(2));
      continue;
    }
    const size_t blank = std::min(line.find(' '), line.size());
    Section section{line.substr(0, blank), line.substr(std::min(blank + 1, line.size())), {}};
    if (section.word == "case") {
      cases.push_back({section.rest, {}});
    } else {
      cases.back().sections.push_back(std::move(section));
    }
  }
  return cases;
}

/// "2x3" or "scalar".
Dims parse_shape(const std::string& text) {
  Dims shape;
  if (text == "scalar") return shape;
  std::istringstream in(text);
  for (std::string size; std::getline(in, size, 'x');) shape.push_back(std::stoll(size));
  return shape;
}

std::vector<TensorDescription> parse_tensors(const Section* section) {
  std::vector<TensorDescription> tensors;
  if (section == nullptr) return tensors;
  for (const std::string& line : section->lines) {
    std::istringstream in(line);
    std::string name, dtype, shape, parts;
    in >> name >> dtype >> shape >> parts;
    TensorDescription tensor{name, *dtype_from_name(dtype), parse_shape(shape), 1};
    if (parts.starts_with("parts=")) tensor.parts = std::stoll(parts.substr(6));
    tensors.push_back(std::move(tensor));
  }
  return sorted_by_name(tensors);
}

/// "[0:2, 3, :]" in a shape, with every bound written out.
std::string slices_text(const Box& box) {
  std::string text = "[";
  for (size_t d = 0; d < box.ndim(); ++d) {
    text += fmt::format("{}{}:{}", d == 0 ? "" : ", ", box.offsets[d], box.offsets[d] + box.sizes[d]);
  }
  return text + "]";
}

Box parse_slices(std::string text, const Dims& shape) {
  Box box;
  std::erase_if(text, [](char c) { return c == '[' || c == ']' || c == ' '; });
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) {
    const size_t colon = one.find(':');
    const int64_t size = shape[box.ndim()];
    const int64_t begin = one[0] == ':' ? 0 : std::stoll(one);
    const int64_t end = colon == std::string::npos ? begin + 1
                        : colon + 1 == one.size()  ? size
                                                   : std::stoll(one.substr(colon + 1));
    box.offsets.push_back(begin);
    box.sizes.push_back(end - begin);
  }
  return box;
}

std::string region_line(const Region& region, const std::string& source) {
  std::string line =
      fmt::format("{} <- {}{}", slices_text(region.target), source, slices_text(region.source));
  if (!region.permute.empty()) line += " permute " + list_text(region.permute);
  return line;
}

/// "[0:2] <- s[1, :] permute [1, 0]", spelled as region_line() does.
std::string normal_region_line(const std::string& line, const Dims& target,
                               std::span<const TensorDescription> sources) {
  const size_t arrow = line.find(" <- "), bracket = line.find('[', arrow), close = line.find(']', bracket);
  const std::string source = line.substr(arrow + 4, bracket - arrow - 4);
  const std::optional<size_t> index = find_tensor(sources, source);
  if (!index) return "no source " + source;
  return slices_text(parse_slices(line.substr(0, arrow), target)) + " <- " + source +
         slices_text(parse_slices(line.substr(bracket, close - bracket), sources[*index].shape)) +
         line.substr(close + 1);
}

/// What an expectation says of a target, or what there is: a headline and, in order, its regions.
struct Made {
  std::string headline;
  Lines regions;
  friend bool operator==(const Made&, const Made&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Made& made) {
    out << "\n  " << made.headline << "\n";
    for (const std::string& region : made.regions) out << "    " << region << "\n";
    return out;
  }
};
using MadeTensors = std::map<std::string, Made>;

MadeTensors made_by(const CompiledMapping& mapping, std::span<const TensorDescription> sources) {
  MadeTensors all;
  for (size_t t = 0; t < mapping.targets.size(); ++t) {
    const MappedTensor& target = mapping.targets[t];
    Made& made = all[target.name];
    made.headline = fmt::format("{} {} {}", target.name, name_of(target.dtype), shape_text(target.shape));
    if (target.origin == Origin::kFill) made.headline += fmt::format(" fill {}", target.fill);
    if (target.origin == Origin::kInitial) made.headline += " initial";
    const std::span<const RegionCopy> copies = mapping.copies_of(t);
    for (const RegionCopy& copy : copies) {
      if (copy.region == nullptr) {
        made.headline += " <- " + sources[copy.source].name;
      } else {
        made.regions.push_back(region_line(*copy.region, sources[copy.source].name));
      }
    }
    std::ranges::sort(made.regions);
  }
  return all;
}

MadeTensors expected_of(const Section& section, std::span<const TensorDescription> sources) {
  MadeTensors all;
  Made* made = nullptr;
  Dims shape;
  for (const std::string& line : section.lines) {
    if (line.starts_with("  ")) {
      made->regions.push_back(normal_region_line(line.substr(2), shape, sources));
      continue;
    }
    std::istringstream in(line);
    std::string name, dtype, sizes;
    in >> name >> dtype >> sizes;
    shape = parse_shape(sizes);
    made = &all[name];
    made->headline = line;
  }
  for (auto& [name, one] : all) std::ranges::sort(one.regions);
  return all;
}

Lines words(const std::string& text) {
  std::istringstream in(text);
  Lines all;
  for (std::string word; in >> word;) all.push_back(word);
  return all;
}

Lines names_of(const std::vector<size_t>& indices, std::span<const TensorDescription> tensors) {
  Lines names;
  for (size_t i : indices) names.push_back(tensors[i].name);
  return names;
}

class CaseRunner {
 public:
  explicit CaseRunner(const Case& c)
      : case_(c),
        sources_(parse_tensors(c.find("source"))),
        targets_(parse_tensors(c.find("target"))),
        base_(parse_tensors(c.find("base"))) {
    sides_.source = sources_;
    if (c.find("target") != nullptr) sides_.target = targets_;
    sides_.base = base_;
    if (const Section* map = c.find("map")) {
      for (const std::string& line : map->lines) text_ += line + "\n";
    }
    if (const Section* file = c.find("map-file")) {
      std::ifstream in(std::filesystem::path(SPOLIA_TEST_DATA "/../../mappings") / file->rest);
      text_.assign(std::istreambuf_iterator<char>(in), {});
    }
    if (const Section* prefix = c.find("prefix")) options_.prefix = prefix->rest;
    if (const Section* prefix = c.find("base-prefix")) options_.base_prefix = prefix->rest;
    options_.reverse = c.find("reverse") != nullptr;
    options_.allow_missing = c.find("missing") != nullptr;
  }

  void run() {
    const Section* error = case_.find("error");
    std::optional<CompiledMapping> made;
    try {
      made = compile_mapping(parse_mapping(text_), sides_, options_);
    } catch (const Error& failure) {
      if (error == nullptr) {
        ADD_FAILURE() << failure.what();
        return;
      }
      for (const Section& section : case_.sections) {
        if (section.word != "error") continue;
        EXPECT_NE(std::string(failure.what()).find(section.rest), std::string::npos)
            << "expected: " << section.rest << "\nthe error: " << failure.what();
      }
      return;
    }
    if (error != nullptr) {
      ADD_FAILURE() << "no error, but was to be: " << error->rest;
      return;
    }
    for (const auto& [name, array] : evaluated(*made, sources_, numbered_arrays(sources_))) {
      EXPECT_TRUE(std::ranges::find(array.values, -1) == array.values.end())
          << name << " is not covered exactly";
    }
    for (const Section& section : case_.sections) check(section, *made);
  }

 private:
  void check(const Section& section, const CompiledMapping& made) {
    if (section.word == "expect") {
      MadeTensors actual = made_by(made, sources_);
      const MadeTensors expected = expected_of(section, sources_);
      if (section.rest == "some") {
        std::erase_if(actual, [&](const auto& one) { return !expected.contains(one.first); });
      }
      EXPECT_EQ(actual, expected);
    } else if (section.word == "unused") {
      EXPECT_EQ(names_of(made.unused, sources_), words(section.rest));
    } else if (section.word == "dropped") {
      EXPECT_EQ(names_of(made.dropped, sources_), words(section.rest));
    } else if (section.word == "missing") {
      EXPECT_EQ(made.missing, words(section.rest));
    } else if (section.word == "note") {
      const bool found = std::ranges::any_of(
          made.notes, [&](const std::string& note) { return note.find(section.rest) != std::string::npos; });
      EXPECT_TRUE(found) << "no note: " << section.rest
                         << "\nnotes: " << fmt::format("{}", fmt::join(made.notes, "\n"));
    } else if (section.word == "notes") {
      EXPECT_EQ(fmt::format("{}", made.notes.size()), section.rest)
          << fmt::format("{}", fmt::join(made.notes, "\n"));
    } else if (section.word == "find") {
      check_find(section, made);
    } else if (section.word == "roundtrip") {
      check_round_trip(made, false, section.rest);
    } else if (section.word == "roundtrip-known") {
      check_round_trip(made, true, section.rest);
    }
  }

  void check_find(const Section& section, const CompiledMapping& made) {
    const size_t blank = section.rest.find(' ');
    const MappedTensor* target = made.find(section.rest.substr(0, blank));
    ASSERT_NE(target, nullptr);
    const Box box = parse_slices(section.rest.substr(blank), target->shape);
    const size_t t = static_cast<size_t>(target - made.targets.data());
    Lines expected, actual;
    for (const std::string& line : section.lines) {
      if (line.starts_with("error ")) {
        try {
          find_sources(made, sides_, t, box);
          ADD_FAILURE() << "no error";
        } catch (const Error& error) {
          EXPECT_NE(std::string(error.what()).find(line.substr(6)), std::string::npos) << error.what();
        }
        return;
      }
      expected.push_back(normal_region_line(line, target->shape, sources_));
    }
    for (const SourceRegion& one : find_sources(made, sides_, t, box)) {
      actual.push_back(region_line(one.region, sources_[one.source].name));
    }
    EXPECT_EQ(actual, expected);
  }

  /// Forwards and back again: every source that the mapping uses is as it was. `refusal`: or else why not.
  void check_round_trip(const CompiledMapping& made, bool known, const std::string& refusal) {
    const Arrays there = evaluated(made, sources_, numbered_arrays(sources_));
    const std::vector<TensorDescription> tensors = described(made);
    MappingSides back{tensors, {}, sources_};
    if (known) back.target = sources_;
    MappingOptions options = options_;
    options.reverse = !options.reverse;
    try {
      const CompiledMapping again = compile_mapping(parse_mapping(text_), back, options);
      EXPECT_EQ(refusal, "") << "was to be refused";
      Arrays arrays = evaluated(again, tensors, there), originals = numbered_arrays(sources_);
      for (size_t unused : made.unused) originals.erase(sources_[unused].name);
      for (size_t dropped : made.dropped) originals.erase(sources_[dropped].name);
      for (const auto& [name, original] : originals) {
        ASSERT_TRUE(arrays.contains(name)) << name;
        EXPECT_EQ(arrays[name].values, original.values) << name;
        EXPECT_EQ(arrays[name].shape, original.shape) << name;
        EXPECT_EQ(arrays[name].dtype, original.dtype) << name;
      }
      if (made.dropped.empty() && made.unused.empty()) {
        EXPECT_EQ(arrays.size(), originals.size());
      }
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(refusal), std::string::npos) << error.what();
      EXPECT_NE(refusal, "") << error.what();
    }
  }

  const Case& case_;
  std::vector<TensorDescription> sources_, targets_, base_;
  MappingSides sides_;
  MappingOptions options_;
  std::string text_;
};

TEST(Mapping, DoesWhatTheCasesSay) {
  size_t count = 0;
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(SPOLIA_TEST_DATA "/mapping")) {
    if (entry.path().extension() == ".case") files.push_back(entry.path());
  }
  std::ranges::sort(files);
  for (const std::filesystem::path& file : files) {
    for (const Case& one : read_cases(file)) {
      SCOPED_TRACE(file.filename().string() + ": " + one.name);
      CaseRunner(one).run();
      ++count;
    }
  }
  EXPECT_GE(count, 100u);
}

}  // namespace
}  // namespace spolia
