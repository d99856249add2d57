// tree_mask on CUDA: a thread finds up to 32 columns of a node at once, as bits. One block per node writes entries of a
// byte or more, 16 bytes at a time where they are aligned. Bits are written by one thread for each 1 to 8 bytes.
#include "../shared/params.h"
#include "block.cuh"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most

// The columns that node n of request b sees.
class View {
 public:
  __device__ View(const TreeMask& batch, int64_t b, int64_t n)
      : words_(batch.ancestors + (b * batch.N + n) * ((batch.N + 63) / 64)), n_(n), N_(batch.N),
        length_(batch.lengths ? batch.lengths[b] : 0), start_(length_), first_word_(0), used_(false) {
    if (batch.start) start_ = max(-N_, min(batch.start[b], batch.columns));  // further away nothing changes
    first_word_ = read(0);
    for (int64_t w = 0; w * 64 < N_; ++w) used_ |= word(w) != 0;
  }

  // Bit i says whether it sees column + i, of 32 columns.
  __device__ unsigned sees(int64_t column) const {
    const int64_t num_cached = length_ - column, node = column - start_;
    const unsigned cached = !used_ || num_cached <= 0 ? 0 : num_cached < 32 ? (1u << num_cached) - 1 : ~0u;
    if (node <= -32 || node >= N_) return cached;
    if (!used_) return n_ >= node && n_ - node < 32 ? 1u << (n_ - node) : 0;
    const int64_t w = node >> 6, shift = node & 63;
    const uint64_t behind = shift > 32 ? word(w + 1) << (64 - shift) : 0;
    return cached | static_cast<unsigned>(word(w) >> shift | behind);
  }

 private:
  __device__ uint64_t word(int64_t w) const { return w < 0 || w * 64 >= N_ ? 0 : w == 0 ? first_word_ : read(w); }
  __device__ uint64_t read(int64_t w) const {
    const int64_t num_bits = N_ - w * 64;  // bits beyond the last node do not count
    return static_cast<uint64_t>(words_[w]) & (num_bits < 64 ? (uint64_t{1} << num_bits) - 1 : ~uint64_t{0});
  }

  const int64_t* words_;
  int64_t n_, N_, length_, start_;
  uint64_t first_word_;  // the only one, where there are few nodes
  bool used_;
};

template <class T>
__global__ void __launch_bounds__(kThreads) dense_kernel(TreeMask batch, T hidden, T visible) {
  constexpr int kEntries = 16 / sizeof(T);
  const int64_t row = blockIdx.x, columns = batch.columns;
  const View view(batch, row / batch.N, row % batch.N);
  T* mask = static_cast<T*>(batch.mask) + row * columns;
  const int64_t ahead = (16 - reinterpret_cast<uintptr_t>(mask) % 16) % 16 / sizeof(T);
  const int64_t head = ahead < columns ? ahead : columns;
  const int64_t tail = head + (columns - head) / kEntries * kEntries;
#pragma unroll 1
  for (int64_t c = head + int64_t{threadIdx.x} * kEntries; c < tail; c += int64_t{blockDim.x} * kEntries) {
    const unsigned seen = view.sees(c);
    unsigned words[4] = {};
#pragma unroll
    for (int i = 0; i < kEntries; ++i) {
      words[i * 4 / kEntries] |= static_cast<unsigned>(seen >> i & 1 ? visible : hidden) << i * 8 * sizeof(T) % 32;
    }
    *reinterpret_cast<uint4*>(mask + c) = make_uint4(words[0], words[1], words[2], words[3]);
  }
  const auto write = [&](int64_t c) { mask[c] = view.sees(c) & 1 ? visible : hidden; };
  if (threadIdx.x < head) write(threadIdx.x);
  if (tail + threadIdx.x < columns) write(tail + threadIdx.x);
}

// How many units a request has; its mask begins with a whole one.
template <class Unit>
__global__ void __launch_bounds__(kThreads) packed_kernel(TreeMask batch, int64_t units, int64_t blocks) {
  constexpr int kBits = 8 * sizeof(Unit);
  const int64_t b = blockIdx.x / blocks, entries = batch.N * batch.row_bits;
  const int64_t i = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  if (i >= units) return;
  int64_t n = i * kBits / batch.row_bits, column = i * kBits % batch.row_bits;
  View view(batch, b, n);
  Unit bits = 0;
  for (int64_t bit = 0; bit < kBits && i * kBits + bit < entries;) {
    if (column == batch.row_bits) {
      column = 0;
      view = View(batch, b, ++n);
    }
    const int64_t count = min(int64_t{32}, min(kBits - bit, batch.row_bits - column));
    const int64_t num_seen = min(count, batch.columns - column);  // the others are padding
    const unsigned seen = num_seen <= 0 ? 0 : view.sees(column) & (~0u >> (32 - num_seen));
    bits |= static_cast<Unit>(static_cast<Unit>(seen) << bit);
    bit += count;
    column += count;
  }
  static_cast<Unit*>(batch.mask)[b * units + i] = bits;
}

template <class T>
cudaError_t dense(const TreeMask& batch, T hidden, T visible, cudaStream_t stream) {
  LAUNCH(dense_kernel<T>, blocks_for(batch.B * batch.N), threads_for(batch.columns * sizeof(T) / 16, kThreads), 0,
         stream, batch, hidden, visible);
  return cudaGetLastError();
}

template <class Unit>
cudaError_t packed(const TreeMask& batch, int64_t bytes, cudaStream_t stream) {
  const int64_t units = bytes / static_cast<int64_t>(sizeof(Unit));
  const unsigned threads = threads_for(units, kThreads);
  const int64_t blocks = (units + threads - 1) / threads;
  LAUNCH(packed_kernel<Unit>, blocks_for(batch.B * blocks), threads, 0, stream, batch, units, blocks);
  return cudaGetLastError();
}

}  // namespace

cudaError_t tree_mask_cuda(const TreeMask& batch, cudaStream_t stream) {
  if (batch.B == 0) return cudaSuccess;
  switch (batch.form) {  // the bits of -inf and of 0
    case Form::bytes: return dense<uint8_t>(batch, 0, 1, stream);
    case Form::float32: return dense<uint32_t>(batch, 0xff800000u, 0, stream);
    case Form::float16: return dense<uint16_t>(batch, 0xfc00, 0, stream);
    case Form::bfloat16: return dense<uint16_t>(batch, 0xff80, 0, stream);
    case Form::bits: break;
  }
  const int64_t bytes = (batch.N * batch.row_bits + 7) / 8;  // how many a request has
  if (bytes % 8 == 0) return packed<uint64_t>(batch, bytes, stream);
  if (bytes % 4 == 0) return packed<uint32_t>(batch, bytes, stream);
  if (bytes % 2 == 0) return packed<uint16_t>(batch, bytes, stream);
  return packed<uint8_t>(batch, bytes, stream);
}

}  // namespace specvis
