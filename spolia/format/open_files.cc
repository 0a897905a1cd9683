#include "spolia/format/open_files.h"

namespace spolia {

const InputFile& OpenFiles::get(const Catalog& catalog, uint32_t index) const {
  {
    std::lock_guard lock(mutex_);
    if (index < files_.size() && files_[index] != nullptr) return *files_[index];
  }
  // Opened without the lock: on a network file system other threads need not wait for it.
  return keep(index, store_->open_inside(catalog.root, catalog.files[index]));
}

const InputFile& OpenFiles::keep(uint32_t index, std::unique_ptr<InputFile> file) const {
  std::lock_guard lock(mutex_);
  if (index >= files_.size()) files_.resize(size_t{index} + 1);
  if (files_[index] == nullptr) files_[index] = std::move(file);
  return *files_[index];
}

}  // namespace spolia
