#include "spolia/checkpoint/staged_folder.h"

#include <unistd.h>

#include <algorithm>
#include <system_error>

#include <fmt/format.h>

#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/file_names.h"

namespace spolia {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kPartial = "partial", kOld = "old";

/// The path to the folder's own name: "out/" names what "out" names.
fs::path to_own_name(const fs::path& folder) {
  const fs::path result = folder.has_filename() ? folder : folder.parent_path();
  const fs::path name = result.filename();
  if (name.empty() || name == "." || name == "..") {
    throw InvalidArgumentError("the path {} does not end in a folder's own name; write that out",
                               quote(folder.string()));
  }
  return result;
}

fs::path parent_of(const fs::path& folder) { return folder.has_parent_path() ? folder.parent_path() : "."; }

/// What is replaced is lost, so it must be a folder that holds a checkpoint, or nothing, and no more.
void check_replaceable(const Store& store, const fs::path& folder) {
  const std::string name = quote(folder.string());
  if (store.is_link(folder)) {
    throw InvalidArgumentError(
        "{} is a symbolic link, which is not overwritten: name the folder that it leads to, or remove it",
        name);
  }
  if (!store.is_folder(folder)) throw InvalidArgumentError("{} is no folder, so it is not overwritten", name);
  for (const FolderEntry& entry : store.list(folder)) {
    if (!entry.is_folder && is_checkpoint_name(entry.name)) continue;
    throw InvalidArgumentError(
        "{} is not overwritten, for it holds {}, which is no part of a checkpoint and would be lost: move "
        "that "
        "elsewhere, or give another name",
        name, quote(entry.name));
  }
}

/// The real path, as far as it is there.
fs::path real_path(const fs::path& given) {
  std::error_code error;
  fs::path real = fs::weakly_canonical(fs::absolute(given), error);
  if (error) throw_system_error(error.value(), fmt::format("cannot look at {}", quote(given.string())));
  return real;
}

/// Whether `inner` is `outer`, or lies in it; both are real.
bool is_inside(const fs::path& inner, const fs::path& outer) {
  const fs::path below = inner.lexically_relative(outer);
  return !below.empty() && *below.begin() != "..";
}

}  // namespace

void refuse_inside(const Store& store, const fs::path& source, const fs::path& destination) {
  if (!store.exists(source)) return;
  const fs::path from = real_path(source), to = real_path(destination);
  if (to == from) {
    throw InvalidArgumentError("{} is the source itself, which is only read; write somewhere else",
                               quote(destination.string()));
  }
  if (is_inside(to, from)) {
    throw InvalidArgumentError("{} lies inside the source {}, which is only read; write somewhere else",
                               quote(destination.string()), quote(source.string()));
  }
  if (is_inside(from, to)) {
    throw InvalidArgumentError("the source {} lies inside {} and is only read; write somewhere else",
                               quote(source.string()), quote(destination.string()));
  }
}

StagedFolder::StagedFolder(Store& store, const fs::path& folder, Existing existing)
    : store_(store), existing_(existing), final_(to_own_name(folder)), parent_(parent_of(final_)) {
  const bool is_taken = store_.exists(final_);
  if (is_taken && existing_ == Existing::kRefuse) {
    throw InvalidArgumentError(
        "{} exists already; give a name that is free, remove it first, or overwrite it "
        "(--overwrite)",
        quote(final_.string()));
  }
  if (is_taken) check_replaceable(store_, final_);
  if (!store_.is_folder(parent_)) {
    throw InvalidArgumentError("there is no folder {} to put {} into", quote(parent_.string()),
                               quote(final_.filename().string()));
  }
  note_leftovers();
  partial_ = free_name(kPartial);
  store_.create_folder(partial_);
  files_.emplace(store_, partial_);
  try {
    if (is_taken && existing_ == Existing::kExchange) check_exchange();
  } catch (...) {
    remove_partial();
    throw;
  }
}

StagedFolder::~StagedFolder() {
  if (!in_place_) remove_partial();
}

void StagedFolder::note_leftovers() {
  const std::string name = final_.filename().string();
  for (const FolderEntry& entry : store_.list(parent_)) {
    const std::string other = (parent_ / entry.name).string();
    if (entry.name.starts_with(fmt::format("{}.{}-", name, kPartial))) {
      notes_.push_back(fmt::format(
          "{} is partial: if no other run is still writing it, it was left by one that was killed "
          "and can be removed",
          quote(other)));
    } else if (entry.name.starts_with(fmt::format("{}.{}-", name, kOld))) {
      notes_.push_back(
          fmt::format("{} is what {} was before a run replaced it that was killed, and can be removed",
                      quote(other), quote(final_.string())));
    }
  }
}

/// NAME.KIND-PID beside NAME, or with a further number where that is taken.
fs::path StagedFolder::free_name(std::string_view kind) const {
  const std::string name = fmt::format("{}.{}-{}", final_.filename().string(), kind, ::getpid());
  fs::path result = parent_ / name;
  for (int attempt = 1; store_.exists(result); ++attempt)
    result = parent_ / fmt::format("{}-{}", name, attempt);
  return result;
}

/// Tries in the partial folder what will be done to it, so that hours of work do not end in a refusal.
void StagedFolder::check_exchange() {
  const fs::path a = partial_ / "a", b = partial_ / "b";
  for (const fs::path& folder : {a, b}) store_.create_folder(folder);
  try {
    store_.exchange(a, b);
  } catch (const UnsupportedError&) {
    throw UnsupportedError(
        "{} exists, and its file system cannot exchange it with a new folder in one step: ask for a "
        "replacement in two steps (--non-atomic), during which neither is there, or give a name that is free",
        quote(final_.string()));
  }
  for (const fs::path& folder : {a, b}) store_.remove_all(folder);
}

void StagedFolder::publish(bool durable) {
  if (durable) {
    files_->sync(1);
    store_.sync_folder(partial_);
  } else {
    files_->close();
  }
  put_in_place();
  try {
    if (durable) store_.sync_folder(parent_);
  } catch (...) {
    take_back();
    throw;
  }
  remove_old();
}

void StagedFolder::put_in_place() {
  if (existing_ == Existing::kRefuse || !store_.exists(final_)) {
    store_.rename(partial_, final_);
  } else {
    check_replaceable(store_, final_);  // it may not be what it was at the start
    if (existing_ == Existing::kExchange) {
      store_.exchange(partial_, final_);
      old_ = partial_;
    } else {
      replace_in_two_steps();
    }
  }
  in_place_ = true;
}

void StagedFolder::replace_in_two_steps() {
  const fs::path aside = free_name(kOld);
  store_.rename(final_, aside);
  try {
    store_.rename(partial_, final_);
  } catch (...) {
    store_.rename(aside, final_);
    throw;
  }
  old_ = aside;
}

/// Undoes put_in_place(). Where that fails too, both folders stay, whole, one of them under its other name.
void StagedFolder::take_back() {
  try {
    if (old_ == partial_) {
      store_.exchange(partial_, final_);
    } else {
      store_.rename(final_, partial_);
      if (old_) store_.rename(*old_, final_);
    }
    in_place_ = false;
  } catch (const Error&) {
    // The caller is to hear of what went wrong first.
  }
}

/// The new folder is there for good: that the old one cannot be removed is no failure of publish().
void StagedFolder::remove_old() {
  if (!old_) return;
  try {
    store_.remove_all(*old_);
  } catch (const Error& error) {
    notes_.push_back(fmt::format("{} is what {} was before and can be removed: that failed just now: {}",
                                 quote(old_->string()), quote(final_.string()), error.what()));
  }
}

void StagedFolder::remove_partial() noexcept {
  files_.reset();  // some file systems cannot remove a folder that has an open file
  try {
    store_.remove_all(partial_);
  } catch (...) {
    // What went wrong before matters more; the folder's name says that it is partial.
  }
}

}  // namespace spolia
