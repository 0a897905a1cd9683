#include "spolia/checkpoint/rank_loads.h"

#include <algorithm>
#include <vector>

#include "spolia/comm/exchange.h"

namespace spolia {

void note_loads(Group& group, int64_t bytes, Report& report) {
  const std::vector<int64_t> all = all_gather_number(group, bytes);
  report.busiest_rank_bytes = std::ranges::max(all);
  report.mean_rank_bytes = 0;
  for (int64_t of_rank : all) report.mean_rank_bytes += of_rank / std::ssize(all);
}

}  // namespace spolia
