// The CUDA that the library is built with, as text in its file: _libraries.py reads it before it loads the library, and
// does not load one that the driver is too old for.
#include <cuda_runtime_api.h>

#define TEXT_OF(number) #number
#define TEXT(number) TEXT_OF(number)

extern "C" __attribute__((visibility("default"))) const char specvis_kernels_cuda_version[] =
    "specvis_kernels is built with CUDART_VERSION " TEXT(CUDART_VERSION);
