// The hand-written derivatives against differences of the loss.
#include "model.h"

#include <cmath>
#include <random>

#include <gtest/gtest.h>

namespace train_lm {
namespace {

TEST(TrainLm, DerivativesAreTheSlopesOfTheLoss) {
  const ModelShape shape{.width = 8, .heads = 2, .layers = 2, .hidden = 12, .context = 6};
  auto values = first_values(shape, 3);
  std::vector<std::vector<float>> gradients;
  for (const auto& value : values) gradients.emplace_back(value.size());
  const std::vector<uint8_t> sequence = {5, 5, 200, 7, 0, 255, 5};
  std::vector<float> largest(4, -1e9f);
  const double loss = add_loss_and_gradients(shape, values, sequence, gradients, largest);
  EXPECT_NEAR(loss, 6 * std::log(256.0), 2);

  std::mt19937_64 random(1);
  for (size_t p = 0; p < values.size(); ++p) {
    for (int sample = 0; sample < 12; ++sample) {
      const size_t at = random() % values[p].size();
      const float kept = values[p][at];
      const auto loss_at = [&](float value) {
        values[p][at] = value;
        auto unused = gradients;
        return add_loss_and_gradients(shape, values, sequence, unused, largest);
      };
      constexpr float kStep = 4e-3f;
      const double slope = (loss_at(kept + kStep) - loss_at(kept - kStep)) / (2 * kStep);
      values[p][at] = kept;
      EXPECT_NEAR(gradients[p][at], slope, 2e-3 + 0.02 * std::abs(slope))
          << parameter_shapes(shape)[p].name << " " << at;
    }
  }
}

TEST(TrainLm, TheSameTokensGiveTheSameBits) {
  const ModelShape shape;
  const auto values = first_values(shape, 3);
  std::vector<uint8_t> sequence(static_cast<size_t>(shape.context + 1), 'a');
  std::vector<std::vector<float>> a, b;
  for (const auto& value : values) a.emplace_back(value.size());
  b = a;
  std::vector<float> largest_a(8, -1e9f), largest_b = largest_a;
  EXPECT_EQ(add_loss_and_gradients(shape, values, sequence, a, largest_a),
            add_loss_and_gradients(shape, values, sequence, b, largest_b));
  EXPECT_EQ(a, b);
  EXPECT_EQ(largest_a, largest_b);
}

TEST(TrainLm, LogitsGrowWithQueriesAndKeys) {
  const ModelShape shape{.width = 8, .heads = 2, .layers = 1, .hidden = 12, .context = 6};
  auto values = first_values(shape, 3);
  std::vector<std::vector<float>> gradients;
  for (const auto& value : values) gradients.emplace_back(value.size());
  const std::vector<uint8_t> sequence = {5, 5, 200, 7, 0, 255, 5};
  const auto largest = [&] {
    std::vector<float> found(2, -1e9f);
    add_loss_and_gradients(shape, values, sequence, gradients, found);
    return found;
  };
  const std::vector<float> before = largest();
  // Twice the queries of head 1, and three times its keys: rows 4 to 8, and 12 to 16 after the queries'
  // eight.
  for (size_t i = 0; i < 4 * 8; ++i) {
    values[qkv_index(0)][4 * 8 + i] *= 2;
    values[qkv_index(0)][12 * 8 + i] *= 3;
  }
  const std::vector<float> after = largest();
  EXPECT_EQ(after[0], before[0]);
  EXPECT_NEAR(after[1], 6 * before[1], 1e-4 * after[1]);
}

}  // namespace
}  // namespace train_lm
