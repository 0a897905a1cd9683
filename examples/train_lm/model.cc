#include "model.h"

#include <algorithm>
#include <cmath>
#include <random>

namespace train_lm {
namespace {

using Matrix = std::vector<float>;  // row-major

/// The sum of a[i] * b[i], in an order that processors do eight or sixteen at a time.
float dot(const float* a, const float* b, int64_t size) {
  constexpr int64_t kLanes = 16;
  float lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
  }
  float sum = 0;
  for (float lane : lanes) sum += lane;
  for (; i < size; ++i) sum += a[i] * b[i];
  return sum;
}

void add_scaled(float* to, float factor, const float* from, int64_t size) {
  for (int64_t i = 0; i < size; ++i) to[i] += factor * from[i];
}

/// y = x W^T for `rows` rows; W is [out, in].
Matrix apply(const Matrix& x, const std::vector<float>& w, int64_t rows, int64_t in, int64_t out) {
  Matrix y(static_cast<size_t>(rows * out));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) y[r * out + o] = dot(&x[r * in], &w[o * in], in);
  }
  return y;
}

/// The derivatives of apply(): adds to dw, gives dx.
Matrix apply_back(const Matrix& x, const std::vector<float>& w, const Matrix& dy, int64_t rows, int64_t in,
                  int64_t out, std::vector<float>& dw) {
  Matrix dx(static_cast<size_t>(rows * in));
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t o = 0; o < out; ++o) {
      add_scaled(&dx[r * in], dy[r * out + o], &w[o * in], in);
      add_scaled(&dw[o * in], dy[r * out + o], &x[r * in], in);
    }
  }
  return dx;
}

constexpr float kNormEpsilon = 1e-6f;

/// Each row divided by its root mean square, times the gain; `scales`: the divisors' inverses.
struct Normed {
  Matrix values;
  std::vector<float> scales;
};

Normed norm(const Matrix& x, const std::vector<float>& gain, int64_t rows, int64_t width) {
  Normed normed{Matrix(x.size()), std::vector<float>(static_cast<size_t>(rows))};
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = &x[r * width];
    const float scale = 1 / std::sqrt(dot(row, row, width) / static_cast<float>(width) + kNormEpsilon);
    normed.scales[r] = scale;
    for (int64_t i = 0; i < width; ++i) normed.values[r * width + i] = row[i] * scale * gain[i];
  }
  return normed;
}

/// Adds to dx and to the gain's derivatives.
void norm_back(const Matrix& x, const std::vector<float>& gain, const Normed& normed, const Matrix& dy,
               int64_t rows, int64_t width, Matrix& dx, std::vector<float>& dgain) {
  Matrix scaled(static_cast<size_t>(width));
  for (int64_t r = 0; r < rows; ++r) {
    const float* row = &x[r * width];
    const float* d = &dy[r * width];
    const float scale = normed.scales[r];
    for (int64_t i = 0; i < width; ++i) {
      dgain[i] += d[i] * row[i] * scale;
      scaled[i] = d[i] * gain[i];
    }
    const float along = dot(scaled.data(), row, width) * scale * scale / static_cast<float>(width);
    for (int64_t i = 0; i < width; ++i) dx[r * width + i] += scale * (scaled[i] - along * row[i]);
  }
}

/// Attention of each place to itself and those before it. `qkv`: rows of q, k and v, each of all heads.
struct Attended {
  Matrix values;                // of all heads
  std::vector<Matrix> weights;  // of each head: [place, place], zero for what comes later
};

Attended attend(const Matrix& qkv, const ModelShape& shape, int64_t rows, std::span<float> largest_logits) {
  const int64_t width = shape.width, each = width / shape.heads, stride = 3 * width;
  const float scale = 1 / std::sqrt(static_cast<float>(each));
  Attended attended{Matrix(static_cast<size_t>(rows * width)), {}};
  for (int64_t h = 0; h < shape.heads; ++h) {
    const float* q = &qkv[h * each];
    const float* k = q + width;
    const float* v = k + width;
    Matrix weights(static_cast<size_t>(rows * rows));
    for (int64_t t = 0; t < rows; ++t) {
      float* w = &weights[t * rows];
      for (int64_t s = 0; s <= t; ++s) w[s] = scale * dot(q + t * stride, k + s * stride, each);
      const float most = *std::max_element(w, w + t + 1);
      largest_logits[h] = std::max(largest_logits[h], most);
      float sum = 0;
      for (int64_t s = 0; s <= t; ++s) sum += w[s] = std::exp(w[s] - most);
      for (int64_t s = 0; s <= t; ++s) {
        w[s] /= sum;
        add_scaled(&attended.values[t * width + h * each], w[s], v + s * stride, each);
      }
    }
    attended.weights.push_back(std::move(weights));
  }
  return attended;
}

Matrix attend_back(const Matrix& qkv, const Attended& attended, const Matrix& dy, const ModelShape& shape,
                   int64_t rows) {
  const int64_t width = shape.width, each = width / shape.heads, stride = 3 * width;
  const float scale = 1 / std::sqrt(static_cast<float>(each));
  Matrix dqkv(qkv.size());
  std::vector<float> dw(static_cast<size_t>(rows));
  for (int64_t h = 0; h < shape.heads; ++h) {
    const float* q = &qkv[h * each];
    const float* k = q + width;
    const float* v = k + width;
    float* dq = &dqkv[h * each];
    float* dk = dq + width;
    float* dv = dk + width;
    for (int64_t t = 0; t < rows; ++t) {
      const float* w = &attended.weights[h][t * rows];
      const float* d = &dy[t * width + h * each];
      float along = 0;
      for (int64_t s = 0; s <= t; ++s) {
        dw[s] = dot(d, v + s * stride, each);
        along += dw[s] * w[s];
        add_scaled(dv + s * stride, w[s], d, each);
      }
      for (int64_t s = 0; s <= t; ++s) {
        const float score = w[s] * (dw[s] - along) * scale;
        add_scaled(dq + t * stride, score, k + s * stride, each);
        add_scaled(dk + s * stride, score, q + t * stride, each);
      }
    }
  }
  return dqkv;
}

// Where a layer's parameters are among all.
enum { kNorm1, kQkv, kOut, kNorm2, kUp, kDown, kLayerParameters };
constexpr int64_t kEmbed = 0, kPlaces = 1, kFirstLayer = 2;

/// What a layer keeps for the way back.
struct LayerTrace {
  Matrix in, qkv, middle, up, active;
  Normed norm1, norm2;
  Attended attended;
};

}  // namespace

std::vector<ParameterShape> parameter_shapes(const ModelShape& shape) {
  const int64_t width = shape.width;
  std::vector<ParameterShape> all = {{"embed.weight", {ModelShape::kTokens, width}, .3, 1},
                                     {"place_embed.weight", {shape.context, width}, .3, 1}};
  for (int64_t l = 0; l < shape.layers; ++l) {
    const std::string layer = "layers." + std::to_string(l) + ".";
    all.push_back({layer + "norm1.weight", {width}, 1, 1});
    all.push_back({layer + "attention.qkv.weight", {3 * width, width}, 1, 3});
    all.push_back({layer + "attention.out.weight", {width, width}, 1, 1});
    all.push_back({layer + "norm2.weight", {width}, 1, 1});
    all.push_back({layer + "mlp.up.weight", {shape.hidden, width}, 1, 1});
    all.push_back({layer + "mlp.down.weight", {width, shape.hidden}, 1, 1});
  }
  all.push_back({"norm.weight", {width}, 1, 1});
  all.push_back({"head.weight", {ModelShape::kTokens, width}, .3, 1});
  return all;
}

size_t qkv_index(int64_t layer) { return static_cast<size_t>(kFirstLayer + layer * kLayerParameters + kQkv); }

std::vector<std::vector<float>> first_values(const ModelShape& shape, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::vector<float>> values;
  for (const ParameterShape& parameter : parameter_shapes(shape)) {
    std::vector<float>& own = values.emplace_back(static_cast<size_t>(spolia::numel(parameter.shape)), 1.0f);
    if (parameter.shape.size() < 2) continue;
    // Uniform, so that the numbers are the same with every standard library.
    const double most = std::sqrt(3.0 / static_cast<double>(parameter.shape[1])) * parameter.spread;
    for (float& value : own) {
      value = static_cast<float>((static_cast<double>(random() >> 11) * 0x1p-53 * 2 - 1) * most);
    }
  }
  return values;
}

double add_loss_and_gradients(const ModelShape& shape, std::span<const std::vector<float>> parameters,
                              std::span<const uint8_t> sequence, std::span<std::vector<float>> gradients,
                              std::span<float> largest_logits) {
  const int64_t rows = shape.context, width = shape.width, hidden = shape.hidden;
  const int64_t tokens = ModelShape::kTokens;
  const size_t last_norm = static_cast<size_t>(kFirstLayer + shape.layers * kLayerParameters);
  const size_t head = last_norm + 1;

  Matrix x(static_cast<size_t>(rows * width));
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t i = 0; i < width; ++i) {
      x[t * width + i] = parameters[kEmbed][sequence[t] * width + i] + parameters[kPlaces][t * width + i];
    }
  }
  std::vector<LayerTrace> traces(static_cast<size_t>(shape.layers));
  for (int64_t l = 0; l < shape.layers; ++l) {
    const auto own = parameters.subspan(static_cast<size_t>(kFirstLayer + l * kLayerParameters));
    LayerTrace& trace = traces[l];
    trace.in = x;
    trace.norm1 = norm(x, own[kNorm1], rows, width);
    trace.qkv = apply(trace.norm1.values, own[kQkv], rows, width, 3 * width);
    trace.attended = attend(
        trace.qkv, shape, rows,
        largest_logits.subspan(static_cast<size_t>(l * shape.heads), static_cast<size_t>(shape.heads)));
    const Matrix out = apply(trace.attended.values, own[kOut], rows, width, width);
    add_scaled(x.data(), 1, out.data(), std::ssize(x));
    trace.middle = x;
    trace.norm2 = norm(x, own[kNorm2], rows, width);
    trace.up = apply(trace.norm2.values, own[kUp], rows, width, hidden);
    trace.active = trace.up;
    for (float& value : trace.active) value = value > 0 ? value * value : 0;
    const Matrix down = apply(trace.active, own[kDown], rows, hidden, width);
    add_scaled(x.data(), 1, down.data(), std::ssize(x));
  }
  const Normed normed = norm(x, parameters[last_norm], rows, width);
  Matrix logits = apply(normed.values, parameters[head], rows, width, tokens);

  double loss = 0;
  for (int64_t t = 0; t < rows; ++t) {
    float* row = &logits[t * tokens];
    const float most = *std::max_element(row, row + tokens);
    double sum = 0;
    for (int64_t c = 0; c < tokens; ++c) sum += std::exp(static_cast<double>(row[c] - most));
    const uint8_t next = sequence[static_cast<size_t>(t + 1)];
    loss += std::log(sum) - static_cast<double>(row[next] - most);
    // From here on the row holds the derivatives.
    for (int64_t c = 0; c < tokens; ++c) {
      row[c] = static_cast<float>(std::exp(static_cast<double>(row[c] - most)) / sum);
    }
    row[next] -= 1;
  }

  const Matrix dnormed =
      apply_back(normed.values, parameters[head], logits, rows, width, tokens, gradients[head]);
  Matrix dx(x.size());
  norm_back(x, parameters[last_norm], normed, dnormed, rows, width, dx, gradients[last_norm]);
  for (int64_t l = shape.layers; l-- > 0;) {
    const auto first = static_cast<size_t>(kFirstLayer + l * kLayerParameters);
    const auto own = parameters.subspan(first);
    const auto d = gradients.subspan(first);
    const LayerTrace& trace = traces[l];
    Matrix dactive = apply_back(trace.active, own[kDown], dx, rows, hidden, width, d[kDown]);
    for (size_t i = 0; i < dactive.size(); ++i) dactive[i] *= 2 * std::max(trace.up[i], 0.0f);
    const Matrix dnorm2 = apply_back(trace.norm2.values, own[kUp], dactive, rows, width, hidden, d[kUp]);
    norm_back(trace.middle, own[kNorm2], trace.norm2, dnorm2, rows, width, dx, d[kNorm2]);
    const Matrix dattended = apply_back(trace.attended.values, own[kOut], dx, rows, width, width, d[kOut]);
    const Matrix dqkv = attend_back(trace.qkv, trace.attended, dattended, shape, rows);
    const Matrix dnorm1 = apply_back(trace.norm1.values, own[kQkv], dqkv, rows, width, 3 * width, d[kQkv]);
    norm_back(trace.in, own[kNorm1], trace.norm1, dnorm1, rows, width, dx, d[kNorm1]);
  }
  for (int64_t t = 0; t < rows; ++t) {
    add_scaled(&gradients[kEmbed][sequence[t] * width], 1, &dx[t * width], width);
    add_scaled(&gradients[kPlaces][t * width], 1, &dx[t * width], width);
  }
  return loss;
}

}  // namespace train_lm
