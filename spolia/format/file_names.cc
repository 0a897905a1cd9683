#include "spolia/format/file_names.h"

#include <algorithm>
#include <array>

#include "spolia/base/text.h"
#include "spolia/format/native/native_source.h"
#include "spolia/format/safetensors/safetensors_source.h"
#include "spolia/format/torch/rank_files_source.h"

namespace spolia {

bool is_number(std::string_view text) {
  return !text.empty() && std::ranges::all_of(text, [](char c) { return c >= '0' && c <= '9'; });
}

bool is_dcp_name(std::string_view name) {
  if (name == ".metadata" || name.ends_with(".distcp")) return true;
  constexpr std::string_view kStart = "__", kEnd = ".metadata";  // __3.metadata: of one rank
  if (!name.starts_with(kStart) || !name.ends_with(kEnd)) return false;
  return is_number(name.substr(kStart.size(), name.size() - kStart.size() - kEnd.size()));
}

bool is_torch_bin_name(std::string_view name) {
  return glob_match("pytorch_model*.bin", name) || glob_match("pytorch_model*.bin.index.json", name);
}

bool is_torch_name(std::string_view name) {
  constexpr std::array<std::string_view, 4> kEndings = {".pt", ".pth", ".bin", ".ckpt"};
  return std::ranges::any_of(kEndings, [&](std::string_view ending) { return name.ends_with(ending); });
}

bool is_checkpoint_name(std::string_view name) {
  return is_dcp_name(name) || is_safetensors_name(name) || is_torch_bin_name(name) ||
         is_rank_file_name(name) || is_spolia_name(name) || is_spolia_value_name(name);
}

}  // namespace spolia
