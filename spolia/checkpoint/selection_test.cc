#include "spolia/checkpoint/selection.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

Catalog catalog_of(const std::vector<std::pair<std::string, KeyPath>>& tensors) {
  Catalog catalog;
  for (const auto& [name, path] : tensors) {
    catalog.tensors.emplace_back();
    catalog.tensors.back().name = name;
    catalog.tensors.back().path = path;
  }
  sort_entries(catalog);
  return catalog;
}

std::vector<std::string> names(const Catalog& catalog, const Selection& selection) {
  std::vector<std::string> out;
  for (const SelectedEntry& s : select_entries(catalog, selection).tensors) out.push_back(s.name);
  return out;
}

std::string refusal(const Catalog& catalog, const Selection& selection) {
  try {
    select_entries(catalog, selection);
  } catch (const InvalidArgumentError& error) {
    return error.what();
  }
  return "";
}

using Names = std::vector<std::string>;

TEST(Selection, TakesEverythingByDefault) {
  EXPECT_EQ(names(catalog_of({{"b", {}}, {"a", {}}}), {}), (Names{"a", "b"}));
}

TEST(Selection, SelectsAndDropsByPattern) {
  const Catalog catalog = catalog_of({{"model.a.w", {}}, {"model.b.w", {}}, {"optimizer.a.w", {}}});
  EXPECT_EQ(names(catalog, {.select = {"model.*"}, .drop = {"*.b.?"}}), (Names{"model.a.w"}));
  EXPECT_EQ(names(catalog, {.select = {"*.a.*", "model.b.w"}}).size(), 3u);
}

TEST(Selection, RootFollowsThePathNotTheDots) {
  const Catalog catalog = catalog_of({{"model.w", {"model", "w"}},
                                      {"model.x.y", {"model.x", "y"}},
                                      {"opt.0.e.f", {"opt", int64_t{0}, "e.f"}}});
  EXPECT_EQ(names(catalog, {.root = "model"}), (Names{"w"}));
  EXPECT_EQ(names(catalog, {.root = "model.x"}), (Names{"y"}));
  EXPECT_EQ(names(catalog, {.root = "opt.0"}), (Names{"e.f"}));
  EXPECT_NE(refusal(catalog, {.root = "opt.0.e"}), "");
}

TEST(Selection, RootOfNamesWithoutPaths) {
  const Catalog catalog = catalog_of({{"model.w", {}}, {"modelling.w", {}}});
  EXPECT_EQ(names(catalog, {.root = "model"}), (Names{"w"}));
}

TEST(Selection, PrefixesAreStrippedAndAdded) {
  const Catalog catalog = catalog_of({{"_orig_mod.a", {}}, {"b", {}}});
  EXPECT_EQ(names(catalog, {.strip_prefix = "_orig_mod.", .add_prefix = "x."}), (Names{"x.a", "x.b"}));
}

TEST(Selection, NamesWhatMatchesNothing) {
  const Catalog catalog = catalog_of({{"a", {}}});
  EXPECT_NE(refusal(catalog, {.root = "modle"}).find("\"modle\""), std::string::npos);
  EXPECT_NE(refusal(catalog, {.select = {"a", "z*"}}).find("\"z*\""), std::string::npos);
  EXPECT_NE(refusal(catalog, {.drop = {"z*"}}).find("--drop"), std::string::npos);
  EXPECT_NE(refusal(catalog, {.strip_prefix = "m."}).find("\"m.\""), std::string::npos);
  EXPECT_NE(refusal(catalog, {.drop = {"a"}}).find("nothing would be left"), std::string::npos);
}

TEST(Selection, RefusesTwoTensorsOfOneName) {
  const Catalog catalog = catalog_of({{"m.a", {}}, {"a", {}}});
  const std::string message = refusal(catalog, {.strip_prefix = "m."});
  EXPECT_NE(message.find("\"m.a\""), std::string::npos) << message;
}

}  // namespace
}  // namespace spolia
