#include "spolia/format/torch/torch_file.h"

#include "spolia/base/error.h"
#include "spolia/base/text.h"

namespace spolia {
namespace {

constexpr int64_t kEndBytes = int64_t{64} << 10;

/// The same payload, with nothing before it in `stored`.
Payload without_offset(Payload payload) {
  if (payload.codec == Codec::kNone) {
    payload.stored.offset += payload.offset;
    payload.stored.length = payload.length;
    payload.offset = 0;
  }
  return payload;
}

}  // namespace

TorchFile read_torch_file(const InputFile& file, uint32_t index) {
  auto bytes = keep_ends(open_bytes(file, 0, file.size(), Codec::kNone), kEndBytes);
  TorchArchive archive(*bytes, file.size());
  TensorPickle pickle(archive);
  FlatState state = flatten(pickle);
  TorchFile result;
  for (FlatTensor& flat : state.tensors) {
    Payload payload = payload_of(archive, pickle.storage_of(*flat.tensor), *flat.tensor,
                                 {index, 0, file.size()}, Codec::kNone);
    result.tensors.push_back({std::move(flat.path), *flat.tensor, without_offset(std::move(payload))});
  }
  result.values = std::move(state.values);
  result.tensors_in_values = state.tensors_in_values;
  return result;
}

void note_tensors_in_values(Catalog& catalog, const TorchFile& file, const std::string& name) {
  if (file.tensors_in_values == 0) return;
  catalog.notes.push_back(
      fmt::format("{} holds {} tensors inside of values that are no dicts or lists; they are "
                  "shown there, but not read",
                  quote(name), file.tensors_in_values));
}

}  // namespace spolia
