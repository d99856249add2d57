// denoise_tokens on the CPU: each task takes a few tokens through all steps, so that the weights stay in the cache and
// no thread waits for another. The modulations do not depend on x, so they are computed for several steps at once.
#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "products.h"
#include "team.h"
#include "vectors.h"

namespace specvis {
namespace {

constexpr int64_t kRows = 12;            // rows of the network that a task takes: with 12 a product is quickest
constexpr int64_t kModulationRows = 96;  // rows whose modulations are computed at once

// y = norm(x), y = y * weight + bias if these are given, then y * (1 + scale) + shift.
template <int kLanes>
INLINE void modulate(const float* x, const float* weight, const float* bias, const float* shift, const float* scale,
                     int64_t W, float eps, float* to) {
  const auto [mean, factor] = moments<kLanes>(x, W, eps);
  for (int64_t i = 0; i < W; i += kLanes) {
    Vec<kLanes> y = (load<kLanes>(x + i) - mean) * factor;
    if (weight) y = y * load<kLanes>(weight + i) + load<kLanes>(bias + i);
    store<kLanes>(to + i, y * (1.f + load<kLanes>(scale + i)) + load<kLanes>(shift + i));
  }
}

// Tokens [first, last).
template <int kLanes>
INLINE void denoise(const DenoiseTokens& d, int64_t first, int64_t last) {
  const int64_t n = last - first, P = d.P, M = n * P, T = d.T, C = d.C, W = d.W, Q = d.modulations();
  const int64_t padded_W = round_up(W, kPanel), padded_Q = round_up(Q, kPanel), padded_out = round_up(2 * C, kPanel);
  const int64_t steps = std::min(std::max<int64_t>(kModulationRows / M, 1), T);
  std::vector<float> y(steps * M * W), modulations(steps * M * padded_Q), inputs(M * C), h(M * padded_W), x(M * W),
      products(M * padded_W), outputs(M * padded_out);
  const float* const input = d.matrices + padded_Q * W;
  const float* const blocks = input + padded_W * C;
  const float* const input_bias = d.vectors + Q;
  const auto product = [](const float* rows, int64_t num_rows, int64_t K, const float* weight, std::vector<float>& to)
                           INLINED {
                             const int64_t stride = to.size() / num_rows;
                             multiply(Product<float>{rows, num_rows, K, weight, 0, stride / kPanel, to.data(), stride});
                           };

  for (int64_t i = 0; i < n; ++i) {
    std::copy_n(d.noise + ((first + i) * T + T - 1) * C, C, d.states + ((first + i) * (T + 1) + T) * C);
    d.log_sigma_sum[first + i] = 0;
  }
  for (int64_t t = T; t >= 1; --t) {
    const int64_t step = (T - t) % steps;
    if (step == 0) {
      const int64_t num_rows = std::min(steps, t) * M;
      for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t c = 0; c < W; c += kLanes)
          store<kLanes>(&y[row * W + c], silu<kLanes>(load<kLanes>(d.z + (first * P + row % M) * W + c) +
                                                      load<kLanes>(d.time + (t - 1 - row / M) * W + c)));
      multiply(Product<float>{y.data(), num_rows, W, d.matrices, 0, padded_Q / kPanel, modulations.data(), padded_Q});
      for (int64_t row = 0; row < num_rows; ++row)
        for (int64_t c = 0; c < Q; c += kLanes) {
          float* const to = &modulations[row * padded_Q + c];
          store<kLanes>(to, load<kLanes>(to) + load<kLanes>(d.vectors + c));
        }
    }
    const auto modulation = [&](int64_t m, int64_t part)
                                INLINED { return &modulations[(step * M + m) * padded_Q + part * W]; };

    for (int64_t m = 0; m < M; ++m) std::copy_n(d.states + ((first + m / P) * (T + 1) + t) * C, C, &inputs[m * C]);
    product(inputs.data(), M, C, input, h);
    for (int64_t m = 0; m < M; ++m)
      for (int64_t c = 0; c < W; c += kLanes) {
        float* const to = &h[m * padded_W + c];
        store<kLanes>(to, load<kLanes>(to) + load<kLanes>(input_bias + c));
      }
    for (int64_t block = 0; block < d.blocks; ++block) {
      const float* const up = blocks + 2 * block * padded_W * W;
      const float* const norm = input_bias + (1 + 4 * block) * W;
      const float *const norm_bias = norm + W, *const up_bias = norm_bias + W, *const down_bias = up_bias + W;
      for (int64_t m = 0; m < M; ++m)
        modulate<kLanes>(&h[m * padded_W], norm, norm_bias, modulation(m, 3 * block), modulation(m, 3 * block + 1), W,
                         d.eps, &x[m * W]);
      product(x.data(), M, W, up, products);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t c = 0; c < W; c += kLanes)
          store<kLanes>(&x[m * W + c],
                        silu<kLanes>(load<kLanes>(&products[m * padded_W + c]) + load<kLanes>(up_bias + c)));
      product(x.data(), M, W, up + padded_W * W, products);
      for (int64_t m = 0; m < M; ++m)
        for (int64_t c = 0; c < W; c += kLanes) {
          float* const to = &h[m * padded_W + c];
          const Vec<kLanes> down = load<kLanes>(&products[m * padded_W + c]) + load<kLanes>(down_bias + c);
          store<kLanes>(to, load<kLanes>(to) + load<kLanes>(modulation(m, 3 * block + 2) + c) * down);
        }
    }
    for (int64_t m = 0; m < M; ++m)
      modulate<kLanes>(&h[m * padded_W], nullptr, nullptr, modulation(m, 3 * d.blocks), modulation(m, 3 * d.blocks + 1),
                       W, d.eps, &x[m * W]);
    product(x.data(), M, W, blocks + 2 * d.blocks * padded_W * W, outputs);

    const float* const s = d.schedule + (t - 1) * 7;
    const float* const output_bias = input_bias + (1 + 4 * d.blocks) * W;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t token = first + i;
      const float* const output = &outputs[i * P * padded_out];
      float* const now = d.states + (token * (T + 1) + t) * C;
      double sum = 0;
      for (int64_t c = 0; c < C; ++c) {
        float epsilon = output[c] + output_bias[c];
        if (P == 2) {
          const float other = output[padded_out + c] + output_bias[c];
          epsilon = other + d.guidance[token] * (epsilon - other);
        }
        const float weight = (output[C + c] + output_bias[C + c] + 1) / 2;
        const float x_0 = std::clamp(s[1] * now[c] - s[2] * epsilon, -d.clip_range, d.clip_range);
        const float mean = s[3] * x_0 + s[4] * now[c];
        const float log_sigma = weight * s[6] + (1 - weight) * s[5] + d.log_temperature;
        sum += log_sigma;
        now[c - C] = t > 1 ? mean + std::exp(log_sigma) * d.noise[(token * T + t - 2) * C + c] : mean;
        if (t == 1) d.log_sigma[token * C + c] = log_sigma;
      }
      if (t > 1) d.log_sigma_sum[token] += sum;
    }
  }
}

FOR_EACH_MACHINE(, denoise, (const DenoiseTokens& d, int64_t first, int64_t last), denoise<kLanes>(d, first, last))

}  // namespace

void denoise_tokens_cpu(const DenoiseTokens& batch) {
  static const auto best = BEST_FUNCTION(denoise, );
  if (batch.R == 0) return;
  const int64_t R = batch.R, threads = Team::threads_for(R, 1);
  const int64_t turns =
      (R * batch.P + threads * kRows - 1) / (threads * kRows);  // in each turn every thread takes a task
  const int64_t tasks = std::min(R, turns * threads);
  Team::run(std::make_shared<Team>(1), threads, [=, &batch](Team::Member member) {
    member.phase(tasks, [&](int64_t i) { best(batch, R * i / tasks, R * (i + 1) / tasks); });
  });
}

}  // namespace specvis
