// The calls of the emulation to races.cpp, which is linked where races are to be found (-DCUDA_ON_CPU_RACES). The
// threads' loads and stores arrive there by themselves: g++ -fsanitize=thread calls it for each.
#pragma once
#include <cstdint>

namespace cuda_on_cpu::races {

#ifdef CUDA_ON_CPU_RACES
#define CUDA_ON_CPU_TOLD(declaration) declaration;
#define CUDA_ON_CPU_CALLED __attribute__((noinline))  // so the return address says which instruction called it
#else
#define CUDA_ON_CPU_CALLED
#define CUDA_ON_CPU_TOLD(declaration) \
  inline declaration {}
#endif
CUDA_ON_CPU_TOLD(void launch_begins(const char*))
CUDA_ON_CPU_TOLD(void launch_ends())
CUDA_ON_CPU_TOLD(void cluster_begins())
CUDA_ON_CPU_TOLD(void thread_runs(bool))
CUDA_ON_CPU_TOLD(void barrier_opens())                       // the running thread's block
CUDA_ON_CPU_TOLD(void arrives_at_cluster(bool is_relaxed))   // the running thread,
CUDA_ON_CPU_TOLD(void waited_for_cluster())                  // the running thread goes on after the cluster's barrier
CUDA_ON_CPU_TOLD(void warp_operation(unsigned))              // by these lanes of its warp
CUDA_ON_CPU_TOLD(void atomic(void*, unsigned, const void*))  // bytes; the instruction
CUDA_ON_CPU_TOLD(void pause())
CUDA_ON_CPU_TOLD(void go_on())

// While one exists, the running thread does what the emulation needs, not the kernel.
struct Pause {
  Pause() { pause(); }
  ~Pause() { go_on(); }
};

}  // namespace cuda_on_cpu::races
