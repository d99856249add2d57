"""Wrappers of models and ops for benchmarks.decode: clocks for parts of a step, and scripts that impose acceptance."""
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from itertools import cycle
from time import perf_counter

import torch
from torch import Tensor

import specvis_kernels
from specvis.models.llamagen import GPT

CALLS = ("prefill", "extend", "logits")  # of a model that are timed
SURE = 1e4  # a logit that no other comes near to


class Clock:
    """The time, which does not count while `stopped`. On a GPU it waits for the kernels that were launched."""

    def __init__(self, device: torch.device):
        self.is_cuda, self.lost = device.type == "cuda", 0.0

    def now(self) -> float:
        if self.is_cuda:
            torch.cuda.synchronize()
        return perf_counter() - self.lost

    @contextmanager
    def stopped(self):
        begin = self.now()
        yield
        self.lost += self.now() - begin


class Watch:
    """Seconds by part. Calls inside a part belong to it: an op that a model calls counts for the model.

    `target` is the model that it times. It is one object in all runs, because decoding caches facts about a target.
    """

    def __init__(self, clock: Clock, target: GPT):
        self.clock, self.seconds, self.is_inside = clock, Counter(), False
        self.target = Timed(target, "target", self)

    def timed(self, part: str, call: Callable) -> Callable:
        def timed_call(*args, **kwargs):
            if self.is_inside:
                return call(*args, **kwargs)
            self.is_inside, begin = True, self.clock.now()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds[part] += self.clock.now() - begin
                self.is_inside = False
        return timed_call


class Timed:
    """A model whose calls a watch times. Everything else is passed on."""

    can_replay = False  # a replayed graph calls no Python

    def __init__(self, model, part: str, watch: Watch):
        self.model = model
        for name in CALLS:
            setattr(self, name, watch.timed(part, getattr(model, name)))

    def __getattr__(self, name):
        return getattr(self.model, name)


@contextmanager
def ops_replaced(replacement: Callable[[str, Callable], Callable]):
    """Every call of torch.ops.specvis_kernels.<name>.default goes to replacement(name, the op)."""
    calls = {op: op._op for op in (getattr(torch.ops.specvis_kernels, name).default for name in specvis_kernels.ops())}
    for op, call in calls.items():
        op._op = replacement(op._schema.name.partition("::")[2], call)
    try:
        yield
    finally:
        for op, call in calls.items():
            op._op = call


class Script:
    """Makes each step accept as many drafts as a recorded step did, by changing the target's outputs.

    num_accepted: for each request of the batch, by its seed, the numbers of its steps; they repeat after the last
    """

    def __init__(self, num_accepted: dict[int, list[int]], clock: Clock):
        self.steps, self.clock = {seed: cycle(steps) for seed, steps in num_accepted.items()}, clock

    def around(self, name: str, call: Callable) -> Callable:
        """`call`, with its arguments changed first if it is an op that verifies."""
        names = [argument.name for argument in getattr(torch.ops.specvis_kernels, name).default._schema.arguments]

        def scripted(*args, **kwargs):
            with self.clock.stopped():
                given = dict(zip(names, args)) | kwargs
                seeds = given.get("seeds")  # an op without them is given the whole batch
                seeds = list(self.steps) if seeds is None else seeds.tolist()
                if name == "draw_tokens" and given["guesses"] is not None:
                    guesses = given["guesses"].tolist()
                    parents = [list(range(-1, len(row))) for row in guesses]  # node i + 1 is the guess after node i
                    self.change([given["logits"], given["uncond"]], [[-1, *row] for row in guesses], parents, seeds)
                elif name == "verify_logits":
                    parents = parents_of(given["first_child"], given["next_sibling"])
                    self.change([given["logits"], given["uncond"]], given["tokens"].tolist(), parents, seeds,
                                given["neighbors"])
            return call(*args, **kwargs)
        return scripted if name in ("draw_tokens", "verify_logits") else call

    def released(self, neighbors: Tensor | None) -> Callable:
        """The change for the released loop."""
        def script(logits, tokens, parents):
            with self.clock.stopped():
                self.change([logits], tokens.tolist(), parents, list(self.steps), neighbors)
        return script

    def paths(self, parents: list[list[int]], seeds: list[int]):
        """For each request: the accepted nodes with the root in front, and the children of the last of them."""
        for b, (request_parents, seed) in enumerate(zip(parents, seeds)):
            children, heights = [[] for _ in request_parents], [0] * len(request_parents)
            for node in range(len(request_parents) - 1, 0, -1):
                if request_parents[node] >= 0:
                    children[request_parents[node]].insert(0, node)
                    heights[request_parents[node]] = max(heights[request_parents[node]], heights[node] + 1)
            path, num_left = [0], next(self.steps[seed])
            while num_left and children[path[-1]]:
                num_left -= 1
                best = max(children[path[-1]], key=lambda node: min(heights[node], num_left))  # the first of equal ones
                path.append(best)
            yield b, path, children[path[-1]]

    def change(self, rows: list[Tensor | None], tokens: list[list[int]], parents: list[list[int]], seeds: list[int],
               neighbors: Tensor | None = None) -> None:
        """Change logits in place, each (B, N, V): both rows of a guided pair."""
        for b, path, rejected in self.paths(parents, seeds):
            hopeless = [tokens[b][node] for node in rejected]
            if neighbors is not None and hopeless:  # these would lend
                hopeless += neighbors[hopeless].flatten().tolist()
            for row in [row for row in rows if row is not None]:
                for node, child in zip(path, path[1:]):
                    row[b, node, tokens[b][child]] = SURE
                if hopeless and path[-1] < row.shape[1]:
                    row[b, path[-1], hopeless] = -SURE


def parents_of(first_child: Tensor, next_sibling: Tensor) -> list[list[int]]:
    """The parent of every node of each tree; -1 of the root, -2 of nodes that no link leads to."""
    result = []
    for first, following in zip(first_child.tolist(), next_sibling.tolist()):
        parents = [-1] + [-2] * (len(first) - 1)
        for node, child in enumerate(first):
            while child > 0:
                parents[child], child = node, following[child]
        result.append(parents)
    return result
