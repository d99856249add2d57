// What all bindings share. A binding makes an op of torch of a kernel: it checks the arguments, allocates the results,
// fills the op's struct and runs the kernel. The files here are compiled three times: for the CPU, for CUDA
// (SPECVIS_CUDA), and for the CUDA kernels that tests/cuda_on_cpu runs on CPU tensors (SPECVIS_EMULATED too). Those in
// cpu/ are of ops without a CUDA kernel, and are compiled for the CPU alone. Nothing of libtorch_cuda is linked, so
// that one library loads beside any build of torch.
#pragma once
#include <torch/csrc/stable/library.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>

#include "check.h"

#if defined(SPECVIS_EMULATED)
#define SPECVIS_NAMESPACE specvis_kernels_emulated
#elif !defined(SPECVIS_NAMESPACE)
#define SPECVIS_NAMESPACE specvis_kernels  // in torch.ops, as the Python package is named
#endif
#if defined(SPECVIS_CUDA) && !defined(SPECVIS_EMULATED)
#define DEVICE CUDA
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#else
#define DEVICE CPU
#endif

#ifdef SPECVIS_CUDA
#define RUN(op, arguments, batch)                           \
  arguments.run([&] {                                       \
    const Device device(arguments.first());                 \
    check(#op, specvis::op##_cuda(batch, device.stream())); \
  })
#define RUN_WITH_SCRATCH(op, arguments, batch)                      \
  arguments.run([&] {                                               \
    const Device device(arguments.first());                         \
    int64_t bytes = 0;                                              \
    check(#op, specvis::op##_scratch(batch, &bytes));               \
    const Tensor scratch = arguments.make({bytes}, &batch.scratch); \
    check(#op, specvis::op##_cuda(batch, device.stream()));         \
  })
#else
#define RUN(op, arguments, batch) arguments.run([&] { specvis::op##_cpu(batch); })
#define RUN_WITH_SCRATCH RUN
#endif

// Registers a function under its name.
#define OP(name) m.impl(#name, TORCH_BOX(&name))

namespace specvis {

using MaybeTensor = std::optional<Tensor>;
template <size_t n>
using Tensors = decltype(std::tuple_cat(std::array<Tensor, n>()));

#ifdef SPECVIS_CUDA
// As long as this object exists, the tensor's device is the current one. stream() is PyTorch's current stream there.
class Device {
#ifdef SPECVIS_EMULATED
 public:
  explicit Device(const Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
#else
 public:
  explicit Device(const Tensor& tensor) : index_(tensor.get_device_index()), guard_(index_) {}
  cudaStream_t stream() const {
    using Get = int32_t (*)(int32_t, void**);
    static const Get get = [] {
      void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      return reinterpret_cast<Get>(dlsym(library ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream"));
    }();
    void* stream = nullptr;
    STD_TORCH_CHECK(get, "specvis_kernels: this build of torch has no CUDA streams");
    STD_TORCH_CHECK(!get(index_, &stream), "specvis_kernels: no current stream on CUDA device ", index_);
    return static_cast<cudaStream_t>(stream);
  }

 private:
  torch::stable::DeviceIndex index_;
  torch::stable::accelerator::DeviceGuard guard_;
#endif
};
#endif

// Rows of logits. `n` is the letter of how many rows a request has.
inline LogitRows read_rows(Arguments& a, char n, const Tensor& logits, const MaybeTensor& uncond,
                           const Tensor& guidance, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                           const MaybeTensor& min_p, const MaybeTensor& id_range, int64_t first_id, int64_t last_id,
                           const std::string& filters) {
  const char sizes[] = {'B', n, 'V', 0}, range_sizes[] = {'B', n, '2', 0};
  LogitRows rows = {};
  rows.type = a.read_floats("logits", logits, sizes, &rows.logits);
  if (uncond) rows.uncond = a.read("uncond", *uncond, sizes, logits.scalar_type());
  a.read("guidance", guidance, "B", &rows.guidance);
  a.read("temperature", temperature, "B", &rows.temperature);
  a.read("top_k", top_k, "B", &rows.top_k);
  a.read("top_p", top_p, "B", &rows.top_p);
  a.read("min_p", min_p, "B", &rows.min_p);
  a.read("id_range", id_range, range_sizes, &rows.id_range);
  rows.top_p_first = a.name<int>("filters", filters, {"k_then_p", "p_then_k"});
  a.sizes(sizes, rows.B, rows.N, rows.V);
  a.require(0 <= first_id && first_id < last_id && last_id <= rows.V, "first_id and last_id must be a range of ids");
  rows.first_id = first_id;
  rows.last_id = last_id;
  return rows;
}

// Uniform numbers of these sizes, or else seeds and positions.
template <class Batch>
void read_randomness(Arguments& a, Batch& batch, const MaybeTensor& uniforms, const char* sizes,
                     const MaybeTensor& seeds, const MaybeTensor& positions, const char* position_sizes) {
  a.require(uniforms.has_value() != seeds.has_value(), "exactly one of uniforms and seeds must be given");
  a.require(seeds.has_value() == positions.has_value(), "seeds and positions must be given together");
  a.read("uniforms", uniforms, sizes, &batch.uniforms);
  a.read("seeds", seeds, "B", &batch.seeds);
  a.read("positions", positions, position_sizes, &batch.positions);
}

}  // namespace specvis
