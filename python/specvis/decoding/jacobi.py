"""Jacobi decoding: the target guesses its own next tokens, and every forward improves the guesses.

A step reads the newest token and the guesses of the next positions in one forward, and draws all these positions anew,
each with its own noise (see `specvis_kernels.draw_tokens`). What was guessed right so far is final, and so is the first
draw after it: it followed the right tokens. The other draws are better guesses. A position that no forward has reached
yet is guessed from the row of the position above it, with its own noise. (Speculative Jacobi decoding,
arXiv:2410.01699; with the same noise in every forward, arXiv:2510.24211.) A small model may refresh the guesses between
two forwards, see `refresh`.

A position's noise never changes. So the tokens are the tokens that `decode` draws with the same seed, whatever the
window. (By rejection, see `coupling`, the tokens are others.) Each step is five calls, as in `speculative`.
"""
from typing import NamedTuple

import torch
from torch import Tensor

from specvis_kernels import DrawTokensResult, guided_probs, tree_links

from ..models.interface import DraftModel, Nodes, TargetModel, chain_ancestors, columns_and_tokens, id_range, inference
from .batch_state import BatchState
from .coupling import Coupled, Coupling, row_above
from .decoded import Decoded, Finished, Observer, Progress, Step, decoded_log_probs, keep_log_probs, new_log_probs
from .driver import RunningBatch, decode_batch, read_known
from .graphs import GraphKey, can_replay, is_replayed, round_up
from .methods import Method
from .refresh import Refresh
from .requests import Requests, check_batch, check_causal, check_draft_model, checked_requests
from .sampling import Sampling, take_nodes


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
    base, any_greedy = requests.methods[0], bool(sampling.greedy.any())
    check_causal(target)
    if not base.drafts.refresh:
        draft_model = None
    elif draft_model is None or getattr(draft_model, "reads_hidden", True):
        raise ValueError("draft_model must be one whose reads_hidden is False, as a SmallDraftModel, for "
                         f"{base.label}, got {draft_model and type(draft_model).__name__}")
    else:
        check_draft_model(target, draft_model, condition)
    batch = check_batch(batch, requests.methods, observe, target, draft_model)
    window = base.with_window(condition.device, batch).drafts.window

    def begin(numbers: list[int]) -> JacobiState:
        these = requests[numbers]
        settings, coupling, refresh = JacobiSettings(target, these, window), None, None
        if base.drafting == "jacobi" and not base.seed_exact:
            coupling = Coupling(these.methods, these.sampling, neighbors, target, settings.window, any_greedy)
        if draft_model:
            own_draft_model = draft_model if len(numbers) == len(requests) else draft_model.select(numbers)
            refresh = Refresh(own_draft_model, base.drafts.refresh, settings.num_tokens, settings.window)
        state = JacobiState(settings, these.num_known, coupling, refresh)
        prefill(state, these.condition, these.known_tokens)
        return state

    return decode_batch(begin, run_step, requests.num_known, batch, progress, observe, finished)


class JacobiSettings(BatchState):
    """What a step does not change, of B requests."""

    ROWS, PAIRS, PARTS = ("ancestors",), ("padding_mask",), ("sampling",)

    def __init__(self, target: TargetModel, requests: Requests, window: int):
        """window: how many guesses a step reads of each image; of more than it has tokens, the first"""
        self.padding_mask, self.sampling = requests.padding_mask, requests.sampling
        B, device, self.target, self.prefix_len = len(requests), self.padding_mask.device, target, target.prefix_len
        self.columns, self.num_tokens = columns_and_tokens(target)  # the token below is `columns` away
        self.window = min(window, self.num_tokens)
        # a row is drawn once more, with the noise of the position this far on: the guess for it
        self.ahead = self.columns if requests.methods[0].seed_exact else 0
        # positions from the newest token's on, as many as are ever guessed at once
        self.index = torch.arange(max(self.columns, self.window + 1) + 1, device=device)
        self.ancestors = chain_ancestors(B, 1 + self.window, device)


class JacobiState(RunningBatch):
    """The images and their guesses.

    `tokens` holds the image so far and, after it, the newest guess of every position. Tokens beyond an image's length
    mean nothing.
    """

    ROWS = (*RunningBatch.ROWS, "status", "num_accepted")
    PARTS, CACHES = ("settings", "coupling", "refresh"), ("cache",)

    def __init__(self, settings: JacobiSettings, num_known: list[int], coupling: Coupling | None = None,
                 refresh: Refresh | None = None):
        B, L, device = len(num_known), settings.num_tokens, settings.padding_mask.device
        super().__init__(settings, num_known, settings.prefix_len + L + settings.window)
        width = L + 2 * len(settings.index)
        self.tokens = torch.zeros(B, width, dtype=torch.int64, device=device)
        self.status = torch.zeros(B, width, dtype=torch.int32, device=device)  # of the rows that they were drawn from
        self.log_probs = new_log_probs(settings.sampling, width)
        self.counts = self.num_known.clone()  # (B,) tokens that are final; L: the image is finished, or it failed
        self.coupling = coupling  # None: seed-exact
        self.refresh = refresh    # None: guesses are the target's own
        # by the position of a step's first token; -1: no step began there. The last column is of finished images
        self.num_accepted = torch.full((B, L + 1), -1, dtype=torch.int64, device=device)

    @property
    def can_select(self) -> bool:
        caches = [self.cache] + ([self.refresh.cache] if self.refresh else [])
        return self.coupling is None and all(hasattr(cache, "select") for cache in caches)

    @property
    def can_replay(self) -> bool:
        return super().can_replay and (self.refresh is None or can_replay(self.refresh.draft_model))

    def look(self) -> None:
        """Read how far the images are: the loop's one host read."""
        self.host_counts, self.num_steps = self.counts.tolist(), 0

    def advance(self, num_accepted: Tensor, status: Tensor) -> None:
        """Each image that is not finished gains num_accepted (B,) guesses and one more token.

        status: (B, N) of the rows that the next tokens were drawn from; an image ends with the first that is not 0
        """
        L = self.settings.num_tokens
        last = status.gather(1, num_accepted[:, None])[:, 0]
        self.counts.add_(num_accepted).add_(1).add_(last, alpha=L).clamp_(max=L)

    def next_graph_key(self) -> GraphKey:
        """The key of the next step, after num_steps steps since the last look. Its depth is the window.

        Towards the end of all images the nodes become fewer, by eights, so that few keys occur: not where each key
        has to be captured.
        """
        L, window = self.settings.num_tokens, self.settings.window
        num_missing = max(1, L - 1 - min(self.host_counts))
        depth = window if is_replayed(self) else min(window, -(-num_missing // 8) * 8)
        count = max((count for count in self.host_counts if count < L), default=L)
        return GraphKey(min(round_up(count + self.num_steps * (window + 1), self), L), depth)

    def observed(self, step: "ChainStep") -> Step:
        """The step as one of trees, each of which is a chain."""
        L, position, node = self.settings.num_tokens, step.position[:, None], self.settings.index
        node = node[:self.settings.window + 1]
        links = tree_links(torch.where(node <= (L - 1 - position).clamp(min=0), node - 1, -2).int())
        accepted_nodes = torch.where(node[1:] <= step.num_accepted[:, None], node[1:], -1).int()
        return Step(links, step.position.clamp(max=L - 1), accepted_nodes, step.num_accepted.int(), step.position < L)

    def decoded(self) -> Decoded:
        L, num_accepted = self.settings.num_tokens, self.num_accepted[:, :-1]
        index, is_step = torch.arange(L, device=num_accepted.device), num_accepted >= 0
        failed = (self.status[:, :L] * (index >= self.num_known[:, None])).cumsum(1) > 0
        num_drafted = torch.where(is_step, (L - 1 - index).clamp(max=self.settings.window), 0)
        accounts = self.num_known, 1 + is_step.sum(1), num_accepted, num_drafted, self.tv_excess, failed[:, -1]
        return Decoded(self.tokens[:, :L].masked_fill(failed, 0), *(account.cpu() for account in accounts),
                       decoded_log_probs(self.log_probs, self.num_known, failed))


def prefill(state: JacobiState, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (R, S, dim) and the known tokens, draw the next token, and make the first guesses."""
    settings, newest = state.settings, state.num_known[:, None]
    hidden = read_known(settings.target, condition, settings.padding_mask, known_tokens, state.tokens, state.cache)
    hidden = hidden[:, settings.prefix_len - 1:]  # of the entry before each token, also before the next one
    draw_next(state, take_nodes(hidden, newest))
    if settings.window:
        guess_from(state, hidden)
    if state.refresh:
        state.refresh.prefill(state, 0 if known_tokens is None else known_tokens.shape[1])
    state.look()


def draw_next(state: JacobiState, hidden: Tensor) -> None:
    """Draw the next token of every image from hidden states (R, 1, H)."""
    sampling, target, position = state.settings.sampling, state.settings.target, state.num_known[:, None]
    logits, ids = target.logits(hidden), id_range(target, position)
    drawn = sampling.draw(logits, position, ids)
    state.tokens.scatter_(1, position, drawn.tokens)
    state.status.scatter_(1, position, drawn.status)
    keep_log_probs(state, position, sampling, logits, drawn.tokens, ids)
    state.advance(torch.zeros_like(state.counts), drawn.status)


def guess_from(state: JacobiState, hidden: Tensor) -> None:
    """Guess what follows the next token, from hidden states (R, 1 + K, H): at the entry before each known token and it.

    A position is guessed from the row above it, as far as there is one, and else from the newest row.
    """
    settings, newest = state.settings, state.num_known[:, None]
    target, sampling = settings.target, settings.sampling
    if state.coupling:
        above = (newest - settings.index[:settings.columns].flip(0)).clamp(min=0)
        logits = target.logits(take_nodes(hidden, above))
        probs = guided_probs(**sampling.rows(logits), id_range=id_range(target, above))
        state.coupling.rows.put(above, state.coupling.exact(*probs))
        positions, tokens = state.coupling.guess(newest[:, 0], newest, settings.window)
    else:
        positions = newest + settings.index[1:]
        logits = target.logits(take_nodes(hidden, row_above(positions, newest, settings.columns)))
        tokens = sampling.draw(logits, positions, id_range(target, positions)).tokens
    state.tokens.scatter_(1, positions, tokens)


class ChainStep(NamedTuple):
    """What a step did."""
    position: Tensor      # (B,) int64  of its first token; L: the image was finished before
    num_accepted: Tensor  # (B,) int64  how many of its tokens were guesses


def run_step(state: JacobiState) -> ChainStep:
    """One step of all images. Those that are finished are computed, too, so that shapes stay; what they write is after
    their last token, where nothing is read."""
    chain = draft(state)
    logits = target_forward(state, chain)
    verified = verify(state, chain, logits)
    commit(state, chain, verified)
    return update(state, chain, logits, verified)


class Chain(NamedTuple):
    """What a step reads: the newest token of every image and the guesses after it, N nodes."""
    tokens: Tensor     # (B, N) int64
    guesses: Tensor    # (B, N) int64  of the token after each
    positions: Tensor  # (B, N) int64  of the token after each


def draft(state: JacobiState) -> Chain:
    """As many guesses as the window takes."""
    positions = state.counts[:, None] - 1 + state.settings.index[:2 + state.graph_key.max_depth]
    tokens = state.tokens.gather(1, positions)
    return Chain(tokens[:, :-1], tokens[:, 1:], positions[:, 1:])


def target_forward(state: JacobiState, chain: Chain) -> Tensor:
    """Read all nodes of the chains at once: logits (R, N, V). A guess that is kept is in its column of the cache."""
    settings, N, S = state.settings, chain.tokens.shape[1], state.settings.prefix_len
    columns = min(S - 1 + state.graph_key.max_count + N, state.num_columns)
    nodes = Nodes(settings.index[None, :N], chain.positions[:, 0] + (S - 1), settings.ancestors[:, :N],
                  settings.padding_mask, columns)
    return settings.target.logits(settings.target.extend(nodes.of_rows(chain.tokens), nodes, state.cache))


def verify(state: JacobiState, chain: Chain, logits: Tensor) -> DrawTokensResult | Coupled:
    """Draw the token after each node, and count the leading guesses that are right.

    Seed-exact: guesses that equal their draws are right; the token below each is drawn, too. The token after the last
    node is compared with a guess that no node has read. Otherwise: guesses that rejection keeps are right.
    """
    settings, ids = state.settings, id_range(state.settings.target, chain.positions)
    if state.coupling:
        probs = guided_probs(**settings.sampling.rows(logits), id_range=ids)
        return state.coupling.couple(*probs, chain.guesses, chain.positions)
    return settings.sampling.draw(logits, chain.positions, ids, chain.guesses, settings.ahead)


def commit(state: JacobiState, chain: Chain, verified: DrawTokensResult | Coupled) -> None:
    """The draws are the newest tokens and guesses. Where a window reaches the row below, its own draws replace the
    guesses made one row earlier."""
    if state.coupling:
        state.coupling.rows.put(chain.positions, verified.probs)
    elif state.settings.ahead:
        state.tokens.scatter_(1, chain.positions + state.settings.ahead, verified.ahead_tokens)
    state.tokens.scatter_(1, chain.positions, verified.tokens)
    state.status.scatter_(1, chain.positions, verified.status)


def update(state: JacobiState, chain: Chain, logits: Tensor, verified: DrawTokensResult | Coupled) -> ChainStep:
    """Account for the step. By rejection, guess what enters the windows (seed-exact, `commit` has these guesses)."""
    settings, position, N = state.settings, chain.positions[:, 0], logits.shape[1]
    num_missing = (settings.num_tokens - 1) - position
    num_accepted = verified.num_accepted.minimum(num_missing).clamp(0, N - 1)  # within the image and the window
    state.num_accepted.scatter_(1, position[:, None], num_accepted[:, None])
    if state.log_probs is not None:
        index = settings.index[:N]
        keep_log_probs(state, chain.positions, settings.sampling, logits, verified.tokens,
                       id_range(settings.target, chain.positions),
                       torch.where(index <= num_accepted[:, None], index, -1))
    state.advance(num_accepted, verified.status)
    if state.coupling:
        state.tv_excess += verified.tv_excess
        positions, tokens = state.coupling.guess(position, chain.positions[:, -1:], N)
        state.tokens.scatter_(1, positions, tokens)
    if state.refresh:
        state.refresh.redraw(state, position, num_accepted, state.graph_key.max_count, logits)
    return ChainStep(position, num_accepted)
