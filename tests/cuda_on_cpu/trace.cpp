// Counts what the threads of emulated kernels do, and finds races between them. g++ -fsanitize=thread makes every load
// and store of a kernel call __tsan_read4() and its kin: they are defined here, in place of the thread sanitizer.
//
// Requests. The lanes of a warp that execute an instruction for the n-th time since the warp last met make one request.
// Parts of one aligned 16 bytes that a thread accesses by different instructions, as g++ reads a float4, are one
// access. Global memory counts by sectors of 32 bytes, shared memory by wavefronts: a bank serves one word of 4 bytes
// in each, half a warp is served at once where a lane takes 8 bytes, and a quarter of one where it takes 16.
//
// Time. Every thread has a clock, in cycles of which kCosts says how many each step takes. Arithmetic is not seen. A
// load is waited for, but a thread's loads that follow each other, with no other step between, overlap in
// groups of up to four: each from an instruction of its own, since a loop that is not unrolled may need what it loaded
// in the turn before. (Whether a load needs the value of one before is not seen: where it does, the chain is longer.)
// Stores are not waited for. A warp operation lasts until its last lane comes, a barrier until its last thread does.
//
// Races. Two accesses to one byte by two threads, one of them a plain write, that nothing orders: a barrier of the
// block or the cluster, a warp operation of both, or, between blocks, an atomic that one made after a fence, and the
// other before one. A relaxed barrier of the cluster orders only reads, and writes to a block's own shared memory. A
// volatile load and an atomic may meet. Which order the threads ran in does not matter. Two readers of a word are
// remembered.
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include <array>
#include <cstdio>
#include <map>
#include <set>
#include <unordered_map>

#include "cuda_runtime.h"

namespace cuda_on_cpu::trace {
namespace {

// Cycles. Barriers, fences and loads from another block are as benchmarks/probe.cu measures them on an H100; the others
// are assumed, of the order of what microbenchmarks of Hopper published ("Dissecting the NVIDIA Hopper Architecture
// through Microbenchmarking and Multiple Level Analysis", 2024).
const struct {
  const char* step;
  unsigned cycles;
} kCosts[] = {
    {"load of a sector that no thread of the launch touched before", 700},
    {"load of a sector that another block touched (L2)", 300},
    {"load of a sector that the block has read (L1)", 35},
    {"load from shared memory", 30},
    {"load from the shared memory of another block", 200},
    {"store", 4},
    {"atomic on global memory", 300},
    {"atomic on shared memory", 60},
    {"shuffle, vote or reduction of a warp", 25},
    {"__syncwarp", 10},
    {"barrier of the block", 44},
    {"barrier of the cluster", 1300},
    {"relaxed barrier of the cluster", 210},
    {"fence", 1100},
};
enum Step {
  kFirst,
  kL2,
  kL1,
  kShared,
  kRemote,
  kStore,
  kAtomic,
  kSharedAtomic,
  kWarp,
  kSyncWarp,
  kBarrier,
  kCluster,
  kRelaxedCluster,
  kFence
};

constexpr unsigned kOverlap = 4;

using Address = uintptr_t;

struct Range {
  Address begin = 0, bytes = 0;
  bool has(Address at) const { return at - begin < bytes; }
};

enum Kind : uint8_t { kRead, kWrite, kAtomicAccess };
bool is_volatile = false, is_own = false;  // the running access; is_own: to the block's own shared memory

struct Site {  // an instruction, in global or in shared memory
  Address pc;
  Kind kind;
  bool is_shared;
  uint64_t requests, lanes, bytes, units, conflicts;  // units: sectors or wavefronts
};

struct Part {
  Address at;
  uint8_t bytes, lane;
};
struct Request {
  unsigned lanes = 0;
  Part parts[32];
};

// Who accessed a word, and when: the thread's barriers so far, and its clock of the warp's operations.
struct Access {
  uint32_t block = UINT32_MAX, clock = 0;
  uint16_t thread = 0, barriers = 0, clusters = 0, site = 0, full_clusters = 0;  // of all barriers of the cluster
  bool by_relaxed = false;                                                       // a relaxed one orders it too
  bool valid() const { return block != UINT32_MAX; }
};
struct Cell {
  Access write, reads[2];
  bool is_atomic = false, was_read = false, was_written = false;
};

// The cells of 4096 bytes: one for each word, or, once a part of a word was accessed, one for each byte.
struct Page {
  struct Sector {
    bool touched = false;
    uint32_t block = UINT32_MAX;  // the last to read it
    uint64_t ready = 0;           // when that block has it
  };
  std::vector<Cell> cells = std::vector<Cell>(1024);
  Sector sectors[128];
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

// Accesses of a block that are visible to whoever acquires this: those before this many barriers, and of each thread
// those before its clock.
struct Release {
  uint32_t block;
  uint16_t barriers, clusters;
  uint64_t time;
  std::vector<uint32_t> clocks;
};
using Location = std::vector<Release>;               // what atomics on an address published, in their order
using Acquired = std::map<const Location*, size_t>;  // with how many of them someone has seen

struct Recent {
  Address line;
  uint16_t sites[4];
  uint8_t parts, kind;
  uint16_t bytes, first;  // a bit for each of the line's
  unsigned number, slot;
};
struct Lane {
  uint64_t time, issued;  // its time, and when the group of loads began
  unsigned num_grouped;
  uint16_t grouped[kOverlap];  // the sites of the group
  uint16_t barriers, clusters, clusters_arrived, full_clusters, full_arrived;
  uint32_t clocks[32], fenced[32];  // what it knows of the warp's lanes; and knew at its last fence
  uint16_t fenced_barriers, fenced_clusters;
  bool has_fenced;
  uint64_t met;  // the warp's, when what follows was valid
  Recent recent[8];
  unsigned next_recent, paused;
  std::vector<std::pair<uint64_t, unsigned>> times;  // for each site: executions since the warp met
  Acquired seen, acquired;
};
struct Warp {
  uint64_t met;                                // how often all of its lanes did
  std::vector<std::vector<Request>> requests;  // for each site
  std::vector<unsigned> counts;
  std::vector<uint16_t> touched;
};
struct TracedBlock {
  uint32_t id;
  uint64_t barriers, clusters;
  std::vector<Lane> lanes;
  std::vector<Warp> warps;
  Memory memory;  // shared
  Acquired seen, acquired;
  Release fenced;
};

bool paused = true;
std::string kernel;
std::vector<Site> sites;
uint16_t site_table[8192];
std::vector<std::unique_ptr<TracedBlock>> traced;
Lane* lane_ = nullptr;  // the lane that runs
TracedBlock* block_ = nullptr;
Range stack, fiber, fixed, dynamic, image, host;
Memory global;
std::map<Address, Location> locations;
std::map<std::pair<uint16_t, uint16_t>, uint64_t> races;
uint64_t distinct[2], cluster_times[2], warp_operations, fences, longest, most_barriers, most_clusters, remote;
std::string records;

uint16_t site_of(Address pc, Kind kind, bool is_shared) {
  for (unsigned i = (pc * 2 + is_shared) * 2654435761u >> 7;; ++i) {
    uint16_t& entry = site_table[i % 8192];
    if (entry == 0) {
      if (sites.size() > 8000) std::abort();
      sites.push_back({pc, kind, is_shared, 0, 0, 0, 0, 0});
      entry = static_cast<uint16_t>(sites.size());
    }
    const Site& site = sites[entry - 1];
    if (site.pc == pc && site.is_shared == is_shared && site.kind == kind) return entry - 1;
  }
}

// --- requests ---

void close(Site& site, Request& request) {
  Part* const parts = request.parts;
  const unsigned lanes = request.lanes;
  ++site.requests;
  site.lanes += lanes;
  unsigned widest = 0;
  for (unsigned i = 0; i < lanes; ++i) widest = std::max<unsigned>(widest, parts[i].bytes);
  if (!site.is_shared) {
    const auto lower = [](const Part& a, const Part& b) { return a.at < b.at; };
    if (!std::is_sorted(parts, parts + lanes, lower)) std::sort(parts, parts + lanes, lower);
    Address covered = 0, sector = 0;
    for (unsigned i = 0; i < lanes; ++i) {
      const Address end = parts[i].at + parts[i].bytes;
      if (end > covered) site.bytes += end - std::max(covered, parts[i].at);
      covered = std::max(covered, end);
      for (Address s = parts[i].at / 32 + 1; s <= (end - 1) / 32 + 1; ++s) {
        if (s <= sector) continue;
        sector = s;
        ++site.units;
      }
    }
    return;
  }
  const unsigned at_once = widest <= 4 ? 32 : widest <= 8 ? 16 : 8;
  for (unsigned first = 0; first < 32; first += at_once) {
    Address words[64];
    unsigned num_words = 0, in_bank[32] = {}, most = 0;
    for (unsigned i = 0; i < lanes; ++i) {
      if (parts[i].lane - first >= at_once) continue;
      for (Address w = parts[i].at / 4; w <= (parts[i].at + parts[i].bytes - 1) / 4; ++w) {
        if (std::find(words, words + num_words, w) != words + num_words) continue;
        words[num_words++] = w;
        most = std::max(most, ++in_bank[w % 32]);
      }
    }
    site.bytes += num_words * 4;
    site.units += most;
    site.conflicts += most - (num_words + 31) / 32;
  }
}

void meet(TracedBlock& block, unsigned number) {
  Warp& warp = block.warps[number];
  for (const uint16_t site : warp.touched) {
    for (unsigned i = 0; i < warp.counts[site]; ++i) {
      close(sites[site], warp.requests[site][i]);
      warp.requests[site][i].lanes = 0;
    }
    warp.counts[site] = 0;
  }
  warp.touched.clear();
  ++warp.met;
}

// Returns whether it is a part of an access before.
bool add_to_request(Address at, Address place, unsigned bytes, Kind kind, bool is_shared, uint16_t site) {
  Lane& lane = *lane_;
  Warp& warp = block_->warps[self->rank / 32];
  if (lane.met != warp.met) {
    lane.met = warp.met;
    for (Recent& recent : lane.recent) recent.line = 0;
    lane.next_recent = 0;  // else what is found first depends on the launches before
  }
  const Address line = at / 16;
  const uint16_t own = static_cast<uint16_t>(((1u << bytes) - 1) << at % 16);
  if (kind != kAtomicAccess && bytes < 16 && at % 16 + bytes <= 16) {
    for (Recent& recent : lane.recent) {
      if (recent.line != line || recent.kind != kind) continue;
      if (recent.bytes & own || recent.parts == 4 ||
          std::find(recent.sites, recent.sites + recent.parts, site) != recent.sites + recent.parts)
        continue;
      recent.sites[recent.parts++] = site;
      recent.bytes |= own;
      Part& part = warp.requests[recent.first][recent.number].parts[recent.slot];
      const Address end = std::max(part.at + part.bytes, place + bytes);
      part.at = std::min(part.at, place);
      part.bytes = static_cast<uint8_t>(end - part.at);
      return true;
    }
  }
  if (lane.times.size() <= site) lane.times.resize(site + 32, {UINT64_MAX, 0});
  auto& [met, number] = lane.times[site];
  if (met != warp.met) met = warp.met, number = 0;
  if (warp.requests.size() <= site) {
    warp.requests.resize(site + 32);
    warp.counts.resize(site + 32);
  }
  if (warp.counts[site] == 0) warp.touched.push_back(site);
  std::vector<Request>& requests = warp.requests[site];
  if (requests.size() <= number) requests.resize(number + 1);
  warp.counts[site] = std::max(warp.counts[site], number + 1);
  Request& request = requests[number];
  request.parts[request.lanes] = {place, static_cast<uint8_t>(bytes), static_cast<uint8_t>(self->rank % 32)};
  Recent& recent = lane.recent[lane.next_recent++ % 8];
  recent = {line, {site}, 1, kind, own, site, number, request.lanes++};
  ++number;
  return false;
}

// --- races ---

bool covers(const Release& release, const Access& a) {
  if (release.barriers > a.barriers || release.clusters > a.clusters) return true;
  return release.clocks[a.thread] > a.clock;
}
bool ordered(const Access& a) {  // before what the running thread does now
  const Lane& lane = *lane_;
  if (a.block == block_->id) {
    if (a.thread == self->rank || lane.barriers > a.barriers) return true;
    if (a.thread / 32 == self->rank / 32 && lane.clocks[a.thread % 32] > a.clock) return true;
  }
  if (a.block / cluster_size == block_->id / cluster_size &&
      (lane.full_clusters > a.full_clusters || (a.by_relaxed && lane.clusters > a.clusters)))
    return true;
  for (const Acquired* acquired : {&lane.acquired, &std::as_const(block_->acquired)})
    for (const auto& [location, count] : *acquired)
      for (size_t i = 0; i < count; ++i)
        if ((*location)[i].block == a.block && covers((*location)[i], a)) return true;
  return false;
}
void compare(const Access& other, uint16_t site) {
  if (other.valid() && !ordered(other)) ++races[{other.site, site}];
}
void look(Cell& cell, Kind kind, uint16_t site) {
  const Access now = {block_->id,          lane_->clocks[self->rank % 32], static_cast<uint16_t>(self->rank),
                      lane_->barriers,     lane_->clusters_arrived,        site,
                      lane_->full_arrived, kind == kRead || is_own};
  if (kind == kRead) {
    if (!is_volatile || !cell.is_atomic) compare(cell.write, site);
    if (is_volatile) return;
    Access& first = cell.reads[0];
    if (!first.valid() || (first.block == now.block && first.thread == now.thread) || ordered(first)) {
      first = now;
    } else if (!cell.reads[1].valid() || ordered(cell.reads[1])) {
      cell.reads[1] = now;
    }
    return;
  }
  if (!(kind == kAtomicAccess && cell.is_atomic)) compare(cell.write, site);
  compare(cell.reads[0], site);
  compare(cell.reads[1], site);
  cell.write = now;
  cell.reads[0] = cell.reads[1] = Access();
  cell.is_atomic = kind == kAtomicAccess;
}
void look(Memory& memory, Address at, unsigned bytes, Kind kind, uint16_t site, bool counted) {
  for (const Address end = at + bytes; at < end;) {
    Page& page = memory.page(at / 4096);
    if (page.cells.size() == 1024 && (at % 4 || end - at < 4)) page.split();
    const unsigned width = page.cells.size() == 1024 ? 4 : 1;
    Cell& cell = page.cells[at % 4096 / width];
    look(cell, kind, site);
    if (counted) {
      bool& before = kind == kRead ? cell.was_read : cell.was_written;
      if (!before) distinct[kind != kRead] += width;
      before = true;
    }
    at += width;
  }
}

// --- time ---

void end_group() { lane_->num_grouped = 0; }
void wait_until(uint64_t ready, uint16_t site) {  // a load's value; the load belongs to the open group, or opens one
  lane_->grouped[lane_->num_grouped++] = site;
  lane_->time = std::max(lane_->time, ready);
}
uint64_t issue(uint16_t site) {
  Lane& lane = *lane_;
  uint16_t* const end = lane.grouped + lane.num_grouped;
  if (lane.num_grouped == kOverlap || std::find(lane.grouped, end, site) != end) end_group();
  if (lane.num_grouped == 0) lane.issued = lane.time;
  return lane.issued;
}
void spend(Step step) {
  end_group();
  lane_->time += kCosts[step].cycles;
}

// --- accesses ---

void access(const void* p, unsigned bytes, Kind kind, const void* instruction) {
  const Address at = reinterpret_cast<Address>(p), pc = reinterpret_cast<Address>(instruction);
  if (stack.has(at) || fiber.has(at)) return;
  TracedBlock* owner = nullptr;
  Address place = at;
  const Address before_dynamic = (fixed.bytes + 127) / 128 * 128;
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
  const uint16_t site = site_of(pc, kind, owner != nullptr);
  const bool is_part = add_to_request(at, place, bytes, kind, owner != nullptr, site);
  is_own = owner == block_;
  look(owner ? owner->memory : global, place, bytes, kind, site, !owner);
  remote += owner && owner != block_ && !is_part;
  if (kind == kAtomicAccess) spend(owner ? kSharedAtomic : kAtomic);
  if (kind == kWrite && !is_part) spend(kStore);
  if (owner) {
    if (kind == kRead && !is_part) wait_until(issue(site) + kCosts[owner == block_ ? kShared : kRemote].cycles, site);
    return;
  }
  const uint64_t now = kind != kRead ? 0 : is_part ? lane_->issued : issue(site);
  if (kind == kRead && !is_part) wait_until(now, site);
  for (Address s = at / 32; s <= (at + bytes - 1) / 32; ++s) {
    Page::Sector& sector = global.page(s / 128).sectors[s % 128];
    if (kind == kRead) {
      const bool in_l1 = sector.block == block_->id;
      const uint64_t ready =
          in_l1 ? std::max(now + kCosts[kL1].cycles, sector.ready) : now + kCosts[sector.touched ? kL2 : kFirst].cycles;
      if (!in_l1) sector.ready = ready;
      lane_->time = std::max(lane_->time, ready);
    }
    sector.touched = true;
    sector.block = kind == kRead ? block_->id : UINT32_MAX;
  }
}

// --- what a warp or a block does together ---

void see(Acquired& to, const Acquired& from) {
  for (const auto& [location, count] : from) to[location] = std::max(to[location], count);
}
// What its threads did before their fences: from a barrier on, an atomic of any of them says so.
void take_fences(TracedBlock& block) {
  for (unsigned i = 0; i < size; ++i) {
    Lane& lane = block.lanes[i];
    if (!lane.has_fenced) continue;
    lane.has_fenced = false;
    block.fenced.barriers = std::max(block.fenced.barriers, lane.fenced_barriers);
    block.fenced.clusters = std::max(block.fenced.clusters, lane.fenced_clusters);
    for (unsigned j = 0; j < 32 && i / 32 * 32 + j < size; ++j) {
      uint32_t& clock = block.fenced.clocks[i / 32 * 32 + j];
      clock = std::max(clock, lane.fenced[j]);
    }
  }
}
void end_of_barrier(TracedBlock& block, uint64_t time) {
  for (unsigned w = 0; w < block.warps.size(); ++w) meet(block, w);
  take_fences(block);
  for (unsigned i = 0; i < size; ++i) {
    Lane& lane = block.lanes[i];
    lane.time = time;
    lane.num_grouped = 0;
    if (!lane.seen.empty()) see(block.seen, lane.seen), lane.seen.clear();
    if (!lane.acquired.empty()) see(block.acquired, lane.acquired), lane.acquired.clear();
  }
}
uint64_t latest(const TracedBlock& block) {
  uint64_t time = 0;
  for (const Lane& lane : block.lanes) time = std::max(time, lane.time);
  return time;
}

std::string hexadecimal(Address pc) {
  char text[32];
  snprintf(text, sizeof text, "\"%lx\"", static_cast<unsigned long>(pc - 1 - image.begin));
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
  sites.clear();
  std::fill(std::begin(site_table), std::end(site_table), 0);
  races.clear();
  locations.clear();
  global.clear();  // the last launch may have failed
  distinct[0] = distinct[1] = warp_operations = fences = longest = most_barriers = most_clusters = remote = 0;
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
  cluster_times[0] = cluster_times[1] = 0;
  for (unsigned b = 0; b < cluster_size; ++b) {
    TracedBlock& block = *traced[b];
    const uint3 index = blocks[b]->index;
    block.id = index.x + gridDim.x * (index.y + gridDim.y * index.z);
    block.barriers = block.clusters = 0;
    block.memory.clear();
    block.seen.clear();
    block.acquired.clear();
    block.fenced = {block.id, 0, 0, 0, std::vector<uint32_t>(size)};
    block.lanes.resize(size);
    block.warps.resize((size + 31) / 32);
    for (unsigned i = 0; i < size; ++i) {
      Lane& lane = block.lanes[i];
      lane.time = lane.num_grouped = lane.barriers = lane.clusters = lane.clusters_arrived = lane.paused = 0;
      lane.full_clusters = lane.full_arrived = 0;
      lane.has_fenced = false;
      std::fill(lane.clocks, lane.clocks + 32, 0);
      std::fill(lane.fenced, lane.fenced + 32, 0);
      lane.clocks[i % 32] = 1;
      lane.fenced_barriers = lane.fenced_clusters = 0;
      lane.seen.clear();
      lane.acquired.clear();
    }
  }
}

void cluster_ends() {
  for (unsigned b = 0; b < cluster_size; ++b) {
    TracedBlock& block = *traced[b];
    for (unsigned w = 0; w < block.warps.size(); ++w) meet(block, w);
    longest = std::max(longest, latest(block));
    most_barriers = std::max(most_barriers, block.barriers);
    most_clusters = std::max(most_clusters, block.clusters);
  }
}

void barrier_opens() {
  TracedBlock& block = *block_;
  ++block.barriers;
  for (Lane& lane : block.lanes) ++lane.barriers;
  end_of_barrier(block, latest(block) + kCosts[kBarrier].cycles);
}

void arrives_at_cluster(bool is_relaxed) {
  end_group();
  uint64_t& opens = cluster_times[lane_->clusters_arrived++ % 2];
  opens = std::max(opens, lane_->time + kCosts[is_relaxed ? kRelaxedCluster : kCluster].cycles);
  lane_->full_arrived += !is_relaxed;
  if (cluster_arrived + 1 < cluster_size * size) return;
  cluster_times[lane_->clusters_arrived % 2] = 0;  // the next barrier's
  for (unsigned b = 0; b < cluster_size; ++b) {
    TracedBlock& block = *traced[b];
    ++block.clusters;
    for (unsigned w = 0; w < block.warps.size(); ++w) meet(block, w);
    take_fences(block);
    for (unsigned other = 0; other < cluster_size; ++other)
      for (Lane& lane : traced[other]->lanes) see(block.seen, lane.seen), see(block.acquired, lane.acquired);
  }
}
void waited_for_cluster() {
  end_group();
  lane_->time = std::max(lane_->time, cluster_times[lane_->clusters++ % 2]);
  lane_->full_clusters = lane_->full_arrived;
}

void warp_operation(unsigned mask, bool only_waits) {
  const unsigned first = self->rank / 32 * 32, lanes = std::min(32u, size - first);
  Lane* const warp = &block_->lanes[first];
  ++warp_operations;
  uint64_t time = 0;
  uint32_t clocks[32] = {}, fenced[32] = {};
  bool has_fenced = false;
  uint16_t barriers = 0, clusters = 0;
  Acquired seen, acquired;
  for (unsigned i = 0; i < lanes; ++i) {
    if (!(mask >> i & 1)) continue;
    const Lane& lane = warp[i];
    time = std::max(time, lane.time);
    for (unsigned j = 0; j < 32; ++j) clocks[j] = std::max(clocks[j], lane.clocks[j]);
    if (!lane.seen.empty()) see(seen, lane.seen);
    if (!lane.acquired.empty()) see(acquired, lane.acquired);
    if (!lane.has_fenced) continue;
    has_fenced = true;
    barriers = std::max(barriers, lane.fenced_barriers);
    clusters = std::max(clusters, lane.fenced_clusters);
    for (unsigned j = 0; j < 32; ++j) fenced[j] = std::max(fenced[j], lane.fenced[j]);
  }
  for (unsigned i = 0; i < lanes; ++i) {
    if (!(mask >> i & 1)) continue;
    Lane& lane = warp[i];
    lane.time = time + kCosts[only_waits ? kSyncWarp : kWarp].cycles;
    lane.num_grouped = 0;
    for (unsigned j = 0; j < 32; ++j) lane.clocks[j] = clocks[j] + (mask >> j & 1 && j != i ? 1 : 0);
    ++lane.clocks[i];
    if (!seen.empty()) lane.seen = seen;
    if (!acquired.empty()) lane.acquired = acquired;
    if (!has_fenced) continue;
    lane.has_fenced = true;
    lane.fenced_barriers = barriers;
    lane.fenced_clusters = clusters;
    std::copy(fenced, fenced + 32, lane.fenced);
  }
  if (mask == (lanes == 32 ? UINT32_MAX : (1u << lanes) - 1)) meet(*block_, first / 32);
}

void fence() {
  Lane& lane = *lane_;
  spend(kFence);
  ++fences;
  ++lane.clocks[self->rank % 32];
  std::copy(lane.clocks, lane.clocks + 32, lane.fenced);
  lane.has_fenced = true;
  lane.fenced_barriers = lane.barriers;
  lane.fenced_clusters = lane.clusters;
  for (const Acquired* seen : {&lane.seen, &block_->seen}) {
    see(lane.acquired, *seen);
    for (const auto& [location, count] : *seen)
      for (size_t i = 0; i < count; ++i) lane.time = std::max(lane.time, (*location)[i].time);
  }
}

void atomic(void* memory, unsigned bytes, const void* instruction) {
  const Address at = reinterpret_cast<Address>(memory);
  access(memory, bytes, kAtomicAccess, instruction);
  if (fixed.has(at) || dynamic.has(at)) return;
  if (fences == 0) return;
  Location& location = locations[at];
  if (!location.empty()) lane_->seen[&location] = location.size();
  Release release = block_->fenced;
  if (lane_->has_fenced) {
    release.barriers = std::max(release.barriers, lane_->fenced_barriers);
    release.clusters = std::max(release.clusters, lane_->fenced_clusters);
    for (unsigned j = 0, first = self->rank / 32 * 32; j < 32 && first + j < size; ++j)
      release.clocks[first + j] = std::max(release.clocks[first + j], lane_->fenced[j]);
  }
  release.time = lane_->time;
  location.push_back(release);
  for (unsigned b = 0; b < cluster_size; ++b)  // what its cluster's barriers have shown it of the other blocks
    if (traced[b].get() != block_) location.push_back(traced[b]->fenced), location.back().time = lane_->time;
}

void launch_ends() {
  uint64_t requests[2] = {}, units[2] = {}, bytes[2] = {}, atomics = 0, shared[3] = {};
  std::string list;
  for (const Site& site : sites) {
    if (site.is_shared) {
      shared[0] += site.requests, shared[1] += site.units, shared[2] += site.conflicts;
    } else {
      const bool writes = site.kind != kRead;
      requests[writes] += site.requests, units[writes] += site.units, bytes[writes] += site.bytes;
      if (site.kind == kAtomicAccess) atomics += site.requests;
    }
    list += std::string(list.empty() ? "" : ", ") + "[" + hexadecimal(site.pc) + ", \"" +
            (site.is_shared ? "shared " : "global ") +
            (site.kind == kRead    ? "load"
             : site.kind == kWrite ? "store"
                                   : "atomic") +
            "\", " + std::to_string(site.requests) + ", " + std::to_string(site.lanes) + ", " +
            std::to_string(site.bytes) + ", " + std::to_string(site.units) + ", " + std::to_string(site.conflicts) +
            "]";
  }
  const uint64_t num_blocks = uint64_t{gridDim.x} * gridDim.y * gridDim.z;
  const std::pair<const char*, uint64_t> numbers[] = {
      {"blocks", num_blocks},
      {"cluster", cluster_size},
      {"threads", size},
      {"read_requests", requests[0]},
      {"read_sectors", units[0]},
      {"read_bytes", bytes[0]},
      {"read_distinct_bytes", distinct[0]},
      {"write_requests", requests[1]},
      {"write_sectors", units[1]},
      {"write_bytes", bytes[1]},
      {"write_distinct_bytes", distinct[1]},
      {"atomics", atomics},
      {"shared_requests", shared[0]},
      {"shared_wavefronts", shared[1]},
      {"shared_conflicts", shared[2]},
      {"other_blocks_shared_accesses", remote},
      {"barriers", most_barriers},
      {"cluster_barriers", most_clusters},
      {"warp_operations", warp_operations},
      {"warps", num_blocks * ((size + 31) / 32)},
      {"fences", fences},
      {"chain_cycles", longest},
  };
  std::string between;
  for (const auto& [pair, count] : races)
    between += std::string(between.empty() ? "" : ", ") + "[" + hexadecimal(sites[pair.first].pc) + ", " +
               hexadecimal(sites[pair.second].pc) + ", " + std::to_string(count) + "]";
  records += "{\"kernel\": \"" + kernel + "\"";
  for (const auto& [name, value] : numbers) records += std::string(", \"") + name + "\": " + std::to_string(value);
  records += ", \"races\": [" + between + "], \"sites\": [" + list + "]}\n";
  global.clear();
}

}  // namespace cuda_on_cpu::trace

using namespace cuda_on_cpu::trace;

// A line of JSON for each launch since the last call.
extern "C" __attribute__((visibility("default"))) const char* take_trace() {
  static std::string taken;
  taken.swap(records);
  records.clear();
  return taken.c_str();
}
extern "C" __attribute__((visibility("default"))) const char* trace_costs() {
  static std::string text;
  text.clear();
  for (const auto& [step, cycles] : kCosts) text += std::string(step) + "\t" + std::to_string(cycles) + "\n";
  return text.c_str();
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
#define VOLATILE(bytes)                                                 \
  void __tsan_volatile_read##bytes(void* p) {                           \
    is_volatile = true;                                                 \
    if (!paused) access(p, bytes, kRead, __builtin_return_address(0));  \
    is_volatile = false;                                                \
  }                                                                     \
  void __tsan_volatile_write##bytes(void* p) {                          \
    if (!paused) access(p, bytes, kWrite, __builtin_return_address(0)); \
  }
#pragma GCC visibility push(hidden)
extern "C" {
TRACED(1);
TRACED(2);
TRACED(4);
TRACED(8);
TRACED(16);
VOLATILE(1);
VOLATILE(2);
VOLATILE(4);
VOLATILE(8);
VOLATILE(16);
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
