#include "spolia/format/weight_index.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/json_reader.h"

namespace spolia {
namespace {

constexpr int64_t kMaxIndexBytes = 100'000'000;

/// Picks weight_map and metadata.total_size; whatever else a writer put there is passed over.
class IndexReader : public JsonReader {
 public:
  IndexReader(std::string_view name, WeightIndex& index) : name_(name), index_(index) {}

  bool found_weight_map() const { return found_weight_map_; }

  bool null() override { return other("null"); }
  bool boolean(bool) override { return other("true or false"); }
  bool number_integer(int64_t) override { return other("a number"); }
  bool number_unsigned(uint64_t value) override { return number(static_cast<double>(value)); }
  bool number_float(double value, const std::string&) override { return number(value); }

  bool string(std::string& value) override {
    if (in_weight_map()) index_.weight_map.emplace_back(std::move(key_), std::move(value));
    return depth_ == 1 ? other("a string") : true;
  }

  bool start_object(size_t) override {
    if (in_weight_map()) refuse("an object");
    if (depth_ == 1 && section_ == "weight_map") {
      if (found_weight_map_) refuse("a second weight_map");
      found_weight_map_ = true;
    }
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(size_t) override {
    other("an array");
    ++depth_;
    return true;
  }
  bool end_array() override { return end_object(); }

  bool key(std::string& key) override {
    if (depth_ == 1) {
      section_ = std::move(key);
    } else if (depth_ == 2) {
      key_ = std::move(key);
    }
    return true;
  }

 protected:
  std::string where() const override {
    std::string place = quote(name_);
    if (depth_ == 2) place += fmt::format(": {} in {}", quote(key_), quote(section_));
    return place;
  }

 private:
  bool in_weight_map() const { return depth_ == 2 && section_ == "weight_map"; }

  bool number(double value) {
    if (depth_ == 2 && section_ == "metadata" && key_ == "total_size") index_.total_size = value;
    return other("a number");
  }

  /// Something of no use, unless it stands where weight_map or a file's name should.
  bool other(std::string_view met) const {
    if (in_weight_map() || (depth_ == 1 && section_ == "weight_map")) refuse(met);
    return true;
  }

  std::string_view name_;
  WeightIndex& index_;
  int64_t depth_ = 0;    // of objects and arrays that are open
  std::string section_;  // the key met last in the outermost object
  std::string key_;      // and in the objects in it
  bool found_weight_map_ = false;
};

}  // namespace

std::vector<std::string> WeightIndex::files() const {
  std::vector<std::string> names;
  names.reserve(weight_map.size());
  for (const auto& [tensor, file] : weight_map) names.push_back(file);
  std::ranges::sort(names);
  auto rest = std::ranges::unique(names);
  names.erase(rest.begin(), rest.end());
  return names;
}

const std::string* WeightIndex::find(std::string_view tensor) const {
  auto at = std::ranges::lower_bound(weight_map, tensor, {},
                                     [](const auto& entry) { return std::string_view(entry.first); });
  return at != weight_map.end() && at->first == tensor ? &at->second : nullptr;
}

WeightIndex parse_weight_index(std::string_view text, std::string_view name) {
  WeightIndex index;
  IndexReader reader(name, index);
  read_json(text, reader);
  if (!reader.found_weight_map()) throw CorruptError("{}: the index has no \"weight_map\"", quote(name));
  auto tensor = [](const auto& entry) -> const std::string& { return entry.first; };
  std::ranges::sort(index.weight_map);
  auto twice = std::ranges::adjacent_find(index.weight_map, {}, tensor);
  if (twice != index.weight_map.end()) {
    throw CorruptError("{}: the weight_map names the tensor {} twice", quote(name), quote(twice->first));
  }
  return index;
}

WeightIndex read_weight_index(const InputFile& file) {
  if (file.size() > kMaxIndexBytes) {
    throw CorruptError("{}: an index of {} is not credible", quote(file.path().string()),
                       human_bytes(file.size()));
  }
  std::string text(static_cast<size_t>(file.size()), '\0');
  file.read(0, std::as_writable_bytes(std::span(text)));
  return parse_weight_index(text, file.path().string());
}

}  // namespace spolia
