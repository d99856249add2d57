// swiglu on the CPU: each task takes entries.
#include <cmath>

#include "../shared/floats.h"
#include "team.h"
#include "types.h"

namespace specvis {
namespace {

template <class T>
void run(const Swiglu& batch) {
  const auto *const gate = static_cast<const T*>(batch.gate), *const up = static_cast<const T*>(batch.up);
  auto* const gated = static_cast<T*>(batch.gated);
  parallel_for(batch.M * batch.F, 1 << 14, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t m = i / batch.F, f = i % batch.F;
      const float g = gate[m * batch.gate_strides[0] + f], u = up[m * batch.up_strides[0] + f];
      const float e = exp_of(-std::fabs(g));
      gated[i] = (g < 0 ? g * e : g) / (1 + e) * u;
    }
  });
}

}  // namespace

void swiglu_cpu(const Swiglu& batch) {
  of_type(batch.type, [&](auto number) { run<decltype(number)>(batch); });
}

}  // namespace specvis
