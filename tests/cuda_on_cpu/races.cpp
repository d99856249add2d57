// Finds data races between the threads of emulated kernels. g++ -fsanitize=thread makes every load and store of a
// kernel call __tsan_read4() and its kin: they are defined here, in place of the thread sanitizer.
//
// A race is two accesses to one byte by two threads, one of them a plain write, that nothing orders: a barrier of the
// block or the cluster, or a warp operation of both. A relaxed barrier of the cluster orders only reads, and writes to
// a block's own shared memory. Two atomics may meet, and order nothing else. Which order the threads ran in does not
// matter. Two readers of a word are remembered.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <cstdio>
#include <map>
#include <unordered_map>

#include "cuda_runtime.h"

namespace cuda_on_cpu::races {
namespace {

using Address = uintptr_t;

struct Range {
  Address begin = 0, bytes = 0;
  bool has(Address at) const { return at - begin < bytes; }
};

enum Kind : uint8_t { kRead, kWrite, kAtomicAccess };
bool is_own = false;  // the running access is to the block's own shared memory

// Who accessed a word, by which instruction, and when: the thread's barriers so far, and its clock of the warp's
// operations.
struct Access {
  uint32_t block = UINT32_MAX, clock = 0, pc = 0;
  uint16_t thread = 0, barriers = 0, clusters = 0, full_clusters = 0;  // full: without relaxed ones
  bool by_relaxed = false;                                             // a relaxed one orders it too
  bool valid() const { return block != UINT32_MAX; }
};
struct Cell {
  Access write, reads[2];
  bool is_atomic = false;
};

// The cells of 4096 bytes: one for each word, or, once a part of a word was accessed, one for each byte.
struct Page {
  std::vector<Cell> cells = std::vector<Cell>(1024);
  void split() {
    std::vector<Cell> bytes(4096);
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = cells[i / 4];
    cells.swap(bytes);
  }
};
struct Memory {
  std::unordered_map<Address, std::unique_ptr<Page>> pages;
  Address last = UINTPTR_MAX;
  Page* last_page = nullptr;
  Page& page(Address number) {
    if (number != last) {
      std::unique_ptr<Page>& page = pages[number];
      if (!page) page = std::make_unique<Page>();
      last = number;
      last_page = page.get();
    }
    return *last_page;
  }
  void clear() {
    pages.clear();
    last = UINTPTR_MAX;
  }
};

struct Lane {
  uint16_t barriers = 0, clusters = 0, clusters_arrived = 0, full_clusters = 0, full_arrived = 0;
  uint32_t clocks[32] = {};  // what it knows of the warp's lanes
  unsigned paused = 0;
};
struct TracedBlock {
  uint32_t id;
  std::vector<Lane> lanes;
  Memory memory;  // shared
};

bool paused = true;
std::string kernel;
std::vector<std::unique_ptr<TracedBlock>> traced;
Lane* lane_ = nullptr;  // the lane that runs
TracedBlock* block_ = nullptr;
Range stack, fiber, fixed, dynamic, image, host;
Memory global;
std::map<std::pair<uint32_t, uint32_t>, uint64_t> races;  // two instructions -> how often
std::string records;

bool ordered(const Access& a) {  // before what the running thread does now
  const Lane& lane = *lane_;
  if (a.block == block_->id) {
    if (a.thread == self->rank || lane.barriers > a.barriers) return true;
    if (a.thread / 32 == self->rank / 32 && lane.clocks[a.thread % 32] > a.clock) return true;
  }
  return a.block / cluster_size == block_->id / cluster_size &&
         (lane.full_clusters > a.full_clusters || (a.by_relaxed && lane.clusters > a.clusters));
}
void compare(const Access& other, uint32_t pc) {
  if (other.valid() && !ordered(other)) ++races[{other.pc, pc}];
}
void look(Cell& cell, Kind kind, uint32_t pc) {
  const Access now = {block_->id,
                      lane_->clocks[self->rank % 32],
                      pc,
                      static_cast<uint16_t>(self->rank),
                      lane_->barriers,
                      lane_->clusters_arrived,
                      lane_->full_arrived,
                      kind == kRead || is_own};
  if (kind == kRead) {
    compare(cell.write, pc);
    Access& first = cell.reads[0];
    if (!first.valid() || (first.block == now.block && first.thread == now.thread) || ordered(first)) {
      first = now;
    } else if (!cell.reads[1].valid() || ordered(cell.reads[1])) {
      cell.reads[1] = now;
    }
    return;
  }
  if (!(kind == kAtomicAccess && cell.is_atomic)) compare(cell.write, pc);
  compare(cell.reads[0], pc);
  compare(cell.reads[1], pc);
  cell.write = now;
  cell.reads[0] = cell.reads[1] = Access();
  cell.is_atomic = kind == kAtomicAccess;
}
void look(Memory& memory, Address at, unsigned bytes, Kind kind, uint32_t pc) {
  for (const Address end = at + bytes; at < end;) {
    Page& page = memory.page(at / 4096);
    if (page.cells.size() == 1024 && (at % 4 || end - at < 4)) page.split();
    const unsigned width = page.cells.size() == 1024 ? 4 : 1;
    look(page.cells[at % 4096 / width], kind, pc);
    at += width;
  }
}

void access(const void* p, unsigned bytes, Kind kind, const void* instruction) {
  const Address at = reinterpret_cast<Address>(p);
  if (stack.has(at) || fiber.has(at)) return;
  TracedBlock* owner = nullptr;
  Address place = at;
  const Address before_dynamic = (fixed.bytes + 15) / 16 * 16;
  if (fixed.has(at)) {
    owner = block_;
    place = at - fixed.begin;
  } else if (dynamic.has(at)) {
    owner = block_;
    place = before_dynamic + at - dynamic.begin;
  } else if (image.has(at) || host.has(at)) {
    return;
  } else {
    for (unsigned i = 0; cluster_size > 1 && i < cluster_size; ++i) {
      const Address of_static = at - reinterpret_cast<Address>(blocks[i]->static_shared.get());
      const Address of_dynamic = at - reinterpret_cast<Address>(blocks[i]->dynamic_shared.get());
      if (blocks[i].get() == self->block || (of_static >= fixed.bytes && of_dynamic >= dynamic.bytes)) continue;
      owner = traced[i].get();
      place = of_static < fixed.bytes ? of_static : before_dynamic + of_dynamic;
    }
  }
  is_own = owner == block_;
  const Address pc = reinterpret_cast<Address>(instruction) - 1 - image.begin;
  look(owner ? owner->memory : global, place, bytes, kind, static_cast<uint32_t>(pc));
}

std::string hexadecimal(uint32_t pc) {
  char text[32];
  snprintf(text, sizeof text, "\"%x\"", pc);
  return text;
}

}  // namespace

void pause() {
  ++lane_->paused;
  paused = true;
}
void go_on() { paused = --lane_->paused > 0; }

void thread_runs(bool runs) {
  paused = true;
  if (!runs) return;
  lane_ = &traced[self->block->rank]->lanes[self->rank];
  if (block_ != traced[self->block->rank].get()) {
    block_ = traced[self->block->rank].get();
    dynamic = {reinterpret_cast<Address>(dynamic_shared.get()), dynamic_bytes};
  }
  stack = {reinterpret_cast<Address>(self->fiber.stack()), Fiber::kStack};
  fiber = {reinterpret_cast<Address>(self), sizeof *self};
  paused = lane_->paused > 0;
}

void launch_begins(const char* name) {
  kernel = name;
  races.clear();
  global.clear();  // the last launch may have failed
  fixed = {reinterpret_cast<Address>(__start_specvis_shared),
           static_cast<Address>(__stop_specvis_shared - __start_specvis_shared)};
  void* low = nullptr;
  size_t bytes = 0;
  pthread_attr_t attributes;
  pthread_getattr_np(pthread_self(), &attributes);
  pthread_attr_getstack(&attributes, &low, &bytes);
  pthread_attr_destroy(&attributes);
  host = {reinterpret_cast<Address>(low), bytes};
  Dl_info info;
  dladdr(reinterpret_cast<void*>(&launch_begins), &info);
  image = {reinterpret_cast<Address>(info.dli_fbase), 0};
  dl_iterate_phdr(
      [](dl_phdr_info* loaded, size_t, void*) {
        if (loaded->dlpi_addr != image.begin) return 0;
        for (int i = 0; i < loaded->dlpi_phnum; ++i) {
          const auto& segment = loaded->dlpi_phdr[i];
          if (segment.p_type == PT_LOAD)
            image.bytes = std::max<Address>(image.bytes, segment.p_vaddr + segment.p_memsz);
        }
        return 1;
      },
      nullptr);
}

void cluster_begins() {
  while (traced.size() < cluster_size) traced.push_back(std::make_unique<TracedBlock>());
  block_ = nullptr;
  for (unsigned b = 0; b < cluster_size; ++b) {
    TracedBlock& block = *traced[b];
    const uint3 index = blocks[b]->index;
    block.id = index.x + gridDim.x * (index.y + gridDim.y * index.z);
    block.memory.clear();
    block.lanes.assign(size, Lane());
    for (unsigned i = 0; i < size; ++i) block.lanes[i].clocks[i % 32] = 1;
  }
}

void barrier_opens() {
  for (Lane& lane : block_->lanes) ++lane.barriers;
}

void arrives_at_cluster(bool is_relaxed) {
  ++lane_->clusters_arrived;
  lane_->full_arrived += !is_relaxed;
}
void waited_for_cluster() {
  ++lane_->clusters;
  lane_->full_clusters = lane_->full_arrived;
}

void warp_operation(unsigned mask) {
  const unsigned first = self->rank / 32 * 32, lanes = std::min(32u, size - first);
  Lane* const warp = &block_->lanes[first];
  uint32_t clocks[32] = {};
  for (unsigned i = 0; i < lanes; ++i) {
    if (!(mask >> i & 1)) continue;
    for (unsigned j = 0; j < 32; ++j) clocks[j] = std::max(clocks[j], warp[i].clocks[j]);
  }
  for (unsigned i = 0; i < lanes; ++i) {
    if (!(mask >> i & 1)) continue;
    Lane& lane = warp[i];
    for (unsigned j = 0; j < 32; ++j) lane.clocks[j] = clocks[j] + (mask >> j & 1 && j != i ? 1 : 0);
    ++lane.clocks[i];
  }
}

void atomic(void* memory, unsigned bytes, const void* instruction) {
  access(memory, bytes, kAtomicAccess, instruction);
}

void launch_ends() {
  std::string list;
  for (const auto& [pair, count] : races)
    list += std::string(list.empty() ? "" : ", ") + "[" + hexadecimal(pair.first) + ", " + hexadecimal(pair.second) +
            ", " + std::to_string(count) + "]";
  records += "{\"kernel\": \"" + kernel + "\", \"races\": [" + list + "]}\n";
  global.clear();
}

}  // namespace cuda_on_cpu::races

using namespace cuda_on_cpu::races;

// A line of JSON for each launch since the last call.
extern "C" __attribute__((visibility("default"))) const char* take_races() {
  static std::string taken;
  taken.swap(records);
  records.clear();
  return taken.c_str();
}

#define TRACED(bytes)                                                   \
  void __tsan_read##bytes(void* p) {                                    \
    if (!paused) access(p, bytes, kRead, __builtin_return_address(0));  \
  }                                                                     \
  void __tsan_write##bytes(void* p) {                                   \
    if (!paused) access(p, bytes, kWrite, __builtin_return_address(0)); \
  }                                                                     \
  void __tsan_unaligned_read##bytes(void* p) {                          \
    if (!paused) access(p, bytes, kRead, __builtin_return_address(0));  \
  }                                                                     \
  void __tsan_unaligned_write##bytes(void* p) {                         \
    if (!paused) access(p, bytes, kWrite, __builtin_return_address(0)); \
  }
#pragma GCC visibility push(hidden)
extern "C" {
TRACED(1);
TRACED(2);
TRACED(4);
TRACED(8);
TRACED(16);
void __tsan_read_range(void* p, size_t bytes) {
  if (!paused)
    for (size_t i = 0; i < bytes; i += 16)
      access(static_cast<char*>(p) + i, std::min<size_t>(16, bytes - i), kRead, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t bytes) {
  if (!paused)
    for (size_t i = 0; i < bytes; i += 16)
      access(static_cast<char*>(p) + i, std::min<size_t>(16, bytes - i), kWrite, __builtin_return_address(0));
}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
// What the guard of a static variable does.
unsigned char __tsan_atomic8_load(const volatile void* p, int) {
  return *static_cast<const volatile unsigned char*>(p);
}
}
#pragma GCC visibility pop
