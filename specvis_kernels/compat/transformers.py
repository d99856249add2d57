"""transformers: tree and Jacobi decoding for `model.generate(custom_generate=..)`, and guidance as a LogitsProcessor.

    model.generate(ids, custom_generate=jacobi_generate, window=16, max_new_tokens=256, do_sample=True)
    model.generate(ids, custom_generate=tree_generate, draft=draft, choices=choices, max_new_tokens=256, do_sample=True)

For every causal language model that takes a mask of four dimensions and position ids: full attention in each layer,
"sdpa" or "eager". Tested with transformers 4.57.6, 5.23.0 and 5.24.0, with text models and with Emu3, Chameleon and
Janus. It is imported when one of the two functions is called.

Tokens are equal to those of another way to decode in so far as its forwards give the same logits. In half precision
forwards of another number of tokens round otherwise, and a token now and then differs.

The functions keep a cache of their own, in which each request has its own length, and leave alone the one that
`generate` makes. What they cannot do they refuse: beams, other logits processors than temperature, top-k and top-p,
scores and attentions as outputs, prompts that are not token ids, sliding windows shorter than the sequence.
"""
import functools
import inspect
from collections.abc import Callable, Sequence, Sized

import torch
from torch import Tensor

from .. import (
    check_status,
    commit_kv,
    draw_children,
    draw_tokens,
    guided_probs,
    tree_from_choices,
    tree_links,
    tree_mask,
    verify_logits,
)
from .._checks import check, check_count
from ._versions import is_older, versions
from .eagle import GREEDY, settings_of

FILTERS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "LogitNormalization")
# what generate hands over that these functions read themselves, or that only concerns a cache of its own
CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on; before it
KNOWN_KWARGS = ("attention_mask", "position_ids", "use_cache", "logits_to_keep", "cache_position", *CACHE_NAMES)
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


@torch.no_grad()
def tree_generate(model, input_ids: Tensor, logits_processor: Sequence | None = None,
                  stopping_criteria: Sequence | None = None, generation_config=None, *,
                  draft: Callable[[Tensor, Tensor], Tensor], choices: Sequence[Sequence[int]],
                  guidance: float | Tensor | None = None, unconditional_ids: Tensor | None = None,
                  unconditional_mask: Tensor | None = None, id_range: tuple[int, int] | Tensor | None = None,
                  seeds: Sequence[int] | Tensor | None = None, verify: dict | None = None, token_streamer=None,
                  stats: dict | None = None, **model_kwargs):
    """Decode with a static draft tree: to be passed to `model.generate` as `custom_generate`.

    Each target forward reads a whole tree of drafts. `draft` proposes what may follow a node, children are drawn from
    its rows without replacement, and one path of the tree is accepted. Greedy, the tokens are those of `generate`.
    Sampled, they have the distribution that `generate` draws from: its temperature, top_k and top_p apply.

    Without `seeds` drafts are verified by `verify_tree`'s rule, with torch's random numbers. With `seeds` they are
    verified by equality: the tokens are those that one-at-a-time decoding draws with the same seeds, whatever the tree
    and the other requests of the batch, and also those of `jacobi_generate`.

    (EAGLE, arXiv:2401.15077; Medusa, arXiv:2401.10774, whose `medusa_choices` `choices` are; guidance: Ho and Salimans,
    arXiv:2207.12598.)

    Args:
        model, input_ids (B, S) int64, logits_processor, stopping_criteria, generation_config: as `generate` gives them.
            Prompts of different lengths are padded on the left, with an attention_mask
        draft:         called with sequences (B, F, T) int64 and a mask (B, F, T) bool for the F nodes of a level: all
                       tokens up to each node, padded on the left. Returns (B, F, V) float32, the probabilities of what
                       follows
        choices:       the tree: paths of ranks, e.g. [(0,), (1,), (0, 0)]: the root's first two children, and the first
                       child of the first. Where ranks have gaps, e.g. [(1,)], children are left out, greedy and with
                       seeds; sampled without seeds, ranks are renumbered from 0 on below each parent, because to keep
                       some of the children that were drawn would change the distribution
        guidance:      s in uncond + s (cond - uncond): a number or (B,) float32. With unconditional_ids
        unconditional_ids:   (R, S') int64, R divides B: the prompts without the condition, padded on the left
        unconditional_mask:  (R, S') bool or int64, where they are real; None: everywhere
        id_range:      two integers first, last: the ids [first, last) that can be drawn; or (L, 2) or (B, L, 2) int64,
                       those of each new token ([x, x + 1) forces token x); the last goes on. None: all ids
        seeds:         (B,) integers; None: torch's random numbers
        verify:        options of `verify_logits` for relaxed acceptance: neighbors, delta, cutoff, offset, omega,
                       residual. Without seeds
        token_streamer:  a streamer of transformers, for a batch of one; it gets the prompt first. (Leave `streamer`
                       out: transformers does not hand it over to functions, and it would never end)
        stats:         a dict that gets "target_forwards", with the prompt's, and "num_tokens", a list for the batch

    Returns:
        as `generate` does: (B, S + the longest) int64, or with return_dict_in_generate an output with `sequences`

    Raises:
        ValueError: what is asked for is not supported, see the top of this module, or an argument differs from the
            above
        StatusError: the model's logits or the drafter's rows hold NaN, or leave nothing to draw from (`check_status`)

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from specvis_kernels.compat.transformers import tree_generate
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                                      num_attention_heads=1, initializer_range=1.0)).eval()
        >>> def draft(sequences, mask):  # knows only how often a token has come
        ...     return (torch.nn.functional.one_hot(sequences, 16).sum(2) + 1.0).softmax(-1)
        >>> prompts, rest = torch.tensor([[3, 1, 4]]), dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
        >>> tokens = model.generate(prompts, custom_generate=tree_generate, draft=draft, choices=[(0,), (1,), (0, 0)],
        ...                         **rest)
        >>> torch.equal(tokens, model.generate(prompts, **rest))
        True
    """
    asked = _Asked("tree_generate", model, input_ids, logits_processor, stopping_criteria, generation_config,
                   guidance, id_range, token_streamer, model_kwargs)
    if verify and seeds is not None:
        raise ValueError("verify must be empty with seeds: tokens that equal the target's draws are not relaxed")
    if not callable(draft):
        raise ValueError(f"draft must be a function of sequences and a mask, got {draft!r}")
    tree = _Tree(choices, input_ids, renumber=asked.do_sample and seeds is None)
    B, N = len(input_ids), tree.num_nodes
    seeds = None if seeds is None else _seeds(seeds, input_ids)
    target = _Target(model, input_ids, unconditional_ids, unconditional_mask, asked, N)
    output = _Output(input_ids, asked)
    ancestors, depth, first_child, next_sibling = (t.expand(B, *t.shape[1:]) for t in tree.links)

    def verify_nodes(logits, uncond, tokens, depth, links, **rule):
        positions = output.num_made[:, None] + depth
        draws = dict(uniforms=torch.rand(tokens.shape, device=tokens.device)) if seeds is None else dict(
            uniforms=None, seeds=seeds, positions=positions)
        return verify_logits(logits, uncond, tokens, *links, guidance=asked.guidance, **asked.settings,
                             id_range=asked.ids(positions), **draws, **rule)

    def drafts(tokens):
        """Fills in the children level by level; returns the rows that they come from (B, F, V), and status (B,)."""
        rows, status = [], torch.zeros(B, dtype=torch.int32, device=tokens.device)
        for level in tree.levels:
            probs = draft(*output.sequences(tokens[:, level.paths]))
            F = len(level.paths)
            check("draft's result", probs, torch.float32, like=tokens, B=B, F=F, V=target.vocab_size)
            if not asked.do_sample:
                children = probs.topk(level.num_children).indices
            else:
                positions = (output.num_made[:, None] + level.depth).expand(B, F).contiguous()
                draws = dict(uniforms=torch.rand(B, F, level.num_children, device=probs.device)) if seeds is None \
                    else dict(seeds=seeds, positions=positions, num_children=level.num_children)
                drawn = draw_children(probs, **draws)
                children, status = drawn.tokens, status | drawn.status.amax(1)
            tokens[:, level.children] = children[:, level.row_of_child, level.rank_of_child]
            rows.append(probs)
        return torch.cat(rows, 1), status

    none = torch.full((B, 1), -1, dtype=torch.int32, device=input_ids.device)
    root = verify_nodes(*target.prefill(), input_ids[:, -1:], torch.zeros_like(none), (none, none), max_depth=0)
    output.take(root.next_token[:, None], torch.ones_like(root.next_token), verify_logits=root.status)
    while not output.is_done:
        tokens = output.newest()[:, None].repeat(1, N)
        draft_probs, draft_status = drafts(tokens)
        rule = dict(max_depth=tree.max_depth, **(verify or {}))
        if seeds is None and asked.do_sample:
            rule.update(draft_probs=draft_probs, draft_row=tree.draft_row.expand(B, N))
        logits = target.read(tokens, depth, ancestors, output)
        result = verify_nodes(*logits, tokens, depth, (first_child, next_sibling), **rule)
        is_open = ~output.is_finished
        target.commit(result.accepted_nodes, torch.where(is_open, result.num_accepted, -1), output)
        emitted = tokens.gather(1, result.accepted_nodes.clamp(min=0).long())
        emitted = torch.nn.functional.pad(emitted, (0, 1)).scatter(1, result.num_accepted[:, None].long(),
                                                                   result.next_token[:, None])
        output.take(emitted, result.num_accepted + 1, draw_children=draft_status, verify_logits=result.status)
    return output.result(stats, target)


@torch.no_grad()
def jacobi_generate(model, input_ids: Tensor, logits_processor: Sequence | None = None,
                    stopping_criteria: Sequence | None = None, generation_config=None, *, window: int = 16,
                    grid: int | None = None, guidance: float | Tensor | None = None,
                    unconditional_ids: Tensor | None = None, unconditional_mask: Tensor | None = None,
                    id_range: tuple[int, int] | Tensor | None = None, seeds: Sequence[int] | Tensor | None = None,
                    token_streamer=None, stats: dict | None = None, **model_kwargs):
    """Decode by Jacobi iteration, without a drafter: to be passed to `model.generate` as `custom_generate`.

    Each target forward reads the newest token and guesses of the next `window` ones, and draws all of them anew, each
    with its own noise. The guesses that were right so far are final, and so is the draw behind them; the others are
    better guesses. A position's noise never changes, so the tokens are those that one-at-a-time decoding draws with the
    same seeds (window=0), whatever the window and the other requests of the batch. Greedy, they are those of
    `generate`. (Speculative Jacobi decoding, arXiv:2410.01699; with the same noise in every forward, arXiv:2510.24211.)

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, guidance, unconditional_ids,
        unconditional_mask, id_range, token_streamer, stats: as in `tree_generate`
        window:   how many guesses a forward reads, >= 0
        grid:     how many tokens a row of the image has: a position's first guess is then drawn from the row of the
                  position above it. At least window. None: from the newest row
        seeds:    (B,) integers, the requests' noise; None: drawn by torch's random numbers

    Returns:
        as `generate` does: (B, S + the longest) int64, or with return_dict_in_generate an output with `sequences`

    Raises:
        ValueError: what is asked for is not supported, see the top of this module, or an argument differs from the
            above
        StatusError: the model's logits hold NaN, or leave nothing to draw from (`check_status`)

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from specvis_kernels.compat.transformers import jacobi_generate
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                                      num_attention_heads=1, initializer_range=1.0)).eval()
        >>> prompts = torch.tensor([[3, 1, 4], [1, 5, 9]])
        >>> rest = dict(custom_generate=jacobi_generate, seeds=[7, 8], max_new_tokens=12, do_sample=True)
        >>> torch.equal(model.generate(prompts, window=8, **rest), model.generate(prompts, window=0, **rest))
        True
    """
    asked = _Asked("jacobi_generate", model, input_ids, logits_processor, stopping_criteria, generation_config,
                   guidance, id_range, token_streamer, model_kwargs)
    check_count("window", window, 0)
    if grid is not None:
        check_count("grid", grid, max(window, 1))
    B, L, device = len(input_ids), asked.max_tokens, input_ids.device
    seeds = torch.randint(2 ** 62, (B,), device=device) if seeds is None else _seeds(seeds, input_ids)
    most = 1 + min(window, L - 1)  # nodes of a forward
    target = _Target(model, input_ids, unconditional_ids, unconditional_mask, asked, most)
    output = _Output(input_ids, asked)
    step = torch.arange(max(most, grid or 0) + 1, device=device)
    ancestors = tree_links(step[None, :most].int() - 1).ancestors
    image = torch.zeros(B, L + 2 * len(step), dtype=torch.int64, device=device)  # the tokens, and guesses behind them

    def draw(logits, uncond, positions, **options):
        return draw_tokens(logits, uncond, asked.guidance, **asked.settings, seeds=seeds, positions=positions,
                           id_range=asked.ids(positions), **options)

    def draw_from_last(logits, uncond, first):
        """Guesses of most + 1 positions from `first` (B,) on, or a row of the grid, by one row of logits (B, 1, V)."""
        positions = first[:, None] + step
        logits, uncond = (None if x is None else x.expand(-1, len(step), -1) for x in (logits, uncond))
        drawn = draw(logits, uncond, positions)
        image.scatter_(1, positions, drawn.tokens)
        return drawn.status

    status = draw_from_last(*target.prefill(), output.num_made)
    output.take(image[:, :1], torch.ones_like(output.num_made), draw_tokens=status[:, 0])
    while not output.is_done:
        N = min(most, L - min(output.open_counts()))
        positions = output.num_made[:, None] + step[:N]
        read = image.gather(1, torch.cat([positions[:, :1] - 1, positions], 1))
        logits, uncond = target.read(read[:, :N], step[None, :N], ancestors[:, :N].expand(B, -1, -1), output)
        drawn = draw(logits, uncond, positions, guesses=read[:, 1:], ahead=grid or 0)
        if grid:  # where the window reaches the row below, its own draws are better
            image.scatter_(1, positions + grid, drawn.ahead_tokens)
        else:
            draw_from_last(logits[:, -1:], None if uncond is None else uncond[:, -1:], output.num_made + N)
        image.scatter_(1, positions, drawn.tokens)
        is_final = step[:N] <= drawn.num_accepted[:, None]  # behind a wrong guess a row need not be valid
        output.take(drawn.tokens, drawn.num_accepted.clamp(max=N - 1) + 1,
                    draw_tokens=torch.where(is_final, drawn.status, 0).amax(1))
    return output.result(stats, target)


class GuidedProbsProcessor:
    """Guidance, a range of ids and the filters as one LogitsProcessor: `guided_probs` in transformers' own loops.

    With `doubled`, the rows with the condition come first and those without it after them, as in transformers'
    ClassifierFreeGuidanceLogitsProcessor, and half as many rows come back. The scores that come back are logarithms of
    probabilities: leave temperature, top_k and top_p out of the generation config (temperature=1.0, top_k=0,
    top_p=1.0), or they apply a second time.

    Args:
        guidance:       s in uncond + s (cond - uncond)
        temperature, top_k, top_p:  as in `guided_probs`; temperature 0 gives the probabilities of temperature 1
        id_range:       two integers first, last: the ids [first, last); or (L, 2) int64, those of each new token, the
                        last goes on. None: all ids
        prompt_length:  how many tokens come before the new ones; needed with an id_range for each token
        doubled:        whether each condition has a second row, without it
        filters:        "k_then_p" or "p_then_k"

    Raises:
        ValueError: id_range for each token without prompt_length, or of another shape; a prompt shorter than
            prompt_length; an odd number of rows with `doubled`

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.transformers import GuidedProbsProcessor
        >>> processor = GuidedProbsProcessor(guidance=2.0, top_k=2)
        >>> scores = torch.tensor([[4.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])  # with the condition, and without it
        >>> processor(torch.zeros(2, 5, dtype=torch.int64), scores).exp().round(decimals=2)
        tensor([[0.9500, 0.0500, 0.0000, 0.0000]])
    """

    supports_continuous_batching = False  # transformers asks its processors

    def __init__(self, guidance: float = 1.0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, *,
                 id_range: tuple[int, int] | Tensor | None = None, prompt_length: int | None = None,
                 doubled: bool = True, filters: str = "k_then_p"):
        if isinstance(id_range, Tensor) and prompt_length is None:
            raise ValueError("prompt_length must be given with an id_range for each new token")
        if isinstance(id_range, Tensor) and (id_range.shape[1:] != (2,) or not len(id_range)):
            raise ValueError(f"id_range must be int64 (L, 2), got {_described(id_range)}")
        self.settings = dict(guidance=guidance, temperature=temperature, top_k=top_k, top_p=top_p, filters=filters)
        self.id_range, self.prompt_length, self.doubled = id_range, prompt_length, doubled

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(R, T) int64 and (R, V) -> (R / 2, V) float32, or (R, V)."""
        if self.doubled and len(scores) % 2:
            raise ValueError(f"scores must have as many rows with the condition as without it, got {len(scores)}")
        cond, uncond = scores[:, None].chunk(2) if self.doubled else (scores[:, None], None)
        id_range = self.id_range
        if isinstance(id_range, Tensor):
            position = input_ids.shape[1] - self.prompt_length
            if position < 0:
                raise ValueError(f"prompt_length must be at most the {input_ids.shape[1]} tokens that there are, "
                                 f"got {self.prompt_length}")
            id_range = id_range[min(position, len(id_range) - 1)].to(scores.device).expand(len(cond), 1, 2)
        return guided_probs(cond, uncond, **self.settings, id_range=id_range).probs[:, 0].log()


class _Asked:
    """What the caller of `generate` asked for, checked."""

    def __init__(self, name, model, input_ids, processors, criteria, config, guidance, id_range, streamer, kwargs):
        def refuse(is_wrong, message):
            if is_wrong:
                raise ValueError(f"{name} {message}")

        refuse(is_older("transformers", 4, 57), f"needs transformers 4.57 or newer ({versions('transformers')})")
        B, S = input_ids.shape
        text = model.config.get_text_config(decoder=True)
        config = model.generation_config if config is None else config
        others = [type(p).__name__ for p in processors or () if type(p).__name__ not in FILTERS]
        refuse(others, f"knows temperature, top_k and top_p alone, got {', '.join(others)}: give guidance and id_range "
                       "to the function, and leave other logits processors out")
        refuse((config.num_beams or 1) != 1, f"needs num_beams=1, got {config.num_beams}")
        refuse(model.config.is_encoder_decoder, f"needs a causal language model, got {type(model).__name__}")
        refuse("position_ids" not in inspect.signature(model.forward).parameters,
               f"needs a model that takes position_ids, got {type(model).__name__}")
        attention = getattr(text, "_attn_implementation", None)
        refuse(attention not in ("sdpa", "eager"),
               f"needs attn_implementation 'sdpa' or 'eager', which take a mask for each node, got {attention!r}")
        refuse(streamer is not None and B != 1, f"needs a batch of one for token_streamer, got {B}")

        self.criteria, lengths, ends = [], [config.max_length or S + 20], config.eos_token_id
        ends = [] if ends is None else torch.as_tensor(ends).flatten().tolist()
        self.pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        for criterion in criteria or ():
            if type(criterion).__name__ == "MaxLengthCriteria":
                lengths.append(criterion.max_length)
            elif type(criterion).__name__ == "EosTokenCriteria":
                ends += criterion.eos_token_id.flatten().tolist()
            else:
                self.criteria.append(criterion)
        self.max_tokens, self.streamer, self.returns_dict = min(lengths) - S, streamer, config.return_dict_in_generate
        self.ends = torch.tensor(sorted(set(ends)), device=input_ids.device)
        window, layers = getattr(text, "sliding_window", None), getattr(text, "layer_types", None)
        if layers is None:  # older configurations say it by the window alone
            layers = ["sliding_attention" if window and getattr(text, "use_sliding_window", True) else "full_attention"]
        short = window is not None and min(lengths) > window
        partial = {kind for kind in layers if kind != "full_attention" and (kind != "sliding_attention" or short)}
        refuse(partial, f"needs full attention in every layer, got {', '.join(sorted(partial))}")

        outputs = [key for key in OUTPUTS
                   if config.return_dict_in_generate and getattr(config, key, False) or kwargs.get(key)]
        refuse(outputs, f"returns sequences alone, got {', '.join(outputs)}")
        unknown = [key for key, value in kwargs.items()
                   if key not in (*KNOWN_KWARGS, *OUTPUTS) and not _is_off(model, key, value)]
        refuse(unknown, f"takes prompts of token ids alone, got {', '.join(unknown)} ({versions('transformers')})")
        for key in CACHE_NAMES:
            length = 0 if kwargs.get(key) is None else kwargs[key].get_seq_length()
            refuse(length > 0, f"needs an empty {key}, got one with {length} tokens")
        self.do_sample = bool(config.do_sample)
        if not self.do_sample:
            self.settings = GREEDY
        elif processors is None:  # not called by `generate`, which makes them
            temperature = config.temperature if config.temperature is not None else 1.0
            self.settings = dict(temperature=float(temperature), top_k=config.top_k or 0,
                                 top_p=float(config.top_p or 1.0))
        else:
            warpers = [p for p in processors if type(p).__name__ != "LogitNormalization"]
            self.settings = settings_of(warpers)
            refuse(self.settings is None, "needs temperature before top_k and top_p, each at most once, without "
                   "min_tokens_to_keep and filter_value, and top_p > 0, got "
                   f"{', '.join(type(p).__name__ for p in warpers)} (off by top_k=0 and top_p=1.0 of generate)")
        self.has_guidance, self.guidance = guidance is not None, 1.0 if guidance is None else guidance
        self.attention_mask = kwargs.get("attention_mask")
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.id_range = id_range
        if isinstance(id_range, Tensor):
            leading = tuple(id_range.shape[:-2])
            if id_range.ndim < 2 or id_range.shape[-1] != 2 or leading not in ((), (B,)) or 0 in id_range.shape:
                raise ValueError(f"id_range must be int64 (L, 2) or (B={B}, L, 2), got {_described(id_range)}")
            self.id_range = id_range.to(input_ids.device, torch.int64).expand(B, -1, 2)

    def ids(self, positions: Tensor):
        """The ranges of new tokens at these positions (B, N), as the ops take them."""
        if not isinstance(self.id_range, Tensor):
            return self.id_range
        index = positions.clamp(max=self.id_range.shape[1] - 1).long()
        return self.id_range.gather(1, index[..., None].expand(-1, -1, 2))


class _Target:
    """The model with a cache in which each request has its own length. Rows with the condition, then those without."""

    def __init__(self, model, input_ids, unconditional_ids, unconditional_mask, asked, num_nodes):
        if asked.has_guidance != (unconditional_ids is not None):
            raise ValueError("guidance and unconditional_ids must be given together")
        self.model, self.cache_name = model, cache_name(model)
        self.keeps_logits, self.num_forwards = asked.keeps_logits, 0
        self.batch, (B, S) = len(input_ids), input_ids.shape
        ids, is_real = input_ids, torch.ones_like(input_ids, dtype=torch.bool)
        if asked.attention_mask is not None:
            check("attention_mask", asked.attention_mask, asked.attention_mask.dtype, B=B, S=S)
            is_real = asked.attention_mask != 0
        if unconditional_ids is not None:
            R, width = unconditional_ids.shape if unconditional_ids.ndim == 2 else (0, 0)
            check("unconditional_ids", unconditional_ids, torch.int64, like=input_ids, R=R, S=width)
            if not R or B % R:
                raise ValueError(f"unconditional_ids must be int64 (R, S') with R a divisor of B={B}, "
                                 f"got {tuple(unconditional_ids.shape)}")
            mask = torch.ones_like(unconditional_ids) if unconditional_mask is None else unconditional_mask
            check("unconditional_mask", mask, mask.dtype, like=input_ids, R=R, S=width)
            both = max(S, width)
            ids, is_real = (torch.cat([torch.nn.functional.pad(a, (both - S, 0)),
                                       torch.nn.functional.pad(b.repeat_interleave(B // R, 0), (both - width, 0))])
                            for a, b in ((ids, unconditional_ids), (is_real, mask != 0)))
        self.ids, self.is_real, self.prefix_len = ids, is_real, ids.shape[1]
        self.num_pads = self.prefix_len - is_real.sum(1)
        self.cache = _cache_class()(len(ids), self.prefix_len + asked.max_tokens + num_nodes)
        self.vocab_size = model.get_output_embeddings().weight.shape[0]

    def twice(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(len(self.ids) // self.batch, *[1] * (tensor.ndim - 1))

    def forward(self, ids, mask, position_ids, slots, **kwargs):
        """Logits (B, N, V) with the condition, and without it or None."""
        self.cache.slots, self.num_forwards = slots, self.num_forwards + 1
        self.cache.num_columns = mask.shape[-1]
        logits = self.model(ids, attention_mask=mask[:, None], position_ids=position_ids, use_cache=True,
                            **{self.cache_name: self.cache}, **kwargs).logits
        logits = logits.float() if logits.dtype == torch.float64 else logits
        return (logits, None) if len(ids) == self.batch else (logits[:self.batch], logits[self.batch:])

    def prefill(self):
        """The logits (B, 1, V) of the first new token."""
        S = self.prefix_len
        slots = torch.arange(S, device=self.ids.device)
        sees = (slots <= slots[:, None]) & self.is_real[:, None] | (slots == slots[:, None])  # no row may be empty
        mask = torch.zeros(sees.shape, dtype=self.model.dtype, device=sees.device).masked_fill(~sees, -torch.inf)
        logits = self.forward(self.ids, mask, (self.is_real.cumsum(1) - 1).clamp(min=0), slots.expand(len(self.ids), S),
                              **({"logits_to_keep": 1} if self.keeps_logits else {}))
        return tuple(None if x is None else x[:, -1:] for x in logits)

    def read(self, tokens, depth, ancestors, output):
        """The logits of the nodes (B, N) of a tree behind each request's tokens; node 0 is the newest of them."""
        N = tokens.shape[1]
        lengths = self.lengths(output)
        columns = self.prefix_len + max(output.host_made) - 1 + N
        dtype = torch.float32 if self.model.dtype == torch.float64 else self.model.dtype
        mask = tree_mask(ancestors.contiguous(), lengths.int(), form="additive", columns=columns, dtype=dtype)
        mask = self.twice(mask.to(self.model.dtype))
        mask[..., :self.prefix_len].masked_fill_(~self.is_real[:, None], -torch.inf)
        slots = lengths[:, None] + torch.arange(N, device=tokens.device)
        position_ids = self.twice(lengths[:, None] + depth) - self.num_pads[:, None]
        return self.forward(self.twice(tokens), mask, position_ids, self.twice(slots))

    def lengths(self, output) -> Tensor:
        """(B,) int64: columns in front of the newest token, which no forward has read yet."""
        return self.prefix_len + output.num_made - 1

    def commit(self, accepted_nodes, num_accepted, output):
        for caches in self.cache.groups():
            commit_kv(caches, accepted_nodes, num_accepted, self.lengths(output), row_dim=0, column_dim=2)


class _Output:
    """The new tokens of B requests, and which requests are finished."""

    def __init__(self, input_ids, asked):
        B, S = input_ids.shape
        self.prompts, self.asked, self.limit = input_ids, asked, asked.max_tokens
        self.is_real = torch.ones_like(input_ids, dtype=torch.bool)
        if asked.attention_mask is not None:
            self.is_real = asked.attention_mask != 0
        self.tokens = torch.full((B, self.limit + 1), asked.pad, device=input_ids.device)  # the last is scratch
        self.num_made = torch.zeros(B, dtype=torch.int64, device=input_ids.device)
        self.is_finished = torch.zeros(B, dtype=torch.bool, device=input_ids.device)
        self.host_made, self.host_finished = [0] * B, [False] * B
        if asked.streamer is not None:  # as transformers does: some streamers skip it
            asked.streamer.put(input_ids.cpu())

    @property
    def is_done(self) -> bool:
        return all(self.host_finished)

    def open_counts(self) -> list[int]:
        return [made for made, finished in zip(self.host_made, self.host_finished) if not finished]

    def newest(self) -> Tensor:
        return self.tokens.gather(1, self.num_made[:, None] - 1)[:, 0]

    def take(self, tokens: Tensor, num_tokens: Tensor, **statuses: Tensor) -> None:
        """Append the first num_tokens (B,) of tokens (B, M), until a request is finished: the loop's host read.

        statuses (B,) are what ops have reported, by their names. For a request that was not finished they are checked.
        """
        statuses = {op: torch.where(self.is_finished, 0, status) for op, status in statuses.items()}
        bits = functools.reduce(torch.bitwise_or, statuses.values())
        index = torch.arange(tokens.shape[1], device=tokens.device)
        num = torch.where(self.is_finished, 0, num_tokens.minimum(self.limit - self.num_made))
        is_end = torch.isin(tokens, self.asked.ends) & (index < num[:, None])
        has_end = is_end.any(1)
        num = torch.where(has_end, is_end.int().argmax(1) + 1, num)
        is_new = index < num[:, None]
        scratch = torch.where(is_new, self.num_made[:, None] + index, self.limit)
        self.tokens.scatter_(1, scratch, tokens)
        self.num_made = self.num_made + num
        self.is_finished = self.is_finished | has_end | (self.num_made >= self.limit)
        before = self.host_made
        self.host_made, finished, bits = torch.stack([self.num_made, self.is_finished.long(), bits.long()]).tolist()
        if any(bits):
            for op, status in statuses.items():
                check_status(status, op)
        self.host_finished = [bool(f) for f in finished]
        if self.asked.criteria:
            for request, first in enumerate(before):
                self.ask_criteria(request, first)
        if self.asked.streamer is not None:
            for token in self.tokens[0, before[0]:self.host_made[0]].cpu():
                self.asked.streamer.put(token[None])

    def ask_criteria(self, request: int, first: int) -> None:
        """Token by token, as one-at-a-time decoding of this request would; their scores are None."""
        for made in range(first + 1, self.host_made[request] + 1):
            ids = torch.cat([self.prompts[request], self.tokens[request, :made]])[None]
            if any(bool(torch.as_tensor(criterion(ids, None)).all()) for criterion in self.asked.criteria):
                self.tokens[request, made:] = self.asked.pad
                self.host_made[request], self.host_finished[request] = made, True
                self.num_made[request], self.is_finished[request] = made, True
                return

    def sequences(self, paths: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of F paths from the root down (B, F, D) -> all tokens up to their ends, left-padded; where real."""
        S, F = self.prompts.shape[1], paths.shape[1]
        width = S + max(self.host_made) - 1
        at = (S + self.num_made - 1)[:, None] + torch.arange(-width, 0, device=paths.device)
        ids = torch.cat([self.prompts, self.tokens], 1).gather(1, at.clamp(min=0))
        is_real = torch.nn.functional.pad(self.is_real, (0, self.tokens.shape[1]), value=True)
        is_real = is_real.gather(1, at.clamp(min=0)) & (at >= 0)
        ids, is_real = (x[:, None].expand(-1, F, -1) for x in (ids, is_real))
        return torch.cat([ids, paths], 2), torch.cat([is_real, torch.ones_like(paths, dtype=torch.bool)], 2)

    def result(self, stats: dict | None, target: _Target):
        if self.asked.streamer is not None:
            self.asked.streamer.end()
        if stats is not None:
            stats.update(target_forwards=target.num_forwards, num_tokens=list(self.host_made))
        sequences = torch.cat([self.prompts, self.tokens[:, :max(self.host_made)]], 1)
        if not self.asked.returns_dict:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput
        return GenerateDecoderOnlyOutput(sequences=sequences)


class _Level:
    """The inner nodes of one depth, and their children."""

    def __init__(self, depth: int, paths: list[list[int]], children: list[tuple[int, int, int]], device):
        self.depth = depth
        self.paths = torch.tensor(paths, device=device)  # (F, depth + 1) nodes from the root down
        self.children, self.row_of_child, self.rank_of_child = torch.tensor(children, device=device).T
        self.num_children = max(rank for _, _, rank in children) + 1


class _Tree:
    """A static tree: its links, and level by level what is drawn from which row."""

    def __init__(self, choices, like: Tensor, renumber: bool = False):
        if not choices:
            raise ValueError(f"choices must be at least one path of ranks, got {choices!r}")
        choices = list(choices)
        parents, _ = tree_from_choices(choices, device=like.device)
        choices = sorted((tuple(map(int, choice)) for choice in choices), key=lambda c: (len(c), c))
        self.links, self.num_nodes = tree_links(parents)[:4], parents.shape[1]
        self.max_depth, self.levels = len(choices[-1]), []
        node_of = {(): 0, **{choice: n for n, choice in enumerate(choices, 1)}}
        inner = sorted({choice[:-1] for choice in choices}, key=lambda c: (len(c), c))
        rows = torch.full((1, self.num_nodes), -1, dtype=torch.int32)
        rows[0, [node_of[choice] for choice in inner]] = torch.arange(len(inner), dtype=torch.int32)
        self.draft_row = rows.to(like.device)
        rank = {choice: choice[-1] for choice in choices}
        if renumber:  # children are verified as the first draws from their parent's row
            rank = {c: sum(other[:-1] == c[:-1] for other in choices[:n]) for n, c in enumerate(choices)}
        for depth in range(self.max_depth):
            nodes = [choice for choice in inner if len(choice) == depth]
            children = [(node_of[c], nodes.index(c[:-1]), rank[c]) for c in choices if len(c) == depth + 1]
            from_root = [[node_of[node[:d]] for d in range(depth + 1)] for node in nodes]
            self.levels.append(_Level(depth, from_root, children, like.device))


def cache_name(model) -> str:
    """The argument of the model's `forward` that takes its cache: "cache" from transformers 5.24 on."""
    return next((name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters), CACHE_NAMES[1])


def _is_off(model, key: str, value) -> bool:
    """Whether an argument asks for nothing: it is None, empty, or what `forward` or `generate` takes for it anyway."""
    if value is None or isinstance(value, Sized) and getattr(value, "shape", None) != () and len(value) == 0:
        return True
    defaults = [inspect.signature(function).parameters[key].default for function in (model.forward, model.generate)
                if key in inspect.signature(function).parameters]
    return isinstance(value, (bool, int, float, str)) and value in defaults


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _seeds(seeds, input_ids: Tensor) -> Tensor:
    seeds = torch.as_tensor(seeds, dtype=torch.int64, device=input_ids.device)
    check("seeds", seeds, torch.int64, like=input_ids, B=len(input_ids))
    return seeds


@functools.cache
def _cache_class() -> type:
    """A cache of R rows; each read says in which columns to keep its own. Some models ask for transformers' class."""
    from transformers import Cache

    class SlotCache(Cache):
        def __init__(self, rows: int, capacity: int):
            super().__init__(layers=[])
            self.rows, self.capacity, self.keys, self.values = rows, capacity, {}, {}

        def update(self, key_states, value_states, layer_idx, *_, **__):
            """What transformers calls in every layer: keep (R, H, N, D), return all that may be seen."""
            seen = []
            for caches, new in ((self.keys, key_states), (self.values, value_states)):
                if layer_idx not in caches:
                    R, H, _, D = new.shape
                    caches[layer_idx] = new.new_zeros(R, H, self.capacity, D)
                index = self.slots.to(new.device)[:, None, :, None].expand_as(new)
                seen.append(caches[layer_idx].scatter_(2, index, new)[:, :, :self.num_columns])
            return tuple(seen)

        def get_seq_length(self, *_, **__):
            return 0  # asked for where there are no position ids

        def groups(self):
            """All layers' tensors, in lists of one shape: as commit_kv takes them."""
            groups = {}
            for cache in (*self.keys.values(), *self.values.values()):
                groups.setdefault((cache.shape, cache.dtype, cache.device), []).append(cache)
            return list(groups.values())

    return SlotCache
