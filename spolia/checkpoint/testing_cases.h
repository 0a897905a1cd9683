// The checkpoints that PyTorch wrote, as parameters of tests.
#pragma once

#include <cctype>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

namespace spolia {

/// Every case: SPOLIA_TEST_DATA/torch-X/CASE.
inline std::vector<std::filesystem::path> all_cases() {
  std::set<std::filesystem::path> cases;
  for (const auto& version : std::filesystem::directory_iterator(SPOLIA_TEST_DATA)) {
    if (!version.path().filename().string().starts_with("torch-")) continue;
    for (const auto& c : std::filesystem::directory_iterator(version)) cases.insert(c.path());
  }
  return {cases.begin(), cases.end()};
}

inline std::string name_of_case(const testing::TestParamInfo<std::filesystem::path>& param) {
  std::string name = param.param.parent_path().filename().string() + "_" + param.param.filename().string();
  for (char& c : name) c = std::isalnum(static_cast<unsigned char>(c)) ? c : '_';
  return name;
}

}  // namespace spolia
