#include "spolia/checkpoint/staged_folder.h"

#include <unistd.h>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

/// "out/" names what "out" names.
std::filesystem::path without_trailing_slash(const std::filesystem::path& path) {
  return path.has_filename() ? path : path.parent_path();
}

std::filesystem::path parent_of(const std::filesystem::path& path) {
  return path.has_parent_path() ? path.parent_path() : ".";
}

}  // namespace

void refuse_inside(const Store& store, const std::filesystem::path& source,
                   const std::filesystem::path& destination) {
  if (!store.is_folder(source)) return;
  const auto below = std::filesystem::weakly_canonical(std::filesystem::absolute(destination))
                         .lexically_relative(std::filesystem::canonical(source));
  if (!below.empty() && *below.begin() != "..") {
    throw InvalidArgumentError("{} lies inside the source {}, which is only read; write somewhere else",
                               quote(destination.string()), quote(source.string()));
  }
}

StagedFolder::StagedFolder(Store& store, const std::filesystem::path& folder)
    : store_(store), final_(without_trailing_slash(folder)) {
  const std::filesystem::path parent = parent_of(final_);
  if (store_.exists(final_)) {
    throw InvalidArgumentError("{} exists already; give a name that is free, or remove it first",
                               quote(final_.string()));
  }
  if (!store_.is_folder(parent)) {
    throw InvalidArgumentError("there is no folder {} to put {} into", quote(parent.string()),
                               quote(final_.filename().string()));
  }
  const std::string prefix = final_.filename().string() + ".partial-";
  for (const FolderEntry& entry : store_.list(parent)) {
    if (entry.name.starts_with(prefix)) leftovers_.push_back((parent / entry.name).string());
  }
  for (int attempt = 0;; ++attempt) {
    partial_ =
        parent / fmt::format("{}{}{}", prefix, ::getpid(), attempt == 0 ? "" : fmt::format("-{}", attempt));
    if (!store_.exists(partial_)) break;
  }
  store_.create_folder(partial_);
}

StagedFolder::~StagedFolder() {
  if (published_) return;
  try {
    store_.remove_all(partial_);
  } catch (...) {
    // What went wrong before matters more; the folder's name says that it is partial.
  }
}

std::unique_ptr<OutputFile> StagedFolder::create(const std::string& name) {
  return store_.create(partial_ / name);
}

void StagedFolder::publish() {
  store_.sync_folder(partial_);
  store_.rename(partial_, final_);
  published_ = true;
  store_.sync_folder(parent_of(final_));
}

}  // namespace spolia
