// The check of an op's arguments, and the memory of its results. The public functions in Python check more, with better
// words. This check is for direct calls of torch.ops.specvis_kernels: they end in an error too, and a kernel reads and
// writes no memory but that of its tensors.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../shared/params.h"

// What torch says of its last error: torch 2.13 and later have this function.
extern "C" __attribute__((weak, visibility("default"))) const char* torch_exception_get_what_without_backtrace();

namespace specvis {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The limits of specvis_kernels/_checks.py. With them no index, and no sum of masses, leaves 63 bits.
constexpr int64_t kMostIds = 1 << 19;       // V, and how many neighbors or other ids are summed for one token
constexpr int64_t kMost = (1ll << 31) - 1;  // every other size and count

// Python makes a MemoryError of it.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

template <class T>
constexpr ScalarType type_of() {
  if (std::is_same_v<T, float>) return ScalarType::Float;
  if (std::is_same_v<T, double>) return ScalarType::Double;
  if (std::is_same_v<T, int64_t>) return ScalarType::Long;
  if (std::is_same_v<T, int32_t>) return ScalarType::Int;
  return std::is_same_v<T, bool> ? ScalarType::Bool : ScalarType::Char;
}

#ifdef SPECVIS_CUDA
#ifdef __CUDA_ARCH_LIST__  // nvcc says for which GPUs it compiles, for example 800,900
inline std::string gpus_built_for() {
  std::string names;
  for (const int gpu : {__CUDA_ARCH_LIST__})
    names += (names.empty() ? "" : ", ") + std::to_string(gpu / 100) + "." + std::to_string(gpu % 100 / 10);
  return names;
}
#else
inline std::string gpus_built_for() { return "none"; }
#endif

// Raises an error of CUDA that a call of this op has returned.
inline void check(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // otherwise the next launch, of another op, would return it too
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction) {
    int device = 0, major = 0, minor = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
    cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
    STD_TORCH_CHECK(false, op, ": the CUDA kernels of specvis_kernels are built for GPUs of compute capability ",
                    gpus_built_for(), ", and this GPU has ", major, ".", minor,
                    ": build the package again with TORCH_CUDA_ARCH_LIST=", major, ".", minor);
  }
  const bool is_fault = cudaErrorIllegalAddress <= error && error <= cudaErrorLaunchFailure &&
                        error != cudaErrorLaunchOutOfResources;  // that is a launch of this op, refused
  STD_TORCH_CHECK(false, op, ": CUDA error: ", cudaGetErrorString(error),
                  is_fault ? ". It may be of a kernel before this one: CUDA_LAUNCH_BLOCKING=1 tells which" : "");
}
#endif

// As long as this object exists, its thread rounds to the nearest number and knows denormal ones, whatever the program
// has set; threads that begin meanwhile do as well.
class UsualFloats {
 public:
  UsualFloats() : before_(mode()) { set(kUsual); }
  ~UsualFloats() { set(before_); }
  UsualFloats(const UsualFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kUsual = 0x1f80;
  static uint64_t mode() { return __builtin_ia32_stmxcsr(); }
  static void set(uint64_t mode) { __builtin_ia32_ldmxcsr(static_cast<uint32_t>(mode)); }
#else
  static constexpr uint64_t kUsual = 0;
#if defined(__aarch64__)
  static uint64_t mode() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void set(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode)); }
#else
  static uint64_t mode() { return 0; }
  static void set(uint64_t) {}
#endif
#endif
  const uint64_t before_;
};

// The arguments of one call. The first tensor that is checked says on which device the others must be. In `sizes` each
// dimension has a letter or the digit that is its size. A letter is one size throughout a call; V, k and g count ids.
class Arguments {
 public:
  // `positive`: the letters of sizes that may not be 0.
  Arguments(const char* op, const char* positive) : op_(op), positive_(positive) {}

  // Checks a tensor that is read, and says where its elements are: null for an optional tensor that is not given.
  template <class T>
  void read(const char* name, const Tensor& tensor, const char* sizes, const T** to) {
    *to = static_cast<const T*>(read(name, tensor, sizes, type_of<T>()));
  }
  template <class T>
  void read(const char* name, const std::optional<Tensor>& tensor, const char* sizes, const T** to) {
    *to = nullptr;
    if (tensor) read(name, *tensor, sizes, to);
  }
  const void* read(const char* name, const Tensor& tensor, const char* sizes, ScalarType type) {
    check_sizes(name, tensor, sizes);
    require(tensor.scalar_type() == type, name, "has another dtype");
    return place(name, tensor, false);
  }
  // A tensor of float32, float16 or bfloat16.
  FloatType read_floats(const char* name, const Tensor& tensor, const char* sizes, const void** to) {
    *to = read(name, tensor, sizes, tensor.scalar_type());
    return float_type_of(name, tensor);
  }
  // A tensor of int32 or int64, or of uint16 if `or_uint16`.
  Integers read_integers(const char* name, const Tensor& tensor, const char* sizes, bool or_uint16 = false) {
    const ScalarType type = tensor.scalar_type();
    require(type == ScalarType::Int || type == ScalarType::Long || (or_uint16 && type == ScalarType::UInt16), name,
            "has another dtype");
    return {read(name, tensor, sizes, type), static_cast<int64_t>(tensor.element_size())};
  }
  Neighbors read_neighbors(const Tensor& table, int64_t offset) {
    const Integers codes = read_integers("neighbors", table, "Ck", true);
    require(offset >= 0 && size('C') <= size('V') && offset <= size('V') - size('C'),
            "the codes of neighbors leave the vocabulary");
    return {codes, size('C'), size('k'), offset};
  }
  // As read_floats, for a tensor with strides; the last dimension's must be 1. The tensor becomes a copy if its
  // elements are not aligned.
  FloatType read_strided(const char* name, Tensor& tensor, const char* sizes, const void** to, int64_t* strides) {
    check_sizes(name, tensor, sizes);
    const int64_t last = tensor.dim() - 1;
    require(tensor.size(last) <= 1 || tensor.stride(last) == 1, name, "must be contiguous in its last dimension");
    check_device(name, tensor);
    int64_t elements = tensor.numel() > 0;
    for (int64_t d = 0; d <= last && elements; ++d) elements += (tensor.size(d) - 1) * tensor.stride(d);
    check_memory(name, tensor, elements);
    if (is_misaligned(tensor)) tensor = torch::stable::clone(tensor);
    for (int64_t d = 0; d < last; ++d) strides[d] = tensor.stride(d);
    *to = tensor.const_data_ptr();
    return float_type_of(name, tensor);
  }
  template <class T>
  void write(const char* name, const Tensor& tensor, const char* sizes, T** to) {
    *to = static_cast<T*>(write(name, tensor, sizes, type_of<T>()));
  }
  template <class T>
  void write(const char* name, const std::optional<Tensor>& tensor, const char* sizes, T** to) {
    *to = nullptr;
    if (tensor) write(name, *tensor, sizes, to);
  }
  void* write(const char* name, const Tensor& tensor, const char* sizes, ScalarType type) {
    check_sizes(name, tensor, sizes);
    require(tensor.scalar_type() == type, name, "has another dtype");
    return write(name, tensor);
  }
  void* write(const char* name, const Tensor& tensor) { return const_cast<void*>(place(name, tensor, true)); }

  void count(const char* name, int64_t value, int64_t least) const {
    require(value >= least, name, "is too small");
    require(value <= kMost, name, "is too large");
  }
  void size(const char* name, int64_t value, char letter) { bind(name, letter, value); }
  int64_t size(char letter) const { return sizes_[letter - 'A']; }
  // The sizes that these letters name, into as many numbers.
  template <class... Numbers>
  void sizes(const char* letters, Numbers&... to) const {
    ((to = size(*letters++)), ...);
  }
  // The number of `value` among these names, as an enumerator.
  template <class Enum>
  Enum name(const char* name, const std::string& value, std::initializer_list<const char*> names) const {
    const auto found = std::find(names.begin(), names.end(), value);
    require(found != names.end(), name, "is not one of its names");
    return static_cast<Enum>(found - names.begin());
  }
  void require(bool condition, const char* name, const char* what) const {
    STD_TORCH_CHECK(condition, op_, ": ", name, " ", what);
  }
  void require(bool condition, const char* what) const { STD_TORCH_CHECK(condition, op_, ": ", what); }
  void require_rows_of_requests(int64_t rows) const {
    require(size('B') ? rows % size('B') == 0 : rows == 0, "the number of rows must be a multiple of B");
  }

  // A tensor for a result, and where its elements are. Raises OutOfMemory, or torch's error if memory is not the
  // reason.
  template <class T>
  Tensor make(std::initializer_list<int64_t> sizes, T** to) const {
    Tensor tensor = make(sizes, type_of<T>());
    *to = static_cast<T*>(tensor.mutable_data_ptr());
    return tensor;
  }
  Tensor make(std::initializer_list<int64_t> sizes, ScalarType type) const {
    try {
      return torch::stable::new_empty(*first_, sizes, type);
    } catch (const std::exception&) {
#ifdef SPECVIS_CUDA
      size_t free = 0, total = 0;  // after a fault of a kernel every call returns that, and no allocation succeeds
      check(op_, cudaMemGetInfo(&free, &total));
#endif
      if (torch_exception_get_what_without_backtrace) {
        const std::string said = torch_exception_get_what_without_backtrace();
        const auto names = [&said](const char* words) { return said.find(words) != std::string::npos; };
        require(names("out of memory") || names("DefaultCPUAllocator") || names("bad_alloc") || names("overflow"),
                said.c_str());
      }
      std::string shape;
      for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
      throw OutOfMemory(std::string(op_) + ": there is no memory for a tensor (" + shape + ")");
    }
  }

  // Runs the kernel, unless memory that is written to belongs to two arguments.
  template <class Kernel>
  void run(const Kernel& kernel) {
    check_apart();
    const UsualFloats floats;
    try {
      kernel();
    } catch (const OutOfMemory&) {
      throw;
    } catch (const std::bad_alloc& error) {
      throw OutOfMemory(std::string(op_) + ": " + error.what());
    }
  }
  const Tensor& first() const { return *first_; }

 private:
  void bind(const char* name, char letter, int64_t size) {
    int64_t& known = sizes_[letter - 'A'];
    if (known >= 0) return require(known == size, name, "has another size than an argument before");
    const bool is_of_ids = letter == 'V' || letter == 'k' || letter == 'g';
    require(size >= (std::strchr(positive_, letter) != nullptr), name, "is too small");
    require(size <= (is_of_ids ? kMostIds : kMost), name, "is too large");
    known = size;
  }
  void check_sizes(const char* name, const Tensor& tensor, const char* letters) {
    const auto sizes = tensor.sizes();
    require(sizes.size() == std::strlen(letters), name, "has another number of dimensions");
    for (size_t d = 0; d < sizes.size(); ++d) {
      if (letters[d] < 'A')
        require(sizes[d] == letters[d] - '0', name, "has another size");
      else
        bind(name, letters[d], sizes[d]);
    }
  }
  void check_device(const char* name, const Tensor& tensor) {
    const int32_t device = tensor.get_device_index();
    const bool is_cpu = tensor.is_cpu();
    if (!first_) {
      first_ = &tensor;
      device_ = device;
      is_cpu_ = is_cpu;
    }
    require(device == device_ && is_cpu == is_cpu_, name, "is on another device than the first argument");
  }
  FloatType float_type_of(const char* name, const Tensor& tensor) const {
    const ScalarType type = tensor.scalar_type();
    require(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, name,
            "has another dtype");
    return type == ScalarType::Float  ? FloatType::float32
           : type == ScalarType::Half ? FloatType::float16
                                      : FloatType::bfloat16;
  }
  // A storage may have been made smaller than its tensors, as FSDP frees weights.
  void check_memory(const char* name, const Tensor& tensor, int64_t elements) const {
    int64_t bytes = 0, size = tensor.element_size();
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes));
    require(elements == 0 || (tensor.storage_offset() + elements) * size <= bytes, name,
            "has lost its memory: its storage was freed");
  }
  static bool is_misaligned(const Tensor& tensor) {
    return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() != 0;
  }
  // Where the elements of a contiguous tensor are: of a copy if they are not aligned, which lives as long as the call.
  const void* place(const char* name, const Tensor& tensor, bool is_written) {
    check_device(name, tensor);
    require(tensor.is_contiguous(), name, "must be contiguous");
    check_memory(name, tensor, tensor.numel());
    const void* data = tensor.const_data_ptr();
    if (is_misaligned(tensor)) {
      require(!is_written, name, "is written to, so its elements must be aligned");
      copies_.push_back(torch::stable::clone(tensor));
      data = copies_.back().const_data_ptr();
    }
    const auto address = reinterpret_cast<uintptr_t>(data);
    ranges_.push_back({address, address + tensor.numel() * tensor.element_size(), is_written});
    has_written_ |= is_written;
    return data;
  }
  void check_apart() {
    if (!has_written_) return;
    std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
    uintptr_t end = 0, written_end = 0;
    for (const Range& range : ranges_) {
      if (range.begin == range.end) continue;
      require(range.begin >= (range.is_written ? end : written_end), "an argument that is written to overlaps another");
      end = std::max(end, range.end);
      if (range.is_written) written_end = std::max(written_end, range.end);
    }
  }

  struct Range {
    uintptr_t begin, end;
    bool is_written;
  };
  struct Sizes {
    int64_t values['z' - 'A' + 1];
    Sizes() { std::fill(std::begin(values), std::end(values), -1); }  // not known
    int64_t& operator[](int i) { return values[i]; }
    int64_t operator[](int i) const { return values[i]; }
  };

  const char *op_, *positive_;
  Sizes sizes_;
  const Tensor* first_ = nullptr;
  int32_t device_ = 0;
  bool is_cpu_ = true, has_written_ = false;
  std::vector<Range> ranges_;
  std::vector<Tensor> copies_;
};

}  // namespace specvis
