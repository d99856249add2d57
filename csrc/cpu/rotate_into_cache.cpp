// rotate_into_cache on the CPU: each task takes nodes.
#include <algorithm>

#include "team.h"
#include "types.h"

namespace specvis {
namespace {

constexpr int64_t kTaskWork = 1 << 15;  // entries; fewer are not worth another thread

template <class T>
void run(const RotateIntoCache& batch) {
  const int64_t N = batch.N, H = batch.H, G = batch.G, D = batch.D, T_ = batch.T, Q = (H + 2 * G) * D;
  parallel_for(batch.R * N, kTaskWork / Q + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / N, n = i % N, length = batch.lengths[r % batch.B];
      const T* const from = static_cast<const T*>(batch.qkv) + i * Q;
      const int64_t position = std::clamp<int64_t>(batch.positions[r % batch.Y * N + n], 0, batch.P - 1);
      const float* const rotation = batch.rotations + position * D;
      const auto turn = [&](const T* x, T* to) {
        for (int64_t d = 0; d < D / 2; ++d) {
          const int64_t first = batch.has_halves ? d : 2 * d, second = batch.has_halves ? d + D / 2 : 2 * d + 1;
          const float a = x[first], b = x[second], c = rotation[2 * d], s = rotation[2 * d + 1];
          to[first] = a * c - b * s;
          to[second] = a * s + b * c;
        }
      };
      for (int64_t h = 0; h < H; ++h) turn(from + h * D, static_cast<T*>(batch.q) + (i * H + h) * D);
      if (length < 0 || length >= T_ - batch.first_node - n) continue;
      T* const entry = static_cast<T*>(batch.kv_cache) + (r * T_ + length + batch.first_node + n) * 2 * G * D;
      for (int64_t g = 0; g < G; ++g) turn(from + (H + g) * D, entry + g * D);
      std::copy_n(from + (H + G) * D, G * D, entry + G * D);
    }
  });
}

}  // namespace

void rotate_into_cache_cpu(const RotateIntoCache& batch) {
  of_type(batch.type, [&](auto number) { run<decltype(number)>(batch); });
}

}  // namespace specvis
