"""The outer loop of decoding: which requests are in the running batch, and how a step becomes a CUDA graph.

Images finish at different times. When an image is finished, the scheduler gives its row to the next waiting request.
When no request waits, the scheduler compacts the batch.

On a CUDA device a step is captured once for each graph key, and replayed. The loops keep all that changes in the same
memory, and a step reads nothing back to the host. So the kernels of a step, launched again on the same memory, are the
next step. A CUDA graph launches them all at once, without Python in between.
"""
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from ..models.interface import ModelCache, Nodes, TargetModel
from ..models.layers import Cache
from .batch_state import BatchState
from .decoded import Decoded, Finished, LogProbs, Observer, Progress, Step
from .sampling import Sampling
from .trees import chain_ancestors

POLL = {"cpu": 1}  # how many steps the host runs between two looks at the device
USUAL_POLL = 4     # of other devices, where a look waits for all pending work
BUCKET = 64         # columns: models read their caches in multiples of this,
WIDE_BUCKET = 1024  # and where steps are replayed, of this: a graph costs as much as some fifty steps


class GraphKey(NamedTuple):
    """All numbers that a step takes from the host. Steps with equal keys have equal shapes, and share a CUDA graph."""

    max_count: int      # no active image has more tokens; rounded up, so that many steps have one key
    max_depth: int      # no tree is deeper
    max_width: int = 1  # no node has more children


class RunningBatch(BatchState):
    """The state of a loop: B images, how far they are, and what they cost.

    All tensors stay in the same memory. The host knows how far the images were at its last `look`. A step reads nothing
    back, and takes nothing from the host but its `graph_key`. A subclass has `tokens` and `counts`, and the methods
    `look`, `next_graph_key` and `decoded`.
    """

    ROWS: tuple[str, ...] = ("tokens", "counts", "num_known", "tv_excess", "tv_bound", "log_probs")
    can_select = False

    def __init__(self, settings, num_known: list[int], num_columns: int, has_bound: Tensor):
        """
        Args:
            settings:    what a step does not change; it has `target`, `sampling`, `padding_mask` and `num_tokens`
            num_known:   how many tokens of each image are known
            num_columns: of the target's cache
            has_bound:   (B,) bool  for which images `tv_bound` is known
        """
        device = settings.sampling.seeds.device
        self.settings, self.num_columns, self.poll = settings, num_columns, POLL.get(device.type, USUAL_POLL)
        self.cache = new_cache(settings.target, self.num_rows, num_columns)
        self.num_known = torch.tensor(num_known, device=device)
        self.tv_excess = torch.zeros(len(num_known), dtype=torch.float32, device=device)
        self.tv_bound = torch.where(has_bound, 0.0, torch.nan)
        self.host_counts, self.num_steps = list(num_known), 0

    @property
    def num_rows(self) -> int:
        return len(self.settings.padding_mask)

    @property
    def can_replay(self) -> bool:
        """May steps be captured and replayed? Every model that takes part must say so."""
        return can_replay(self.settings.target)

    def observed(self, step, requests: list[int], num_requests: int) -> Step:
        """What observers see of a step. It is a copy, because the next step may overwrite this one."""
        return tree_map(torch.clone, step)


def decode_batch(begin: Callable[[list[int]], RunningBatch], run_step: Callable, num_known: list[int], batch: int,
                 progress: Progress | None, observe: Observer | None, finished: Finished | None) -> Decoded:
    """Run steps until the image of every request is finished.

    Args:
        begin:     makes the state of these requests before their first step
        run_step:  (state, settings) -> what the step did, for `observed`
        num_known: how many tokens of each request are known before
        batch:     how many images are decoded at once
    """
    def started(requests: list[int]) -> RunningBatch:
        state = begin(requests)
        if progress:
            progress(sum(state.host_counts) - sum(num_known[i] for i in requests))
        return state

    scheduler, run = Scheduler(len(num_known), batch, finished), Captured(run_step)
    state = scheduler.schedule(started(scheduler.requests), started)
    while min(state.host_counts) < state.settings.num_tokens:
        step = run(state, state.settings)
        if observe:
            observe(state.observed(step, scheduler.requests, len(num_known)))
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

    def __init__(self, num_requests: int, batch: int, finished: Finished | None):
        """batch: how many requests are decoded at once"""
        self.requests, self.waiting = list(range(min(batch, num_requests))), deque(range(batch, num_requests))
        self.finished, self.parts, self.done = finished, [], set()  # done: requests whose images are in the parts

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
        if state.can_select and 0 < batch - len(idle) <= 0.75 * batch:
            active = [row for row in range(batch) if row not in idle]
            self.requests = [self.requests[row] for row in active]
            return state.select(active, batch)
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
    (B, K), device = known_tokens.shape, tokens.device
    tokens[:, :K] = known_tokens.clamp(min=0)
    nodes = Nodes(torch.arange(K, device=device)[None], torch.full((B,), S, device=device),
                  chain_ancestors(B, K, device), padding_mask, S + K)
    return torch.cat([hidden, target.extend(nodes.of_rows(tokens[:, :K]), nodes, cache)], 1)


def new_log_probs(sampling: Sampling, width: int) -> Tensor | None:
    """(B, width, 2) where `keep_log_probs` puts them; None if nobody wants them."""
    shape = len(sampling.seeds), width, 2
    return torch.zeros(shape, dtype=torch.float32, device=sampling.seeds.device) if sampling.log_probs else None


def keep_log_probs(state, positions: Tensor, sampling: Sampling, logits: Tensor, tokens: Tensor, ids: Tensor | None,
                   rows: Tensor | None = None) -> None:
    """Put the log-probabilities of tokens (B, K) at positions (B, K), if they are wanted; 0 for an invalid row.

    state: has `log_probs`; logits, ids, rows: see `Sampling.log_probs_of`
    """
    if state.log_probs is not None:
        new = sampling.log_probs_of(logits, tokens, ids, rows)
        values = torch.stack([new.sampled, new.full], -1).masked_fill((new.status != 0)[..., None], 0.0)
        state.log_probs.scatter_(1, positions[..., None].expand(-1, -1, 2), values)


def decoded_log_probs(log_probs: Tensor | None, num_known: Tensor, failed: Tensor) -> LogProbs | None:
    """What `keep_log_probs` has kept of the tokens of whole images. failed: (B, L) bool  where tokens mean nothing"""
    if log_probs is None:
        return None
    L = failed.shape[1]
    is_nothing = failed | (torch.arange(L, device=failed.device) < num_known[:, None])
    return LogProbs(*log_probs[:, :L].masked_fill(is_nothing[..., None], 0.0).unbind(-1))


def new_cache(target: TargetModel, rows: int, columns: int) -> ModelCache:
    """A target's cache for all that a loop will read.

    Raises:
        ValueError: it is a `Cache` of another size. The sizes of other classes are not known here
    """
    cache = target.new_cache(rows, columns)
    if isinstance(cache, Cache):
        cache.check(rows, columns, cache.data.dtype)
    return cache


def round_up(columns: int, state) -> int:
    """That many columns, or a few more, so that reads of almost as many columns have the same shapes."""
    bucket = WIDE_BUCKET if is_replayed(state) else BUCKET
    return -(-columns // bucket) * bucket


def is_replayed(state) -> bool:
    """Are the steps of this state captured and replayed?"""
    return state.can_replay and state.tokens.device.type in GRAPHS


def can_replay(model) -> bool:
    """Does a model, or a draft model, say that its part of a step may be run again without its Python?"""
    return getattr(model, "can_replay", False)


class Captured:
    """Runs `run_step(state, settings)`. Where there are GRAPHS, the third step of a graph key and all later ones are
    replayed, if the state's models `can_replay`. Elsewhere each step is run as it is.

    The first two steps of a key warm up what a graph must not hold: modules that are loaded late, tables that a model
    makes at its first use, and Triton's compiler. The next replay overwrites the result of a replayed step.
    """

    def __init__(self, run_step: Callable):
        self.run_step, self.state = run_step, None

    def __call__(self, state, settings):
        if state is not self.state:  # the state was reallocated: the graphs are stale
            device = state.tokens.device
            self.state, self.graphs = state, GRAPHS[device.type](device) if is_replayed(state) else None
            self.num_runs, self.captured = {}, {}
        state.graph_key = state.next_graph_key()
        result = self.run(state, settings)
        state.num_steps += 1
        return result

    def run(self, state, settings):
        if not self.graphs:
            return self.run_step(state, settings)
        key = state.graph_key
        self.num_runs[key] = num_runs = self.num_runs.get(key, 0) + 1
        if num_runs <= 2:
            return self.graphs.warm_up(lambda: self.run_step(state, settings))
        if key not in self.captured:
            self.captured[key] = self.graphs.capture(lambda: self.run_step(state, settings))
        replay, result = self.captured[key]
        replay()
        return result


class CUDAGraphs:
    """CUDA graphs of functions that take turns on the same memory.

    They share one pool of memory for tensors that live within a step. That is safe because they are launched one after
    another, and because the result of one is not needed any more when the next one is launched.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)  # on the tensors' device, whichever is the current one
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable):
        """Run a function on the stream on which it will be captured: libraries keep workspaces for each stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            result = function()
        current.wait_stream(self.stream)
        return result

    def capture(self, function: Callable) -> tuple[Callable, object]:
        """Capturing runs nothing. Returns what launches the function, and its result, which each launch overwrites.

        Raises:
            RuntimeError: the function does what cannot be captured. Nothing was run then, but CUDA may be unusable
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream if capturing fails. Other threads may go on allocating memory.
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # CUDA raises it for everything that a graph cannot hold
            raise RuntimeError("a step cannot be captured in a CUDA graph: a model that says can_replay must not read "
                               "values back to the host, nor copy any from it, within a step") from error
        return graph.replay, result


GRAPHS = {"cuda": CUDAGraphs}  # how steps are captured on a device
