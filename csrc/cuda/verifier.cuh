// The rule of verification for one request: a team of threads tries the children of each node on the accepted path.
//
// A row is read once, by all blocks of the team. Its residual is stored in one of two ways. For point masses it is the
// row itself, plus a bit for each id that has lost its mass or a part of it. For draft rows it is a full row of masses,
// split over the blocks of the team, because a rejection changes every entry. All threads decide about a child alike;
// where no neighbor is looked at, one warp of each block tries all children of a node that are point masses.
#pragma once
#include "kept_neighbors.cuh"
#include "verify_state.cuh"

namespace specvis {
namespace {

constexpr int kRowLoads = 8, kMassLoads = 4;  // loads in flight per thread

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

// One request. Links is Tree, or a class with the same members. Every thread has the same object and calls its methods
// together with the others.
template <bool kHasDrafts, class Links>
class Verifier {
 public:
  __device__ Verifier(const VerifyParams& batch, int64_t b, const Links& links, Team& team, Node* nodes,
                      const Layout& layout, char* shared, char* scratch)
      : batch_(batch), b_(b), V_(static_cast<uint32_t>(batch.V)), links_(links), team_(team), block_(team.alone()),
        nodes_(nodes), bits_(layout.bits.in<unsigned>(shared, scratch)),
        masses_(shared, scratch, layout, layout.masses, team), draft_(shared, scratch, layout, layout.draft, team),
        share_(layout.share), slices_in_scratch_(layout.scratch > 0) {
    begin_ = min((team.rank() * warps() + warp()) * share_, V_);
    end_ = min(begin_ + share_, V_);
    const int64_t k = batch.neighbors.k();
    delta_ = batch.delta ? batch.delta[b] : -1.0f;
    num_considered_ = static_cast<uint32_t>(k > 0 ? k - (batch.residual == ResidualRule::released) : 0);
  }

  __device__ void verify_sampled();
  __device__ void verify_greedy();

 private:
  // How far verification has come. Every thread has the same values.
  struct State {
    int64_t total;                // the residual's mass
    int32_t first, num_rejected;  // the first rejected sibling, and how many were rejected
    int32_t next;                 // the child that was accepted, or -1
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

  // The sum of which each thread has a part, and said whether that is valid; every thread may then read all slices.
  // `of_warps` becomes what each warp has, after the next barrier.
  __device__ Total sum_of_slices(int64_t sum, bool valid, int64_t* of_warps = nullptr) {
    if (slices_in_scratch_) team_.sync();
    return team_.total(sum, valid, of_warps);
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
    uint64_t best = 0;          // the mass as a float, and an id that is larger where the id is lower
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
    node_ = node;
    row_ = links_.target_probs() + node * batch_.V;
    if (is_dense) {
      for_each_in_stride(row_, begin_, end_, use);
    } else {
      for_each_entry(row_ + begin_, end_ - begin_, lane(), kWarp,
                     [&](int64_t i, float p) { use(begin_ + static_cast<uint32_t>(i), p); });
    }
    const Total total = sum_of_slices(sum, entries_valid, chunks());
    state_.total = total.mass;
    state_.first = state_.next = -1;
    state_.num_rejected = 0;
    state_.is_uniform = false;
    if (argmax) *argmax = 0xffffffffu - static_cast<uint32_t>(team_.max(best));
    return total.valid;
  }

  // An entry of the row, or of the distribution in its place.
  __device__ int64_t row_mass(uint32_t v) const {
    return state_.is_uniform ? uniform_mass(V_) : to_fixed_point(row_[v]);
  }
  // An entry of the residual where children were point masses.
  __device__ int64_t mass(uint32_t v) const {
    int64_t mass = row_mass(v);
    if (!(bits_[v / kWarp] >> (v % kWarp) & 1)) return mass;
    if (slack_ == 0) return 0;
    int32_t child = state_.first;
#pragma unroll 1
    for (int32_t i = 0; i < state_.num_rejected; ++i, child = nodes_[child].next_sibling) {
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
  // The neighbors of x that its cutoff keeps, by all threads of the block. All have read the row when it returns.
  template <class Mass>
  __device__ NeighborPrefix kept_neighbors(uint32_t x, int64_t token_mass, const Mass& mass) {
    return neighbor_prefix(block_, mass, V_, batch_.neighbors, num_considered_, x,
                           Budget(batch_.cutoff, delta_, token_mass, state_.total));
  }
  // Calls f(id) for those neighbors of x that are treated as x is rejected, each in one thread of the block.
  template <class F>
  __device__ void for_treated_neighbors(uint32_t x, int64_t num_kept, F f) const {
    if (batch_.residual == ResidualRule::optimal || num_kept == 0) return;
    const int64_t count = batch_.residual == ResidualRule::released ? batch_.neighbors.k() : num_kept;
#pragma unroll 1
    for (int64_t j = threadIdx.x; j < count; j += blockDim.x) {
      const int64_t id = batch_.neighbors(x, j);
      if (id >= 0 && id < V_) f(static_cast<uint32_t>(id));
    }
  }
  __device__ bool considers_neighbors(uint32_t x) const {
    return num_considered_ > 0 && delta_ >= 0 && batch_.neighbors.has(x) && links_.allows(node_, x);
  }

  __device__ bool accepts(const Candidate& candidate, int32_t child, bool is_first) {
    if (threadIdx.x == 0) {
      nodes_[state_.num_trials].trial = {candidate.numerator(false), candidate.numerator(true), candidate.denominator(),
                                         is_first};
    }
    return candidate.accepts(nodes_[child].uniform);
  }

  // Tries a child that is a point mass at x, by all threads of the block.
  __device__ bool try_with_neighbors(int32_t child, uint32_t x, double omega, bool is_first) {
    const int64_t token_mass = mass(x);
    NeighborPrefix kept = {0, 0};
    if (considers_neighbors(x)) {
      kept = kept_neighbors(x, token_mass, [this](uint32_t v) { return mass(v); });
    } else {
      __syncthreads();  // every thread has read the mass
    }
    if (accepts({false, token_mass, token_mass + kept.mass, state_.total, 0, 0, omega}, child, is_first)) return true;
    int64_t cleared = threadIdx.x == 0 ? clear(x) : 0;
    for_treated_neighbors(x, kept.num_kept, [&](uint32_t id) { cleared += clear(id); });
    state_.total -= block_.sum(cleared);
    return false;
  }

  // Tries the children by the lanes of one warp, without neighbors.
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
      state_.first = child;
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
        child = nodes_[child].next_sibling;
        ++state_.num_rejected;
        if (state_.total == 0) {
          state_.status |= kEmptyResidual;
          state_.is_uniform = batch_.empty == Empty::uniform;
          state_.total = state_.is_uniform ? int64_t{V_} * uniform_mass(V_) : row_total;
          state_.first = child;
          state_.num_rejected = 0;
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
    const Total total = sum_of_slices(sum, entries_valid);
    draft_total_ = total.mass;
    return total.valid;
  }

  // Tries the children of a node, from `child` on, which were drawn from the draft's row.
  __device__ void try_samples(int32_t node, int32_t child, double omega) {
    bool is_first = true;
    for (int32_t previous = node; child >= 0; previous = child, child = nodes_[child].next_sibling) {
      if (!is_valid(child, previous)) {
        state_.status |= kInvalidTree;
        return;
      }
      const uint32_t x = static_cast<uint32_t>(nodes_[child].token);
      const int64_t draft_mass = to_fixed_point(draft_(x));
      if (draft_mass == 0) {  // not drawn from the row; if that is used up, it is known to be none
        if (draft_total_ > 0) state_.status |= kInvalidDraft;
        continue;
      }
      const int64_t token_mass = static_cast<int64_t>(masses_(x));
      NeighborPrefix kept = {0, 0};
      if (considers_neighbors(x)) {
        kept = kept_neighbors(x, token_mass, [this](uint32_t v) { return static_cast<int64_t>(masses_(v)); });
      }
      const int64_t relaxed_mass = token_mass + kept.mass;
      const bool is_accepted =
          accepts({true, token_mass, relaxed_mass, state_.total, draft_mass, draft_total_, omega}, child, is_first);
      if (!is_accepted) {
        for_treated_neighbors(x, kept.num_kept, [this](uint32_t id) {
          if (is_own(id)) atomicOr(bits_ + id / kWarp, 1u << (id % kWarp));
        });
      }
      __syncthreads();      // this block's bits may be in scratch memory
      team_.sync_shared();  // every block has read the masses
      is_first = false;
      ++state_.num_trials;
      if (is_accepted) {
        state_.next = child;
        return;
      }
      subtract(x, batch_.residual == ResidualRule::relaxed ? relaxed_mass : token_mass);
      draft_total_ -= draft_mass;
      if (state_.total == 0) {
        state_.status |= kEmptyResidual;
        refill_masses();
      }
    }
  }

  // Subtracts the draft after a sampled candidate x was rejected, and takes x out of the draft. Its treated neighbors,
  // which have a bit until then, have no mass by the relaxed rule, which moves it to x: that has `token_mass` then. By
  // the released one nothing is taken from them.
  __device__ void subtract(uint32_t x, int64_t token_mass) {
    const bool moves = batch_.residual == ResidualRule::relaxed;
    const double unit = 1 / static_cast<double>(state_.total), draft_unit = 1 / static_cast<double>(draft_total_);
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
        double mass = v == x ? static_cast<double>(token_mass) : moves && is_treated ? 0.0 : masses[j];
        const float draft_mass = is_treated && !moves ? 0.0f : truncf(draft_probs[j] * static_cast<float>(kFixedOne));
        if (mass > 0) mass = residual_mass(mass, unit, static_cast<double>(draft_mass), draft_unit, slack_);
        if (v == x) {  // its mass and its neighbors' may be the whole row's
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
    state_.total = sum_of_slices(static_cast<int64_t>(sum) + of_token, true, chunks()).mass;
  }

  // What takes the place of masses of which nothing is left.
  __device__ void refill_masses() {
    int64_t sum = 0;
    const auto put = [&](uint32_t v, int64_t mass) {
      masses_.here(v) = static_cast<double>(mass);
      sum += mass;
    };
    if (batch_.empty == Empty::target) {
      for_each_in_stride(row_, begin_, end_, [&](uint32_t v, float p) { put(v, to_fixed_point(p)); });
    } else {
      for (uint32_t v = begin_ + lane(); v < end_; v += kWarp) put(v, uniform_mass(V_));
    }
    state_.total = sum_of_slices(sum, true, chunks()).mass;
  }

  // Inverse CDF in vocabulary order: writes the first id at which the running sum of the residual exceeds a threshold.
  // The masses of the warps' ids tell which warp's it is among; the warps of its block share these. mass(v) is an
  // entry.
  template <class Mass>
  __device__ void draw(bool is_dense, const Mass& mass) {
#pragma unroll 1
    for (unsigned w = warp(); !is_dense && w < num_chunks(); w += warps()) {
      const uint32_t begin = min(w * share_, V_), end = min(begin + share_, V_);
      int64_t change = 0;  // how the chunk's mass has changed since the row was read
      if (state_.is_uniform && lane() == 0) change = (end - begin) * uniform_mass(V_) - chunks()[w];
      if (state_.num_rejected > 0) {
#pragma unroll 1
        for (uint32_t v = begin + lane(); v < end; v += kWarp) {
          if (bits_[v / kWarp] >> lane() & 1) change += mass(v) - row_mass(v);
        }
      }
      change = warp_sum(change);
      if (lane() == 0) chunks()[w] += change;
    }
    __syncthreads();
    const int64_t limit = draw_threshold(nodes_[0].uniform, state_.total) + 1;
    int64_t before = 0;
    const unsigned chunk = first_reaching(num_chunks(), [](unsigned w) { return chunks()[w]; }, limit, &before);
    if (chunk / warps() != team_.rank()) return;
    const uint32_t end = min((chunk + 1) * share_, V_);
    const uint32_t part = (share_ / kWarp + warps() - 1) / warps() * kWarp;  // how many ids a warp takes
    const uint32_t first = min(chunk * share_ + warp() * part, end), last = min(first + part, end);
    int64_t sum = 0;
#pragma unroll 1
    for (uint32_t v = first + lane(); v < last; v += kWarp) sum += mass(v);
    const uint64_t* const sums = block_.exchange(warp_sum(sum));
    const unsigned own =
        first_reaching(warps(), [=](unsigned w) { return static_cast<int64_t>(sums[w]); }, limit, &before);
    if (own != warp()) return;
    const unsigned id = first_reaching(last - first, [&](unsigned i) { return mass(first + i); }, limit, &before);
    if (lane() == 0) batch_.next_token[b_] = first + id;
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
    __syncwarp();  // thread 0 has written the trials
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
      NeighborPrefix kept = {0, 0};
      if (considers_neighbors(x)) {
        kept = kept_neighbors(x, token_mass, [this](uint32_t v) { return row_mass(v); });
      }
      if (threadIdx.x != 0 || !is_argmax(x, token_mass + kept.mass, argmax, max_mass)) continue;
      nodes_[child].depth = nodes_[n].depth + 1;
      nodes_[child].parent = n;
      nodes_[child].num_non_argmax = nodes_[n].num_non_argmax + (x != argmax);
    }
  }

  const VerifyParams& batch_;
  int64_t b_;
  uint32_t V_;
  const Links& links_;
  Team& team_;
  Team block_;
  Node* nodes_;
  unsigned* bits_;         // one for each id
  Slices<double> masses_;  // if kHasDrafts
  Slices<float> draft_;
  uint32_t share_, begin_, end_;  // the ids of a warp, and this warp's
  uint32_t num_considered_;       // how many neighbors of a token the cutoff looks at; 0 without neighbors
  float delta_;
  double slack_ = 0;         // for the node's children
  int64_t draft_total_ = 0;  // the mass that remains of the draft's row
  bool slices_in_scratch_;
  int32_t node_ = 0;
  const float* row_ = nullptr;  // the target's, of this node
  State state_ = {};
};

}  // namespace
}  // namespace specvis
