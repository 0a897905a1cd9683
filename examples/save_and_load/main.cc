#include "spolia/checkpoint/checkpoints.h"
#include "spolia/layout/layout_text.h"

using namespace spolia;

int main() {
  Checkpoints checkpoints("run", /*keep=*/3);
  for (int ranks : {4, 3}) {  // saved by four ranks, loaded by three
    launch(ranks, [&](World& world) {
      const auto rows =
          std::make_shared<const Layout>(parse_layout(fmt::format("[shard(0)] over {}", ranks)));
      const Dims shape = {1000, 64}, mine = rows->shard(shape, world.rank()).local_shape;
      std::vector<float> weight(numel(mine), 1.0f);
      std::byte* const memory = std::as_writable_bytes(std::span(weight)).data();

      StateDict state;
      state.add("weight", sharded_tensor(dense_view(memory, DType::kFloat32, mine), shape, rows));
      state.add("step", Value(int64_t{100}));
      if (ranks == 4) checkpoints.save(*world.all(), state, 100);
      if (ranks == 3) checkpoints.load(world, state);
    });
  }
}
