#include "spolia/format/safetensors/safetensors_target.h"

#include "spolia/base/hash.h"
#include "spolia/format/safetensors/hugging_face_folder.h"

namespace spolia {
namespace {

class SafetensorsTarget final : public Target {
 public:
  SafetensorsTarget(HuggingFaceFolder folder, std::vector<TargetValue> values)
      : headers_(std::move(folder.headers)), values_(std::move(values)) {
    catalog_ = std::move(folder.catalog);
    order_ = std::move(folder.order);
  }

  std::vector<std::string> left_out() const override {
    std::vector<std::string> names;
    for (const TargetValue& value : values_) names.push_back(value.name);
    return names;
  }

  std::string finish_file(uint32_t file, const BlockChecksums&, OutputFile& open_file,
                          OutputFolder&) const override {
    open_file.write(0, bytes_of(headers_[file]));
    return {};
  }

  std::vector<std::string> finish(const Source&, std::span<const std::string>, OutputFile*,
                                  OutputFolder& folder) const override {
    OutputFile& index = folder.create(kHuggingFaceIndex);
    int64_t written = 0;
    write_hugging_face_index(catalog_, [&](std::string_view piece) {
      index.write(written, bytes_of(piece));
      written += std::ssize(piece);
    });
    return left_out();
  }

 private:
  std::vector<std::string> headers_;
  std::vector<TargetValue> values_;
};

}  // namespace

std::unique_ptr<Target> make_safetensors_target(TargetContents contents, int64_t max_shard_bytes) {
  HuggingFaceFolder folder =
      lay_out_hugging_face_folder(std::move(contents.catalog), contents.order, max_shard_bytes);
  return std::make_unique<SafetensorsTarget>(std::move(folder), std::move(contents.values));
}

}  // namespace spolia
