"""Jacobi decoding: the target guesses its own next tokens, and every forward improves the guesses.

A step reads the newest token and the guesses of the next positions in one forward, and draws all these positions anew,
each with its own noise (see `specvis_kernels.draw_tokens`). What was guessed right so far is final, and so is the first
draw after it: it followed the right tokens. The other draws are better guesses. A position that no forward has reached
yet is guessed from the row of the position above it, with its own noise. (Speculative Jacobi decoding,
arXiv:2410.01699; with the same noise in every forward, arXiv:2510.24211.)

A small model may refresh the guesses between two forwards, see `refresh`.

A position's noise never changes. So the tokens are the tokens that `decode` draws with the same seed, whatever the
window. (By rejection, see `coupling`, the tokens are others.)

Each step is five calls, as in `speculative`: draft, target_forward, verify, commit, update.
"""
import time
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import DrawTokensResult, guided_probs, tree_links

from ..models.interface import (
    DraftModel,
    Nodes,
    TargetModel,
    chain_ancestors,
    id_range,
    inference,
    num_tokens,
    rows_and_columns,
)
from .baseline import decode
from .batch_state import BatchState
from .coupling import Coupled, Coupling
from .decoded import (
    Decoded,
    Finished,
    Observer,
    Progress,
    Step,
    decoded_log_probs,
    keep_log_probs,
    new_log_probs,
)
from .driver import RunningBatch, decode_batch, read_known
from .facts import check_causal, facts_of
from .graphs import Captured, GraphKey, can_replay, is_replayed, round_up
from .method_parts import USUAL_WINDOW
from .methods import METHODS, Method
from .refresh import Refresh
from .requests import Requests, check_batch, check_draft_model, checked_requests
from .sampling import Sampling, take_nodes
from .window import TAU, timed_window


@inference
def jacobi_decode(target: TargetModel, condition: Tensor, padding_mask: Tensor, sampling: Sampling,
                  methods: str | Method | list[str | Method], neighbors: Tensor | None = None,
                  progress: Progress | None = None, observe: Observer | None = None, *,
                  draft_model: DraftModel | None = None, known_tokens: Tensor | None = None,
                  batch: int | None = None, finished: Finished | None = None) -> Decoded:
    """Read the newest token and the guesses after it in one target forward, and draw all of them anew; until every
    image is finished.

    If the target puts a NaN into its cache, the image ends there. If it does so at a wrong guess, the image may end or
    go on. Arguments that are not listed here are those of `speculative_decode`.

    Args:
        methods:     one for all requests, or one for each, all of one `Method.family`; or their names. `vanilla` has a
            window of no guesses
        neighbors:   needed where k > 0, except by rank
        draft_model: needed where methods refresh their guesses, and not used elsewhere. It must read tokens alone, as a
            `SmallDraftModel`: it gets no hidden states

    Raises:
        ValueError: an argument differs from the above, or the target's logits at a token depend on later tokens
    """
    requests = checked_requests(target, condition, padding_mask, sampling, methods, known_tokens, (
        "jacobi", "none"), "Jacobi decoding or vanilla (speculative_decode takes methods with a draft model)")
    methods, base, total = requests.methods, requests.methods[0], len(requests)
    check_causal(target)
    if not base.drafts.refresh:
        draft_model = None
    elif draft_model is None or getattr(draft_model, "reads_hidden", True):
        raise ValueError("draft_model must be one whose reads_hidden is False, as a SmallDraftModel, for "
                         f"{base.label}, got {draft_model and type(draft_model).__name__}")
    else:
        check_draft_model(target, draft_model, condition)
    batch = check_batch(batch, methods, observe, target, draft_model)
    auto = USUAL_WINDOW
    if base.seed_exact and any(m.drafts.window == "auto" for m in methods):
        auto = auto_window(target, requests[list(range(batch))])
        is_plain = auto == 0 and all(m.drafts.window == "auto" for m in methods)
        if is_plain and batch == total and observe is None and finished is None:
            return decode(target, condition, padding_mask, sampling, progress, known_tokens=known_tokens)
    any_greedy = bool(sampling.greedy.any())

    def begin(numbers: list[int]) -> JacobiState:
        these, coupling, refresh = requests[numbers], None, None
        if base.drafting == "jacobi" and not base.seed_exact:
            coupling = Coupling(these.methods, these.sampling, neighbors, target, any_greedy)
        settings = JacobiSettings(target, these, auto)
        if draft_model and settings.max_window:
            own_draft_model = draft_model if len(numbers) == total else draft_model.select(numbers)
            refresh = Refresh(own_draft_model, base.drafts.refresh, settings.num_tokens, settings.max_window)
        state = JacobiState(settings, these.num_known, coupling, refresh)
        prefill(state, settings, these.condition, these.known_tokens)
        return state

    return decode_batch(begin, run_step, requests.num_known, batch, progress, observe, finished)


class JacobiSettings(BatchState):
    """What a step does not change, of B requests."""

    ROWS, PAIRS, PARTS = ("windows", "is_own", "ancestors"), ("padding_mask",), ("sampling",)

    def __init__(self, target: TargetModel, requests: Requests, auto: int):
        """auto: the window of methods whose own is that word"""
        methods, self.padding_mask, self.sampling = requests.methods, requests.padding_mask, requests.sampling
        B, L, S, device = len(methods), num_tokens(target), target.prefix_len, self.padding_mask.device
        self.target, self.num_tokens, self.prefix_len = target, L, S
        self.columns = rows_and_columns(target.grid)[1]  # how far the token below is
        # how many guesses a step reads of each image: of more than it has tokens, the first
        self.host_windows = [min(auto if m.drafts.window == "auto" else m.drafts.window, L) for m in methods]
        self.windows, self.max_window = torch.tensor(self.host_windows, device=device), max(self.host_windows)
        W = self.max_window
        self.from_last = methods[0].drafts.guess == "last"
        # how many positions after a draw a guess is drawn with it
        self.ahead = self.columns if methods[0].seed_exact and W and not self.from_last else 0
        self.index = torch.arange(-1, max(self.columns, W + 1) + 1, device=device)  # from the newest token's position
        # (B, 1 + W) which nodes of the widest window are in each request's own; None: all
        is_own = torch.arange(1 + W, device=device) <= self.windows[:, None]
        self.is_own = is_own if len(set(self.host_windows)) > 1 else None
        self.ancestors, self.depths = chain_ancestors(B, 1 + W, device), torch.arange(1 + W, device=device)[None]

    def own(self, positions: Tensor, other: int) -> Tensor:
        """Positions (B, N) of a step's nodes; `other` for nodes outside a request's own window."""
        return positions if self.is_own is None else torch.where(self.is_own[:, :positions.shape[1]], positions, other)

    def select(self, rows: list[int], batch: int) -> "JacobiSettings":
        other = super().select(rows, batch)
        other.host_windows = [self.host_windows[row] for row in rows]
        return other


class JacobiState(RunningBatch):
    """The images and their guesses.

    `tokens` holds the image so far and, after it, the newest guess of every position. Tokens beyond an image's length
    mean nothing. The last column is a scratch column for draws outside a request's window and for finished requests.
    """

    ROWS = (*RunningBatch.ROWS, "status", "is_step")
    PARTS, CACHES = ("settings", "coupling", "refresh"), ("cache",)

    def __init__(self, settings: JacobiSettings, num_known: list[int], coupling: Coupling | None = None,
                 refresh: Refresh | None = None):
        B, L, device = len(num_known), settings.num_tokens, settings.padding_mask.device
        super().__init__(settings, num_known, settings.prefix_len + L + settings.max_window)
        width = L + 2 * max(settings.columns, settings.max_window + 1) + 2
        self.tokens = torch.zeros(B, width, dtype=torch.int64, device=device)
        self.status = torch.zeros(B, width, dtype=torch.int32, device=device)  # of the rows that they were drawn from
        self.log_probs = new_log_probs(settings.sampling, width)
        self.counts = self.num_known.clone()  # (B,) tokens that are final; L: the image is finished, or it failed
        self.coupling = coupling  # None: seed-exact
        self.refresh = refresh    # None: guesses are the target's own
        self.is_step = torch.zeros(B, L + 1, dtype=torch.bool, device=device)  # where steps began; scratch as above

    @property
    def can_select(self) -> bool:
        caches = [self.cache] + ([self.refresh.cache] if self.refresh else [])
        return self.coupling is None and all(hasattr(cache, "select") for cache in caches)

    @property
    def can_replay(self) -> bool:
        return super().can_replay and (self.refresh is None or can_replay(self.refresh.draft_model))

    def select(self, rows: list[int], batch: int) -> "JacobiState":
        other = super().select(rows, batch)
        other.host_counts = [self.host_counts[row] for row in rows]
        return other

    def look(self) -> None:
        """Read how far the images are: the loop's one host read."""
        self.host_counts, self.num_steps = self.counts.tolist(), 0

    def advance(self, num_accepted: Tensor, status: Tensor) -> None:
        """Each image that is not finished gains num_accepted (B,) guesses and one more token.

        status: (B, N) of the rows that the next tokens were drawn from; an image ends with the first that is not 0
        """
        L = self.settings.num_tokens
        last = status.gather(1, num_accepted.clamp(min=0)[:, None])[:, 0]
        self.counts.add_(num_accepted).add_(1).add_(last, alpha=L).clamp_(max=L)

    def next_graph_key(self) -> GraphKey:
        """The key of the next step, after num_steps steps since the last look. Its depth is the widest window.

        Towards the end of all images the nodes become fewer, by eights, so that few keys occur: not where each key
        has to be captured.
        """
        L = self.settings.num_tokens
        active = [(count, window) for count, window in zip(self.host_counts, self.settings.host_windows) if count < L]
        num_missing = L - 1 - min(self.host_counts)
        max_depth = max((window for _, window in active), default=0)
        if not is_replayed(self):
            max_depth = min(max_depth, -(-num_missing // 8) * 8)
        count = max((count for count, _ in active), default=L)
        return GraphKey(min(round_up(count + self.num_steps * (self.settings.max_window + 1), self), L), max_depth)

    def observed(self, step: "ChainStep", requests: list[int], num_requests: int) -> Step:
        """The step of the whole batch. Images that have left the running batch are finished."""
        L, P, device = self.settings.num_tokens, self.settings.max_window, step.counts.device
        num_missing = L - 1 - step.counts
        counts, windows, num_accepted = of_all = torch.tensor([L, 0, -1], device=device)[:, None].repeat(
            1, num_requests)
        of_all[:, requests] = torch.stack([step.counts, self.settings.windows, torch.where(
            num_missing < 0, -1, step.num_accepted.minimum(num_missing))])
        depth = windows.minimum(L - 1 - counts).clamp(min=0)
        node = torch.arange(P + 1, device=device)
        links = tree_links(torch.where(node <= depth[:, None], node - 1, -2).int())
        accepted_nodes = torch.where(node[1:] <= num_accepted[:, None], node[1:], -1).int()
        return Step(links, counts.clamp(max=L - 1), accepted_nodes, num_accepted.clamp(min=0).int(), num_accepted >= 0)

    def decoded(self) -> Decoded:
        L, settings, is_step = self.settings.num_tokens, self.settings, self.is_step[:, :-1]
        index = torch.arange(L, device=is_step.device)
        is_after_failure = (self.status[:, :L] * (index >= self.num_known[:, None])).cumsum(1) > 0
        end = (L - is_after_failure.sum(1) + 1).clamp(max=L)[:, None]
        # a step has accepted the tokens between its first token and the next step's
        following = F.pad(torch.where(is_step, index, end), (0, 1))[:, 1:]
        following[:, -1:] = end
        following = following.flip(1).cummin(1).values.flip(1)
        num_accepted = torch.where(is_step, following - index - 1, -1)
        num_drafted = torch.where(is_step, settings.windows[:, None].minimum(L - 1 - index), 0)
        return Decoded(self.tokens[:, :L].masked_fill(is_after_failure, 0), *(account.cpu() for account in (
            self.num_known, 1 + is_step.sum(1), num_accepted, num_drafted, self.tv_excess,
            is_after_failure[:, -1])), decoded_log_probs(self.log_probs, self.num_known, is_after_failure))


def prefill(state: JacobiState, settings: JacobiSettings, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (R, S, dim) and the known tokens, draw the next token, and make the first guesses.

    A position's first guess is from the row above it, as far as there is one, and else from the newest row.
    """
    sampling, columns, device = settings.sampling, settings.columns, condition.device
    hidden = read_known(settings.target, condition, settings.padding_mask, known_tokens, state.tokens, state.cache)
    hidden = hidden[:, settings.prefix_len - 1:]  # of the entry before each token, also before the next one
    num_above, num_after = min(hidden.shape[1], columns) - 1, settings.max_window if settings.from_last else columns - 1
    newest = state.num_known[:, None]
    positions = (newest + torch.arange(-num_above, num_after + 1, device=device)).clamp(min=0)
    hidden = take_nodes(hidden, positions.minimum(newest))
    logits, ids = settings.target.logits(hidden), id_range(settings.target, positions)
    drawn = sampling.draw(logits, positions, ids, ahead=settings.ahead)
    row = torch.arange(len(positions), device=device)[:, None]
    state.tokens[row, positions[:, num_above:]] = drawn.tokens[:, num_above:]
    state.status[row, newest] = drawn.status[:, num_above:num_above + 1]
    keep_log_probs(state, positions, sampling, logits, drawn.tokens, ids)
    if settings.ahead:
        state.tokens[row, positions + settings.ahead] = drawn.ahead_tokens
    if state.coupling:
        kept = positions[:, :num_above + 1]
        logits = settings.target.logits(hidden[:, :num_above + 1])
        rows = state.coupling.exact(*guided_probs(**sampling.rows(logits), id_range=id_range(settings.target, kept)))
        state.coupling.keep_rows(kept, rows)
        guess_new(state, settings, hidden, state.counts, state.counts, settings.max_window)
    state.advance(torch.zeros_like(state.counts), drawn.status[:, num_above:])
    if state.refresh:
        state.refresh.prefill(state, 0 if known_tokens is None else known_tokens.shape[1])
    state.look()


class ChainStep(NamedTuple):
    """What a step did."""
    counts: Tensor        # (B,) int64  tokens of each image before
    num_accepted: Tensor  # (B,) int64  how many guesses are right, perhaps more than an image needs


def run_step(state: JacobiState) -> ChainStep:
    """One step of all images that are not finished."""
    settings = state.settings
    chain = draft(state, settings)
    hidden, logits = target_forward(state, settings, chain)
    verified = verify(state, settings, chain, logits)
    commit(state, settings, chain, verified)
    return ChainStep(chain.counts, update(state, settings, chain, hidden, logits, verified))


class Chain(NamedTuple):
    """What a step reads: the newest token of every image and the guesses after it, N nodes."""
    tokens: Tensor     # (B, N) int64
    guesses: Tensor    # (B, N) int64  of the token after each
    positions: Tensor  # (B, N) int64  of the token after each
    counts: Tensor     # (B,) int64    tokens of each image before the step
    windows: Tensor    # (B,) int64    how many guesses of each are read


def draft(state: JacobiState, settings: JacobiSettings) -> Chain:
    """As many guesses as the widest window takes."""
    N, windows = 1 + state.graph_key.max_depth, settings.windows
    positions = state.counts[:, None] + settings.index[:N + 1]
    tokens = state.tokens.gather(1, positions)
    return Chain(tokens[:, :-1], tokens[:, 1:], positions[:, 1:], positions[:, 1],
                 windows if N > settings.max_window else windows.clamp(max=N - 1))


def target_forward(state: JacobiState, settings: JacobiSettings, chain: Chain) -> tuple[Tensor, Tensor]:
    """Read all nodes of the chains at once: hidden states (R, N, H), logits (R, N, V). A guess that is kept is in its
    column of the cache already."""
    N, S = chain.tokens.shape[1], settings.prefix_len
    columns = min(S - 1 + state.graph_key.max_count + N, state.num_columns)
    nodes = Nodes(settings.depths[:, :N], chain.counts + (S - 1), settings.ancestors[:, :N], settings.padding_mask,
                  columns)
    hidden = settings.target.extend(nodes.of_rows(chain.tokens), nodes, state.cache)
    return hidden, settings.target.logits(hidden)


def verify(state: JacobiState, settings: JacobiSettings, chain: Chain, logits: Tensor) -> DrawTokensResult | Coupled:
    """Draw the token after each node, and count the leading guesses that are right.

    Seed-exact: guesses that equal their draws are right; the token below each is drawn, too. The token after the last
    node is compared with a guess that no node has read. Otherwise: guesses that rejection keeps are right.
    """
    sampling, ids = settings.sampling, id_range(settings.target, chain.positions)
    if state.coupling:
        budget = chain.windows.minimum((settings.num_tokens - 1) - chain.counts)
        probs, status = guided_probs(**sampling.rows(logits), id_range=ids)
        return state.coupling.couple(probs, status, chain.guesses, chain.counts[:, None], budget[:, None])
    return sampling.draw(logits, chain.positions, ids, chain.guesses, settings.ahead)


def commit(state: JacobiState, settings: JacobiSettings, chain: Chain, verified: DrawTokensResult | Coupled) -> None:
    """The draws are the newest tokens and guesses. Where a window reaches the row below, its own draws
    replace the guesses made one row earlier.

    A request guesses nothing after its own window.
    """
    scratch = state.tokens.shape[1] - 1
    positions = settings.own(chain.positions, scratch)
    if state.coupling:
        state.coupling.keep_rows(settings.own(chain.positions, -1), verified.probs)
    if settings.ahead:
        state.tokens.scatter_(1, settings.own(chain.positions + settings.ahead, scratch), verified.ahead_tokens)
    state.tokens.scatter_(1, positions, verified.tokens)
    state.status.scatter_(1, positions, verified.status)


def update(state: JacobiState, settings: JacobiSettings, chain: Chain, hidden: Tensor, logits: Tensor,
           verified: DrawTokensResult | Coupled) -> Tensor:
    """Account for the step, and guess what enters the windows. Returns how many guesses are right (B,)."""
    num_accepted = verified.num_accepted.minimum(chain.windows)
    state.is_step.scatter_(1, chain.positions[:, :1], True)
    if state.log_probs is not None:
        index = settings.depths[:, :logits.shape[1]]
        keep_log_probs(state, settings.own(chain.positions, state.tokens.shape[1] - 1), settings.sampling, logits,
                       verified.tokens, id_range(settings.target, chain.positions),
                       torch.where(index <= verified.num_accepted[:, None], index, -1))
    if state.coupling:
        state.tv_excess += verified.tv_excess
    state.advance(num_accepted, verified.status)
    if state.coupling or settings.from_last:
        guess_new(state, settings, hidden, chain.counts, chain.counts + chain.windows, hidden.shape[1])
    if state.refresh:
        state.refresh.redraw(state, chain.counts, num_accepted, chain.windows, state.graph_key.max_count, logits)
    return num_accepted


def guess_new(state: JacobiState, settings: JacobiSettings, hidden: Tensor, counts: Tensor, last: Tensor,
              n: int) -> None:
    """Guess the n positions after `last` (B,). Some of them enter the windows after a step from `counts` (B,) on.

    hidden (R, N, H): the hidden states of the step's nodes.
    """
    if state.coupling:
        positions, tokens = state.coupling.first_guesses(counts[:, None], last[:, None], n)
    else:
        logits = settings.target.logits(take_nodes(hidden, (last - counts)[:, None])).expand(-1, n, -1)
        positions = (last + 1)[:, None] + settings.index[1:n + 1]
        tokens = settings.sampling.draw(logits, positions, id_range(settings.target, positions)).tokens
    state.tokens.scatter_(1, positions, tokens)


def auto_window(target: TargetModel, requests: Requests) -> int:
    """The window of "auto" for a batch of that size. It is chosen once for a target, batch, dtype and device."""
    condition, L = requests.condition, num_tokens(target)
    facts, key = facts_of(target), ("window", len(requests), condition.dtype, condition.device)
    if key not in facts:
        facts[key] = timed_window(step_timer(target, requests), L) if L > 1 else 0
    return facts[key]


def step_timer(target: TargetModel, requests: Requests) -> Callable[[int], float]:
    """A function of a window that gives the seconds of a step with it, in the middle of the images."""
    settings = JacobiSettings(target, replace(requests, methods=[METHODS["jacobi"]] * len(requests)), max(TAU))
    state = JacobiState(settings, [settings.num_tokens // 2] * len(requests))
    target.prefill(requests.condition, settings.padding_mask, state.cache)
    run = Captured(read_again)

    def seconds_of(window: int) -> float:
        state.num_steps, settings.host_windows = 0, [window] * len(requests)
        settings.windows.fill_(window)
        start = time.perf_counter()
        run(state).status.tolist()  # waits for the device
        return time.perf_counter() - start

    return seconds_of


def read_again(state: JacobiState) -> DrawTokensResult:
    """A step without its update, so that the images do not change."""
    settings = state.settings
    chain = draft(state, settings)
    verified = verify(state, settings, chain, target_forward(state, settings, chain)[1])
    commit(state, settings, chain, verified)
    return verified
