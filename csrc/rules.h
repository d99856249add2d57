// The scalar rules of verification, said once for the CPU and for CUDA. Plain C++, no torch.
// Compile without contraction of a * b + c: every comparison is of values rounded the same way everywhere.
#pragma once
#include <cmath>
#include <cstdint>
#include <string>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

#if defined(__x86_64__) && defined(__gnu_linux__)  // compiled for each, chosen when the library is loaded
#define WIDEST_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST_VECTORS
#endif

namespace specvis {

// Status bits, as in specvis_kernels/_dispatch.py.
constexpr int32_t kEmptyResidual = 1, kInvalidRow = 2, kInvalidTree = 4, kInvalidRule = 8,
                  kOutOfTries = 16;

enum class Cutoff { tvd, ratio, jsd };
enum class Residual { optimal, relaxed, released };

// Names as Python checked them.
inline Cutoff cutoff_named(const std::string& kind) {
  return kind == "tvd" ? Cutoff::tvd : kind == "ratio" ? Cutoff::ratio : Cutoff::jsd;
}
inline Residual residual_named(const std::string& residual) {
  return residual == "optimal"   ? Residual::optimal
         : residual == "relaxed" ? Residual::relaxed
                                 : Residual::released;
}

constexpr double kFixedOne = 4398046511104.0;       // 2^42: probabilities are counted in units of 2^-42
constexpr double kCeiling = 4611686018427387904.0;  // 2^62: where a threshold saturates

// False for NaN, negatives, and what no rounding of a probability reaches.
HOST_DEVICE inline bool is_probability(float p) { return p >= 0.0f && p <= 2.0f; }

HOST_DEVICE inline int64_t to_fixed(float p) {
  return static_cast<int64_t>(p * static_cast<float>(kFixedOne));
}

// A row's total in fixed point, and whether the row is one of probabilities.
struct Total {
  int64_t weight;
  bool valid;
};

// How many of a token's neighbors the cutoff keeps, and their weight.
struct Kept {
  int64_t mass, count;
};

// The neighbors of every code: either width of table, as token ids.
class Neighbors {
 public:
  Neighbors() = default;
  HOST_DEVICE Neighbors(const void* table, bool narrow, int64_t C, int64_t columns, int64_t offset)
      : table_(table), narrow_(narrow), C_(C), columns_(columns), offset_(offset) {}

  HOST_DEVICE int64_t columns() const { return columns_; }
  HOST_DEVICE bool has(int64_t token) const { return token >= offset_ && token - offset_ < C_; }
  // The j-th neighbor of a token that has() any; out of the vocabulary if the table says so.
  HOST_DEVICE int64_t operator()(int64_t token, int64_t j) const {
    const int64_t at = (token - offset_) * columns_ + j;
    return offset_ + (narrow_ ? int64_t{static_cast<const uint16_t*>(table_)[at]}
                              : int64_t{static_cast<const int32_t*>(table_)[at]});
  }

 private:
  const void* table_ = nullptr;
  bool narrow_ = false;
  int64_t C_ = 0, columns_ = 0, offset_ = 0;
};

// Jensen-Shannon divergence of a row from itself with mass `moved` put onto a token of mass `own`.
HOST_DEVICE inline double jsd(double moved, double own) {
  const double half = own + moved / 2, both = own + moved;
  const double first = own > 0 ? own * log(own / half) : 0.0;
  const double second = both > 0 ? both * log(both / half) : 0.0;
  return 0.5 * (moved * 0.69314718055994530942 + first + second);
}

// When does a running sum of neighbors stay within the cutoff? One object per candidate.
struct Budget {
  Cutoff kind;
  bool any;           // false: nothing is kept
  int64_t threshold;  // tvd, ratio
  double cutoff, own, total;  // jsd

  HOST_DEVICE Budget(Cutoff kind, float cutoff, int64_t own, int64_t total)
      : kind(kind), any(cutoff >= 0), threshold(0), cutoff(cutoff),
        own(static_cast<double>(own) / static_cast<double>(total)), total(static_cast<double>(total)) {
    if (kind == Cutoff::jsd || !any) return;
    const double bound = this->cutoff * static_cast<double>(kind == Cutoff::tvd ? total : own);
    threshold = static_cast<int64_t>(bound < kCeiling ? bound : kCeiling);
  }
  HOST_DEVICE bool fits(int64_t sum) const {
    return kind == Cutoff::jsd ? jsd(static_cast<double>(sum) / total, own) <= cutoff : sum <= threshold;
  }
};

// A candidate before its uniform: `own` is its weight of `total`, `rho` the relaxed one, `drafted` its draft
// weight of `draft_total` (both unused for a point mass).
struct Candidate {
  bool sampled;
  int64_t own, rho, total, drafted, draft_total;
  double omega;

  HOST_DEVICE double gain(int64_t mass, double factor) const {
    const double product = factor * static_cast<double>(mass);
    return sampled ? product * static_cast<double>(draft_total) : product;
  }
  HOST_DEVICE bool accepted(float uniform) const {
    const double u = uniform, W = static_cast<double>(total);
    return rho > 0 && (sampled ? (u * static_cast<double>(drafted)) * W : u * W) < gain(rho, omega);
  }
  // The probability of accepted() over uniforms; strict: with omega 1 and no neighbors.
  HOST_DEVICE double probability(bool strict) const {
    const double W = static_cast<double>(total);
    const double scale = sampled ? static_cast<double>(drafted) * W : W;
    const double part = strict ? gain(own, 1.0) : gain(rho, omega);
    if ((strict ? own : rho) <= 0 || !(part > 0)) return 0.0;
    return part >= scale ? 1.0 : part / scale;
  }
  // How much likelier the rule accepts than the strict one.
  HOST_DEVICE double excess() const {
    const double more = probability(false) - probability(true);
    return more > 0 ? more : 0.0;
  }
};

// The share of the target that a rejection leaves in any case: 1 - omega, at least 0.
HOST_DEVICE inline double slack_of(double omega) { return omega < 1 ? 1 - omega : 0.0; }

// What a rejection leaves of a token whose proposal was sampled: max(R - Q, slack R, 0), of which the whole part
// is its weight. `unit` and `draft_unit` are 1 / total: a division for every token would be what takes time.
HOST_DEVICE inline double residual_weight(
    double weight, double unit, double drafted, double draft_unit, double slack) {
  const double r = weight * unit, rest = r - drafted * draft_unit, floor = slack * r;
  const double more = rest > floor ? rest : floor;
  return (more > 0 ? more : 0) * kFixedOne;
}

// Inverse CDF: the token is the first whose running sum of weights exceeds this. A NaN counts as 0.
HOST_DEVICE inline int64_t draw_at(float uniform, int64_t total) {
  const double aim = static_cast<double>(uniform) * static_cast<double>(total);
  if (!(aim > 0)) return 0;
  return aim < static_cast<double>(total) ? static_cast<int64_t>(aim) : total - 1;
}

// Greedy: is x the argmax (lowest id on ties) of a row with argmax `top`, once x's weight is raised to rho?
HOST_DEVICE inline bool is_argmax(int64_t x, int64_t rho, int64_t top, int64_t most) {
  return x == top || rho > most || (rho == most && x < top);
}

}  // namespace specvis
