#include "spolia/format/torch/tensor_pickle.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/tensor_size.h"
#include "spolia/format/torch/pickle_value.h"
#include "spolia/format/torch/storage_class.h"

namespace spolia {
namespace {

using pickle::GlobalName;
using pickle::Kind;
using pickle::Ref;

constexpr int64_t kMostIntegers = int64_t{1} << 20;       // of a tensor
constexpr int64_t kMostIntegersInAll = int64_t{1} << 22;  // of the meshes of a pickle

enum HandleTag : uint32_t { kStorageHandle = 1, kTensorHandle };

/// Tags of the globals that stand in tensors.
enum GlobalTag : uint32_t {
  kRebuildTensor = 1,
  kRebuildTensorV2,
  kRebuildTensorV3,
  kRebuildParameter,
  kRebuildParameterWithState,
  kRebuildFromType,
  kRebuildFromTypeV2,
  kRebuildWrapperSubclass,
  kDTensorClass,
  kUntypedStorage,
  kStorageOf = 0x100,  // + a DType
  kDTypeIs = 0x200,    // + a DType
};

struct NamedTag {
  std::string_view name;
  uint32_t tag;
};

constexpr std::array kUtilsFunctions{
    NamedTag{"_rebuild_tensor", kRebuildTensor},
    NamedTag{"_rebuild_tensor_v2", kRebuildTensorV2},
    NamedTag{"_rebuild_tensor_v3", kRebuildTensorV3},
    NamedTag{"_rebuild_parameter", kRebuildParameter},
    NamedTag{"_rebuild_parameter_with_state", kRebuildParameterWithState},
    NamedTag{"_rebuild_wrapper_subclass", kRebuildWrapperSubclass},
};

uint32_t tag_in(std::span<const NamedTag> list, std::string_view name) {
  auto at = std::ranges::find(list, name, &NamedTag::name);
  return at == list.end() ? 0 : at->tag;
}

uint32_t storage_tag(std::string_view name) {
  auto dtype = dtype_of_storage_class(name);
  return dtype ? kStorageOf + static_cast<uint32_t>(*dtype) : 0;
}

/// The dtype of a tag in [base, base + 0x100).
std::optional<DType> dtype_of(const Ref& ref, uint32_t base) {
  if (!ref.is(Kind::kGlobal)) return std::nullopt;
  uint32_t tag = ref.global().tag;
  if (tag < base || tag >= base + kDTypeCount) return std::nullopt;
  return static_cast<DType>(tag - base);
}

const Ref& argument(const Ref& args, size_t i, std::string_view what) {
  if (i >= args.items().size()) throw CorruptError("a tensor's {} is missing", what);
  return args.items()[i];
}

int64_t number_argument(const Ref& args, size_t i, std::string_view what) {
  const Ref& value = argument(args, i, what);
  if (!value.is(Kind::kInt) || value.as_int() < 0) throw CorruptError("a tensor's {} is not a size", what);
  return value.as_int();
}

Dims dims_argument(const Ref& args, size_t i, std::string_view what) {
  const Ref& tuple = argument(args, i, what);
  if (!tuple.is(Kind::kTuple)) throw CorruptError("a tensor's {} is not a tuple", what);
  if (tuple.items().size() > kMaxDims) throw UnsupportedError("a tensor of more than {} dims", kMaxDims);
  Dims dims;
  for (size_t d = 0; d < tuple.items().size(); ++d) dims.push_back(number_argument(tuple, d, what));
  return dims;
}

/// The number of elements from the storage's start to the tensor's last element, inclusive.
int64_t reach(const PickledTensor& tensor) {
  if (numel(tensor.shape) == 0) return 0;
  int64_t last = tensor.first;
  for (size_t d = 0; d < tensor.shape.size(); ++d) {
    last = checked_add(last, checked_mul(tensor.shape[d] - 1, tensor.strides[d]));
  }
  return checked_add(last, 1);
}

template <class T>
T element(std::span<const std::byte> bytes, int64_t index) {
  T value;
  std::memcpy(&value, bytes.data() + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}

/// "module.name", quoted.
std::string full_name(const GlobalName& global) {
  return quote(std::string(global.module) + "." + std::string(global.name));
}

}  // namespace

/// Puts handles in the place of storages and tensors.
class TensorPickle::Reader final : public pickle::Hooks {
 public:
  explicit Reader(TensorPickle& pickle)
      : pickle_(pickle), specs_([this](const Ref& ref) { return integers(ref); }) {}

  uint32_t recognise(std::string_view module, std::string_view name) override {
    if (module == "torch") {
      if (uint32_t tag = storage_tag(name)) return tag;
      if (auto dtype = dtype_from_name(name)) return kDTypeIs + static_cast<uint32_t>(*dtype);
      return 0;
    }
    if (module == "torch._utils") return tag_in(kUtilsFunctions, name);
    if (module == "torch._tensor" && name == "_rebuild_from_type_v2") return kRebuildFromTypeV2;
    if (module == "torch._tensor" && name == "_rebuild_from_type") return kRebuildFromType;
    if (module == "torch.storage" && name == "UntypedStorage") return kUntypedStorage;
    if (module == "torch.cuda") return storage_tag(name);
    bool dtensor_module = module == "torch.distributed.tensor" || module == "torch.distributed._tensor" ||
                          module == "torch.distributed._tensor.api" ||
                          module == "torch.distributed.tensor._api";
    return dtensor_module && name == "DTensor" ? uint32_t{kDTensorClass} : 0;
  }

  std::optional<Ref> persistent(pickle::Heap&, const Ref& id) override {
    if (!id.is(Kind::kTuple) || id.items().size() < 5 || !id.items()[0].is(Kind::kString) ||
        id.items()[0].text() != "storage") {
      throw CorruptError("a persistent id is not that of a storage");
    }
    const Ref& key = id.items()[2];
    const Ref& location = id.items()[3];
    if (!key.is(Kind::kString) || !location.is(Kind::kString)) {
      throw CorruptError("a storage's key or location is no text");
    }
    PickledStorage storage{key.text(), location.text(), std::nullopt, number_argument(id, 4, "storage size")};
    if (auto dtype = dtype_of(id.items()[1], kStorageOf)) {
      storage.dtype = dtype;
      storage.bytes = checked_mul(storage.bytes, element_bytes(*dtype), "a storage's size");
    } else if (!id.items()[1].is(Kind::kGlobal) || id.items()[1].global().tag != kUntypedStorage) {
      throw UnsupportedError("storage {} is of a class that is not known", quote(storage.key));
    }
    pickle_.storages_.push_back(storage);
    return Ref::handle(kStorageHandle, std::ssize(pickle_.storages_) - 1);
  }

  std::optional<Ref> call(pickle::Heap&, const GlobalName& callable, const Ref& args) override {
    switch (callable.tag) {
      case kRebuildTensor:
      case kRebuildTensorV2:
      case kRebuildTensorV3:
        return rebuild(callable.tag, args);
      case kRebuildParameter:
      case kRebuildParameterWithState:
        return parameter(args);
      case kRebuildFromType:
      case kRebuildFromTypeV2:
        return from_type(args);
      default:
        return std::nullopt;
    }
  }

 private:
  Ref add(PickledTensor tensor) {
    pickle_.tensors_.push_back(std::move(tensor));
    return Ref::handle(kTensorHandle, std::ssize(pickle_.tensors_) - 1);
  }

  /// _rebuild_tensor(storage, offset, size, stride), _v2(..., requires_grad, hooks[, metadata]),
  /// _v3(..., requires_grad, hooks, dtype[, metadata])
  Ref rebuild(uint32_t function, const Ref& args) {
    const Ref& storage_ref = argument(args, 0, "storage");
    if (!storage_ref.is_handle(kStorageHandle)) throw CorruptError("a tensor's storage is not a storage");
    PickledTensor tensor;
    tensor.storage = static_cast<size_t>(storage_ref.handle_value());
    tensor.first = number_argument(args, 1, "storage offset");
    tensor.shape = dims_argument(args, 2, "size");
    tensor.strides = dims_argument(args, 3, "stride");
    if (function != kRebuildTensor) {
      const Ref& requires_grad = argument(args, 4, "requires_grad");
      tensor.requires_grad = requires_grad.is(Kind::kBool) && requires_grad.as_bool();
    }
    const PickledStorage& storage = pickle_.storages_[tensor.storage];
    auto dtype =
        function == kRebuildTensorV3 ? dtype_of(argument(args, 6, "dtype"), kDTypeIs) : storage.dtype;
    if (!dtype) {
      throw UnsupportedError("a tensor of storage {} has no dtype that is known", quote(storage.key));
    }
    tensor.dtype = *dtype;
    check_metadata(args, function == kRebuildTensorV3 ? 7 : 6);
    check_inside(tensor, storage);
    return add(std::move(tensor));
  }

  /// The metadata notes operations that PyTorch put off (conj, neg); the storage lacks them.
  static void check_metadata(const Ref& args, size_t i) {
    if (i >= args.items().size()) return;
    const Ref& metadata = args.items()[i];
    if (metadata.is_none() || (metadata.is(Kind::kDict) && metadata.items().empty())) return;
    throw UnsupportedError(
        "a tensor is a lazy conjugate or negation; save the result of resolve_conj() or resolve_neg()");
  }

  static void check_inside(const PickledTensor& tensor, const PickledStorage& storage) {
    if (tensor.shape.size() != tensor.strides.size()) {
      throw CorruptError("a tensor of shape {} has strides {}", list_text(tensor.shape),
                         list_text(tensor.strides));
    }
    checked_tensor_size(tensor.dtype, tensor.shape);
    if (reach(tensor) > storage.bytes / element_bytes(tensor.dtype)) {
      throw CorruptError(
          "a tensor of shape {}, strides {}, offset {} reaches out of storage {}, which has {} bytes",
          list_text(tensor.shape), list_text(tensor.strides), tensor.first, quote(storage.key),
          storage.bytes);
    }
  }

  /// _rebuild_parameter(data, requires_grad, hooks[, state])
  std::optional<Ref> parameter(const Ref& args) {
    const PickledTensor* data = pickle_.tensor(argument(args, 0, "data"));
    if (data == nullptr) return std::nullopt;
    PickledTensor tensor = *data;
    const Ref& requires_grad = argument(args, 1, "requires_grad");
    tensor.requires_grad = requires_grad.is(Kind::kBool) && requires_grad.as_bool();
    return add(std::move(tensor));
  }

  /// _rebuild_from_type_v2(function, class, args, state): what function(*args) gives, made a `class`.
  std::optional<Ref> from_type(const Ref& args) {
    const Ref& function = argument(args, 0, "function");
    const Ref& arguments = argument(args, 2, "arguments");
    if (!function.is(Kind::kGlobal) || !arguments.is(Kind::kTuple)) return std::nullopt;
    switch (function.global().tag) {
      case kRebuildTensor:
      case kRebuildTensorV2:
      case kRebuildTensorV3:
        return rebuild(function.global().tag, arguments);
      case kRebuildParameter:
      case kRebuildParameterWithState:
        return parameter(arguments);
      case kRebuildWrapperSubclass: {
        const Ref& type = args.items()[1];
        bool is_dtensor = type.is(Kind::kGlobal) && type.global().tag == kDTensorClass;
        return is_dtensor ? std::optional(dtensor(arguments, argument(args, 3, "state"))) : std::nullopt;
      }
      default:
        return std::nullopt;
    }
  }

  /// A DTensor: its state has the local tensor and the spec; its constructor was given
  /// (class, dtype, size, strides, storage offset, layout, device, requires_grad).
  Ref dtensor(const Ref& args, const Ref& state) {
    const Ref* local = state_field(state, "_local_tensor");
    const Ref* spec = state_field(state, "_spec");
    const PickledTensor* local_tensor = local == nullptr ? nullptr : pickle_.tensor(*local);
    if (local_tensor == nullptr || spec == nullptr) {
      throw UnsupportedError("a DTensor has no plain local tensor, or no spec");
    }
    PickledTensor tensor = *local_tensor;
    const Ref& requires_grad = argument(args, 7, "requires_grad");
    tensor.requires_grad = requires_grad.is(Kind::kBool) && requires_grad.as_bool();
    tensor.spec = std::make_shared<DTensorSpec>(specs_.read(*spec));
    checked_tensor_size(tensor.dtype, tensor.spec->shape);
    return add(std::move(tensor));
  }

  /// A field of an object's state: a dict, or for classes with slots (dict or None, dict of the slots).
  static const Ref* state_field(const Ref& state, std::string_view name) {
    if (!state.is(Kind::kTuple)) return state.find(name);
    for (const Ref& part : state.items()) {
      if (const Ref* value = part.find(name)) return value;
    }
    return nullptr;
  }

  /// All that the pickle's meshes read together is bounded: many may be views of one storage.
  std::optional<IntegerTensor> integers(const Ref& ref) {
    const PickledTensor* tensor = pickle_.tensor(ref);
    if (tensor == nullptr) return std::nullopt;
    integers_left_ -= numel(tensor->shape);
    if (integers_left_ < 0)
      throw UnsupportedError("device meshes of more than {} ranks in all", kMostIntegersInAll);
    return IntegerTensor{tensor->shape,
                         read_integers(pickle_.archive_, pickle_.storage_of(*tensor), *tensor)};
  }

  TensorPickle& pickle_;
  DTensorSpecReader specs_;
  int64_t integers_left_ = kMostIntegersInAll;
};

const Dims& PickledTensor::global_shape() const { return spec == nullptr ? shape : spec->shape; }

TensorPickle::TensorPickle(const TorchArchive& archive) : archive_(archive), bytes_(archive.pickle()) {
  Reader reader(*this);
  const pickle::Where in_archive = [this] { return where() + ", data.pkl"; };
  root_ = pickle::read(heap_, bytes_, in_archive, &reader).root;
}

TensorPickle::~TensorPickle() = default;

const PickledTensor* TensorPickle::tensor(const Ref& ref) const {
  return ref.is_handle(kTensorHandle) ? &tensors_[static_cast<size_t>(ref.handle_value())] : nullptr;
}

Value TensorPickle::value(const Ref& ref) const {
  const auto limits = pickle::TreeLimits::for_pickle(bytes_.size());
  size_t sizes_left = limits.nodes;
  auto show = [&](const Ref& handle) -> std::optional<Value> {
    const PickledTensor* found = tensor(handle);
    if (found == nullptr) return std::nullopt;
    if (found->global_shape().size() > sizes_left) {
      throw CorruptError("{}: a value shows more tensors than its pickle justifies", where());
    }
    sizes_left -= found->global_shape().size();
    Tuple shape;
    for (int64_t size : found->global_shape()) shape.items.emplace_back(size);
    auto record = std::make_unique<Record>();
    record->type = {"torch", "Tensor"};
    record->args.emplace_back(std::string(name_of(found->dtype)));
    record->args.emplace_back(std::move(shape));
    return Value(std::move(record));
  };
  return pickle::to_value(ref, where(), limits, show);
}

std::string TensorPickle::unknown_tensor(const Ref& ref) {
  if (!ref.is(Kind::kObject) || !ref.callable().is(Kind::kGlobal)) return {};
  const GlobalName& function = ref.callable().global();
  std::span<const Ref> args = ref.args().items();
  bool from_type = function.tag == kRebuildFromType || function.tag == kRebuildFromTypeV2;
  if (from_type && args.size() > 1 && args[1].is(Kind::kGlobal)) return full_name(args[1].global());
  bool rebuilds = (function.module == "torch._utils" || function.module == "torch._tensor") &&
                  function.name.starts_with("_rebuild");
  return rebuilds ? full_name(function) : std::string();
}

std::vector<int64_t> read_integers(const TorchArchive& archive, const PickledStorage& storage,
                                   const PickledTensor& tensor) {
  int64_t count = numel(tensor.shape);
  if ((tensor.dtype != DType::kInt32 && tensor.dtype != DType::kInt64) || count > kMostIntegers) {
    throw CorruptError("a tensor of {} {} stands where a list of ranks should", count, name_of(tensor.dtype));
  }
  std::vector<std::byte> bytes = archive.zip().read(archive.storage(storage.key), storage.bytes);
  if (reach(tensor) > std::ssize(bytes) / element_bytes(tensor.dtype)) {
    throw CorruptError("storage {} is shorter than its tensor", quote(storage.key));
  }
  std::vector<int64_t> integers;
  integers.reserve(static_cast<size_t>(count));
  Dims index(tensor.shape.size());
  for (int64_t i = 0; i < count; ++i) {
    int64_t at = tensor.first;
    for (size_t d = 0; d < index.size(); ++d) at += index[d] * tensor.strides[d];
    integers.push_back(tensor.dtype == DType::kInt32 ? element<int32_t>(bytes, at)
                                                     : element<int64_t>(bytes, at));
    for (size_t d = index.size(); d-- > 0 && ++index[d] == tensor.shape[d];) index[d] = 0;
  }
  return integers;
}

Payload payload_of(const TorchArchive& archive, const PickledStorage& storage, const PickledTensor& tensor,
                   const Extent& extent, Codec codec) {
  const ZipRecord& record = archive.storage(storage.key);
  if (record.size < storage.bytes) {
    throw CorruptError("{}: storage {} should have {} bytes, but has {}", archive.zip().where(),
                       quote(storage.key), storage.bytes, record.size);
  }
  int64_t start = archive.zip().data_start(record);
  Payload payload{extent, codec, start, record.size, tensor.first, tensor.strides, record.crc32};
  if (record.deflated) {
    if (codec != Codec::kNone) {
      throw UnsupportedError("{}: storage {} is compressed twice", archive.zip().where(), quote(storage.key));
    }
    payload.stored = {extent.file, extent.offset + start, record.packed_size};
    payload.codec = Codec::kDeflate;
    payload.offset = 0;
  }
  return payload;
}

}  // namespace spolia
