// A request's tree, and where a team keeps its nodes and the residual of the current row.
#pragma once
#include "../shared/params.h"
#include "team.cuh"

namespace specvis {
namespace {

constexpr int kVerifyThreads = 512;  // at most
constexpr int64_t kWideRow = 32768;  // ids from which on one block takes too long to read a row

// What a child that was tried adds to tv_excess: numerators and denominator of its probabilities of being accepted.
struct Trial {
  double relaxed, strict, whole;
  bool is_first;  // whether it is the first of the node's children
};

struct Node {
  int64_t token;
  int32_t first_child, next_sibling, draft_row;
  float uniform;
  int32_t depth, parent, num_non_argmax;  // set where a greedy request accepts the node; until then, depth is -1
  Trial trial;                            // the request's n-th trial is in its n-th node
};

// Where a block's arrays are: each is in shared memory if it still fits there, else in the block's part of scratch.
// Each warp of a team owns `share` ids that follow each other, a multiple of 32.
struct Layout {
  struct Span {
    bool is_shared;
    int64_t offset;  // bytes

    template <class T>
    __device__ T* in(char* shared, char* scratch) const {
      return reinterpret_cast<T*>((is_shared ? shared : scratch) + offset);
    }
  };
  Span nodes, bits, masses, draft;
  int64_t shared = 0, scratch = 0;  // bytes of each in all
  uint32_t share;
  unsigned cluster, threads;

  Layout(const VerifyParams& batch, const Device& device)
      : cluster(batch.draft_probs || batch.V > kWideRow ? cluster_for(device, batch.B) : 1),
        threads(threads_for(batch.V, kVerifyThreads)) {
    const int64_t warps = threads / kWarp, words = (batch.V + kWarp - 1) / kWarp;
    share = static_cast<uint32_t>((words + warps * cluster - 1) / (warps * cluster) * kWarp);
    const auto reserve = [&](int64_t bytes) {
      bytes = (bytes + 15) / 16 * 16;
      const bool fits = shared + bytes <= device.shared;
      int64_t& end = fits ? shared : scratch;
      end += bytes;
      return Span{fits, end - bytes};
    };
    const int64_t ids = warps * share;
    nodes = reserve(batch.N * sizeof(Node));
    bits = reserve(words * sizeof(unsigned));
    masses = reserve(batch.draft_probs ? ids * sizeof(double) : 0);
    draft = reserve(batch.draft_probs ? ids * sizeof(float) : 0);
  }
  HOST_DEVICE int64_t scratch_of(int64_t B) const { return B * cluster * scratch; }  // bytes for B requests
};

// An array with an entry for each id. Every block of a team holds the entries of its own ids.
template <class T>
class Slices {
 public:
  __device__ Slices(char* shared, char* scratch, const Layout& layout, const Layout::Span& span, const Team& team)
      : own_(span.in<T>(shared, scratch)), layout_(layout), is_shared_(span.is_shared), team_(team) {}

  __device__ T& here(uint32_t v) const { return own_[v - team_.rank() * ids()]; }  // the entry of an id of this block
  __device__ T operator()(uint32_t v) const {                                      // the entry of any id
    if (team_.size() == 1) return own_[v];
    const unsigned rank = v / ids();
    if (is_shared_) return in_block(own_, rank)[v - rank * ids()];
    const int64_t distance = (int64_t{rank} - team_.rank()) * layout_.scratch;
    return reinterpret_cast<T*>(reinterpret_cast<char*>(own_) + distance)[v - rank * ids()];
  }

 private:
  __device__ uint32_t ids() const { return layout_.share * warps(); }  // how many a block owns

  T* own_;
  const Layout& layout_;
  bool is_shared_;
  const Team& team_;
};

// Writes the outputs of request b, apart from accepted_nodes and next_token.
__device__ inline void write(const VerifyParams& batch, int64_t b, int32_t num_accepted, double tv_excess,
                             int32_t status) {
  batch.num_accepted[b] = num_accepted;
  batch.tv_excess[b] = static_cast<float>(tv_excess);
  batch.status[b] = status;
}

}  // namespace
}  // namespace specvis
