// Rows of floats that their threads read as fours of neighbors, in the order of the ids.
#pragma once
#include "block.cuh"

namespace specvis {
namespace {

// Number i of a row holds the entries 4 i to 4 i + 3. Entries after the row's end are 0. Ids fit into 32 bits.
class Fours {
 public:
  __device__ Fours(const float* row, int64_t V)
      : row_(row), V_(static_cast<uint32_t>(V)), is_aligned_((reinterpret_cast<uintptr_t>(row) | V * 4) % 16 == 0) {}

  __device__ uint32_t count() const { return V_ / 4 + (V_ % 4 > 0); }

  // Number first + j step to p[j]. All loads are in flight before the first returns.
  template <int kCount>
  __device__ void load(uint32_t first, uint32_t step, float4 (&p)[kCount]) const {
    if (is_aligned_) {
      const float4* const fours = reinterpret_cast<const float4*>(row_);
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        p[j] = {};
        if (first + j * step < V_ / 4) p[j] = fours[first + j * step];
      }
    } else {
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        const uint32_t v = (first + j * step) * 4;
        p[j] = {entry_at(v), entry_at(v + 1), entry_at(v + 2), entry_at(v + 3)};
      }
    }
  }
  __device__ float4 operator[](uint32_t i) const {
    float4 p[1];
    load(i, 0, p);
    return p[0];
  }

 private:
  __device__ float entry_at(uint32_t v) const { return v < V_ ? row_[v] : 0.0f; }

  const float* row_;
  uint32_t V_;
  bool is_aligned_;
};

// The fours of one thread; the threads of a block take them in turns. A row that is held is read once, and stays in
// registers; the threads must be enough for that. Any other is read as often as it is looked at.
constexpr int kHeldFours = 8, kFoursInFlight = 4;
constexpr int64_t kHeldEntries = kHeldFours * 4;  // a thread

template <bool kIsHeld>
class ThreadRow {
 public:
  __device__ ThreadRow(const float* row, int64_t V, unsigned thread, unsigned threads)
      : fours_(row, V), thread_(thread), threads_(threads) {
    if (kIsHeld) fours_.load(thread_, threads_, p_);
  }

  // Calls f(i, p) for the own fours. All lanes of a warp make each call, also after the row's end.
  template <class F>
  __device__ void for_each_four(F f) const {
    if (kIsHeld) {
#pragma unroll
      for (int j = 0; j < kHeldFours; ++j) f(thread_ + j * threads_, p_[j]);
    } else {
#pragma unroll 1
      for (uint32_t first = thread_; first - lane() < fours_.count(); first += kFoursInFlight * threads_) {
        float4 p[kFoursInFlight];
        fours_.load(first, threads_, p);
#pragma unroll
        for (int j = 0; j < kFoursInFlight; ++j) f(first + j * threads_, p[j]);
      }
    }
  }
  // Calls f(v, p) for the own entries, and for zeros after the row's end.
  template <class F>
  __device__ void for_each(F f) const {
    for_each_four([&](uint32_t i, const float4& p) {
      f(i * 4, p.x);
      f(i * 4 + 1, p.y);
      f(i * 4 + 2, p.z);
      f(i * 4 + 3, p.w);
    });
  }

 private:
  const Fours fours_;
  const unsigned thread_, threads_;
  float4 p_[kIsHeld ? kHeldFours : 1];
};

}  // namespace
}  // namespace specvis
