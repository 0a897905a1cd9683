// Which format lies at a path: decided by the names in a folder, and by a file's first bytes.
#include "spolia/format/source.h"

#include <algorithm>
#include <array>
#include <span>
#include <string>
#include <string_view>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/file_names.h"
#include "spolia/format/name_list.h"
#include "spolia/format/native/manifest.h"
#include "spolia/format/native/native_source.h"
#include "spolia/format/safetensors/header.h"
#include "spolia/format/safetensors/safetensors_source.h"
#include "spolia/format/torch/dcp_source.h"
#include "spolia/format/torch/rank_files_source.h"
#include "spolia/format/torch/torch_save_source.h"

namespace spolia {
namespace {

using std::filesystem::path;

constexpr std::string_view kMegatronFile = "latest_checkpointed_iteration.txt";

/// What a folder's names make it; where several would do, the first of these.
enum class FolderKind {
  kDcp,
  kSpolia,
  kSafetensors,
  kTorchBins,
  kRankFiles,
  kMegatronRun,
  kTorchFile,
  kNothing
};

FolderKind kind_of(const std::vector<FolderEntry>& entries) {
  auto has = [&](auto&& matches) {
    return std::ranges::any_of(entries,
                               [&](const FolderEntry& e) { return !e.is_folder && matches(e.name); });
  };
  if (has(is_dcp_name)) return FolderKind::kDcp;
  if (has(is_spolia_name)) return FolderKind::kSpolia;
  if (has(is_safetensors_name)) return FolderKind::kSafetensors;
  if (has(is_torch_bin_name)) return FolderKind::kTorchBins;
  if (has(is_rank_file_name)) return FolderKind::kRankFiles;
  if (has([](std::string_view name) { return name == kMegatronFile; })) return FolderKind::kMegatronRun;
  if (has(is_torch_name)) return FolderKind::kTorchFile;
  return FolderKind::kNothing;
}

/// Whether a folder is a checkpoint itself, or a run of some. One that cannot be listed is none.
bool is_checkpoint(const Store& store, const path& folder) {
  try {
    return kind_of(store.list(folder)) != FolderKind::kNothing;
  } catch (const Error&) {
    return false;
  }
}

std::vector<std::string> checkpoints_in(const Store& store, const path& folder,
                                        const std::vector<FolderEntry>& entries) {
  std::vector<std::string> names;
  for (const FolderEntry& entry : entries) {
    if (entry.is_folder && is_checkpoint(store, folder / entry.name)) names.push_back(entry.name);
  }
  return names;
}

[[noreturn]] void refuse_parent(const path& folder, const std::vector<std::string>& checkpoints) {
  throw UnsupportedError("{} is not a checkpoint itself, but holds some: name one of {} in it",
                         quote(folder.string()), name_list(checkpoints));
}

[[noreturn]] void refuse_folder(const Store& store, const path& folder,
                                const std::vector<FolderEntry>& entries) {
  auto checkpoints = checkpoints_in(store, folder, entries);
  if (!checkpoints.empty()) refuse_parent(folder, checkpoints);
  throw UnsupportedError(
      "{} is no checkpoint: looked for .metadata and *.distcp, spolia.json, *.safetensors and their index, "
      "pytorch_model*.bin, files of ranks such as *_rank_0.pt, and a single .pt, .pth, .bin or .ckpt",
      quote(folder.string()));
}

/// The folder of the newest checkpoint of a Megatron run, as the run's own file names it; empty where that is
/// not to be understood.
std::string newest_of_megatron(const Store& store, const path& folder) {
  auto file = store.open_inside(folder, std::string(kMegatronFile));
  std::string text(static_cast<size_t>(std::min<int64_t>(file->size(), 32)), '\0');
  file->read(0, std::as_writable_bytes(std::span(text)));
  text.erase(text.find_last_not_of(" \r\n\t") + 1);
  if (text == "release") return text;
  return is_number(text) ? fmt::format("iter_{:0>7}", text) : "";
}

[[noreturn]] void refuse_megatron_run(const Store& store, const path& folder,
                                      const std::vector<FolderEntry>& entries) {
  std::string newest = newest_of_megatron(store, folder);
  if (!newest.empty() && store.is_folder(folder / newest)) {
    throw UnsupportedError("{} is a Megatron run of several checkpoints: name one, say {}",
                           quote(folder.string()), quote((folder / newest).string()));
  }
  refuse_folder(store, folder, entries);
}

std::unique_ptr<Source> open_only_torch_file(std::shared_ptr<const Store> store, const path& folder,
                                             const std::vector<FolderEntry>& entries) {
  auto checkpoints = checkpoints_in(*store, folder, entries);
  if (!checkpoints.empty()) refuse_parent(folder, checkpoints);
  std::vector<std::string> files;
  for (const FolderEntry& entry : entries) {
    if (!entry.is_folder && is_torch_name(entry.name)) files.push_back(entry.name);
  }
  if (files.size() > 1) {
    throw UnsupportedError("{} has several torch.save files: name one of {}", quote(folder.string()),
                           name_list(files));
  }
  return open_torch_save(std::move(store), folder / files.front());
}

std::unique_ptr<Source> open_folder(std::shared_ptr<const Store> store, const path& folder) {
  std::vector<FolderEntry> entries = store->list(folder);
  switch (kind_of(entries)) {
    case FolderKind::kDcp:
      return open_dcp(std::move(store), folder);
    case FolderKind::kSpolia:
      return open_spolia(std::move(store), folder);
    case FolderKind::kSafetensors:
      return open_safetensors_folder(std::move(store), folder);
    case FolderKind::kTorchBins:
      return open_torch_bin_folder(std::move(store), folder);
    case FolderKind::kRankFiles:
      return open_rank_files(std::move(store), folder);
    case FolderKind::kMegatronRun:
      refuse_megatron_run(*store, folder, entries);
    case FolderKind::kTorchFile:
      return open_only_torch_file(std::move(store), folder, entries);
    case FolderKind::kNothing:
      break;
  }
  refuse_folder(*store, folder, entries);
}

/// The zip that torch.save writes, or the pickle it wrote before 1.6, whose reader says more.
bool looks_like_torch(std::span<const std::byte> start) {
  constexpr std::array kZip = {std::byte{'P'}, std::byte{'K'}, std::byte{3}, std::byte{4}};
  constexpr std::array kPickle = {std::byte{0x80}, std::byte{2}, std::byte{0x8a}, std::byte{10}};
  auto starts_with = [&](std::span<const std::byte> magic) {
    return start.size() >= magic.size() && std::ranges::equal(start.first(magic.size()), magic);
  };
  return starts_with(kZip) || starts_with(kPickle);
}

path folder_of(const path& file) { return file.has_parent_path() ? file.parent_path() : "."; }

std::unique_ptr<Source> open_file(std::shared_ptr<const Store> store, const path& file) {
  std::string name = file.filename().string();
  if (is_dcp_name(name)) {
    throw UnsupportedError("{} is one file of a DCP checkpoint: name its folder", quote(file.string()));
  }
  if (name == kSpoliaManifest) return open_spolia(std::move(store), folder_of(file));
  if (name.ends_with(".safetensors")) return open_safetensors_file(std::move(store), file);
  if (name.ends_with(".safetensors.index.json")) return open_safetensors_index(std::move(store), file);
  if (name.ends_with(".bin.index.json")) {
    throw UnsupportedError("{} is an index: name its folder", quote(file.string()));
  }
  auto opened = store->open(file);
  std::array<std::byte, 16> buffer;
  auto start = std::span(buffer).first(static_cast<size_t>(std::min<int64_t>(opened->size(), 16)));
  opened->read(0, start);
  if (looks_like_safetensors(start)) return open_safetensors_file(std::move(store), file);
  if (looks_like_torch(start) || is_torch_name(name)) return open_torch_save(std::move(store), file);
  throw UnsupportedError("{} is no checkpoint: it is neither safetensors nor what torch.save writes",
                         quote(file.string()));
}

}  // namespace

std::unique_ptr<Source> open_source(std::shared_ptr<const Store> store, const path& path) {
  if (store->is_folder(path)) return open_folder(std::move(store), path);
  if (!store->exists(path)) throw NotFoundError("{}: there is no such file or folder", quote(path.string()));
  return open_file(std::move(store), path);
}

}  // namespace spolia
