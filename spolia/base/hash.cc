#include "spolia/base/hash.h"

#include <fmt/format.h>
#include <isa-l/crc.h>
#include <openssl/evp.h>
#include <zlib.h>

#if defined(__x86_64__)
#include <xxh_x86dispatch.h>  // xxhash.h, with each call going to the widest registers this processor has
#else
#include <xxhash.h>
#endif

#include "spolia/base/error.h"

namespace spolia {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  Context() { start(); }
  ~Context() { EVP_MD_CTX_free(evp); }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  void start() {
    if (evp == nullptr || EVP_DigestInit_ex(evp, EVP_sha256(), nullptr) != 1) {
      throw Error(ErrorKind::kUnsupported, "OpenSSL has no SHA-256 here; it is needed for digests");
    }
  }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;
Sha256& Sha256::operator=(Sha256&&) noexcept = default;

void Sha256::update(std::span<const std::byte> bytes) {
  EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size());
}

std::string Sha256::finish_hex() {
  std::array<unsigned char, 32> digest;
  EVP_DigestFinal_ex(context_->evp, digest.data(), nullptr);
  context_->start();
  return fmt::format("{:02x}", fmt::join(digest, ""));
}

uint32_t crc32(uint32_t crc, std::span<const std::byte> bytes) {
  return crc32_gzip_refl(crc, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size());
}

uint32_t crc32_combine(uint32_t crc_a, uint32_t crc_b, int64_t length_b) {
  return static_cast<uint32_t>(::crc32_combine(crc_a, crc_b, length_b));
}

uint64_t xxh3_64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

}  // namespace spolia
