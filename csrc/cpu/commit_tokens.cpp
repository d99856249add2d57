// commit_tokens on the CPU: each task takes requests.
#include "../shared/params.h"
#include "team.h"

namespace specvis {

void commit_tokens_cpu(const CommitTokens& batch) {
  parallel_for(batch.B, 4096 / (batch.P + 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const int64_t count = batch.counts[b];
      for (int64_t i = 0; i <= batch.P; ++i) batch.write(b, i, count);
      batch.account(b, count);
    }
  });
}

}  // namespace specvis
