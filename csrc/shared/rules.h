// The scalar rules of verification, written once for the CPU and for CUDA. Plain C++, without torch.
// Compile without contraction of a * b + c: then both sides of every comparison are rounded alike everywhere.
#pragma once
#include <cmath>
#include <cstdint>

#ifdef __CUDACC__
#define HOST_DEVICE __host__ __device__
#else
#define HOST_DEVICE
#endif

// Compiled for each of them; the loader chooses. (Clang cannot do that with templates.)
#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__clang__)
#define WIDEST_VECTORS __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define WIDEST_VECTORS
#endif

namespace specvis {

// Status bits, as in specvis_kernels/status.py.
constexpr int32_t kEmptyResidual = 1, kInvalidRow = 2, kInvalidTree = 4, kInvalidRule = 8, kOutOfTries = 16,
                  kInvalidDraft = 32;

enum class Cutoff { tvd, ratio, jsd };
enum class ResidualRule { optimal, relaxed, released };
enum class Empty { target, uniform };  // what replaces an empty residual
enum class ChainRule { strict, block, fly };

constexpr double kFixedOne = 4398046511104.0;  // 2^42: probabilities are counted in units of 2^-42

// False for NaN, for negative numbers, and for numbers that rounding cannot make of a probability.
HOST_DEVICE inline bool is_probability(float p) { return p >= 0.0f && p <= 2.0f; }

HOST_DEVICE inline int64_t to_fixed_point(float p) { return static_cast<int64_t>(p * static_cast<float>(kFixedOne)); }

// The sum of a row in fixed point, and whether all of its entries are probabilities and one is positive.
struct Total {
  int64_t mass;
  bool valid;
};

// Each token's mass in the uniform distribution over a vocabulary of V.
HOST_DEVICE inline int64_t uniform_mass(int64_t V) { return static_cast<int64_t>(kFixedOne) / V; }

// How many of a token's nearest neighbors the cutoff keeps, and their mass.
struct NeighborPrefix {
  int64_t mass, num_kept;
};

// An array of integers: of 16 bits without a sign, or of 32 or 64 bits with one.
struct Integers {
  const void* data;
  int64_t bytes;  // each integer has 2, 4 or 8

  HOST_DEVICE int64_t operator[](int64_t i) const {
    if (bytes == 2) return static_cast<const uint16_t*>(data)[i];
    if (bytes == 4) return static_cast<const int32_t*>(data)[i];
    return static_cast<const int64_t*>(data)[i];
  }
  // f(pointer to the i-th) with its type.
  template <class F>
  auto visit(int64_t i, F f) const {
    if (bytes == 2) return f(static_cast<const uint16_t*>(data) + i);
    if (bytes == 4) return f(static_cast<const int32_t*>(data) + i);
    return f(static_cast<const int64_t*>(data) + i);
  }
};

// The token id of a code. Where the sum has no room it is negative: the id of no token.
HOST_DEVICE inline int64_t id_of_code(int64_t code, int64_t offset) {
  return static_cast<int64_t>(static_cast<uint64_t>(code) + static_cast<uint64_t>(offset));
}

// The table of neighbors, read as token ids.
class Neighbors {
 public:
  Neighbors() = default;
  HOST_DEVICE Neighbors(Integers table, int64_t C, int64_t k, int64_t offset)
      : table_(table), C_(C), k_(k), offset_(offset) {}

  HOST_DEVICE int64_t k() const { return k_; }  // neighbors of a token in the table
  HOST_DEVICE int64_t offset() const { return offset_; }
  HOST_DEVICE bool has(int64_t token) const { return token >= offset_ && token - offset_ < C_; }
  // The j-th neighbor of a token that has() neighbors. The table may hold an id outside of the vocabulary.
  HOST_DEVICE int64_t operator()(int64_t token, int64_t j) const {
    return id_of_code(table_[(token - offset_) * k_ + j], offset_);
  }
  // f(the codes of a token that has() neighbors, from the j-th on).
  template <class F>
  auto visit_codes(int64_t token, int64_t j, F f) const {
    return table_.visit((token - offset_) * k_ + j, f);
  }

 private:
  Integers table_ = {nullptr, 0};
  int64_t C_ = 0, k_ = 0, offset_ = 0;
};

// The Jensen-Shannon divergence between a row and the row that has its neighbors' mass moved onto the token.
HOST_DEVICE inline double jsd(double neighbor_mass, double token_mass) {
  const double mean = token_mass + neighbor_mass / 2, relaxed_mass = token_mass + neighbor_mass;
  const double first = token_mass > 0 ? token_mass * log(token_mass / mean) : 0.0;
  const double second = relaxed_mass > 0 ? relaxed_mass * log(relaxed_mass / mean) : 0.0;
  return 0.5 * (neighbor_mass * 0.69314718055994530942 + first + second);
}

// Says whether a running sum of neighbors stays within the cutoff. There is one object per candidate.
struct Budget {
  Cutoff cutoff;
  bool any;                         // false: no neighbor is kept
  int64_t threshold;                // no sum is larger
  double delta, token_mass, total;  // for jsd; token_mass as a share of the total

  // Together with the token the neighbors have `limit` of the row at most. More can only be ids that are listed twice.
  HOST_DEVICE Budget(Cutoff cutoff, float delta, int64_t token_mass, int64_t total, int64_t limit)
      : cutoff(cutoff), any(delta >= 0), threshold(limit - token_mass), delta(delta), token_mass(0),
        total(static_cast<double>(total)) {
    if (!any) return;
    if (cutoff == Cutoff::jsd) {
      this->token_mass = static_cast<double>(token_mass) / this->total;
      return;
    }
    const double bound = this->delta * static_cast<double>(cutoff == Cutoff::tvd ? total : token_mass);
    if (bound < static_cast<double>(threshold)) threshold = static_cast<int64_t>(bound);
  }
  HOST_DEVICE Budget(Cutoff cutoff, float delta, int64_t token_mass, int64_t total)
      : Budget(cutoff, delta, token_mass, total, total) {}
  HOST_DEVICE bool fits(int64_t sum) const {
    return sum <= threshold && (cutoff != Cutoff::jsd || jsd(static_cast<double>(sum) / total, token_mass) <= delta);
  }
};

// A candidate that is about to be accepted or rejected. Out of `total`, the target gives it `token_mass`, and
// `relaxed_mass` together with its neighbors; out of `draft_total`, the draft gives it `draft_mass`. These two are
// unused if the candidate was not sampled, that is, if the draft is a point mass.
struct Candidate {
  bool sampled;
  int64_t token_mass, relaxed_mass, total, draft_mass, draft_total;
  double omega;

  HOST_DEVICE double numerator_of(int64_t mass, double omega) const {
    const double product = omega * static_cast<double>(mass);
    return sampled ? product * static_cast<double>(draft_total) : product;
  }
  HOST_DEVICE bool accepts(float uniform) const {
    const double u = uniform, whole = static_cast<double>(total);
    return relaxed_mass > 0 &&
           (sampled ? (u * static_cast<double>(draft_mass)) * whole : u * whole) < numerator_of(relaxed_mass, omega);
  }
  // The probability that accepts() holds for a uniform number; strict: if omega were 1 and there were no neighbors.
  HOST_DEVICE double accept_prob(bool strict) const { return probability(numerator(strict), denominator()); }
  HOST_DEVICE double numerator(bool strict) const {
    if ((strict ? token_mass : relaxed_mass) <= 0) return 0.0;
    return strict ? numerator_of(token_mass, 1.0) : numerator_of(relaxed_mass, omega);
  }
  HOST_DEVICE double denominator() const {
    const double whole = static_cast<double>(total);
    return sampled ? static_cast<double>(draft_mass) * whole : whole;
  }
  HOST_DEVICE static double probability(double numerator, double denominator) {
    if (!(numerator > 0)) return 0.0;
    return numerator >= denominator ? 1.0 : numerator / denominator;
  }
  // By how much the rule's probability of accepting exceeds the strict one: what the candidate adds to tv_excess.
  HOST_DEVICE double tv_excess() const {
    const double excess = accept_prob(false) - accept_prob(true);
    return excess > 0 ? excess : 0.0;
  }
};

// Is there no rule for this omega? It is negative or NaN, or below 1 with neighbors and the optimal residual.
HOST_DEVICE inline bool is_undefined(double omega, bool has_neighbors, ResidualRule residual) {
  return !(omega >= (has_neighbors && residual == ResidualRule::optimal ? 1.0 : 0.0));
}

// The share of the target that every rejection leaves: 1 - omega, at least 0.
HOST_DEVICE inline double slack_of(double omega) { return omega < 1 ? 1 - omega : 0.0; }

// The residual of one token after a sampled candidate was rejected: max(R - Q, slack R, 0), where R is the token's
// share of the residual before, and Q its share of the draft. Its mass is the whole part of the result. `unit` and
// `draft_unit` are 1 / total, since a division for every token would take most of the time.
HOST_DEVICE inline double residual_mass(double mass, double unit, double draft_mass, double draft_unit, double slack) {
  const double r = mass * unit, difference = r - draft_mass * draft_unit, floor = slack * r;
  const double residual = difference > floor ? difference : floor;
  return (residual > 0 ? residual : 0) * kFixedOne;
}

// The whole part of a number of [0, 2^52], in fewer steps than to an integer and back. A GPU has a quarter of the units
// for such conversions as it has for sums.
HOST_DEVICE inline double whole_part(double x) {
  constexpr double shift = 4503599627370496.0;  // 2^52: numbers above it have no fraction
#ifdef __CUDA_ARCH__
  return __dadd_rz(x, shift) - shift;
#else
  const double nearest = (x + shift) - shift;
  return nearest > x ? nearest - 1 : nearest;
#endif
}

// to_fixed_point() of a probability, as a double.
HOST_DEVICE inline double whole_mass(float p) {
  return whole_part(static_cast<double>(p * static_cast<float>(kFixedOne)));
}

// Inverse CDF: the token drawn is the first at which the running sum of the row exceeds this threshold. A NaN
// counts as 0.
HOST_DEVICE inline int64_t draw_threshold(float uniform, int64_t total) {
  const double threshold = static_cast<double>(uniform) * static_cast<double>(total);
  if (!(threshold > 0)) return 0;
  return threshold < static_cast<double>(total) ? static_cast<int64_t>(threshold) : total - 1;
}

// Greedy: `argmax` is the row's argmax, of mass `max_mass`. Is the token the argmax (the lowest id on ties) once its
// own mass is raised to `relaxed_mass`?
HOST_DEVICE inline bool is_argmax(int64_t token, int64_t relaxed_mass, int64_t argmax, int64_t max_mass) {
  return token == argmax || relaxed_mass > max_mass || (relaxed_mass == max_mass && token < argmax);
}

// The links of one tree of N nodes.
struct Siblings {
  int64_t N;
  const int64_t* tokens;
  const int32_t* next_sibling;

  // The first of a node's children, in sibling order, whose token is `wanted`; -1 if no child has it. A link that leads
  // to no later node ends the children and sets a bit of the status.
  HOST_DEVICE int64_t find(int64_t wanted, int64_t node, int64_t first_child, int32_t* status) const {
    for (int64_t previous = node, child = first_child; child != -1;) {
      if (child <= previous || child >= N) {
        *status |= kInvalidTree;
        break;
      }
      const int64_t token = tokens[child], sibling = next_sibling[child];
      if (token == wanted) return child;
      previous = child;
      child = sibling;
    }
    return -1;
  }
};

}  // namespace specvis
