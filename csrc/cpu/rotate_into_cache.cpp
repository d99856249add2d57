// rotate_into_cache on the CPU: each task takes nodes.
#include <algorithm>
#include <cmath>
#include <vector>

#include "team.h"
#include "types.h"

namespace specvis {
namespace {

constexpr int64_t kTaskWork = 1 << 15;  // entries; fewer are not worth another thread

// LayerNorm. Its moments are float64, so that the order of the terms hardly ever shows.
template <class T>
void normalize(std::vector<float>& x, const T* scale, const T* shift, float eps) {
  double sum = 0, squares = 0;
  for (const float a : x) sum += a;
  const double mean = sum / x.size();
  for (const float a : x) squares += (a - mean) * (a - mean);
  const float factor = 1 / std::sqrt(squares / x.size() + eps);
  for (size_t d = 0; d < x.size(); ++d)
    x[d] = (x[d] - static_cast<float>(mean)) * factor * static_cast<float>(scale[d]) + static_cast<float>(shift[d]);
}

template <class T>
void run(const RotateIntoCache& batch) {
  const int64_t N = batch.N, H = batch.H, G = batch.G, D = batch.D, T_ = batch.T, Q = (H + 2 * G) * D;
  const auto *const scale = static_cast<const T*>(batch.scale), *const shift = static_cast<const T*>(batch.shift);
  parallel_for(batch.R * N, kTaskWork / Q + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> head(D);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i / N, n = i % N, length = batch.lengths[r % batch.B];
      const T* const from = static_cast<const T*>(batch.qkv) + i * Q;
      const int64_t position = std::clamp<int64_t>(batch.positions[r % batch.Y * N + n], 0, batch.P - 1);
      const float* const rotation = batch.rotations + position * 2 * batch.pairs;
      // Head h of queries and keys, normalized and turned.
      const auto turn = [&](int64_t h, T* to) {
        std::copy_n(from + h * D, D, head.begin());
        if (scale) normalize(head, scale + h * D, shift + h * D, batch.eps);
        for (int64_t d = 0; d < batch.pairs; ++d) {
          const int64_t first = batch.has_halves ? d : 2 * d;
          const int64_t second = batch.has_halves ? d + batch.pairs : 2 * d + 1;
          const float a = head[first], b = head[second], c = rotation[2 * d], s = rotation[2 * d + 1];
          to[first] = a * c - b * s;
          to[second] = a * s + b * c;
        }
        for (int64_t d = 2 * batch.pairs; d < D; ++d) to[d] = head[d];
      };
      for (int64_t h = 0; h < H; ++h) turn(h, static_cast<T*>(batch.q) + (i * H + h) * D);
      if (length < 0 || length >= T_ - batch.first_node - n) continue;
      T* const entry = static_cast<T*>(batch.kv_cache) + (r * T_ + length + batch.first_node + n) * 2 * G * D;
      for (int64_t g = 0; g < G; ++g) turn(H + g, entry + g * D);
      std::copy_n(from + (H + G) * D, G * D, entry + G * D);
    }
  });
}

}  // namespace

void rotate_into_cache_cpu(const RotateIntoCache& batch) {
  of_type(batch.type, [&](auto number) { run<decltype(number)>(batch); });
}

}  // namespace specvis
