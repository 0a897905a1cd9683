// Any pickle: the machine, the tree of values, and how values are shown.
#include <nlohmann/json.hpp>

#include "fuzz/fuzzing.h"
#include "spolia/base/hash.h"
#include "spolia/format/torch/pickle.h"
#include "spolia/format/torch/pickle_value.h"
#include "spolia/format/torch/torch_archive.h"
#include "spolia/format/torch/value_pickle.h"

namespace spolia::fuzzing {
namespace {

/// Reads back what is written of the value.
void check_written(const Value& value) {
  const std::string written = write_value_archive(value);
  auto bytes = bytes_of(written);
  auto source = bytes_in_memory({bytes.begin(), bytes.end()}, "memory");
  const std::vector<std::byte> pickle = TorchArchive(*source, source->size()).pickle();
  pickle::Heap heap;
  const pickle::Ref root = pickle::read(heap, pickle, "memory").root;
  require(pickle::to_value(root, "memory", pickle::TreeLimits::for_pickle(pickle.size())) == value);
}

}  // namespace

void run(Bytes bytes) {
  accepts([&] {
    pickle::Heap heap;
    pickle::Result result = pickle::read(heap, bytes, "memory");
    require(result.end > 0 && result.end <= bytes.size());
    Value value = pickle::to_value(result.root, "memory", pickle::TreeLimits::for_pickle(bytes.size()));
    Value copy = value;
    require(copy == value);
    require(!value.python_type().empty() || value.record() != nullptr || value.get_if<Global>() != nullptr);
    std::string text = value.text();
    require(is_utf8(text) && text.size() < 1000);
    require(std::ranges::none_of(text, [](unsigned char c) { return c < 0x20 || c == 0x7f; }));
    if (value.is_json()) value.to_json().dump();
    if (can_pickle(value)) check_written(value);
  });
}

}  // namespace spolia::fuzzing
