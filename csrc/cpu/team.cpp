#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <torch/csrc/stable/ops.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <system_error>
#include <thread>

namespace specvis {
namespace {

constexpr int64_t kIdle = 500000;  // nanoseconds in which a thread waits busily for the next computation
// A thread waits for the tasks of others as long as its own took, and this long. If that is not enough, the system has
// given another thread's core to other work. Then no other thread is asked for a while. A thread that found no task
// does not know how long one takes.
constexpr int64_t kWait = 500000, kCrowded = 50000000;

std::atomic<int64_t> crowded_until{0};

int64_t nanoseconds() { return std::chrono::nanoseconds(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Lets this thread run on the cores on which `caller` may run now: they were other ones when this thread began.
void follow(pid_t caller) {
  cpu_set_t own, theirs;
  if (sched_getaffinity(0, sizeof own, &own) == 0 && sched_getaffinity(caller, sizeof theirs, &theirs) == 0 &&
      !CPU_EQUAL(&own, &theirs))
    sched_setaffinity(0, sizeof theirs, &theirs);
}

struct Job {
  std::function<void(int64_t)> work;
  int64_t threads;
  const pid_t caller = static_cast<pid_t>(syscall(SYS_gettid));
  std::atomic<int64_t> next{1};
};

// Threads that wait for a job, as many as were ever asked for. A job wakes those that it wants.
class Pool {
 public:
  static Pool& here() { return *current(); }

  void ask(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    try {
      while (static_cast<int64_t>(wake_.size()) < job->threads - 1) {
        wake_.emplace_back();
        std::thread([this, index = wake_.size() - 1] { serve(index); }).detach();
      }
    } catch (const std::system_error&) {  // the system has no more threads: the caller gets through
      wake_.pop_back();
    }
    job_ = job;
    number_.fetch_add(1, std::memory_order_release);
    for (int64_t i = std::min<int64_t>(job->threads - 1, wake_.size()) - 1; i >= 0; --i) wake_[i].notify_one();
  }

  // The job's memory is not kept for longer than the job.
  void forget(const std::shared_ptr<Job>& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (job_ == job) job_.reset();
  }

 private:
  static Pool*& current() {
    static Pool* pool = [] {
      // A child process has none of the threads, and a condition variable whose waiters never leave: it takes a new
      // pool.
      pthread_atfork([] { here().mutex_.lock(); }, [] { here().mutex_.unlock(); }, [] { current() = new Pool; });
      return new Pool;  // never destroyed: its threads may be the last that run
    }();
    return pool;
  }

  void serve(int64_t index) {
    int64_t begin = nanoseconds();
    for (int64_t seen = 0;;) {
      while (number_.load(std::memory_order_acquire) == seen && nanoseconds() - begin < kIdle) pause();
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_[index].wait(lock, [&] { return number_.load(std::memory_order_relaxed) != seen; });
        seen = number_.load(std::memory_order_relaxed);
        job = job_;
      }
      if (!job || index >= job->threads - 1) continue;
      if (nanoseconds() - begin >= kIdle) follow(job->caller);  // after each sleep
      const int64_t number = job->next.fetch_add(1, std::memory_order_relaxed);
      if (number < job->threads) job->work(number);
      begin = nanoseconds();
    }
  }

  std::mutex mutex_;
  std::deque<std::condition_variable> wake_;  // one for each thread
  std::shared_ptr<Job> job_;
  std::atomic<int64_t> number_{0};  // the job's number
};

}  // namespace

int64_t Team::Member::now() { return nanoseconds(); }

void Team::Member::wait(const Phase& phase, int64_t tasks, int64_t begin, bool has_worked) {
  const int64_t asked = now(), most = asked - begin + kWait;
  while (phase.done.load(std::memory_order_acquire) < tasks) {
    if (now() - asked < most) {
      pause();
    } else {
      if (has_worked) crowded_until.store(now() + kCrowded, std::memory_order_relaxed);
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
  }
}

int64_t Team::threads_for(int64_t work, int64_t work_of_thread) {
  const int64_t worth = (work - 1) / std::max<int64_t>(work_of_thread, 1) + 1;
  if (worth <= 1 || nanoseconds() < crowded_until.load(std::memory_order_relaxed)) return 1;
  return std::min<int64_t>(torch::stable::get_num_threads(), worth);
}

void Team::run(const std::shared_ptr<Team>& team, int64_t threads, std::function<void(Member)> work) {
  const auto of_number = [team, work = std::move(work)](int64_t number) { work(Member(*team, number)); };
  std::shared_ptr<Job> job;
  if (threads > 1) {
    job = std::make_shared<Job>();
    job->work = of_number;
    job->threads = threads;
    Pool::here().ask(job);
  }
  of_number(0);
  if (job) Pool::here().forget(job);
  if (team->error_) std::rethrow_exception(team->error_);
}

void Team::fail() {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) error_ = std::current_exception();
}

}  // namespace specvis
