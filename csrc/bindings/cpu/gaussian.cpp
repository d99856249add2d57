// Continuous tokens.
#include "../bindings.h"

namespace specvis {
namespace {

// The last denoising step of both models. Returns whether it is given.
bool read_last_step(Arguments& a, LastStepParams& step, const MaybeTensor& target_means,
                    const MaybeTensor& target_log_sigmas, const MaybeTensor& draft_means,
                    const MaybeTensor& draft_log_sigmas) {
  const bool is_given = target_means.has_value();
  a.require(target_log_sigmas.has_value() == is_given && draft_means.has_value() == is_given &&
                draft_log_sigmas.has_value() == is_given,
            "target_means, target_log_sigmas, draft_means and draft_log_sigmas must be given together");
  a.read("target_means", target_means, "BGC", &step.target_means);
  a.read("target_log_sigmas", target_log_sigmas, "BGC", &step.target_log_sigmas);
  a.read("draft_means", draft_means, "BGC", &step.draft_means);
  a.read("draft_log_sigmas", draft_log_sigmas, "BGC", &step.draft_log_sigmas);
  return is_given;
}

Tensors<5> accept_gaussian(const Tensor& tokens, const Tensor& log_ratio, const Tensor& uniforms,
                           const MaybeTensor& target_means, const MaybeTensor& target_log_sigmas,
                           const MaybeTensor& draft_means, const MaybeTensor& draft_log_sigmas,
                           const MaybeTensor& temperature, const MaybeTensor& num_drafted, bool truncate) {
  Arguments a("accept_gaussian", "GC");
  AcceptGaussian batch = {};
  a.read("tokens", tokens, "BGC", &batch.tokens);
  a.read("log_ratio", log_ratio, "BG", &batch.log_ratio);
  a.read("uniforms", uniforms, "BG", &batch.uniforms);
  read_last_step(a, batch.last_step, target_means, target_log_sigmas, draft_means, draft_log_sigmas);
  a.read("temperature", temperature, "B", &batch.temperature);
  a.read("num_drafted", num_drafted, "B", &batch.num_drafted);
  batch.truncate = truncate;
  const int64_t B = batch.B = a.size('B'), G = batch.G = a.size('G');
  batch.C = a.size('C');
  Tensor num_accepted = a.make({B}, &batch.num_accepted), is_accepted = a.make({B, G}, &batch.is_accepted);
  Tensor is_rejected = a.make({B, G}, &batch.is_rejected), log_r = a.make({B, G}, &batch.log_r);
  Tensor status = a.make({B}, &batch.status);
  RUN(accept_gaussian, a, batch);
  return {num_accepted, is_accepted, is_rejected, log_r, status};
}

Tensors<3> resample_gaussian(const Tensor& tokens, const Tensor& is_accepted, const Tensor& is_rejected,
                             const Tensor& proposals, const Tensor& log_ratio, const Tensor& uniforms,
                             const Tensor& fallback, const MaybeTensor& target_means,
                             const MaybeTensor& target_log_sigmas, const MaybeTensor& draft_means,
                             const MaybeTensor& draft_log_sigmas, const MaybeTensor& temperature) {
  Arguments a("resample_gaussian", "GCM");
  ResampleGaussian batch = {};
  a.read("tokens", tokens, "BGC", &batch.tokens);
  a.read("is_accepted", is_accepted, "BG", &batch.is_accepted);
  a.read("is_rejected", is_rejected, "BG", &batch.is_rejected);
  a.read("proposals", proposals, "BGMC", &batch.proposals);
  a.read("uniforms", uniforms, "BGM", &batch.uniforms);
  a.read("fallback", fallback, "BGC", &batch.fallback);
  const bool has_last_step =
      read_last_step(a, batch.last_step, target_means, target_log_sigmas, draft_means, draft_log_sigmas);
  a.read("log_ratio", log_ratio, has_last_step ? "BG" : "BGM", &batch.log_ratio);
  a.read("temperature", temperature, "B", &batch.temperature);
  const int64_t B = batch.B = a.size('B'), G = batch.G = a.size('G'), C = batch.C = a.size('C');
  batch.M = a.size('M');
  Tensor new_tokens = a.make({B, G, C}, &batch.new_tokens), num_tries = a.make({B, G}, &batch.num_tries);
  Tensor status = a.make({B, G}, &batch.status);
  RUN(resample_gaussian, a, batch);
  return {new_tokens, num_tries, status};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(SPECVIS_NAMESPACE, DEVICE, m) {
  OP(accept_gaussian);
  OP(resample_gaussian);
}

}  // namespace specvis
