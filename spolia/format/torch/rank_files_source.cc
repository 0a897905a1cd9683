#include "spolia/format/torch/rank_files_source.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/torch/resolved_source.h"
#include "spolia/format/torch/torch_file.h"

namespace spolia {
namespace {

constexpr std::array<std::string_view, 4> kEndings{".pt", ".pth", ".bin", ".ckpt"};

/// A file's name with its rank taken out.
struct RankFileName {
  std::string before;  // "model_world_size_2_rank_"
  int64_t rank = 0;
  std::string after;  // ".pt"
};

bool is_digit(char c) { return c >= '0' && c <= '9'; }

/// The number at the start of `text`; nothing where there is none that fits.
std::optional<int64_t> leading_number(std::string_view text) {
  int64_t number = 0;
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && !text.empty() && is_digit(text[0]) ? std::optional(number) : std::nullopt;
}

/// The parts of a name with a number after its last "rank".
std::optional<RankFileName> parse_name(std::string_view name) {
  bool known_ending =
      std::ranges::any_of(kEndings, [&](std::string_view end) { return name.ends_with(end); });
  size_t at = name.rfind("rank");
  if (!known_ending || at == std::string_view::npos) return std::nullopt;
  at += 4;
  if (at < name.size() && (name[at] == '_' || name[at] == '-' || name[at] == '.')) ++at;
  auto rank = leading_number(name.substr(at));
  if (!rank) return std::nullopt;
  size_t end = at;
  while (is_digit(name[end])) ++end;  // the ending follows
  return RankFileName{std::string(name.substr(0, at)), *rank, std::string(name.substr(end))};
}

/// The files of one kind, by rank.
struct RankFiles {
  std::string kind;  // "model"
  std::vector<std::string> names;
};

/// What stands in a name before the numbers of ranks: "model" for "model_world_size_2_rank_".
std::string kind_of(std::string_view before) {
  before = before.substr(0, std::min(before.find("world_size"), before.rfind("rank")));
  while (!before.empty() && (before.back() == '_' || before.back() == '-' || before.back() == '.')) {
    before.remove_suffix(1);
  }
  return std::string(before);
}

/// The number of ranks that a name tells, if it does.
std::optional<int64_t> world_size_of(std::string_view before) {
  constexpr std::string_view kWorldSize = "world_size_";
  size_t at = before.find(kWorldSize);
  return at == std::string_view::npos ? std::nullopt : leading_number(before.substr(at + kWorldSize.size()));
}

std::vector<RankFiles> find_rank_files(std::span<const FolderEntry> entries,
                                       const std::filesystem::path& folder) {
  std::map<std::pair<std::string, std::string>, std::map<int64_t, std::string>> patterns;
  for (const FolderEntry& entry : entries) {
    if (entry.is_folder) continue;
    auto parsed = parse_name(entry.name);
    if (!parsed) continue;
    auto [at, fresh] = patterns[{parsed->before, parsed->after}].emplace(parsed->rank, entry.name);
    if (!fresh) {
      throw CorruptError("{}: both {} and {} are files of rank {}", quote(folder.string()), quote(at->second),
                         quote(entry.name), parsed->rank);
    }
  }
  std::vector<RankFiles> kinds;
  for (auto& [pattern, by_rank] : patterns) {
    RankFiles files{kind_of(pattern.first), {}};
    int64_t world = world_size_of(pattern.first).value_or(checked_add(by_rank.rbegin()->first, 1));
    for (auto& [rank, name] : by_rank) {
      if (rank != std::ssize(files.names)) break;
      files.names.push_back(name);
    }
    if (std::ssize(files.names) != world || by_rank.size() != files.names.size()) {
      throw CorruptError(
          "{}: of the {} files {}<rank>{} the one of rank {} is missing, or there are too many",
          quote(folder.string()), world, quote(pattern.first), quote(pattern.second), files.names.size());
    }
    kinds.push_back(std::move(files));
  }
  return kinds;
}

/// Kinds become keys, so each needs a name of its own.
void check_kinds(std::span<const RankFiles> kinds, const std::filesystem::path& folder) {
  if (kinds.empty()) throw NotFoundError("{} has no files of ranks", quote(folder.string()));
  std::set<std::string> names;
  for (const RankFiles& files : kinds) {
    bool unclear = files.kind.empty() || !names.insert(files.kind).second;
    if (kinds.size() > 1 && unclear) {
      throw UnsupportedError(
          "{}: {} belongs to one of several sets of files that their names do not tell apart",
          quote(folder.string()), quote(files.names[0]));
    }
  }
}

/// A tensor as the ranks read so far have it.
struct Merged {
  ResolvedTensor tensor;
  std::set<std::pair<Dims, Dims>> boxes;  // of a DTensor: offsets and sizes of what is there already
  bool is_dtensor = false;
  bool differs = false;  // a plain tensor with other bytes on another rank
};

class Merger {
 public:
  Merger(std::shared_ptr<const Store> store, const std::filesystem::path& folder)
      : files_(std::make_unique<OpenFiles>(std::move(store))) {
    catalog_.format = "rank files";
    catalog_.root = folder;
  }

  void add(const std::string& name, int64_t rank, const std::string& first_key) {
    auto index = static_cast<uint32_t>(catalog_.files.size());
    catalog_.files.push_back(name);
    const InputFile& input = files_->get(catalog_, index);
    boxes_allowed_ += input.size() / 16;
    TorchFile file = read_torch_file(input, index);
    note_tensors_in_values(catalog_, file, name);
    ranks_ = std::max(ranks_, rank + 1);
    for (TorchFileTensor& tensor : file.tensors) {
      if (!first_key.empty()) tensor.path.emplace(tensor.path.begin(), first_key);
      add_tensor(std::move(tensor), rank);
    }
    for (FlatValue& value : file.values) {
      if (!first_key.empty()) value.path.emplace(value.path.begin(), first_key);
      add_value(std::move(value));
    }
  }

  std::unique_ptr<Source> finish() {
    note_differences();
    std::vector<ResolvedTensor> tensors;
    for (auto& [name, merged] : tensors_) tensors.push_back(std::move(merged.tensor));
    for (auto& [name, value] : values_) catalog_.values.push_back(std::move(value));
    return make_resolved_source(std::move(catalog_), std::move(tensors), std::move(files_));
  }

 private:
  void add_tensor(TorchFileTensor&& found, int64_t rank) {
    const DTensorSpec* spec = found.tensor.spec.get();
    std::string name = joined(found.path);
    auto [at, fresh] = tensors_.try_emplace(name);
    Merged& merged = at->second;
    if (fresh) {
      merged.is_dtensor = spec != nullptr;
      start_entry(merged.tensor.entry, std::move(name), found);
    } else {
      check_same(merged, found);
    }
    if (spec != nullptr) {
      add_shard(merged, found, rank);
    } else if (fresh) {
      add_chunk(merged, whole(found.tensor.shape), std::move(found.payload));
    } else if (!same_bytes(found.payload, merged.tensor.payloads[0])) {
      merged.differs = true;
    }
  }

  /// As far as checksums can tell.
  static bool same_bytes(const Payload& a, const Payload& b) {
    return a.crc32 == b.crc32 && a.length == b.length && a.first == b.first && a.strides == b.strides;
  }

  static void start_entry(TensorEntry& entry, std::string name, TorchFileTensor& found) {
    entry.name = std::move(name);
    entry.dtype = found.tensor.dtype;
    entry.shape = found.tensor.global_shape();
    entry.requires_grad = found.tensor.requires_grad;
    entry.path = std::move(found.path);
    entry.boxes = BoxList(entry.shape.size());
  }

  void check_same(const Merged& merged, const TorchFileTensor& found) const {
    const TensorEntry& entry = merged.tensor.entry;
    const PickledTensor& tensor = found.tensor;
    if (entry.dtype == tensor.dtype && entry.shape == tensor.global_shape() &&
        merged.is_dtensor == (tensor.spec != nullptr)) {
      return;
    }
    auto kind = [](bool is_dtensor) { return is_dtensor ? "DTensor" : "plain tensor"; };
    throw MismatchError("{}: {} is a {} of {} {}, but a {} of {} {} on lower ranks", where(),
                        quote(entry.name), kind(tensor.spec != nullptr), name_of(tensor.dtype),
                        list_text(tensor.global_shape()), kind(merged.is_dtensor), name_of(entry.dtype),
                        list_text(entry.shape));
  }

  /// The boxes that the rank's local tensor holds, without those that a lower rank had.
  void add_shard(Merged& merged, const TorchFileTensor& found, int64_t rank) {
    const PickledTensor& local = found.tensor;
    const Layout& layout = local.spec->layout;
    if (layout.is_partial()) {
      throw UnsupportedError(
          "{}: {} is a DTensor {}, whose ranks hold operands of a sum; reduce it before it is saved", where(),
          quote(merged.tensor.entry.name), layout.text());
    }
    RankShard shard = shard_of(*local.spec, rank, merged.tensor.entry.name);
    bool outside = !layout.mesh().coordinates_of(rank);
    if (outside ? numel(local.shape) != 0 : shard.local_shape != local.shape) {
      throw MismatchError("{}: the local tensor of {} has shape {}, but rank {} of {} holds {} of {}",
                          where(), quote(merged.tensor.entry.name), list_text(local.shape), rank,
                          layout.text(), list_text(shard.local_shape), list_text(local.spec->shape));
    }
    for (LocalBox& box : shard.boxes) {
      if (!merged.boxes.emplace(box.global.offsets, box.global.sizes).second) continue;
      if (--boxes_allowed_ < 0) {
        throw CorruptError("{}: {} falls into more pieces than the file has bytes for", where(),
                           quote(merged.tensor.entry.name));
      }
      Payload payload = found.payload;
      payload.first = first_element(box.local_offset, local);
      add_chunk(merged, box.global, std::move(payload));
    }
  }

  RankShard shard_of(const DTensorSpec& spec, int64_t rank, const std::string& name) const {
    try {
      return spec.layout.shard(spec.shape, rank);
    } catch (const Error& error) {
      rethrow_with_context(error, fmt::format("{}: {}", where(), quote(name)));
    }
  }

  /// Where element `offset` of the row-major order of a tensor lies in its storage. (Torch's placements cut
  /// dims and keep them, so a box's strides are the tensor's.)
  static int64_t first_element(int64_t offset, const PickledTensor& tensor) {
    int64_t at = tensor.first;
    for (size_t d = tensor.shape.size(); d-- > 0;) {
      at += offset % tensor.shape[d] * tensor.strides[d];
      offset /= tensor.shape[d];
    }
    return at;
  }

  static void add_chunk(Merged& merged, const Box& box, Payload payload) {
    merged.tensor.entry.boxes.add(box);
    merged.tensor.payloads.push_back(std::move(payload));
  }

  void add_value(FlatValue&& found) {
    std::string name = joined(found.path);
    auto [at, fresh] = values_.try_emplace(name);
    ValueEntry& entry = at->second;
    if (fresh) {
      entry = {std::move(name), std::nullopt, std::move(found.value), std::move(found.path)};
    } else if (!(entry.value == found.value)) {
      differing_values_.insert(entry.name);
    }
  }

  void note_differences() {
    bool any_dtensor = std::ranges::any_of(tensors_, [](const auto& t) { return t.second.is_dtensor; });
    std::vector<std::string> differing;
    for (const auto& [name, merged] : tensors_) {
      if (merged.differs) differing.push_back(name);
    }
    if (!differing.empty() && !any_dtensor) {
      throw UnsupportedError(
          "{}: {} and {} more tensors have different values on different ranks, and no file has a DTensor: "
          "nothing "
          "says how the ranks' tensors belong together",
          quote(catalog_.root.string()), quote(differing[0]), differing.size() - 1);
    }
    note(differing, "tensors");
    note({differing_values_.begin(), differing_values_.end()}, "values");
  }

  void note(const std::vector<std::string>& names, std::string_view what) {
    if (names.empty()) return;
    catalog_.notes.push_back(
        fmt::format("{} {} (such as {}) are not the same on all {} ranks; the lowest rank's are taken",
                    names.size(), what, quote(names[0]), ranks_));
  }

  std::string where() const {
    return quote(catalog_.path_of(static_cast<uint32_t>(catalog_.files.size() - 1)).string());
  }

  std::unique_ptr<OpenFiles> files_;
  Catalog catalog_;
  std::map<std::string, Merged> tensors_;
  std::map<std::string, ValueEntry> values_;
  std::set<std::string> differing_values_;
  int64_t ranks_ = 0;
  // Boxes cost memory, and a file of a few bytes could ask for many of them (tensors can share storages).
  int64_t boxes_allowed_ = int64_t{1} << 16;
};

}  // namespace

bool is_rank_file_name(std::string_view name) { return parse_name(name).has_value(); }

std::unique_ptr<Source> open_rank_files(std::shared_ptr<const Store> store,
                                        const std::filesystem::path& folder) {
  std::vector<RankFiles> kinds = find_rank_files(store->list(folder), folder);
  check_kinds(kinds, folder);
  Merger merger(std::move(store), folder);
  for (const RankFiles& files : kinds) {
    for (size_t rank = 0; rank < files.names.size(); ++rank) {
      merger.add(files.names[rank], static_cast<int64_t>(rank),
                 kinds.size() > 1 ? files.kind : std::string());
    }
  }
  return merger.finish();
}

}  // namespace spolia
