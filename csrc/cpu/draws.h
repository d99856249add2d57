// A draw from a row of logits by a seed's noise on the CPU, for draw_tokens and verify_logits. Noise is made for the
// ids that may win, and its two logarithms are computed where the noise's upper bound does not rule the id out.
#pragma once
#include <cstdint>

#include "filters.h"

namespace specvis {

// The settings of one row.
struct DrawRow {
  float guidance, temperature;
  int32_t top_k;
  float top_p;
  bool p_first;
  int64_t first, last;  // its ids
  int64_t seed, position;
  int64_t ahead;  // 0: no second draw
};

// Draws from one row, and returns its status; `row` is scratch.
template <class T>
int32_t draw_row(const T* logits, const T* uncond, int64_t V, const DrawRow& settings, FilteredRow& row, int64_t& token,
                 int64_t& ahead_token);

}  // namespace specvis
