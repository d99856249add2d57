// A draw from a row of logits by a seed's noise on the CPU, for draw_tokens and verify_logits. Noise is made for the
// ids that may win, and its two logarithms are computed where the noise's upper bound does not rule the id out.
#pragma once
#include <cstdint>

#include "filters.h"

namespace specvis {

// Draws from row r, with another noise a second time if `ahead` is not 0, and returns the row's status. `row` is
// scratch.
int32_t draw_row(const LogitRows& rows, int64_t r, int64_t seed, int64_t position, int64_t ahead, FilteredRow& row,
                 int64_t& token, int64_t& ahead_token);

}  // namespace specvis
