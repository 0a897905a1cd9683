#include "spolia/state/catalog.h"

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

TensorEntry tensor(std::string name) {
  TensorEntry entry;
  entry.name = std::move(name);
  return entry;
}

ValueEntry value(std::string name) {
  ValueEntry entry;
  entry.name = std::move(name);
  return entry;
}

Catalog catalog_of(std::vector<std::string> tensors, std::vector<std::string> values) {
  Catalog catalog;
  for (std::string& name : tensors) catalog.tensors.push_back(tensor(std::move(name)));
  for (std::string& name : values) catalog.values.push_back(value(std::move(name)));
  return catalog;
}

TEST(CatalogTest, EntriesAreSortedByBytesAndFound) {
  Catalog catalog = catalog_of({"b", "é", "a.10", "a.2", "", "Z"}, {"v", "u"});
  sort_entries(catalog);
  std::vector<std::string> names;
  for (const TensorEntry& entry : catalog.tensors) names.push_back(entry.name);
  EXPECT_EQ(names, (std::vector<std::string>{"", "Z", "a.10", "a.2", "b", "é"}));
  for (const std::string& name : names) {
    ASSERT_NE(catalog.find_tensor(name), nullptr);
    EXPECT_EQ(catalog.find_tensor(name)->name, name);
    EXPECT_EQ(catalog.find_value(name), nullptr);
  }
  EXPECT_EQ(catalog.find_value("u"), &catalog.values[0]);
  EXPECT_EQ(catalog.find_tensor("c"), nullptr);
  EXPECT_EQ(catalog.find_tensor("zz"), nullptr);
}

void expect_refused(Catalog catalog, std::string_view part) {
  try {
    sort_entries(catalog);
    FAIL() << "a name was there twice";
  } catch (const CorruptError& error) {
    EXPECT_NE(std::string_view(error.what()).find(part), std::string_view::npos) << error.what();
  }
}

TEST(CatalogTest, ANameIsThereOnce) {
  expect_refused(catalog_of({"a", "w", "b", "w"}, {}), "\"w\"");
  expect_refused(catalog_of({"a"}, {"x", "x"}), "\"x\"");
  expect_refused(catalog_of({"a", "both"}, {"x", "both"}), "\"both\"");
}

TEST(CatalogTest, Joined) {
  EXPECT_EQ(joined({}), "");
  EXPECT_EQ(joined({"model", "layers", int64_t{0}, "weight"}), "model.layers.0.weight");
  EXPECT_EQ(joined({int64_t{-1}}), "-1");
}

}  // namespace
}  // namespace spolia
