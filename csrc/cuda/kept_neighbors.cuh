// The neighbors of a token that its cutoff keeps, counted by the threads of one block.
#pragma once
#include "warp_search.cuh"

namespace specvis {
namespace {

// The columns of the table of neighbors that a thread looks at: rounds of up to kColumns for each thread, and in each
// round the columns of a thread follow each other.
constexpr unsigned kColumns = 2;  // 1024 of a whole block

struct Columns {
  uint32_t begin, end;

  __device__ Columns(uint32_t start, uint32_t count) {
    const uint32_t size = min((count - start + blockDim.x - 1) / blockDim.x, kColumns);
    begin = start + threadIdx.x * size;
    end = min(begin + size, count);
  }
};

// Calls f(column) for this thread's columns of `count`, but not for more than `max_count`.
template <class F>
__device__ void for_own_columns(uint32_t count, uint32_t max_count, F f) {
#pragma unroll 1
  for (uint32_t start = 0; start < count; start += kColumns * blockDim.x) {
    const Columns own(start, count);
#pragma unroll 1
    for (uint32_t j = own.begin; j < own.end && max_count > 0; ++j, --max_count) f(j);
  }
}

// The neighbors that the cutoff keeps.
struct KeptNeighbors {
  int64_t mass;        // their sum; only the warp that decides about the token knows it
  uint32_t num_own;    // how many are in columns of this thread
  bool has_any;        // whether there is one
  bool is_of_decider;  // whether this is a thread of that warp
};

// The longest prefix of a token's first num_considered neighbors that fits the budget. mass(v) is an entry of the row.
// Every thread has read the entries of its neighbors when the function returns.
template <class Mass>
__device__ KeptNeighbors keep_neighbors(Block& block, const Mass& mass, uint32_t V, const Neighbors& neighbors,
                                        uint32_t num_considered, int64_t token, const Budget& budget) {
  KeptNeighbors prefix = {0, 0, false, false};
  const auto mass_at = [&](int64_t column) {
    const int64_t id = neighbors(token, column);
    return id >= 0 && id < V ? mass(id) : 0;
  };
  prefix.has_any = budget.fits(mass_at(0));
#pragma unroll 1
  for (uint32_t start = 0; start < num_considered; start += kColumns * blockDim.x) {
    const Columns own(start, num_considered);
    int64_t ids[kColumns], masses[kColumns], sum = 0;
#pragma unroll
    for (unsigned j = 0; j < kColumns; ++j) ids[j] = own.begin + j < own.end ? neighbors(token, own.begin + j) : -1;
#pragma unroll
    for (unsigned j = 0; j < kColumns; ++j) {
      masses[j] = ids[j] >= 0 && ids[j] < V ? mass(ids[j]) : 0;
      sum += masses[j];
    }
    const Scan scan = block.scan(sum);
    const int64_t before = prefix.mass + scan.before;
    int64_t running = before;
    uint32_t num_own = 0;
    bool all_fit = true;
#pragma unroll
    for (unsigned j = 0; j < kColumns; ++j) {
      all_fit = all_fit && (own.begin + j >= own.end || budget.fits(running + masses[j]));
      if (all_fit && own.begin + j < own.end) {
        running += masses[j];
        ++num_own;
      }
    }
    bool ends,
        is_end;  // whether some neighbor of the round does not fit, and whether this thread has the first of them
    if (budget.cutoff == Cutoff::jsd) {
      const unsigned first = block.first(!all_fit);
      ends = first < blockDim.x;
      is_end = threadIdx.x == first;
      if (threadIdx.x > first) num_own = 0;
    } else {  // what fits is a matter of the sum alone
      ends = prefix.mass + scan.total > budget.threshold;
      is_end = !all_fit && before <= budget.threshold;
    }
    prefix.num_own += num_own;
    if (ends) {
      const unsigned votes = __ballot_sync(kAllLanes, is_end);
      prefix.is_of_decider = votes != 0;
      prefix.mass = __shfl_sync(kAllLanes, running, votes ? __ffs(votes) - 1 : 0);
      return prefix;
    }
    prefix.mass += scan.total;
  }
  prefix.is_of_decider = warp() == 0;
  return prefix;
}

}  // namespace
}  // namespace specvis
