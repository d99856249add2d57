// How the threads of a team read a row of logits, with guidance and temperature. Logits are read once: each thread
// keeps its own entries in registers (Held), or in shared memory where they are too many for the largest team. If they
// do not fit there either, each thread reads its entries again in every pass (Streamed).
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kBins = 2048;                                // bins of a histogram
constexpr unsigned kMaxCandidates = 64;                    // entries of a bin that one warp looks at
constexpr int kRowEntries = 16;                            // how many a thread keeps in registers
constexpr unsigned kMaxRowThreads = 1024;                  // in a block: a thread has 64 registers
constexpr unsigned kMaxDraftThreads = kMaxRowThreads / 2;  // for kernels that do more with a row: a thread may have 128

__device__ inline float value(float x) { return x; }
__device__ inline float value(__half x) { return __half2float(x); }
__device__ inline float value(__nv_bfloat16 x) { return __bfloat162float(x); }

// f of a number of this type.
template <class F>
cudaError_t of_type(FloatType type, F f) {
  switch (type) {
    case FloatType::float16: return f(__half());
    case FloatType::bfloat16: return f(__nv_bfloat16());
    default: return f(float());
  }
}

// The ids [first, first + count) of a row. If the range is not valid, these are other ids that may be read.
struct IdRange {
  int64_t first, count;
  bool valid;

  __device__ bool has(int64_t id) const { return id >= first && id - first < count; }
};

__device__ inline IdRange id_range_of(const LogitRows& rows, int64_t r) {
  const int64_t first = rows.first(r), last = rows.last(r);
  if (first < 0 || first >= last || last > rows.V) return {0, 1, false};
  return {first, last - first, true};
}

__device__ inline unsigned request_of(const LogitRows& rows, int64_t r) {
  return static_cast<unsigned>(r) / static_cast<unsigned>(rows.N);
}
__device__ inline float divisor_of(float temperature) { return temperature != 0 ? temperature : 1.0f; }

// The largest and the least finite one of some logits, and whether one of them is NaN or infinity.
struct Extremes {
  float best = -INFINITY, least = INFINITY;
  bool bad = false;

  __device__ void add(float x) {
    best = fmaxf(best, x);
    least = fminf(least, x);
  }
};

// The row in packs of aligned entries. The first and the last may reach beyond the row.
template <class T, int kWide>
struct Packs {
  struct alignas(kWide * sizeof(T)) Pack {
    T values[kWide];
  };

  const T *cond, *uncond;  // where id 0 is; uncond may be null
  float guidance;
  Divider temperature;
  bool is_divided;        // else the temperature is 1
  bool is_aligned;        // cond and uncond alike
  int base, first, last;  // the id of the first pack's first entry, and the ids of the row

  // Temperature 0 counts as 1.
  __device__ Packs(const LogitRows& rows, int64_t r, const IdRange& range)
      : cond(static_cast<const T*>(rows.logits) + r * rows.V),
        uncond(rows.uncond ? static_cast<const T*>(rows.uncond) + r * rows.V : nullptr),
        guidance(rows.guidance[request_of(rows, r)]), temperature(divisor_of(rows.temperature[request_of(rows, r)])),
        is_divided(temperature.divisor != 1), first(static_cast<int>(range.first)),
        last(static_cast<int>(range.first + range.count)) {
    const uintptr_t c = reinterpret_cast<uintptr_t>(cond + first), u = reinterpret_cast<uintptr_t>(uncond + first);
    base = first - static_cast<int>(c % sizeof(Pack) / sizeof(T));
    is_aligned = !uncond || (c - u) % sizeof(Pack) == 0;
  }

  __device__ int size() const { return (last - base + kWide - 1) / kWide; }
  __device__ int id(int pack) const { return base + pack * kWide; }
  __device__ bool has(int id) const { return id >= first && id < last; }
  __device__ bool is_whole(int pack) const { return id(pack) >= first && id(pack) + kWide <= last; }
  __device__ bool can_load(int pack) const { return is_aligned && is_whole(pack); }

  __device__ void load(int pack, Pack* c, Pack* u) const {
    *c = *reinterpret_cast<const Pack*>(cond + id(pack));
    if (uncond) *u = *reinterpret_cast<const Pack*>(uncond + id(pack));
  }

  // What load() has read -> logits. Returns false if one of them asks for use_any().
  __device__ bool use(const Pack& c, const Pack& u, float (&x)[kWide]) const {
    const float least = is_divided ? Divider::kLeast : -1.0f;
    bool is_usual = !is_divided || temperature.can_correct();
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      x[j] = value(c.values[j]);
      if (uncond) {
        const float u_j = value(u.values[j]);
        x[j] = u_j + guidance * (x[j] - u_j);
      }
      is_usual &= fabsf(x[j]) < Divider::kMost;
      is_usual &= fabsf(x[j]) > least;
    }
    if (!is_divided) return is_usual;
#pragma unroll
    for (int j = 0; j < kWide; ++j) x[j] = temperature.corrected(x[j]);
    return is_usual;
  }

  // Any pack -> logits; -inf beyond the row.
  __device__ void use_any(int pack, float (&x)[kWide], Extremes* extremes) const {
    constexpr float infinity = INFINITY;
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      const int own = min(max(id(pack) + j, first), last - 1);
      const float c = value(cond[own]);
      x[j] = c;
      if (uncond) {
        const float u = value(uncond[own]);
        x[j] = c == -infinity && u < infinity ? -infinity : u + guidance * (c - u);
      }
      if (is_divided && !(x[j] == -infinity && temperature.can_correct())) x[j] /= temperature.divisor;
      if (!has(id(pack) + j)) x[j] = -infinity;
      extremes->bad |= !(x[j] < infinity);
      if (x[j] > -infinity) extremes->add(x[j]);
    }
  }
};

// The entries of a thread in registers: it has every threads()-th pack of 16 bytes.
template <class T>
class Held {
 public:
  static constexpr int kWide = 16 / sizeof(T), kPacks = kRowEntries / kWide, kUnit = 4;
  using Row = Packs<T, kWide>;

  __device__ Held(const Team& team, float*, int64_t)
      : pack_(static_cast<int>(team.thread())), threads_(static_cast<int>(team.threads())) {}

  __device__ void read(const Row& row, Extremes* extremes) {
    unsigned unusual = 0;
#pragma unroll
    for (int start = 0; start < kPacks; start += kInFlight) {
      typename Row::Pack c[kInFlight], u[kInFlight];
#pragma unroll
      for (int p = 0; p < kInFlight; ++p)
        if (row.can_load(at(start + p))) row.load(at(start + p), c + p, u + p);
#pragma unroll
      for (int p = 0; p < kInFlight; ++p) {
        float (&x)[kWide] = x_[start + p];
        if (!row.can_load(at(start + p)) || !row.use(c[p], u[p], x)) {
          unusual |= 1u << (start + p);
        } else {
#pragma unroll
          for (int j = 0; j < kWide; ++j) extremes->add(x[j]);
        }
      }
    }
#pragma unroll 1
    for (int p = 0; p < kPacks; ++p) {
      if (!(unusual >> p & 1)) continue;
      float x[kWide];
#pragma unroll
      for (int j = 0; j < kWide; ++j) x[j] = -INFINITY;
      if (at(p) < row.size()) row.use_any(at(p), x, extremes);
#pragma unroll
      for (int q = 0; q < kPacks; ++q) {
#pragma unroll
        for (int j = 0; j < kWide; ++j) x_[q][j] = p == q ? x[j] : x_[q][j];
      }
    }
  }

  __device__ bool keeps_changes() const { return true; }

  // Calls f(x) for every entry, also for -inf beyond the row.
  template <class F>
  __device__ void for_each(const Row&, F f) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) f(x_[p][j]);
    }
  }
  // Replaces every entry by f(x).
  template <class F>
  __device__ void change(const Row&, F f) {
#pragma unroll
    for (int p = 0; p < kPacks; ++p) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) x_[p][j] = f(x_[p][j]);
    }
  }
  // Calls f(pack, entries) for every pack of the thread.
  template <class F>
  __device__ void for_each_pack(const Row& row, F f) const {
#pragma unroll
    for (int p = 0; p < kPacks; ++p)
      if (at(p) < row.size()) f(at(p), x_[p]);
  }
  // For an f with much code, which stands once: calls f(id of x[0], x) for every unit of neighboring entries.
  template <class F>
  __device__ void for_each_unit(const Row& row, F f) const {
#pragma unroll 1
    for (int i = 0; i < kUnits && at(i / kUnitsAPack) < row.size(); ++i) {
      float x[kUnit];
      get(i, x);
      f(row.id(at(i / kUnitsAPack)) + i % kUnitsAPack * kUnit, x);
    }
  }
  template <class F>
  __device__ void change_units(const Row&, F f) {
#pragma unroll 1
    for (int i = 0; i < kUnits; ++i) {
      float x[kUnit];
      get(i, x);
#pragma unroll
      for (int j = 0; j < kUnit; ++j) x[j] = f(x[j]);
#pragma unroll
      for (int own = 0; own < kUnits; ++own) {
#pragma unroll
        for (int j = 0; j < kUnit; ++j) entry(own, j) = i == own ? x[j] : entry(own, j);
      }
    }
  }
  // Calls f(x) for those entries, few of all, for which is_wanted(x).
  template <class IsWanted, class F>
  __device__ void for_each_of(const Row& row, const IsWanted& is_wanted, F f) const {
    unsigned wanted = 0;
#pragma unroll
    for (int i = 0; i < kRowEntries; ++i) wanted |= unsigned{is_wanted(entry(i / kUnit, i % kUnit))} << i;
#pragma unroll 1
    for (; wanted; wanted &= wanted - 1) {
      float one = entry(0, 0);  // the first of them
#pragma unroll
      for (int i = 1; i < kRowEntries; ++i) one = wanted & ((1u << i) - 1) ? one : entry(i / kUnit, i % kUnit);
      f(one);
    }
  }

 private:
  static constexpr int kInFlight = 2;  // packs, of each of cond and uncond
  static constexpr int kUnits = kRowEntries / kUnit, kUnitsAPack = kWide / kUnit;

  __device__ int at(int p) const { return pack_ + p * threads_; }
  __device__ float& entry(int unit, int j) { return x_[unit / kUnitsAPack][unit % kUnitsAPack * kUnit + j]; }
  __device__ float entry(int unit, int j) const { return x_[unit / kUnitsAPack][unit % kUnitsAPack * kUnit + j]; }
  // A unit; registers cannot be indexed by a variable.
  __device__ void get(int unit, float (&x)[kUnit]) const {
#pragma unroll
    for (int j = 0; j < kUnit; ++j) {
      x[j] = entry(0, j);
#pragma unroll
      for (int own = 1; own < kUnits; ++own) x[j] = unit == own ? entry(own, j) : x[j];
    }
  }

  float x_[kPacks][kWide];
  int pack_, threads_;
};

// Every threads()-th entry, in shared memory or read again each time. `capacity` is how many of a thread fit.
template <class T>
class Streamed {
 public:
  static constexpr int kWide = 1, kUnit = 1;
  using Row = Packs<T, kWide>;

  __device__ Streamed(const Team& team, float* copy, int64_t capacity)
      : copy_(copy + threadIdx.x), capacity_(static_cast<int>(capacity)), first_(static_cast<int>(team.thread())),
        threads_(static_cast<int>(team.threads())) {}

  __device__ void read(const Row& row, Extremes* extremes) {
    is_stored_ = (row.size() + threads_ - 1) / threads_ <= capacity_;
    constexpr int kInFlight = 8;
#pragma unroll 1
    for (int i = 0; at(i) < row.size(); i += kInFlight) {
      typename Row::Pack c[kInFlight], u[kInFlight];
#pragma unroll
      for (int p = 0; p < kInFlight; ++p)
        if (at(i + p) < row.size()) row.load(at(i + p), c + p, u + p);
      unsigned unusual = 0;
#pragma unroll
      for (int p = 0; p < kInFlight; ++p) {
        if (at(i + p) >= row.size()) continue;
        float x[1];
        if (!row.use(c[p], u[p], x)) {
          unusual |= 1u << p;
          continue;
        }
        extremes->add(x[0]);
        if (is_stored_) store(i + p, x[0]);
      }
#pragma unroll 1
      for (int p = 0; p < kInFlight; ++p) {
        if (!(unusual >> p & 1)) continue;
        float x[1];
        row.use_any(at(i + p), x, extremes);
        if (is_stored_) store(i + p, x[0]);
      }
    }
  }

  __device__ bool keeps_changes() const { return is_stored_; }

  template <class F>
  __device__ void for_each(const Row& row, F f) const {
    for_each_pack(row, [&](int, const float (&x)[1]) { f(x[0]); });
  }
  template <class F>
  __device__ void change(const Row& row, F f) {
    int i = 0;
    for_each_pack(row, [&](int, const float (&x)[1]) {
      const float changed = f(x[0]);
      if (is_stored_) store(i++, changed);
    });
  }
  template <class F>
  __device__ void for_each_pack(const Row& row, F f) const {
#pragma unroll 1
    for (int i = 0; at(i) < row.size(); ++i) {
      float x[1];
      Extremes unused;
      if (is_stored_) {
        x[0] = copy_[i * static_cast<int>(blockDim.x)];
      } else {
        row.use_any(at(i), x, &unused);
      }
      f(at(i), x);
    }
  }
  template <class F>
  __device__ void for_each_unit(const Row& row, F f) const {
    for_each_pack(row, [&](int pack, const float (&x)[1]) { f(row.id(pack), x); });
  }
  template <class F>
  __device__ void change_units(const Row& row, F f) {
    change(row, f);
  }
  template <class IsWanted, class F>
  __device__ void for_each_of(const Row& row, const IsWanted& is_wanted, F f) const {
    for_each(row, [&](float x) {
      if (is_wanted(x)) f(x);
    });
  }

 private:
  __device__ int at(int i) const { return first_ + i * threads_; }
  // Each thread has a column of its own, so that no two of a warp meet in a bank.
  __device__ void store(int i, float x) { copy_[i * static_cast<int>(blockDim.x)] = x; }

  float* copy_;
  int capacity_, first_, threads_;
  bool is_stored_ = false;
};

}  // namespace
}  // namespace specvis
