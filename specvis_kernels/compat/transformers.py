"""transformers: tree and Jacobi decoding for `model.generate(custom_generate=..)`, and guidance as a LogitsProcessor.

    model.generate(ids, custom_generate=jacobi_generate, window=16, max_new_tokens=256, do_sample=True)
    model.generate(ids, custom_generate=tree_generate, draft=draft, choices=choices, max_new_tokens=256, do_sample=True)

For causal language models that take a mask of four dimensions and position ids: full attention in each layer, "sdpa" or
"eager". docs/use_it.md says what they do beside `generate`, and which versions were tested; `_hosts.py` and
`_transformers.py` refuse what they cannot do. Transformers is imported when one of the two functions is called.

Tokens equal the tokens of another way to decode as far as its forwards give equal logits: in half precision forwards of
another number of tokens round differently. The functions keep a cache of their own, in which each request has its own
length, and do not use the one that `generate` makes.
"""
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import check_status, draw_children, draw_tokens, guided_probs, tree_from_choices, tree_links, verify_logits
from .._checks import check, check_count, check_seeds
from ._hosts import unwrapped
from ._transformers import Asked, Output, Target, described


@torch.no_grad()
def tree_generate(model, input_ids: Tensor, logits_processor: Sequence | None = None,
                  stopping_criteria: Sequence | None = None, generation_config=None, *,
                  draft: Callable[[Tensor, Tensor], Tensor], choices: Sequence[Sequence[int]],
                  guidance: float | Tensor | None = None, unconditional_ids: Tensor | None = None,
                  unconditional_mask: Tensor | None = None, id_range: tuple[int, int] | Tensor | None = None,
                  seeds: Sequence[int] | Tensor | int | None = None, verify: dict | None = None, token_streamer=None,
                  stats: dict | None = None, log_probs: bool = False, **model_kwargs):
    """Decode with a static draft tree: to be passed to `model.generate` as `custom_generate`.

    Each target forward reads a whole tree of drafts. `draft` proposes what may follow a node, children are drawn from
    its rows without replacement, and one path of the tree is accepted. Greedy, the tokens are the ones of `generate`.
    Sampled, they have the distribution from which `generate` draws: its temperature, top_k, top_p and min_p apply.

    Without `seeds` drafts are verified by `verify_tree`'s rule, with torch's random numbers. With `seeds` they are
    verified by equality: the tokens are the ones that one-at-a-time decoding draws with the same seeds, whatever the
    tree and the other requests of the batch, and also the tokens of `jacobi_generate`.

    (EAGLE, arXiv:2401.15077; Medusa, arXiv:2401.10774, whose `medusa_choices` `choices` are; guidance: Ho and Salimans,
    arXiv:2207.12598.)

    Args:
        model, input_ids (B, S) int64, logits_processor, stopping_criteria, generation_config: as `generate` gives them.
            Prompts of different lengths are padded on the left, with an attention_mask. GLM-Image needs image_grid_thw
            and, with several prompts, images_per_sample, as its processor gives them
        draft:         called with sequences (B, F, T) int64 and a mask (B, F, T) bool for the F nodes of a level: all
                       tokens up to each node, padded on the left. Returns (B, F, V) float32, the probabilities of the
                       next token
        choices:       the tree: paths of ranks, e.g. [(0,), (1,), (0, 0)]: the root's first two children, and the first
                       child of the first. Where ranks have gaps, e.g. [(1,)], children are left out, greedy and with
                       seeds; sampled without seeds, ranks are renumbered from 0 on below each parent, because to keep
                       some of the children that were drawn would change the distribution
        guidance:      s in uncond + s (cond - uncond): a number or (B,) float32. With unconditional_ids
        unconditional_ids:   (R, S') int64, R divides B: the prompts without the condition, padded on the left
        unconditional_mask:  (R, S') bool or int64, where they are real; None: everywhere
        id_range:      two integers first, last: the ids [first, last) that can be drawn; or (L, 2) or (B, L, 2) int64,
                       the ids of each new token ([x, x + 1) forces token x); the last row goes on. None: all ids
        seeds:         (B,) integers, one for each prompt; None: torch's random numbers
        verify:        options of `verify_logits` for relaxed acceptance: neighbors, delta, cutoff, offset, omega,
                       residual. Without seeds
        token_streamer:  a streamer of transformers, for a batch of one; it gets the prompt first. (Leave `streamer`
                       out: transformers does not hand it over to functions, and it would never end)
        stats:         a dict that gets "target_forwards", with the prompt's, and "num_tokens", a list for the batch
        log_probs:     whether `stats` gets "sampled" and "full", too: (B, the longest) float32, the log-probabilities
                       of the new tokens, as `token_log_probs` gives them; 0 after a request's end

    Returns:
        as `generate` does: (B, S + the longest) int64, or with return_dict_in_generate an output with `sequences`

    Raises:
        ValueError: the call is not supported, see docs/use_it.md, or an argument differs from the above
        StatusError: the model's logits or the draft model's rows have a NaN, or nothing to draw from (`check_status`)

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from specvis_kernels.compat.transformers import tree_generate
        >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        ...                                      num_attention_heads=1, initializer_range=1.0)).eval()
        >>> def draft(sequences, mask):  # it knows only how often a token has come
        ...     return (torch.nn.functional.one_hot(sequences, 16).sum(2) + 1.0).softmax(-1)
        >>> prompts, rest = torch.tensor([[3, 1, 4]]), dict(max_new_tokens=12, do_sample=False, eos_token_id=None)
        >>> tokens = model.generate(prompts, custom_generate=tree_generate, draft=draft, choices=[(0,), (1,), (0, 0)],
        ...                         **rest)
        >>> torch.equal(tokens, model.generate(prompts, **rest))
        True
    """
    model = unwrapped(model)
    asked = Asked("tree_generate", model, input_ids, logits_processor, stopping_criteria, generation_config,
                   guidance, id_range, token_streamer, stats, log_probs, model_kwargs)
    if verify and seeds is not None:
        raise ValueError("verify must be empty with seeds: tokens that equal the target's draws are not relaxed")
    if not callable(draft):
        raise ValueError(f"draft must be a function of sequences and a mask, got {draft!r}")
    tree = StaticTree(choices, input_ids, renumber=asked.do_sample and seeds is None)
    B, N = len(input_ids), tree.num_nodes
    seeds = None if seeds is None else _seeds_of(seeds, input_ids)
    target = Target(model, input_ids, unconditional_ids, unconditional_mask, asked, N)
    output = Output(input_ids, asked)
    ancestors, depth, first_child, next_sibling = (t.expand(B, *t.shape[1:]) for t in tree.links)

    def verify_nodes(logits, tokens, depth, links, **rule):
        """verify_logits's result, and what `Output.take` wants of it."""
        positions = output.num_made[:, None] + depth
        draws = dict(uniforms=None, seeds=seeds, positions=positions) if seeds is not None else dict(
            uniforms=torch.rand(tokens.shape, dtype=torch.float32, device=tokens.device))
        result = verify_logits(*logits, tokens, *links, guidance=asked.guidance, **asked.settings,
                               id_range=asked.ids(positions), **draws, **rule)
        rows, num_accepted = pad(result.accepted_nodes.long(), (1, 0)), result.num_accepted.long()
        new_tokens = pad(tokens.gather(1, rows[:, 1:].clamp(min=0)), (0, 1))
        new_tokens.scatter_(1, num_accepted[:, None], result.next_token[:, None])
        return result, (new_tokens, num_accepted + 1, logits, positions, rows)

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
                shape = B, F, level.num_children
                draws = dict(uniforms=torch.rand(shape, dtype=torch.float32, device=probs.device)) if seeds is None \
                    else dict(seeds=seeds, positions=positions, num_children=level.num_children)
                drawn = draw_children(probs, **draws)
                children, status = drawn.tokens, status | drawn.status.amax(1)
            tokens[:, level.children] = children[:, level.row_of_child, level.rank_of_child]
            rows.append(probs)
        return torch.cat(rows, 1), status

    none = torch.full((B, 1), -1, dtype=torch.int32, device=input_ids.device)
    root, new = verify_nodes(target.prefill(), input_ids[:, -1:], torch.zeros_like(none), (none, none), max_depth=0)
    output.take(*new, verify_logits=root.status)
    while not output.is_done:
        tokens = output.newest()[:, None].repeat(1, N)
        draft_probs, draft_status = drafts(tokens)
        rule = dict(max_depth=tree.max_depth, **(verify or {}))
        if seeds is None and asked.do_sample:
            rule.update(draft_probs=draft_probs, draft_row=tree.draft_row.expand(B, N))
        logits = target.read(tokens, depth, ancestors, output)
        result, new = verify_nodes(logits, tokens, depth, (first_child, next_sibling), **rule)
        is_open = ~output.is_finished
        target.commit(result.accepted_nodes, torch.where(is_open, result.num_accepted, -1), output)
        output.take(*new, draw_children=draft_status, verify_logits=result.status)
    return output.result(stats, target)


@torch.no_grad()
def jacobi_generate(model, input_ids: Tensor, logits_processor: Sequence | None = None,
                    stopping_criteria: Sequence | None = None, generation_config=None, *, window: int = 16,
                    grid: int | None = None, guidance: float | Tensor | None = None,
                    unconditional_ids: Tensor | None = None, unconditional_mask: Tensor | None = None,
                    id_range: tuple[int, int] | Tensor | None = None, seeds: Sequence[int] | Tensor | int | None = None,
                    token_streamer=None, stats: dict | None = None, log_probs: bool = False, **model_kwargs):
    """Decode by Jacobi iteration, without a draft model: to be passed to `model.generate` as `custom_generate`.

    Each target forward reads the newest token and guesses of the next `window` ones, and draws all of them anew, each
    with its own noise. The leading guesses that were right are final, and so is the draw after them. The tokens are the
    ones that one-at-a-time decoding draws with the same seeds (window=0), whatever the window and the batch. Greedy,
    they are the tokens of `generate`. (Speculative Jacobi decoding, arXiv:2410.01699; with the same noise in every
    forward, arXiv:2510.24211.)

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, guidance, unconditional_ids,
        unconditional_mask, id_range, token_streamer, stats, log_probs: as in `tree_generate`
        window:   how many guesses a forward reads, >= 0
        grid:     how many tokens a row of the image has: a position's first guess is then drawn from the row of the
                  position above it. At least window. None: from the newest row
        seeds:    (B,) integers, the noise of each prompt; None: drawn by torch's random numbers

    Returns:
        as `generate` does: (B, S + the longest) int64, or with return_dict_in_generate an output with `sequences`

    Raises:
        ValueError: the call is not supported, see docs/use_it.md, or an argument differs from the above
        StatusError: the model's logits have a NaN, or nothing to draw from (`check_status`)

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
    model = unwrapped(model)
    asked = Asked("jacobi_generate", model, input_ids, logits_processor, stopping_criteria, generation_config,
                   guidance, id_range, token_streamer, stats, log_probs, model_kwargs)
    check_count("window", window, 0)
    if grid is not None:
        check_count("grid", grid, 1)
        if window > grid:
            raise ValueError(f"window must be at most grid={grid}, the tokens of a row, got {window}")
    B, L, device = len(input_ids), asked.max_tokens, input_ids.device
    seeds = torch.randint(2 ** 62, (B,), device=device) if seeds is None else _seeds_of(seeds, input_ids)
    most = 1 + min(window, L - 1)  # nodes of a forward
    target = Target(model, input_ids, unconditional_ids, unconditional_mask, asked, most)
    output = Output(input_ids, asked)
    step = torch.arange(max(most, grid or 0) + 1, device=device)
    ancestors = tree_links(step[None, :most].int() - 1).ancestors
    image = torch.zeros(B, L + 2 * len(step), dtype=torch.int64, device=device)  # the tokens, and guesses after them

    def draw(logits, uncond, positions, **options):
        return draw_tokens(logits, uncond, asked.guidance, **asked.settings, seeds=seeds, positions=positions,
                           id_range=asked.ids(positions), **options)

    def draw_from_last(logits, uncond, first):
        """Guesses of most + 1 positions from `first` (B,) on, or a row of the grid, by one row of logits (B, 1, V)."""
        positions = first[:, None] + step
        logits, uncond = (None if x is None else x.expand(-1, len(step), -1) for x in (logits, uncond))
        drawn = draw(logits, uncond, positions)
        image.scatter_(1, positions, drawn.tokens)
        return drawn

    logits = target.prefill()
    first = draw_from_last(*logits, output.num_made)
    output.take(image[:, :1], torch.ones_like(output.num_made), logits, output.num_made[:, None],
                draw_tokens=first.status[:, 0])
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
        is_final = step[:N] <= drawn.num_accepted[:, None]  # after a wrong guess a row need not be valid
        output.take(drawn.tokens, drawn.num_accepted.clamp(max=N - 1) + 1, (logits, uncond), positions,
                    torch.where(is_final, step[:N], -1), draw_tokens=torch.where(is_final, drawn.status, 0).amax(1))
    return output.result(stats, target)


class GuidedProbsProcessor:
    """Guidance, a range of ids and the filters as one LogitsProcessor: `guided_probs` in transformers' own loops.

    With `doubled`, the rows with the condition come first and those without it after them, as in transformers'
    ClassifierFreeGuidanceLogitsProcessor, and half as many rows come back. The scores that come back are logarithms of
    probabilities: leave temperature and the filters out of the generation config (temperature=1.0, top_k=0,
    top_p=1.0, min_p=None), or they apply a second time.

    Args:
        guidance:       s in uncond + s (cond - uncond)
        temperature, top_k, top_p, min_p:  as in `guided_probs`; temperature 0 gives the probabilities of temperature 1
        id_range:       two integers first, last: the ids [first, last); or (L, 2) int64, the ids of each new token, the
                        last row goes on. None: all ids
        prompt_length:  how many tokens come before the new ones; needed with an id_range for each token
        doubled:        whether each condition has a second row, without it
        filters:        "k_then_p" or "p_then_k"

    Raises:
        ValueError: id_range for each token without prompt_length, or of another shape; a prompt shorter than
            prompt_length; other than two rows for each prompt with `doubled`
        StatusError: a row has a NaN, or nothing to draw from: the model may have masked all ids of the range

    Example:
        >>> import torch
        >>> from specvis_kernels.compat.transformers import GuidedProbsProcessor
        >>> processor = GuidedProbsProcessor(guidance=2.0, top_k=2)
        >>> scores = torch.tensor([[4.0, 2.0, 1.0, 0.0], [3.0, 2.0, 1.0, 0.0]])  # with the condition, and without it
        >>> processor(torch.zeros(1, 5, dtype=torch.int64), scores).exp().round(decimals=2)
        tensor([[0.9500, 0.0500, 0.0000, 0.0000]])
    """

    supports_continuous_batching = False  # transformers reads this of its processors

    def __init__(self, guidance: float = 1.0, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, *,
                 min_p: float | None = None, id_range: tuple[int, int] | Tensor | None = None,
                 prompt_length: int | None = None, doubled: bool = True, filters: str = "k_then_p"):
        if isinstance(id_range, Tensor) and prompt_length is None:
            raise ValueError("prompt_length must be given with an id_range for each new token")
        if isinstance(id_range, Tensor) and (id_range.shape[1:] != (2,) or not len(id_range)):
            raise ValueError(f"id_range must be int64 (L, 2), got {described(id_range)}")
        self.settings = dict(guidance=guidance, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                             filters=filters)
        self.id_range, self.prompt_length, self.doubled = id_range, prompt_length, doubled

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """(R, T) int64 and (R, V) -> (R / 2, V) float32, or (R, V)."""
        if self.doubled and len(scores) != 2 * len(input_ids):
            raise ValueError(f"scores must have two rows a prompt, with and without the condition, got {len(scores)} "
                             f"for {len(input_ids)} prompts (for a loop that does not double them: doubled=False)")
        if scores.dtype == torch.float32:  # which transformers makes of a half model's scores, masked ids among them
            scores = scores.masked_fill(scores == torch.finfo(torch.float16).min, torch.finfo(torch.float32).min)
        cond, uncond = scores[:, None].chunk(2) if self.doubled else (scores[:, None], None)
        id_range = self.id_range
        if isinstance(id_range, Tensor):
            position = input_ids.shape[1] - self.prompt_length
            if position < 0:
                raise ValueError(f"prompt_length must be at most the {input_ids.shape[1]} tokens that there are, "
                                 f"got {self.prompt_length}")
            id_range = id_range[min(position, len(id_range) - 1)].to(scores.device).expand(len(cond), 1, 2)
        probs, status = guided_probs(cond, uncond, **self.settings, id_range=id_range)
        check_status(status, "guided_probs")
        return probs[:, 0].log()


class _Level:
    """The inner nodes of one depth, and their children."""

    def __init__(self, depth: int, paths: list[list[int]], children: list[tuple[int, int, int]], device):
        self.depth = depth
        self.paths = torch.tensor(paths, device=device)  # (F, depth + 1) nodes from the root down
        self.children, self.row_of_child, self.rank_of_child = torch.tensor(children, device=device).T
        self.num_children = max(rank for _, _, rank in children) + 1


class StaticTree:
    """A static tree: its links, and for each level which children are drawn from which row."""

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
        rows = torch.full((1, self.num_nodes), -1, dtype=torch.int32, device="cpu")
        rows[0, [node_of[choice] for choice in inner]] = torch.arange(len(inner), dtype=torch.int32, device="cpu")
        self.draft_row = rows.to(like.device)
        rank = {choice: choice[-1] for choice in choices}
        if renumber:  # children are verified as the first draws from their parent's row
            rank = {c: sum(other[:-1] == c[:-1] for other in choices[:n]) for n, c in enumerate(choices)}
        for depth in range(self.max_depth):
            nodes = [choice for choice in inner if len(choice) == depth]
            children = [(node_of[c], nodes.index(c[:-1]), rank[c]) for c in choices if len(c) == depth + 1]
            from_root = [[node_of[node[:d]] for d in range(depth + 1)] for node in nodes]
            self.levels.append(_Level(depth, from_root, children, like.device))


def _seeds_of(seeds, input_ids: Tensor) -> Tensor:
    return check_seeds(seeds.to(input_ids.device) if isinstance(seeds, Tensor) else seeds, input_ids, len(input_ids))
