// Products of few rows with a packed weight, on the CPU. An output is summed by one thread in the order of the inputs,
// so that not a bit of it depends on the other rows, or on how many threads there are.
#pragma once
#include <cstdint>

#include "../shared/params.h"

namespace specvis {

template <class T>
struct Product {
  const T* x;  // (rows, K); K is even
  int64_t rows, K;
  const T* weight;
  int64_t first, last;  // the panels [first, last)
  float* y;             // (rows, y_stride), from the first panel's first output on
  int64_t y_stride;
};

// T: float or c10::BFloat16
template <class T>
void multiply(const Product<T>& product);

}  // namespace specvis
