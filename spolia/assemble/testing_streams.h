// For tests of streams: states whose bytes are known, and ranks in one group or in rows and columns.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "spolia/assemble/assembler.h"
#include "spolia/assemble/sinks.h"
#include "spolia/checkpoint/testing_states.h"
#include "spolia/comm/world.h"
#include "spolia/layout/layout_text.h"

namespace spolia {

inline std::shared_ptr<const Layout> layout_of(const std::string& text) {
  return std::make_shared<const Layout>(parse_layout(text));
}

/// The bytes of a whole tensor of a RankState.
inline std::vector<std::byte> expected_bytes(const WantedTensor& tensor) {
  const int64_t width = element_bytes(tensor.dtype);
  std::vector<std::byte> bytes(static_cast<size_t>(byte_size(tensor.dtype, tensor.shape)));
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(width)) {
    write_element(tensor.name, static_cast<int64_t>(at) / width, width, bytes.data() + at);
  }
  return bytes;
}

/// How the ranks of a test stand: in one group, or in rows and columns.
struct Formation {
  bool one_group = true;
  std::vector<std::vector<int64_t>> rows;  // of ranks

  std::string text() const { return one_group ? "one group" : fmt::format("rows {}", fmt::join(rows, " ")); }
};

/// Makes the groups of a formation, and the assembler on them.
class Ensemble {
 public:
  Ensemble(World& world, const Formation& formation) : all_(world.all()) {
    if (formation.one_group) return;
    const auto make = [&](std::vector<int64_t> ranks, std::shared_ptr<Group>& own) {
      std::ranges::sort(ranks);
      if (auto group = world.create(ranks)) own = std::move(group);
    };
    for (const auto& row : formation.rows) make(row, row_);
    for (size_t c = 0; c < formation.rows[0].size(); ++c) {
      std::vector<int64_t> column;
      for (const auto& row : formation.rows) column.push_back(row[c]);
      make(column, column_);
    }
  }
  std::unique_ptr<Assembler> assembler(const StateDict& state, const AssemblerOptions& options) const {
    if (row_ == nullptr) return std::make_unique<Assembler>(*all_, state, options);
    return std::make_unique<Assembler>(row_.get(), column_.get(), state, options);
  }

  StreamEnds ends() const {
    return row_ == nullptr ? StreamEnds{all_.get(), nullptr} : StreamEnds{row_.get(), column_.get()};
  }

 private:
  std::shared_ptr<Group> all_, row_, column_;
};

}  // namespace spolia
