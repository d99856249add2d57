"""What a step of the loops is to a device: few operations, of the same shapes in every step, on the same memory."""
import copy
import dataclasses
from collections import Counter

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import specvis.decoding.baseline
import specvis.decoding.jacobi
import specvis.decoding.speculative
import specvis.models.threads
from specvis.decoding.draft_model import EagleDraftModel
from specvis.decoding.driver import POLL
from specvis.decoding.graphs import GRAPHS
from specvis.decoding.jacobi import JacobiState
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import Sampling
from specvis.decoding.speculative import SpeculativeState
from specvis_kernels import backends
from tests.decoding.pictures import PROMPTS

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


def module_of(method):
    is_jacobi = parse_method(method).drafting in ("jacobi", "none")
    return specvis.decoding.jacobi if is_jacobi else specvis.decoding.speculative


def operations_of_steps(pipeline, method, monkeypatch, batch=2):
    """What each step but the first asked for."""
    operations, steps = Operations(), []
    module = module_of(method)
    run_step = module.run_step

    def counted(state):
        operations.counts = Counter()
        result = run_step(state)
        steps.append(Counter(operations.counts))
        return result

    monkeypatch.setattr(module, "run_step", counted)
    of_gpt = "extend", "prefill", "logits"
    for model, names in ((pipeline.gpt, of_gpt), (pipeline.small, of_gpt), (EagleDraftModel, ("extend", "prefill"))):
        for name in names:
            monkeypatch.setattr(model, name, operations.unseen(getattr(model, name)))
    with operations:
        pipeline.tokens(PROMPTS[:batch], method, Sampling.of(list(range(batch)), guidance=2.0))
    return steps[1:]


@pytest.mark.parametrize("method", ["jacobi:window=5", "jacobi:window=5:refresh=2", "lantern:k=8", "eagle1"])
def test_a_step_takes_few_operations(tiny, monkeypatch, method):
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

    def replay(self):
        if self.is_new:  # a CUDA graph runs nothing while it is captured, this has run once
            self.is_new = False
            return
        Recorded.num_replays += 1
        for func, args, kwargs, old in self.calls:
            for a, b in zip(tree_leaves(old), tree_leaves(func(*args, **kwargs))):
                if isinstance(a, torch.Tensor) and a.data_ptr() != b.data_ptr():
                    a.copy_(b)


class Recordings:
    """A stand-in for CUDAGraphs."""

    def __init__(self, device):
        assert device.type == "cpu"

    def warm_up(self, function):
        return function()

    def capture(self, function):
        with Recorded() as recorded:
            result = function()
        return recorded.replay, result


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setitem(GRAPHS, "cpu", Recordings)
    monkeypatch.setattr(specvis.models.threads, "MOST", 2**62)  # what NumPy does on a CPU alone is not recorded
    monkeypatch.setattr(Recorded, "num_replays", 0)


METHODS = ["vanilla", "jacobi:window=5", "jacobi:window=5:seed_exact=false",
           "jacobi:window=5:refresh=2", "eagle1", "eagle1:seed_exact=true", "eagle2", "lantern:k=8", "adt-tree",
           "cool-sd"]
MORE = ["gsd", "gsd+coupled", "speculative:omega=1.5", "adt-tree+lantern:k=8"]


@pytest.mark.parametrize("name, num_known, poll, batch", [
    *((name, (0,), *more) for name in METHODS for more in ((1, 4), (3, 2))),
    *(("vanilla", counts, 1, None) for counts in ((0,), (3, 0, 0, 0), (5, 7, 0, 0)))])  # by a loop of its own
def test_a_step_that_is_run_again_is_the_next_step(tiny, monkeypatch, request, name, num_known, poll, batch):
    """Nothing that a step needs is in Python but its shapes. Of the baseline, too: otherwise a comparison on a GPU
    would favor the other methods."""
    known_tokens = torch.where(torch.arange(max(num_known)) < torch.tensor(num_known)[:, None], 1, -1).expand(4, -1)

    def decoded():
        sampling = Sampling.of(list(range(4)), guidance=2.0)
        return tiny.tokens(PROMPTS[:4], name, sampling, batch=batch, known_tokens=known_tokens)

    expected = decoded()
    request.getfixturevalue("recorded")
    monkeypatch.setitem(POLL, "cpu", poll)
    again = decoded()
    for field in dataclasses.fields(expected)[:-1]:
        a, b = (getattr(x, field.name) for x in (expected, again))
        assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)), field.name
    if name != "adt-tree" or poll > 1:  # else the host looks after each step, and most trees are of a new size
        assert Recorded.num_replays > 2


@pytest.mark.parametrize("name", ["jacobi:window=3", "eagle1", "eagle2"])
def test_an_observer_may_keep_the_steps(tiny, request, name):
    """A step that is run again writes over what it returned before."""
    def observed():
        steps = []
        tiny.tokens(PROMPTS[:2], name, Sampling.of([0, 1], guidance=2.0), None, steps.append)
        return steps

    expected = observed()
    request.getfixturevalue("recorded")
    again = observed()
    assert Recorded.num_replays > 2 and len(again) == len(expected)
    for a, b in zip(expected, again):
        assert all(map(torch.equal, tree_leaves(a), tree_leaves(b)))


@pytest.mark.parametrize("name", ["jacobi:window=3", "jacobi:window=3:refresh=1", "eagle1"])
def test_steps_are_run_again_only_if_every_model_agrees(tiny, monkeypatch, recorded, name):
    model = EagleDraftModel if name == "eagle1" else tiny.small if "refresh" in name else tiny.gpt
    monkeypatch.setattr(model, "can_replay", False, raising=False)
    tiny.tokens(PROMPTS[:2], name, Sampling.of([0, 1], guidance=2.0))
    assert Recorded.num_replays == 0


class Stop(Exception):
    pass


def state_before(pipeline, method, monkeypatch, num_steps=1, temperature=1.0):
    """The state of a loop before its next step, after that many steps."""
    states, run_step = [], module_of(method).run_step

    def stopping(state):
        states.append(state)
        if len(states) > num_steps:
            raise Stop
        return run_step(state)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(module_of(method), "run_step", stopping)
        pipeline.tokens(PROMPTS[:2], method, Sampling.of([0, 1], guidance=2.0, temperature=temperature))
    return states[-1]


def with_tensors(thing, of_tensor, monkeypatch):
    """A copy of a thing, in which each tensor is what of_tensor makes of it."""
    def deepcopy(tensor, memo):
        return memo.setdefault(id(tensor), of_tensor(tensor))

    with monkeypatch.context() as patch:
        for kind in (torch.Tensor, torch.nn.Parameter):
            patch.setattr(kind, "__deepcopy__", deepcopy)
        return copy.deepcopy(thing)


STEPS = ["jacobi:window=5", "jacobi:window=5:seed_exact=false", "jacobi:window=5:refresh=2", "lantern:k=8", "eagle1",
         "eagle1:seed_exact=true", "eagle2", "adt-tree"]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", STEPS)
@torch.inference_mode()
def test_all_steps_ask_a_gpu_for_the_same(tiny, monkeypatch, host_reads, name, temperature):
    """Under fake tensors: no value can be read, nothing on the CPU takes part, and the host hands nothing over. The
    device is called meta here: without a GPU, PyTorch does not index a fake tensor on one."""
    state = state_before(tiny, name, monkeypatch, temperature=temperature)
    with FakeTensorMode():
        fake = with_tensors(state, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"),
                            monkeypatch)
        with pytest.raises(DataDependentOutputException):
            fake.look()
        steps = []
        for _ in range(2):
            fake.graph_key, asked = fake.next_graph_key(), Asked()
            host_reads.clear()
            with asked:
                module_of(name).run_step(fake)
            assert host_reads == []
            fake.num_steps += 1
            steps.append(asked.calls)
    assert len(steps[0]) > 20 and steps[0] == steps[1]
    for call in steps[0]:
        devices = {leaf[2].type for leaf in call if isinstance(leaf, tuple)}
        assert devices <= {"meta"} and call[0] != "aten::lift_fresh", call


class Asked(TorchDispatchMode):
    """What is dispatched: operations, the numbers that they are given, and what their tensors look like."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls.append([func.name(), *map(self.looks, tree_leaves((args, kwargs, out)))])
        return out

    @staticmethod
    def looks(leaf):
        return (tuple(leaf.shape), leaf.dtype, leaf.device) if isinstance(leaf, torch.Tensor) else repr(leaf)


@pytest.mark.parametrize("name", METHODS + MORE)
def test_what_a_step_asks_for_depends_on_its_graph_key_alone(tiny, monkeypatch, host_reads, name):
    """A step uses nothing else that the host knows, and reads nothing back. Between steps the host looks once."""
    module, of_key, num_steps, per_look = module_of(name), {}, 0, []
    run_step = module.run_step
    state_class = JacobiState if module is specvis.decoding.jacobi else SpeculativeState
    look = state_class.look

    def looking(state):
        host_reads.clear()
        look(state)
        per_look.append(host_reads.copy())

    def asking(state):
        nonlocal num_steps
        known = {key: value for key, value in vars(state).items() if key.startswith("host_")}
        known |= {key: vars(state)[key] for key in ("num_steps", "poll") if key in vars(state)}
        for key in known:
            delattr(state, key)
        held = held_by(state, monkeypatch)
        host_reads.clear()
        with Asked() as asked:
            result = run_step(state)
        assert host_reads == [] and held_by(state, monkeypatch) == held
        read_below = {"aten::_local_scalar_dense", "aten::nonzero"}.intersection(call[0] for call in asked.calls)
        assert not read_below, read_below
        vars(state).update(known)
        assert of_key.setdefault((state.graph_key, len(state.counts)), asked.calls) == asked.calls
        num_steps += 1
        return result

    monkeypatch.setattr(module, "run_step", asking)
    monkeypatch.setattr(state_class, "look", looking)
    sampling = Sampling.of(list(range(4)), guidance=2.0, temperature=[0.0, 1.0, 0.0, 1.0])
    tiny.tokens(PROMPTS[:4], name, sampling, batch=4)
    assert num_steps > len(of_key) and num_steps < len(per_look)
    assert all(names == ["tolist"] for names in per_look)


def held_by(state, monkeypatch):
    """The addresses of all tensors that a state leads to."""
    tensors = []
    with_tensors(state, lambda tensor: tensors.append(tensor) or tensor, monkeypatch)
    return [(id(tensor), tensor.data_ptr()) for tensor in tensors]


@pytest.mark.parametrize("name", ["jacobi:window=5"])  # others: tests/slow/test_asked_of_all.py
def test_a_step_compiles_as_one_graph(tiny, monkeypatch, name):
    module, step = (specvis.decoding.baseline, "baseline_step") if name == "vanilla" else (module_of(name), "run_step")

    def decoded():
        return tiny.tokens(PROMPTS[:2], name, Sampling.of([0, 1], guidance=2.0))

    expected, num_graphs = decoded(), 0

    def backend(graph, inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(module, step, torch.compile(getattr(module, step), fullgraph=True, backend=backend))
    assert torch.equal(decoded().tokens, expected.tokens) and num_graphs > 0
    torch._dynamo.reset()
