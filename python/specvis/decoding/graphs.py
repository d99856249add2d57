"""How a step becomes a CUDA graph.

On a CUDA device a step is captured once for each graph key, and replayed. The loops keep all that changes in the same
memory, and a step reads nothing back to the host. So the kernels of a step, launched again on the same memory, are the
next step. A CUDA graph launches them all at once, without Python in between.
"""
from collections.abc import Callable
from typing import NamedTuple

from specvis_kernels.compat._replay import GRAPHS

BUCKET = 64         # columns, rounded up, of a step that Python runs: few shapes
WIDE_BUCKET = 1024  # of a replayed step: few graphs, each of which costs as much as some fifty steps


class GraphKey(NamedTuple):
    """All numbers that a step takes from the host. Steps with equal keys have equal shapes, and share a CUDA graph."""

    max_count: int      # no active image has more tokens; rounded up, so that many steps have one key
    max_depth: int      # no tree is deeper
    max_width: int = 1  # no node has more children


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
    """Runs `run_step(state)`. Where there are GRAPHS, the third step of a graph key and all later ones are
    replayed, if the state's models `can_replay`. Elsewhere each step is run as it is.

    The first two steps of a key warm up what a graph must not hold: modules that are loaded late, tables that a model
    makes at its first use, and Triton's compiler. The next replay overwrites the result of a replayed step.
    """

    def __init__(self, run_step: Callable):
        self.run_step, self.state = run_step, None

    def __call__(self, state):
        if state is not self.state:  # the state was reallocated: the graphs are stale
            device = state.tokens.device
            self.state, self.graphs = state, GRAPHS[device.type](device) if is_replayed(state) else None
            self.num_runs, self.captured = {}, {}
        state.graph_key = state.next_graph_key()
        result = self.run(state)
        state.num_steps += 1
        return result

    def run(self, state):
        if not self.graphs:
            return self.run_step(state)
        key = state.graph_key
        self.num_runs[key] = num_runs = self.num_runs.get(key, 0) + 1
        if num_runs <= 2:
            return self.graphs.warm_up(lambda: self.run_step(state))
        if key not in self.captured:
            self.captured[key] = self.graphs.capture(lambda: self.run_step(state))
        replay, result = self.captured[key]
        replay()
        return result
