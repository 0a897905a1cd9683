#include "spolia/optim/gemm.h"

#include <algorithm>
#include <array>
#include <dnnl.hpp>
#include <map>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/device/buffer.h"
#include "spolia/optim/bfloat16_products.h"
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
  DType in;
  int64_t m, n, k, a_stride, b_stride, c_stride;
  bool a_transposed, b_transposed;
  friend auto operator<=>(const Product&, const Product&) = default;
};

#if defined(__x86_64__)
struct Processor {
  bool intel = false, bfloat16_dot_products = false, bfloat16_tiles = false;
  Processor() {
    unsigned a, b, c, d;
    if (!__get_cpuid(0, &a, &b, &c, &d)) return;
    intel = b == signature_INTEL_ebx && d == signature_INTEL_edx && c == signature_INTEL_ecx;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) bfloat16_dot_products = a >> 5 & 1;  // AVX512_BF16
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d))
      bfloat16_tiles = (d >> 22 & 1) && (d >> 24 & 1);  // AMX-BF16, AMX-TILE
  }
};
#else
struct Processor {
  bool intel = false, bfloat16_dot_products = false, bfloat16_tiles = false;
};
#endif
const Processor& processor() {
  static const Processor found;
  return found;
}

}  // namespace

bool bfloat16_products_are_fast() {
  return has_bfloat16_products() &&
         (processor().intel ? processor().bfloat16_tiles : processor().bfloat16_dot_products);
}

struct Gemm::Library {
  struct Kernel {
    dnnl::matmul::primitive_desc description;
    dnnl::matmul primitive;
  };
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::map<Product, Kernel> kernels;
  Buffer scratch, panel;
  std::array<std::vector<float>, 2> widened;  // where the library cannot multiply bfloat16
  const BFloat16Products* own = nullptr;      // tiles, where there are, are the library's

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
    dnnl::memory::desc c({p.m, p.n}, type(DType::kFloat32), strides(p.c_stride, false));
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

Gemm::Gemm(int threads, bool library_alone) : threads_(threads) {
  if (threads < 1) throw InvalidArgumentError("a matrix product takes one thread or more, not {}", threads);
  try {
    library_ = std::make_unique<Library>();
  } catch (const dnnl::error& error) {
    rethrow(error);
  }
  if (threads > 1 || library_alone || processor().bfloat16_tiles) return;
  library_->own = bfloat16_products();
  if (library_->own) library_->panel = Buffer(kBFloat16PanelBytes);
}
Gemm::Gemm(Gemm&&) noexcept = default;
Gemm& Gemm::operator=(Gemm&&) noexcept = default;
Gemm::~Gemm() = default;

/// Checks the dtype. Whether the product was a product for our own kernels, or none at all.
bool Gemm::multiply_here(DType in, bool lower, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b,
                         void* c, int64_t c_stride) {
  if (in != DType::kFloat64 && in != DType::kFloat32 && in != DType::kBFloat16)
    throw UnsupportedError("no products of {} are computed", name_of(in));
  if (m == 0 || n == 0) return true;
  if (k == 0) throw InvalidArgumentError("a product of matrices without columns is asked for");
  if (in != DType::kBFloat16 || a.transposed || !library_->own) return false;
  operations_ += lower ? n * (n + 1) * k : 2 * m * n * k;
  library_->own->product(lower, m, n, k, a, b, static_cast<float*>(c), c_stride, library_->panel.data());
  return true;
}

void Gemm::multiply(DType in, int64_t m, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c,
                    int64_t c_stride) {
  if (multiply_here(in, false, m, n, k, a, b, c, c_stride)) return;
  operations_ += 2 * m * n * k;
  if (in == DType::kFloat64) return multiply_plainly(m, n, k, a, b, static_cast<double*>(c), c_stride);
  ThreadLimit limit(threads_);
  try {
    if (in == DType::kBFloat16 && !has_bfloat16_products()) {
      a = library_->widen(library_->widened[0], a, m, k);
      b = library_->widen(library_->widened[1], b, k, n);
      in = DType::kFloat32;
    }
    library_->multiply({in, m, n, k, a.stride, b.stride, c_stride, a.transposed, b.transposed}, a.data,
                       b.data, c);
  } catch (const dnnl::error& error) {
    rethrow(error);
  }
}

void Gemm::multiply_lower(DType in, int64_t n, int64_t k, MatrixIn a, MatrixIn b, void* c, int64_t c_stride) {
  if (multiply_here(in, true, n, n, k, a, b, c, c_stride)) return;
  // Block columns: the library knows no triangles.
  const int64_t block = std::clamp(align_up(ceil_div(n, 8), 16), int64_t{48}, int64_t{256});
  const int64_t width = element_bytes(in), c_width = in == DType::kFloat64 ? 8 : 4;
  for (int64_t at = 0; at < n; at += block) {
    MatrixIn rows = a, column = b;
    rows.data = static_cast<const std::byte*>(a.data) + at * a.stride * width;
    column.data = static_cast<const std::byte*>(b.data) + at * (b.transposed ? b.stride : int64_t{1}) * width;
    multiply(in, n - at, std::min(block, n - at), k, rows, column,
             static_cast<std::byte*>(c) + at * (c_stride + 1) * c_width, c_stride);
  }
}

}  // namespace spolia
