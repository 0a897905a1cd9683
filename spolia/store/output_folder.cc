#include "spolia/store/output_folder.h"

#include <utility>

#include "spolia/base/threads.h"

namespace spolia {

OutputFile& OutputFolder::create(const std::string& name) {
  files_.push_back(store_.create(path_ / name));
  return *files_.back();
}

void OutputFolder::sync(size_t threads, const CancelToken* cancel, Cache cache) {
  const auto sync_file = [&](size_t, size_t f) {
    files_[f]->sync();
    if (cache == Cache::kDrop) files_[f]->drop_cached();
  };
  parallel_for(threads, files_.size(), sync_file, cancel);
  close();
}

void OutputFolder::close() {
  const auto files = std::exchange(files_, {});
  for (const auto& file : files) file->close();
}

}  // namespace spolia
