// A row of logits after guidance, temperature, top-k, top-p and min-p, and its probabilities, by the threads of a team.
// Thresholds are found without sorting: by a histogram of equal steps below the largest logit, and then among the few
// entries of one of its bins.
#pragma once
#include "logits.cuh"

namespace specvis {
namespace {

// The shared memory of a block for its rows.
struct RowShared {
  unsigned low[kBins], high[kBins];      // a histogram: counts, or the halves of 64-bit sums
  float candidates[2][kMaxCandidates];   // for top-k and for top-p
  unsigned num_candidates[2], num_kept;  // the last is draw_row()'s
  bool is_sampled;                       // whether the temperature of the row is not 0
  int32_t top_k;                         // the row's; 0: off
  float top_p;
  float found;
  float least[kMaxWarps];  // the least finite logit of the row, for each warp to read
  float4 copy[1];          // and more, for Streamed
};

// A row. All threads of the team have an object each, and call its methods together.
template <class Entries>
class GuidedRow {
 public:
  // Reads row r, and finds which ids the filters keep: the ids whose logits are not below lowest(). At temperature 0
  // these are all. A kernel may read one row after the other, if all threads were together, in a method of its team,
  // since the last use of the row before.
  __device__ GuidedRow(Team& team, RowShared* shared, int64_t capacity, const LogitRows& rows, int64_t r)
      : team_(team), shared_(shared), packs_(rows, r, id_range_of(rows, r)), entries_(team, shared->copy, capacity) {
    const IdRange range = id_range_of(rows, r);
    const unsigned b = request_of(rows, r);
    const float temperature = rows.temperature[b], top_p = rows.top_p[b];
    const int32_t k = rows.top_k[b];
    valid_ = range.valid && temperature >= 0;
    if (!valid_) return;
    const bool has_k = temperature != 0 && k > 0 && k < range.count;
    const bool has_p = temperature != 0 && top_p > 0 && top_p < 1;
    if (has_k || has_p) clear();
    if (threadIdx.x == 0) {
      shared->num_candidates[0] = shared->num_candidates[1] = shared->num_kept = 0;
      shared->is_sampled = temperature != 0;
      shared->top_k = has_k ? k : 0;
      shared->top_p = has_p ? top_p : 0;
    }
    Extremes extremes;
    entries_.read(packs_, &extremes);
    combine(extremes);
    if (!valid_) return;
    // In either order, since both filters keep the logits from some on: top-p first sees all, and top-k counts all.
#pragma unroll 1
    for (int filter = 0; filter < 2; ++filter) {
      const bool by_mass = (filter == 1) != rows.top_p_first;
      if (by_mass ? shared->top_p > 0 : shared->top_k > 0) lowest_ = fmaxf(lowest_, threshold(by_mass));
    }
    const float min_p = rows.min_p && is_sampled() ? rows.min_p[b] : 0;
    if (min_p > 0) lowest_ = fmaxf(lowest_, lowest_by_min_p(best_, fminf(min_p, 1.0f)));
  }

  __device__ bool valid() const { return valid_; }  // if not, nothing else means anything
  __device__ bool allows(int64_t id) const { return id >= packs_.first && id < packs_.last; }
  __device__ float best() const { return best_; }  // the largest logit
  __device__ float lowest() const { return lowest_; }

  // The logits become probabilities.
  __device__ void to_probs() {
    int64_t mass = 0;
    entries_.change(packs_, [&](float x) {
      const float e = exponential(x);
      mass += mass_of(e);
      return e;
    });
    const double whole = static_cast<double>(team_.sum(mass));
    sum_ = Divider(static_cast<float>(whole / static_cast<double>(kMassOne)));
    // No exponential is so small that it must be divided: exp(-64) is above kLeast.
    is_corrected_ = best_ - fmaxf(lowest_, shared_->least[warp()]) <= 64;
    if (!entries_.keeps_changes()) return;
    if (is_corrected_) {
      entries_.change(packs_, [&](float e) { return sum_.corrected(e); });
    } else {
      entries_.change_in_turn(packs_, [&](float e) { return e / sum_.divisor; });
    }
  }

  // After to_probs(): calls f(id, p) for the thread's own ids of the row's range.
  template <class F>
  __device__ void for_each_prob(F f) const {
    entries_.for_each_in_turn(packs_, [&](int first, const float (&x)[kWide]) {
#pragma unroll
      for (int j = 0; j < kWide; ++j)
        if (packs_.has(first + j)) f(int64_t{first + j}, prob(x[j]));
    });
  }

  // Writes all V probabilities; zeros if the row is not valid, and else after to_probs().
  __device__ void write(float* probs, int64_t V) const {
    const int threads = static_cast<int>(team_.threads()), all = static_cast<int>(V);
#pragma unroll 1
    for (int v = static_cast<int>(team_.thread()); v < (valid_ ? packs_.first : all); v += threads) probs[v] = 0;
    if (!valid_) return;
#pragma unroll 1
    for (int v = packs_.last + static_cast<int>(team_.thread()); v < all; v += threads) probs[v] = 0;
    const bool is_aligned = reinterpret_cast<uintptr_t>(probs + packs_.base) % 16 == 0;
    entries_.for_each_pack(packs_, [&](int first, const float (&x)[kWide]) {
      if (is_aligned && first >= packs_.first && first + kWide <= packs_.last) {
        *reinterpret_cast<float4*>(probs + first) = {prob(x[0]), prob(x[1]), prob(x[2]), prob(x[3])};
        return;
      }
#pragma unroll
      for (int j = 0; j < kWide; ++j)
        if (packs_.has(first + j)) probs[first + j] = prob(x[j]);
    });
  }

  // Before to_probs(): calls f(x) for the thread's own logits, and for some of -inf.
  template <class F>
  __device__ void for_each_logit(F f) const {
    entries_.for_each(packs_, f);
  }
  // Calls f(id of x[0], x) for packs of neighboring logits.
  template <class F>
  __device__ void for_each_logits(F f) const {
    entries_.for_each_in_turn(packs_, f);
  }
  __device__ bool is_sampled() const { return shared_->is_sampled; }
  // Greedy: from now on only the largest logits are kept.
  __device__ void keep_best() { lowest_ = best_; }

 private:
  static constexpr float kInteger = 8388608;  // 2^23: floats from here on have no fraction
  static constexpr uint32_t kIntegerBits = 0x4b000000u;

  __device__ float exponential(float x) const { return x >= lowest_ ? exp_of(x - best_) : 0.0f; }
  // What an entry holds after to_probs() -> the probability.
  __device__ float prob(float x) const {
    if (entries_.keeps_changes()) return x;
    const float e = exponential(x);
    return is_corrected_ ? sum_.corrected(e) : e / sum_.divisor;
  }

  __device__ void clear() {
    uint4* const bins = reinterpret_cast<uint4*>(shared_->low);
    for (unsigned i = threadIdx.x; i < 2 * kBins / 4; i += blockDim.x) bins[i] = {0, 0, 0, 0};
  }

  // Calls f(x) for the own entries, by little code.
  template <class F>
  __device__ void for_each_once(F f) const {
    entries_.for_each_in_turn(packs_, [&](int, const float (&x)[kWide]) {
#pragma unroll
      for (int j = 0; j < kWide; ++j) f(x[j]);
    });
  }

  // The extremes of all threads, and whether the row is valid.
  __device__ void combine(const Extremes& local) {
    const Bounds all = bounds({ordered(local.least), local.bad ? UINT32_MAX : ordered(local.best)});
    valid_ = all.high < ordered(INFINITY) && all.high > ordered(-INFINITY);
    best_ = float_of(static_cast<int32_t>(all.high ^ 0x80000000u));
    if (lane() == 0) shared_->least[warp()] = float_of(static_cast<int32_t>(all.low ^ 0x80000000u));
    __syncwarp();
    valid_ = valid_ && !packs_.all_masked();
  }

  struct Bounds {
    uint32_t low, high;
  };
  // The bounds of the team, from the bounds of each thread.
  __device__ Bounds bounds(Bounds local) {
    local = {__reduce_min_sync(kAllLanes, local.low), __reduce_max_sync(kAllLanes, local.high)};
    const uint64_t* const all = team_.exchange(uint64_t{local.low} << 32 | local.high);
#pragma unroll 1
    for (unsigned w = lane(); w < team_.threads() / kWarp; w += kWarp) {
      local.low = min(local.low, static_cast<uint32_t>(all[w] >> 32));
      local.high = max(local.high, static_cast<uint32_t>(all[w]));
    }
    return {__reduce_min_sync(kAllLanes, local.low), __reduce_max_sync(kAllLanes, local.high)};
  }

  // 64-bit sums are made by 32-bit additions, which shared memory has in hardware.
  __device__ void add(unsigned bin, float x) {
    const int64_t mass = mass_of(exp_of(x - best_));
    const unsigned low = static_cast<unsigned>(mass);
    const unsigned high = static_cast<unsigned>(mass >> 32) + (atomicAdd(&shared_->low[bin], low) + low < low);
    if (high) atomicAdd(&shared_->high[bin], high);
  }

  // What a block of the team has in a bin. Counts have no high halves.
  __device__ int64_t in_bin(unsigned block, unsigned bin, bool by_mass) const {
    const RowShared* const from = in_block(shared_, block);
    return (by_mass ? int64_t{from->high[bin]} << 32 : 0) + from->low[bin];
  }

  // A place in the order of the logits: a limit, and the sum of what is above some of them.
  struct Search {
    bool by_mass;   // else by count
    int64_t limit;  // known beforehand for counts alone
    int64_t above;
  };

  // The bin at which the sum of the bins from the highest on, with search->above, reaches the limit, after the entries
  // of all threads were counted. `above` becomes what is above the bin. kBins if the sum never does.
  __device__ unsigned find_bin(Search* search) {
    team_.sync_shared();
    const unsigned num_warps = team_.threads() / kWarp, own = team_.thread() / kWarp;
    const unsigned share = kBins >> (__ffs(static_cast<int>(num_warps)) - 1);
    const auto bin_at = [&](unsigned w, unsigned i) { return kBins - 1 - w * share - i; };
    const unsigned size = team_.size(), shift = __popc(size - 1);
    int64_t sum = 0;
#pragma unroll 4
    for (unsigned i = lane(); i < share << shift; i += kWarp) {
      sum += in_bin(i & (size - 1), bin_at(own, i >> shift), search->by_mass);
    }
    const uint64_t* const sums = team_.exchange(static_cast<uint64_t>(warp_sum(sum)));
    if (search->limit == 0) {
      int64_t whole = 0;
#pragma unroll 1
      for (unsigned w = lane(); w < num_warps; w += kWarp) whole += static_cast<int64_t>(sums[w]);
      const double top_p = shared_->top_p;
      search->limit = static_cast<int64_t>(ceil(top_p * static_cast<double>(warp_sum(whole))));
    }
    unsigned w = first_reaching(
        num_warps, [&](unsigned w) { return static_cast<int64_t>(sums[w]); }, search->limit, &search->above);
    if (w == num_warps) return kBins;
    const auto value = [&](unsigned i) {
      int64_t sum_of_bin = 0;
#pragma unroll 2  // more would not fit into the registers of guided_probs
      for (unsigned block = 0; block < size; ++block) sum_of_bin += in_bin(block, bin_at(w, i), search->by_mass);
      return sum_of_bin;
    };
    return bin_at(w, first_reaching(share, value, search->limit, &search->above));
  }

  // Bins of equal steps from the best logit down to the least one. exp(-28) is nothing in fixed point, so that the
  // steps by mass end there; by count they end sooner where some logit is very far below, as those may be that somebody
  // has masked. What is below the steps is in bin 0, as is -inf.
  struct CoarseBins {
    float best, scale;

    __device__ unsigned of(float x) const {
      const float bin = fused(x - best, scale, kInteger + (kBins - 1));  // rounded to an integer
      return bin >= kInteger + 1 ? __float_as_uint(bin) - kIntegerBits : 0;
    }
    // The shuffles make the compiler find bins again, not keep those of all entries in registers from pass to pass.
    __device__ void again() {
      best = __shfl_sync(kAllLanes, best, 0);
      scale = __shfl_sync(kAllLanes, scale, 0);
    }
  };
  __device__ CoarseBins coarse_bins(bool by_mass) const {
    const float best = __shfl_sync(kAllLanes, best_, 0);
    const float reach = best - shared_->least[warp()], most = by_mass ? 28.0f : 1024.0f;
    return {best, fminf((kBins - 4) / (reach <= most ? reach : by_mass ? 28.0f : 128.0f), 1e30f)};
  }

  // The lowest logit such that less than top_k logits are greater, or that the mass of the greater ones that are kept
  // is less than the share top_p of the mass of all of these; -inf if that is so for all logits.
  __device__ float threshold(bool by_mass) {
    Search search = {by_mass, by_mass ? 0 : int64_t{shared_->top_k}, 0};
    CoarseBins bins = coarse_bins(by_mass);
    if (by_mass) {
      for_each_once([&](float x) {
        const unsigned bin = bins.of(x);
        if (bin > 0 && x >= lowest_) add(bin, x);
      });
    } else {
      entries_.for_each(packs_, [&](float x) {
        const unsigned bin = bins.of(x);
        if (bin > 0) atomicAdd(&shared_->low[bin], 1u);
      });
    }
    const unsigned bin = find_bin(&search);
    bins.again();
    const auto is_candidate = [&](float x) {
      return bins.of(x) == bin % kBins && x > -INFINITY && (!by_mass || x >= lowest_);
    };
    entries_.for_each_of(packs_, is_candidate, [&](float x) {  // each block lists its own
      const unsigned at = atomicAdd(&shared_->num_candidates[by_mass], 1u);
      if (at < kMaxCandidates) shared_->candidates[by_mass][at] = x;
    });
    team_.sync_shared();
    clear();
    const unsigned of_lane = lane() < team_.size() ? in_block(shared_, lane())->num_candidates[by_mass] : 0;
    const unsigned n = __reduce_add_sync(kAllLanes, of_lane);
    if (n > kMaxCandidates) return by_digits(search, is_candidate);
    if (warp() == 0) {
      const float found = n == 0 ? -INFINITY : among(gather(by_mass, of_lane), n, search);
      if (lane() == 0) shared_->found = found;
    }
    __syncthreads();
    return shared_->found;
  }

  // The threshold among many candidates: by up to three digits of their keys.
  template <class IsCandidate>
  __device__ float by_digits(Search search, const IsCandidate& is_candidate) {
    Bounds keys = {UINT32_MAX, 0};
    for_each_once([&](float x) {
      if (!is_candidate(x)) return;
      keys.low = min(keys.low, ordered(x));
      keys.high = max(keys.high, ordered(x));
    });
    keys = bounds(keys);
#pragma unroll 1
    while (true) {
      int shift = 0;  // where the digit is
      while ((keys.high - keys.low) >> shift >= kBins) ++shift;
      for_each_once([&](float x) {
        const uint32_t key = ordered(x);
        if (key < keys.low || key > keys.high || (search.by_mass && x < lowest_)) return;
        const unsigned digit = (key - keys.low) >> shift;
        if (search.by_mass) {
          add(digit, x);
        } else {
          atomicAdd(&shared_->low[digit], 1u);
        }
      });
      const unsigned digit = find_bin(&search);
      team_.sync_shared();  // every thread has read the bins
      clear();
      __syncthreads();
      if (digit == kBins) return -INFINITY;
      keys.low += digit << shift;
      keys.high = min(keys.high, keys.low + ((1u << shift) - 1));
      if (shift == 0) return float_of(static_cast<int32_t>(keys.low ^ 0x80000000u));
    }
  }

  // The candidates of all blocks, where this block has those for the other filter: either it is done with them, or it
  // has none yet. By one warp, whose lanes have the numbers of the blocks' candidates.
  __device__ const float* gather(bool by_mass, unsigned of_lane) const {
    if (team_.size() == 1) return shared_->candidates[by_mass];
    float* const all = shared_->candidates[!by_mass];
    unsigned end = 0;
#pragma unroll 1
    for (unsigned block = 0; block < team_.size(); ++block) {
      const unsigned count = __shfl_sync(kAllLanes, of_lane, static_cast<int>(block));
      const float* const from = in_block(shared_, block)->candidates[by_mass];
      for (unsigned i = lane(); i < count; i += kWarp) all[end + i] = from[i];
      end += count;
    }
    __syncwarp();
    return all;
  }

  // Finds the threshold among the n entries of one bin, at least one, by bisection in one warp.
  __device__ float among(const float* candidates, unsigned n, const Search& search) const {
    constexpr int kOwn = kMaxCandidates / kWarp;
    uint32_t keys[kOwn], low = UINT32_MAX, high = 0;
    int64_t masses[kOwn], all = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const unsigned at = i * kWarp + lane();
      keys[i] = 0, masses[i] = 0;
      if (at >= n) continue;
      keys[i] = ordered(candidates[at]);
      masses[i] = search.by_mass ? mass_of(exp_of(candidates[at] - best_)) : 1;
      all += masses[i];
      low = min(low, keys[i]);
      high = max(high, keys[i]);
    }
    low = __reduce_min_sync(kAllLanes, low);
    high = __reduce_max_sync(kAllLanes, high);
    if (search.above + warp_sum(all) < search.limit) return -INFINITY;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      int64_t greater = 0;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) greater += keys[i] > middle ? masses[i] : 0;
      if (search.above + warp_sum(greater) < search.limit) {
        high = middle;
      } else {
        low = middle + 1;
      }
    }
    return float_of(static_cast<int32_t>(low ^ 0x80000000u));
  }

  Team& team_;
  RowShared* shared_;
  Packs packs_;
  Entries entries_;
  bool valid_, is_corrected_ = false;
  float best_ = 0, lowest_ = -INFINITY;
  Divider sum_{1.0f};
};

constexpr int64_t kPackBytes = sizeof(float4);  // of Streamed

// How many packs the longest row of the batch has.
inline int64_t packs_of(const LogitRows& rows) {
  const bool is_aligned = rows.V % kWide == 0 && reinterpret_cast<uintptr_t>(rows.logits) % 16 == 0;
  const int64_t before = is_aligned ? rows.first_id % kWide : kWide - 1;
  return (before + rows.last_id - rows.first_id + kWide - 1) / kWide;
}

// Launches a kernel of (Batch, int64_t capacity) by teams, each of which shares a row at a time: held, if the longest
// row of the batch fits into a team's registers, or else streamed. Teams are clusters where the GPU has these, of more
// blocks where there are few teams, so that every multiprocessor has work. The kernel's dynamic shared memory is a
// RowShared.
template <class Batch>
cudaError_t launch_rows(void (*held)(Batch, int64_t), void (*streamed)(Batch, int64_t), const Batch& batch,
                        int64_t teams, cudaStream_t stream) {
  const LogitRows& rows = batch.rows;
  const int64_t packs = packs_of(rows);

  Device device;
  cudaError_t error = device_for(held, &device);
  if (error != cudaSuccess) return error;
  const int64_t most_threads = device.has_clusters ? kMaxRowThreads / 2 : kMaxRowThreads;
  const int64_t most_blocks = device.has_clusters ? kMaxCluster : 1;
  const bool is_held = packs <= most_blocks * most_threads * kHeldPacks;
  if (!is_held) error = device_for(streamed, &device);
  if (error != cudaSuccess) return error;

  // No block of a cluster has less than 512 packs.
  const int64_t useful = packs / 512;
  int64_t cluster = cluster_for(device, teams, useful < most_blocks ? useful : most_blocks);
  const int64_t base = offsetof(RowShared, copy);
  const auto of_thread = [&](int64_t threads) { return (packs + cluster * threads - 1) / (cluster * threads); };
  const auto threads_of = [&](int64_t wanted) {
    int64_t threads = kWarp;
    while (threads < wanted && threads < most_threads) threads *= 2;
    return threads;
  };
  int64_t threads = most_threads, capacity = 0;
  if (is_held) {
    while (of_thread(most_threads) > kHeldPacks) cluster *= 2;
    const int64_t own = (packs + cluster - 1) / cluster;
    // Where every multiprocessor has a block anyway, few threads with many entries have less to wait for.
    threads = threads_of(teams * cluster < device.multiprocessors ? own : (own + kHeldPacks - 1) / kHeldPacks);
  } else {
    const int64_t most = std::max<int64_t>(device.shared - base, 0) / (threads * kPackBytes);
    while (of_thread(threads) > most && cluster * 2 <= most_blocks) cluster *= 2;
    capacity = of_thread(threads) <= most ? of_thread(threads) : rows.id_range ? most : 0;
  }
  const int64_t shared = base + capacity * threads * kPackBytes;
  return LAUNCH_CLUSTERS(is_held ? held : streamed, static_cast<unsigned>(teams * cluster),
                         static_cast<unsigned>(cluster), static_cast<unsigned>(threads), static_cast<size_t>(shared),
                         stream, batch, capacity);
}

}  // namespace
}  // namespace specvis
