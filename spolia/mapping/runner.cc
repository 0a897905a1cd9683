#include "spolia/mapping/runner.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <fmt/format.h>

#include "spolia/base/checked.h"
#include "spolia/base/text.h"
#include "spolia/mapping/suggest.h"

namespace spolia {
namespace {

std::string described(const Variable& variable, const Assembly& tensor) {
  return fmt::format("{} of shape {}", quote(variable.name), list_text(tensor.shape));
}

/// The elements of a tensor finer than a byte cannot be told apart.
void require_addressable(const Assembly& tensor, const Variable& variable, const ProgramStep& step) {
  if (tensor.sub_byte()) {
    fail_at(step.at, "{} is {}, whose elements are finer than a byte: it can be renamed, and nothing else",
            quote(variable.name), name_of(tensor.dtype));
  }
}

}  // namespace

Runner::Runner(std::span<const TensorDescription> sources, std::span<const TensorDescription> more,
               int64_t most_pieces)
    : sources_(sources), more_(more), budget_(most_pieces) {}

void Runner::run(const Program& program) {
  temporaries_.assign(size_t{program.temporaries} + 1, nullptr);
  part_sizes_.resize(program.steps.size());
  moved_dtypes_.resize(program.steps.size());
  index_.reserve(2 * program.steps.size());
  for (at_step_ = 0; at_step_ < program.steps.size(); ++at_step_) step(program.steps[at_step_]);
}

const Outcome* Runner::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : found->second;
}

std::optional<size_t> Runner::find_source(std::string_view name) const {
  if (const auto found = find_tensor(sources_, name)) return found;
  const auto found = find_tensor(more_, name);
  return found ? std::optional(sources_.size() + *found) : std::nullopt;
}

void Runner::step(const ProgramStep& step) {
  switch (step.kind) {
    case ProgramStep::kMove:
      return move(step);
    case ProgramStep::kConcat:
      return write(step.right[0], concatenated(step), step);
    case ProgramStep::kSplit:
      return split(step);
    case ProgramStep::kDrop:
      return drop(step);
    case ProgramStep::kNew:
      return make_new(step);
  }
}

/// What is known of a name; at first, its source, where there is one.
Outcome& Runner::outcome(const std::string& name) {
  if (const auto found = index_.find(name); found != index_.end()) return *found->second;
  Outcome& made = outcomes_.emplace_back();
  made.name = name;
  index_.emplace(made.name, &made);
  if (const std::optional<size_t> index = find_source(name)) {
    const TensorDescription& tensor = source(*index);
    made.tensor = whole_source(static_cast<uint32_t>(*index), tensor.dtype, tensor.shape);
  }
  return made;
}

AssemblyPtr Runner::read(const Variable& variable) {
  if (variable.temporary != 0) return temporaries_[variable.temporary];
  const Outcome* known = find(variable.name);
  if (known == nullptr && !find_source(variable.name)) {
    fail_at(variable.at, "there is no tensor {}{}", quote(variable.name), suggestion(variable.name));
  }
  Outcome& here = outcome(variable.name);
  if (here.kind == Outcome::kDropped) {
    fail_at(variable.at, "{} was dropped on line {}", quote(variable.name), here.at.line);
  }
  if (here.kind == Outcome::kNew) {
    fail_at(variable.at, "{} is new since line {}: no source has anything to take from it",
            quote(variable.name), here.at.line);
  }
  here.consumed = true;
  return here.tensor;
}

void Runner::write(const Variable& variable, AssemblyPtr tensor, const ProgramStep& step) {
  if (variable.temporary != 0) {
    temporaries_[variable.temporary] = std::move(tensor);
    return;
  }
  Outcome& here = outcome(variable.name);
  const bool unread = here.kind == Outcome::kTensor && here.tensor != nullptr && !here.consumed && !here.kept;
  if (unread) {
    notes_.push_back(fmt::format("line {}: {} is written over {}, which nothing has read", step.at.line,
                                 quote(variable.name),
                                 here.written ? fmt::format("what line {} made", here.at.line)
                                              : std::string("the source's tensor of that name")));
  }
  here.kind = Outcome::kTensor;
  here.tensor = std::move(tensor);
  here.written = true;
  here.kept = here.consumed = false;
  here.at = step.at;
}

void Runner::move(const ProgramStep& step) {
  const Variable &from = step.left[0], &to = step.right[0];
  const Outcome* before = from.temporary == 0 ? find(from.name) : nullptr;
  const bool was_consumed = before != nullptr && before->consumed;
  AssemblyPtr tensor = read(from);
  moved_dtypes_[at_step_] = tensor->dtype;
  if (step.operations.empty() && from.temporary == 0 && to.temporary == 0 && from.name == to.name) {
    Outcome& here = outcome(from.name);
    here.kept = true;
    here.consumed = was_consumed;
    if (!here.written) here.at = step.at;
    return;
  }
  for (const TensorOperation& operation : step.operations) tensor = operated(operation, tensor, step);
  write(to, std::move(tensor), step);
}

AssemblyPtr Runner::operated(const TensorOperation& operation, const AssemblyPtr& tensor,
                             const ProgramStep& step) {
  const Variable& from = step.left[0];
  const size_t ndim = tensor->shape.size();
  require_addressable(*tensor, from, step);
  switch (operation.kind) {
    case TensorOperation::kPermute: {
      Dims permute = operation.dims;
      if (permute.empty()) {
        for (size_t d = ndim; d-- > 0;) permute.push_back(static_cast<int64_t>(d));
      }
      if (permute.size() != ndim) {
        fail_at(step.at, "the permute {} has {} dims, and {} has {}", list_text(permute), permute.size(),
                described(from, *tensor), ndim);
      }
      return permuted(*tensor, permute, budget_);
    }
    case TensorOperation::kCast: {
      if (operation.from && *operation.from != tensor->dtype) {
        fail_at(step.at, "{} is {}, and not src_dtype='{}'", quote(from.name), name_of(tensor->dtype),
                name_of(*operation.from));
      }
      if (operation.to == tensor->dtype) return tensor;
      for (DType dtype : {tensor->dtype, operation.to}) {
        if (info(dtype).kind != DTypeKind::kFloat) {
          fail_at(step.at,
                  "{} cannot be cast from {} to {}: casts are between float64, float32, float16 and "
                  "bfloat16",
                  quote(from.name), name_of(tensor->dtype), name_of(operation.to));
        }
      }
      return cast_to(*tensor, operation.to, budget_);
    }
    case TensorOperation::kReshape: {
      const Dims flat = flat_shape(operation.dims);
      if (tensor->shape != operation.dims && tensor->shape != flat) {
        fail_at(step.at, "reshape={} is between the shapes {} and {}, and {} has neither",
                list_text(operation.dims), list_text(operation.dims), list_text(flat),
                described(from, *tensor));
      }
      return reshaped(*tensor, operation.dims, budget_);
    }
  }
  return tensor;
}

size_t Runner::axis_of(const ProgramStep& step, const Variable& variable, const Assembly& tensor) const {
  const int64_t ndim = std::ssize(tensor.shape);
  const int64_t axis = step.axis < 0 ? step.axis + ndim : step.axis;
  if (axis < 0 || axis >= ndim) {
    fail_at(step.at, "there is no axis {} in {}{}", step.axis, described(variable, tensor),
            ndim == 1 ? "; for biases write axis=0" : "");
  }
  return static_cast<size_t>(axis);
}

AssemblyPtr Runner::concatenated(const ProgramStep& step) {
  std::vector<AssemblyPtr> parts;
  for (const Variable& part : step.left) parts.push_back(read(part));
  const Assembly& first = *parts[0];
  const size_t axis = axis_of(step, step.left[0], first);
  Dims& sizes = part_sizes_[at_step_];
  int64_t total = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Assembly& part = *parts[i];
    require_addressable(part, step.left[i], step);
    Dims like = part.shape;
    if (like.size() == first.shape.size()) like[axis] = first.shape[axis];
    if (like != first.shape) {
      const Dims turned(std::reverse_iterator(part.shape.end()), std::reverse_iterator(part.shape.begin()));
      fail_at(step.at, "{} and {} cannot lie side by side along axis {}{}", described(step.left[0], first),
              described(step.left[i], part), axis,
              turned == first.shape ? "; is a transpose missing (NAME^T)?" : "");
    }
    if (part.dtype != first.dtype) {
      fail_at(step.at,
              "{} is {} and {} is {}; the parts of a concatenation are of one dtype, so cast one of them "
              "in a statement before",
              quote(step.left[0].name), name_of(first.dtype), quote(step.left[i].name), name_of(part.dtype));
    }
    const int64_t size = part.shape[axis];
    if (!step.sizes.empty() && step.sizes[i] != size) {
      fail_at(step.at, "{} has size {} along axis {}, and not {} as in sizes={}",
              described(step.left[i], part), size, axis, step.sizes[i], list_text(step.sizes));
    }
    if (step.equal_parts && size != first.shape[axis]) {
      fail_at(step.at, "the parts {} and {} are to be of equal size along axis {}",
              described(step.left[0], first), described(step.left[i], part), axis);
    }
    sizes.push_back(size);
    const std::optional<int64_t> sum = try_add(total, size);
    if (!sum) fail_at(step.at, "the size of {} along axis {} overflows", quote(step.right[0].name), axis);
    total = *sum;
  }
  Dims shape = first.shape;
  shape[axis] = total;
  numel(shape);  // throws where it overflows
  return concat_assemblies(parts, axis, budget_);
}

void Runner::split(const ProgramStep& step) {
  const AssemblyPtr tensor = read(step.left[0]);
  require_addressable(*tensor, step.left[0], step);
  const size_t axis = axis_of(step, step.left[0], *tensor);
  const int64_t size = tensor->shape[axis], parts = std::ssize(step.right);
  Dims sizes = step.sizes;
  if (sizes.empty()) {
    if (size % parts != 0) {
      fail_at(step.at,
              "{} cannot be split into {} equal parts along axis {}, where its size is {}; give their "
              "sizes: sizes='[...]'",
              described(step.left[0], *tensor), parts, axis, size);
    }
    sizes = Dims(static_cast<size_t>(parts), size / parts);
  }
  int64_t rest = size;
  for (int64_t one : sizes) rest = one > rest ? -1 : rest - one;
  if (rest != 0) {
    fail_at(step.at, "the sizes {} are not what {} has along axis {}: {}", list_text(sizes),
            described(step.left[0], *tensor), axis, size);
  }
  std::vector<AssemblyPtr> made = split_assembly(*tensor, axis, sizes, budget_);
  for (size_t i = 0; i < made.size(); ++i) write(step.right[i], std::move(made[i]), step);
}

void Runner::drop(const ProgramStep& step) {
  const Variable& variable = step.left[0];
  if (find(variable.name) == nullptr && !find_source(variable.name)) {
    // Looking for near names takes long: once is enough.
    const std::string near = std::exchange(suggested_, true) ? "" : suggestion(variable.name);
    notes_.push_back(
        fmt::format("line {}: there is no tensor {} to drop{}", step.at.line, quote(variable.name), near));
    return;
  }
  Outcome& here = outcome(variable.name);
  here.kind = Outcome::kDropped;
  here.written = here.kept = false;
  here.at = step.at;
}

void Runner::make_new(const ProgramStep& step) {
  Outcome& here = outcome(step.right[0].name);
  here.kind = Outcome::kNew;
  here.made_new = &step;
  here.written = true;
  here.kept = here.consumed = false;
  here.at = step.at;
}

std::string Runner::suggestion(std::string_view name) const {
  std::vector<std::string_view> names;
  for (const Outcome& one : outcomes_) {
    if (one.written) names.push_back(one.name);
  }
  for (size_t i = 0; i < source_count(); ++i) names.push_back(source(i).name);
  return did_you_mean(name, names);
}

}  // namespace spolia
