#include "spolia/base/error.h"

#include <cerrno>
#include <string>

#include <gtest/gtest.h>

namespace spolia {
namespace {

TEST(Error, CarriesItsKindAndMessage) {
  try {
    throw CorruptError("{} at {}", "a bad length", 12);
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kCorrupt);
    EXPECT_EQ(std::string(error.what()), "a bad length at 12");
    EXPECT_EQ(name_of(error.kind()), "corrupt");
  }
}

TEST(Error, OfTheSystemSaysWhy) {
  EXPECT_THROW(throw_system_error(ENOENT, "opening x"), NotFoundError);
  try {
    throw_system_error(EACCES, "opening x");
  } catch (const IoError& error) {
    EXPECT_EQ(std::string(error.what()), "opening x: Permission denied");
  }
}

TEST(Error, KeepsItsKindUnderMoreContext) {
  try {
    rethrow_with_context(MismatchError("shapes differ"), "tensor \"w\"");
  } catch (const Error& error) {
    EXPECT_EQ(error.kind(), ErrorKind::kMismatch);
    EXPECT_EQ(std::string(error.what()), "tensor \"w\": shapes differ");
  }
}

}  // namespace
}  // namespace spolia
