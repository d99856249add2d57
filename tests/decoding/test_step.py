"""What a step of the loops costs beside the models: how many operations it asks the device for."""
import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specvis.decoding.discrete
import specvis.decoding.jacobi
from specvis.decoding.capture import Captured
from specvis.decoding.drafters import EagleDrafter
from specvis.decoding.sampling import Sampling
from specvis_kernels import backends
from tests.decoding.test_discrete import PROMPTS, tiny  # noqa: F401

MOST_OPERATIONS = 60


class Operations(TorchDispatchMode):
    """Counts what is dispatched, but for views and for what models do."""

    def __init__(self):
        super().__init__()
        self.counts, self.is_paused = Counter(), False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not self.is_paused and not is_view:
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


    def unseen(self, function):
        """The same function, in which nothing is counted."""
        def call(*args):
            was_paused, self.is_paused = self.is_paused, True
            result = function(*args)
            self.is_paused = was_paused
            return result
        return call


def operations_of_steps(pipeline, method, monkeypatch, batch=2):
    """What each step but the first asked for."""
    operations, steps = Operations(), []
    module = specvis.decoding.jacobi if method.startswith("jacobi") else specvis.decoding.discrete
    run_step = module.run_step

    def counted(state, settings):
        operations.counts = Counter()
        result = run_step(state, settings)
        steps.append(Counter(operations.counts))
        return result

    monkeypatch.setattr(module, "run_step", counted)
    for model, names in ((pipeline.gpt, ("extend", "prefill", "logits")), (EagleDrafter, ("extend", "prefill"))):
        for name in names:
            monkeypatch.setattr(model, name, operations.unseen(getattr(model, name)))
    with operations:
        pipeline.tokens(PROMPTS[:batch], method, Sampling.of(list(range(batch)), guidance=2.0))
    return steps[1:]


@pytest.mark.parametrize("method", ["jacobi:window=5", "lantern:k=8", "eagle1"])
def test_a_step_takes_few_operations(tiny, monkeypatch, method):  # noqa: F811
    steps = operations_of_steps(tiny, method, monkeypatch)
    for counts in steps:
        print(counts.total(), counts)
        own = [name.split("::")[1] for name in counts if name.startswith("specvis_kernels::")]
        assert all("cpu" in backends(name, "cpu") for name in own), own  # else an oracle's many operations count as one
        assert counts.total() <= MOST_OPERATIONS, counts


class Recorded(TorchDispatchMode):
    """A stand-in for a CUDA graph: the operations of a function, run again on the same memory, without its Python."""

    num_replays = 0

    def __init__(self):
        super().__init__()
        self.calls, self.is_new = [], True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def capture(self, function):
        with self:
            return function()

    def replay(self):
        if self.is_new:  # a CUDA graph runs nothing while it is captured, this has run once
            self.is_new = False
            return
        Recorded.num_replays += 1
        for func, args, kwargs, old in self.calls:
            for a, b in zip(tree_leaves(old), tree_leaves(func(*args, **kwargs))):
                if isinstance(a, torch.Tensor) and a.data_ptr() != b.data_ptr():
                    a.copy_(b)


@pytest.mark.parametrize("name", ["vanilla", "jacobi:window=5", "jacobi:window=3:guess=last",
                                  "jacobi:window=5:seed_exact=false", "eagle1", "eagle1:seed_exact=true", "eagle2",
                                  "lantern:k=8", "adt-tree", "cool-sd"])
@pytest.mark.parametrize("poll, batch", [(1, None), (3, 2)])
def test_a_step_that_is_run_again_is_the_next_step(tiny, monkeypatch, name, poll, batch):  # noqa: F811
    """Nothing that a step needs is in Python but its shapes."""
    def decoded(batch):
        sampling = Sampling.of(list(range(4)), guidance=2.0)
        return tiny.tokens(PROMPTS[:4], name, sampling, batch=batch)

    expected, Recorded.num_replays = decoded(None), 0
    for module in (specvis.decoding.discrete, specvis.decoding.jacobi):
        monkeypatch.setattr(module, "Captured", partial(Captured, new_graph=Recorded))
        monkeypatch.setitem(module.POLL, "cpu", poll)
    again = decoded(batch or 4)
    for field in dataclasses.fields(expected):
        a, b = (getattr(x, field.name) for x in (expected, again))
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)), field.name
    assert Recorded.num_replays > 2
