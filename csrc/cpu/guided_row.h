// A row of logits as the probabilities that guided_probs makes of it, on the CPU: for the ops that start with these.
#pragma once
#include <algorithm>
#include <vector>

#include "filters.h"
#include "rows.h"

namespace specvis {

// What is applied to one row: to the ids in [first, last).
struct RowSetting {
  float guidance, temperature;
  int32_t top_k;
  float top_p;
  int64_t first, last;
  bool p_first;
};

// The settings of all requests, as Python has checked them.
struct RowSettings {
  const float *guidance, *temperature;  // one for each request, as are top_k and top_p
  const int32_t* top_k;
  const float* top_p;
  const int64_t* id_range;  // two for each row; null: first and last hold for all
  int64_t first, last;
  bool p_first;

  RowSetting of(int64_t request, int64_t row) const {
    return {guidance[request],
            temperature[request],
            top_k[request],
            top_p[request],
            id_range ? id_range[2 * row] : first,
            id_range ? id_range[2 * row + 1] : last,
            p_first};
  }
};

// One row at a time: candidate i of `row`, an id that the filters keep, has the probability row.exponentials()[i] /
// total. There is one object per thread.
class GuidedRow {
 public:
  explicit GuidedRow(int64_t V) : row(V), V_(V) {}

  // Returns false if the row is invalid. `uncond` may be null.
  template <class T>
  bool read(const T* logits, const T* uncond, const RowSetting& s) {
    is_valid_ = s.first >= 0 && s.first < s.last && s.last <= V_ &&
                row.read(logits, uncond, s.guidance, s.temperature, s.first, s.last);
    if (!is_valid_) return false;
    row.apply(Filters::of(s.temperature, s.top_k, s.top_p, s.last - s.first, s.p_first));
    total = row.total();
    first_ = s.first;
    last_ = s.last;
    return true;
  }

  // Writes all V probabilities of the row that was read, and returns those of the candidates. These hold until the next
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
