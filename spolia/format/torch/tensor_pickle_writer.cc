#include "spolia/format/torch/tensor_pickle_writer.h"

#include <algorithm>

#include "spolia/base/error.h"
#include "spolia/format/torch/pickle_writer.h"
#include "spolia/format/torch/storage_class.h"
#include "spolia/tensor/shape.h"

namespace spolia {
namespace {

/// The dtypes without a storage class of their own: torch/storage.py, _new_dtypes().
bool is_held_untyped(DType dtype) {
  using enum DType;
  constexpr DType kUntyped[] = {kUInt64,        kUInt32,         kUInt16,         kComplex32,
                                kFloat8E4M3FN,  kFloat8E5M2,     kFloat8E4M3FNUZ, kFloat8E5M2FNUZ,
                                kFloat8E8M0FNU, kFloat4E2M1FNx2, kBits1x8,        kBits2x4,
                                kBits4x2,       kBits8,          kBits16};
  return std::ranges::find(kUntyped, dtype) != std::end(kUntyped);
}

/// Writes each value as PyTorch's pickler does: kept in the memo, which nothing here needs, so that the bytes
/// are the same.
class TensorPickleWriter {
 public:
  std::string write(DType dtype, std::span<const int64_t> shape, bool requires_grad) {
    const std::string_view storage_class = storage_class_of(dtype);
    const bool is_typed = !storage_class.empty();
    if (!is_typed && !is_held_untyped(dtype)) {
      throw UnsupportedError("torch.save cannot hold {} tensors", name_of(dtype));
    }
    global("torch._utils", is_typed ? "_rebuild_tensor_v2" : "_rebuild_tensor_v3");
    out_.mark();
    out_.mark();
    text("storage");
    is_typed ? global("torch", storage_class) : global("torch.storage", "UntypedStorage");
    text("0");
    text("cpu");
    out_.integer(is_typed ? numel(shape) : byte_size(dtype, shape));
    out_.tuple_from_mark();
    out_.put();
    out_.persistent();
    out_.integer(0);  // where in the storage it starts
    tuple(shape);
    tuple(row_major_strides(shape));
    out_.boolean(requires_grad);
    global("collections", "OrderedDict");  // hooks: none
    out_.empty_tuple();
    out_.reduce();
    out_.put();
    if (!is_typed) global("torch", name_of(dtype));
    out_.tuple_from_mark();
    out_.put();
    out_.reduce();
    out_.put();
    return out_.finish();
  }

 private:
  void text(std::string_view value) {
    out_.string(value);
    out_.put();
  }
  void global(std::string_view module, std::string_view name) {
    out_.global(module, name);
    out_.put();
  }
  void tuple(std::span<const int64_t> values) {
    out_.tuple(values);
    if (!values.empty()) out_.put();
  }

  pickle::Writer out_;
};

}  // namespace

std::string write_tensor_pickle(DType dtype, std::span<const int64_t> shape, bool requires_grad) {
  return TensorPickleWriter().write(dtype, shape, requires_grad);
}

}  // namespace spolia
