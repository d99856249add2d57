// How a team of threads verifies a request's tree, from the root downwards, whatever the target's rows are made of. A
// row is read once, by all blocks of the team. What is left of it after rejections is held in one of two ways:
//     of point masses   as the row is, with a bit for each id that has lost its mass, or a part of it
//     of draft rows     as masses, each block its own ids', since a rejection changes all of them
// The decision for a child is taken by one warp of each block, which all blocks repeat. Where no neighbor is looked at,
// that warp tries all children of a node by itself.
//
// Rows is the target's rows of one request, and has
//     read(node, f)     makes that row the current one; calls f(v, p) for every id of this warp; false: it is invalid
//     reread(f)         the same of the current row; a warp's lanes take ids that follow each other
//     (v)               the probability of an id in the current row
//     allows(v)         whether an id is in the row's range; outside of it a token has no neighbors
#pragma once
#include "../shared/params.h"
#include "../shared/rules.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kVerifyThreads = 512;           // at most
constexpr int64_t kWideRow = 32768;           // ids from which on one block takes too long to read a row
constexpr int kRowLoads = 8, kMassLoads = 4;  // in flight per thread

// What a tried child adds to tv_excess: numerators and denominator of its probabilities of being accepted.
struct Trial {
  double relaxed, strict, whole;
  bool is_first;  // of the node's children
};

struct Node {
  int64_t token;
  int32_t first_child, next_sibling, draft_row;
  float uniform;
  int32_t depth, parent, num_non_argmax;  // of an accepted node of a greedy request; until then, depth is -1
  Trial trial;                            // the n-th of the request is in the n-th node
};

// Where a block's arrays are: each is in shared memory if it still fits there, else in the block's part of scratch. And
// which ids are whose: each warp of a team has `share` that follow each other, a multiple of 32.
struct Layout {
  struct Region {
    bool shared;
    int64_t offset;  // bytes
  };
  Region nodes, bits, row, masses, draft;
  int64_t shared, scratch = 0;  // bytes of each in all
  uint32_t share;
  unsigned cluster, threads;

  // Of rows of probabilities in memory.
  Layout(const VerifyParams& batch, const Device& device)
      : Layout(batch, batch.draft_probs || batch.V > kWideRow ? cluster_for(device, batch.B) : 1,
               threads_for(batch.V, kVerifyThreads), device.shared, 0, false) {}

  // `taken` bytes at the front of shared memory hold something else. copies_rows: rows are no probabilities in memory.
  Layout(const VerifyParams& batch, unsigned cluster, unsigned threads, int64_t most_shared, int64_t taken,
         bool copies_rows)
      : shared(taken), cluster(cluster), threads(threads) {
    const int64_t warps = threads / kWarp, words = (batch.V + kWarp - 1) / kWarp;
    share = static_cast<uint32_t>((words + warps * cluster - 1) / (warps * cluster) * kWarp);
    const auto reserve = [&](int64_t bytes) {
      bytes = (bytes + 15) / 16 * 16;
      const bool fits = shared + bytes <= most_shared;
      int64_t& end = fits ? shared : scratch;
      end += bytes;
      return Region{fits, end - bytes};
    };
    const int64_t ids = warps * share;
    nodes = reserve(batch.N * sizeof(Node));
    bits = reserve(words * sizeof(unsigned));
    row = reserve(copies_rows ? ids * sizeof(float) : 0);
    masses = reserve(batch.draft_probs ? ids * sizeof(double) : 0);
    draft = reserve(batch.draft_probs ? ids * sizeof(float) : 0);
  }
  HOST_DEVICE int64_t scratch_of(int64_t B) const { return B * cluster * scratch; }  // bytes for so many requests
};

// An entry for each id, of which every block of a team holds those of its own ids.
template <class T>
class Slices {
 public:
  __device__ Slices(char* shared, char* scratch, const Layout& layout, Layout::Region region, const Team& team)
      : own_(reinterpret_cast<T*>((region.shared ? shared : scratch) + region.offset)), layout_(layout),
        shared_(region.shared), team_(team) {}

  __device__ T& here(uint32_t v) const { return own_[v - team_.rank() * ids()]; }  // of an id of this block
  __device__ T* at(uint32_t v) const {                                             // of any id
    if (team_.size() == 1) return own_ + v;
    const unsigned rank = v / ids();
    if (shared_) return in_block(own_, rank) + (v - rank * ids());
    const int64_t distance = (int64_t{rank} - team_.rank()) * layout_.scratch;
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own_) + distance) + (v - rank * ids());
  }
  __device__ T operator()(uint32_t v) const { return *at(v); }

 private:
  __device__ uint32_t ids() const { return layout_.share * warps(); }  // of a block

  T* own_;
  const Layout& layout_;
  bool shared_;
  const Team& team_;
};

// Calls f(v, p) for the ids [begin, end) of a row; a warp's lanes take ids that follow each other.
template <class F>
__device__ void for_each_in_stride(const float* row, uint32_t begin, uint32_t end, F f) {
#pragma unroll 1
  for (uint32_t start = begin + lane(); start < end; start += kRowLoads * kWarp) {
    float p[kRowLoads];
#pragma unroll
    for (int j = 0; j < kRowLoads; ++j) p[j] = start + j * kWarp < end ? row[start + j * kWarp] : 0.0f;
#pragma unroll
    for (int j = 0; j < kRowLoads; ++j)
      if (start + j * kWarp < end) f(start + j * kWarp, p[j]);
  }
}

// What one warp searches for: the first of `count` masses at which their running sum exceeds the threshold, and the sum
// before it.
struct Found {
  uint32_t index;
  int64_t before;
};

template <class Mass>
__device__ Found search_in_warp(uint32_t count, int64_t threshold, const Mass& mass) {
  if (count == 1) return {0, 0};
  int64_t before = 0;
#pragma unroll 1
  for (uint32_t start = 0; start < count; start += kWarp) {
    const int64_t own_mass = start + lane() < count ? mass(start + lane()) : 0;
    const int64_t sum = before + warp_scan(own_mass);
    const unsigned votes = __ballot_sync(kAllLanes, sum > threshold);
    if (votes) {
      const int found = __ffs(votes) - 1;
      return {start + found, __shfl_sync(kAllLanes, sum - own_mass, found)};
    }
    before = __shfl_sync(kAllLanes, sum, kWarp - 1);
  }
  return {count - 1, before};
}

// What the threads of one block tell each other while those of other blocks do the same among themselves.
class Block {
 public:
  // As Team::exchange.
  __device__ const uint64_t* exchange(uint64_t value) {
    __shared__ uint64_t values[2][kMaxWarps];
    turn_ ^= 1;
    if (lane() == 0) values[turn_][warp()] = value;
    __syncthreads();
    return values[turn_];
  }
  __device__ Scan scan(int64_t value) {
    const int64_t sum = warp_scan(value);
    const uint64_t* const sums = exchange(__shfl_sync(kAllLanes, sum, kWarp - 1));
    const int64_t of_warp = lane() < warps() ? static_cast<int64_t>(sums[lane()]) : 0;
    return {warp_sum(lane() < warp() ? of_warp : 0) + sum - value, warp_sum(of_warp)};
  }
  // The lowest thread for which the condition holds, or blockDim.x if there is none.
  __device__ unsigned first(bool condition) {
    const unsigned votes = __ballot_sync(kAllLanes, condition);
    const uint64_t* const firsts = exchange(votes ? warp() * kWarp + __ffs(votes) - 1 : blockDim.x);
    return __reduce_min_sync(kAllLanes, lane() < warps() ? static_cast<unsigned>(firsts[lane()]) : blockDim.x);
  }

 private:
  unsigned turn_ = 0;
};

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
  int64_t mass;        // of all of them; only the warp that decides about the token knows it
  uint32_t num_own;    // how many are in columns of this thread
  bool has_any;        // whether there is one
  bool is_of_decider;  // whether this is a thread of that warp
};

// The longest prefix of a token's first num_considered neighbors that fits the budget. mass(v) is an entry of the row.
// Every thread has read those of its neighbors when the function returns.
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

// A request's slices of a batch of trees: of N nodes, with num_draft_rows rows of the draft.
struct Tree {
  static constexpr bool kHasBonus = false;
  const VerifyParams& batch;
  int64_t b;

  __device__ int64_t num_nodes() const { return batch.N; }
  __device__ int64_t max_depth() const { return batch.max_depth; }
  __device__ int64_t num_draft_rows() const { return batch.num_draft_rows; }
  __device__ const float* draft_probs() const { return batch.draft_probs + b * batch.num_draft_rows * batch.V; }
  __device__ double omega(int64_t depth) const { return batch.omega ? batch.omega[b * batch.max_depth + depth] : 1.0; }
  __device__ int32_t* accepted_nodes() const { return batch.accepted_nodes + b * batch.max_depth; }
};

// Writes the outputs of request b, apart from accepted_nodes and next_token.
__device__ inline void write(const VerifyParams& batch, int64_t b, int32_t num_accepted, double tv_excess,
                             int32_t status) {
  batch.num_accepted[b] = num_accepted;
  batch.tv_excess[b] = static_cast<float>(tv_excess);
  batch.status[b] = status;
}

// One request. Links is Tree, or a class with the same members. Every thread has the same object and calls its methods
// together with the others.
template <bool kHasDrafts, class Rows, class Links>
class Verifier {
 public:
  __device__ Verifier(const VerifyParams& batch, int64_t b, Rows& rows, const Links& links, Team& team, Node* nodes,
                      const Layout& layout, char* shared, char* scratch)
      : batch_(batch), b_(b), V_(static_cast<uint32_t>(batch.V)), rows_(rows), links_(links), team_(team),
        nodes_(nodes), bits_(reinterpret_cast<unsigned*>((layout.bits.shared ? shared : scratch) + layout.bits.offset)),
        masses_(shared, scratch, layout, layout.masses, team), draft_(shared, scratch, layout, layout.draft, team),
        share_(layout.share) {
    begin_ = min((team.rank() * warps() + warp()) * share_, V_);
    end_ = min(begin_ + share_, V_);
    const int64_t k = batch.neighbors.k();
    delta_ = batch.delta ? batch.delta[b] : -1.0f;
    num_considered_ = static_cast<uint32_t>(k > 0 ? k - (batch.residual == ResidualRule::released) : 0);
  }

  __device__ void verify_sampled();
  __device__ void verify_greedy();

 private:
  static constexpr uint64_t kAccepted = uint64_t{1} << 63;

  // Where verification stands. Every thread has the same.
  struct State {
    int64_t total;        // of the residual
    int32_t first, last;  // siblings from `first` on, and before `last`, were rejected
    int32_t next;         // the child that was accepted, or -1
    int32_t num_trials, status;
    bool is_uniform;  // whether the uniform distribution has taken the row's place
  };

  // Is `child` a later node than `previous`, with a token in the vocabulary?
  __device__ bool is_valid(int32_t child, int32_t previous) const {
    return child > previous && child < links_.num_nodes() && nodes_[child].token >= 0 && nodes_[child].token < V_;
  }
  __device__ bool is_undefined() const {
    for (int64_t d = 0; batch_.omega && d < links_.max_depth(); ++d) {
      if (specvis::is_undefined(links_.omega(d), num_considered_ > 0, batch_.residual)) return true;
    }
    return false;
  }
  // Has the node no row, because the token after it is drawn already?
  __device__ bool ends_in_bonus(int32_t node) const {
    if constexpr (Links::kHasBonus) return links_.bonus && node == links_.num_nodes() - 1;
    return false;
  }
  __device__ int64_t bonus() const {
    if constexpr (Links::kHasBonus) return *links_.bonus;
    return 0;
  }
  __device__ bool is_own(uint32_t v) const {  // an id of this block
    return v / (share_ * warps()) == team_.rank();
  }
  __device__ bool is_first_thread() const { return team_.thread() == 0; }

  // The sum of which each thread has a part, and said whether that is valid. What each warp has is in `chunks` after
  // the next barrier.
  __device__ Total sum_of_team(int64_t sum, bool valid) {
    const bool all_valid = __ballot_sync(kAllLanes, !valid) == 0;
    const uint64_t* const sums = team_.exchange(all_valid ? static_cast<uint64_t>(warp_sum(sum)) : UINT64_MAX);
    int64_t total = 0;
    bool is_invalid = false;
    for (unsigned w = lane(); w < num_chunks(); w += kWarp) {
      is_invalid |= sums[w] == UINT64_MAX;
      total += static_cast<int64_t>(sums[w]);
    }
    for (unsigned w = warp(); w < num_chunks(); w += warps()) {
      if (lane() == 0) chunks()[w] = static_cast<int64_t>(sums[w]);
    }
    is_invalid = __ballot_sync(kAllLanes, is_invalid) != 0;
    total = warp_sum(total);
    return {total, !is_invalid && total > 0};
  }
  __device__ unsigned num_chunks() const { return team_.size() * warps(); }
  __device__ static int64_t* chunks() {  // the mass of each warp's ids in the residual
    __shared__ int64_t sums[kMaxTeamWarps];
    return sums;
  }

  // Reads the row of a node, and makes it the residual: as masses if `is_dense`. Finds the largest entry, and of those
  // with its mass the lowest id, if `argmax` is not null.
  __device__ bool read(int32_t node, bool is_dense, uint32_t* argmax = nullptr) {
#pragma unroll 1
    for (uint32_t i = threadIdx.x; i * kWarp < V_; i += blockDim.x) bits_[i] = 0;
    int64_t sum = 0;
    bool entries_valid = true;  // this thread's
    uint64_t best = 0;          // the mass as a float, and the id from behind
    const auto use = [&](uint32_t v, float p) {
      const bool ok = is_probability(p);
      const float probability = ok ? p : 0.0f;
      const int64_t mass = to_fixed_point(probability);
      entries_valid &= ok;
      sum += mass;
      if (is_dense) {
        masses_.here(v) = static_cast<double>(mass);
      } else if (argmax) {
        const uint64_t whole = __float_as_uint(static_cast<float>(mass)), entry = whole << 32 | (0xffffffffu - v);
        best = entry > best ? entry : best;
      }
    };
    entries_valid &= rows_.read(node, is_dense, begin_, end_, use);
    const Total total = sum_of_team(sum, entries_valid);
    state_.total = total.mass;
    state_.first = state_.last = state_.next = -1;
    state_.is_uniform = false;
    if (argmax) *argmax = 0xffffffffu - static_cast<uint32_t>(team_.max(best));
    return total.valid;
  }

  // An entry of the row, or of the distribution in its place.
  __device__ int64_t row_mass(uint32_t v) const {
    return state_.is_uniform ? uniform_mass(V_) : to_fixed_point(rows_(v));
  }
  // An entry of the residual where children were point masses.
  __device__ int64_t mass(uint32_t v) const {
    int64_t mass = row_mass(v);
    if (!(bits_[v / kWarp] >> (v % kWarp) & 1)) return mass;
    if (slack_ == 0) return 0;
    for (int32_t child = state_.first; child != state_.last; child = nodes_[child].next_sibling) {
      if (nodes_[child].token == v) mass = rest_of(mass);
    }
    return mass;
  }
  // What a rejected point mass leaves of its token.
  __device__ int64_t rest_of(int64_t mass) const { return static_cast<int64_t>(slack_ * static_cast<double>(mass)); }
  // Sets the residual of an id to 0. Returns what it has lost.
  __device__ int64_t clear(uint32_t id) {
    const unsigned bit = 1u << (id % kWarp);
    return atomicOr(bits_ + id / kWarp, bit) & bit ? 0 : row_mass(id);
  }
  // Calls f(id) for those neighbors of x that this thread treats if x is rejected.
  template <class F>
  __device__ void for_treated_neighbors(uint32_t x, const KeptNeighbors& prefix, F f) const {
    const bool released = batch_.residual == ResidualRule::released;
    if (batch_.residual == ResidualRule::optimal || (released && !prefix.has_any)) return;
    for_own_columns(num_considered_ + released, released ? UINT32_MAX : prefix.num_own, [&](uint32_t column) {
      const int64_t id = batch_.neighbors(x, column);
      if (id >= 0 && id < V_) f(static_cast<uint32_t>(id));
    });
  }
  __device__ bool considers_neighbors(uint32_t x) const {
    return num_considered_ > 0 && delta_ >= 0 && batch_.neighbors.has(x) && rows_.allows(x);
  }

  // Called by the lanes of one warp, the decider.
  __device__ bool accepts(const Candidate& candidate, int32_t child, bool is_first) {
    if (lane() == 0) {
      nodes_[state_.num_trials].trial = {candidate.numerator(false), candidate.numerator(true), candidate.denominator(),
                                         is_first};
    }
    return candidate.accepts(nodes_[child].uniform);
  }

  // Tries a child that is a point mass at x, by all threads of the block. All of them look at its neighbors, and clear
  // what its rejection would clear before they know whether it is rejected: an accepted child ends the residual.
  __device__ bool try_with_neighbors(int32_t child, uint32_t x, double omega, bool is_first) {
    const bool considers = considers_neighbors(x);
    const int64_t token_mass = considers || warp() == 0 ? mass(x) : 0;
    KeptNeighbors prefix = {0, 0, false, warp() == 0};
    if (considers) {
      prefix = keep_neighbors(
          block_, [this](uint32_t v) { return mass(v); }, V_, batch_.neighbors, num_considered_, x,
          Budget(batch_.cutoff, delta_, token_mass, state_.total));
    }
    uint64_t to_all = 0;
    if (prefix.is_of_decider) {
      const Candidate candidate = {false, token_mass, token_mass + prefix.mass, state_.total, 0, 0, omega};
      if (accepts(candidate, child, is_first)) to_all = kAccepted;
    }
    __syncwarp();
    int64_t cleared = threadIdx.x == 0 ? clear(x) : 0;
    for_treated_neighbors(x, prefix, [&](uint32_t id) { cleared += clear(id); });
    to_all |= static_cast<uint64_t>(warp_sum(cleared));
    const uint64_t* const of_warps = block_.exchange(to_all);
    const uint64_t of_warp = lane() < warps() ? of_warps[lane()] : 0;
    state_.total -= warp_sum(static_cast<int64_t>(of_warp & ~kAccepted));
    return __ballot_sync(kAllLanes, (of_warp & kAccepted) != 0) != 0;
  }

  // The same by the lanes of one warp, without neighbors.
  __device__ bool try_alone(int32_t child, uint32_t x, double omega, bool is_first) {
    const int64_t token_mass = mass(x);
    if (accepts({false, token_mass, token_mass, state_.total, 0, 0, omega}, child, is_first)) return true;
    state_.total += rest_of(token_mass) - token_mass;
    __syncwarp();  // every lane has read the bit
    if (lane() == 0) bits_[x / kWarp] |= 1u << (x % kWarp);
    __syncwarp();
    return false;
  }

  // Tries the children of a node, from `child` on, which are point masses.
  __device__ void try_point_masses(int32_t node, int32_t child, double omega) {
    __shared__ State of_warp;
    const bool is_alone = num_considered_ == 0;
    if (!is_alone || warp() == 0) {
      const int64_t row_total = state_.total;
      state_.first = state_.last = child;
      for (int32_t previous = node; child >= 0;) {
        if (!is_valid(child, previous)) {
          state_.status |= kInvalidTree;
          break;
        }
        const bool is_first = previous == node;
        const uint32_t x = static_cast<uint32_t>(nodes_[child].token);
        const bool is_accepted =
            is_alone ? try_alone(child, x, omega, is_first) : try_with_neighbors(child, x, omega, is_first);
        ++state_.num_trials;
        if (is_accepted) {
          state_.next = child;
          break;
        }
        previous = child;
        state_.last = child = nodes_[child].next_sibling;
        if (state_.total == 0) {
          state_.status |= kEmptyResidual;
          state_.is_uniform = batch_.empty == Empty::uniform;
          state_.total = state_.is_uniform ? int64_t{V_} * uniform_mass(V_) : row_total;
          state_.first = child;
          const unsigned threads = is_alone ? kWarp : blockDim.x;
          for (uint32_t i = threadIdx.x; i * kWarp < V_; i += threads) bits_[i] = 0;
          if (is_alone) {
            __syncwarp();
          } else {
            __syncthreads();
          }
        }
      }
    }
    if (!is_alone) return;
    if (threadIdx.x == 0) of_warp = state_;
    __syncthreads();
    state_ = of_warp;
  }

  // Reads row `from` of the draft.
  __device__ bool read_draft(int32_t from) {
    int64_t sum = 0;
    bool entries_valid = true;  // this thread's
    for_each_in_stride(links_.draft_probs() + from * batch_.V, begin_, end_, [&](uint32_t v, float p) {
      const bool ok = is_probability(p);
      const float probability = ok ? p : 0.0f;
      draft_.here(v) = probability;
      entries_valid &= ok;
      sum += to_fixed_point(probability);
    });
    const Total total = team_.total(sum, entries_valid);
    draft_total_ = total.mass;
    return total.valid;
  }

  // What the warp that decides about a sampled child tells the others.
  struct Decision {
    bool is_accepted;
    int64_t token_mass, draft_mass;  // of the token, the former with what the rule moves there
    double unit, draft_unit;
  };

  // Tries the children of a node, from `child` on, which were drawn from the draft's row.
  __device__ void try_samples(int32_t node, int32_t child, double omega) {
    __shared__ Decision of_decider;
    bool is_first = true;
    for (int32_t previous = node; child >= 0; previous = child, child = nodes_[child].next_sibling) {
      if (!is_valid(child, previous)) {
        state_.status |= kInvalidTree;
        return;
      }
      if (draft_total_ == 0) continue;
      const uint32_t x = static_cast<uint32_t>(nodes_[child].token);
      const bool considers = considers_neighbors(x);
      const int64_t token_mass = considers || warp() == 0 ? static_cast<int64_t>(masses_(x)) : 0;
      KeptNeighbors prefix = {0, 0, false, warp() == 0};
      if (considers) {
        prefix = keep_neighbors(
            block_, [this](uint32_t v) { return static_cast<int64_t>(masses_(v)); }, V_, batch_.neighbors,
            num_considered_, x, Budget(batch_.cutoff, delta_, token_mass, state_.total));
        for_treated_neighbors(x, prefix, [this](uint32_t id) {
          if (is_own(id)) atomicOr(bits_ + id / kWarp, 1u << (id % kWarp));
        });
      }
      if (prefix.is_of_decider) {
        const int64_t relaxed_mass = token_mass + prefix.mass, draft_mass = to_fixed_point(draft_(x));
        const bool is_accepted =
            accepts({true, token_mass, relaxed_mass, state_.total, draft_mass, draft_total_, omega}, child, is_first);
        if (lane() == 0) {
          const bool moves = batch_.residual == ResidualRule::relaxed;
          of_decider = {is_accepted, moves ? relaxed_mass : token_mass, draft_mass,
                        1 / static_cast<double>(state_.total), 1 / static_cast<double>(draft_total_)};
        }
      }
      team_.sync();  // every block has read the masses
      is_first = false;
      ++state_.num_trials;
      if (of_decider.is_accepted) {
        state_.next = child;
        return;
      }
      draft_total_ -= of_decider.draft_mass;
      subtract(x, of_decider);
      if (state_.total == 0) {
        state_.status |= kEmptyResidual;
        refill_masses();
      }
    }
  }

  // Subtracts the draft after a sampled candidate x was rejected, and takes x out of the draft. Its treated neighbors,
  // which have a bit until then, have no mass by the relaxed rule; by the released one nothing is taken from them.
  __device__ void subtract(uint32_t x, const Decision& decision) {
    const bool moves = batch_.residual == ResidualRule::relaxed;
    const double unit = decision.unit, draft_unit = decision.draft_unit;
    double sum = 0;  // below 2^53, so exact
    int64_t of_token = 0;
#pragma unroll 1
    for (uint32_t start = begin_ + lane(); start - lane() < end_; start += kMassLoads * kWarp) {
      double masses[kMassLoads];
      float draft_probs[kMassLoads];
#pragma unroll
      for (int j = 0; j < kMassLoads; ++j) {
        const uint32_t v = start + j * kWarp;
        masses[j] = v < end_ ? masses_.here(v) : 0.0;
        draft_probs[j] = v < end_ ? draft_.here(v) : 0.0f;
      }
#pragma unroll
      for (int j = 0; j < kMassLoads; ++j) {
        const uint32_t v = start + j * kWarp;
        bool is_treated = false;
        if (num_considered_ > 0 && v - lane() < end_) {  // the lanes share a word
          const unsigned treated = bits_[v / kWarp];
          __syncwarp();
          if (treated && lane() == 0) bits_[v / kWarp] = 0;
          is_treated = treated >> lane() & 1;
        }
        if (v >= end_) continue;
        double mass = v == x ? static_cast<double>(decision.token_mass) : moves && is_treated ? 0.0 : masses[j];
        const float draft_mass = is_treated && !moves ? 0.0f : truncf(draft_probs[j] * static_cast<float>(kFixedOne));
        if (mass > 0) mass = residual_mass(mass, unit, static_cast<double>(draft_mass), draft_unit, slack_);
        if (v == x) {  // with its neighbors its mass may be the whole row's
          of_token = static_cast<int64_t>(mass);
          mass = static_cast<double>(of_token);
          draft_.here(v) = 0.0f;
        } else {
          mass = whole_part(mass);
          sum += mass;
        }
        masses_.here(v) = mass;
      }
    }
    state_.total = sum_of_team(static_cast<int64_t>(sum) + of_token, true).mass;
  }

  // What takes the place of masses of which nothing is left.
  __device__ void refill_masses() {
    int64_t sum = 0;
    const auto put = [&](uint32_t v, int64_t mass) {
      masses_.here(v) = static_cast<double>(mass);
      sum += mass;
    };
    if (batch_.empty == Empty::target) {
      rows_.reread(begin_, end_, [&](uint32_t v, float p) { put(v, to_fixed_point(p)); });
    } else {
      for (uint32_t v = begin_ + lane(); v < end_; v += kWarp) put(v, uniform_mass(V_));
    }
    state_.total = sum_of_team(sum, true).mass;
  }

  // Inverse CDF in vocabulary order: writes the first id at which the running sum of the residual exceeds a threshold.
  // The masses of the warps' ids tell which warp's it is among; the warps of its block share these. mass(v) is an
  // entry.
  template <class Mass>
  __device__ void draw(bool is_dense, const Mass& mass) {
#pragma unroll 1
    for (unsigned w = warp(); !is_dense && w < num_chunks(); w += warps()) {
      const uint32_t begin = min(w * share_, V_), end = min(begin + share_, V_);
      int64_t change = 0;  // of the chunk's mass, since the row was read
      if (state_.is_uniform && lane() == 0) change = (end - begin) * uniform_mass(V_) - chunks()[w];
      if (state_.first != state_.last) {
#pragma unroll 1
        for (uint32_t v = begin + lane(); v < end; v += kWarp) {
          if (bits_[v / kWarp] >> lane() & 1) change += mass(v) - row_mass(v);
        }
      }
      change = warp_sum(change);
      if (lane() == 0) chunks()[w] += change;
    }
    __syncthreads();
    int64_t threshold = draw_threshold(nodes_[0].uniform, state_.total);
    const Found chunk = search_in_warp(num_chunks(), threshold, [](uint32_t w) { return chunks()[w]; });
    if (chunk.index / warps() != team_.rank()) return;
    threshold -= chunk.before;
    const uint32_t end = min((chunk.index + 1) * share_, V_);
    const uint32_t part = (share_ / kWarp + warps() - 1) / warps() * kWarp;  // of a warp
    const uint32_t first = min(chunk.index * share_ + warp() * part, end), last = min(first + part, end);
    int64_t sum = 0;
#pragma unroll 1
    for (uint32_t v = first + lane(); v < last; v += kWarp) sum += mass(v);
    const uint64_t* const sums = block_.exchange(warp_sum(sum));
    const Found own = search_in_warp(warps(), threshold, [=](uint32_t w) { return static_cast<int64_t>(sums[w]); });
    if (own.index != warp()) return;
    const Found id = search_in_warp(last - first, threshold - own.before, [&](uint32_t i) { return mass(first + i); });
    if (lane() == 0) batch_.next_token[b_] = first + id.index;
  }
  __device__ void draw(bool is_dense) {
    if constexpr (kHasDrafts) {
      if (is_dense) {
        draw(true, [this](uint32_t v) { return static_cast<int64_t>(masses_.here(v)); });
        return;
      }
    }
    draw(false, [this](uint32_t v) { return this->mass(v); });
  }

  // The sum over tried siblings of the probability of reaching one times what it adds, by the lanes of one warp.
  __device__ double tv_excess() const {
    double result = 0, reach_prob = 1;
#pragma unroll 1
    for (int32_t start = 0; start < state_.num_trials; start += kWarp) {
      const int32_t count = min(state_.num_trials - start, kWarp), own = static_cast<int32_t>(lane());
      const Trial trial = own < count ? nodes_[start + own].trial : Trial{0, 0, 1, false};
      const double accept_prob = Candidate::probability(trial.relaxed, trial.whole);
      const double difference = accept_prob - Candidate::probability(trial.strict, trial.whole);
      const double excess = difference > 0 ? difference : 0.0;
      if (__ballot_sync(kAllLanes, excess > 0) == 0 && start + count == state_.num_trials) break;  // adds nothing
#pragma unroll 1
      for (int32_t j = 0; j < count; ++j) {
        if (__shfl_sync(kAllLanes, trial.is_first, j)) reach_prob = 1;
        result += reach_prob * __shfl_sync(kAllLanes, excess, j);
        reach_prob *= 1 - __shfl_sync(kAllLanes, accept_prob, j);
      }
    }
    return result;
  }

  // Tries the children of node n of a greedy request, against its row's argmax.
  __device__ void try_greedily(int32_t n, uint32_t argmax) {
    const int64_t max_mass = row_mass(argmax);
    int32_t previous = n;
    for (int32_t child = nodes_[n].first_child; child >= 0; previous = child, child = nodes_[child].next_sibling) {
      if (!is_valid(child, previous)) {
        state_.status |= kInvalidTree;
        return;
      }
      const uint32_t x = static_cast<uint32_t>(nodes_[child].token);
      const int64_t token_mass = row_mass(x);
      KeptNeighbors prefix = {0, 0, false, warp() == 0};
      if (considers_neighbors(x)) {
        prefix = keep_neighbors(
            block_, [this](uint32_t v) { return row_mass(v); }, V_, batch_.neighbors, num_considered_, x,
            Budget(batch_.cutoff, delta_, token_mass, state_.total));
      }
      if (!prefix.is_of_decider || lane() != 0 || !is_argmax(x, token_mass + prefix.mass, argmax, max_mass)) continue;
      nodes_[child].depth = nodes_[n].depth + 1;
      nodes_[child].parent = n;
      nodes_[child].num_non_argmax = nodes_[n].num_non_argmax + (x != argmax);
    }
  }

  const VerifyParams& batch_;
  int64_t b_;
  uint32_t V_;
  Rows& rows_;
  const Links& links_;
  Team& team_;
  Block block_;
  Node* nodes_;
  unsigned* bits_;         // one for each id
  Slices<double> masses_;  // if kHasDrafts
  Slices<float> draft_;
  uint32_t share_, begin_, end_;  // the ids of a warp, and this warp's
  uint32_t num_considered_;       // how many neighbors of a token the cutoff looks at; 0 without neighbors
  float delta_;
  double slack_ = 0;         // of the node's children
  int64_t draft_total_ = 0;  // of what is left of the draft's row
  State state_ = {};
};

template <bool kHasDrafts, class Rows, class Links>
__device__ void Verifier<kHasDrafts, Rows, Links>::verify_sampled() {
  const bool is_undefined = this->is_undefined();
  if (is_undefined) state_.status |= kInvalidRule;
  int64_t next_token = 0;
  int32_t node = 0, num_accepted = 0;
  bool draws = false;
  while (true) {
    if (ends_in_bonus(node)) {
      next_token = bonus();
      break;
    }
    const bool is_leaf = is_undefined || num_accepted == links_.max_depth();
    int32_t child = is_leaf ? -1 : nodes_[node].first_child;
    const int32_t from = nodes_[node].draft_row;
    const bool sampled = kHasDrafts && child >= 0 && from >= 0;
    if (!read(node, sampled)) {
      state_.status |= kInvalidRow;
      break;
    }
    if constexpr (kHasDrafts) {
      if (sampled && (from >= links_.num_draft_rows() || !read_draft(from))) {
        state_.status |= from < links_.num_draft_rows() ? kInvalidDraft : kInvalidTree;
        child = -1;
      }
    }
    if (child >= 0) {
      const double omega = links_.omega(num_accepted);
      slack_ = batch_.residual == ResidualRule::optimal ? slack_of(omega) : 0.0;
      if (!sampled) {
        try_point_masses(node, child, omega);
      } else if constexpr (kHasDrafts) {
        try_samples(node, child, omega);
      }
    }
    draws = state_.next < 0;
    if (draws) {
      draw(sampled);
      break;
    }
    node = state_.next;
    if (is_first_thread() && links_.accepted_nodes()) links_.accepted_nodes()[num_accepted] = node;
    ++num_accepted;
  }
  if (team_.thread() >= kWarp) return;
  const double tv_excess = this->tv_excess();
  if (lane() != 0) return;
  if (!draws) batch_.next_token[b_] = next_token;
  write(batch_, b_, num_accepted, tv_excess, state_.status);
}

// A greedy request: the nodes in order. Each accepted node verifies the chain of its children. At last the row at the
// end of the path is read.
template <bool kHasDrafts, class Rows, class Links>
__device__ void Verifier<kHasDrafts, Rows, Links>::verify_greedy() {
  const int64_t N = links_.num_nodes(), max_depth = links_.max_depth();
  int64_t next_token = 0;
  int32_t best = 0;
  for (int32_t n = 0; n <= N; ++n) {
    const bool at_end = n == N;
    if (!at_end && nodes_[n].depth > nodes_[best].depth) best = n;
    if (!at_end && (nodes_[n].depth < 0 || nodes_[n].depth >= max_depth || nodes_[n].first_child < 0)) continue;
    if (at_end && ends_in_bonus(best)) {
      next_token = bonus();
      break;
    }
    uint32_t argmax;
    if (!read(at_end ? best : n, false, &argmax)) {
      if (at_end) state_.status |= kInvalidRow;
      continue;
    }
    if (at_end) {
      next_token = argmax;
      break;
    }
    if (num_considered_ > 0 || warp() == 0) try_greedily(n, argmax);
    __syncthreads();
  }
  if (!is_first_thread()) return;
  const int32_t num_accepted = nodes_[best].depth;
  batch_.next_token[b_] = next_token;
  write(batch_, b_, num_accepted, nodes_[best].num_non_argmax, state_.status);
  int32_t* const accepted_nodes = links_.accepted_nodes();
  for (int32_t d = num_accepted; d > 0 && accepted_nodes; --d) {
    accepted_nodes[d - 1] = best;
    best = nodes_[best].parent;
  }
}

// Verifies request b and writes its outputs. The block's nodes are `nodes`, or where the layout says if that is null;
// node_at(n) is the n-th.
template <bool kHasDrafts, class Rows, class Links, class NodeAt>
__device__ void verify(Team& team, const VerifyParams& batch, int64_t b, Rows& rows, const Links& links, NodeAt node_at,
                       bool greedy, const Layout& layout, char* shared, Node* nodes = nullptr) {
  char* const scratch = batch.scratch + blockIdx.x * layout.scratch;
  if (!nodes) nodes = reinterpret_cast<Node*>((layout.nodes.shared ? shared : scratch) + layout.nodes.offset);
  for (int64_t n = threadIdx.x; n < links.num_nodes(); n += blockDim.x) nodes[n] = node_at(n);
  if (links.accepted_nodes() && team.rank() == 0) {
    for (int64_t d = threadIdx.x; d < links.max_depth(); d += blockDim.x) links.accepted_nodes()[d] = -1;
  }
  __syncthreads();
  Verifier<kHasDrafts, Rows, Links> verifier(batch, b, rows, links, team, nodes, layout, shared, scratch);
  if (greedy) {
    verifier.verify_greedy();
  } else {
    verifier.verify_sampled();
  }
  if (team.size() > 1) team.sync();  // others may still read this block's shared memory
}

// The same of a request of a batch of trees.
template <bool kHasDrafts, class Rows>
__device__ void verify(Team& team, const VerifyParams& batch, int64_t b, Rows& rows, bool greedy, const Layout& layout,
                       char* shared) {
  const auto node_at = [&](int64_t n) {
    const int64_t i = b * batch.N + n;
    return Node{batch.tokens[i],
                batch.first_child[i],
                batch.next_sibling[i],
                batch.draft_row ? batch.draft_row[i] : -1,
                batch.uniforms[i],
                n == 0 ? 0 : -1,
                0,
                0,
                {}};
  };
  verify<kHasDrafts>(team, batch, b, rows, Tree{batch, b}, node_at, greedy, layout, shared);
}

// Rows of probabilities in memory.
struct ProbRows {
  const float* probs;
  int64_t V;
  const float* row = nullptr;  // the current one

  template <class F>
  __device__ bool read(int32_t node, bool in_stride, uint32_t begin, uint32_t end, F f) {
    row = probs + node * V;
    if (in_stride) {
      reread(begin, end, f);
    } else {
      for_each_entry(row + begin, end - begin, lane(), kWarp,
                     [&](int64_t i, float p) { f(begin + static_cast<uint32_t>(i), p); });
    }
    return true;
  }
  template <class F>
  __device__ void reread(uint32_t begin, uint32_t end, F f) const {
    for_each_in_stride(row, begin, end, f);
  }
  __device__ float operator()(uint32_t v) const { return row[v]; }
  __device__ bool allows(uint32_t) const { return true; }
};

}  // namespace
}  // namespace specvis
