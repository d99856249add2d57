// The largest entries of a row in order, found by a team.
//
// The row is divided among groups of lanes. The K-th largest of the groups' maxima is a lower bound of the K-th largest
// entry of the row. The threads whose largest entry reaches the bound look at their entries again, and the team's first
// block ranks those that reach it.
//
// A row is a function for_each(f) that calls f(v, x) for the entries of the calling thread; each call has the same
// ones.
#pragma once
#include "team.cuh"

namespace specvis {
namespace {

constexpr unsigned kMaxRanked = 512;   // entries; if more reach the bound, the best are taken one by one
constexpr unsigned kMaxGroups = 1024;  // groups of lanes in a team
constexpr int64_t kFewRanked = 128;    // entries that are ranked without a bound

// A block may reuse it for several rows; a cluster only for one, and its blocks must not end before sync_shared().
class BestOf {
 public:
  __device__ explicit BestOf(Team& team) : team_(team) {}

  // Finds the bound of the `count` largest entries. `own_largest` is order_of() the thread's own largest entry. Returns
  // the largest of all, so one thread can tell all others that the row is not valid. A barrier must separate this from
  // the next call; rank() has one.
  __device__ uint32_t find_bound(uint32_t own_largest, int64_t count) {
    Shared& shared = shared_memory();
    own_largest_ = own_largest;
    count_ = clamped(count);
    turn_ ^= 1;
    if (threadIdx.x == 0) shared.num_found[turn_] = 0;
    unsigned groups = team_.threads() / kWarp, shift = 5;  // groups of 2^shift lanes; more of them make a better bound
    for (; shift > 0 && groups * 5 < count_ * 8 && groups * 2 <= kMaxGroups; --shift) groups *= 2;
    uint32_t largest = own_largest;
    for (unsigned step = 0; step < shift; ++step) {
      largest = ::max(largest, __shfl_xor_sync(kAllLanes, largest, 1 << step));
    }
    if (lane() >> shift << shift == lane()) shared.maxima[team_.thread() >> shift] = largest;
    team_.sync_shared();
    if (team_.size() > 1) {  // the other blocks' maxima
      const unsigned groups_a_block = groups / team_.size();
      for (unsigned i = threadIdx.x; i < groups; i += blockDim.x) {
        const unsigned rank = i / groups_a_block;
        if (rank != team_.rank()) shared.maxima[i] = team_.shared_of(rank, shared.maxima)[i];
      }
      __syncthreads();
    }
    // Each warp takes the largest maximum that is left until it has seen `count`, or there is none. For a small count,
    // a lane's largest stands for all of its maxima; a lane counts equal ones once. So the bound may be lower than it
    // could be.
    const auto largest_to = [&](uint32_t limit) {
      uint32_t result = 0;
#pragma unroll 4
      for (unsigned i = lane(); i < groups; i += kWarp) {
        const uint32_t maximum = shared.maxima[i];
        result = ::max(result, maximum <= limit ? maximum : 0);
      }
      return result;
    };
    uint32_t own = largest_to(UINT32_MAX), highest = 0;
#pragma unroll 1
    for (unsigned seen = 0; true;) {
      bound_ = __reduce_max_sync(kAllLanes, own);
      highest = ::max(highest, bound_);
      seen += __popc(__ballot_sync(kAllLanes, own == bound_));
      if (seen >= count_ || bound_ == 0) break;
      if (own == bound_) own = count_ * 8 <= kWarp * 5 ? 0 : largest_to(bound_ - 1);
    }
    return highest;
  }

  // Then calls emit(rank, id, x) for the `count` largest entries above `floor`, the lower id first among equal ones.
  // Some thread makes each call. `again` is the row for where too many entries are equal; it may read it again.
  template <class ForEach, class Again, class Emit>
  __device__ void rank(const ForEach& for_each, const Again& again, float floor, const Emit& emit) {
    Shared& shared = shared_memory();
    unsigned& num_found = shared.num_found[turn_];  // in this block
    if (own_largest_ > 0 && own_largest_ >= bound_) {
      const float bound = bound_ > 0 ? value_of(bound_) : floor;  // 0: too few groups have an entry, so all count
      for_each([&](int64_t v, float x) {
        if (!(x >= bound && x > floor)) return;
        const unsigned i = atomicAdd(&num_found, 1u);
        if (i < kMaxRanked) shared.found[i] = entry(ordered(x), v);
      });
    }
    team_.sync_shared();
    const unsigned of_lane = lane() < team_.size() ? *team_.shared_of(lane(), &num_found) : 0;
    const unsigned number = __reduce_add_sync(kAllLanes, of_lane);
    if (number <= kMaxRanked && team_.rank() == 0) {  // it takes the other blocks' entries
      unsigned end = num_found;
      for (unsigned rank = 1; rank < team_.size(); ++rank) {
        const unsigned count = __shfl_sync(kAllLanes, of_lane, static_cast<int>(rank));
        const uint64_t* const from = team_.shared_of(rank, shared.found);
        for (unsigned i = threadIdx.x; i < count; i += blockDim.x) shared.found[end + i] = from[i];
        end += count;
      }
      __syncthreads();
    }
    if (number <= kMaxRanked) {
      if (team_.rank() == 0) rank_found(number, emit);
    } else {
      one_by_one(again, floor, emit);
    }
  }

  // Finds the best of a few entries, without a bound, by a block. A barrier must separate this from other calls.
  template <class Emit>
  __device__ void rank_few(const float* entries, unsigned size, float floor, int64_t count, const Emit& emit) {
    Shared& shared = shared_memory();
    count_ = clamped(count);
    for (unsigned i = threadIdx.x; i < size; i += blockDim.x) shared.found[i] = entry(order_of(entries[i], floor), i);
    __syncthreads();
    rank_found(size, emit);
  }

 private:
  struct Shared {
    uint64_t found[kMaxRanked];
    uint32_t maxima[kMaxGroups];
    unsigned num_found[2];  // for this row and for the one before
  };
  __device__ static Shared& shared_memory() {
    __shared__ Shared shared;
    return shared;
  }

  // A row has fewer entries than that.
  __device__ static unsigned clamped(int64_t count) {
    return count < 0x1fffffff ? static_cast<unsigned>(count) : 0x1fffffff;
  }

  template <class Emit>
  __device__ void rank_found(unsigned number, const Emit& emit) const {
    const uint64_t* const found = shared_memory().found;
    for (unsigned i = threadIdx.x; i < number; i += blockDim.x) {
      const uint64_t own = found[i];
      unsigned rank = 0;
#pragma unroll 4
      for (unsigned j = 0; j < number; ++j) rank += found[j] > own;
      if (own > 0 && rank < count_) emit(rank, id_of(own), value_of(static_cast<uint32_t>(own >> 32)));
    }
  }

  template <class ForEach, class Emit>
  __device__ void one_by_one(const ForEach& for_each, float floor, const Emit& emit) {
    float last = INFINITY;  // what was taken last, and its id
    int64_t last_id = -1;
    for (unsigned rank = 0; rank < count_; ++rank) {
      float own = floor;  // the thread's largest entry after that one
      int64_t own_id = 0;
      for_each([&](int64_t v, float x) {
        const bool is_left = x < last || (x == last && v > last_id);
        const bool is_better = x > floor && is_left && (x > own || (x == own && v < own_id));
        own = is_better ? x : own;
        own_id = is_better ? v : own_id;
      });
      const uint64_t own_entry = entry(order_of(own, floor), own_id), best = team_.max(own_entry);
      if (best == 0) break;
      last = value_of(static_cast<uint32_t>(best >> 32));
      last_id = id_of(best);
      if (team_.thread() == 0) emit(rank, last_id, last);
    }
  }

  Team& team_;
  unsigned turn_ = 0;
  uint32_t own_largest_ = 0, bound_ = 0;
  unsigned count_ = 0;
};

}  // namespace
}  // namespace specvis
