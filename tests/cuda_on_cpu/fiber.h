// A function that runs on a stack of its own and can wait in its middle.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if !defined(__x86_64__) || defined(CUDA_ON_CPU_UCONTEXT)
#include <ucontext.h>
#endif

namespace cuda_on_cpu {

#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)

using Registers = void*;  // a stack pointer: the registers lie on the stack

// Leaves the registers that a callee must keep, and goes on where `to` was left.
__attribute__((naked, noinline)) inline void change(Registers*, Registers*) {
  asm("pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
      "movq %rsp, (%rdi)\n"
      "movq (%rsi), %rsp\n"
      "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
      "ret");
}

inline void begin_at(Registers* registers, char* stack, size_t bytes, void (*function)()) {
  void** top = reinterpret_cast<void**>(stack + bytes);
  *--top = nullptr;  // aligns the stack as a call does
  *--top = reinterpret_cast<void*>(function);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  *registers = top;
}

#else  // slower, for any processor

using Registers = ucontext_t;

inline void change(Registers* from, Registers* to) { swapcontext(from, to); }

inline void begin_at(Registers* registers, char* stack, size_t bytes, void (*function)()) {
  getcontext(registers);
  registers->uc_stack.ss_sp = stack;
  registers->uc_stack.ss_size = bytes;
  makecontext(registers, function, 0);
}

#endif

class Fiber {
 public:
  static constexpr size_t kStack = 128 * 1024;

  Fiber()
      : stack_(static_cast<char*>(
            mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0))) {
    if (stack_ == MAP_FAILED) std::abort();
  }
  Fiber(const Fiber&) = delete;
  ~Fiber() { munmap(stack_, kStack); }

  // From outside: resume() runs `function` from its beginning. It must not return, but wait() for ever.
  void begin(void (*function)()) {
    function_ = function;
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(stack_, kStack);
#endif
    begin_at(&inside_, stack_, kStack, enter);
  }
  void resume() {
    running_ = this;
#ifdef __SANITIZE_ADDRESS__
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, stack_, kStack);
    change(&outside_, &inside_);
    __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
#else
    change(&outside_, &inside_);
#endif
  }

  void* stack() const { return stack_; }

  // From inside: resume() returns, and the next one goes on from here.
  void wait() {
#ifdef __SANITIZE_ADDRESS__
    void* frames = nullptr;
    __sanitizer_start_switch_fiber(&frames, caller_, caller_bytes_);
    change(&inside_, &outside_);
    __sanitizer_finish_switch_fiber(frames, &caller_, &caller_bytes_);
#else
    change(&inside_, &outside_);
#endif
  }

 private:
  static void enter() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &running_->caller_, &running_->caller_bytes_);
#endif
    running_->function_();
    std::abort();
  }

  static inline Fiber* running_ = nullptr;
  char* stack_;
  Registers inside_, outside_;
  void (*function_)();
#ifdef __SANITIZE_ADDRESS__
  const void* caller_;
  size_t caller_bytes_;
#endif
};

}  // namespace cuda_on_cpu
