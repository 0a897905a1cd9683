// The files of a catalog, each opened when it is first asked for and kept.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "spolia/state/catalog.h"
#include "spolia/store/store.h"

namespace spolia {

/// What a Source keeps its open files in. All methods are thread-safe; the references live as long as this
/// object. Two threads that ask for one file at the same moment may both open it; one of the two is kept.
class OpenFiles {
 public:
  explicit OpenFiles(std::shared_ptr<const Store> store) : store_(std::move(store)) {}

  /// File `index` of the catalog, a valid one. It is opened with Store::open_inside(): catalogs get their
  /// names from strangers. The catalog may gain files between calls, but not lose or reorder them.
  const InputFile& get(const Catalog& catalog, uint32_t index) const;

  /// Keeps a file that is open already as file `index`: one that the user named, who is no stranger.
  const InputFile& keep(uint32_t index, std::unique_ptr<InputFile> file) const;

  const Store& store() const { return *store_; }

 private:
  std::shared_ptr<const Store> store_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<InputFile>> files_;  // under mutex_; nullptr where not opened yet
};

}  // namespace spolia
