// rms_norm on the CPU: each task takes rows.
#include <cmath>

#include "team.h"
#include "types.h"

namespace specvis {
namespace {

constexpr int64_t kTaskWork = 1 << 16;  // entries; fewer are not worth another thread

template <class T>
void run(const RmsNorm& batch) {
  const int64_t E = batch.E;
  const auto* const weight = static_cast<const T*>(batch.weight);
  parallel_for(batch.M, kTaskWork / E + 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m) {
      const T* row = static_cast<const T*>(batch.x) + m * E;
      if (batch.residual) {
        const T* const residual = static_cast<const T*>(batch.residual) + m * E;
        T* const stream = static_cast<T*>(batch.stream) + m * E;
        for (int64_t i = 0; i < E; ++i) stream[i] = static_cast<float>(row[i]) + static_cast<float>(residual[i]);
        row = stream;
      }
      constexpr int kSums = 8;  // that do not wait for each other
      double sums[kSums] = {};
      for (int64_t i = 0; i < E; ++i) {
        const double x = static_cast<float>(row[i]);
        sums[i % kSums] += x * x;
      }
      double sum = 0;
      for (const double part : sums) sum += part;
      const auto factor =
          static_cast<float>(1 / std::sqrt(sum / static_cast<double>(E) + static_cast<double>(batch.eps)));
      T* const normed = static_cast<T*>(batch.normed) + m * E;
      for (int64_t i = 0; i < E; ++i) normed[i] = static_cast<float>(row[i]) * factor * static_cast<float>(weight[i]);
    }
  });
}

}  // namespace

void rms_norm_cpu(const RmsNorm& batch) {
  of_type(batch.type, [&](auto number) { run<decltype(number)>(batch); });
}

}  // namespace specvis
