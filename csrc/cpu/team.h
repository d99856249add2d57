// Threads of this library, on the CPU. They wait busily for microseconds only, so that nobody pays for them where cores
// are shared; the threads of OpenMP, which PyTorch has, do so for milliseconds.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace specvis {

// Several threads that go through the phases of one computation. A phase has a number of tasks. It ends when all are
// done, and what they wrote can be read in the next one. A thread takes the next task that nobody has taken: the caller
// gets through alone if no other thread comes, as after a fork, and never waits for a thread that is late.
class Team {
  struct alignas(64) Phase {
    std::atomic<int64_t> taken{0};
    alignas(64) std::atomic<int64_t> done{0};
  };

 public:
  explicit Team(int64_t phases) : phases_(phases) {}

  // What each thread holds. The caller's number is 0.
  class Member {
   public:
    Member(Team& team, int64_t number) : number(number), team_(team), next_(team.phases_.data()) {}

    template <class Task>
    inline __attribute__((always_inline)) void phase(int64_t tasks, Task task) {
      Phase& phase = *next_++;
      const int64_t begin = now();
      bool has_worked = false;
      while (phase.taken.load(std::memory_order_relaxed) < tasks) {
        const int64_t i = phase.taken.fetch_add(1, std::memory_order_relaxed);
        if (i >= tasks) break;
        has_worked = true;
        try {
          task(i);
        } catch (...) {
          team_.fail();
        }
        phase.done.fetch_add(1, std::memory_order_release);
      }
      if (phase.done.load(std::memory_order_acquire) < tasks) wait(phase, tasks, begin, has_worked);
    }

    const int64_t number;

   private:
    static int64_t now();  // in nanoseconds
    static void wait(const Phase& phase, int64_t tasks, int64_t begin, bool has_worked);

    Team& team_;
    Phase* next_;
  };

  // How many threads there should be for this work; each further `work_of_thread` is worth another one.
  static int64_t threads_for(int64_t work, int64_t work_of_thread);

  // Calls work(member) on the caller and on threads that have time, of numbers below `threads`. A thread that comes
  // late may call it when all is done, and finds no task: so all that `work` uses between tasks must belong to it.
  static void run(const std::shared_ptr<Team>& team, int64_t threads, std::function<void(Member)> work);

 private:
  void fail();

  std::vector<Phase> phases_;
  std::mutex mutex_;
  std::exception_ptr error_;  // the first that a task threw
};

// Calls task(begin, end) for parts of [0, count), each of at least `grain`; the last may be smaller.
template <class Task>
void parallel_for(int64_t count, int64_t grain, const Task& task) {
  const int64_t parts = count > 0 ? Team::threads_for(count, grain) : 0;
  if (parts <= 1) {
    if (count > 0) task(0, count);
    return;
  }
  Team::run(std::make_shared<Team>(1), parts, [=, &task](Team::Member member) {
    member.phase(parts, [&](int64_t i) { task(count * i / parts, count * (i + 1) / parts); });
  });
}

}  // namespace specvis
