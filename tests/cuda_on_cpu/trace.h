// The calls of the emulation to trace.cpp, which is linked where kernels are to be traced (-DCUDA_ON_CPU_TRACE). The
// threads' loads and stores arrive there by themselves: g++ -fsanitize=thread calls it for each.
#pragma once
#include <cstdint>

namespace cuda_on_cpu::trace {

#ifdef CUDA_ON_CPU_TRACE
#define CUDA_ON_CPU_TRACED(declaration) declaration;
#define CUDA_ON_CPU_CALLED __attribute__((noinline))  // so the return address says which instruction called it
#else
#define CUDA_ON_CPU_CALLED
#define CUDA_ON_CPU_TRACED(declaration) \
  inline declaration {}
#endif
CUDA_ON_CPU_TRACED(void launch_begins(const char*))
CUDA_ON_CPU_TRACED(void launch_ends())
CUDA_ON_CPU_TRACED(void cluster_begins())
CUDA_ON_CPU_TRACED(void cluster_ends())
CUDA_ON_CPU_TRACED(void thread_runs(bool))
CUDA_ON_CPU_TRACED(void barrier_opens())                      // the running thread's block
CUDA_ON_CPU_TRACED(void arrives_at_cluster(bool is_relaxed))  // the running thread,
CUDA_ON_CPU_TRACED(void waited_for_cluster())                 // the running thread goes on after the cluster's barrier
CUDA_ON_CPU_TRACED(void warp_operation(unsigned, bool))       // by these lanes of its warp; is it __syncwarp()
CUDA_ON_CPU_TRACED(void fence())
CUDA_ON_CPU_TRACED(void atomic(void*, unsigned, const void*))  // bytes; the instruction
CUDA_ON_CPU_TRACED(void pause())
CUDA_ON_CPU_TRACED(void go_on())

// While one exists, the running thread does what the emulation needs, not the kernel.
struct Pause {
  Pause() { pause(); }
  ~Pause() { go_on(); }
};

}  // namespace cuda_on_cpu::trace
