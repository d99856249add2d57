"""vLLM's rejection samplers over our ops: for its v1 engine, and for its model runner V2.

`rejection_sample` has the arguments and the result of the function of that name in vllm/v1/sample/rejection_sampler.py
of vLLM 0.33.0. `probabilistic_rejection_sample` has the arguments and the result of `rejection_sample` in
vllm/v1/worker/gpu/spec_decode/rejection_sampler_utils.py. `python -m benchmarks.check_compat --vllm FOLDER` says
what has moved in another version. No vLLM is imported, and nothing is read back to the host. Both keep the target's
distribution, except by FLy's rule; the random numbers differ from vLLM's.

Because nothing is read back, logits of NaN raise nothing: such a row gives token 0. With SPECVIS_CHECK=1 in the
environment every op reads its `status` and raises StatusError (see `check_status`): set it to find such a row.
"""
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from .. import guided_probs, philox_uniforms, tree_links, verify_chain, verify_greedy, verify_logits
from .._checks import check, check_count, check_dims
from ._versions import called_by, is_older, versions

PLACEHOLDER_TOKEN_ID = -1  # what follows the tokens of a request
STREAM = 10                # of the uniforms for a request's drafts; the ops and the program use lower ones
INTEGERS = (torch.int64, torch.int32)


@called_by("vllm")
def rejection_sample(draft_token_ids: Tensor, num_draft_tokens: Sequence[int], max_spec_len: int,
                     cu_num_draft_tokens: Tensor, draft_probs: Tensor | None, target_logits: Tensor,
                     bonus_token_ids: Tensor, sampling_metadata=None, synthetic_mode: bool = False,
                     synthetic_conditional_rates: Tensor | None = None, use_fp64_gumbel: bool = False,
                     fly_window_size: int | None = None, fly_entropy_threshold: float | None = None,
                     fly_entropy_top_k: int = 3, *, from_logits: bool | None = None,
                     is_greedy: Tensor | bool | None = None, generators: dict[int, Generator] | None = None,
                     verify: dict | None = None) -> Tensor:
    """Accept the leading drafts of each request, and put the recovered or the bonus token after them.

    Draft x is accepted if u Q(x) < P(x), and after a rejection the recovered token is drawn from max(P - Q, 0)
    (Leviathan et al., arXiv:2211.17192; see `verify_chain`). A greedy request accepts the argmaxes. A request with a
    generator gives the same tokens in any batch: it takes n + 1 numbers for its n drafts, and no number without drafts.

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
        verify:               options of `verify_chain`: neighbors, delta, cutoff, offset, omega, residual for relaxed
                              acceptance, or rule="block"

    Returns:
        output_token_ids:     (B, S + 1) int32   the accepted drafts, the token after them, then -1

    Raises:
        ValueError: a dtype, shape or device differs from the above, or another rule is asked for
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
    if isinstance(is_greedy, bool) and is_greedy and not verify:
        targets = torch.nn.functional.pad(target_logits.argmax(-1), (0, 1))[at]
        targets = torch.where(step < counts[:, None], torch.nn.functional.pad(targets, (0, 1)), bonus[:, None])
        chain = tree_links(torch.where(step <= counts[:, None], step - 1, -2).int())
        result = verify_greedy(targets, torch.nn.functional.pad(drafts, (1, 0)), chain.first_child, chain.next_sibling,
                               max_depth=max_spec_len)
    else:
        target_probs = target_logits
        if from_logits is not False:
            target_probs = guided_probs(target_logits[None], None, 1.0, 1.0, 0, 1.0).probs[0]
        uniforms, start = torch.rand(D + B, device=device), 0
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
        fly_entropy_top_k: int = 3, *, draft_is_scaled: bool | None = None,
        verify: dict | None = None) -> tuple[Tensor, Tensor]:
    """Accept the leading drafts of each request from the target's logits, by noise that its seed and positions decide.

    The rule is the one of `rejection_sample`, unless another is asked for. A row is turned into probabilities only if
    verification reaches it (see `verify_logits`). Draft i of a request is decided by the uniform of (seed, position of
    the row that predicts it), and the token after the accepted drafts by another uniform of (seed, position of the
    first row). So a request gives the same tokens in any batch and any order.

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
        verify:                options of `verify_logits` for relaxed acceptance: neighbors, delta (a number), cutoff,
                               offset, residual

    Returns:
        sampled:               (B, S + 1) int64   the accepted drafts, the token after them, then 0
        num_sampled:           (B,) int32         how many tokens that is

    Raises:
        ValueError: a dtype, shape or device differs from the above, another rule is asked for, or draft_is_scaled is
            missing where there are draft_logits
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
    if draft_logits is not None and draft_is_scaled is None:
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
    logits, tokens, positions = (x[at] for x in (target_logits, draft_sampled.long(), pos.long()))
    chain = tree_links(torch.where(step <= counts[:, None], step - 1, -2).int())
    words = philox_uniforms(seed[state], positions, 2, stream=STREAM)
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
        result = verify_logits(logits, None, tokens, chain.first_child, chain.next_sibling, uniforms, guidance=1.0,
                               temperature=(temperature[state] > 0).float(), top_k=0, top_p=1.0, max_depth=S, **rule)
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


def _then_next(drafts: Tensor, num_accepted: Tensor, next_token: Tensor, pad: int) -> Tensor:
    """(B, S) drafts of which the first num_accepted are kept, then the next token: (B, S + 1)."""
    step = torch.arange(drafts.shape[1], device=drafts.device)
    kept = torch.nn.functional.pad(torch.where(step < num_accepted[:, None], drafts, pad), (0, 1), value=pad)
    return kept.scatter(1, num_accepted[:, None].long(), next_token[:, None])
