// The part of CUDA's host interface that the launchers use, for kernels that run on the CPU.
#pragma once
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <utility>

typedef struct CUstream_st* cudaStream_t;

enum cudaError_t {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorInvalidConfiguration = 9,
  cudaErrorInvalidDeviceFunction = 98,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorIllegalAddress = 700,
  cudaErrorLaunchOutOfResources = 701,
  cudaErrorLaunchFailure = 719,
  cudaErrorInvalidClusterSize = 912
};
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlock = 8,
  cudaDevAttrMultiProcessorCount = 16,
  cudaDevAttrComputeCapabilityMajor = 75,
  cudaDevAttrComputeCapabilityMinor = 76,
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
inline std::string report;  // says why the last launch failed

inline int variable(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value ? std::atoi(value) : otherwise;
}
inline int shared_per_block() { return variable("CUDA_ON_CPU_SHARED", 227 * 1024); }  // Hopper's
inline int capability() { return variable("CUDA_ON_CPU_CAPABILITY", 9); }
inline int multiprocessors() { return variable("CUDA_ON_CPU_SMS", 132); }
inline cudaError_t device_error() { return static_cast<cudaError_t>(variable("CUDA_ON_CPU_ERROR", 0)); }

// Other variables make another device: the launchers ask a device only once what it offers.
inline int device() {
  static std::map<std::array<int, 3>, int> devices;
  const std::array<int, 3> offers = {shared_per_block(), capability(), multiprocessors()};
  return devices.emplace(offers, static_cast<int>(devices.size())).first->second;
}

// How much dynamic shared memory a kernel may be launched with, on this device: more if it asked for that.
inline std::map<std::pair<const void*, int>, int> shared_limits;
inline int most_shared(const void* kernel) {
  const auto limit = shared_limits.find({kernel, device()});
  return std::min(shared_per_block(), std::max(kSharedByDefault, limit == shared_limits.end() ? 0 : limit->second));
}

}  // namespace cuda_on_cpu

inline cudaError_t cudaGetLastError() {
  const cudaError_t error = cuda_on_cpu::last_error;
  cuda_on_cpu::last_error = cudaSuccess;
  return error;
}

inline cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  *free = *total = 0;
  return cuda_on_cpu::device_error();
}

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess                     ? "no error"
         : error == cudaErrorInvalidValue         ? "invalid argument"
         : error == cudaErrorInvalidConfiguration ? "invalid configuration argument"
         : error == cudaErrorIllegalAddress       ? "an illegal memory access was encountered"
                                                  : cuda_on_cpu::report.c_str();
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = cuda_on_cpu::device();
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrMultiProcessorCount       ? cuda_on_cpu::multiprocessors()
           : attribute == cudaDevAttrComputeCapabilityMajor  ? cuda_on_cpu::capability()
           : attribute == cudaDevAttrComputeCapabilityMinor  ? 0
           : attribute == cudaDevAttrMaxSharedMemoryPerBlock ? cuda_on_cpu::kSharedByDefault
                                                             : cuda_on_cpu::shared_per_block();
  return cudaSuccess;
}

// What a kernel declares of shared memory is not known here: more than any of them does.
inline cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {8192, 90};
  return cudaSuccess;
}

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  if (bytes < 0 || bytes > cuda_on_cpu::shared_per_block()) return cudaErrorInvalidValue;
  cuda_on_cpu::shared_limits[{reinterpret_cast<const void*>(kernel), cuda_on_cpu::device()}] = bytes;
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}
