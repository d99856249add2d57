// The numbers that are stored in a tensor of float32, float16 or bfloat16.
#pragma once
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include "../shared/params.h"

namespace specvis {

// f of a number of this type.
template <class F>
void of_type(FloatType type, const F& f) {
  switch (type) {
    case FloatType::float32: return f(float());
    case FloatType::float16: return f(c10::Half());
    case FloatType::bfloat16: return f(c10::BFloat16());
  }
}

}  // namespace specvis
