#include "spolia/format/native/merged_manifest.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/file_names.h"

namespace spolia {
namespace {

constexpr std::string_view kPrefix = "spolia-", kSuffix = ".json";

class Merger {
 public:
  explicit Merger(const std::vector<std::string>& names) : names_(names) {}

  void add(const Manifest& from, size_t number) {
    Manifest& all = merged_.manifest;
    if (number == 0) all.block_bytes = from.block_bytes;
    if (from.block_bytes != all.block_bytes) {
      throw CorruptError("{} has checksums of blocks of {} bytes, {} of {}", quote(names_[0]),
                         all.block_bytes, quote(names_[number]), from.block_bytes);
    }
    std::vector<uint32_t> numbers;
    for (const Manifest::Tensor& tensor : from.tensors) numbers.push_back(number_of(tensor, from, number));
    for (const Manifest::Part& part : from.parts) {
      if (!writers_.insert(part.writer).second) {
        throw CorruptError("{}: another manifest has a part of writer {} too", quote(names_[number]),
                           part.writer);
      }
      take_file(part.file.name, number);
      all.parts.push_back(part);
      merged_.tensors.push_back(numbers);
    }
    for (const Manifest::NamedValue& value : from.values) add_value(value, number);
  }

  MergedManifest finish() {
    sort_tensors();
    for (auto& [name, value] : values_) merged_.manifest.values.push_back(std::move(value));
    return std::move(merged_);
  }

 private:
  uint32_t number_of(const Manifest::Tensor& tensor, const Manifest& from, size_t number) {
    std::vector<Manifest::Tensor>& tensors = merged_.manifest.tensors;
    Manifest::Tensor own = tensor;
    own.chunks.reset();
    if (tensor.layout) own.layout = layout_number(from.layouts[*tensor.layout]);
    const auto [known, fresh] = tensors_.try_emplace(tensor.name, static_cast<uint32_t>(tensors.size()));
    if (fresh) {
      first_.push_back(number);
      tensors.push_back(std::move(own));
      return known->second;
    }
    const Manifest::Tensor& other = tensors[known->second];
    if (other.dtype != own.dtype || other.shape != own.shape || other.layout != own.layout) {
      throw MismatchError("tensor {}: {} has {} {}, {} has {} {}, or another layout", quote(tensor.name),
                          quote(names_[first_[known->second]]), name_of(other.dtype), list_text(other.shape),
                          quote(names_[number]), name_of(own.dtype), list_text(own.shape));
    }
    return known->second;
  }

  uint32_t layout_number(const std::string& text) {
    std::vector<std::string>& layouts = merged_.manifest.layouts;
    const auto [known, fresh] = layouts_.try_emplace(text, static_cast<uint32_t>(layouts.size()));
    if (fresh) layouts.push_back(text);
    return known->second;
  }

  void add_value(const Manifest::NamedValue& value, size_t number) {
    const auto [known, fresh] = values_.try_emplace(value.name, value);
    if (const auto* file = std::get_if<HashedFile>(&value.content)) {
      take_file(file->name, number);
      const auto* first = std::get_if<HashedFile>(&known->second.content);
      if (first != nullptr && first->sha256 == file->sha256) return;
    }
    if (fresh || known->second.content == value.content) return;
    merged_.notes.push_back(fmt::format("value {} is another one in {}; that of a lower rank is taken",
                                        quote(value.name), quote(names_[number])));
  }

  void take_file(const std::string& name, size_t number) {
    if (files_.insert(name).second) return;
    throw CorruptError("{}: the file {} is another manifest's too", quote(names_[number]), quote(name));
  }

  /// By name, as a manifest has them.
  void sort_tensors() {
    std::vector<Manifest::Tensor>& tensors = merged_.manifest.tensors;
    std::vector<uint32_t> place(tensors.size());
    uint32_t next = 0;
    std::vector<Manifest::Tensor> sorted;
    for (const auto& [name, number] : tensors_) {
      place[number] = next++;
      sorted.push_back(std::move(tensors[number]));
    }
    tensors = std::move(sorted);
    for (std::vector<uint32_t>& numbers : merged_.tensors) {
      for (uint32_t& number : numbers) number = place[number];
    }
  }

  const std::vector<std::string>& names_;
  MergedManifest merged_;
  std::map<std::string, uint32_t> tensors_, layouts_;
  std::vector<size_t> first_;  // of each tensor, the manifest that was the first to have it
  std::map<std::string, Manifest::NamedValue> values_;
  std::set<uint32_t> writers_;
  std::set<std::string> files_;
};

}  // namespace

std::string own_manifest_name(uint32_t writer) { return fmt::format("{}{:05}{}", kPrefix, writer, kSuffix); }

bool is_own_manifest_name(std::string_view name) {
  return name.starts_with(kPrefix) && name.ends_with(kSuffix) &&
         name.size() > kPrefix.size() + kSuffix.size() &&
         is_number(name.substr(kPrefix.size(), name.size() - kPrefix.size() - kSuffix.size()));
}

MergedManifest merge_manifests(const std::vector<Manifest>& manifests,
                               const std::vector<std::string>& names) {
  Merger merger(names);
  for (size_t m = 0; m < manifests.size(); ++m) merger.add(manifests[m], m);
  return merger.finish();
}

}  // namespace spolia
