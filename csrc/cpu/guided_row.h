// A row of logits as probabilities, on the CPU, for guided_probs and the ops that start as it does.
#pragma once
#include <algorithm>
#include <vector>

#include "filters.h"
#include "rows.h"

namespace specvis {

// One row at a time: candidate i of `row`, an id that the filters keep, has the probability row.exponentials()[i] /
// total. There is one object per thread.
class GuidedRow {
 public:
  explicit GuidedRow(int64_t V) : row(V), V_(V) {}

  // Reads row r, and returns whether it is valid.
  bool read(const LogitRows& rows, int64_t r) {
    is_valid_ = row.read(rows, r);
    if (!is_valid_) return false;
    row.apply(Filters(rows, r));
    total = row.total();
    first_ = rows.first(r);
    last_ = rows.last(r);
    return true;
  }

  // Writes all V probabilities of the row that was read, and returns the candidates' ones. These hold until the next
  // row is read. An invalid row is 0.
  ProbRow write(float* out) {
    std::fill_n(out, V_, 0.f);
    if (!is_valid_) return {out, 0, 0, nullptr};
    const float* const e = row.exponentials();
    if (!row.is_packed()) {
      divide(e + first_ - row.base(), last_ - first_, total, out + first_);
      return {out + row.base(), last_ - row.base(), row.base(), nullptr};
    }
    probs_.resize(row.size());
    divide(e, row.size(), total, probs_.data());
    for (int64_t i = 0; i < row.size(); ++i)
      if (e[i] > 0) out[row.id(i)] = probs_[i];
    return {probs_.data(), row.size(), row.base(), row.packed_slots()};
  }

  FilteredRow row;
  float total = 0;

 private:
  int64_t V_, first_ = 0, last_ = 0;
  bool is_valid_ = false;
  std::vector<float> probs_;
};

}  // namespace specvis
