// CUDA C++ kernels as plain C++ on the CPU, for tests: found instead of CUDA's header when g++ compiles a .cu
// file. Clusters of blocks run one after another; the threads of a cluster are fibers that change at barriers and warp
// operations. What would hang or be undefined on a GPU fails the launch, and cudaGetErrorString() says where: a barrier
// or a warp operation that some do not reach, or reach elsewhere. A thread runs on until it has to wait, and a block
// until its threads wait for other blocks, in an order that changes from barrier to barrier, so that a missing one
// gives wrong results in one order or another. Shared memory starts as NaN in every block. Not covered: the memory
// model between blocks, time.
//
//   CUDA_ON_CPU_SHARED       bytes of shared memory that a block may have; Hopper's 227 KB unless set
//   CUDA_ON_CPU_CAPABILITY   the major compute capability; 9 unless set, and below there are no clusters
//   CUDA_ON_CPU_SMS          how many multiprocessors; 132 unless set
//   CUDA_ON_CPU_SEED         another order of the threads and blocks
//   CUDA_ON_CPU_ERROR        the number of an error that the device answers with, as one that is broken does
#pragma once
#include <math.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <type_traits>
#include <vector>

#include "cuda_runtime_api.h"
#include "fiber.h"
#include "races.h"

#define __global__
#define __device__
#define __host__
// What the threads of a block share, all of the running ones do. It lies in one section, which every block fills, and
// which is put aside while another block of the cluster runs. In templates g++ ignores the attribute "section", but not
// "noinit": the build gives that section its name.
#ifdef __clang__
#define __shared__ static __attribute__((section("specvis_shared")))
#else
#define __shared__ static __attribute__((noinit))
#endif
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

inline uint3 threadIdx, blockIdx;  // the running thread's
inline dim3 blockDim, gridDim;

namespace cuda_on_cpu {

struct Place {
  const char* file;
  int line;
  bool operator==(const Place& other) const { return line == other.line && !std::strcmp(file, other.file); }
  std::string text() const {
    const char* name = std::strrchr(file, '/');
    return std::string(name ? name + 1 : file) + ":" + std::to_string(line);
  }
};

struct Block;

struct Thread {
  enum State { ready, at_barrier, in_warp, at_cluster_barrier, exited };
  Fiber fiber;
  Block* block;
  uint3 index;
  unsigned rank;  // its number in the block
  State state;
  Place place;               // where it waits
  uint64_t arrivals, waits;  // how often it arrived at the cluster's barrier and waited there
  unsigned mask;             // the mask of the warp operation where it waits
  uint64_t value;            // what it brings to that
  uint64_t values[32];       // what all the lanes brought to that operation
};

// Where the linker puts __shared__ variables.
extern "C" __attribute__((weak, visibility("hidden"))) volatile unsigned char __start_specvis_shared[],
    __stop_specvis_shared[];

// What a block has of static shared memory while another one runs. The address sanitizer knows of each byte what it
// knows of the variable's.
class Image {
 public:
  Image() : bytes_(__stop_specvis_shared - __start_specvis_shared), memory_(new unsigned char[bytes_ + 1]) {
#ifdef __SANITIZE_ADDRESS__
    for (size_t i = 0; i < bytes_; i = (i | 7) + 1) {  // eight at a time, the first of them valid or none
      while (i % 8 < 7 && !is_poisoned(i)) ++i;
      if (is_poisoned(i)) __asan_poison_memory_region(memory_.get() + i, 8 - i % 8);
    }
  }
  ~Image() { __asan_unpoison_memory_region(memory_.get(), bytes_); }
  static bool is_poisoned(size_t i) {
    return __asan_address_is_poisoned(const_cast<unsigned char*>(__start_specvis_shared) + i);
#endif
  }

  unsigned char* get() const { return memory_.get(); }

  // Not memcpy() and memset(), which the sanitizer would keep from what it put between the variables.
  __attribute__((no_sanitize("address"))) void save() {
    unsigned char* const memory = memory_.get();
    for (size_t i = 0; i < bytes_; ++i) memory[i] = __start_specvis_shared[i];
  }
  __attribute__((no_sanitize("address"))) void restore() const {
    const unsigned char* const memory = memory_.get();
    for (size_t i = 0; i < bytes_; ++i) __start_specvis_shared[i] = memory[i];
  }
  __attribute__((no_sanitize("address"))) static void fill() {
    for (volatile unsigned char* byte = __start_specvis_shared; byte != __stop_specvis_shared; ++byte) *byte = 0xff;
  }

 private:
  size_t bytes_;
  std::unique_ptr<unsigned char[]> memory_;
};

struct Block {
  uint3 index;
  unsigned rank;                     // its number in the cluster
  std::unique_ptr<Thread>* threads;  // all threads of the cluster
  bool has_begun, has_exited;
  unsigned arrived;             // threads at the barrier
  bool any_voted, any_of_last;  // any of these, any at the last barrier
  Place barrier_place;
  std::unique_ptr<unsigned char[]> dynamic_shared;  // while another block runs
  Image static_shared;
};

// The running cluster.
inline std::vector<std::unique_ptr<Block>> blocks;
inline std::vector<std::unique_ptr<Thread>> threads;
inline unsigned cluster_size;     // blocks
inline unsigned cluster_arrived;  // threads at the cluster's barrier
inline uint64_t cluster_phase;    // how many such barriers everyone has arrived at
inline Place cluster_place;
inline unsigned size;  // threads of a block
inline Thread* self;
inline std::unique_ptr<unsigned char[]> dynamic_shared;  // the running block's
inline size_t dynamic_bytes;
inline const std::function<void()>* body;
inline std::string failure;

// The running thread cannot go on, and with it the launch.
[[noreturn]] inline void fail(const std::string& what) {
  failure = "thread " + std::to_string(self->rank) + ": " + what;
  while (true) self->fiber.wait();
}

// Every thread of the block waits for the others; returns whether any voted yes.
inline bool barrier(bool vote, Place place) {
  const races::Pause pause;
  Block& block = *self->block;
  if (block.arrived == 0) block.barrier_place = place;
  if (!(place == block.barrier_place))
    fail("waits at the barrier of " + place.text() + ", others at that of " + block.barrier_place.text());
  block.any_voted |= vote;
  self->place = place;
  if (++block.arrived < size) {
    self->state = Thread::at_barrier;
    self->fiber.wait();
  } else {
    for (unsigned i = 0; i < size; ++i) block.threads[i]->state = Thread::ready;
    block.any_of_last = block.any_voted;
    block.any_voted = false;
    block.arrived = 0;
    races::barrier_opens();
  }
  return block.any_of_last;
}

// Every thread of the cluster arrives, and goes on; then it waits until all the others have arrived.
inline void arrive_at_cluster(Place place, bool is_relaxed) {
  const races::Pause pause;
  if (self->arrivals > self->waits) fail("arrives twice at the cluster's barrier without waiting, at " + place.text());
  if (cluster_arrived == 0) cluster_place = place;
  if (!(place == cluster_place))
    fail("arrives at the cluster's barrier of " + place.text() + ", others at that of " + cluster_place.text());
  ++self->arrivals;
  races::arrives_at_cluster(is_relaxed);
  if (++cluster_arrived < cluster_size * size) return;
  cluster_arrived = 0;
  ++cluster_phase;
  for (unsigned i = 0; i < cluster_size * size; ++i)
    if (threads[i]->state == Thread::at_cluster_barrier) threads[i]->state = Thread::ready;
}
inline void wait_for_cluster(Place place) {
  const races::Pause pause;
  if (self->arrivals == self->waits) fail("waits for the cluster without having arrived, at " + place.text());
  if (cluster_phase < ++self->waits) {
    self->state = Thread::at_cluster_barrier;
    self->place = place;
    self->fiber.wait();
  }
  races::waited_for_cluster();
}

// Where another block of the cluster has what this one has at `shared`.
inline void* map_shared(void* shared, unsigned rank, Place place) {
  const races::Pause pause;
  const auto offset = [shared](const volatile unsigned char* from) {
    return reinterpret_cast<uintptr_t>(shared) - reinterpret_cast<uintptr_t>(from);
  };
  const bool is_dynamic = offset(dynamic_shared.get()) < dynamic_bytes;
  if (!is_dynamic && offset(__start_specvis_shared) >= size_t(__stop_specvis_shared - __start_specvis_shared))
    fail("maps what is no shared memory of its block, at " + place.text());
  if (rank >= cluster_size)
    fail("maps to block " + std::to_string(rank) + " of a cluster of " + std::to_string(cluster_size) + ", at " +
         place.text());
  const Block& other = *blocks[rank];
  if (&other == self->block) return shared;
  if (other.has_exited)
    fail("maps to block " + std::to_string(rank) + " of the cluster, which has exited, at " + place.text());
  return is_dynamic ? other.dynamic_shared.get() + offset(dynamic_shared.get())
                    : other.static_shared.get() + offset(__start_specvis_shared);
}

// The lanes in the mask wait for each other; returns what each of them brought.
inline const uint64_t* exchange(unsigned mask, uint64_t value, Place place) {
  const races::Pause pause;
  const unsigned first = self->rank / 32 * 32, lanes = std::min(32u, size - first);
  const std::unique_ptr<Thread>* const warp = self->block->threads + first;
  if (lanes < 32 && mask >> lanes) fail("the mask names lanes that the block does not have, at " + place.text());
  if (!(mask >> self->rank % 32 & 1)) fail("not in the mask of its own warp operation at " + place.text());
  self->state = Thread::in_warp;
  self->place = place;
  self->mask = mask;
  self->value = value;
  for (unsigned lane = 0; lane < lanes; ++lane) {
    const Thread& other = *warp[lane];
    if (!(mask >> lane & 1)) continue;
    if (other.state == Thread::exited)
      fail("lane " + std::to_string(lane) + " of the mask has exited, at " + place.text());
    if (other.state == Thread::in_warp && (other.mask != mask || !(other.place == place)))
      fail("lane " + std::to_string(lane) + " of the mask is in another warp operation, " + other.place.text() +
           " and not " + place.text());
    if (other.state != Thread::in_warp) {  // not there yet: the last one to arrive wakes the others
      self->fiber.wait();
      return self->values;
    }
  }
  for (unsigned to = 0; to < lanes; ++to) {
    if (!(mask >> to & 1)) continue;
    Thread& thread = *warp[to];
    for (unsigned from = 0; from < lanes; ++from) thread.values[from] = warp[from]->value;
    thread.state = Thread::ready;
  }
  races::warp_operation(mask);
  return self->values;
}

inline void run_thread() {
  (*body)();
  const races::Pause pause;
  self->state = Thread::exited;
  while (true) self->fiber.wait();
}

inline void resume(Thread& thread) {
  self = &thread;
  threadIdx = thread.index;
  races::thread_runs(true);
  thread.fiber.resume();
  races::thread_runs(false);
}

inline void begin(Block& block) {
  block.arrived = 0;
  block.any_voted = false;
  block.has_begun = block.has_exited = false;
  for (unsigned i = 0; i < size; ++i) {
    Thread& thread = *block.threads[i];
    thread.block = &block;
    thread.rank = i;
    thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y};
    thread.state = Thread::ready;
    thread.arrivals = thread.waits = 0;
    thread.fiber.begin(run_thread);
  }
}

// The block's threads run until each waits for other blocks or has exited, or no one can go on. Returns whether any
// ran.
inline bool run_block(Block& block, std::minstd_rand& order) {
  bool ran = false;
  for (bool progress = true; progress; ran |= progress) {
    progress = false;
    const unsigned backward = order() / 2 % 2;
    for (unsigned i = 0; i < size; i += 32) {  // a warp runs on until all its lanes wait for the block
      const unsigned first = backward ? (size - 1 - i) / 32 * 32 : i;
      const unsigned lanes = std::min(32u, size - first);
      for (bool again = true; again;) {
        again = false;
        for (unsigned lane = 0; lane < lanes; ++lane) {
          Thread& thread = *block.threads[first + (backward ? lanes - 1 - lane : lane)];
          if (thread.state != Thread::ready) continue;
          again = progress = true;
          resume(thread);
          if (!failure.empty()) return true;
        }
      }
    }
  }
  return ran;
}

inline void poison_shared() {  // NaN, or -1: what nobody wrote shows
  std::memset(dynamic_shared.get(), 0xff, dynamic_bytes);
  Image::fill();
}

// One block of the cluster after another, each with its own shared memory. Returns whether any of their threads ran.
inline bool run_blocks(std::minstd_rand& order) {
  bool ran = false;
  const unsigned first = cluster_size > 1 ? order() / 2 % cluster_size : 0;
  for (unsigned i = 0; i < cluster_size && failure.empty(); ++i) {
    Block& block = *blocks[(first + i) % cluster_size];
    if (block.has_exited) continue;
    blockIdx = block.index;
    block.dynamic_shared.swap(dynamic_shared);
    if (block.has_begun) {
      if (cluster_size > 1) block.static_shared.restore();
    } else {
      poison_shared();
      block.has_begun = true;
    }
    ran |= run_block(block, order);
    block.has_exited = std::all_of(block.threads, block.threads + size,
                                   [](const auto& thread) { return thread->state == Thread::exited; });
    if (block.has_exited) poison_shared();  // others may have mapped it before
    if (cluster_size > 1) block.static_shared.save();
    block.dynamic_shared.swap(dynamic_shared);
  }
  return ran;
}

// Until every thread of the cluster has exited, or no one can go on.
inline void run_cluster(std::minstd_rand& order) {
  cluster_arrived = cluster_phase = 0;
  for (unsigned i = 0; i < cluster_size; ++i) begin(*blocks[i]);
  races::cluster_begins();
  while (run_blocks(order) && failure.empty()) {
  }
  if (!failure.empty()) return;
  unsigned at[5] = {};
  const Thread* some = nullptr;
  for (unsigned i = 0; i < cluster_size * size; ++i) {
    ++at[threads[i]->state];
    if (threads[i]->state != Thread::exited) some = threads[i].get();
  }
  if (!some) return;
  blockIdx = some->block->index;
  failure = "divergence: " + std::to_string(at[Thread::at_barrier]) + " threads wait at a barrier, " +
            std::to_string(at[Thread::in_warp]) + " in a warp operation, " +
            (cluster_size > 1 ? std::to_string(at[Thread::at_cluster_barrier]) + " at the cluster's barrier, " : "") +
            std::to_string(at[Thread::exited]) + " have exited; thread " + std::to_string(some->rank) + " is at " +
            some->place.text();
}

// Why no GPU would launch these clusters, or nothing.
inline std::string wrong_clusters(dim3 grid, unsigned cluster) {
  if (cluster == 1) return "";
  if (cluster < 1 || cluster > 8) return "a cluster has 1 to 8 blocks, not " + std::to_string(cluster);
  if (capability() < 9) return "clusters need compute capability 9";
  if (grid.x % cluster == 0) return "";
  return std::to_string(grid.x) + " blocks cannot be divided into clusters of " + std::to_string(cluster);
}

template <class... Parameters, class... Arguments>
cudaError_t launch(const char* name, void (*kernel)(Parameters...), dim3 grid, unsigned cluster, dim3 block,
                   size_t shared, cudaStream_t, const Arguments&... arguments) {
  static_assert((std::is_trivially_copyable<Parameters>::value && ...), "a kernel gets copies of the bytes");
  static std::mutex one;
  const std::lock_guard<std::mutex> lock(one);
  const uint64_t count = uint64_t{block.x} * block.y * block.z;
  if (grid.x < 1 || grid.x > 0x7fffffffu || grid.y < 1 || grid.y > 65535 || grid.z < 1 || grid.z > 65535 || count < 1 ||
      count > 1024) {
    return last_error = cudaErrorInvalidConfiguration;
  }
  if (device_error()) return last_error = device_error();
  const std::string wrong = wrong_clusters(grid, cluster);
  if (!wrong.empty()) {
    report = std::string(name) + ": " + wrong;
    return last_error = cudaErrorInvalidClusterSize;
  }
  if (shared > size_t(most_shared(reinterpret_cast<const void*>(kernel)))) {
    return last_error = cudaErrorInvalidValue;
  }
  const auto call = [&] { kernel(arguments...); };
  const std::function<void()> run = std::ref(call);
  body = &run;
  size = count;
  gridDim = grid;
  blockDim = block;
  cluster_size = cluster;
  while (threads.size() < cluster * size) threads.push_back(std::make_unique<Thread>());
  while (blocks.size() < cluster) blocks.push_back(std::make_unique<Block>());
  dynamic_bytes = shared;
  for (unsigned i = 0; i < cluster; ++i) {
    blocks[i]->rank = i;
    blocks[i]->threads = &threads[i * size];
    blocks[i]->dynamic_shared.reset(new unsigned char[shared]);
  }
  const char* seed = std::getenv("CUDA_ON_CPU_SEED");
  std::minstd_rand order(seed ? std::atoi(seed) : 1);
  failure.clear();
  races::launch_begins(name);
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += cluster) {
        for (unsigned i = 0; i < cluster; ++i) blocks[i]->index = {x + i, y, z};
        run_cluster(order);
        if (failure.empty()) continue;
        report = std::string(name) + ", block (" + std::to_string(blockIdx.x) + ", " + std::to_string(blockIdx.y) +
                 ", " + std::to_string(blockIdx.z) + "), " + failure;
        return last_error = cudaErrorLaunchFailure;
      }
  races::launch_ends();
  return cudaSuccess;
}

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "up to eight bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <class T, class Bits>
T from_bits(Bits bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

inline int lane() {
  const races::Pause pause;
  return self->rank % 32;
}

// What lane `source` brought; the own value if that is in another group of `width` lanes.
template <class T>
T take(unsigned mask, T value, int source, int width, Place place) {
  const races::Pause pause;
  const uint64_t* values = exchange(mask, bits_of(value), place);
  if (source < 0 || source / width != lane() / width) source = lane();
  if (!(mask >> source & 1)) fail("takes from a lane outside the mask at " + place.text());
  return from_bits<T>(values[source]);
}

template <class T, class Operation>
T reduce(unsigned mask, T value, Place place, Operation operation) {
  const races::Pause pause;
  const uint64_t* values = exchange(mask, bits_of(value), place);
  T result = value;
  for (int other = 0; other < 32; ++other)
    if (mask >> other & 1 && other != lane()) result = operation(result, from_bits<T>(values[other]));
  return result;
}

// Nothing interrupts a fiber: reading and writing one after the other is atomic.
template <class T, class Operation>
CUDA_ON_CPU_CALLED T modify(T* memory, Operation operation) {
  races::atomic(memory, sizeof *memory, __builtin_return_address(0));
  const races::Pause pause;
  const T before = *memory;
  *memory = operation(before);
  return before;
}

}  // namespace cuda_on_cpu

#define HERE cuda_on_cpu::Place place = {__builtin_FILE(), __builtin_LINE()}  // the caller's

enum cudaLaunchAttributeID { cudaLaunchAttributeClusterDimension = 4 };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    dim3 clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute* attrs;
  unsigned numAttrs;
};

// With one block on a multiprocessor: as on an H100, a cluster is within one of the groups of at least 16 of these.
template <class Kernel>
cudaError_t cudaOccupancyMaxActiveClusters(int* clusters, Kernel*, const cudaLaunchConfig_t* config) {
  const int all = cuda_on_cpu::multiprocessors(), groups = std::max(1, all / 16);
  *clusters = groups * (all / groups / static_cast<int>(config->attrs->val.clusterDim.x));
  return cudaSuccess;
}

inline void __syncthreads(HERE) { cuda_on_cpu::barrier(false, place); }
inline int __syncthreads_or(int vote, HERE) { return cuda_on_cpu::barrier(vote, place); }

inline unsigned __clusterRelativeBlockRank() {
  const cuda_on_cpu::races::Pause pause;
  return cuda_on_cpu::self->block->rank;
}
inline unsigned __clusterSizeInBlocks() { return cuda_on_cpu::cluster_size; }
inline void __cluster_barrier_arrive(HERE) { cuda_on_cpu::arrive_at_cluster(place, false); }
inline void __cluster_barrier_arrive_relaxed(HERE) { cuda_on_cpu::arrive_at_cluster(place, true); }
inline void __cluster_barrier_wait(HERE) { cuda_on_cpu::wait_for_cluster(place); }
inline void* __cluster_map_shared_rank(const void* shared, unsigned rank, HERE) {
  return cuda_on_cpu::map_shared(const_cast<void*>(shared), rank, place);
}

inline void __syncwarp(unsigned mask = 0xffffffffu, HERE) { cuda_on_cpu::exchange(mask, 0, place); }
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, HERE) {
  const int first = cuda_on_cpu::lane() / width * width;
  return cuda_on_cpu::take(mask, value, first + (source & (width - 1)), width, place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32, HERE) {
  return cuda_on_cpu::take(mask, value, cuda_on_cpu::lane() - int(distance), width, place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32, HERE) {
  return cuda_on_cpu::take(mask, value, cuda_on_cpu::lane() ^ distance, width, place);
}
inline unsigned __ballot_sync(unsigned mask, int vote, HERE) {
  const unsigned bit = unsigned{vote != 0} << cuda_on_cpu::lane();
  return cuda_on_cpu::reduce(mask, bit, place, [](unsigned a, unsigned b) { return a | b; });
}
inline int __any_sync(unsigned mask, int vote, HERE) { return __ballot_sync(mask, vote, place) != 0; }
inline unsigned __reduce_add_sync(unsigned mask, unsigned value, HERE) {
  return cuda_on_cpu::reduce(mask, value, place, [](unsigned a, unsigned b) { return a + b; });
}
template <class T>
T __reduce_min_sync(unsigned mask, T value, HERE) {
  static_assert(sizeof(T) == 4 && std::is_integral<T>::value, "as in CUDA");
  return cuda_on_cpu::reduce(mask, value, place, [](T a, T b) { return std::min(a, b); });
}
template <class T>
T __reduce_max_sync(unsigned mask, T value, HERE) {
  static_assert(sizeof(T) == 4 && std::is_integral<T>::value, "as in CUDA");
  return cuda_on_cpu::reduce(mask, value, place, [](T a, T b) { return std::max(a, b); });
}
template <class T>
unsigned __match_any_sync(unsigned mask, T value, HERE) {
  const cuda_on_cpu::races::Pause pause;
  const uint64_t mine = cuda_on_cpu::bits_of(value);
  const uint64_t* values = cuda_on_cpu::exchange(mask, mine, place);
  unsigned equal = 0;
  for (int lane = 0; lane < 32; ++lane) equal |= unsigned{mask >> lane & 1 && values[lane] == mine} << lane;
  return equal;
}
#undef HERE

#define ATOMIC(name, result)                                                   \
  template <class T>                                                           \
  T name(T* memory, std::common_type_t<T> value) {                             \
    return cuda_on_cpu::modify(memory, [=](T before) -> T { return result; }); \
  }
ATOMIC(atomicAdd, before + value)
ATOMIC(atomicMin, value < before ? value : before)
ATOMIC(atomicOr, before | value)
#undef ATOMIC

inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline int __popcll(unsigned long long bits) { return __builtin_popcountll(bits); }
inline int __ffs(int bits) { return __builtin_ffs(bits); }
inline int __ffsll(long long bits) { return __builtin_ffsll(bits); }
inline unsigned __float_as_uint(float value) { return cuda_on_cpu::from_bits<unsigned>(value); }
inline float __uint_as_float(unsigned bits) { return cuda_on_cpu::from_bits<float>(bits); }

template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
