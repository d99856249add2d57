// How guidance, temperature, top-k, top-p and min-p change a row of logits on the CPU, for guided_probs, draw_tokens
// and verify_logits.
#pragma once
#include <cmath>
#include <cstdint>
#include <memory>
#include <new>

#include "../shared/floats.h"
#include "../shared/params.h"

namespace specvis {

// The filters of a row. A filter is off where its number is 0.
struct Filters {
  int64_t top_k;
  float top_p, min_p;
  bool p_first;  // top_p is a share of the mass of all ids, not of those that top-k keeps

  Filters(const LogitRows& rows, int64_t r) : top_k(0), top_p(0), min_p(0), p_first(rows.top_p_first) {
    const int64_t b = r / rows.N, k = rows.top_k[b];
    const float p = rows.top_p[b];
    if (rows.temperature[b] == 0) return;
    if (k > 0 && k < rows.last(r) - rows.first(r)) top_k = k;
    if (p > 0 && p < 1) top_p = p;
    if (rows.min_p && rows.min_p[b] > 0) min_p = std::fmin(rows.min_p[b], 1.f);
  }
};

// One row at a time: read() it, then narrow the candidates down. There is one object per thread.
class FilteredRow {
 public:
  static constexpr int64_t kChunk = 256;  // logits that are read at once; arrays are padded by -inf to whole chunks
  static constexpr int64_t kGroups = 32;  // groups of a chunk: each has the maximum of every 32nd logit

  explicit FilteredRow(int64_t V);

  // Applies guidance and temperature (0 counts as 1) to the ids of row r. All of them are candidates then. Returns
  // whether the row is valid.
  bool read(const LogitRows& rows, int64_t r);

  // The candidates. Until they are packed, some may lie outside of [first, last), with the logit -inf; packed ones are
  // above -inf. values() has size() logits and then -inf up to a whole chunk. Their ids ascend.
  int64_t size() const { return n_; }
  bool is_packed() const { return is_packed_; }
  const float* values() const { return is_packed_ ? packed_.get() : x_.get(); }
  const int32_t* packed_slots() const { return slots_.get(); }
  int64_t id(int64_t i) const { return base_ + (is_packed_ ? slots_[i] : i); }
  int64_t base() const { return base_; }  // the id of slot 0, a multiple of 4

  float best() const { return best_; }
  float lowest() const { return lowest_; }               // after apply(): candidates are not below, dropped ids are
  int64_t id_of_best() const;                            // the lowest
  const float* maxima() const { return maxima_.get(); }  // the groups' maxima, kGroups a chunk; of all ids
  int64_t count_above(float x) const;                    // how many candidates are above

  // Drops candidates that are not among the k largest, where that is cheap; never one that is.
  void pack_for_top_k(int64_t k);
  void keep_top_k(int64_t k);  // drops all of them; ties stay

  void apply(const Filters& filters);  // drops what they do not keep, and computes the masses of the others

  // exp(value - best) of the candidates, and these as integers (in float: they are exact).
  void compute_masses();
  const float* exponentials() const { return e_.get(); }
  int64_t mass_above(float x) const;
  float total() const;  // the sum of the exponentials, by the integers
  int64_t limit_of(float top_p) const;
  float top_p_threshold(int64_t limit) const;  // the lowest logit that top-p keeps
  void keep_from(float lowest);                // drops the candidates below
  void keep_min_p(float min_p);                // 0: keeps all

 private:
  template <class T>
  bool read_as(const LogitRows& rows, int64_t r);
  float threshold(const float* masses, int64_t limit, float lowest) const;

  static constexpr std::align_val_t kLine{64};  // a line of the cache: vectors lie in one
  struct Release {
    void operator()(void* array) const { ::operator delete[](array, kLine); }
  };
  template <class T>
  using Array = std::unique_ptr<T[], Release>;  // not filled: a row writes little of most
  template <class T>
  static Array<T> allocate(int64_t n);
  Array<float> x_, maxima_, packed_, e_, masses_, some_, some_masses_;  // the last two are threshold()'s alone
  Array<int32_t> slots_;
  int64_t n_ = 0, base_ = 0, num_chunks_ = 0;
  bool is_packed_ = false;
  float best_ = 0, lowest_ = 0;
  float reach_ = 8;  // how far below the best the k-th largest of the last row was
};

}  // namespace specvis
