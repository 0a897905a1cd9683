// A small language model on bytes, with its derivatives written by hand: a transformer with a learned
// position for each place, root-mean-square norms, causal attention with several heads, and squared ReLUs.
//
// Everything is float32, and every sum is taken in one order, so that the same tokens give the same bits.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "spolia/tensor/shape.h"

namespace train_lm {

struct ModelShape {
  int64_t width = 64;  // of what flows through the layers
  int64_t heads = 4;   // divides the width
  int64_t layers = 2;
  int64_t hidden = 192;                    // of a layer's two products
  int64_t context = 64;                    // tokens that it looks back on, itself among them
  static constexpr int64_t kTokens = 256;  // the bytes
};

struct ParameterShape {
  std::string name;
  spolia::Dims shape;
  double spread = 1;  // of its first values
  int64_t parts = 1;  // matrices that are one above the other in it: q, k and v
};

/// All parameters, in a fixed order. Matrices are [out, in].
std::vector<ParameterShape> parameter_shapes(const ModelShape& shape);

/// First values, the same on every rank.
std::vector<std::vector<float>> first_values(const ModelShape& shape, uint64_t seed);

/// Where the projection to queries, keys and values of a layer is among the parameters.
size_t qkv_index(int64_t layer);

/// Adds up the losses (natural logarithms) of predicting each of the last `context` bytes of a sequence of
/// context + 1 from those before it, and adds the derivatives of that sum to `gradients`. Both lists have the
/// parameters in their order. `largest_logits` has a number for each head, layer by layer, which is raised to
/// the largest score that a query and a key of it have with each other.
double add_loss_and_gradients(const ModelShape& shape, std::span<const std::vector<float>> parameters,
                              std::span<const uint8_t> sequence, std::span<std::vector<float>> gradients,
                              std::span<float> largest_logits);

}  // namespace train_lm
