// The part of CUDA's host interface that the launchers use, for kernels that run on the CPU.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

typedef struct CUstream_st* cudaStream_t;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorLaunchFailure = 719
};
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
struct cudaFuncAttributes {
  size_t sharedSizeBytes;
  int ptxVersion;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

namespace cuda_on_cpu {

constexpr int kSharedByDefault = 48 * 1024;

inline cudaError_t last_error = cudaSuccess;
inline std::string report;                        // of the last launch that failed
inline std::map<const void*, int> shared_limits;  // of kernels that asked for more dynamic shared memory

// What a block may have of shared memory: Hopper's, or what the variable says.
inline int most_shared() {
  const char* bytes = std::getenv("CUDA_ON_CPU_SHARED");
  return bytes ? std::atoi(bytes) : 227 * 1024;
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_on_cpu::last_error;
  cuda_on_cpu::last_error = cudaSuccess;
  return error;
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                     ? "no error"
         : error == cudaErrorInvalidValue         ? "invalid argument"
         : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
                                                  : cuda_on_cpu::report.c_str();
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount       ? 132
           : attribute == cudaDevAttrComputeCapabilityMajor  ? 8
           : attribute == cudaDevAttrMaxSharedMemoryPerBlock ? cuda_on_cpu::kSharedByDefault
                                                             : cuda_on_cpu::most_shared();
  return cudaSuccess;
}

// What a kernel declares of shared memory is not known here: more than any of them does.
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {8192, 90};
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || bytes > cuda_on_cpu::most_shared()) return cudaErrorInvalidValue;
  cuda_on_cpu::shared_limits[reinterpret_cast<const void*>(kernel)] = bytes;
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
