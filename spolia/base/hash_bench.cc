// The hashes on one core, over 1 MiB in the caches and 256 MiB past them, against OpenSSL's one-shot SHA-256,
// libxxhash's own XXH3 (SSE2 alone) and memcpy.
#include <cstring>
#include <vector>

#include <benchmark/benchmark.h>
#include <openssl/sha.h>
#include <xxhash.h>

#include "spolia/base/hash.h"

namespace spolia {
namespace {

std::span<const std::byte> input(const benchmark::State& state) {
  static const std::vector<std::byte> bytes(size_t{256} << 20, std::byte{0x5A});
  return std::span(bytes).first(static_cast<size_t>(state.range(0)));
}

template <class Hash>
void run(benchmark::State& state, Hash hash) {
  std::span<const std::byte> bytes = input(state);
  for (auto _ : state) benchmark::DoNotOptimize(hash(bytes));
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(bytes.size()));
}

void bench_memcpy(benchmark::State& state) {
  static std::vector<std::byte> target(size_t{256} << 20);
  run(state, [](std::span<const std::byte> bytes) {
    std::memcpy(target.data(), bytes.data(), bytes.size());
    benchmark::ClobberMemory();
    return target.data();
  });
}

void bench_crc32(benchmark::State& state) {
  run(state, [](std::span<const std::byte> bytes) { return crc32(0, bytes); });
}

void bench_sha256(benchmark::State& state) {
  Sha256 hash;
  run(state, [&](std::span<const std::byte> bytes) {
    hash.update(bytes);
    return hash.finish_hex();
  });
}

void bench_openssl_sha256(benchmark::State& state) {
  unsigned char digest[SHA256_DIGEST_LENGTH];
  run(state, [&](std::span<const std::byte> bytes) {
    return SHA256(reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), digest)[0];
  });
}

void bench_xxh3(benchmark::State& state) {
  run(state, [](std::span<const std::byte> bytes) { return xxh3_64(bytes); });
}

void bench_libxxhash_xxh3(benchmark::State& state) {
  run(state, [](std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); });
}

void sizes(benchmark::internal::Benchmark* bench) { bench->Arg(1 << 20)->Arg(256 << 20); }

BENCHMARK(bench_memcpy)->Apply(sizes);
BENCHMARK(bench_crc32)->Apply(sizes);
BENCHMARK(bench_sha256)->Apply(sizes);
BENCHMARK(bench_openssl_sha256)->Apply(sizes);
BENCHMARK(bench_xxh3)->Apply(sizes);
BENCHMARK(bench_libxxhash_xxh3)->Apply(sizes);

}  // namespace
}  // namespace spolia
