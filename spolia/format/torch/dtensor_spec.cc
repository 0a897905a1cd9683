#include "spolia/format/torch/dtensor_spec.h"

#include <algorithm>

#include "spolia/base/checked.h"
#include "spolia/base/error.h"
#include "spolia/base/text.h"
#include "spolia/format/tensor_size.h"

namespace spolia {
namespace {

using pickle::Kind;
using pickle::Ref;

/// The field of an object that BUILD set; nullptr where it is missing or None.
const Ref* field(const Ref& object, std::string_view name) {
  if (!object.is(Kind::kObject)) return nullptr;
  const Ref* value = object.state().find(name);
  return value == nullptr || value->is_none() ? nullptr : value;
}

const Ref& needed_field(const Ref& object, std::string_view name) {
  if (const Ref* value = field(object, name)) return *value;
  throw CorruptError("a DTensor's description lacks its {}", name);
}

/// The numbers of an integer or of a tuple of them, however nested. (No nested tuple is empty, so that the
/// limit on numbers is one on work.)
void flatten_numbers(const Ref& ref, Dims& out, int depth = 0) {
  bool is_tuple = ref.is(Kind::kTuple) || ref.is(Kind::kList);
  if (ref.is(Kind::kInt) && ref.as_int() >= 0 && out.size() < kMaxDims) {
    out.push_back(ref.as_int());
  } else if (is_tuple && depth < 8 && (depth == 0 || !ref.items().empty())) {
    for (const Ref& item : ref.items()) flatten_numbers(item, out, depth + 1);
  } else {
    throw CorruptError("a DTensor's shape or mesh is not made of at most {} sizes", kMaxDims);
  }
}

/// One dim of a mesh: where in the rank map its coordinates are.
struct Axis {
  Dims sizes;
  Dims strides;
};

Axis make_axis(const Ref& shape, const Ref& stride) {
  Axis axis;
  flatten_numbers(shape, axis.sizes);
  flatten_numbers(stride, axis.strides);
  if (axis.sizes.size() != axis.strides.size() || std::ranges::count(axis.sizes, 0) > 0) {
    throw CorruptError("a device mesh has sizes {} with strides {}", list_text(axis.sizes),
                       list_text(axis.strides));
  }
  return axis;
}

/// `_layout`: {axes: ({shape, stride}, ...)}, or in older versions {shape: (...), stride: (...)}.
std::vector<Axis> parse_axes(const Ref& layout) {
  std::vector<Axis> axes;
  if (const Ref* list = field(layout, "axes")) {
    if (!list->is(Kind::kTuple) && !list->is(Kind::kList)) {
      throw CorruptError("a device mesh's axes are no list");
    }
    if (list->items().size() > kMaxDims) {
      throw CorruptError("a device mesh has more than {} dims", kMaxDims);
    }
    for (const Ref& axis : list->items()) {
      axes.push_back(make_axis(needed_field(axis, "shape"), needed_field(axis, "stride")));
    }
    return axes;
  }
  const Ref& shape = needed_field(layout, "shape");
  const Ref& stride = needed_field(layout, "stride");
  if (!shape.is(Kind::kTuple) || !stride.is(Kind::kTuple)) return {make_axis(shape, stride)};
  if (shape.items().size() != stride.items().size() || shape.items().size() > kMaxDims) {
    throw CorruptError("a device mesh's strides do not fit its shape");
  }
  for (size_t d = 0; d < shape.items().size(); ++d) {
    axes.push_back(make_axis(shape.items()[d], stride.items()[d]));
  }
  return axes;
}

/// Where in the rank map the mesh of `rank` starts: a layout that covers a part of the map stands for several
/// meshes, one for each way to place it, and a rank sees the one that it is in.
int64_t mesh_start(std::span<const int64_t> rank_map, const std::vector<Axis>& axes, const Ref* rank) {
  if (rank == nullptr || !rank->is(Kind::kInt)) return 0;
  auto found = std::ranges::find(rank_map, rank->as_int());
  if (found == rank_map.end()) return 0;
  int64_t start = found - rank_map.begin();
  int64_t at = start;
  for (const Axis& axis : axes) {
    for (size_t i = 0; i < axis.sizes.size(); ++i) {
      if (axis.strides[i] > 0) start -= at / axis.strides[i] % axis.sizes[i] * axis.strides[i];
    }
  }
  return std::max<int64_t>(start, 0);
}

/// The places in the rank map of a mesh's coordinates, row-major.
std::vector<int64_t> places_of(const std::vector<Axis>& axes, int64_t start) {
  std::vector<int64_t> places{start};
  for (const Axis& axis : axes) {
    for (size_t i = 0; i < axis.sizes.size(); ++i) {
      std::vector<int64_t> finer;
      for (int64_t place : places) {
        for (int64_t k = 0; k < axis.sizes[i]; ++k) {
          finer.push_back(checked_add(place, checked_mul(k, axis.strides[i])));
        }
      }
      places = std::move(finer);
    }
  }
  return places;
}

IntegerTensor ranks_from_map(const Ref& mesh, const IntegerReader& integers) {
  auto map = integers(needed_field(mesh, "_rank_map"));
  if (!map || map->shape.size() != 1) throw CorruptError("a device mesh's rank map is not a list of ranks");
  std::vector<Axis> axes = parse_axes(needed_field(mesh, "_layout"));
  IntegerTensor result;
  for (const Axis& axis : axes) result.shape.push_back(numel(axis.sizes));
  if (numel(result.shape) > std::ssize(map->values)) {
    throw CorruptError("a device mesh of {} has only {} ranks", shape_text(result.shape), map->values.size());
  }
  for (int64_t place : places_of(axes, mesh_start(map->values, axes, field(mesh, "_rank")))) {
    if (place >= std::ssize(map->values)) {
      throw CorruptError("a device mesh reaches past its {} ranks", map->values.size());
    }
    result.values.push_back(map->values[static_cast<size_t>(place)]);
  }
  return result;
}

IntegerTensor parse_ranks(const Ref& mesh, const IntegerReader& integers) {
  const Ref* ranks = field(mesh, "mesh");
  auto direct = ranks == nullptr ? std::nullopt : integers(*ranks);
  return direct ? std::move(*direct) : ranks_from_map(mesh, integers);
}

std::vector<std::string> parse_dim_names(const Ref& mesh) {
  const Ref* names = field(mesh, "_mesh_dim_names");
  if (names == nullptr) names = field(mesh, "mesh_dim_names");
  if (names == nullptr || !names->is(Kind::kTuple)) return {};
  std::vector<std::string> result;
  for (const Ref& name : names->items()) {
    if (!name.is(Kind::kString)) throw CorruptError("a device mesh's dim has a name that is no text");
    result.emplace_back(name.text());
  }
  return result;
}

/// A number of a placement: by name in its state, or by place in its state or its arguments.
int64_t placement_number(const Ref& placement, std::string_view name, size_t place) {
  const Ref* value = field(placement, name);
  for (const Ref* tuple : {&placement.state(), &placement.args()}) {
    if (value == nullptr && tuple->is(Kind::kTuple) && place < tuple->items().size()) {
      value = &tuple->items()[place];
    }
  }
  if (value == nullptr || !value->is(Kind::kInt)) throw CorruptError("a DTensor's placement has no {}", name);
  return value->as_int();
}

Placement to_placement(const Ref& ref) {
  if (!ref.is(Kind::kObject) || !ref.callable().is(Kind::kGlobal)) {
    throw CorruptError("a DTensor's placement is no placement");
  }
  std::string_view type = ref.callable().global().name;
  if (type == "Replicate") return Replicate{};
  if (type == "Shard") return Shard{placement_number(ref, "dim", 0)};
  if (type == "_StridedShard") {
    return StridedShard{placement_number(ref, "dim", 0), placement_number(ref, "split_factor", 1),
                        StridedSplit::kChunked};
  }
  if (type == "Partial" || type == "_Partial" || type == "MaskPartial" || type == "_MaskPartial") {
    return Partial{};
  }
  throw UnsupportedError("a DTensor's placement is a {}, which is not known", quote(type));
}

/// TensorMeta(shape, stride, dtype), a named tuple.
Dims parse_global_shape(const Ref& meta) {
  const Ref* shape = field(meta, "shape");
  if (shape == nullptr && meta.is(Kind::kObject) && meta.args().is(Kind::kTuple) &&
      !meta.args().items().empty()) {
    shape = &meta.args().items()[0];
  }
  if (shape == nullptr || !shape->is(Kind::kTuple)) {
    throw CorruptError("a DTensor's description lacks its shape");
  }
  Dims dims;
  flatten_numbers(*shape, dims);
  numel(dims);  // throws where it overflows
  return dims;
}

}  // namespace

const DeviceMesh& DTensorSpecReader::mesh(const Ref& mesh) {
  if (!mesh.is(Kind::kObject)) throw CorruptError("a DTensor's device mesh is none");
  auto known = meshes_.find(mesh.node());
  if (known == meshes_.end()) {
    IntegerTensor ranks = parse_ranks(mesh, integers_);
    DeviceMesh made(std::move(ranks.shape), parse_dim_names(mesh), std::move(ranks.values));
    known = meshes_.emplace(mesh.node(), std::pair(mesh, std::move(made))).first;
  }
  return known->second.second;
}

DTensorSpec DTensorSpecReader::read(const Ref& spec) try {
  Dims shape = parse_global_shape(needed_field(spec, "tensor_meta"));
  const Ref& list = needed_field(spec, "placements");
  if (!list.is(Kind::kTuple) && !list.is(Kind::kList)) {
    throw CorruptError("a DTensor's placements are no tuple");
  }
  std::vector<Placement> placements;
  for (const Ref& item : list.items()) placements.push_back(normalized(to_placement(item), shape.size()));
  return {std::move(shape), Layout(mesh(needed_field(spec, "mesh")), std::move(placements))};
} catch (const Error& error) {
  if (error.kind() != ErrorKind::kInvalidArgument) throw;
  throw CorruptError("a DTensor's layout makes no sense: {}", error.what());
}

}  // namespace spolia
