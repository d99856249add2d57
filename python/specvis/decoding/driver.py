"""The outer loop of decoding: which requests are in the running batch.

Images finish at different times. When an image is finished, the scheduler gives its row to the next waiting request.
When no request waits, the scheduler compacts the batch.
"""
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..models.interface import ModelCache, Nodes, TargetModel
from ..models.layers import Cache
from .batch_state import BatchState
from .decoded import Decoded, Finished, Observer, Progress, Step
from .graphs import Captured, can_replay

POLL = {"cpu": 1}  # how many steps the host runs between two looks at the device
USUAL_POLL = 4     # of other devices, where a look waits for all pending work


class RunningBatch(BatchState):
    """The state of a loop: B images, how far they are, and what they cost.

    All tensors stay in the same memory. The host knows how far the images were at its last `look`. A step reads nothing
    back, and takes nothing from the host but its `graph_key`. A subclass has `tokens` and `counts`, and the methods
    `look`, `next_graph_key` and `decoded`.
    """

    ROWS: tuple[str, ...] = ("tokens", "counts", "num_known", "tv_excess", "log_probs")
    can_select = False

    def __init__(self, settings, num_known: list[int], num_columns: int):
        """settings: what a step does not change; it has `target`, `sampling`, `padding_mask` and `num_tokens`"""
        device = settings.sampling.seeds.device
        self.settings, self.num_columns, self.poll = settings, num_columns, POLL.get(device.type, USUAL_POLL)
        self.cache = new_cache(settings.target, self.num_rows, num_columns)
        self.num_known = torch.tensor(num_known, device=device)
        self.tv_excess = torch.zeros(len(num_known), dtype=torch.float32, device=device)
        self.host_counts, self.num_steps = list(num_known), 0

    @property
    def num_rows(self) -> int:
        return len(self.settings.padding_mask)

    @property
    def can_replay(self) -> bool:
        """May steps be captured and replayed? Every model that takes part must say so."""
        return can_replay(self.settings.target)

    def observed(self, step) -> Step:
        """What observers see of a step. It is a copy, because the next step may overwrite this one."""
        return tree_map(torch.clone, step)


def decode_batch(begin: Callable[[list[int]], RunningBatch], run_step: Callable, num_known: list[int], batch: int,
                 progress: Progress | None, observe: Observer | None, finished: Finished | None) -> Decoded:
    """Run steps until the image of every request is finished.

    Args:
        begin:     makes the state of these requests before their first step
        run_step:  (state) -> what the step did, for `observed`
        num_known: how many tokens of each request are known before
        batch:     how many images are decoded at once
    """
    def started(requests: list[int]) -> RunningBatch:
        state = begin(requests)
        if progress:
            progress(sum(state.host_counts) - sum(num_known[i] for i in requests))
        return state

    scheduler, run = Scheduler(len(num_known), batch, finished, compacts=observe is None), Captured(run_step)
    state = scheduler.schedule(started(scheduler.requests), started)
    while min(state.host_counts) < state.settings.num_tokens:
        step = run(state)
        if observe:
            observe(state.observed(step))
        if state.num_steps < state.poll:
            continue
        num_before = sum(state.host_counts)
        state.look()
        if progress:
            progress(sum(state.host_counts) - num_before)
        state = scheduler.schedule(state, started)
    return scheduler.decoded()


class Scheduler:
    """Which request is in which row of the running batch, which requests wait, and which images are finished."""

    def __init__(self, num_requests: int, batch: int, finished: Finished | None, compacts: bool):
        """batch: how many requests are decoded at once; compacts: may finished images leave the batch?"""
        self.requests, self.waiting = list(range(min(batch, num_requests))), deque(range(batch, num_requests))
        self.compacts, self.finished = compacts, finished
        self.parts, self.done = [], set()  # done: requests whose images are in the parts

    def schedule(self, state: RunningBatch, begin: Callable) -> RunningBatch:
        """Store the finished images, and give their rows to waiting requests, or compact the batch.

        It is called before the first step, too: an image may be known as a whole, or fail at once.
        """
        L, batch = state.settings.num_tokens, len(self.requests)
        while True:
            idle = [row for row, count in enumerate(state.host_counts) if count == L]
            self.store(state, [row for row in idle if self.requests[row] not in self.done])
            free = idle[:len(self.waiting)]
            if not free:
                break
            following = [self.waiting.popleft() for _ in free]
            state.insert(free, batch, begin(following))
            for row, request in zip(free, following):
                self.requests[row] = request
            state.look()  # the trees of the new requests may be deeper and wider than the trees before
        # Compacting copies the whole batch, so it waits until a quarter is finished.
        if self.compacts and state.can_select and 0 < batch - len(idle) <= 0.75 * batch:
            active = [row for row in range(batch) if row not in idle]
            self.requests = [self.requests[row] for row in active]
            state = state.select(active, batch)
            state.look()
        return state

    def store(self, state: RunningBatch, rows: list[int]) -> None:
        """Keep the finished images of these rows, and report them."""
        if not rows:
            return
        requests, images = [self.requests[row] for row in rows], state.decoded().select(rows)
        self.done.update(requests)
        self.parts.append((requests, images))
        if self.finished:
            self.finished(requests, images)

    def decoded(self) -> Decoded:
        """All images, in the order of the requests, once all are finished."""
        return Decoded.merged([images for _, images in self.parts], [i for requests, _ in self.parts for i in requests])


def read_known(target: TargetModel, condition: Tensor, padding_mask: Tensor, known_tokens: Tensor | None,
               tokens: Tensor, cache: ModelCache) -> Tensor:
    """Read the conditions and the known tokens, and copy these into `tokens`: the forward before anything is drawn.

    Args:
        condition:    (R, S, dim), padding_mask (R, S) bool
        known_tokens: (B, K) int64  the first tokens; where fewer are known, padding follows them. None: K is 0
    Returns:
        (R, S + K, H) hidden states
    """
    hidden, S = target.prefill(condition, padding_mask, cache), condition.shape[1]
    if known_tokens is None or known_tokens.shape[1] == 0:
        return hidden
    B, K = known_tokens.shape
    tokens[:, :K] = known_tokens.clamp(min=0)
    nodes = Nodes.chain(K, torch.full((B,), S, device=tokens.device), padding_mask, S + K)
    return torch.cat([hidden, target.extend(nodes.of_rows(tokens[:, :K]), nodes, cache)], 1)


def new_cache(target: TargetModel, rows: int, columns: int) -> ModelCache:
    """A target's cache for all that a loop will read. ValueError if it is a `Cache` of another size."""
    cache = target.new_cache(rows, columns)
    if isinstance(cache, Cache):
        cache.check(rows, columns, cache.data.dtype)
    return cache
