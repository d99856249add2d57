// tree_mask on CUDA: one block per node if each entry has a byte or more, one thread per byte if entries are bits.
#include "block.cuh"
#include "params.h"

namespace specvis {
namespace {

constexpr int kThreads = 256;  // at most

// The columns that node n of request b sees.
class View {
 public:
  __device__ View(const TreeMask& batch, int64_t b, int64_t n)
      : words_(batch.ancestors + (b * batch.N + n) * ((batch.N + 63) / 64)), n_(n), N_(batch.N),
        length_(batch.lengths ? batch.lengths[b] : 0), start_(length_), used_(false) {
    if (batch.start) start_ = max(-N_, min(batch.start[b], batch.columns));  // further away nothing changes
    for (int64_t w = 0; w * 64 < N_; ++w) {
      const int64_t num_bits = N_ - w * 64;  // bits beyond the last node do not count
      used_ |= (static_cast<uint64_t>(words_[w]) << (num_bits < 64 ? 64 - num_bits : 0)) != 0;
    }
  }
  __device__ bool sees(int64_t column) const {
    const int64_t node = column - start_;
    if (used_ && column < length_) return true;
    if (node < 0 || node >= N_) return false;
    return used_ ? words_[node / 64] >> node % 64 & 1 : node == n_;
  }

 private:
  const int64_t* words_;
  int64_t n_, N_, length_, start_;
  bool used_;
};

template <class T>
__global__ void __launch_bounds__(kThreads) dense_kernel(TreeMask batch, T hidden, T visible) {
  const int64_t row = blockIdx.x;
  const View view(batch, row / batch.N, row % batch.N);
  T* mask = static_cast<T*>(batch.mask) + row * batch.columns;
  for (int64_t c = threadIdx.x; c < batch.columns; c += blockDim.x) mask[c] = view.sees(c) ? visible : hidden;
}

__global__ void __launch_bounds__(kThreads) packed_kernel(TreeMask batch, int64_t bytes, int64_t blocks) {
  const int64_t b = blockIdx.x / blocks, entries = batch.N * batch.row_bits;
  const int64_t i = blockIdx.x % blocks * blockDim.x + threadIdx.x;
  if (i >= bytes) return;
  int64_t n = i * 8 / batch.row_bits, column = i * 8 % batch.row_bits;
  View view(batch, b, n);
  unsigned byte = 0;
  for (int bit = 0; bit < 8 && i * 8 + bit < entries; ++bit) {
    if (column == batch.row_bits) {
      column = 0;
      view = View(batch, b, ++n);
    }
    byte |= static_cast<unsigned>(column < batch.columns && view.sees(column)) << bit;
    ++column;
  }
  static_cast<uint8_t*>(batch.mask)[b * bytes + i] = static_cast<uint8_t>(byte);
}

template <class T>
cudaError_t dense(const TreeMask& batch, T hidden, T visible, cudaStream_t stream) {
  LAUNCH(dense_kernel<T>, static_cast<unsigned>(batch.B * batch.N), threads_for(batch.columns, kThreads), 0, stream,
         batch, hidden, visible);
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
  const int64_t bytes = (batch.N * batch.row_bits + 7) / 8;
  const unsigned threads = threads_for(bytes, kThreads);
  const int64_t blocks = (bytes + threads - 1) / threads;
  LAUNCH(packed_kernel, static_cast<unsigned>(batch.B * blocks), threads, 0, stream, batch, bytes, blocks);
  return cudaGetLastError();
}

}  // namespace specvis
