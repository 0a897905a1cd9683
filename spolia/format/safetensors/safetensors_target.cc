#include "spolia/format/safetensors/safetensors_target.h"

#include "spolia/base/hash.h"
#include "spolia/format/safetensors/hugging_face_folder.h"

namespace spolia {
namespace {

class SafetensorsTarget final : public Target {
 public:
  SafetensorsTarget(HuggingFaceFolder folder, std::vector<TargetValue> values)
      : headers_(std::move(folder.headers)), index_(std::move(folder.index)), values_(std::move(values)) {
    catalog_ = std::move(folder.catalog);
    order_ = std::move(folder.order);
  }

  std::vector<std::string> left_out() const override {
    std::vector<std::string> names;
    for (const TargetValue& value : values_) names.push_back(value.name);
    return names;
  }

  std::vector<std::string> finish(const Source&, const BlockChecksums&, std::span<OutputFile* const> files,
                                  OutputFolder& folder) const override {
    for (size_t f = 0; f < files.size(); ++f) files[f]->write(0, bytes_of(headers_[f]));
    folder.create(kHuggingFaceIndex).write(0, bytes_of(index_));
    return left_out();
  }

 private:
  std::vector<std::string> headers_;
  std::string index_;
  std::vector<TargetValue> values_;
};

}  // namespace

std::unique_ptr<Target> make_safetensors_target(TargetContents contents, int64_t max_shard_bytes) {
  std::vector<SafetensorsSpec> specs;
  for (size_t t : contents.order) {
    const TensorEntry& tensor = contents.catalog.tensors[t];
    specs.push_back({tensor.name, tensor.dtype, tensor.shape});
  }
  return std::make_unique<SafetensorsTarget>(lay_out_hugging_face_folder(specs, max_shard_bytes),
                                             std::move(contents.values));
}

}  // namespace spolia
