// Lets the libraries load where glibc is as old as 2.28, whatever they are built with. The definitions here are hidden
// from other libraries. Ours calls them in place of glibc's, and so does the libstdc++ in it.
#include <dlfcn.h>

#include <cstdint>

#define HIDDEN extern "C" __attribute__((visibility("hidden")))

#if defined(__GLIBC__) && (defined(__x86_64__) || defined(__aarch64__))
#ifdef __x86_64__
#define OLDEST "@GLIBC_2.2.5"
#else
#define OLDEST "@GLIBC_2.17"
#endif
// glibc keeps the old versions of a function beside the new one, which a linker takes. The oldest does the same.
#define CALL_OLDEST(type, name, parameters, arguments) \
  asm(".symver oldest_" #name "," #name OLDEST);       \
  extern "C" type oldest_##name parameters;            \
  HIDDEN type our_##name parameters asm(#name);        \
  type our_##name parameters { return oldest_##name arguments; }

CALL_OLDEST(double, exp, (double x), (x))
CALL_OLDEST(double, log, (double x), (x))
CALL_OLDEST(void*, dlopen, (const char* file, int mode), (file, mode))
CALL_OLDEST(void*, dlsym, (void* library, const char* name), (library, name))
CALL_OLDEST(int, pthread_create, (void* thread, const void* attributes, void* (*start)(void*), void* argument),
            (thread, attributes, start, argument))
CALL_OLDEST(int, pthread_detach, (uintptr_t thread), (thread))
CALL_OLDEST(int, pthread_once, (void* control, void (*routine)()), (control, routine))

// shared_ptr counts without atomic operations while this is true: never here.
HIDDEN char __libc_single_threaded;
char __libc_single_threaded = false;

// A thread counts its exceptions in one place, torch's libstdc++: they are thrown here and caught there.
HIDDEN void* __cxa_get_globals() {
  using Get = void* (*)();
  static const Get get = reinterpret_cast<Get>(dlsym(dlopen("libstdc++.so.6", RTLD_LAZY), "__cxa_get_globals"));
  return get();
}

HIDDEN void* __cxa_get_globals_fast() { return __cxa_get_globals(); }
#endif
