// How the threads of a team read a row of logits, with guidance and temperature. Logits are read once: each thread
// keeps its own entries in registers (Held), or in shared memory where they are too many for the largest team. If they
// do not fit there either, each thread reads its entries again in every pass (Streamed).
#pragma once
#include <cuda_fp16.h>

#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kBins = 2048;                // bins of a histogram
constexpr unsigned kMaxCandidates = 64;    // entries of a bin that one warp looks at
constexpr int kWide = 4;                   // entries of a pack, which are loaded at once
constexpr int kHeldPacks = 4;              // how many a thread keeps in registers
constexpr int kInFlight = 2;               // how many it loads before it uses the first
constexpr unsigned kMaxRowThreads = 1024;  // in a block: a thread has 64 registers. Of half as many, two blocks fit

__device__ inline float of_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }
__device__ inline float of_float16(unsigned bits) {
  return __half2float(__ushort_as_half(static_cast<uint16_t>(bits)));
}

// The ids [first, first + count) of a row. If the range is not valid, these are other ids that may be read.
struct IdRange {
  int64_t first, count;
  bool valid;
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

// The row in packs of aligned entries, of 8 or 16 bytes. The first and the last may reach beyond the row. Of which type
// the entries are, is asked when they are loaded: the same for all threads, and everything after that stands once.
struct Packs {
  FloatType type;
  const char *cond, *uncond;  // where id 0 is; uncond may be null
  float guidance;
  Divider temperature;
  bool is_divided;        // else the temperature is 1
  bool is_aligned;        // cond and uncond alike
  int base, first, last;  // the id of the first pack's first entry, and the ids of the row

  // Temperature 0 counts as 1.
  __device__ Packs(const LogitRows& rows, int64_t r, const IdRange& range)
      : type(rows.type), cond(static_cast<const char*>(rows.logits) + (r * rows.V << shift())),
        uncond(rows.uncond ? static_cast<const char*>(rows.uncond) + (r * rows.V << shift()) : nullptr),
        guidance(rows.guidance[request_of(rows, r)]), temperature(divisor_of(rows.temperature[request_of(rows, r)])),
        is_divided(temperature.divisor != 1), first(static_cast<int>(range.first)),
        last(static_cast<int>(range.first + range.count)) {
    const auto ahead = [&](const char* row) {  // entries of the first pack before the row
      return static_cast<int>(((reinterpret_cast<uintptr_t>(row) >> shift()) + range.first) % kWide);
    };
    base = first - ahead(cond);
    is_aligned = !uncond || ahead(cond) == ahead(uncond);
  }

  __device__ int count() const { return (last - base + kWide - 1) / kWide; }
  __device__ int id(int pack) const { return base + pack * kWide; }
  __device__ bool has(int id) const { return id >= first && id < last; }
  // Whether the model has masked all ids, each warp for itself: of most rows the first id says that it has not.
  __device__ bool all_masked() const {
    bool are_masked = true;
    int step = 0;  // all lanes look at one id, then each at its own
#pragma unroll 1
    for (int id = first; id < last && are_masked; id += step ? kWarp : 1, step = 1) {
      const int own = min(id + step * static_cast<int>(lane()), last - 1);
      are_masked = __ballot_sync(kAllLanes, !(entry(cond, own) <= mask_of(type))) == 0;
    }
    return are_masked;
  }
  __device__ bool is_whole(int pack) const { return id(pack) >= first && id(pack) + kWide <= last; }

  // Reads some packs, each `step` after the one before. Calls use(p, x) with the logits of the p-th, and returns a bit
  // for each that needs read_any().
  template <class Use>
  __device__ unsigned read(int pack, int step, Extremes* extremes, const Use& use) const {
    const auto can_load = [&](int p) { return is_aligned && is_whole(pack + p * step); };
    uint4 c[kInFlight], u[kInFlight] = {};  // without a value the compiler spills them for some GPUs
    const auto load = [&](auto of_type) {
#pragma unroll
      for (int p = 0; p < kInFlight; ++p) {
        if (!can_load(p)) continue;
        const int64_t at = id(pack + p * step) * int64_t{sizeof of_type / kWide};
        put(c + p, *reinterpret_cast<const decltype(of_type)*>(cond + at));
        if (uncond) put(u + p, *reinterpret_cast<const decltype(of_type)*>(uncond + at));
      }
    };
    if (type == FloatType::float32) {
      load(uint4());
    } else {
      load(uint2());
    }
    unsigned others = 0;
#pragma unroll
    for (int p = 0; p < kInFlight; ++p) {
      float x[kWide];
      if (!can_load(p) || !logits_of(c[p], u[p], x)) {
        others |= 1u << p;
        continue;
      }
#pragma unroll
      for (int j = 0; j < kWide; ++j) extremes->add(x[j]);
      use(p, x);
    }
    return others;
  }

  // Any pack -> logits; -inf beyond the row.
  __device__ void read_any(int pack, float (&x)[kWide], Extremes* extremes) const {
    constexpr float infinity = INFINITY;
#pragma unroll 1
    for (int i = id(pack); i < id(pack) + kWide; ++i) {
      const int own = min(max(i, first), last - 1);
      const float c = entry(cond, own);
      float logit = c;
      if (uncond) {
        const float u = entry(uncond, own);
        logit = c == -infinity && u < infinity ? -infinity : u + guidance * (c - u);
      }
      if (is_divided && !(logit == -infinity && temperature.can_correct())) logit /= temperature.divisor;
      if (!has(i)) logit = -infinity;
      extremes->bad |= !(logit < infinity);
      if (logit > -infinity) extremes->add(logit);
#pragma unroll
      for (int j = 0; j < kWide; ++j) x[j] = j + 1 < kWide ? x[j + 1] : logit;  // registers have no index
    }
  }

 private:
  __device__ int shift() const { return type == FloatType::float32 ? 2 : 1; }  // of an entry's bytes
  __device__ static void put(uint4* to, const uint4& words) { *to = words; }
  __device__ static void put(uint4* to, const uint2& words) { to->x = words.x, to->y = words.y; }

  __device__ float entry(const char* row, int id) const {
    if (type == FloatType::float32) return reinterpret_cast<const float*>(row)[id];
    const unsigned bits = reinterpret_cast<const uint16_t*>(row)[id];
    return type == FloatType::bfloat16 ? of_bfloat16(bits) : of_float16(bits);
  }

  // What was loaded -> logits. Returns false if one of them asks for read_any().
  __device__ bool logits_of(const uint4& c, const uint4& u, float (&x)[kWide]) const {
    float of_uncond[kWide];
    const auto of_words = [](const uint4& words, float (&f)[kWide]) {
      f[0] = __uint_as_float(words.x), f[1] = __uint_as_float(words.y);
      f[2] = __uint_as_float(words.z), f[3] = __uint_as_float(words.w);
    };
    const auto of_halves = [](const auto& value, const uint4& words, float (&f)[kWide]) {
      f[0] = value(words.x & 0xffff), f[1] = value(words.x >> 16);
      f[2] = value(words.y & 0xffff), f[3] = value(words.y >> 16);
    };
    if (type == FloatType::float32) {
      of_words(c, x), of_words(u, of_uncond);
    } else if (type == FloatType::bfloat16) {
      of_halves(of_bfloat16, c, x), of_halves(of_bfloat16, u, of_uncond);
    } else {
      of_halves(of_float16, c, x), of_halves(of_float16, u, of_uncond);
    }
    const float least = is_divided ? Divider::kLeast : -1.0f;
    bool is_usual = !is_divided || temperature.can_correct();
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      if (uncond) x[j] = of_uncond[j] + guidance * (x[j] - of_uncond[j]);
      is_usual &= fabsf(x[j]) < Divider::kMost;
      is_usual &= fabsf(x[j]) > least;
    }
    if (!is_divided) return is_usual;
#pragma unroll
    for (int j = 0; j < kWide; ++j) x[j] = temperature.corrected(x[j]);
    return is_usual;
  }
};

// The entries of a thread in registers: it has every threads()-th pack.
class Held {
 public:
  static constexpr unsigned kMaxThreads = kMaxRowThreads;

  __device__ Held(const Team& team, float4*, int64_t)
      : pack_(static_cast<int>(team.thread())), threads_(static_cast<int>(team.threads())) {}

  __device__ void read(const Packs& row, Extremes* extremes) {
    unsigned others = 0;
    used_ = (row.count() + threads_ - 1) / threads_;
#pragma unroll
    for (int start = 0; start < kHeldPacks; start += kInFlight) {
      if (start >= used_) break;
      others |= row.read(at(start), threads_, extremes, [&](int p, const float (&x)[kWide]) {
#pragma unroll
        for (int j = 0; j < kWide; ++j) x_[start + p][j] = x[j];
      }) << start;
    }
#pragma unroll 1
    for (int p = 0; p < used_; ++p) {
      if (!(others >> p & 1)) continue;
      float x[kWide] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
      if (at(p) < row.count()) row.read_any(at(p), x, extremes);
      set(p, x);
    }
  }

  __device__ bool keeps_changes() const { return true; }

  // Calls f(x) for every entry, also for some of -inf beyond the row.
  template <class F>
  __device__ void for_each(const Packs&, F f) const {
#pragma unroll
    for (int p = 0; p < kHeldPacks; ++p) {
      if (p >= used_) break;
#pragma unroll
      for (int j = 0; j < kWide; ++j) f(x_[p][j]);
    }
  }
  // Replaces every entry by f(x).
  template <class F>
  __device__ void change(const Packs&, F f) {
#pragma unroll
    for (int p = 0; p < kHeldPacks; ++p) {
      if (p >= used_) break;
#pragma unroll
      for (int j = 0; j < kWide; ++j) x_[p][j] = f(x_[p][j]);
    }
  }
  // Calls f(id of x[0], x) for every pack of the thread.
  template <class F>
  __device__ void for_each_pack(const Packs& row, F f) const {
#pragma unroll
    for (int p = 0; p < kHeldPacks; ++p)
      if (at(p) < row.count()) f(row.id(at(p)), x_[p]);
  }
  // The same for an f with much code, which stands once.
  template <class F>
  __device__ void for_each_in_turn(const Packs& row, F f) const {
#pragma unroll 1
    for (int p = 0; p < kHeldPacks && at(p) < row.count(); ++p) {
      float x[kWide];
      get(p, x);
      f(row.id(at(p)), x);
    }
  }
  template <class F>
  __device__ void change_in_turn(const Packs&, F f) {
#pragma unroll 1
    for (int p = 0; p < used_; ++p) {
      float x[kWide];
      get(p, x);
#pragma unroll
      for (int j = 0; j < kWide; ++j) x[j] = f(x[j]);
      set(p, x);
    }
  }
  // Calls f(x) for those entries, few of all, for which is_wanted(x).
  template <class IsWanted, class F>
  __device__ void for_each_of(const Packs&, const IsWanted& is_wanted, F f) const {
    unsigned wanted = 0;
#pragma unroll
    for (int p = 0; p < kHeldPacks; ++p) {
      if (p >= used_) break;
#pragma unroll
      for (int j = 0; j < kWide; ++j) wanted |= unsigned{is_wanted(x_[p][j])} << (p * kWide + j);
    }
#pragma unroll 1
    for (; wanted; wanted &= wanted - 1) {
      float one = x_[0][0];  // the first of them
#pragma unroll
      for (int i = 1; i < kHeldPacks * kWide; ++i) one = wanted & ((1u << i) - 1) ? one : x_[i / kWide][i % kWide];
      f(one);
    }
  }

 private:
  __device__ int at(int p) const { return pack_ + p * threads_; }
  // Registers cannot be indexed by a variable.
  __device__ void get(int pack, float (&x)[kWide]) const {
#pragma unroll
    for (int j = 0; j < kWide; ++j) {
      x[j] = x_[0][j];
#pragma unroll
      for (int p = 1; p < kHeldPacks; ++p) x[j] = p == pack ? x_[p][j] : x[j];
    }
  }
  __device__ void set(int pack, const float (&x)[kWide]) {
#pragma unroll
    for (int p = 0; p < kHeldPacks; ++p) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) x_[p][j] = p == pack ? x[j] : x_[p][j];
    }
  }

  float x_[kHeldPacks][kWide];
  int pack_, threads_;
  int used_ = 0;  // of how many packs some thread of the team has one
};

// The same packs, in shared memory or read again each time. `capacity` is how many of a thread fit.
class Streamed {
 public:
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000            // with 64 registers the compiler spills some
  static constexpr unsigned kMaxThreads = kMaxRowThreads / 2;  // with clusters a block never has more
#else
  static constexpr unsigned kMaxThreads = kMaxRowThreads;
#endif

  __device__ Streamed(const Team& team, float4* copy, int64_t capacity)
      : copy_(copy + threadIdx.x), capacity_(static_cast<int>(capacity)), pack_(static_cast<int>(team.thread())),
        threads_(static_cast<int>(team.threads())) {}

  __device__ void read(const Packs& row, Extremes* extremes) {
    is_stored_ = (row.count() + threads_ - 1) / threads_ <= capacity_;
#pragma unroll 1
    for (int i = 0; at(i) < row.count(); i += kInFlight) {
      unsigned others = row.read(at(i), threads_, extremes, [&](int p, const float (&x)[kWide]) { store(i + p, x); });
#pragma unroll 1
      for (int p = i; others; ++p, others >>= 1) {
        if (!(others & 1) || at(p) >= row.count()) continue;
        float x[kWide] = {};
        row.read_any(at(p), x, extremes);
        store(p, x);
      }
    }
  }

  __device__ bool keeps_changes() const { return is_stored_; }

  template <class F>
  __device__ void for_each(const Packs& row, F f) const {
    for_each_pack(row, [&](int, const float (&x)[kWide]) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) f(x[j]);
    });
  }
  template <class F>
  __device__ void change(const Packs& row, F f) {
    int i = 0;
    for_each_pack(row, [&](int, const float (&x)[kWide]) { store(i++, {f(x[0]), f(x[1]), f(x[2]), f(x[3])}); });
  }
  template <class F>
  __device__ void for_each_pack(const Packs& row, F f) const {
#pragma unroll 1
    for (int i = 0; at(i) < row.count(); ++i) {
      float x[kWide] = {};
      Extremes unused;
      if (is_stored_) {
        const float4 stored = copy_[i * static_cast<int>(blockDim.x)];
        x[0] = stored.x, x[1] = stored.y, x[2] = stored.z, x[3] = stored.w;
      } else {
        row.read_any(at(i), x, &unused);
      }
      f(row.id(at(i)), x);
    }
  }
  template <class F>
  __device__ void for_each_in_turn(const Packs& row, F f) const {
    for_each_pack(row, f);
  }
  template <class F>
  __device__ void change_in_turn(const Packs& row, F f) {
    change(row, f);
  }
  template <class IsWanted, class F>
  __device__ void for_each_of(const Packs& row, const IsWanted& is_wanted, F f) const {
    for_each(row, [&](float x) {
      if (is_wanted(x)) f(x);
    });
  }

 private:
  __device__ int at(int i) const { return pack_ + i * threads_; }
  // Each thread has a column of its own, so that no two of a warp meet in a bank.
  __device__ void store(int i, const float (&x)[kWide]) {
    if (is_stored_) copy_[i * static_cast<int>(blockDim.x)] = {x[0], x[1], x[2], x[3]};
  }

  float4* copy_;
  int capacity_, pack_, threads_;
  bool is_stored_ = false;
};

}  // namespace
}  // namespace specvis
