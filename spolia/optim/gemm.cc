#include "spolia/optim/gemm.h"

#include <array>
#include <dnnl.hpp>
#include <map>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "spolia/base/error.h"
#include "spolia/device/buffer.h"
#include "spolia/tensor/cast.h"

// oneDNN of Debian runs on GNU's OpenMP, whose number of threads belongs to the calling thread. Declared here
// since clang's omp.h would bring another runtime with it.
extern "C" {
int omp_get_max_threads();
void omp_set_num_threads(int);
}

namespace spolia {
namespace {

/// Holds the calling thread's products to a number of threads.
class ThreadLimit {
 public:
  explicit ThreadLimit(int threads) : before_(omp_get_max_threads()) { omp_set_num_threads(threads); }
  ~ThreadLimit() { omp_set_num_threads(before_); }
  ThreadLimit(const ThreadLimit&) = delete;
  ThreadLimit& operator=(const ThreadLimit&) = delete;

 private:
  int before_;
};

/// Whether oneDNN has kernels for bfloat16 here at all.
bool has_bfloat16_products() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#else
  return false;
#endif
}

/// Plain loops in an order that lets the compiler use the processor's vectors.
void multiply_plainly(int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, double* c, int64_t c_stride) {
  auto* x = static_cast<const double*>(a.data);
  auto* y = static_cast<const double*>(b.data);
  for (int64_t i = 0; i < m; ++i) {
    double* row = c + i * c_stride;
    for (int64_t j = 0; j < n; ++j) row[j] = 0;
    for (int64_t l = 0; l < k; ++l) {
      double factor = a.transposed ? x[l * a.stride + i] : x[i * a.stride + l];
      if (b.transposed) {
        for (int64_t j = 0; j < n; ++j) row[j] += factor * y[j * b.stride + l];
      } else {
        for (int64_t j = 0; j < n; ++j) row[j] += factor * y[l * b.stride + j];
      }
    }
  }
}

[[noreturn]] void rethrow(const dnnl::error& error) {
  if (error.status == dnnl_out_of_memory)
    throw IoError("there is not enough memory for a matrix product: {}", error.what());
  throw UnsupportedError("the matrix library (oneDNN) refuses a product: {}", error.what());
}

struct Product {  // what a prepared kernel depends on
  DType in, out;
  int64_t m, n, k, a_stride, b_stride, c_stride;
  bool a_transposed, b_transposed;
  friend auto operator<=>(const Product&, const Product&) = default;
};

}  // namespace

bool bfloat16_products_are_fast() {
#if defined(__x86_64__)
  static const bool fast = [] {
    unsigned a, b, c, d;
    if (!has_bfloat16_products() || !__get_cpuid(0, &a, &b, &c, &d)) return false;
    const bool intel = b == signature_INTEL_ebx && d == signature_INTEL_edx && c == signature_INTEL_ecx;
    unsigned dot_products = 0, e, f, g;
    if (!__get_cpuid_count(7, 1, &dot_products, &e, &f, &g)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool amx = (d >> 22 & 1) && (d >> 24 & 1);    // AMX-BF16, AMX-TILE
    return intel ? amx : (dot_products >> 5 & 1) != 0;  // AVX512_BF16
  }();
  return fast;
#else
  return false;
#endif
}

struct Gemm::Library {
  struct Kernel {
    dnnl::matmul::primitive_desc description;
    dnnl::matmul primitive;
  };
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Product, Kernel> kernels;
  Buffer scratch;
  std::array<std::vector<float>, 3> widened;  // where the library cannot multiply bfloat16

  const Kernel& kernel(const Product& product) {
    auto found = kernels.find(product);
    if (found != kernels.end()) return found->second;
    if (kernels.size() >= 1024) kernels.clear();  // a caller of ever new shapes
    auto type = [](DType dtype) {
      return dtype == DType::kFloat32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
    };
    auto strides = [](int64_t stride, bool transposed) {
      return transposed ? dnnl::memory::dims{1, stride} : dnnl::memory::dims{stride, 1};
    };
    const Product& p = product;
    dnnl::memory::desc a({p.m, p.k}, type(p.in), strides(p.a_stride, p.a_transposed));
    dnnl::memory::desc b({p.k, p.n}, type(p.in), strides(p.b_stride, p.b_transposed));
    dnnl::memory::desc c({p.m, p.n}, type(p.out), strides(p.c_stride, false));
    dnnl::primitive_attr attributes;  // scratch memory of ours: the library's own belongs to a thread
    attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
    dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), attributes, engine);
    return kernels.emplace(product, Kernel{description, dnnl::matmul(description)}).first->second;
  }

  void multiply(const Product& product, const void* a, const void* b, void* c) {
    const Kernel& chosen = kernel(product);
    auto needed = static_cast<int64_t>(chosen.description.scratchpad_desc().get_size());
    if (scratch.size() < needed) scratch = Buffer(needed);
    auto memory = [&](const dnnl::memory::desc& desc, const void* data) {
      return dnnl::memory(desc, engine, const_cast<void*>(data));
    };
    chosen.primitive.execute(
        stream, {{DNNL_ARG_SRC, memory(chosen.description.src_desc(), a)},
                 {DNNL_ARG_WEIGHTS, memory(chosen.description.weights_desc(), b)},
                 {DNNL_ARG_DST, memory(chosen.description.dst_desc(), c)},
                 {DNNL_ARG_SCRATCHPAD, memory(chosen.description.scratchpad_desc(), scratch.data())}});
    stream.wait();
  }

  /// A dense float32 copy of a bfloat16 operand of `rows` x `columns` as it lies.
  MatrixIn widen(std::vector<float>& into, MatrixIn from, int64_t rows, int64_t columns) {
    if (from.transposed) std::swap(rows, columns);
    into.resize(static_cast<size_t>(rows * columns));
    const std::array sizes{rows, columns}, to{columns * 4, int64_t{4}}, at{from.stride * 2, int64_t{2}};
    cast_strided(sizes, DType::kFloat32, into.data(), to, DType::kBFloat16, from.data, at);
    return {into.data(), columns, from.transposed};
  }
};

Gemm::Gemm(int threads) : threads_(threads) {
  if (threads < 1) throw InvalidArgumentError("a matrix product takes one thread or more, not {}", threads);
  try {
    library_ = std::make_unique<Library>();
  } catch (const dnnl::error& error) {
    rethrow(error);
  }
}
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;
Gemm::~Gemm() = default;

void Gemm::multiply(DType in, DType out, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c,
                    int64_t c_stride) {
  const bool plain = in == DType::kFloat64 && out == in;
  const bool narrow = in == DType::kBFloat16 && (out == in || out == DType::kFloat32);
  if (!plain && !narrow && !(in == DType::kFloat32 && out == in))
    throw UnsupportedError("no products of {} are computed in {}", name_of(in), name_of(out));
  operations_ += 2 * m * n * k;
  if (m == 0 || n == 0) return;
  if (k == 0) throw InvalidArgumentError("a product of matrices without columns is asked for");
  if (plain) return multiply_plainly(m, n, k, a, b, static_cast<double*>(c), c_stride);

  ThreadLimit limit(threads_);
  try {
    if (narrow && !has_bfloat16_products()) {
      a = library_->widen(library_->widened[0], a, m, k);
      b = library_->widen(library_->widened[1], b, k, n);
      std::vector<float>& result = library_->widened[2];
      result.resize(static_cast<size_t>(m * n));
      library_->multiply(
          {DType::kFloat32, DType::kFloat32, m, n, k, a.stride, b.stride, n, a.transposed, b.transposed},
          a.data, b.data, result.data());
      const int64_t width = element_bytes(out);
      cast_strided(std::array{m, n}, out, c, std::array{c_stride * width, width}, DType::kFloat32,
                   result.data(), std::array{n * 4, int64_t{4}});
      return;
    }
    library_->multiply({in, out, m, n, k, a.stride, b.stride, c_stride, a.transposed, b.transposed}, a.data,
                       b.data, c);
  } catch (const dnnl::error& error) {
    rethrow(error);
  }
}

}  // namespace spolia
