// Density ratios of diagonal Gaussians on the CPU, with the bits of specvis_kernels/_gaussian.py.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "../shared/params.h"

namespace specvis {

constexpr double kMinExp = -708, kMaxExp = 709;  // where 2^n is a normal number
constexpr int64_t kLanes = 16;

// exp; 0 for a NaN and below kMinExp, exp(kMaxExp) above kMaxExp.
inline double exp64(double x) {
  double inside = x > kMinExp ? x : kMinExp;
  inside = inside < kMaxExp ? inside : kMaxExp;
  const double n = std::floor(inside * 1.4426950408889634 + 0.5);
  const double r = (inside - n * (2977044471.0 / 4294967296.0)) - n * 1.9082149292705877e-10;
  double y = 1.0 / 6227020800.0;
  y = y * r + 1.0 / 479001600.0;
  y = y * r + 1.0 / 39916800.0;
  y = y * r + 1.0 / 3628800.0;
  y = y * r + 1.0 / 362880.0;
  y = y * r + 1.0 / 40320.0;
  y = y * r + 1.0 / 5040.0;
  y = y * r + 1.0 / 720.0;
  y = y * r + 1.0 / 120.0;
  y = y * r + 1.0 / 24.0;
  y = y * r + 1.0 / 6.0;
  y = y * r + 1.0 / 2.0;
  y = y * r + 1.0;
  y = y * r + 1.0;
  const int64_t bits = static_cast<int64_t>(static_cast<int32_t>(n) + 1023) << 52;
  double power;  // 2^n
  std::memcpy(&power, &bits, sizeof power);
  return x > kMinExp ? y * power : 0.0;
}

// Accepts with probability exp(log_r).
inline bool accepts(float uniform, float log_r) { return uniform < exp64(log_r); }

// Accepts with probability 1 - exp(-log_r), or 0 if that is negative.
inline bool accepts_residual(float uniform, float log_r) { return log_r > 0 && uniform < 1 - exp64(-log_r); }

inline bool all_finite(const float* x, int64_t n) {
  bool finite = true;
  for (int64_t i = 0; i < n; ++i) finite &= std::isfinite(x[i]);
  return finite;
}

// The temperature of request b, and the factor of a squared distance: 1 / (2 temperature^2). An undefined
// temperature counts as 1.
struct Temperature {
  bool is_undefined;
  double distance_factor;
  Temperature(const float* temperature, int64_t b) {
    const double t = temperature ? temperature[b] : 1.0;
    is_undefined = !(t > 0 && t < INFINITY);
    distance_factor = is_undefined ? 0.5 : 0.5 / (t * t);
  }
};

// The last denoising step of both models at one position. The terms that do not depend on the token are computed once.
class LastStep {
 public:
  LastStep(const LastStepParams& step, int64_t C)
      : step_(step), C_(C), sigma_(C), target_scale_(C), draft_scale_(C), shift_(C) {}

  explicit operator bool() const { return step_.target_means; }

  void move_to(int64_t position) {
    start_ = position * C_;
    for (int64_t c = 0; c < C_; ++c) {
      const double target = step_.target_log_sigmas[start_ + c], draft = step_.draft_log_sigmas[start_ + c];
      target_scale_[c] = exp64(-target);
      draft_scale_[c] = exp64(-draft);
      shift_[c] = draft - target;
    }
  }

  // Call this before draw().
  void prepare_draws() {
    for (int64_t c = 0; c < C_; ++c) sigma_[c] = exp64(step_.target_log_sigmas[start_ + c]);
  }

  // log P(x) - log Q(x).
  double log_ratio(const float* x, double distance_factor) const {
    double lanes[kLanes] = {};
    for (int64_t c = 0; c < C_; ++c) {
      const double target = (double{x[c]} - double{step_.target_means[start_ + c]}) * target_scale_[c];
      const double draft = (double{x[c]} - double{step_.draft_means[start_ + c]}) * draft_scale_[c];
      lanes[c % kLanes] += shift_[c] + (draft * draft - target * target) * distance_factor;
    }
    for (int64_t half = kLanes / 2; half > 0; half /= 2)
      for (int64_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    return lanes[0];
  }

  // A sample of the target, from standard normal numbers.
  void draw(const float* normals, float* x) const {
    for (int64_t c = 0; c < C_; ++c)
      x[c] = static_cast<float>(double{step_.target_means[start_ + c]} + sigma_[c] * double{normals[c]});
  }

 private:
  const LastStepParams step_;
  int64_t C_, start_ = 0;
  std::vector<double> sigma_, target_scale_, draft_scale_, shift_;
};

}  // namespace specvis
