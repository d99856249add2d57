"""On which backends a test with the argument `backend` runs."""
import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from specvis_kernels import _define, backends
from tests import cases
from tests.cases.comparing import same

TRITON = ["triton"] if "triton" in backends("verify_tree", cases.DEVICE) else []


def pytest_collection_modifyitems(config, items):
    """Triton's interpreter takes its time: without --triton it has only the cases of tests/laws."""
    if not config.getoption("--triton"):
        items[:] = [item for item in items if "/kernels/" not in item.nodeid or not hasattr(item, "callspec")
                    or item.callspec.params.get("backend") != "triton"]


@pytest.fixture(params=["oracle", *TRITON])
def backend(request, monkeypatch):
    """"oracle": each call is repeated on the other backends, which must give equal bits. Or "triton"."""
    used = set()
    for op, kernels in _define._kernels.items() if request.param == "oracle" else ():
        names = [name for name in backends(op, cases.DEVICE) if name not in ("oracle", "triton")]
        monkeypatch.setitem(kernels, "oracle", repeated(op, dict(kernels), names, used))
    request.node.compared = used
    return request.param


@pytest.fixture
def triton_takes(backend, monkeypatch):
    """triton_takes(V=4): that many tokens, or neighbors, k, at a time. The other backends take 32 or more."""
    def set_blocks(**sizes):
        if backend == "triton":
            from specvis_kernels.triton import _rows
            for name, size in sizes.items():
                monkeypatch.setitem(_rows.MAX_BLOCK, name, size)

    return set_blocks


def repeated(op, kernels, names, used):
    arguments = getattr(torch.ops.specvis_kernels, op).default._schema.arguments
    written = [i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write]

    def copy(a):
        """In other memory, at an equal offset."""
        return a.new_empty(0).set_(a.untyped_storage().clone(), a.storage_offset(), a.shape, a.stride())

    def copied(args):
        return [tree_map_only(torch.Tensor, copy, a) if i in written else a for i, a in enumerate(args)]

    def results(outputs, args):
        return [a for a in tree_leaves([outputs, *(args[i] for i in written)]) if isinstance(a, torch.Tensor)]

    def call(*args):
        calls = [(name, copied(args)) for name in names]
        outputs = kernels["oracle"](*args)
        for name, others in calls:
            used.add(name)
            for i, (a, b) in enumerate(zip(results(kernels[name](*others), others), results(outputs, args))):
                assert same(a, b), f"output {i} of {op}: {name} gives {a}, the oracle {b}"
        return outputs

    return call
