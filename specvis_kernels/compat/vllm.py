"""vLLM's rejection samplers over our ops: for its v1 engine, and for its model runner V2.

`rejection_sample` has the arguments and the result of the function of that name in vllm/v1/sample/rejection_sampler.py
of vLLM 0.33.0. `probabilistic_rejection_sample` has the arguments and the result of `rejection_sample` in
vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py. Neither of the two imports vLLM or reads anything back to the
host, so logits of NaN raise nothing (docs/use_it.md). Both keep the target's distribution, except by FLy's rule.
`register` is the entry point by which vLLM finds them; `JacobiProposer` makes drafts of the target's own draws.
"""
import functools
import os
import sys
from collections.abc import Callable, Sequence
from hashlib import sha256

import torch
from torch import Generator, Tensor

from .. import draw_tokens, guided_probs, philox_uniforms, tree_links, verify_chain, verify_greedy, verify_logits
from .._checks import check, check_count, check_dims
from ._plugin import place_of, replace
from ._versions import called_by, is_older, versions

PLACEHOLDER_TOKEN_ID = -1  # what follows the tokens of a request
STREAM = 10                # of the uniforms for a request's drafts; the ops and the program use lower ones
INTEGERS = (torch.int64, torch.int32)

V1, V2 = "vllm.v1.sample", "vllm.v1.worker.gpu"
V1_REJECTION_SAMPLE = f"{V1}.rejection_sampler:rejection_sample"
V2_REJECTION_SAMPLE = f"{V2}.spec_decode.rejection_sampler:rejection_sample"


@called_by("vllm")
def rejection_sample(draft_token_ids: Tensor, num_draft_tokens: Sequence[int], max_spec_len: int,
                     cu_num_draft_tokens: Tensor, draft_probs: Tensor | None, target_logits: Tensor,
                     bonus_token_ids: Tensor, sampling_metadata=None, synthetic_mode: bool = False,
                     synthetic_conditional_rates: Tensor | None = None, use_fp64_gumbel: bool = False,
                     fly_window_size: int | None = None, fly_entropy_threshold: float | None = None,
                     fly_entropy_top_k: int = 3, *, from_logits: bool | None = None,
                     is_greedy: Tensor | bool | None = None, generators: dict[int, Generator] | None = None,
                     target_tokens: Tensor | None = None, verify: dict | None = None) -> Tensor:
    """Accept the leading drafts of each request, and put the recovered or the bonus token after them.

    Draft x is accepted if u Q(x) < P(x), and after a rejection the recovered token is drawn from max(P - Q, 0)
    (Leviathan et al., arXiv:2211.17192; see `verify_chain`). A greedy request accepts the argmaxes. A request with a
    generator gives the same tokens in any batch: it takes n + 1 numbers for its n drafts, and no number without drafts.
    With target_tokens nothing is drawn here: drafts are accepted while they equal these.

    Args:
        draft_token_ids:      (D,) int64 or int32   the drafts of all requests, one request after the other
        num_draft_tokens:     how many drafts each request has, B integers of the host
        max_spec_len:         the most that there may be, S
        cu_num_draft_tokens:  (B,) int64 or int32   their inclusive cumulative sum
        draft_probs:          (D, V) float32        the row of each draft, from which it was drawn; None: point masses,
                                                    such as n-grams
        target_logits:        (D, V) float32        the target's logits in place of each draft, after temperature and
                                                    filters. If all requests are greedy only their argmaxes count
        bonus_token_ids:      (B, 1) or (B,) int64 or int32   the next token if all drafts are accepted
        sampling_metadata:    vLLM's; only all_greedy, temperature (0, or -1 in older versions, is greedy) and
                              generators are read; None: is_greedy and generators count
        synthetic_mode, synthetic_conditional_rates:   must be off: another rule
        use_fp64_gumbel:      not read: nothing is drawn by logarithms
        fly_window_size, fly_entropy_threshold:   of FLy's rule, which is lossy (see `verify_chain`); None: not by it
        fly_entropy_top_k:    must be 3 with a window
        from_logits:          False for vLLM before 0.16, whose argument is called target_probs and holds probabilities.
                              None: True, and an error where an older vLLM is installed
        is_greedy:            (B,) bool, or one for all; None: as sampling_metadata says
        generators:           request -> its torch.Generator; None: as sampling_metadata says
        target_tokens:        (D,) int64 or int32   the target's own draw in place of each draft. Then draft_probs,
                              is_greedy and generators do not count, and of target_logits only the shape
        verify:               options of `verify_chain`: neighbors, delta, cutoff, offset, omega, residual for relaxed
                              acceptance, or rule="block"

    Returns:
        output_token_ids:     (B, S + 1) int32   the accepted drafts, the token after them, then -1

    Raises:
        ValueError: a dtype, shape or device differs from the above, another rule is asked for, or there are both
            target_tokens and verify
        TypeError:  an argument that is not listed above; the message names the tested versions of vLLM

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.vllm import rejection_sample
        >>> logits = torch.eye(4)[[2, 1, 3]] * 100   # three drafts of two requests; each next token is certain
        >>> rejection_sample(torch.tensor([2, 0, 3]), [2, 1], 2, torch.tensor([2, 3]), None, logits,
        ...                  bonus_token_ids=torch.tensor([[1], [0]]))
        tensor([[ 2,  1, -1],
                [ 3,  0, -1]], dtype=torch.int32)
    """
    if synthetic_mode or synthetic_conditional_rates is not None:
        raise ValueError("synthetic_mode must be off: it accepts drafts at given rates, whatever the target says")
    if fly_window_size is not None:
        verify = _fly(fly_window_size, fly_entropy_threshold, fly_entropy_top_k) | (verify or {})
    if from_logits is None and is_older("vllm", 0, 16):
        raise ValueError("from_logits must be given: False for vLLM before 0.16, which hands over probabilities "
                         f"({versions('vllm')})")
    D, V = check_dims("target_logits", target_logits, "DV")
    B, device = len(num_draft_tokens), target_logits.device
    check_count("max_spec_len", max_spec_len, max(num_draft_tokens, default=0))
    check("draft_token_ids", draft_token_ids, INTEGERS, like=target_logits, D=D)
    check("cu_num_draft_tokens", cu_num_draft_tokens, INTEGERS, like=target_logits, B=B)
    check("bonus_token_ids", bonus_token_ids.view(-1), INTEGERS, like=target_logits, B=B)
    if sum(num_draft_tokens) != D:
        raise ValueError(f"num_draft_tokens must sum to D={D}, got {sum(num_draft_tokens)}")
    if sampling_metadata is not None and is_greedy is None:
        is_greedy = True if sampling_metadata.all_greedy else sampling_metadata.temperature <= 0
    if sampling_metadata is not None and generators is None:
        generators = sampling_metadata.generators

    ends = cu_num_draft_tokens.long()
    counts = ends.diff(prepend=ends.new_zeros(1))
    step = torch.arange(max_spec_len + 1, device=device)
    at = ((ends - counts)[:, None] + step[:-1]).clamp(max=max(D - 1, 0))
    drafts = torch.nn.functional.pad(draft_token_ids.long(), (0, 1))[at]
    bonus = bonus_token_ids.view(-1).long()
    if target_tokens is None and isinstance(is_greedy, bool) and is_greedy and not verify:
        target_tokens = target_logits.argmax(-1)
    if target_tokens is not None:
        _check_exact(target_tokens, target_logits, {"fly_window_size": fly_window_size, "verify": verify}, D=D)
        targets = torch.nn.functional.pad(target_tokens.long(), (0, 1))[at]
        targets = torch.where(step < counts[:, None], torch.nn.functional.pad(targets, (0, 1)), bonus[:, None])
        chain = tree_links(torch.where(step <= counts[:, None], step - 1, -2).int())
        result = verify_greedy(targets, torch.nn.functional.pad(drafts, (1, 0)), chain.first_child, chain.next_sibling,
                               max_depth=max_spec_len)
    else:
        target_probs = target_logits
        if from_logits is not False:
            target_probs = guided_probs(target_logits[None], None, 1.0, 1.0, 0, 1.0).probs[0]
        uniforms, start = torch.rand(D + B, dtype=torch.float32, device=device), 0
        for request, count in enumerate(num_draft_tokens):
            if count and request in (generators or {}):
                uniforms[start:start + count + 1].uniform_(generator=generators[request])
            start += count + 1
        result = verify_chain(target_probs, draft_token_ids, cu_num_draft_tokens, uniforms, bonus_tokens=bonus,
                              draft_probs=draft_probs, greedy=is_greedy, **(verify or {}))
    return _then_next(drafts, result.num_accepted, result.next_token, PLACEHOLDER_TOKEN_ID).int()


@called_by("vllm")
def probabilistic_rejection_sample(
        target_logits: Tensor, draft_logits: Tensor | None, draft_sampled: Tensor, cu_num_logits: Tensor, pos: Tensor,
        idx_mapping: Tensor, expanded_idx_mapping: Tensor, expanded_local_pos: Tensor, temperature: Tensor,
        seed: Tensor, num_speculative_steps: int, synthetic_conditional_rates: Tensor | None = None,
        use_fp64: bool = False, use_block_verification: bool = False, contexts: Tensor | None = None,
        watermarking: Tensor | None = None, watermarking_skip_mask: Tensor | None = None,
        watermark_key: int | None = None, fly_window_size: int = 0, fly_entropy_threshold: float = 0.3,
        fly_entropy_top_k: int = 3, *, draft_is_scaled: bool | None = None, target_tokens: Tensor | None = None,
        verify: dict | None = None) -> tuple[Tensor, Tensor]:
    """Accept the leading drafts of each request from the target's logits, by noise that its seed and positions decide.

    The rule is the one of `rejection_sample`, unless another is asked for. A row is turned into probabilities only if
    verification reaches it (see `verify_logits`). Draft i of a request is decided by the uniform of (seed, position of
    the row that predicts it), and the token after the accepted drafts by another uniform of (seed, position of the
    first row). So a request gives the same tokens in any batch and any order. With target_tokens nothing is drawn here:
    drafts are accepted while they equal these.

    Args:
        target_logits:         (T, V) float32, float16 or bfloat16   processed: temperature and filters are applied
        draft_logits:          (R, S, V') of the same dtypes   by state and step, the logits from which the drafts were
                               drawn; None: point masses. Ids that only one of the two models has get probability 0 in
                               the other. With draft_is_scaled
        draft_sampled:         (T,) int64 or int32      each row's token: the newest one, then the drafts. A draft of -1
                                                        is rejected
        cu_num_logits:         (B + 1,) int64 or int32  request b has the rows from cu_num_logits[b] on: as many as it
                                                        has drafts, and one
        pos:                   (T,) int64 or int32      each row's position
        idx_mapping:           (B,) int64 or int32      each request's state, in [0, R)
        expanded_idx_mapping, expanded_local_pos:       not read: they follow from cu_num_logits
        temperature:           (R,) float32             0: greedy
        seed:                  (R,) int64
        num_speculative_steps: S, the most drafts of a request
        synthetic_conditional_rates, contexts, watermarking, watermarking_skip_mask, watermark_key: must be off: other
                               rules
        use_block_verification: whether the drafts are verified as a block, which accepts more (see `verify_chain`)
        fly_window_size, fly_entropy_threshold:   of FLy's rule, which is lossy (see `verify_chain`); 0: not by it
        fly_entropy_top_k:     must be 3 with a window. By these two rules all rows are turned into probabilities
        use_fp64:              not read: nothing is drawn by logarithms
        draft_is_scaled:       whether the temperature has been applied to draft_logits: False for vLLM from 0.28 on,
                               which keeps them as the draft model gave them; True before, when it kept them after the
                               temperature. It has no default: the wrong answer moves the distribution
        target_tokens:         (T,) int64 or int32      the target's own draw at each row. Then draft_logits,
                               temperature and seed do not count, and of target_logits only the shape
        verify:                options of `verify_logits` for relaxed acceptance: neighbors, delta (a number), cutoff,
                               offset, residual

    Returns:
        sampled:               (B, S + 1) int64   the accepted drafts, the token after them, then 0
        num_sampled:           (B,) int32         how many tokens that is

    Raises:
        ValueError: a dtype, shape or device differs from the above, another rule is asked for, there are both
            target_tokens and verify, or draft_is_scaled is missing where there are draft_logits
        TypeError:  an argument that is not listed above; the message names the tested versions of vLLM

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.vllm import probabilistic_rejection_sample
        >>> logits = torch.eye(4)[[2, 1, 3]] * 100  # a request with one draft, and one without
        >>> sampled, num_sampled = probabilistic_rejection_sample(
        ...     logits, None, draft_sampled=torch.tensor([0, 2, 1]), cu_num_logits=torch.tensor([0, 2, 3]),
        ...     pos=torch.tensor([7, 8, 5]), idx_mapping=torch.tensor([1, 0]),
        ...     expanded_idx_mapping=torch.tensor([1, 1, 0]), expanded_local_pos=torch.tensor([0, 1, 0]),
        ...     temperature=torch.tensor([1.0, 1.0]), seed=torch.tensor([3, 4]), num_speculative_steps=1)
        >>> sampled, num_sampled
        (tensor([[2, 1],
                [3, 0]]), tensor([2, 1], dtype=torch.int32))
    """
    if synthetic_conditional_rates is not None:
        raise ValueError("synthetic_conditional_rates must be None: they accept drafts whatever the target says")
    for name, value in (("contexts", contexts), ("watermarking", watermarking), ("watermark_key", watermark_key),
                        ("watermarking_skip_mask", watermarking_skip_mask)):
        if value is not None:
            raise ValueError(f"{name} must be None: no watermark is written")
    if use_block_verification and fly_window_size > 0:
        raise ValueError(f"fly_window_size must be 0 with use_block_verification, got {fly_window_size}")
    if draft_logits is not None and draft_is_scaled is None and target_tokens is None:
        raise ValueError("draft_is_scaled must be given with draft_logits: False if they were kept before the "
                         "temperature, as in vLLM from 0.28 on, True if after it")
    T, V = check_dims("target_logits", target_logits, "TV")
    B, S, R = len(idx_mapping), num_speculative_steps, len(temperature)
    check_count("num_speculative_steps", S, 0)
    for name, value, sizes in (("draft_sampled", draft_sampled, {"T": T}), ("pos", pos, {"T": T}),
                               ("cu_num_logits", cu_num_logits, {"B + 1": B + 1}),
                               ("idx_mapping", idx_mapping, {"B": B})):
        check(name, value, INTEGERS, like=target_logits, **sizes)
    check("temperature", temperature, torch.float32, like=target_logits, R=R)
    check("seed", seed, torch.int64, like=target_logits, R=R)

    first, state = cu_num_logits[:-1].long(), idx_mapping.long()
    counts = cu_num_logits.long().diff() - 1
    step = torch.arange(S + 1, device=target_logits.device)
    at = (first[:, None] + step).clamp(max=max(T - 1, 0))  # T may be larger: rows after the last request's are unused
    tokens = draft_sampled.long()[at]
    chain = tree_links(torch.where(step <= counts[:, None], step - 1, -2).int())
    if target_tokens is not None:
        others = dict(use_block_verification=use_block_verification, fly_window_size=fly_window_size, verify=verify)
        _check_exact(target_tokens, target_logits, others, T=T)
        result = verify_greedy(target_tokens.long()[at], tokens, chain.first_child, chain.next_sibling, max_depth=S)
        return _then_next(tokens[:, 1:], result.num_accepted, result.next_token, 0), result.num_accepted + 1
    words = philox_uniforms(seed[state], pos.long()[at], 2, stream=STREAM)
    uniforms = torch.cat([words[:, :1, 1], words[:, :-1, 0]], 1)  # row n - 1 predicts and decides node n > 0
    rule = dict(verify or {})
    if draft_logits is not None and S:
        check("draft_logits", draft_logits, draft_logits.dtype, like=target_logits, R=R, S=S, V=draft_logits.shape[-1])
        draft_temperature = 1.0 if draft_is_scaled else temperature[state]
        probs = guided_probs(draft_logits[state], None, 1.0, draft_temperature, 0, 1.0).probs
        probs = torch.nn.functional.pad(probs, (0, V - probs.shape[-1]))
        rule.update(draft_probs=probs, draft_row=torch.where(step < counts[:, None], step, -1).int())
    if B and (use_block_verification or fly_window_size > 0):
        rule |= {"rule": "block"} if use_block_verification else _fly(fly_window_size, fly_entropy_threshold,
                                                                      fly_entropy_top_k)
        result = _verify_chains(target_logits, draft_sampled, cu_num_logits.long(), uniforms, temperature[state] <= 0,
                                **rule)
    else:
        result = verify_logits(target_logits[at], None, tokens, chain.first_child, chain.next_sibling, uniforms,
                               guidance=1.0, temperature=(temperature[state] > 0).float(), top_k=0, top_p=1.0,
                               max_depth=S, **rule)
    return _then_next(tokens[:, 1:], result.num_accepted, result.next_token, 0), result.num_accepted + 1


def _fly(window, threshold, top_k):
    if top_k != 3:
        raise ValueError(f"fly_entropy_top_k must be 3, got {top_k}")
    return {"rule": "fly", "window": window, "entropy": threshold}


def _verify_chains(target_logits, draft_sampled, cu_num_logits, uniforms, greedy, draft_probs=None, draft_row=None,
                   **rule):
    """verify_chain of T rows, of which uniforms (B, S + 1) and draft_probs (B, S, V) have one request each."""
    (T, _), B = target_logits.shape, len(greedy)
    row = torch.arange(T, device=target_logits.device)

    def of_requests(ends, index):
        request = torch.searchsorted(ends, index, right=True).clamp(max=B - 1)
        return request, index - torch.nn.functional.pad(ends[:-1], (1, 0))[request]

    request, step = of_requests(cu_num_logits[1:], row)
    uniforms = uniforms[request, step.clamp(max=uniforms.shape[1] - 1)]
    ends = cu_num_logits[1:] - row[:B] - 1
    request, step = of_requests(ends, row[:T - B])
    if draft_probs is not None:
        draft_probs = draft_probs[request, step.clamp(max=draft_probs.shape[1] - 1)]
    probs = guided_probs(target_logits[None], None, 1.0, 1.0, 0, 1.0).probs[0]
    return verify_chain(probs, draft_sampled[row[:T - B] + request + 1], ends, uniforms, draft_probs=draft_probs,
                        greedy=greedy, **rule)


def _check_exact(target_tokens: Tensor, like: Tensor, others: dict, **sizes: int) -> None:
    """others: arguments that ask for another rule"""
    check("target_tokens", target_tokens, INTEGERS, like=like, **sizes)
    for name, value in others.items():
        if value:
            raise ValueError(f"{name} must be off with target_tokens, as with SPECVIS_VLLM=seed_exact: a draft is then "
                             f"accepted if it equals the target's draw; got {value!r}")


def _then_next(drafts: Tensor, num_accepted: Tensor, next_token: Tensor, pad: int) -> Tensor:
    """(B, S) drafts of which the first num_accepted are kept, then the next token: (B, S + 1)."""
    step = torch.arange(drafts.shape[1], device=drafts.device)
    kept = torch.nn.functional.pad(torch.where(step < num_accepted[:, None], drafts, pad), (0, 1), value=pad)
    return kept.scatter(1, num_accepted[:, None].long(), next_token[:, None])


@functools.cache  # vLLM may call it again
def register() -> None:
    """Replace vLLM's rejection samplers as SPECVIS_VLLM in the environment says; without it nothing changes.

    This is the entry point specvis of the group vllm.general_plugins. docs/use_it.md explains its two modes:

        rejection    vLLM's rule, drafts accepted by a ratio of probabilities, by the two functions here seed_exact
        drafts accepted while they equal the target's own draws by the request's seed, or one from its id and
                     the engine's seed, and the position. `JacobiProposer` needs this mode

    Raises:
        ValueError:   SPECVIS_VLLM is neither of the two, nor 0
        RuntimeError: this vLLM has no such functions, or another plugin has replaced one of them: all of vLLM's stay
    """
    mode = os.environ.get("SPECVIS_VLLM", "")
    if mode == "rejection":
        replace("vllm", {
            V1_REJECTION_SAMPLE: rejection_sample,
            V2_REJECTION_SAMPLE: functools.partial(probabilistic_rejection_sample,
                                                   draft_is_scaled=is_older("vllm", 0, 28))})
    elif mode == "seed_exact":
        _draws.install()
    elif mode not in ("", "0"):
        raise ValueError(f"SPECVIS_VLLM must be rejection or seed_exact, one of the two, or 0, got {mode!r}")


def _accept_equal(gumbel_sample: Callable, target_logits: Tensor, draft_logits: Tensor | None, *rest,
                  use_fp64: bool = False, **named) -> tuple[Tensor, Tensor]:
    """`probabilistic_rejection_sample` by the draws that vLLM's sampler makes from these rows without drafts."""
    _, _, pos, _, expanded_idx_mapping, _, temperature, seed = rest[:8]  # vLLM hands these over by place
    tokens = gumbel_sample(target_logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature=False,
                           is_drafting=False, use_fp64=use_fp64)
    return probabilistic_rejection_sample(target_logits, None, *rest, use_fp64=use_fp64, target_tokens=tokens, **named)


class _TargetDraws:
    """The target's own draws in vLLM's v1 engine, from each row by the noise of (seed, position).

    vLLM hands neither seeds nor positions to its samplers. So they are read from its runner before it samples a step.
    Every draw is made from the logarithm of float32 probabilities, as vLLM hands them to `random_sample`: a row read
    for a draft and the same row read without drafts give the same token.
    """
    window = 0    # how many drafts JacobiProposer makes; 0: there is none
    seeds = None  # (B,) int64, in a step of the runner alone: vLLM calls its samplers to measure memory, too

    def install(self) -> None:
        sampler, _ = place_of("vllm", f"{V1}.ops.topk_topp_sampler:TopKTopPSampler.forward_native")
        v2_sampler, name = place_of("vllm", f"{V2}.sample.sampler:gumbel_sample")
        self.own_sample, self.own_rejection_sample, self.own_random_sample, _ = replace("vllm", {
            "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample": self.sample,
            V1_REJECTION_SAMPLE: self.rejection_sample,
            f"{V1}.ops.topk_topp_sampler:random_sample": self.random_sample,
            V2_REJECTION_SAMPLE: functools.partial(_accept_equal, getattr(v2_sampler, name))})
        for name in ("forward_cuda", "forward_cpu", "forward_hip", "forward_xpu"):
            setattr(sampler, name, sampler.forward_native)  # which alone calls random_sample

    def sample(self, runner, logits: Tensor, spec_decode_metadata):
        batch = runner.input_batch
        seeds = [batch.generators[b].initial_seed() if b in batch.generators else
                 int.from_bytes(sha256(f"{runner.model_config.seed} {request}".encode()).digest()[:8], "little")
                 for b, request in enumerate(batch.req_ids[:batch.num_reqs])]
        last_rows = runner.query_start_loc.gpu[1:batch.num_reqs + 1].long() - 1
        self.positions = runner.positions[last_rows]
        seeds = torch.tensor(seeds, dtype=torch.uint64, device="cpu").view(torch.int64)
        self.seeds = seeds.to(logits.device, non_blocking=True)
        metadata, self.guesses, self.drawn = batch.sampling_metadata, None, None
        self.is_greedy = None if metadata.all_greedy else metadata.temperature <= 0
        try:
            return self.own_sample(runner, logits, spec_decode_metadata)
        finally:
            self.seeds = None

    def random_sample(self, probs: Tensor, *rest) -> Tensor:
        """Of the last row of each request, (B, V); and guesses for the next positions from the same row."""
        if self.seeds is None:
            return self.own_random_sample(probs, *rest)
        positions = self.positions[:, None] + torch.arange(self.window + 1, device=probs.device)
        drawn = _draw(probs.log()[:, None].expand(-1, self.window + 1, -1), self.seeds, positions)
        self.guesses = drawn[:, 1:]
        return drawn[:, 0]

    def rejection_sample(self, draft_token_ids: Tensor, num_draft_tokens: list[int], max_spec_len: int,
                         cu_num_draft_tokens: Tensor, draft_probs: Tensor | None, target_logits: Tensor,
                         bonus_token_ids: Tensor, *rest, **named) -> Tensor:
        arguments = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
                     bonus_token_ids, *rest)
        if self.seeds is None:
            return self.own_rejection_sample(*arguments, **named)
        ends, D, device = cu_num_draft_tokens.long(), len(target_logits), target_logits.device
        request = torch.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=D)
        tokens = target_logits.argmax(-1)
        if self.is_greedy is not None:
            positions = (self.positions - ends)[request] + torch.arange(D, device=device)  # the last row has no draft
            logits = target_logits.softmax(-1, dtype=torch.float32).log()
            drawn = _draw(logits[:, None], self.seeds[request], positions[:, None])[:, 0]
            tokens = torch.where(self.is_greedy[request], tokens, drawn)
        if self.window:
            bonus = bonus_token_ids.view(-1).long()
            guesses = bonus[:, None].expand(-1, self.window)
            if self.is_greedy is not None:
                guesses = torch.where(self.is_greedy[:, None], guesses, self.guesses)
            self.drawn = num_draft_tokens, torch.cat([tokens, bonus, guesses.reshape(-1)])
        return rejection_sample(*arguments, **named, target_tokens=tokens)

    def chains(self) -> list[list[int]]:
        """For each request of the last step, the draw at each of its rows, and a guess for each of the window; nothing
        after a step without verification."""
        if self.drawn is None:
            return []
        counts, tokens = self.drawn
        *draws, bonus, guesses = tokens.cpu().split([*counts, len(counts), len(counts) * self.window])
        rows = torch.cat([bonus[:, None], guesses.view(-1, self.window)], 1).tolist()
        return [drawn.tolist() + row for drawn, row in zip(draws, rows)]


def _draw(logits: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """(R, N) int64, from (R, N, V) rows of (R,) seeds and (R, N) positions."""
    return draw_tokens(logits, None, None, 1.0, 0, 1.0, seeds, positions).tokens


_draws = _TargetDraws()  # the samplers' and the proposer's, which vLLM makes from the name of its class


class JacobiProposer:
    """Drafts for vLLM's method custom_class, without a draft model: the draws after the first miss are the next drafts.

    Draws after the first one that misses its draft are not emitted, as their rows have read a wrong token. They are
    good guesses nevertheless, because their noise is the one by which these positions will be drawn again. Guesses for
    positions without a row are drawn from the request's last row, with their own noise. (Jacobi decoding with shared
    noise: arXiv:2510.24211.)

    It needs SPECVIS_VLLM=seed_exact, and vLLM's v1 model runner: docs/use_it.md has the command.

    Args:
        vllm_config: vLLM's; its model runner, the number of speculative tokens and the longest model length are read

    Raises:
        ValueError: the model runner is V2, or the rejection sampler of this process is not the one of seed_exact
    """

    def __init__(self, vllm_config):
        if getattr(vllm_config, "use_v2_model_runner", False):
            raise ValueError("vllm_config must have the v1 model runner, got V2, which has no custom proposers: "
                             "VLLM_USE_V2_MODEL_RUNNER must be 0 or unset")
        module, _, name = V1_REJECTION_SAMPLE.partition(":")
        current = getattr(sys.modules.get(module), name, None)
        if getattr(current, "__wrapped__", None) != _draws.rejection_sample:
            raise ValueError("JacobiProposer needs the sampler that SPECVIS_VLLM=seed_exact installs, got "
                             f"SPECVIS_VLLM={os.environ.get('SPECVIS_VLLM', '')!r}, and {V1_REJECTION_SAMPLE} of "
                             f"{getattr(current, '__module__', None)}")
        self.max_model_len = vllm_config.model_config.max_model_len
        _draws.window = vllm_config.speculative_config.num_speculative_tokens

    def load_model(self, *args, **kwargs) -> None:
        """There is none."""

    def propose(self, sampled_token_ids: list[list[int]], num_tokens_no_spec, token_ids_cpu,
                slot_mappings=None) -> list[list[int]]:
        """The next drafts of each request, from the draws of the step that has just been sampled.

        Args:
            sampled_token_ids:  the tokens that the step has emitted for each of B requests; none: no drafts
            num_tokens_no_spec: (B,) integers   how many tokens each request has now
            token_ids_cpu, slot_mappings: not read

        Returns:
            B lists of at most num_speculative_tokens tokens, no more than the model's longest length leaves room for
        """
        chains = _draws.chains() or [[]] * len(sampled_token_ids)
        return [chain[len(new):][:min(_draws.window, max(0, self.max_model_len - int(length)))] if new else []
                for chain, new, length in zip(chains, sampled_token_ids, num_tokens_no_spec)]
