#include <algorithm>
#include <map>
#include <numeric>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/torch/dcp_metadata.h"

namespace spolia {
namespace {

/// An entry and the part it comes from.
template <class Entry>
struct Owned {
  Entry entry;
  size_t part;
};

class Merger {
 public:
  explicit Merger(std::span<const std::filesystem::path> paths) : paths_(paths) {}

  void add(Catalog part) {
    if (parts_ == 0) {
      merged_.format = part.format;
      merged_.root = part.root;
    }
    std::vector<uint32_t> new_index = add_files(part.files);
    for (TensorEntry& tensor : part.tensors) {
      for (Extent& extent : tensor.extents) extent.file = new_index[extent.file];
      tensors_.push_back({std::move(tensor), parts_});
    }
    for (ValueEntry& value : part.values) {
      if (value.extent) value.extent->file = new_index[value.extent->file];
      values_.push_back({std::move(value), parts_});
    }
    for (std::string& note : part.notes) {
      if (std::ranges::find(merged_.notes, note) == merged_.notes.end())
        merged_.notes.push_back(std::move(note));
    }
    ++parts_;
  }

  Catalog finish() {
    merge_tensors();
    merge_values();
    return std::move(merged_);
  }

 private:
  std::vector<uint32_t> add_files(std::vector<std::string>& files) {
    std::vector<uint32_t> new_index;
    for (std::string& file : files) {
      uint32_t next = checked_cast<uint32_t>(merged_.files.size(), "the number of files");
      auto [at, is_new] = file_index_.try_emplace(file, next);
      if (is_new) merged_.files.push_back(std::move(file));
      new_index.push_back(at->second);
    }
    return new_index;
  }

  template <class Entry>
  static void sort_by_name(std::vector<Owned<Entry>>& entries) {
    std::ranges::stable_sort(
        entries, {}, [](const Owned<Entry>& owned) -> const std::string& { return owned.entry.name; });
  }

  void merge_tensors() {
    sort_by_name(tensors_);
    for (size_t i = 0; i < tensors_.size();) {
      Owned<TensorEntry>& first = tensors_[i];
      size_t end = i + 1;
      for (; end < tensors_.size() && tensors_[end].entry.name == first.entry.name; ++end) {
        append_chunks(first, tensors_[end]);
      }
      if (end > i + 1) drop_repeated_boxes(first.entry);
      merged_.tensors.push_back(std::move(first.entry));
      merged_owner_.push_back(first.part);
      i = end;
    }
  }

  void append_chunks(Owned<TensorEntry>& first, const Owned<TensorEntry>& more) const {
    TensorEntry& tensor = first.entry;
    if (tensor.dtype != more.entry.dtype || tensor.shape != more.entry.shape) {
      throw MismatchError("tensor {} is {} {} in {} but {} {} in {}", quote(tensor.name),
                          name_of(tensor.dtype), shape_text(tensor.shape), path(first.part),
                          name_of(more.entry.dtype), shape_text(more.entry.shape), path(more.part));
    }
    for (size_t i = 0; i < more.entry.chunks(); ++i) {
      tensor.boxes.add(more.entry.boxes.offsets(i), more.entry.boxes.sizes(i));
      tensor.extents.push_back(more.entry.extents[i]);
    }
  }

  /// Keeps the first of equal boxes: the others are replicas that further ranks wrote.
  static void drop_repeated_boxes(TensorEntry& tensor) {
    std::vector<size_t> order(tensor.chunks());
    std::iota(order.begin(), order.end(), size_t{0});
    std::ranges::stable_sort(order, [&](size_t a, size_t b) { return compare(tensor.boxes, a, b) < 0; });
    auto repeated =
        std::ranges::unique(order, [&](size_t a, size_t b) { return compare(tensor.boxes, a, b) == 0; });
    order.erase(repeated.begin(), repeated.end());
    std::ranges::sort(order);
    BoxList boxes(tensor.boxes.ndim());
    boxes.reserve(order.size());
    std::vector<Extent> extents;
    extents.reserve(order.size());
    for (size_t chunk : order) {
      boxes.add(tensor.boxes.offsets(chunk), tensor.boxes.sizes(chunk));
      extents.push_back(tensor.extents[chunk]);
    }
    tensor.boxes = std::move(boxes);
    tensor.extents = std::move(extents);
  }

  static std::strong_ordering compare(const BoxList& boxes, size_t a, size_t b) {
    auto by = [](std::span<const int64_t> x, std::span<const int64_t> y) {
      return std::lexicographical_compare_three_way(x.begin(), x.end(), y.begin(), y.end());
    };
    auto offsets = by(boxes.offsets(a), boxes.offsets(b));
    return offsets != 0 ? offsets : by(boxes.sizes(a), boxes.sizes(b));
  }

  void merge_values() {
    sort_by_name(values_);
    for (Owned<ValueEntry>& value : values_) {
      bool is_repeated = !merged_.values.empty() && merged_.values.back().name == value.entry.name;
      if (is_repeated) continue;
      if (const TensorEntry* tensor = merged_.find_tensor(value.entry.name)) {
        size_t owner = merged_owner_[static_cast<size_t>(tensor - merged_.tensors.data())];
        throw MismatchError("{} is a tensor in {} but a value in {}", quote(value.entry.name), path(owner),
                            path(value.part));
      }
      merged_.values.push_back(std::move(value.entry));
    }
  }

  std::string path(size_t part) const { return quote(paths_[part].string()); }

  std::span<const std::filesystem::path> paths_;
  size_t parts_ = 0;
  std::map<std::string, uint32_t> file_index_;
  std::vector<Owned<TensorEntry>> tensors_;
  std::vector<Owned<ValueEntry>> values_;
  Catalog merged_;
  std::vector<size_t> merged_owner_;  // the first part of each merged tensor
};

}  // namespace

Catalog merge_dcp_metadata(std::vector<Catalog> parts, std::span<const std::filesystem::path> paths) {
  Merger merger(paths);
  for (Catalog& part : parts) merger.add(std::move(part));
  return merger.finish();
}

}  // namespace spolia
