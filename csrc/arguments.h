// What a binding may rely on: the arguments of each op, and the check of them. The public functions in Python check
// more, with better words, and make tensors contiguous. This check stands behind them, so that a direct call of
// torch.ops.specvis_kernels ends in an error too, and reads or writes no memory but that of its tensors.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

namespace specvis {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The limits of specvis_kernels/_checks.py. With them no index, and no sum of masses, leaves 63 bits.
constexpr int64_t kMostIds = 1 << 19;       // V, and how many neighbors or other ids are summed for one token
constexpr int64_t kMost = (1ll << 31) - 1;  // every other size and count

struct Argument {
  const char* name;
  // Of a tensor: f float32; h float32, float16 or bfloat16; = like the first tensor; l int64; i int32; I int32 or
  // int64; n uint16, int32 or int64; b bool. Then: ? may be missing; / either this one or the others with a / are
  // missing; ! is written to; s has strides, but for the last dimension; a digit: is given together with the others
  // that have it. Of other arguments: # an integer; $ a name; - anything.
  const char* form;
  // Of a tensor: a letter for each dimension. The same letter is the same size throughout. A digit is this size, w is
  // ceil(N / 64). Of an integer: its letter. Of a name: those that there are, behind each a space.
  const char* sizes;
};

struct Op {
  const char* name;
  const char* positive;  // letters that may not be 0
  Argument arguments[28];
};

namespace arguments {

constexpr char kCutoffs[] = "tvd ratio jsd ", kResiduals[] = "optimal relaxed released ", kEmpty[] = "target uniform ",
               kFilters[] = "k_then_p p_then_k ";

inline constexpr Op accept_gaussian = {"accept_gaussian",
                                       "GC",
                                       {{"tokens", "f", "BGC"},
                                        {"log_ratio", "f", "BG"},
                                        {"uniforms", "f", "BG"},
                                        {"target_means", "f?1", "BGC"},
                                        {"target_log_sigmas", "f?1", "BGC"},
                                        {"draft_means", "f?1", "BGC"},
                                        {"draft_log_sigmas", "f?1", "BGC"},
                                        {"temperature", "f?", "B"},
                                        {"num_drafted", "i?", "B"},
                                        {"truncate", "-", ""}}};
inline constexpr Op commit_kv = {"commit_kv",
                                 "T",
                                 {{"caches", "!", ""},
                                  {"accepted_nodes", "i", "BP"},
                                  {"num_accepted", "i", "B"},
                                  {"lengths", "l", "B"},
                                  {"start", "l?", "B"},
                                  {"slots", "l?", "RT"},
                                  {"row_dim", "#", "r"},
                                  {"column_dim", "#", "c"}}};
inline constexpr Op commit_tokens = {"commit_tokens",
                                     "LN",
                                     {{"tokens", "l!", "BC"},
                                      {"counts", "l!", "B"},
                                      {"failed", "b!", "B"},
                                      {"target_forwards", "l!", "B"},
                                      {"num_accepted_at", "l!", "BL"},
                                      {"num_drafted_at", "l!", "BL"},
                                      {"tv_excess", "f!", "B"},
                                      {"node_tokens", "l", "BN"},
                                      {"accepted_nodes", "i", "BP"},
                                      {"num_accepted", "i", "B"},
                                      {"next_token", "l", "B"},
                                      {"step_excess", "f?", "B"},
                                      {"status", "i", "B"},
                                      {"depth", "l", "B"}}};
inline constexpr Op couple_tokens = {"couple_tokens",
                                     "WVCk",
                                     {{"target_probs", "f", "BWV"},
                                      {"draft_probs", "f", "BWV"},
                                      {"tokens", "l", "BW"},
                                      {"uniforms", "f", "BW2"},
                                      {"omega", "f?", "BW"},
                                      {"neighbors", "n?1", "Ck"},
                                      {"delta", "f?1", "B"},
                                      {"groups", "l?", "BWg"},
                                      {"cutoff", "$", kCutoffs},
                                      {"offset", "#", "o"},
                                      {"residual", "$", kResiduals}}};
inline constexpr Op decoder_layers = {"decoder_layers",
                                      "NELTGDWPY",
                                      {{"x", "h", "RNE"},
                                       {"matrices", "=", "Lm"},
                                       {"vectors", "f", "Lv"},
                                       {"last_norm", "f?", "E"},
                                       {"kv_cache", "=!", "LRT2GD"},
                                       {"lengths", "l", "B"},
                                       {"ancestors", "l", "BNW"},
                                       {"positions", "l", "YN"},
                                       {"rotations", "f", "Pd2"},
                                       {"key_mask", "b?", "RS"},
                                       {"heads", "#", "H"},
                                       {"ffn_dim", "#", "q"},
                                       {"first_node", "#", "z"},
                                       {"eps", "-", ""},
                                       {"head_eps", "-", ""},
                                       {"has_first_norm", "-", ""},
                                       {"has_head_norms", "-", ""},
                                       {"rotates_halves", "-", ""}}};
inline constexpr Op denoise_tokens = {"denoise_tokens",
                                      "TCPW",
                                      {{"noise", "f", "RTC"},
                                       {"z", "f", "RPW"},
                                       {"time", "f", "TW"},
                                       {"matrices", "f", "m"},
                                       {"vectors", "f", "v"},
                                       {"schedule", "f", "Ts"},
                                       {"guidance", "f", "R"},
                                       {"num_blocks", "#", "b"},
                                       {"eps", "-", ""},
                                       {"log_temperature", "-", ""},
                                       {"clip_range", "-", ""}}};
inline constexpr Op draft_children = {"draft_children",
                                      "FVK",
                                      {{"logits", "h", "BFV"},
                                       {"uncond", "=?", "BFV"},
                                       {"uniforms", "f/", "BFK"},
                                       {"guidance", "f", "B"},
                                       {"temperature", "f", "B"},
                                       {"top_k", "i", "B"},
                                       {"top_p", "f", "B"},
                                       {"seeds", "l/1", "B"},
                                       {"positions", "l?1", "BF"},
                                       {"id_range", "l?", "BF2"},
                                       {"first_id", "#", "x"},
                                       {"last_id", "#", "y"},
                                       {"filters", "$", kFilters},
                                       {"num_children", "#", "K"}}};
inline constexpr Op draft_frontier = {"draft_frontier",
                                      "FVWKea",
                                      {{"logits", "h", "BFV"},
                                       {"uncond", "=?", "BFV"},
                                       {"scores", "f", "BF"},
                                       {"ancestors", "l", "BFW"},
                                       {"candidates", "i", "BF"},
                                       {"width", "i", "B"},
                                       {"depth", "l", "B"},
                                       {"guidance", "f", "B"},
                                       {"temperature", "f", "B"},
                                       {"top_k", "i", "B"},
                                       {"top_p", "f", "B"},
                                       {"id_range", "l?", "BF2"},
                                       {"first_id", "#", "x"},
                                       {"last_id", "#", "y"},
                                       {"filters", "$", kFilters},
                                       {"num_children", "#", "K"},
                                       {"level", "#", "e"},
                                       {"first_node", "#", "a"},
                                       {"first_candidate", "#", "d"}}};
inline constexpr Op draw_children = {"draw_children",
                                     "FVK",
                                     {{"draft_probs", "f", "BFV"},
                                      {"uniforms", "f/", "BFK"},
                                      {"seeds", "l/1", "B"},
                                      {"positions", "l?1", "BF"},
                                      {"num_children", "#", "K"}}};
inline constexpr Op draw_tokens = {"draw_tokens",
                                   "NV",
                                   {{"logits", "h", "BNV"},
                                    {"uncond", "=?", "BNV"},
                                    {"guidance", "f", "B"},
                                    {"temperature", "f", "B"},
                                    {"top_k", "i", "B"},
                                    {"top_p", "f", "B"},
                                    {"seeds", "l", "B"},
                                    {"positions", "l", "BN"},
                                    {"id_range", "l?", "BN2"},
                                    {"first_id", "#", "x"},
                                    {"last_id", "#", "y"},
                                    {"filters", "$", kFilters},
                                    {"guesses", "l?", "BN"},
                                    {"ahead", "#", "z"}}};
inline constexpr Op expand_tree = {
    "expand_tree",
    "FVK",
    {{"draft_probs", "f", "BFV"}, {"scores", "f", "BF"}, {"width", "i", "B"}, {"num_children", "#", "K"}}};
inline constexpr Op guided_probs = {"guided_probs",
                                    "V",
                                    {{"logits", "h", "BNV"},
                                     {"uncond", "=?", "BNV"},
                                     {"guidance", "f", "B"},
                                     {"temperature", "f", "B"},
                                     {"top_k", "i", "B"},
                                     {"top_p", "f", "B"},
                                     {"id_range", "l?", "BN2"},
                                     {"first_id", "#", "x"},
                                     {"last_id", "#", "y"},
                                     {"filters", "$", kFilters}}};
inline constexpr Op neighborhood_sum = {"neighborhood_sum",
                                        "VCk",
                                        {{"probs", "f", "RV"},
                                         {"tokens", "l", "R"},
                                         {"neighbors", "n", "Ck"},
                                         {"delta", "f", "R"},
                                         {"cutoff", "$", kCutoffs},
                                         {"offset", "#", "o"}}};
inline constexpr Op packed_linear = {
    "packed_linear",
    "Kpnq",
    {{"x", "h", "MK"}, {"weight", "=", "pn"}, {"bias", "f?", "q"}, {"out_features", "#", "q"}}};
// log_ratio is (B, G), or without the four of the last step (B, G, M).
inline constexpr Op resample_gaussian = {"resample_gaussian",
                                         "GCM",
                                         {{"tokens", "f", "BGC"},
                                          {"is_accepted", "b", "BG"},
                                          {"is_rejected", "b", "BG"},
                                          {"proposals", "f", "BGMC"},
                                          {"log_ratio", "f", "BG*"},
                                          {"uniforms", "f", "BGM"},
                                          {"fallback", "f", "BGC"},
                                          {"target_means", "f?1", "BGC"},
                                          {"target_log_sigmas", "f?1", "BGC"},
                                          {"draft_means", "f?1", "BGC"},
                                          {"draft_log_sigmas", "f?1", "BGC"},
                                          {"temperature", "f?", "B"}}};
inline constexpr Op sample_residual = {
    "sample_residual",
    "V",
    {{"target_probs", "f", "RV"}, {"draft_probs", "f?", "RV"}, {"uniforms", "f", "R"}, {"omega", "f?", "R"}}};
inline constexpr Op select_tree = {"select_tree",
                                   "N",
                                   {{"tokens", "l", "BM"},
                                    {"scores", "f", "BM"},
                                    {"parents", "i", "BM"},
                                    {"root", "l", "B"},
                                    {"size", "i", "B"},
                                    {"num_nodes", "#", "N"}}};
inline constexpr Op transformer_blocks = {"transformer_blocks",
                                          "NELhq",
                                          {{"x", "h", "RNE"},
                                           {"matrices", "=", "Lm"},
                                           {"vectors", "f", "Lv"},
                                           {"last_norm", "f?", "p"},
                                           {"key_mask", "b?", "RN"},
                                           {"wanted", "l", "Rn"},
                                           {"heads", "#", "h"},
                                           {"ffn_dim", "#", "q"},
                                           {"eps", "-", ""}}};
inline constexpr Op tree_attention = {"tree_attention",
                                      "NHDTGW",
                                      {{"q", "hs", "RNHD"},
                                       {"k_cache", "=s", "RTGD"},
                                       {"v_cache", "=s", "RTGD"},
                                       {"lengths", "l", "B"},
                                       {"ancestors", "l", "BNW"},
                                       {"key_mask", "b?", "RS"},
                                       {"scale", "-", ""}}};
inline constexpr Op tree_from_mask = {"tree_from_mask", "N", {{"mask", "b", "BNN"}}};
inline constexpr Op tree_from_paths = {"tree_from_paths", "N", {{"paths", "l", "BLD"}, {"num_nodes", "#", "N"}}};
inline constexpr Op tree_links = {"tree_links", "N", {{"parents", "i", "BN"}}};
inline constexpr Op tree_mask = {"tree_mask",
                                 "NC",
                                 {{"ancestors", "l", "BNw"},
                                  {"lengths", "i?", "B"},
                                  {"start", "l?", "B"},
                                  {"form", "$", "bool additive packed packed_rows "},
                                  {"columns", "#", "C"},
                                  {"dtype", "-", ""}}};
inline constexpr Op tree_paths = {"tree_paths", "N", {{"parents", "i", "BN"}, {"max_depth", "#", "P"}}};
inline constexpr Op verify_chain = {"verify_chain",
                                    "VCk",
                                    {{"target_probs", "f", "TV"},
                                     {"draft_tokens", "I", "D"},
                                     {"cu_num_draft_tokens", "I", "B"},
                                     {"uniforms", "f", "U"},
                                     {"bonus_tokens", "l?2", "B"},
                                     {"draft_probs", "f?", "DV"},
                                     {"neighbors", "n?1", "Ck"},
                                     {"delta", "f?1", "B"},
                                     {"omega", "f?", "B"},
                                     {"greedy", "b?", "B"},
                                     {"cutoff", "$", kCutoffs},
                                     {"offset", "#", "o"},
                                     {"residual", "$", kResiduals},
                                     {"empty", "$", kEmpty}}};
inline constexpr Op verify_greedy = {"verify_greedy",
                                     "N",
                                     {{"target_tokens", "l", "BN"},
                                      {"tokens", "l", "BN"},
                                      {"first_child", "i", "BN"},
                                      {"next_sibling", "i", "BN"},
                                      {"max_depth", "#", "P"}}};
inline constexpr Op verify_logits = {
    "verify_logits",
    "NVMCk",
    {{"logits", "h", "BNV"},      {"uncond", "=?", "BNV"},    {"tokens", "l", "BN"},     {"first_child", "i", "BN"},
     {"next_sibling", "i", "BN"}, {"uniforms", "f/", "BN"},   {"guidance", "f", "B"},    {"temperature", "f", "B"},
     {"top_k", "i", "B"},         {"top_p", "f", "B"},        {"id_range", "l?", "BN2"}, {"draft_probs", "f?2", "BMV"},
     {"draft_row", "i?2", "BN"},  {"neighbors", "n?1", "Ck"}, {"delta", "f?1", "B"},     {"omega", "f?", "BP"},
     {"seeds", "l/3", "B"},       {"positions", "l?3", "BN"}, {"first_id", "#", "x"},    {"last_id", "#", "y"},
     {"filters", "$", kFilters},  {"cutoff", "$", kCutoffs},  {"offset", "#", "o"},      {"residual", "$", kResiduals},
     {"empty", "$", kEmpty},      {"max_depth", "#", "P"}}};
inline constexpr Op verify_tree = {"verify_tree",
                                   "NVMCk",
                                   {{"target_probs", "f", "BNV"},
                                    {"tokens", "l", "BN"},
                                    {"first_child", "i", "BN"},
                                    {"next_sibling", "i", "BN"},
                                    {"uniforms", "f", "BN"},
                                    {"draft_probs", "f?2", "BMV"},
                                    {"draft_row", "i?2", "BN"},
                                    {"neighbors", "n?1", "Ck"},
                                    {"delta", "f?1", "B"},
                                    {"omega", "f?", "BP"},
                                    {"greedy", "b?", "B"},
                                    {"cutoff", "$", kCutoffs},
                                    {"offset", "#", "o"},
                                    {"residual", "$", kResiduals},
                                    {"empty", "$", kEmpty},
                                    {"max_depth", "#", "P"}}};

}  // namespace arguments

// Python makes a MemoryError of it.
class OutOfMemory : public std::bad_alloc {
 public:
  explicit OutOfMemory(std::string what) : what_(std::move(what)) {}
  const char* what() const noexcept override { return what_.c_str(); }

 private:
  std::string what_;
};

// As torch's. Raises OutOfMemory.
inline Tensor new_empty(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                        std::optional<ScalarType> dtype = std::nullopt) {
  try {
    return torch::stable::new_empty(like, sizes, dtype);
  } catch (const std::exception&) {
    std::string shape;
    for (const int64_t size : sizes) shape += (shape.empty() ? "" : ", ") + std::to_string(size);
    throw OutOfMemory("there is no memory for a tensor (" + shape + ")");
  }
}

// Takes an op's arguments in their order, and raises RuntimeError about the first that does not fit.
class Arguments {
 public:
  explicit Arguments(const Op& op) : op_(op), next_(op.arguments) {
    for (const Argument& argument : op.arguments) writes_ = writes_ || (argument.form && has(argument, '!'));
  }

  void operator()(Tensor& tensor) { check(tensor, *next_++); }
  void operator()(std::optional<Tensor>& tensor) {
    const Argument& argument = *next_++;
    for (int i = 0; i < kGroups; ++i) {
      if (has(argument, static_cast<char>('1' + i))) (tensor ? given_ : missing_)[i] = true;
    }
    if (has(argument, '/')) ++(tensor ? num_chosen_ : num_left_out_);
    if (tensor) check(*tensor, argument);
  }
  void operator()(std::vector<Tensor>& caches) {
    const Argument& argument = *next_++;
    require(!caches.empty(), argument, "must be at least one tensor");
    for (Tensor& cache : caches) {
      check_memory(cache, argument);
      const auto sizes = cache.sizes(), first = caches[0].sizes();
      require(cache.scalar_type() == type_ && sizes.size() == first.size() &&
                  std::equal(sizes.begin(), sizes.end(), first.begin()),
              argument, "must have one shape and dtype");
    }
    caches_ = &caches;
  }
  void operator()(int64_t value) {
    const Argument& argument = *next_++;
    bind(argument, *argument.sizes, value);
  }
  void operator()(const std::string& name) {
    const Argument& argument = *next_++;
    const char* at = std::strstr(argument.sizes, (name + ' ').c_str());
    require(at && (at == argument.sizes || at[-1] == ' '), argument, "is none of its names");
  }
  template <class T>
  void operator()(const T&) {
    ++next_;
  }

  // What holds between arguments.
  void finish() {
    for (int i = 0; i < kGroups; ++i) require(!given_[i] || !missing_[i], "arguments that belong together are missing");
    require(num_chosen_ + num_left_out_ == 0 || num_chosen_ == 1, "exactly one of the alternatives must be given");
    if (has('o') && has('C')) {
      require(size('o') >= 0 && size('C') <= size('V') && size('o') <= size('V') - size('C'),
              "the codes of neighbors leave the vocabulary");
    }
    if (has('x')) require(0 <= size('x') && size('x') < size('y') && size('y') <= size('V'), "the ids are no range");
    if (has('F') && has('K')) {
      const int64_t children = size('F') * size('K');
      require(children + (has('d') ? size('d') : 0) <= kMost, "there are too many candidates");
      require(!has('a') || size('a') + size('K') <= 64 * size('W'), "ancestors must have a word for each 64 nodes");
    }
    if (has('R') && has('B'))
      require(size('B') ? size('R') % size('B') == 0 : size('R') == 0, "the rows are no multiple of B");
    if (has('H')) require(size('H') % size('G') == 0 && size('D') <= 256, "the heads of q and k_cache do not fit");
    if (has('L') && has('C')) require(size('C') >= size('L'), "tokens has too few columns");
    if (has('U')) {  // verify_chain: drafts of all requests, then a row for each request unless there is a bonus token
      const int64_t D = size('D'), B = size('B');
      require(size('U') == D + B && size('T') == (given_[1] ? D : D + B),
              "there must be a row for each draft and request");
    }
    require(num_dims_ == 0 || num_dims_ == (given_[0] ? 2 : 3), "log_ratio is of another variant");
    if (caches_) check_caches();
    check_apart();
  }

 private:
  static constexpr int kGroups = 3;

  static bool has(const Argument& argument, char flag) { return std::strchr(argument.form, flag) != nullptr; }
  void require(bool condition, const Argument& argument, const char* what) const {
    STD_TORCH_CHECK(condition, op_.name, ": ", argument.name, " ", what);
  }
  void require(bool condition, const char* what) const { STD_TORCH_CHECK(condition, op_.name, ": ", what); }

  bool has(char letter) const { return is_known_[letter - 'A']; }
  int64_t size(char letter) const { return sizes_[letter - 'A']; }
  void bind(const Argument& argument, char letter, int64_t size) {
    int64_t& known = sizes_[letter - 'A'];
    if (has(letter)) return require(known == size, argument, "has another size than an argument before");
    const bool is_free = letter == 'o' || letter == 'x' || letter == 'y' || letter == 'r';  // see finish()
    const bool is_of_ids = letter == 'V' || letter == 'k' || letter == 'g';
    require(is_free || size >= (std::strchr(op_.positive, letter) != nullptr), argument, "is too small");
    require(is_free || size <= (is_of_ids ? kMostIds : kMost), argument, "is too large");
    known = size;
    is_known_[letter - 'A'] = true;
  }

  static bool is_of(ScalarType type, char form, ScalarType first) {
    switch (form) {
      case 'f': return type == ScalarType::Float;
      case 'h': return type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16;
      case '=': return type == first;
      case 'l': return type == ScalarType::Long;
      case 'i': return type == ScalarType::Int;
      case 'I': return type == ScalarType::Int || type == ScalarType::Long;
      case 'n': return type == ScalarType::UInt16 || type == ScalarType::Int || type == ScalarType::Long;
      default: return type == ScalarType::Bool;
    }
  }

  // The device and the memory. A tensor whose elements are not aligned becomes a copy, unless it is written to.
  void check_memory(Tensor& tensor, const Argument& argument) {
    const int32_t device = tensor.get_device_index();
    const bool is_cpu = tensor.is_cpu();
    if (next_ == op_.arguments + 1 && !is_placed_) {
      type_ = tensor.scalar_type();
      device_ = device;
      is_cpu_ = is_cpu;
      is_placed_ = true;
    }
    require(device == device_ && is_cpu == is_cpu_, argument, "is on another device than the first argument");
    if (has(argument, 's')) {
      const int64_t last = tensor.dim() - 1;
      require(tensor.size(last) <= 1 || tensor.stride(last) == 1, argument, "must be contiguous in its last dimension");
    } else {
      require(tensor.is_contiguous(), argument, "must be contiguous");
    }
    auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    const size_t bytes = tensor.element_size();
    if (address % bytes != 0) {
      require(!has(argument, '!'), argument, "is written to, so its elements must be aligned");
      tensor = torch::stable::clone(tensor);
      address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
    }
    if (writes_) ranges_.push_back({address, address + tensor.numel() * bytes, has(argument, '!')});
  }

  void check(Tensor& tensor, const Argument& argument) {
    const auto sizes = tensor.sizes();
    const size_t dims = sizes.size(), letters = std::strlen(argument.sizes);
    const bool may_be_less = argument.sizes[letters - 1] == '*';  // the last dimension
    if (may_be_less) num_dims_ = dims;
    require(dims == letters || (may_be_less && dims == letters - 1), argument, "has another number of dimensions");
    for (size_t d = 0; d < dims; ++d) {
      const char letter = argument.sizes[d];
      if (letter == '2') {
        require(sizes[d] == 2, argument, "must have two entries in a dimension");
      } else if (letter == 'w') {
        require(sizes[d] == (size('N') + 63) / 64, argument, "must have a word for each 64 nodes");
      } else {
        bind(argument, letter == '*' ? 'M' : letter, sizes[d]);
      }
    }
    check_memory(tensor, argument);
    require(is_of(tensor.scalar_type(), argument.form[0], type_), argument, "has another dtype");
  }

  void check_caches() {
    const Tensor& first = caches_->front();
    const int64_t row_dim = size('r'), column_dim = size('c'), B = size('B'), bytes = first.element_size();
    require(bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8, "caches must have 1, 2, 4 or 8 bytes an element");
    require(row_dim >= -1 && row_dim < column_dim && column_dim < first.dim() && first.size(column_dim) >= 1,
            "row_dim and column_dim are no dimensions of the caches, in this order");
    require(has('R') == (row_dim == -1), "row_dim must be -1 with slots, and only then");
    const int64_t R = has('R') ? size('R') : first.size(row_dim);
    require(B ? R % B == 0 : R == 0, "the rows are no multiple of B");
  }

  // No memory that is written to belongs to two arguments.
  void check_apart() {
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

  const Op& op_;
  const Argument* next_;
  bool writes_ = false;
  int64_t sizes_['z' - 'A' + 1];  // of each letter that is known
  bool is_known_['z' - 'A' + 1] = {}, given_[kGroups] = {}, missing_[kGroups] = {};
  int num_chosen_ = 0, num_left_out_ = 0;  // of the alternatives
  bool is_placed_ = false, is_cpu_ = true;
  int32_t device_ = 0;
  ScalarType type_ = ScalarType::Float;  // of the first argument
  size_t num_dims_ = 0;                  // of an argument whose last dimension may be missing
  const std::vector<Tensor>* caches_ = nullptr;
  std::vector<Range> ranges_;  // of an op that writes to arguments
};

// The function that is registered for an op: `function` behind the check.
template <const Op* op, auto function>
struct Checked;
template <const Op* op, class R, class... T, R (*function)(T...)>
struct Checked<op, function> {
  static R call(std::decay_t<T>&... arguments) {
    try {
      Arguments check(*op);
      (check(arguments), ...);
      check.finish();
      return function(arguments...);
    } catch (const std::bad_alloc& error) {
      throw OutOfMemory(std::string(op->name) + ": " + error.what());
    }
  }
};
#define SPECVIS_BOX(op, function) TORCH_BOX((&specvis::Checked<&specvis::arguments::op, function>::call))

}  // namespace specvis
