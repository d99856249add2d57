"""What a step of the loops costs beside the models: how many operations it asks the device for."""
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specvis.decoding.discrete
import specvis.decoding.jacobi
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
