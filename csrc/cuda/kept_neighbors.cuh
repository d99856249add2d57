// The neighbors of a token that its cutoff keeps, counted by a team of threads.
#pragma once
#include "team.cuh"

namespace specvis {
namespace {

// The longest prefix of a token's first num_considered neighbors that fits the budget. Each thread takes kColumns
// neighbors that follow each other, and their loads are in flight together. One exchange gives it the mass before them,
// and another one the mass before the first that does not fit. mass(v) is an entry of the row.
template <class Mass>
__device__ NeighborPrefix neighbor_prefix(Team& team, const Mass& mass, int64_t V, const Neighbors& neighbors,
                                          int64_t num_considered, int64_t token, const Budget& budget) {
  constexpr int kColumns = 4;
  NeighborPrefix prefix = {0, 0};
  if (!budget.any || !neighbors.has(token)) return prefix;
  for (int64_t start = 0; start < num_considered; start += int64_t{kColumns} * team.threads()) {
    const int64_t first = start + int64_t{kColumns} * team.thread();
    int64_t ids[kColumns], masses[kColumns], sum = 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) ids[j] = first + j < num_considered ? neighbors(token, first + j) : -1;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      masses[j] = ids[j] >= 0 && ids[j] < V ? mass(ids[j]) : 0;
      sum += masses[j];
    }
    const Scan scan = team.scan(sum);

    NeighborPrefix own = {prefix.mass + scan.before, first};  // before this thread's first that does not fit
    bool fits = true;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      fits = fits && first + j < num_considered && budget.fits(own.mass + masses[j]);
      if (fits) own = {own.mass + masses[j], first + j + 1};
    }
    const unsigned ends = __ballot_sync(kAllLanes, !fits);
    const int end = ends ? __ffs(ends) - 1 : 0;
    own = {__shfl_sync(kAllLanes, own.mass, end), __shfl_sync(kAllLanes, own.num_kept, end)};
    if (!ends) own.num_kept = -1;
    const NeighborPrefix* const of_warps = team.exchange<NeighborPrefix>(own);
    const unsigned num_warps = team.threads() / kWarp;
    unsigned w = lane();
    while (w < num_warps && of_warps[w].num_kept < 0) w += kWarp;
    w = __reduce_min_sync(kAllLanes, w);
    if (w < num_warps) return of_warps[w];
    prefix = {prefix.mass + scan.total, start + int64_t{kColumns} * team.threads()};
  }
  return prefix;
}

}  // namespace
}  // namespace specvis
