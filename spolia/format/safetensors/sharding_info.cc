#include "spolia/format/safetensors/sharding_info.h"

#include <utility>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/json_reader.h"
#include "spolia/format/safetensors/header.h"

namespace spolia {
namespace {

class ShardingReader : public JsonReader {
 public:
  ShardingReader(std::string_view file, ShardingInfo& info) : file_(file), info_(info) {}

  bool start_object(size_t) override {
    if (place_ == Place::kOffsets || place_ == Place::kPart) refuse("an object");
    place_ = place_ == Place::kOutside ? Place::kNames : Place::kPart;
    met_offsets_ = false;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kPart && !met_offsets_) refuse("a tensor without saved_offsets");
    place_ = Place::kNames;
    return true;
  }

  bool key(std::string& key) override {
    if (place_ == Place::kNames) {
      name_ = std::move(key);
      auto [at, fresh] = info_.try_emplace(name_);
      offsets_ = &at->second;
      if (!fresh) refuse("a tensor named twice");
    } else if (key != "saved_offsets" || std::exchange(met_offsets_, true)) {
      refuse("the key " + quote(key));
    }
    return true;
  }

  bool start_array(size_t) override {
    if (place_ != Place::kPart) refuse("an array");
    place_ = Place::kOffsets;
    return true;
  }
  bool end_array() override {
    place_ = Place::kPart;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (place_ != Place::kOffsets) refuse("a number");
    if (!std::in_range<int64_t>(value)) refuse("a number of 64 bits");
    if (offsets_->size() == kMaxDims) refuse("an offset for one dim more than a tensor can have");
    offsets_->push_back(static_cast<int64_t>(value));
    return true;
  }

 protected:
  std::string where() const override {
    std::string text = fmt::format("{}: {}", quote(file_), kShardingInfoKey);
    return name_.empty() ? text : fmt::format("{}: tensor {}", text, quote(name_));
  }

 private:
  enum class Place { kOutside, kNames, kPart, kOffsets };

  std::string_view file_;
  ShardingInfo& info_;
  Place place_ = Place::kOutside;
  std::string name_;  // the tensor met last
  Dims* offsets_ = nullptr;
  bool met_offsets_ = false;
};

}  // namespace

ShardingInfo parse_sharding_info(std::string_view json, std::string_view file) {
  ShardingInfo info;
  ShardingReader reader(file, info);
  read_json(json, reader);
  return info;
}

}  // namespace spolia
