#include "verify.h"

namespace specvis {
namespace {

// Conversions of integers below 2^62 to double, and of doubles below 2^55 to integers, in operations that vectorize.
inline double as_double(int64_t x) {
  return static_cast<double>(static_cast<int32_t>(x >> 31)) * 2147483648.0 +
         static_cast<double>(static_cast<int32_t>(x & 0x7fffffff));
}
inline int64_t as_int64(double x) {
  const int32_t high = static_cast<int32_t>(x / 16777216.0);
  return (int64_t{high} << 24) + static_cast<int32_t>(x - static_cast<double>(high) * 16777216.0);
}

// Subtracts the draft from the residual after a sampled candidate was rejected, and returns the residual's sum. The
// marks of protected tokens are removed.
WIDEST_VECTORS int64_t subtract_row(int64_t* fixed_probs, int64_t V, double total, int64_t* draft, double draft_total,
                                    double slack) {
  const double unit = 1 / total, draft_unit = 1 / draft_total;
  int64_t sum = 0;
  for (int64_t v = 0; v < V; ++v) {
    const bool is_protected = draft[v] < 0;
    draft[v] = is_protected ? ~draft[v] : draft[v];
    const double draft_mass = is_protected ? 0.0 : as_double(draft[v]);
    fixed_probs[v] = as_int64(residual_mass(as_double(fixed_probs[v]), unit, draft_mass, draft_unit, slack));
    sum += fixed_probs[v];
  }
  return sum;
}

}  // namespace

void DenseResidual::subtract(const Candidate& candidate, double slack) {
  total_ = subtract_row(copy(), V_, static_cast<double>(candidate.total), draft_,
                        static_cast<double>(candidate.draft_total), slack);
}

}  // namespace specvis
