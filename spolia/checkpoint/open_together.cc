#include "spolia/checkpoint/open_together.h"

#include <cstdint>
#include <string>
#include <utility>

#include "spolia/comm/agree.h"
#include "spolia/comm/exchange.h"
#include "spolia/store/transcript.h"

namespace spolia {

std::unique_ptr<Source> open_together(Group& group, std::shared_ptr<const Store> store,
                                      const std::filesystem::path& path) {
  constexpr int64_t kMostMetadata = int64_t{16} << 30;
  require_equal(group, "the checkpoint to be opened", path.string());
  std::unique_ptr<Source> source;
  std::string metadata;
  agree(group, "opening", [&] {
    if (group.place() != 0) return;
    const auto transcript = std::make_shared<Transcript>();
    source = open_source(recording_store(store, transcript), path);
    transcript->close();
    if (group.size() > 1) metadata = transcript->encode();
  });
  const std::vector<std::string> texts = all_gather_texts(group, metadata, kMostMetadata);
  agree(group, "opening", [&] {
    if (source != nullptr) return;
    source = open_source(replaying_store(store, Transcript::decode(texts[0])), path);
  });
  return source;
}

}  // namespace spolia
