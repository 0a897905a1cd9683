#include "spolia/format/torch/torch_save_source.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/torch/resolved_source.h"
#include "spolia/format/torch/torch_file.h"
#include "spolia/format/weight_index.h"

namespace spolia {
namespace {

constexpr const char* kSingleFile = "pytorch_model.bin";
constexpr const char* kIndexFile = "pytorch_model.bin.index.json";

/// A whole tensor as one chunk.
ResolvedTensor whole_tensor(TorchFileTensor&& found, const std::string& file) {
  ResolvedTensor result;
  TensorEntry& entry = result.entry;
  entry.name = joined(found.path);
  const DTensorSpec* spec = found.tensor.spec.get();
  if (spec != nullptr && (spec->layout.is_partial() || spec->shape != found.tensor.shape)) {
    throw UnsupportedError(
        "{}: {} is one rank's part of a DTensor, {} of shape {}. Open the folder that holds the files of all "
        "ranks",
        quote(file), quote(entry.name), spec->layout.text(), list_text(spec->shape));
  }
  entry.path = std::move(found.path);
  entry.dtype = found.tensor.dtype;
  entry.shape = found.tensor.shape;
  entry.requires_grad = found.tensor.requires_grad;
  entry.boxes = BoxList(entry.shape.size());
  entry.boxes.add(whole(entry.shape));
  result.payloads.push_back(std::move(found.payload));
  return result;
}

/// Collects files into one source.
class Builder {
 public:
  Builder(std::shared_ptr<const Store> store, std::filesystem::path root)
      : files_(std::make_unique<OpenFiles>(std::move(store))) {
    catalog_.format = "torch.save";
    catalog_.root = std::move(root);
  }

  /// The path of a file that the user named.
  void add_named(const std::filesystem::path& path) {
    catalog_.files.push_back(path.filename().string());
    files_->keep(0, files_->store().open(path));
    read(0);
  }

  void add(const std::string& file) {
    catalog_.files.push_back(file);
    read(static_cast<uint32_t>(catalog_.files.size() - 1));
  }

  /// Which file holds what, by name.
  std::vector<std::pair<std::string, uint32_t>> places() const {
    std::vector<std::pair<std::string, uint32_t>> result;
    for (const ResolvedTensor& tensor : tensors_) {
      result.emplace_back(tensor.entry.name, tensor.payloads[0].stored.file);
    }
    return result;
  }
  const std::string& file_name(uint32_t index) const { return catalog_.files[index]; }

  std::unique_ptr<Source> finish() {
    return make_resolved_source(std::move(catalog_), std::move(tensors_), std::move(files_));
  }

 private:
  void read(uint32_t index) {
    TorchFile file = read_torch_file(files_->get(catalog_, index), index);
    note_tensors_in_values(catalog_, file, catalog_.files[index]);
    std::string path = catalog_.path_of(index).string();
    for (TorchFileTensor& tensor : file.tensors) tensors_.push_back(whole_tensor(std::move(tensor), path));
    for (FlatValue& value : file.values) {
      catalog_.values.push_back(
          {joined(value.path), std::nullopt, std::move(value.value), std::move(value.path)});
    }
  }

  std::unique_ptr<OpenFiles> files_;
  Catalog catalog_;
  std::vector<ResolvedTensor> tensors_;
};

/// Every tensor is in the file that the index says, and every tensor of the index is somewhere.
void check_index(const WeightIndex& index, const std::string& index_file, const Builder& builder) {
  std::vector<std::string> found;
  for (auto& [name, file] : builder.places()) {
    const std::string* expected = index.find(name);
    if (expected == nullptr) {
      throw MismatchError("{} holds the tensor {}, which {} does not list", quote(builder.file_name(file)),
                          quote(name), quote(index_file));
    }
    if (*expected != builder.file_name(file)) {
      throw MismatchError("{} holds the tensor {}, which should be in {} by {}",
                          quote(builder.file_name(file)), quote(name), quote(*expected), quote(index_file));
    }
    found.push_back(name);
  }
  std::ranges::sort(found);
  for (const auto& [name, file] : index.weight_map) {
    if (!std::ranges::binary_search(found, name)) {
      throw MismatchError("{} lacks the tensor {}, which should be in it by {}", quote(file), quote(name),
                          quote(index_file));
    }
  }
}

/// The file called `usual`, or else the only one that matches; empty where there is neither.
std::string one_of(std::span<const FolderEntry> entries, std::string_view pattern, std::string_view usual) {
  std::vector<std::string> found;
  for (const FolderEntry& entry : entries) {
    if (entry.is_folder || !glob_match(pattern, entry.name)) continue;
    if (entry.name == usual) return entry.name;
    found.push_back(entry.name);
  }
  return found.size() == 1 ? found[0] : std::string();
}

}  // namespace

std::unique_ptr<Source> open_torch_save(std::shared_ptr<const Store> store,
                                        const std::filesystem::path& file) {
  Builder builder(std::move(store), file.parent_path());
  builder.add_named(file);
  return builder.finish();
}

std::unique_ptr<Source> open_torch_bin_folder(std::shared_ptr<const Store> store,
                                              const std::filesystem::path& folder) {
  auto entries = store->list(folder);
  std::string index_file = one_of(entries, "pytorch_model*.bin.index.json", kIndexFile);
  std::string single_file = index_file.empty() ? one_of(entries, "pytorch_model*.bin", kSingleFile) : "";
  Builder builder(store, folder);
  if (!index_file.empty()) {
    WeightIndex index = read_weight_index(*store->open_inside(folder, index_file));
    for (const std::string& file : index.files()) builder.add(file);
    check_index(index, index_file, builder);
  } else if (!single_file.empty()) {
    builder.add(single_file);
  } else {
    throw UnsupportedError("{} has several pytorch_model*.bin, but no {} that says how they belong together",
                           quote(folder.string()), kIndexFile);
  }
  return builder.finish();
}

}  // namespace spolia
