"""A step of decoding as one program: on a CUDA device it is captured once for each shape, and replayed.

The loops keep all that changes in the same memory, and a step reads nothing back. So the kernels of a step, launched
again on the same memory, are the next step. A CUDA graph launches them all at once, without Python in between.
"""
from collections.abc import Callable

import torch


class Captured:
    """Runs `run_step(state, settings)`. On a CUDA device every third step of a shape and all later ones are replayed.

    The first two steps of a shape are run as they are. They warm up what a graph must not hold: modules that are loaded
    late, tables that a model makes at its first use, and Triton's compiler.
    """

    def __init__(self, run_step: Callable, new_graph: Callable | None = None):
        """new_graph: () -> something with `capture(function)`, which returns the function's result, and `replay()`"""
        self.run_step, self.new_graph, self.state = run_step, new_graph, None

    def __call__(self, state, settings):
        if state is not self.state:  # other memory: what was captured is of no use any more
            self.state, self.num_runs, self.graphs = state, {}, {}
        result = self.run(state, settings)
        state.num_steps += 1
        return result

    def run(self, state, settings):
        new_graph = self.new_graph or (CUDAGraph if state.tokens.is_cuda else None)
        self.num_runs[state.shape] = num_runs = self.num_runs.get(state.shape, 0) + 1
        if new_graph is None or num_runs <= 2:
            return self.run_step(state, settings)
        if state.shape not in self.graphs:
            graph = new_graph()
            self.graphs[state.shape] = graph, graph.capture(lambda: self.run_step(state, settings))
        graph, result = self.graphs[state.shape]
        graph.replay()
        return result


class CUDAGraph:
    """A CUDA graph of what a function launches. Capturing runs nothing."""

    def __init__(self):
        self.graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable):
        with torch.cuda.graph(self.graph):
            return function()

    def replay(self) -> None:
        self.graph.replay()
