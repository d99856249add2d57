// guided_probs on the CPU: each task takes rows. The logits that top-k keeps are packed, and exp is computed of these
// alone.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

#include "floats.h"

namespace {

using specvis::exp_of;
using specvis::key_of;
using specvis::kInvalidRow;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr float kInf = std::numeric_limits<float>::infinity();

struct Scratch {
  std::vector<float> x;  // logits, later their exponentials
  std::vector<int32_t> keys, ids, maxima;
  std::vector<int64_t> masses;
  std::vector<std::pair<int32_t, int64_t>> candidates;  // for a threshold: key and mass
  explicit Scratch(int64_t n) : x(n), keys(n), ids(n), maxima(n), masses(n) { candidates.reserve(n); }
};

// The mass of the keys above `key`: one each, or as `masses` says.
WIDEST_VECTORS int64_t mass_above(const int32_t* keys, const int64_t* masses, int64_t n, int32_t key) {
  int64_t sum = 0;
  if (masses) {
    for (int64_t i = 0; i < n; ++i) sum += keys[i] > key ? masses[i] : 0;
    return sum;
  }
  int32_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += keys[i] > key;
  return count;
}

// The lowest key such that the mass of all greater keys is less than `limit`, which is positive and at most the mass of
// all keys; or an integer between the next lower key and that one. It is found by bisection, in passes without a
// branch, which is fast for few keys.
int32_t threshold_of_few(const int32_t* keys, const int64_t* masses, int64_t n, int64_t limit) {
  const auto [lowest, highest] = std::minmax_element(keys, keys + n);
  int64_t low = *lowest, high = *highest;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (mass_above(keys, masses, n, static_cast<int32_t>(middle)) < limit)
      high = middle;
    else
      low = middle + 1;
  }
  return static_cast<int32_t>(low);
}

// The same for many keys: digit by digit from the highest, each time among the keys that share the digits found so far.
int32_t threshold_of_many(Scratch& s, const int64_t* masses, int64_t n, int64_t limit) {
  constexpr int kBits[] = {11, 11, 10};
  int64_t above = 0;
  uint32_t found = 0;
  int shift = 32;
  s.candidates.clear();
  for (int level = 0; level < 3; ++level) {
    const int bits = kBits[level];
    const uint32_t mask = (1u << bits) - 1;
    shift -= bits;
    const auto digit = [&](int32_t key) { return ((uint32_t(key) ^ 0x80000000u) >> shift) & mask; };
    int64_t histogram[2048] = {};
    if (level == 0)
      for (int64_t i = 0; i < n; ++i) histogram[digit(s.keys[i])] += masses ? masses[i] : 1;
    else
      for (const auto& [key, mass] : s.candidates) histogram[digit(key)] += mass;
    uint32_t d = mask;
    while (above + histogram[d] < limit) above += histogram[d--];
    found |= d << shift;
    if (level == 0) {
      for (int64_t i = 0; i < n; ++i)
        if (digit(s.keys[i]) == d) s.candidates.emplace_back(s.keys[i], masses ? masses[i] : 1);
    } else {
      const auto other = [&](const auto& r) { return digit(r.first) != d; };
      s.candidates.erase(std::remove_if(s.candidates.begin(), s.candidates.end(), other), s.candidates.end());
    }
  }
  return int32_t(found ^ 0x80000000u);
}

int32_t threshold(Scratch& s, const int64_t* masses, int64_t n, int64_t limit) {
  constexpr int64_t kFew = 2048;
  return n <= kFew ? threshold_of_few(s.keys.data(), masses, n, limit) : threshold_of_many(s, masses, n, limit);
}

// Packs the ids whose keys are at least the k-th largest, and few others; all ids, unless k is small. It packs the keys
// that are at least the k-th largest of the blocks' maxima, which is not above the k-th largest key.
WIDEST_VECTORS int64_t pack_largest(Scratch& s, int64_t ids, int64_t k) {
  constexpr int64_t kBlock = 16;
  const int32_t* const keys = s.keys.data();
  const int64_t blocks = ids / kBlock;  // the ids after them are packed in any case
  if (blocks < 2 * k) {
    std::iota(s.ids.begin(), s.ids.end(), 0);
    return ids;
  }
  int32_t* const maxima = s.maxima.data();
  for (int64_t i = 0; i < blocks; ++i) {
    int32_t largest = keys[i * kBlock];
    for (int64_t j = 1; j < kBlock; ++j) largest = keys[i * kBlock + j] > largest ? keys[i * kBlock + j] : largest;
    maxima[i] = largest;
  }
  const int32_t bound = threshold_of_few(maxima, nullptr, blocks, k);
  int64_t n = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    if (maxima[i] < bound) continue;
    for (int64_t v = i * kBlock; v < (i + 1) * kBlock; ++v) {
      s.ids[n] = v;
      n += keys[v] >= bound;
    }
  }
  for (int64_t v = blocks * kBlock; v < ids; ++v) s.ids[n++] = v;
  return n;
}

double sum(const float* x, int64_t n) {  // eight sums side by side, since a single one would wait for every addition
  double lanes[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) lanes[lane] += x[i + lane];
  for (; i < n; ++i) lanes[0] += x[i];
  return ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
}

template <class T>
WIDEST_VECTORS int32_t row_probs(const T* logits, const T* uncond, float guidance, float temperature, int64_t k,
                                 float top_p, int64_t ids, Scratch& s, float* out) {  // out is zero
  const bool sampling = temperature != 0;
  if (!sampling) temperature = 1;
  float* const x = s.x.data();
  int32_t* const keys = s.keys.data();
  for (int64_t v = 0; v < ids; ++v) x[v] = logits[v];
  if (uncond)
    for (int64_t v = 0; v < ids; ++v) {
      const float u = uncond[v], guided = u + guidance * (x[v] - u);
      x[v] = (x[v] == -kInf) & (u < kInf) ? -kInf : guided;
    }
  for (int64_t v = 0; v < ids; ++v) x[v] /= temperature;
  for (int64_t v = 0; v < ids; ++v) keys[v] = key_of(x[v]);
  int32_t lowest = keys[0], highest = keys[0];
  for (int64_t v = 0; v < ids; ++v) {
    lowest = keys[v] < lowest ? keys[v] : lowest;
    highest = keys[v] > highest ? keys[v] : highest;
  }
  if (lowest < key_of(-kInf) || highest >= key_of(kInf) || highest == key_of(-kInf) || !(temperature > 0))
    return kInvalidRow;

  const float best = specvis::float_of(highest);
  int64_t n = ids;
  const bool packed = sampling && k > 0 && k < ids;
  if (packed) {
    const int64_t num_packed = pack_largest(s, ids, k);
    if (num_packed < ids)
      for (int64_t i = 0; i < num_packed; ++i) x[i] = x[s.ids[i]], keys[i] = keys[s.ids[i]];
    const int32_t lowest_kept = threshold(s, nullptr, num_packed, k);
    n = 0;
    for (int64_t i = 0; i < num_packed; ++i) {
      x[n] = x[i], keys[n] = keys[i], s.ids[n] = s.ids[i];
      n += keys[i] >= lowest_kept;
    }
  }
  for (int64_t i = 0; i < n; ++i) x[i] = exp_of(x[i] - best);

  if (sampling && top_p > 0 && top_p < 1) {
    int64_t whole = 0;
    for (int64_t i = 0; i < n; ++i) whole += s.masses[i] = specvis::mass_of(x[i]);
    const int64_t limit = std::ceil(double(top_p) * double(whole));
    const int32_t lowest_kept = threshold(s, s.masses.data(), n, limit);
    for (int64_t i = 0; i < n; ++i)
      if (keys[i] < lowest_kept) x[i] = 0;
  }

  const float total = sum(x, n);
  if (packed)
    for (int64_t i = 0; i < n; ++i) out[s.ids[i]] = x[i] / total;
  else
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] / total;
  return 0;
}

template <class T>
void all_rows(const Tensor& logits, const Tensor* uncond, const Tensor& guidance, const Tensor& temperature,
              const Tensor& top_k, const Tensor& top_p, int64_t first_id, int64_t last_id, Tensor& probs,
              Tensor& status) {
  const int64_t B = logits.size(0), N = logits.size(1), V = logits.size(2);
  const T* x = static_cast<const T*>(logits.const_data_ptr());
  const T* u = uncond ? static_cast<const T*>(uncond->const_data_ptr()) : nullptr;
  const float* g = guidance.const_data_ptr<float>();
  const float* t = temperature.const_data_ptr<float>();
  const int32_t* k = top_k.const_data_ptr<int32_t>();
  const float* p = top_p.const_data_ptr<float>();
  float* out = probs.mutable_data_ptr<float>();
  int32_t* bits = status.mutable_data_ptr<int32_t>();
  const int64_t ids = last_id - first_id;
  torch::stable::parallel_for(0, B * N, std::max<int64_t>(1, 8192 / ids), [&](int64_t begin, int64_t end) {
    Scratch scratch(ids);
    for (int64_t row = begin; row < end; ++row) {
      const int64_t b = row / N, start = row * V + first_id;
      std::fill_n(out + row * V, V, 0.f);
      bits[row] = row_probs(x + start, u ? u + start : nullptr, g[b], t[b], k[b], p[b], ids, scratch, out + start);
    }
  });
}

std::tuple<Tensor, Tensor> guided_probs_cpu(const Tensor& logits, const std::optional<Tensor>& uncond,
                                            const Tensor& guidance, const Tensor& temperature, const Tensor& top_k,
                                            const Tensor& top_p, int64_t first_id, int64_t last_id) {
  Tensor probs = torch::stable::new_empty(logits, logits.sizes(), ScalarType::Float);
  Tensor status = torch::stable::new_empty(logits, {logits.size(0), logits.size(1)}, ScalarType::Int);
  const auto run = [&](auto type) {
    all_rows<decltype(type)>(logits, uncond ? &*uncond : nullptr, guidance, temperature, top_k, top_p, first_id,
                             last_id, probs, status);
  };
  switch (logits.scalar_type()) {
    case ScalarType::Half: run(c10::Half()); break;
    case ScalarType::BFloat16: run(c10::BFloat16()); break;
    default: run(float());
  }
  return {probs, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specvis_kernels, CPU, m) { m.impl("guided_probs", TORCH_BOX(&guided_probs_cpu)); }
