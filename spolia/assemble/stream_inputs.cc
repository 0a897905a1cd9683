#include "spolia/assemble/stream_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "spolia/base/error.h"
#include "spolia/base/hash.h"
#include "spolia/base/packing.h"
#include "spolia/base/text.h"
#include "spolia/state/catalog.h"
#include "spolia/tensor/cast.h"

namespace spolia {
namespace {

/// How often each shard of a layout occurs, and in which boxes.
std::vector<HeldBox> boxes_of(const SharedTensor& shared) {
  std::vector<HeldBox> boxes;
  if (shared.layout == nullptr) {
    for (const HeldBox& held : shared.boxes) {
      if (!held.box.empty()) boxes.push_back(held);
    }
    return boxes;
  }
  std::map<int64_t, int64_t> first_of_shard;
  for (int64_t rank : shared.layout->mesh().ranks())
    first_of_shard.try_emplace(*shared.layout->shard_id(rank), rank);
  for (const auto& [shard, rank] : first_of_shard) {
    std::vector<int64_t> ranks = shared.layout->replicas(rank);
    std::ranges::sort(ranks);
    for (LocalBox& local : shared.layout->shard(shared.shape, rank).boxes)
      boxes.push_back({std::move(local.global), ranks});
  }
  return boxes;
}

constexpr int64_t kAll = 0, kNames = 1, kPart = 2;

}  // namespace

Descriptions exchange_descriptions(const StreamGroups& groups, const Description& own) {
  const StreamGrid& grid = groups.grid();
  const std::string text = encode(own);
  Sha256 hash;
  hash.update(bytes_of(text));
  const std::vector<std::string> hashes = groups.gather(hash.finish_hex());

  int64_t last = 0;
  for (size_t seat = 0; seat < grid.seats(); ++seat) last = std::max(last, grid.rank_of(seat));
  Descriptions descriptions;
  descriptions.of_rank.assign(static_cast<size_t>(last + 1), 0);
  std::map<std::string_view, size_t> first;
  for (size_t seat = 0; seat < grid.seats(); ++seat) first.try_emplace(hashes[seat], seat);
  const bool sends = first.size() > 1 && first.at(hashes[groups.seat()]) == groups.seat();
  const std::vector<std::string> texts =
      first.size() == 1 ? std::vector<std::string>{} : groups.gather(sends ? std::string_view(text) : "");
  // Ranks of the world that take no part have nothing.
  const bool others = std::ssize(descriptions.of_rank) > static_cast<int64_t>(grid.seats());
  if (others) descriptions.distinct.emplace_back();
  std::map<std::string_view, uint32_t> numbers;
  for (size_t seat = 0; seat < grid.seats(); ++seat) {
    const auto [at, fresh] =
        numbers.try_emplace(hashes[seat], static_cast<uint32_t>(descriptions.distinct.size()));
    if (fresh) descriptions.distinct.push_back(texts.empty() ? own : decode_description(texts[seat]));
    descriptions.of_rank[static_cast<size_t>(grid.rank_of(seat))] = at->second;
  }
  return descriptions;
}

std::vector<StreamSource> stream_sources(const JobState& job) {
  std::vector<StreamSource> sources;
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    const SharedTensor& shared = job.shared[t];
    const std::string& name = job.tensors[t].name;
    StreamSource source{name, shared.dtype, addressable_shape(shared.dtype, shared.shape), {}};
    source.boxes = boxes_of(shared);
    if (is_sub_byte(shared.dtype)) {
      for (HeldBox& held : source.boxes) {
        if (held.box != whole(shared.shape)) {
          throw UnsupportedError(
              "tensor {} of {} elements, which are finer than a byte, is cut; only whole ones can be "
              "streamed",
              quote(name), name_of(shared.dtype));
        }
        held.box = whole(source.shape);
      }
    }
    sources.push_back(std::move(source));
  }
  return sources;
}

std::vector<StreamOutput> stream_outputs(const JobState& job, const Mapping* mapping,
                                         const MappingOptions& options) {
  std::vector<StreamOutput> outputs;
  if (mapping == nullptr) {
    for (size_t t = 0; t < job.tensors.size(); ++t) {
      const SharedTensor& shared = job.shared[t];
      StreamOutput& output = outputs.emplace_back();
      output.name = job.tensors[t].name;
      output.dtype = shared.dtype;
      output.shape = shared.shape;
      const Box all = whole(addressable_shape(shared.dtype, shared.shape));
      output.regions.push_back({t, {all, all, {}}});
    }
    return outputs;
  }
  std::vector<TensorDescription> described;
  for (size_t t = 0; t < job.tensors.size(); ++t) {
    described.push_back({job.tensors[t].name, job.shared[t].dtype, job.shared[t].shape});
  }
  const MappingSides sides{.source = described, .target = std::nullopt, .base = {}};
  const CompiledMapping compiled = compile_mapping(*mapping, sides, options);
  for (size_t t = 0; t < compiled.targets.size(); ++t) {
    const MappedTensor& target = compiled.targets[t];
    StreamOutput& output = outputs.emplace_back();
    output.name = target.name;
    output.dtype = target.dtype;
    output.shape = target.shape;
    if (target.origin == Origin::kInitial) {
      throw InvalidArgumentError("line {}, column {}: {} is new; in a stream write its shape, dtype and fill",
                                 target.at.line, target.at.column, quote(target.name));
    }
    if (target.origin == Origin::kFill) {
      output.fill = target.fill;
      fill_element(output.dtype, *output.fill);  // throws before anything is sent
    } else {
      output.regions = find_sources(compiled, sides, t, whole(addressable_shape(target.dtype, target.shape)));
    }
  }
  return outputs;
}

std::string encode_wish(const AssemblerOptions& options) {
  Packer out;
  const bool part = options.part != 0 || options.parts != 1;
  out.number(options.names ? kNames : part ? kPart : kAll);
  out.number(options.part);
  out.number(options.parts);
  if (options.names) {
    out.number(std::ssize(*options.names));
    for (const std::string& name : *options.names) out.text(name);
  }
  return out.take();
}

void note_wishes(const StreamGrid& grid, std::span<const std::string> wishes,
                 std::vector<StreamOutput>& outputs) {
  std::map<std::string_view, size_t> numbers;
  for (size_t o = 0; o < outputs.size(); ++o) numbers[outputs[o].name] = o;
  std::vector<std::vector<size_t>> wanted_by(outputs.size());
  const auto count = static_cast<int64_t>(outputs.size());
  bool all_want_all = true;
  for (size_t seat = 0; seat < wishes.size(); ++seat) {
    Unpacker in(wishes[seat]);
    const int64_t kind = in.number(), part = in.number(), parts = in.number();
    all_want_all = all_want_all && kind == kAll;
    if (parts < 1 || part < 0 || part >= parts) {
      throw InvalidArgumentError("rank {} asks for part {} of {} of a stream; parts are counted from 0",
                                 grid.rank_of(seat), part, parts);
    }
    if (kind == kNames) {
      if (parts != 1) {
        throw InvalidArgumentError(
            "rank {} asks for outputs by name and for part {} of {}; one of the two is enough",
            grid.rank_of(seat), part, parts);
      }
      for (size_t left = in.count(); left > 0; --left) {
        const std::string_view name = in.text();
        const auto at = numbers.find(name);
        if (at == numbers.end()) {
          throw NotFoundError("rank {} asks for the output {}, which is not there", grid.rank_of(seat),
                              quote(name));
        }
        std::vector<size_t>& seats = wanted_by[at->second];
        if (seats.empty() || seats.back() != seat) seats.push_back(seat);
      }
      continue;
    }
    // The first outputs % parts parts have one more.
    const auto begin_of = [&](int64_t p) { return p * (count / parts) + std::min(p, count % parts); };
    for (int64_t o = begin_of(part); o < begin_of(part + 1); ++o)
      wanted_by[static_cast<size_t>(o)].push_back(seat);
  }
  if (all_want_all) return;
  std::map<std::vector<size_t>, std::shared_ptr<const std::vector<size_t>>> sets;
  for (size_t o = 0; o < outputs.size(); ++o) {
    if (wanted_by[o].size() == grid.seats()) continue;
    std::shared_ptr<const std::vector<size_t>>& set = sets[wanted_by[o]];
    if (set == nullptr) set = std::make_shared<const std::vector<size_t>>(wanted_by[o]);
    outputs[o].wanted_by = set;
  }
}

std::array<std::byte, 16> fill_element(DType dtype, double value) {
  std::array<std::byte, 16> element = {};
  const DTypeKind kind = info(dtype).kind;
  if (value == 0) {
    // All bits are, in every dtype.
  } else if (kind == DTypeKind::kFloat && can_cast(dtype, DType::kFloat64)) {
    cast(dtype, element.data(), DType::kFloat64, &value, 1);
  } else if (kind == DTypeKind::kBool) {
    element[0] = std::byte{1};
  } else if (kind == DTypeKind::kInteger && !is_sub_byte(dtype) && value == std::trunc(value) &&
             std::abs(value) < 0x1p63) {
    const auto whole_number = static_cast<int64_t>(value);
    std::memcpy(element.data(), &whole_number, static_cast<size_t>(element_bytes(dtype)));
  } else {
    throw UnsupportedError("elements of {} cannot be filled with {}", name_of(dtype), value);
  }
  return element;
}

}  // namespace spolia
