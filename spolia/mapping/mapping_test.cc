// Random mappings against an interpreter that builds every tensor in between, forwards and back.
#include "spolia/mapping/mapping.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include "spolia/base/error.h"
#include "spolia/layout/coverage.h"
#include "spolia/layout/test_random.h"
#include "spolia/mapping/pieces.h"
#include "spolia/mapping/testing_arrays.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

// ---- The interpreter: every statement, element by element ----

Array with_shape(const Array& like, const Dims& shape) {
  return {like.dtype, shape, std::vector<int64_t>(static_cast<size_t>(numel(shape)))};
}

Array cut(const Array& a, size_t axis, int64_t begin, int64_t size) {
  Dims shape = a.shape;
  shape[axis] = size;
  Array part = with_shape(a, shape);
  for_each_index(shape, [&](const Dims& index) {
    Dims from = index;
    from[axis] += begin;
    part.values[flat_index(index, shape)] = a.values[flat_index(from, a.shape)];
  });
  return part;
}

Array joined(const std::vector<Array>& parts, size_t axis) {
  Dims shape = parts[0].shape;
  shape[axis] = 0;
  for (const Array& part : parts) shape[axis] += part.shape[axis];
  Array all = with_shape(parts[0], shape);
  int64_t begin = 0;
  for (const Array& part : parts) {
    for_each_index(part.shape, [&](const Dims& index) {
      Dims to = index;
      to[axis] += begin;
      all.values[flat_index(to, shape)] = part.values[flat_index(index, part.shape)];
    });
    begin += part.shape[axis];
  }
  return all;
}

Array turned(const Array& a, const Dims& permute) {
  Dims shape;
  for (int64_t d : permute) shape.push_back(a.shape[d]);
  Array result = with_shape(a, shape);
  for_each_index(shape, [&](const Dims& index) {
    Dims from(index.size());
    for (size_t d = 0; d < index.size(); ++d) from[permute[d]] = index[d];
    result.values[flat_index(index, shape)] = a.values[flat_index(from, a.shape)];
  });
  return result;
}

Dims reversed_dims(size_t ndim) {
  Dims permute;
  for (size_t d = ndim; d-- > 0;) permute.push_back(static_cast<int64_t>(d));
  return permute;
}

/// A random mapping that makes sense, as it is written, and what it does.
class RandomMapping {
 public:
  explicit RandomMapping(int64_t statements) {
    for (int64_t n = pick(1, 5); n > 0; --n) add_source();
    sources_ = sorted_by_name(sources_);
    for (const auto& [name, array] : numbered_arrays(sources_)) {
      arrays_[name] = array;
      now_[name].array = array;
    }
    for (int64_t n = 0; n < statements; ++n) add_statement();
  }

  const std::string& text() const { return text_; }
  const std::vector<TensorDescription>& sources() const { return sources_; }
  const Arrays& arrays() const { return arrays_; }
  bool loses_nothing() const { return !loses_; }

  /// What is there in the end.
  Arrays results() const {
    Arrays results;
    for (const auto& [name, one] : now_) {
      if (!one.dropped && (!one.consumed || one.kept)) results[name] = one.array;
    }
    return results;
  }
  /// All that a target may ask for, whether something else was made of it or not.
  Arrays wanted() const {
    Arrays wanted;
    for (const auto& [name, one] : now_) {
      if (!one.dropped) wanted[name] = one.array;
    }
    return wanted;
  }

 private:
  struct Named {
    Array array;
    bool consumed = false, kept = false, dropped = false;
    bool was_cast = false;
  };

  void add_source() {
    Dims shape;
    for (int64_t d = pick(0, 5); d > 0; --d) shape.push_back(pick(0, 30) == 0 ? 0 : pick(1, 7));
    if (pick(0, 3) == 0) shape = {pick(1, 4) * 4, pick(1, 4) * 4};  // fused and reshaped easily
    const DType dtype = pick(0, 2) == 0 ? DType::kBFloat16 : DType::kFloat32;
    sources_.push_back({fresh_name(), dtype, shape, 1});
  }

  std::string fresh_name() {
    ++names_;
    const std::string_view styles[] = {"t{}", "model.layers.{}.w-x", "{}-th", "a/b_{}"};
    return fmt::format(fmt::runtime(styles[pick(0, 4)]), names_);
  }

  /// Mostly a new name; now and then one that is written over, or used up and free again.
  std::string target_name() {
    if (pick(0, 6) != 0) return fresh_name();
    auto it = now_.begin();
    std::advance(it, pick(0, std::ssize(now_)));
    return it->first;
  }

  std::string any_name() {
    std::vector<std::string> names;
    for (const auto& [name, one] : now_) {
      if (one.dropped) continue;
      // What nothing has read yet is more likely, so that fan-outs stay few.
      for (int64_t n = one.consumed ? 1 : 4; n > 0; --n) names.push_back(name);
    }
    return names.empty() ? "" : names[pick(0, std::ssize(names))];
  }

  Named read(const std::string& name) {
    now_[name].consumed = true;
    return now_[name];
  }

  void write(const std::string& name, Array array, bool was_cast) {
    if (const auto known = now_.find(name); known != now_.end()) {
      const Named& before = known->second;
      if (!before.dropped && (!before.consumed || before.kept)) loses_ = true;
    }
    now_[name] = {std::move(array), false, false, false, was_cast};
  }

  void say(const std::string& statement) { text_ += statement + (pick(0, 8) == 0 ? "  # so\n" : "\n"); }

  void add_statement() {
    const std::string name = any_name();
    if (name.empty()) return;
    const Array& a = now_[name].array;
    const size_t ndim = a.shape.size();
    switch (pick(0, 11)) {
      case 0:
        return move(name, "", a, false);
      case 1:
        return drop_or_keep(name);
      case 2:
      case 3:
        return ndim > 0 ? split(name) : move(name, "", a, false);
      case 4:
      case 5:
        return ndim > 0 ? concat(name) : move(name, "", a, false);
      case 6:
        return permute(name);
      case 7:
        return reshape(name);
      case 8:
        return cast(name);
      case 9:
        return ndim == 2 ? fused_qkv(name) : permute(name);
      default:
        return ndim > 0 ? fused_ffn(name) : permute(name);
    }
  }

  void move(const std::string& name, const std::string& attributes, Array result, bool is_cast) {
    const bool was_cast = read(name).was_cast;
    std::string to = target_name();
    if (to == name && attributes.empty()) to = fresh_name();
    say(name + " -> " + to + attributes);
    write(to, std::move(result), was_cast || is_cast);
  }

  void drop_or_keep(const std::string& name) {
    if (pick(0, 4) == 0 && now_.size() > 1) {
      say(name + " -> _");
      Named& one = now_[name];
      if (!one.consumed || one.kept) loses_ = true;
      one.dropped = true;
    } else {
      say(name + " -> " + name);
      now_[name].kept = true;
    }
  }

  void split(const std::string& name) {
    const Named from = read(name);
    const size_t axis = pick(0, std::ssize(from.array.shape));
    const int64_t size = from.array.shape[axis];
    std::vector<int64_t> sizes;
    std::string attributes = fmt::format(", axis={}", axis_number(axis, from.array));
    if (pick(0, 2) == 0) {
      int64_t parts = pick(2, 5);
      while (size % parts != 0) --parts;
      sizes.assign(parts, size / parts);
    } else {
      int64_t rest = size;
      for (int64_t parts = pick(1, 4); parts > 0; --parts) {
        sizes.push_back(pick(0, rest + 1));
        rest -= sizes.back();
      }
      sizes.push_back(rest);
      attributes += fmt::format(", sizes='[{}]'", fmt::join(sizes, ", "));
    }
    std::vector<std::string> names;
    for (size_t i = 0; i < sizes.size(); ++i) names.push_back(fresh_name());
    say(fmt::format("{} -> {}{}", name, fmt::join(names, ", "), attributes));
    int64_t begin = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      write(names[i], cut(from.array, axis, begin, sizes[i]), from.was_cast);
      begin += sizes[i];
    }
  }

  int64_t axis_number(size_t axis, const Array& a) const {
    return static_cast<int64_t>(axis) - (pick(0, 3) == 0 ? std::ssize(a.shape) : 0);
  }

  void concat(const std::string& name) {
    const Array& first = now_[name].array;
    const size_t axis = pick(0, std::ssize(first.shape));
    std::vector<std::string> fitting;
    for (const auto& [other, one] : now_) {
      Dims shape = one.array.shape;
      if (shape.size() == first.shape.size()) shape[axis] = first.shape[axis];
      if (!one.dropped && shape == first.shape && one.array.dtype == first.dtype) fitting.push_back(other);
    }
    std::vector<std::string> names = {name};
    for (int64_t n = pick(1, 4); n > 0; --n) names.push_back(fitting[pick(0, std::ssize(fitting))]);
    std::vector<Array> parts;
    std::vector<int64_t> sizes;
    bool was_cast = false;
    for (const std::string& one : names) {
      const Named part = read(one);
      parts.push_back(part.array);
      sizes.push_back(part.array.shape[axis]);
      was_cast = was_cast || part.was_cast;
    }
    const std::string to = target_name();
    const std::string known = pick(0, 2) == 0 ? fmt::format(", sizes='[{}]'", fmt::join(sizes, ",")) : "";
    say(fmt::format("{} -> {}, axis={}{}", fmt::join(names, ", "), to, axis_number(axis, parts[0]), known));
    write(to, joined(parts, axis), was_cast);
  }

  void permute(const std::string& name) {
    const Array& a = now_[name].array;
    Dims dims = reversed_dims(a.shape.size());
    if (pick(0, 3) == 0) {
      const bool was_cast = read(name).was_cast;
      const std::string to = target_name();
      say(fmt::format("{}^T->{}", name, to));
      return write(to, turned(a, dims), was_cast);
    }
    for (size_t d = dims.size(); d > 1; --d) std::swap(dims[d - 1], dims[pick(0, static_cast<int64_t>(d))]);
    move(name, fmt::format(", permute='{}'", dims.empty() ? "[]" : list_text(dims)), turned(a, dims), false);
  }

  void reshape(const std::string& name) {
    const Array& a = now_[name].array;
    Dims canonical = a.shape, to;
    if (a.shape.size() > 2) {
      to = {numel(std::span(a.shape).first(2)), numel(std::span(a.shape).subspan(2))};
    } else if (a.shape.size() == 2) {
      canonical.clear();
      for (int64_t size : a.shape) {
        for (int64_t n = canonical.empty() ? 1 : pick(0, 3); n > 0; --n) {
          int64_t divisor = pick(1, 7);
          while (divisor > 1 && size % divisor != 0) --divisor;
          canonical.push_back(divisor);
          size /= divisor;
        }
        canonical.push_back(size);
      }
      to = canonical;
    } else {
      return permute(name);
    }
    move(name, fmt::format(", reshape='{}'", list_text(canonical)), {a.dtype, to, a.values}, false);
  }

  void cast(const std::string& name) {
    const Array& a = now_[name].array;
    if (now_[name].was_cast) return permute(name);  // chains of casts have a test of their own
    const DType from = a.dtype, to = from == DType::kFloat32 ? DType::kFloat16 : DType::kFloat32;
    const std::string attributes =
        pick(0, 2) == 0 ? fmt::format(", dtype='{}'", name_of(to))
                        : fmt::format(", src_dtype='{}', dst_dtype='{}'", name_of(from), name_of(to));
    move(name, attributes, {to, a.shape, a.values}, true);
  }

  /// The blocks, each `width` wide, in another order.
  static Array blocks(const Array& a, size_t axis, int64_t width, const std::vector<int64_t>& order) {
    std::vector<Array> parts;
    for (int64_t block : order) parts.push_back(cut(a, axis, block * width, width));
    return joined(parts, axis);
  }

  void fused_qkv(const std::string& name) {
    const int64_t groups = pick(1, 3), query = groups * pick(1, 4), all = query + 2 * groups;
    const size_t axis = pick(0, 2);
    const Array a = now_[name].array;
    if (a.shape[axis] % all != 0 || a.shape[axis] == 0) return fused_ffn(name);
    const int64_t width = a.shape[axis] / all, per_group = query / groups;
    std::vector<int64_t> q, k, v;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * (per_group + 2);
      for (int64_t i = 0; i < per_group; ++i) q.push_back(begin + i);
      k.push_back(begin + per_group);
      v.push_back(begin + per_group + 1);
    }
    const std::string attributes = fmt::format(", fused_qkv, num_heads={}, num_key_value_groups={}{}", query,
                                               groups, axis == 1 ? "" : ", axis=0");
    const std::string names[] = {fresh_name(), fresh_name(), fresh_name(), fresh_name()};
    const bool was_cast = read(name).was_cast;
    say(fmt::format("{} -> {}, {}, {}{}", name, names[0], names[1], names[2], attributes));
    write(names[0], blocks(a, axis, width, q), was_cast);
    write(names[1], blocks(a, axis, width, k), was_cast);
    write(names[2], blocks(a, axis, width, v), was_cast);
    if (pick(0, 2) == 0) return;
    for (size_t i = 0; i < 3; ++i) read(names[i]);
    say(fmt::format("{}, {}, {} -> {}{}", names[0], names[1], names[2], names[3], attributes));
    write(names[3], a, was_cast);
  }

  void fused_ffn(const std::string& name) {
    const Array a = now_[name].array;
    const size_t axis = pick(0, std::ssize(a.shape));
    const int64_t from = pick(1, 4), to = pick(1, 4), pieces = std::lcm(from, to);
    if (a.shape[axis] % (2 * pieces) != 0) return permute(name);
    const int64_t width = a.shape[axis] / (2 * pieces);
    // Which block is gate i, and which up i, of the tensor as it is; then as it is to be.
    std::vector<int64_t> order;
    for (int64_t rank = 0; rank < to; ++rank) {
      for (int64_t up = 0; up < 2; ++up) {
        for (int64_t i = rank * pieces / to; i < (rank + 1) * pieces / to; ++i) {
          const int64_t share = pieces / from;
          order.push_back(i / share * 2 * share + up * share + i % share);
        }
      }
    }
    move(name, fmt::format(", fused_ffn, axis={}, src_tp={}, dst_tp={}", axis, from, to),
         blocks(a, axis, width, order), false);
  }

  std::string text_;
  std::vector<TensorDescription> sources_;
  Arrays arrays_;
  std::map<std::string, Named> now_;
  int names_ = 0;
  bool loses_ = false;
};

void expect_exact_coverage(const CompiledMapping& mapping) {
  for (size_t t = 0; t < mapping.targets.size(); ++t) {
    const MappedTensor& target = mapping.targets[t];
    if (target.origin != Origin::kSources) continue;
    BoxList boxes(target.shape.size());
    for (const RegionCopy& copy : mapping.copies_of(t)) {
      boxes.add(copy.region ? copy.region->target : whole(target.shape));
    }
    RC_ASSERT(!check_coverage(boxes, target.shape).fault);
  }
}

RC_GTEST_PROP(RandomMappings, MakeWhatTheInterpreterMakes, ()) {
  for (int n = 0; n < 20; ++n) {
    const RandomMapping random(pick(1, 12));
    RC_LOG() << random.text();
    const CompiledMapping made = compile_mapping(parse_mapping(random.text()), {random.sources(), {}, {}});
    RC_ASSERT(evaluated(made, random.sources(), random.arrays()) == random.results());
    expect_exact_coverage(made);
  }
}

RC_GTEST_PROP(RandomMappings, MakeWhatATargetAsksFor, ()) {
  for (int n = 0; n < 20; ++n) {
    const RandomMapping random(pick(1, 12));
    RC_LOG() << random.text();
    Arrays wanted = random.wanted();
    std::erase_if(wanted, [](const auto&) { return pick(0, 3) == 0; });
    // A name in between that is a source's as well, and not written, is the source.
    std::vector<TensorDescription> targets;
    for (const auto& [name, array] : wanted) targets.push_back({name, array.dtype, array.shape, 1});
    const MappingSides sides{random.sources(), targets, {}};
    const CompiledMapping made = compile_mapping(parse_mapping(random.text()), sides);
    RC_ASSERT(evaluated(made, random.sources(), random.arrays()) == wanted);
    expect_exact_coverage(made);
  }
}

RC_GTEST_PROP(RandomMappings, TellTheSourcesOfAnyBox, ()) {
  const RandomMapping random(pick(1, 12));
  RC_LOG() << random.text();
  const MappingSides sides{random.sources(), {}, {}};
  const CompiledMapping made = compile_mapping(parse_mapping(random.text()), sides);
  for (size_t t = 0; t < made.targets.size(); ++t) {
    const MappedTensor& target = made.targets[t];
    Box box = whole(target.shape);
    for (size_t d = 0; d < box.ndim(); ++d) {
      box.offsets[d] = pick(0, target.shape[d] + 1);
      box.sizes[d] = pick(0, target.shape[d] - box.offsets[d] + 1);
    }
    Array array{target.dtype, target.shape,
                std::vector<int64_t>(static_cast<size_t>(numel(target.shape)), -1)};
    std::vector<int> times(array.values.size());
    for (const SourceRegion& one : find_sources(made, sides, t, box)) {
      RC_ASSERT(contains(box, one.region.target));
      copy_region_elements(one.region, random.arrays().at(random.sources()[one.source].name), array, times);
    }
    const Array whole_target = random.results().at(target.name);
    for_each_index(target.shape, [&](const Dims& index) {
      const int64_t flat = flat_index(index, target.shape);
      const bool inside = contains(box, {index, Dims(index.size(), 1)});
      RC_ASSERT(times[flat] == (inside ? 1 : 0));
      RC_ASSERT(!inside || array.values[flat] == whole_target.values[flat]);
    });
  }
}

/// Whether what the mapping makes again of its results is what it started from.
void expect_way_back(const RandomMapping& random, bool known) {
  const Mapping mapping = parse_mapping(random.text());
  const CompiledMapping made = compile_mapping(mapping, {random.sources(), {}, {}});
  const Arrays there = evaluated(made, random.sources(), random.arrays());
  const std::vector<TensorDescription> tensors = described(made);
  MappingSides sides{tensors, {}, {}};
  if (known) sides.target = random.sources();
  try {
    const CompiledMapping back = compile_mapping(mapping, sides, {.reverse = true});
    const Arrays again = evaluated(back, tensors, there);
    for (const auto& [name, array] : random.arrays()) {
      if (!again.contains(name) && !random.loses_nothing())
        continue;  // dropped before anything was made of it
      RC_ASSERT(again.contains(name));
      RC_ASSERT(again.at(name) == array);
    }
    if (random.loses_nothing()) RC_ASSERT(again.size() == random.arrays().size());
    expect_exact_coverage(back);
  } catch (const InvalidArgumentError& error) {
    RC_LOG() << error.what();
    RC_ASSERT(!known || !random.loses_nothing());
  }
}

RC_GTEST_PROP(RandomMappings, RunBackwardsOntoKnownTensors, ()) {
  for (int n = 0; n < 20; ++n) {
    const RandomMapping random(pick(1, 10));
    RC_LOG() << random.text();
    expect_way_back(random, true);
  }
}

RC_GTEST_PROP(RandomMappings, RunBackwardsOrAreRefused, ()) {
  for (int n = 0; n < 20; ++n) {
    const RandomMapping random(pick(1, 10));
    RC_LOG() << random.text();
    expect_way_back(random, false);
  }
}

RC_GTEST_PROP(RandomMappings, TakeOptimizerStatesAlong, ()) {
  const RandomMapping random(pick(1, 10));
  RC_LOG() << random.text();
  // The state of an element is its number, negated: whatever an element becomes, its state becomes the same.
  std::vector<TensorDescription> sources = random.sources();
  Arrays arrays = random.arrays();
  for (const TensorDescription& parameter : random.sources()) {
    const std::string name = "optimizer.state." + parameter.name + ".exp_avg";
    sources.push_back({name, DType::kFloat32, parameter.shape, 1});
    Array& array = arrays[name] = arrays[parameter.name];
    array.dtype = DType::kFloat32;
    for (int64_t& value : array.values) value += 1'000'000;
  }
  sources = sorted_by_name(sources);
  Arrays expected = random.results();
  for (const auto& [name, array] : random.results()) {
    if (array.values.empty()) continue;
    Array& state = expected["optimizer.state." + name + ".exp_avg"] = array;
    state.dtype = DType::kFloat32;
    for (int64_t& value : state.values) value += 1'000'000;
  }
  Arrays actual =
      evaluated(compile_mapping(parse_mapping(random.text()), {sources, {}, {}}), sources, arrays);
  // What has no elements is made of no parameter.
  std::erase_if(actual, [](const auto& one) {
    return one.first.starts_with("optimizer") && one.second.values.empty();
  });
  RC_ASSERT(actual == expected);
}

// ---- Casts ----

/// Values of a dtype, as bits: all of them for 16 bits.
std::vector<uint64_t> some_values(DType dtype) {
  std::vector<uint64_t> values;
  const int64_t bytes = element_bytes(dtype);
  for (uint64_t i = 0; i < 65536; ++i) {
    if (bytes == 2) {
      values.push_back(i);
    } else if (bytes == 4) {
      values.push_back((i * 2654435761u) & 0xffffffffu);
    } else {
      values.push_back(i * 0x9e3779b97f4a7c15u);
    }
  }
  return values;
}

std::vector<uint64_t> cast_values(const std::vector<uint64_t>& values, DType from, DType to) {
  std::vector<uint64_t> results(values.size());
  const Dims sizes = {std::ssize(values)}, strides = {sizeof(uint64_t)};
  cast_strided(sizes, to, reinterpret_cast<std::byte*>(results.data()), strides, from,
               reinterpret_cast<const std::byte*>(values.data()), strides);
  return results;
}

bool is_nan(uint64_t bits, DType dtype) {
  if (dtype != DType::kFloat64) bits = cast_values({bits}, dtype, DType::kFloat64)[0];
  const double value = std::bit_cast<double>(bits);
  return value != value;
}

TEST(CastChains, AreOneCastExactlyWhereTheyRoundOnce) {
  const DType dtypes[] = {DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16};
  for (DType a : dtypes) {
    const std::vector<uint64_t> values = some_values(a);
    for (DType b : dtypes) {
      const std::vector<uint64_t> through_b = cast_values(values, a, b);
      for (DType c : dtypes) {
        const CastChain chain = with_cast(with_cast({a}, b), c);
        const std::vector<uint64_t> stepwise = cast_values(through_b, b, c),
                                    direct = cast_values(values, a, c);
        bool same = true;
        for (size_t i = 0; i < values.size(); ++i) {
          same = same && (stepwise[i] == direct[i] || (is_nan(stepwise[i], c) && is_nan(direct[i], c)));
        }
        SCOPED_TRACE(fmt::format("{} -> {} -> {}", name_of(a), name_of(b), name_of(c)));
        // A chain that is one cast does what the one cast does; one that is not, may do so by luck.
        EXPECT_TRUE(same || chain.size() > 2);
        EXPECT_TRUE(!same || is_lossless(a, b) || a != c);
        EXPECT_EQ(chain.back(), c);
      }
    }
  }
}

// ---- Scale ----

TEST(MappingSpeed, ManyStatementsOverManyTensors) {
  std::string text;
  std::vector<TensorDescription> sources;
  for (int layer = 0; layer < 4'000; ++layer) {
    for (std::string_view one : {"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"}) {
      sources.push_back({fmt::format("layers.{}.{}.weight", layer, one), DType::kFloat32, {8, 4}, 1});
    }
    const std::string from = fmt::format("layers.{}", layer), to = fmt::format("blocks.{}", layer);
    text += fmt::format("{0}.a.weight^T -> {1}.a\n{0}.b.weight, {0}.c.weight -> {1}.bc, axis=0\n", from, to);
    text += fmt::format("{0}.d.weight -> {1}.d0, {1}.d1, axis=1\n{0}.e.weight -> {1}.e\n{0}.f.weight -> _\n",
                        from, to);
  }
  sources = sorted_by_name(sources);
  const CompiledMapping made = compile_mapping(parse_mapping(text), {sources, {}, {}});
  EXPECT_EQ(made.targets.size(), size_t{4'000 * 9});
  EXPECT_EQ(made.dropped.size(), size_t{4'000});
  EXPECT_TRUE(made.unused.empty());
}

TEST(MappingSpeed, OneTensorOfManyPartsAndBack) {
  std::vector<TensorDescription> sources;
  for (int i = 0; i < 10'000; ++i) sources.push_back({fmt::format("e.{}", i), DType::kFloat32, {2, 3}, 1});
  sources = sorted_by_name(sources);
  const Mapping mapping = parse_mapping("e.* -> all, axis=0\nall^T -> t");
  const CompiledMapping made = compile_mapping(mapping, {sources, {}, {}});
  EXPECT_EQ(made.copies.size(), sources.size());
  const std::vector<TensorDescription> there = described(made);
  const CompiledMapping back = compile_mapping(mapping, {there, sources, {}}, {.reverse = true});
  EXPECT_EQ(back.targets.size(), sources.size());
}

TEST(Mapping, HostileSizesAreRefused) {
  const std::vector<TensorDescription> sources = {{"w", DType::kFloat32, {int64_t{1} << 40, 1, 1}, 1}};
  const auto refusal = [&](const std::string& text) -> std::string {
    try {
      compile_mapping(parse_mapping(text), {sources, {}, {}}, {.most_pieces = int64_t{1} << 16});
      return "";
    } catch (const Error& error) {
      return error.what();
    }
  };
  EXPECT_NE(
      refusal("w^T -> v; v -> u, reshape='[1, 1, 1099511627776]'; u -> t, reshape='[1, 1, 68719476736, 16]'"),
      "");
  EXPECT_NE(refusal("w[0:99999999] -> v, axis=0"), "");
  EXPECT_NE(refusal("w -> q, k, v, fused_qkv, num_heads=999999999999, num_key_value_groups=1"), "");
  EXPECT_NE(refusal("w -> v, fused_ffn, src_tp=65521, dst_tp=65519"), "");
  EXPECT_NE(refusal("_ -> v, shape='[9223372036854775807, 9223372036854775807]', dtype='float32', fill=0"),
            "");
  std::string doubling;
  for (int i = 0; i < 70; ++i) doubling += fmt::format("w{0}, w{0} -> w{1}, axis=1\n", i, i + 1);
  EXPECT_NE(refusal("w -> w0\n" + doubling), "");
}

}  // namespace
}  // namespace spolia
