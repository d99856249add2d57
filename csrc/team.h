// Several threads that go through the same phases of one computation, on the CPU.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

namespace specvis {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A phase is so many tasks. It ends when all are done, and what they wrote can be read in the next one. A thread takes
// the next task that nobody has taken, so that one thread alone gets through too: PyTorch, whose threads these are,
// promises no more than one. Who finds no task left waits busily for microseconds, since a phase takes no longer. After
// that it sleeps: the core may be what the last task waits for.
class Team {
  struct alignas(64) Phase {
    std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int64_t> done{0};
  };

 public:
  explicit Team(int64_t phases) : phases_(phases) {}

  // What each thread holds.
  class Member {
   public:
    explicit Member(Team& team) : next_(team.phases_.data()) {}

    template <class Task>
    inline __attribute__((always_inline)) void phase(int64_t tasks, Task task) {
      Phase& phase = *next_++;
      while (phase.taken.load(std::memory_order_relaxed) < tasks) {
        const int64_t i = phase.taken.fetch_add(1, std::memory_order_relaxed);
        if (i >= tasks) break;
        task(i);
        phase.done.fetch_add(1, std::memory_order_release);
      }
      for (int tries = 0; phase.done.load(std::memory_order_acquire) < tasks; ++tries) {
        if (tries < kBusyTries)
          pause();
        else
          std::this_thread::sleep_for(std::chrono::microseconds(10));
      }
    }

   private:
    static constexpr int kBusyTries = 1 << 10;
    Phase* next_;
  };

  // Calls work(member) on so many threads.
  template <class Work>
  void run(int64_t threads, Work work) {
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) { work(Member(*this)); });
  }

 private:
  std::vector<Phase> phases_;
};

}  // namespace specvis
