#include "spolia/comm/plugin.h"

#include <cstdlib>

#include <gtest/gtest.h>

#include "spolia/base/error.h"

namespace spolia {
namespace {

/// Sets an environment variable for a time.
class ScopedVariable {
 public:
  ScopedVariable(const char* name, const std::string& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    setenv(name, value.c_str(), 1);
  }
  ~ScopedVariable() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }

 private:
  const char* name_;
  std::string before_;
};

std::string refusal(std::string_view name) {
  try {
    load_plugin(name, "a_function", "install something");
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  return "";
}

TEST(Plugin, ThatIsNotThereIsSaidByName) {
  const ScopedVariable path("SPOLIA_PLUGIN_PATH", ":/some/where::/else where");
  const std::string message = refusal("spolia_nothing");
  for (const char* word : {"the plugin spolia_nothing is not there", "\"/some/where/libspolia_nothing.so\"",
                           "\"/else where/libspolia_nothing.so\"", "install something"}) {
    EXPECT_NE(message.find(word), std::string::npos) << message;
  }
}

TEST(Plugin, LooksBesideTheProgramToo) {
  const std::string message = refusal("spolia_nothing");
  EXPECT_NE(message.find("/lib/libspolia_nothing.so"), std::string::npos) << message;
}

TEST(Plugin, ThatIsNoLibraryIsRefusedByName) {
  const std::string folder = testing::TempDir() + "plugin_test";
  const std::string file = folder + "/libspolia_broken.so";
  ASSERT_EQ(system(("mkdir -p '" + folder + "' && echo nonsense >'" + file + "'").c_str()), 0);
  const ScopedVariable path("SPOLIA_PLUGIN_PATH", folder);
  const std::string message = refusal("spolia_broken");
  EXPECT_NE(message.find("libspolia_broken.so\" cannot be loaded"), std::string::npos) << message;
}

TEST(Plugin, WithoutTheFunctionIsOfAnotherVersion) {
  // The C library is a library without it.
  const ScopedVariable path("SPOLIA_PLUGIN_PATH", testing::TempDir() + "plugin_test_2");
  ASSERT_EQ(system(("mkdir -p '" + testing::TempDir() +
                    "plugin_test_2' && ln -sf \"$(ls /lib/*/libz.so.1 "
                    "/usr/lib/*/libz.so.1 /lib/libz.so.1 2>/dev/null | head -1)\" '" +
                    testing::TempDir() + "plugin_test_2/libspolia_other.so'")
                       .c_str()),
            0);
  const std::string message = refusal("spolia_other");
  EXPECT_NE(message.find("another version of Spolia"), std::string::npos) << message;
}

}  // namespace
}  // namespace spolia
