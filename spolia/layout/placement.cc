#include "spolia/layout/placement.h"

#include <optional>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/text.h"
#include "spolia/layout/text_reader.h"

namespace spolia {
namespace {

template <class... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <class... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

constexpr std::string_view kExpected =
    "a placement; write replicate, shard(d), shard(d, balanced), strided(d, f), ragged([dims], [units]) or "
    "partial(sum)";

/// ", NAME" before the closing bracket, where it is there.
bool accept_flag(TextReader& reader, std::string_view name) {
  if (!reader.accept(",")) return false;
  if (reader.word() != name) reader.fail();
  return true;
}

/// What is in the brackets of a placement of this kind.
Placement read_arguments(std::string_view kind, TextReader& reader) {
  if (kind == "shard") {
    Shard shard{.dim = reader.integer()};
    if (accept_flag(reader, "balanced")) shard.split = Split::kBalanced;
    return shard;
  }
  if (kind == "strided") {
    StridedShard strided{.dim = reader.integer()};
    reader.expect(",");
    strided.split_factor = reader.integer();
    if (accept_flag(reader, "chunked")) strided.split = StridedSplit::kChunked;
    return strided;
  }
  if (kind == "ragged") {
    RaggedShard ragged{.dims = Dims(reader.integers()), .units = {}};
    reader.expect(",");
    ragged.units = reader.integers();
    return ragged;
  }
  if (kind == "partial") return Partial{std::string(reader.word())};
  reader.fail();
}

int64_t normalized_dim(int64_t dim, size_t ndim, const Placement& placement) {
  int64_t n = static_cast<int64_t>(ndim);
  if (dim < -n || dim >= n) {
    throw InvalidArgumentError("{} is no placement of a {}-d tensor: it has no dim {}",
                               placement_text(placement), ndim, dim);
  }
  return dim < 0 ? dim + n : dim;
}

void normalize_ragged(RaggedShard& ragged, size_t ndim) {
  for (int64_t& dim : ragged.dims) dim = normalized_dim(dim, ndim, ragged);
  for (size_t i = 0; i < ragged.dims.size(); ++i) {
    if (ragged.dims[i] != static_cast<int64_t>(i)) {
      throw InvalidArgumentError("{}: the dims of a ragged shard are the leading ones, 0, 1, ... in order",
                                 placement_text(ragged));
    }
  }
  if (ragged.dims.empty()) throw InvalidArgumentError("a ragged shard needs at least one dim");
  std::optional<int64_t> sum = 0;
  for (int64_t unit : ragged.units) sum = sum && unit >= 0 ? try_add(*sum, unit) : std::nullopt;
  if (!sum || *sum == 0) {
    throw InvalidArgumentError("{}: units are numbers from 0 up, not all 0, with a sum below 2^63",
                               placement_text(ragged));
  }
}

}  // namespace

std::string placement_text(const Placement& placement) {
  return std::visit(
      Overloaded{
          [](const Replicate&) -> std::string { return "replicate"; },
          [](const Shard& s) {
            return fmt::format("shard({}{})", s.dim, s.split == Split::kBalanced ? ", balanced" : "");
          },
          [](const StridedShard& s) {
            return fmt::format("strided({}, {}{})", s.dim, s.split_factor,
                               s.split == StridedSplit::kChunked ? ", chunked" : "");
          },
          [](const RaggedShard& r) {
            return fmt::format("ragged({}, {})", list_text(r.dims), list_text(r.units));
          },
          [](const Partial& p) {
            return fmt::format("partial({})", is_word(p.reduce_op) ? p.reduce_op : quote(p.reduce_op));
          },
      },
      placement);
}

Placement read_placement(TextReader& reader) {
  const std::string_view kind = reader.word();
  if (kind == "replicate") return Replicate{};
  reader.expect("(");
  Placement placement = read_arguments(kind, reader);
  reader.expect(")");
  return placement;
}

Placement parse_placement(std::string_view text) {
  TextReader reader(text, kExpected);
  Placement placement = read_placement(reader);
  reader.expect_end();
  return placement;
}

Placement normalized(const Placement& placement, size_t ndim) {
  Placement result = placement;
  if (auto* shard = std::get_if<Shard>(&result)) {
    shard->dim = normalized_dim(shard->dim, ndim, placement);
  } else if (auto* strided = std::get_if<StridedShard>(&result)) {
    strided->dim = normalized_dim(strided->dim, ndim, placement);
    if (strided->split_factor <= 0) {
      throw InvalidArgumentError("{}: a split factor is at least 1", placement_text(placement));
    }
  } else if (auto* ragged = std::get_if<RaggedShard>(&result)) {
    normalize_ragged(*ragged, ndim);
  }
  return result;
}

}  // namespace spolia
