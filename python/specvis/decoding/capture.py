"""A step of decoding as one program: on a CUDA device it is captured once for each shape, and replayed.

The loops keep all that changes in the same memory, and a step reads nothing back. So the kernels of a step, launched
again on the same memory, are the next step. A CUDA graph launches them all at once, without Python in between.

No GPU has run this yet: the tests replay the operations of a step on the CPU.
"""
from collections.abc import Callable

import torch


def can_replay(model) -> bool:
    """Does a model, or a drafter, say that its part of a step may be run again without its Python?"""
    return getattr(model, "can_replay", False)


class Captured:
    """Runs `run_step(state, settings)`. Where there are GRAPHS, every third step of a shape and all later ones are
    replayed, if the state's models `can_replay`. Elsewhere each step is run as it is.

    The first two steps of a shape warm up what a graph must not hold: modules that are loaded late, tables that a
    model makes at its first use, and Triton's compiler. What a replayed step returns is overwritten by the next one.
    """

    def __init__(self, run_step: Callable):
        self.run_step, self.state = run_step, None

    def __call__(self, state, settings):
        if state is not self.state:  # other memory: what was captured is of no use any more
            make = GRAPHS.get(state.tokens.device.type) if state.can_replay else None
            self.state, self.graphs = state, make and make(state.tokens.device)
            self.num_runs, self.captured = {}, {}
        state.shape = state.next_shape()
        result = self.run(state, settings)
        state.num_steps += 1
        return result

    def run(self, state, settings):
        if not self.graphs:
            return self.run_step(state, settings)
        self.num_runs[state.shape] = num_runs = self.num_runs.get(state.shape, 0) + 1
        if num_runs <= 2:
            return self.graphs.warm_up(lambda: self.run_step(state, settings))
        if state.shape not in self.captured:
            self.captured[state.shape] = self.graphs.capture(lambda: self.run_step(state, settings))
        replay, result = self.captured[state.shape]
        replay()
        return result


class CUDAGraphs:
    """CUDA graphs of functions that take turns on the same memory.

    They share one pool of memory for what lives within a step. That is safe because they are launched one after
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
            RuntimeError: the function does what cannot be captured. Nothing was run then, but CUDA may be of no use
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context restores the stream if capturing fails. Other threads may go on allocating memory.
            with torch.cuda.stream(self.stream), torch.cuda.graph(graph, self.pool, self.stream, "thread_local"):
                result = function()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # what CUDA says of all that a graph cannot hold
            raise RuntimeError("a step cannot be captured in a CUDA graph: a model that says can_replay must not read "
                               "values back to the host, nor copy any from it, within a step") from error
        return graph.replay, result


GRAPHS = {"cuda": CUDAGraphs}  # how steps are captured on a device
