// Which columns of a cache commit_kv moves. Plain C++ without torch, for the CPU and for CUDA.
#pragma once
#include <cstdint>

#include "rules.h"

namespace specvis {

// The caches have the layout (outer, R, middle, T, inner), or (outer, num_slots, inner) if they are paged. `inner` is
// in bytes.
struct Moves {
  int64_t B, P, R, T, num_slots;
  int64_t outer, middle, inner;
  const int32_t* accepted_nodes;  // (B, P)
  const int32_t* num_accepted;    // (B)
  const int64_t* lengths;         // (B)
  const int64_t* start;           // (B)
  const int64_t* slots;           // (R, T); null: not paged

  // The column of node i of the accepted path, where i = 0 is the root, and the column that it is moved to.
  HOST_DEVICE int64_t source(int64_t b, int64_t i) const {
    return start[b] + (i == 0 ? 0 : accepted_nodes[b * P + i - 1]);
  }
  HOST_DEVICE int64_t target(int64_t b, int64_t i) const { return lengths[b] + i; }
  HOST_DEVICE bool has_slot(int64_t r, int64_t column) const {
    const int64_t slot = slots[r * T + column];
    return slot >= 0 && slot < num_slots;
  }

  // Whether all of a request's columns are there, and each move is to the front, so that none overwrites what a later
  // one reads.
  HOST_DEVICE bool is_valid(int64_t b) const {
    const int64_t accepted = num_accepted[b], length = lengths[b];
    if (accepted < 0 || accepted > P || length < 0 || length > start[b] || start[b] >= T) return false;
    if (length + accepted >= T) return false;
    bool ascends = true;  // tested after the loop, so that its loads need not wait for each other
    int64_t last = start[b];
    for (int64_t i = 1; i <= accepted; ++i) {
      const int64_t column = source(b, i);
      ascends &= column > last;
      last = column;
    }
    if (!ascends || last >= T) return false;
    for (int64_t r = b; slots && r < R; r += B) {
      for (int64_t i = 0; i <= accepted; ++i) {
        if (!has_slot(r, source(b, i)) || !has_slot(r, target(b, i))) return false;
      }
    }
    return true;
  }
  HOST_DEVICE int64_t new_length(int64_t b) const { return lengths[b] + (is_valid(b) ? 1 + num_accepted[b] : 0); }

  // A run is the T columns of one row at one index of `outer` and of `middle`.
  HOST_DEVICE int64_t num_runs() const { return outer * R * middle; }
  template <class Number>  // of as many bits as the numbers of all runs need: on a GPU, dividing 64 of them takes long
  HOST_DEVICE Number row(Number run) const {
    return run / static_cast<Number>(middle) % static_cast<Number>(R);
  }
  // Where a run begins in a cache, and after that a column of its row: in columns.
  template <class Number>
  HOST_DEVICE int64_t begin(Number run) const {
    return slots ? run / static_cast<Number>(middle * R) * num_slots : int64_t{run} * T;
  }
  HOST_DEVICE int64_t place(int64_t row, int64_t column) const { return slots ? slots[row * T + column] : column; }
};

// Fills in the part of `Moves` that follows from a cache's shape. row_dim is -1 if it is paged. `size(d)` is the size
// of a dimension.
template <class Size>
void set_layout(Moves& moves, const Size& size, int64_t dims, int64_t row_dim, int64_t column_dim,
                int64_t element_size) {
  moves.outer = moves.middle = 1;
  moves.inner = element_size;
  moves.num_slots = size(column_dim);
  for (int64_t d = 0; d < dims; ++d) {
    if (d > column_dim) {
      moves.inner *= size(d);
    } else if (d < column_dim && d < row_dim) {
      moves.outer *= size(d);
    } else if (d < column_dim && d > row_dim) {
      (row_dim < 0 ? moves.outer : moves.middle) *= size(d);
    }
  }
}

}  // namespace specvis
