// spolia diff: what two checkpoints do not have in common.
#include <cmath>

#include <fmt/format.h>

#include "cli/command.h"
#include "spolia/base/text.h"
#include "spolia/checkpoint/diff.h"

namespace spolia::cli {
namespace {

struct Options {
  std::string a, b;
  DiffOptions diff;
  bool json = false;
  bool no_values = false;
  int64_t memory = int64_t{256} << 20;
  size_t threads = 1;
};

// ---- for people

void print_names(const char* what, const std::vector<std::string>& names) {
  for (const std::string& name : names) print(fmt::format("{}  {}\n", what, printable(name)));
}

/// "3 of 12 elements differ, first at [0, 2]: 1.5 and 1.25; ..."; empty where all are equal.
std::string elements_text(const TensorDiff& tensor) {
  if (tensor.differing == 0) return "";
  const bool is_bytes = is_sub_byte(tensor.dtype_a);
  std::string text =
      fmt::format("{} of {} {} differ, first at {}: {} and {}", tensor.differing, tensor.elements,
                  is_bytes ? "bytes" : "elements", list_text(tensor.first), tensor.first_a, tensor.first_b);
  if (tensor.max_absolute > 0) {
    text += fmt::format("; apart by at most {:.6g} ({:.3g} relative), {:.6g} on average", tensor.max_absolute,
                        tensor.max_relative, tensor.mean_absolute);
  }
  if (tensor.nan_on_one_side > 0) text += fmt::format("; NaN on one side {} times", tensor.nan_on_one_side);
  return text;
}

void print_tensor(const TensorDiff& tensor) {
  std::string what;
  if (tensor.dtype_a != tensor.dtype_b) {
    what = fmt::format("{} and {}", name_of(tensor.dtype_a), name_of(tensor.dtype_b));
  }
  if (tensor.shape_a != tensor.shape_b) {
    what += fmt::format("{}shapes {} and {}", what.empty() ? "" : "; ", shape_text(tensor.shape_a),
                        shape_text(tensor.shape_b));
  }
  std::string elements = elements_text(tensor);
  if (tensor.compared && elements.empty()) elements = "equal elements";
  if (!what.empty() && !elements.empty()) what += "; ";
  print(fmt::format("tensor differs  {}: {}\n", printable(tensor.name), what + elements));
}

void print_text(const Difference& difference, bool quiet) {
  print_names("tensor only in A", difference.tensors_only_in_a);
  print_names("tensor only in B", difference.tensors_only_in_b);
  int64_t differing = 0, close = 0;
  for (const TensorDiff& tensor : difference.tensors) {
    if (!tensor.is_equal()) print_tensor(tensor);
    differing += tensor.is_equal() ? 0 : 1;
    close += tensor.is_equal() && tensor.max_absolute > 0 ? 1 : 0;
  }
  print_names("value only in A", difference.values_only_in_a);
  print_names("value only in B", difference.values_only_in_b);
  for (const ValueDiff& value : difference.values) {
    print(fmt::format("value differs  {}: {} and {}\n", printable(value.name), value.a, value.b));
  }
  if (quiet) return;
  print(fmt::format("{} tensors in both: {} differ, {} are close; {} values in both: {} differ; {} read\n",
                    difference.tensors.size(), differing, close, difference.values_compared,
                    difference.values.size(), human_bytes(difference.report.bytes_read)));
}

// ---- for programs

/// JSON has no infinity.
nlohmann::ordered_json number_json(double number) {
  return std::isfinite(number) ? nlohmann::ordered_json(number) : nlohmann::ordered_json("Infinity");
}

nlohmann::ordered_json sizes_json(const Dims& sizes) {
  return std::vector<int64_t>(sizes.begin(), sizes.end());
}

nlohmann::ordered_json tensor_json(const TensorDiff& tensor) {
  nlohmann::ordered_json json = {
      {"dtype", {name_of(tensor.dtype_a), name_of(tensor.dtype_b)}},
      {"shape", nlohmann::ordered_json::array({sizes_json(tensor.shape_a), sizes_json(tensor.shape_b)})}};
  if (!tensor.compared) return json;
  json["elements"] = tensor.elements;
  json["differing"] = tensor.differing;
  json["nan_on_one_side"] = tensor.nan_on_one_side;
  if (tensor.differing > 0) {
    json["first"] = {{"index", sizes_json(tensor.first)}, {"a", tensor.first_a}, {"b", tensor.first_b}};
  }
  json["max_absolute"] = number_json(tensor.max_absolute);
  json["mean_absolute"] = number_json(tensor.mean_absolute);
  json["max_relative"] = number_json(tensor.max_relative);
  return json;
}

nlohmann::ordered_json difference_json(const Difference& difference) {
  nlohmann::ordered_json::object_t tensors, values;
  for (const TensorDiff& tensor : difference.tensors) {
    if (!tensor.is_equal()) tensors.emplace_back(tensor.name, tensor_json(tensor));
  }
  for (const ValueDiff& value : difference.values) {
    values.emplace_back(value.name, nlohmann::ordered_json{{"a", value.a}, {"b", value.b}});
  }
  return {{"equal", difference.is_equal()},
          {"only_in_a", {{"tensors", difference.tensors_only_in_a}, {"values", difference.values_only_in_a}}},
          {"only_in_b", {{"tensors", difference.tensors_only_in_b}, {"values", difference.values_only_in_b}}},
          {"tensors", std::move(tensors)},
          {"values", std::move(values)},
          {"tensors_compared", difference.tensors.size()},
          {"values_compared", difference.values_compared},
          {"bytes_read", difference.report.bytes_read}};
}

int run(const Context& context, const Options& options) {
  const auto a = open(options.a), b = open(options.b);
  DiffOptions diff_options = options.diff;
  diff_options.plan = {options.memory, options.threads};
  diff_options.values = !options.no_values;
  diff_options.cancel = &context.cancel;
  diff_options.progress = progress_bar(context);
  const Difference difference = diff(*a, *b, diff_options);
  if (options.json)
    print_json(difference_json(difference));
  else
    print_text(difference, context.quiet);
  return difference.is_equal() ? kFine : kDifference;
}

}  // namespace

void add_diff_command(CLI::App& app, Context& context) {
  auto options = std::make_shared<Options>();
  CLI::App* verb = app.add_subcommand(
      "diff",
      "Compares two checkpoints, whatever their formats and layouts: names, dtypes, shapes, elements, "
      "values.\n"
      "A dtype that differs is a difference, but float tensors are still compared by their values.\n"
      "Exit codes: 0 equal (within the tolerances), 1 different, 2 wrong use or unreadable.");
  verb->add_option("A", options->a, "a checkpoint: a folder or a file")->required();
  verb->add_option("B", options->b, "another")->required();
  verb->add_option("--rtol", options->diff.tolerance.relative,
                   "elements may be apart by ATOL + RTOL * |b|; NaN equals NaN [0]");
  verb->add_option("--atol", options->diff.tolerance.absolute, "see --rtol [0]");
  verb->add_option("--select", options->diff.select,
                   "only tensors and values whose name matches a pattern (*, ?); repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  verb->add_option("--drop", options->diff.drop, "without those whose name matches; repeatable")
      ->type_name("PATTERN")
      ->allow_extra_args(false);
  verb->add_flag("--no-values", options->no_values, "compare tensors alone");
  verb->add_flag(
      "--json", options->json,
      "print JSON: {equal, only_in_a: {tensors, values}, only_in_b, tensors: {name: {dtype: [a, b], "
      "shape: [a, b], elements, differing, nan_on_one_side, first: {index, a, b}, max_absolute, "
      "mean_absolute, max_relative}}, values: {name: {a, b}}, tensors_compared, values_compared, "
      "bytes_read}; tensors and values are those that differ");
  add_bytes_option(*verb, "--memory", options->memory, "bytes for buffers, 32MiB or more [256MiB]");
  add_threads_option(*verb, options->threads);
  verb->add_flag("--quiet", context.quiet, "show no progress and no summary");
  verb->callback(
      [&context, options] { context.run = [&context, options] { return run(context, *options); }; });
}

}  // namespace spolia::cli
