"""Jacobi decoding: the target guesses its own next tokens, and every forward improves the guesses.

A step reads the newest token and the guesses of the next positions in one forward, and draws all these positions anew,
each with its own noise (see `specvis_kernels.draw_tokens`). What was guessed right so far is final, and so is the first
draw behind it: it followed the right tokens. The other draws are better guesses. A position that no forward has reached
yet is guessed from the row of the position above it, with its own noise. (Speculative Jacobi decoding,
arXiv:2410.01699; with the same noise in every forward, arXiv:2510.24211.)

A position's noise never changes. So the tokens are those that `decode` draws with the same seed, whatever the window.
(By rejection, see `coupling`, they are others.)

Read downwards, as `discrete`: each step is five calls: draft, target_forward, verify, commit, update.
"""
import time
import weakref
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specvis_kernels import INVALID_ROW, DrawTokensResult, tree_links

from ..models.interface import TargetModel
from .coupling import Coupled, Coupling
from .discrete import Decoded, Observer, Progress, Step, check_known_tokens, check_methods, check_request, read_known
from .methods import MAX_WINDOW, Method
from .sampling import Sampling, cfg_inputs, mask_padding, repeat_for_cfg

WINDOWS = (0, 2, 4, 6, 8, 12, 16, 24, MAX_WINDOW)  # what "auto" chooses from; 0 is one token a forward
# The share of guesses that are right where those before them are, at distance 1, 2, ..; the last number goes on. Of the
# shipped model at a window of 32: 64 pictures of specvis compare's prompts at its settings (`Decoded.num_accepted`)
STANDING = (0.39, 0.76, 0.88, 0.90, 0.93, 0.90, 0.92, 0.89, 0.89, 0.87, 0.88, 0.85, 0.80, 0.74, 0.51, 0.61, 0.80, 0.85)
PRIOR_STEPS = 8.0    # as many steps STANDING counts as
MEMORY = 0.9         # of a step's record is left after the next REVIEW steps
REVIEW = 4           # steps from one choice of a window to the next
ROUNDS = 6           # in which every window is timed; the first is slower, since it allocates
TIMING_ERROR = 0.05  # a wider window must promise so much more speed than a narrower one

_facts = weakref.WeakKeyDictionary()  # target -> what was found out about it, see facts_of


@torch.inference_mode()
def jacobi_decode(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling,
                  methods: list[Method], neighbors: Tensor | None = None, progress: Progress | None = None,
                  observe: Observer | None = None, *, known_tokens: Tensor | None = None) -> Decoded:
    """Read the newest token and the guesses behind it in one target forward, and draw all of them anew; until every
    image is whole.

    If the target puts a NaN into its cache, the image ends there, whether the guess was right or not.

    Args:
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        methods:      one for each request, all of one `Method.family`; `vanilla` has a window of no guesses
        neighbors:    (V, k) uint16 or int32, as `codebook_neighbors` gives it; needed where k > 0, except by rank
        observe:      called after every step, with tensors that it must not change
        known_tokens: (B, K) int64  the first tokens of each image, -1 behind them; None: there are none

    Raises:
        ValueError: an argument differs from the above, or what the target says at a token depends on later tokens
    """
    check_request(target, condition, padding_mask, sampling)
    check_methods(methods, len(condition), ("jacobi", "none"),
                  "Jacobi decoding or vanilla (speculative_decode takes those with a drafter)")
    num_known = check_known_tokens(known_tokens, len(condition), target)
    check_causal(target)
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    settings = Settings(target, padding_mask, sampling, methods)
    base = methods[0]
    coupling = None
    if base.drafting == "jacobi" and not base.seed_exact:
        coupling = Coupling(methods, sampling, neighbors, target.grid, target.vocab_size)
    has_choice = "auto" in settings.windows and settings.num_tokens > 1  # an image of one token takes no step
    choice = WindowChoice(step_seconds(settings, condition)) if has_choice else None
    state = State(settings, num_known, choice, coupling)
    prefill(state, settings, condition, known_tokens)
    if progress:
        progress(sum(state.counts) - sum(num_known))
    finished, rows = [], list(range(len(methods)))  # images that the loop has let go; which the others are
    while min(state.counts) < settings.num_tokens:
        counts, windows = list(state.counts), list(state.windows)
        num_accepted = run_step(state, settings)
        if observe:
            observe(chain_step(*spread(rows, counts, windows, num_accepted, len(methods), settings), settings))
        if progress:
            progress(sum(state.counts) - sum(counts))
        if keep := rows_to_keep(state, settings):
            finished.append((state.decoded(), rows))
            state, settings, rows = state.select(keep), settings.select(keep), [rows[i] for i in keep]
    return gather_images([*finished, (state.decoded(), rows)])


def rows_to_keep(state: "State", settings: "Settings") -> list[int] | None:
    """The images that are not finished, once a quarter of those that are read is; None: not yet, or not possible.

    Images finish at very different times. A finished one would go on taking its share of every forward.
    """
    keep = [i for i, count in enumerate(state.counts) if count < settings.num_tokens]
    can_select = state.coupling is None and hasattr(state.cache, "select")
    return keep if can_select and 0 < len(keep) <= 0.75 * len(state.counts) else None


def spread(rows: list[int], counts: list[int], windows: list[int], num_accepted: list[int], batch: int,
           settings: "Settings") -> tuple[list[int], list[int], list[int]]:
    """The same of the whole batch: the images that the loop has let go are finished."""
    of_all = [settings.num_tokens] * batch, [0] * batch, [-1] * batch
    for values, those in zip(of_all, (counts, windows, num_accepted)):
        for row, value in zip(rows, those):
            values[row] = value
    return of_all


def gather_images(parts: list[tuple[Decoded, list[int]]]) -> Decoded:
    """The images of all parts, each with the rows of the batch that it has; of a row the last part counts."""
    part_of = {row: (part, i) for part, (_, rows) in enumerate(parts) for i, row in enumerate(rows)}
    chosen = [[] for _ in parts]
    for row in sorted(part_of):
        chosen[part_of[row][0]].append(row)
    order = [row for rows in chosen for row in rows]
    images = [decoded.select([part_of[row][1] for row in rows]) for (decoded, _), rows in zip(parts, chosen)]
    return Decoded.merged(images, torch.tensor(order))


class Settings:
    """What stays the same while B requests are decoded."""

    def __init__(self, target: TargetModel, padding_mask: Tensor, sampling: Sampling, methods: list[Method]):
        R, L, S, device = len(padding_mask), target.grid ** 2, target.prefix_len, padding_mask.device
        self.padding_mask = padding_mask
        self.target, self.sampling, self.grid, self.num_tokens, self.prefix_len = target, sampling, target.grid, L, S
        # a number or "auto"; of more guesses than an image has tokens, the first are read
        self.windows = [m.window if m.window == "auto" else min(m.window, L) for m in methods]
        self.max_window = W = min(max(m.max_depth for m in methods), L)
        self.from_last = methods[0].guess == "last"
        self.lossless = torch.tensor([m.lossless for m in methods])
        # of each node, by its position in the image: its column in the cache, and the columns that it sees
        self.slots = torch.arange(S, S + L + W, device=device).expand(R, -1)
        causal = torch.ones(1, L + W, S + L + W, dtype=torch.bool, device=device).tril(S)
        self.mask = mask_padding(padding_mask, causal.expand(R // 2, -1, -1))
        self.positions = torch.arange(L + 2 * max(target.grid, W + 1) + 2, device=device).expand(R // 2, -1)

    def select(self, rows: list[int]) -> "Settings":
        """Of these images alone."""
        other, both = copy(self), [*rows, *(row + len(self.windows) for row in rows)]
        other.sampling, other.windows, other.lossless = (self.sampling[rows], [self.windows[i] for i in rows],
                                                         self.lossless[rows])
        other.padding_mask, other.slots, other.mask = self.padding_mask[both], self.slots[both], self.mask[both]
        other.positions = self.positions[rows]
        return other


class State:
    """What goes around the loop: the images, their guesses, how far they are, and the accounts of what it took.

    `tokens` holds the image so far and, behind it, the newest guess of every position. What stands behind the image is
    of no use; its last column takes what is drawn behind a request's own window.
    """

    def __init__(self, settings: Settings, num_known: list[int], choice: "WindowChoice | None" = None,
                 coupling: Coupling | None = None):
        B, L = len(num_known), settings.num_tokens
        self.cache = settings.target.new_cache(2 * B, settings.prefix_len + L + settings.max_window)
        self.tokens = torch.zeros_like(settings.positions, memory_format=torch.contiguous_format)
        # what the host knows: how many tokens of each image are final, and how many were known
        self.counts, self.num_known = list(num_known), num_known
        self.ends = [L] * B  # where a failed image ends
        self.coupling = coupling  # None: seed-exact
        self.choice, self.wanted = choice, settings.windows
        self.set_windows()
        # the accounts, see Decoded
        self.target_forwards = [1] * B
        self.num_accepted, self.num_drafted = [[-1] * L for _ in range(B)], [[0] * L for _ in range(B)]
        self.tv_excess = torch.zeros(B, device=self.tokens.device)
        self.tv_bound = torch.where(settings.lossless, 0.0, torch.nan)

    def select(self, rows: list[int]) -> "State":
        """Of these images alone; the accounts too."""
        other, both = copy(self), [*rows, *(row + len(self.counts) for row in rows)]
        other.cache = self.cache.select(torch.tensor(both, device=self.tokens.device))
        for name in ("tokens", "tv_excess", "tv_bound"):
            setattr(other, name, getattr(self, name)[rows])
        for name in ("counts", "num_known", "ends", "wanted", "windows", "target_forwards", "num_accepted",
                     "num_drafted"):
            setattr(other, name, [getattr(self, name)[i] for i in rows])
        if self.choice:
            self.choice.shrink(len(rows) / len(self.counts))
        return other

    def set_windows(self) -> None:
        """How many guesses the next step reads of each image."""
        chosen = self.choice.next_window() if self.choice else 0
        self.windows = [chosen if window == "auto" else window for window in self.wanted]

    def advance(self, request: int, count: int, status: int) -> None:
        """Image `request` now has `count` tokens. status: of the row that the last of them was drawn from."""
        self.counts[request] = count
        if status & INVALID_ROW:
            self.ends[request], self.counts[request] = count - 1, len(self.num_accepted[request])

    def decoded(self) -> Decoded:
        L = len(self.num_accepted[0])
        ends = torch.tensor(self.ends)
        is_behind = torch.arange(L) >= ends[:, None]
        tokens = self.tokens[:, :L].masked_fill(is_behind.to(self.tokens.device), 0)
        accounts = map(torch.tensor, (self.num_known, self.target_forwards, self.num_accepted, self.num_drafted))
        return Decoded(tokens, *accounts, self.tv_excess.cpu(), self.tv_bound, ends < L)


def columns(first: list[int], n: int, device: torch.device) -> tuple:
    """The index of n columns of a table, from first[b] on in row b. It gives a view where all rows begin alike."""
    if min(first) == max(first):
        return slice(None), slice(first[0], first[0] + n)
    row = torch.arange(len(first), device=device)[:, None]
    return row, torch.tensor(first, device=device)[:, None] + torch.arange(n, device=device)


def prefill(state: State, settings: Settings, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (2B, S, dim) and the known tokens, draw the next token, and make the first guesses.

    A position's first guess is from the row above it, as far as there is one, and else from the newest row.
    """
    sampling, grid, B, device = settings.sampling, settings.grid, len(state.counts), condition.device
    K = 0 if known_tokens is None else known_tokens.shape[1]
    if K:
        state.tokens[:, :K] = known_tokens.clamp(min=0)
    hidden = read_known(settings.target, condition, settings.padding_mask, state.tokens[:, :K], state.cache)
    hidden = hidden[:, settings.prefix_len - 1:]  # before each token, the next one too
    num_above, num_behind = min(K, grid - 1), settings.max_window if settings.from_last else grid - 1
    newest = torch.tensor(state.counts, device=device)[:, None]
    positions = (newest + torch.arange(-num_above, num_behind + 1, device=device)).clamp(min=0)
    before = repeat_for_cfg(positions.minimum(newest))[..., None].expand(-1, -1, hidden.shape[-1])
    hidden = hidden.gather(1, before)
    drawn = sampling.draw(settings.target, hidden, positions, ahead=grid)
    row = torch.arange(B, device=device)[:, None]
    state.tokens[row, positions[:, num_above:]] = drawn.tokens[:, num_above:]
    if not settings.from_last:
        state.tokens[row, positions + grid] = drawn.ahead_tokens
    if state.coupling:
        rows = state.coupling.exact(*sampling.probs(settings.target, hidden[:, :num_above + 1]))
        state.coupling.keep_rows(positions[:, :num_above + 1], rows)
        guess_new(state, settings, hidden, state.counts, state.counts, settings.max_window)
    for request, status in enumerate(drawn.status[:, num_above].tolist()):
        if state.counts[request] < settings.num_tokens:
            state.advance(request, state.counts[request] + 1, status)


def run_step(state: State, settings: Settings) -> list[int]:
    """One step of all images that are not finished; how many guesses of each were accepted, -1 of a finished one."""
    chain = draft(state, settings)
    hidden = target_forward(state, settings, chain)
    verified = verify(state, settings, chain, hidden)
    commit(state, settings, chain, verified)
    return update(state, settings, hidden, verified)


class Chain(NamedTuple):
    """What a step reads: the newest token of every image and the guesses behind it, N nodes."""
    tokens: Tensor     # (B, N) int64
    nodes: tuple       # their index in tables of 2B rows, with a column for each position in the image
    successors: tuple  # the index of what follows each of them, in tables of B rows


def draft(state: State, settings: Settings) -> Chain:
    """As many guesses as the widest window takes, but none behind the end of every image."""
    counts, device, L = state.counts, state.tokens.device, settings.num_tokens
    window = max(window for window, count in zip(state.windows, counts) if count < L)
    N, newest = 1 + min(window, L - 1 - min(counts)), [count - 1 for count in counts]
    return Chain(state.tokens[columns(newest, N, device)], columns(newest * 2, N, device), columns(counts, N, device))


def target_forward(state: State, settings: Settings, chain: Chain) -> Tensor:
    """Read all nodes of the chains at once: (2B, N, H). A guess that is kept is in its column of the cache already."""
    end = settings.prefix_len + max(state.counts) - 1 + chain.tokens.shape[1]
    slots, mask = settings.slots[chain.nodes], settings.mask[:, :, :end][chain.nodes]
    return settings.target.extend(repeat_for_cfg(chain.tokens), slots, mask, state.cache, slots)


def verify(state: State, settings: Settings, chain: Chain, hidden: Tensor) -> DrawTokensResult | Coupled:
    """Draw the token behind each node, and say how many leading guesses stand.

    Seed-exact: those that equal their draws; and the token below each is drawn, too. The token behind the last node is
    compared with a guess that no node has read. Otherwise: those that rejection keeps.
    """
    sampling, guesses = settings.sampling, state.tokens[chain.successors]
    if state.coupling:
        budget = [min(window, settings.num_tokens - 1 - count) for window, count in zip(state.windows, state.counts)]
        counts, budget = torch.tensor([state.counts, budget], device=hidden.device)[..., None]
        return state.coupling.couple(*sampling.probs(settings.target, hidden), guesses, counts, budget)
    return sampling.draw(settings.target, hidden, settings.positions[chain.successors], guesses, settings.grid)


def commit(state: State, settings: Settings, chain: Chain, verified: DrawTokensResult | Coupled) -> None:
    """The draws are the newest tokens and guesses. Where a window reaches the row below, its own are better."""
    N, device, successors = chain.tokens.shape[1], state.tokens.device, chain.successors
    is_own, row = None, None
    if min(state.windows) < max(state.windows):  # a request guesses nothing behind its own window
        is_own = torch.arange(N, device=device) <= torch.tensor(state.windows, device=device)[:, None]
        row = torch.arange(len(is_own), device=device)[:, None]

    def own(index):
        scratch = state.tokens.shape[1] - 1
        return index if is_own is None else (row, torch.where(is_own, settings.positions[index], scratch))

    if state.coupling:
        positions = settings.positions[successors]
        state.coupling.keep_rows(positions if is_own is None else torch.where(is_own, positions, -1), verified.probs)
    else:
        below = columns([count + settings.grid for count in state.counts], N, device)
        state.tokens[own(below)] = verified.ahead_tokens
    state.tokens[own(successors)] = verified.tokens


def update(state: State, settings: Settings, hidden: Tensor, verified: DrawTokensResult | Coupled) -> list[int]:
    """Account for the step, guess what enters the windows, and choose the next ones. Returns as `run_step`."""
    counts, windows, L = list(state.counts), state.windows, settings.num_tokens
    accepted = [-1] * len(counts)
    results = torch.cat([verified.num_accepted[:, None], verified.status], 1).tolist()  # the step's one host read
    for request, (num_equal, *status) in enumerate(results):
        count = counts[request]
        if count == L:
            continue
        num_drafted = min(windows[request], L - 1 - count)
        accepted[request] = min(num_equal, num_drafted)
        state.target_forwards[request] += 1
        state.num_drafted[request][count] = num_drafted
        state.num_accepted[request][count] = accepted[request]
        state.advance(request, count + accepted[request] + 1, status[accepted[request]])
        if state.choice:
            state.choice.record(num_equal, min(len(status), windows[request] + 1, L - count))
    if state.coupling:
        state.tv_excess += verified.tv_excess
    if state.coupling or settings.from_last:
        last = [count + min(window, hidden.shape[1] - 1) for count, window in zip(counts, windows)]
        guess_new(state, settings, hidden, counts, last, max(accepted) + 1)
    if state.choice:
        state.set_windows()
    return accepted


def guess_new(state: State, settings: Settings, hidden: Tensor, counts: list[int], last: list[int], n: int) -> None:
    """Guess the n positions behind `last`, which enter the windows after a step from `counts` on.

    hidden (2B, N, H): what the step's nodes are.
    """
    device = hidden.device
    if state.coupling:
        first, last = torch.tensor([counts, last], device=device)[..., None]
        positions, tokens = state.coupling.first_guesses(first, last, n)
        state.tokens[torch.arange(len(counts), device=device)[:, None], positions] = tokens
        return
    node = torch.tensor([end - count for end, count in zip(last, counts)] * 2, device=device)
    rows = hidden[torch.arange(len(hidden), device=device), node][:, None].expand(-1, n, -1)
    entering = columns([end + 1 for end in last], n, device)
    state.tokens[entering] = settings.sampling.draw(settings.target, rows, settings.positions[entering]).tokens


def chain_step(counts: list[int], windows: list[int], num_accepted: list[int], settings: Settings) -> Step:
    """For an observer: the step that accepted so many guesses of images that had `counts` tokens."""
    device, P, L = settings.mask.device, settings.max_window, settings.num_tokens
    position, window, accepted = (torch.tensor(numbers, device=device) for numbers in (counts, windows, num_accepted))
    depth = window.minimum(L - 1 - position).clamp(min=0)
    node = torch.arange(P + 1, device=device)
    links = tree_links(torch.where(node <= depth[:, None], node - 1, -2).int())
    accepted_nodes = torch.where(node[1:] <= accepted[:, None], node[1:], -1).int()
    return Step(links, position.clamp(max=L - 1), accepted_nodes, accepted.clamp(min=0).int(), accepted >= 0)


class WindowChoice:
    """Which of WINDOWS gives the most tokens a second: by the seconds of a step, and by how many guesses it accepts.

    A step with a window of W tells what every narrower one would accept, and whether the guess behind its window is
    right, too. So a decoding that went back to no guesses learns when to guess again.
    """

    def __init__(self, seconds: dict[int, float]):
        self.timed, self.share, self.seconds, self.num_steps = seconds, 1.0, seconds, 0
        self.usual = [*STANDING, *STANDING[-1:] * (MAX_WINDOW + 1)][:MAX_WINDOW + 1]
        # by distance: how often a guess was looked at behind guesses that were right, and how often it was right
        self.looks, self.rights = ([0.0] * (MAX_WINDOW + 1) for _ in range(2))
        self.window = self.fastest()

    def record(self, num_equal: int, num_read: int) -> None:
        """Of the num_read guesses of a step, the first num_equal were right."""
        for distance in range(min(num_equal + 1, num_read, len(self.looks))):
            self.looks[distance] += 1
            self.rights[distance] += distance < num_equal

    def shrink(self, share: float) -> None:
        """The batch has this share of its images left: a step now takes what one with as many nodes took before."""
        self.share *= share
        timed = sorted(self.timed.items())
        nodes, seconds = [1 + window for window, _ in timed], [time for _, time in timed]
        self.seconds = {window: float(np.interp(self.share * (1 + window), nodes, seconds)) for window in self.timed}

    def next_window(self) -> int:
        """The window of the next step. It changes every few steps."""
        if self.num_steps and self.num_steps % REVIEW == 0:
            self.window = self.fastest()
            self.looks, self.rights = ([MEMORY * x for x in record] for record in (self.looks, self.rights))
        self.num_steps += 1
        return self.window

    def fastest(self) -> int:
        expected, chance, speeds = 1.0, 1.0, {}  # tokens of a step; the chance that all guesses so far are right
        for window, (usual, looks, rights) in enumerate(zip(self.usual, self.looks, self.rights)):
            if window in self.seconds:
                speeds[window] = expected / self.seconds[window]
            chance *= (PRIOR_STEPS * usual + rights) / (PRIOR_STEPS + looks)
            expected += chance
        enough = (1 - TIMING_ERROR) * max(speeds.values())
        return min(window for window, speed in speeds.items() if speed >= enough)


def facts_of(target: TargetModel) -> dict:
    """What was found out about a target, for as long as it lives. Of one without a hash nothing is remembered."""
    try:
        return _facts.setdefault(target, {})
    except TypeError:
        return {}


def step_seconds(settings: Settings, condition: Tensor) -> dict[int, float]:
    """Seconds of a step with each of WINDOWS, in the middle of the images. A target is timed once for each batch."""
    key = "seconds", (B := len(condition) // 2), condition.device, condition.dtype
    facts = facts_of(settings.target)
    if key not in facts:
        state = State(settings, [max(1, settings.num_tokens // 2)] * B, WindowChoice({0: 1.0}))
        settings.target.prefill(condition, settings.padding_mask, state.cache)
        # in rounds, so that what else the machine does meets all windows alike
        rounds = [{window: seconds_of(state, settings, window) for window in WINDOWS} for _ in range(ROUNDS)]
        facts[key] = {window: min(seconds[window] for seconds in rounds) for window in WINDOWS}
    return facts[key]


def seconds_of(state: State, settings: Settings, window: int) -> float:
    state.windows = [window] * len(state.counts)
    start = time.perf_counter()
    chain = draft(state, settings)
    verified = verify(state, settings, chain, target_forward(state, settings, chain))
    commit(state, settings, chain, verified)
    verified.status.tolist()  # waits for the device
    return time.perf_counter() - start


def check_causal(target: TargetModel) -> None:
    """Raise ValueError if what the target says at a token depends on the token behind it. Each target is asked once."""
    facts = facts_of(target)
    if "is_causal" not in facts:
        condition, S = target.null_condition(1), target.prefix_len
        cache, device = target.new_cache(1, S + 2), condition.device
        target.prefill(condition, torch.ones(1, S, dtype=torch.bool, device=device), cache)
        slots = torch.arange(S, S + 2, device=device)[None]
        mask = torch.ones(1, 2, S + 2, dtype=torch.bool, device=device).tril(S)
        first, second = (target.logits(target.extend(torch.tensor([[0, token]], device=device), slots, mask, cache,
                                                     slots))[:, 0] for token in (0, target.vocab_size - 1))
        facts["is_causal"] = torch.allclose(first, second, rtol=1e-4, atol=1e-4, equal_nan=True)
    if not facts["is_causal"]:
        raise ValueError("target must be causal, so that its logits at a token do not depend on later tokens: Jacobi "
                         f"decoding reads guesses behind a token that may change; those of {type(target).__name__} do")
