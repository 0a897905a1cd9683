// What ranks say of a job's state, as other ranks read it, and what they make of it together.
#include "fuzz/fuzzing.h"
#include "spolia/checkpoint/description.h"

namespace spolia::fuzzing {

void run(Bytes bytes) {
  Descriptions all;
  Description& description = all.distinct.emplace_back();
  if (!accepts([&] { description = decode_description(text_of(bytes)); })) return;
  require(decode_description(encode(description)) == description);
  all.of_rank = {0, 0};
  for (const Purpose purpose : {Purpose::kSave, Purpose::kLoad}) {
    accepts([&] {
      const JobState job = join(all, purpose);
      require(job.shared.size() == job.tensors.size());
    });
  }
}

}  // namespace spolia::fuzzing
