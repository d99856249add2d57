// Layers of networks.
#include "../bindings.h"

namespace specvis {
namespace {

Tensor decoder_layers(const Tensor& x, const std::vector<Tensor>& matrices, const std::vector<Tensor>& vectors,
                      const MaybeTensor& last_norm, const Tensor& kv_cache, const Tensor& lengths,
                      const Tensor& ancestors, const Tensor& positions, const Tensor& rotations,
                      const MaybeTensor& key_mask, int64_t heads, int64_t ffn_dim, int64_t first_node, double eps,
                      double head_eps, bool has_first_norm, bool has_head_norms, bool rotates_halves) {
  Arguments a("decoder_layers", "NELTGDWPY");
  DecoderLayers batch = {};
  batch.kv_cache = a.write("kv_cache", kv_cache, "LRT2GD", x.scalar_type());
  batch.type = a.read_floats("x", x, "RNE", &batch.x);
  a.require(batch.type != FloatType::float16, "x must be float32 or bfloat16");
  a.require(matrices.size() == 1 && vectors.size() == 1, "layers must be packed in_panels for a CPU's kernel");
  batch.matrices = a.read("matrices", matrices[0], "Lm", x.scalar_type());
  a.read("vectors", vectors[0], "Lv", &batch.vectors);
  a.read("last_norm", last_norm, "E", &batch.last_norm);
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("ancestors", ancestors, "BNW", &batch.ancestors);
  a.read("positions", positions, "YN", &batch.positions);
  a.read("rotations", rotations, "Pd2", &batch.rotations);
  a.read("key_mask", key_mask, "RS", &batch.key_mask);
  a.size("heads", heads, 'H');
  a.size("ffn_dim", ffn_dim, 'F');
  a.count("first_node", first_node, 0);
  const int64_t R = a.size('R'), N = a.size('N'), E = a.size('E');
  a.sizes("RNEBLTGDPYW", batch.R, batch.N, batch.E, batch.B, batch.L, batch.cache_len, batch.G, batch.D, batch.P,
          batch.Y, batch.W);
  batch.H = heads;
  batch.F = ffn_dim;
  batch.S = key_mask ? a.size('S') : 0;
  batch.first_node = first_node;
  batch.eps = static_cast<float>(eps);
  batch.head_eps = static_cast<float>(head_eps);
  batch.has_first_norm = has_first_norm;
  batch.has_head_norms = has_head_norms;
  batch.has_halves = rotates_halves;
  a.require_rows_of_requests(R);
  a.require(heads % batch.G == 0 && batch.D <= 256, "heads do not fit kv_cache");
  a.require(E % 16 == 0 && batch.D % 16 == 0, "x and kv_cache must have multiples of 16 entries");
  a.require(a.size('d') * 2 == batch.D, "rotations must be of D / 2 pairs");
  a.require(R % batch.Y == 0, "the rows must be a multiple of the rows of positions");
  a.require(a.size('m') == batch.layer_matrices() && a.size('v') == batch.layer_vectors(),
            "matrices and vectors must be packed for these sizes");
  a.require(first_node + N <= 64 * batch.W, "ancestors must have a word for each 64 nodes");
  Tensor hidden = a.make({R, N, E}, x.scalar_type());
  batch.hidden = hidden.mutable_data_ptr();
  RUN(decoder_layers, a, batch);
  return hidden;
}

Tensors<3> denoise_tokens(const Tensor& noise, const Tensor& z, const Tensor& time, const Tensor& matrices,
                          const Tensor& vectors, const Tensor& schedule, const Tensor& guidance, int64_t num_blocks,
                          double eps, double log_temperature, double clip_range) {
  Arguments a("denoise_tokens", "TCPW");
  DenoiseTokens batch = {};
  a.read("noise", noise, "RTC", &batch.noise);
  a.read("z", z, "RPW", &batch.z);
  a.read("time", time, "TW", &batch.time);
  a.read("matrices", matrices, "m", &batch.matrices);
  a.read("vectors", vectors, "v", &batch.vectors);
  a.read("schedule", schedule, "T7", &batch.schedule);
  a.read("guidance", guidance, "R", &batch.guidance);
  a.count("num_blocks", num_blocks, 0);
  const int64_t R = batch.R = a.size('R'), T = batch.T = a.size('T'), C = batch.C = a.size('C');
  a.sizes("PW", batch.P, batch.W);
  batch.blocks = num_blocks;
  batch.eps = static_cast<float>(eps);
  batch.log_temperature = static_cast<float>(log_temperature);
  batch.clip_range = static_cast<float>(clip_range);
  a.require(batch.P <= 2 && batch.W % 16 == 0 && C % 2 == 0, "z or noise has another size");
  a.require(a.size('m') == batch.num_matrices() && a.size('v') == batch.num_vectors(),
            "matrices and vectors must be packed for these sizes");
  Tensor states = a.make({R, T + 1, C}, &batch.states), log_sigma = a.make({R, C}, &batch.log_sigma);
  Tensor log_sigma_sum = a.make({R}, &batch.log_sigma_sum);
  RUN(denoise_tokens, a, batch);
  return {states, log_sigma, log_sigma_sum};
}

Tensor packed_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, int64_t out_features) {
  Arguments a("packed_linear", "Kpnq");
  PackedLinear batch = {};
  batch.type = a.read_floats("x", x, "MK", &batch.x);
  a.require(batch.type != FloatType::float16, "x must be float32 or bfloat16");
  batch.weight = a.read("weight", weight, "pn", x.scalar_type());
  a.read("bias", bias, "q", &batch.bias);
  a.size("out_features", out_features, 'q');
  a.sizes("MKp", batch.M, batch.K, batch.panels);
  batch.outputs = out_features;
  a.require(a.size('n') == batch.K * kPanel && (batch.type == FloatType::float32 || batch.K % 2 == 0) &&
                batch.panels == round_up(out_features, kPanel) / kPanel,
            "weight and bias must be for these inputs and outputs");
  Tensor y = a.make({batch.M, out_features}, &batch.y);
  RUN(packed_linear, a, batch);
  return y;
}

Tensors<2> rms_norm(const Tensor& x, const Tensor& weight, const MaybeTensor& residual, double eps) {
  Arguments a("rms_norm", "E");
  RmsNorm batch = {};
  batch.type = a.read_floats("x", x, "ME", &batch.x);
  batch.weight = a.read("weight", weight, "E", x.scalar_type());
  if (residual) batch.residual = a.read("residual", *residual, "ME", x.scalar_type());
  const int64_t M = batch.M = a.size('M'), E = batch.E = a.size('E');
  batch.eps = static_cast<float>(eps);
  Tensor normed = a.make({M, E}, x.scalar_type());
  Tensor stream = residual ? a.make({M, E}, x.scalar_type()) : a.make({0}, x.scalar_type());
  batch.normed = normed.mutable_data_ptr();
  batch.stream = stream.mutable_data_ptr();
  RUN(rms_norm, a, batch);
  return {normed, stream};
}

Tensor rotate_into_cache(const Tensor& qkv, const Tensor& kv_cache, const Tensor& lengths, const Tensor& positions,
                         const Tensor& rotations, const MaybeTensor& scale, const MaybeTensor& shift,
                         int64_t first_node, bool rotates_halves, double eps) {
  Arguments a("rotate_into_cache", "NTGDPY");
  RotateIntoCache batch = {};
  batch.type = a.read_floats("qkv", qkv, "RNQ", &batch.qkv);
  batch.kv_cache = a.write("kv_cache", kv_cache, "RT2GD", qkv.scalar_type());
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("positions", positions, "YN", &batch.positions);
  a.read("rotations", rotations, "Pd2", &batch.rotations);
  a.count("first_node", first_node, 0);
  const int64_t R = a.size('R'), Q = a.size('Q');
  a.sizes("RNBTGDPY", batch.R, batch.N, batch.B, batch.T, batch.G, batch.D, batch.P, batch.Y);
  batch.first_node = first_node;
  batch.has_halves = rotates_halves;
  batch.eps = static_cast<float>(eps);
  if (scale) batch.scale = a.read("scale", *scale, "nD", qkv.scalar_type());
  if (shift) batch.shift = a.read("shift", *shift, "nD", qkv.scalar_type());
  batch.H = Q / batch.D - 2 * batch.G;
  a.require_rows_of_requests(R);
  a.require(Q % batch.D == 0 && batch.H > 0, "qkv must be of H + 2 G heads of kv_cache's size");
  batch.pairs = a.size('d');
  a.require(!scale == !shift && (!scale || a.size('n') == batch.H + batch.G), "scale and shift must be of H + G heads");
  a.require(batch.pairs * 2 <= batch.D, "rotations must be of at most D / 2 pairs");
  a.require(R % batch.Y == 0, "the rows must be a multiple of the rows of positions");
  Tensor q = a.make({R, batch.N, batch.H, batch.D}, qkv.scalar_type());
  batch.q = q.mutable_data_ptr();
  RUN(rotate_into_cache, a, batch);
  return q;
}

Tensor swiglu(Tensor gate, Tensor up) {
  Arguments a("swiglu", "");
  Swiglu batch = {};
  batch.type = a.read_strided("gate", gate, "MF", &batch.gate, batch.gate_strides);
  a.require(a.read_strided("up", up, "MF", &batch.up, batch.up_strides) == batch.type, "up must be of gate's type");
  a.sizes("MF", batch.M, batch.F);
  Tensor gated = a.make({batch.M, batch.F}, gate.scalar_type());
  batch.gated = gated.mutable_data_ptr();
  RUN(swiglu, a, batch);
  return gated;
}

Tensor transformer_blocks(const Tensor& x, const Tensor& matrices, const Tensor& vectors, const MaybeTensor& last_norm,
                          const MaybeTensor& key_mask, const Tensor& wanted, int64_t heads, int64_t ffn_dim,
                          double eps) {
  Arguments a("transformer_blocks", "NELHF");
  TransformerBlocks batch = {};
  batch.type = a.read_floats("x", x, "RNE", &batch.x);
  a.require(batch.type != FloatType::float16, "x must be float32 or bfloat16");
  batch.matrices = a.read("matrices", matrices, "Lm", x.scalar_type());
  a.read("vectors", vectors, "Lv", &batch.vectors);
  a.read("last_norm", last_norm, "p", &batch.last_norm);
  a.read("key_mask", key_mask, "RN", &batch.key_mask);
  a.read("wanted", wanted, "Rn", &batch.wanted);
  a.size("heads", heads, 'H');
  a.size("ffn_dim", ffn_dim, 'F');
  const int64_t R = batch.R = a.size('R'), E = batch.E = a.size('E'), n = batch.n = a.size('n');
  a.sizes("NL", batch.N, batch.L);
  batch.H = heads;
  batch.F = ffn_dim;
  batch.eps = static_cast<float>(eps);
  a.require(E % 16 == 0 && ffn_dim % 16 == 0 && E % heads == 0 && E / heads <= 256, "x has another size");
  a.require(a.size('m') == batch.layer_matrices() && a.size('v') == batch.layer_vectors() &&
                (!last_norm || a.size('p') == 2 * E),
            "the blocks must be packed for these sizes");
  Tensor out = a.make({R, n, E}, x.scalar_type());
  batch.out = out.mutable_data_ptr();
  if (R > 0) RUN(transformer_blocks, a, batch);
  return out;
}

Tensor tree_attention(Tensor q, Tensor k_cache, Tensor v_cache, const Tensor& lengths, const Tensor& ancestors,
                      const MaybeTensor& key_mask, double scale) {
  Arguments a("tree_attention", "NHDTGW");
  TreeAttention batch = {};
  const ScalarType type = q.scalar_type();
  batch.type = a.read_strided("q", q, "RNHD", &batch.q, batch.q_strides);
  a.read_strided("k_cache", k_cache, "RTGD", &batch.k, batch.k_strides);
  a.read_strided("v_cache", v_cache, "RTGD", &batch.v, batch.v_strides);
  a.read("lengths", lengths, "B", &batch.lengths);
  a.read("ancestors", ancestors, "BNW", &batch.ancestors);
  a.read("key_mask", key_mask, "RS", &batch.key_mask);
  const int64_t R = batch.R = a.size('R'), N = batch.N = a.size('N'), H = batch.H = a.size('H');
  const int64_t D = batch.D = a.size('D');
  a.sizes("TGBW", batch.T, batch.G, batch.B, batch.W);
  batch.S = key_mask ? a.size('S') : 0;
  batch.scale = static_cast<float>(scale);
  a.require_rows_of_requests(R);
  a.require(H % batch.G == 0 && D <= 256, "the heads of q and k_cache do not fit");
  a.require(k_cache.scalar_type() == type && v_cache.scalar_type() == type, "k_cache and v_cache",
            "must have the dtype of q");
  Tensor attended = a.make({R, N, H, D}, type);
  batch.attended = attended.mutable_data_ptr();
  RUN(tree_attention, a, batch);
  return attended;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SPECVIS_NAMESPACE, DEVICE, m) {
  OP(decoder_layers);
  OP(denoise_tokens);
  OP(packed_linear);
  OP(rms_norm);
  OP(rotate_into_cache);
  OP(swiglu);
  OP(transformer_blocks);
  OP(tree_attention);
}

}  // namespace specvis
