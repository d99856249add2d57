import os
from functools import partial

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning turns 0.05 ms into 16 where cores are shared
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")   # NumPy's threads spin too, and take 7 times the CPU

import pytest  # noqa: E402  the variables are read when torch, numpy and triton are first imported
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton kernels run on the CPU,
    from tests import cuda_on_cpu
    cuda_on_cpu.load()  # and so do the CUDA ones

from tests.cases import COMPARED  # noqa: E402  now that it is known which backends there are

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # the cores are shared by as many processes
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))


def pytest_addoption(parser):
    parser.addoption("--triton", action="store_true", help="hand-worked cases in Triton's interpreter too")


def pytest_runtest_makereport(item, call):
    """Counts the tests of an op on one backend: they have the parameter `backend`."""
    if call.when == "call" and not call.excinfo and hasattr(item, "callspec") and "backend" in item.callspec.params:
        COMPARED[item.callspec.params["backend"] or "PyTorch's choice"] += 1
        COMPARED.update(getattr(item, "compared", ()))


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands over what it counted."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(compared=dict(COMPARED))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """The process that shows the summary takes what a worker hands over."""
    COMPARED.update(getattr(node, "workeroutput", {}).get("compared", {}))


def pytest_terminal_summary(terminalreporter):
    if COMPARED:
        interpreted = " (Triton in its interpreter)" if os.environ.get("TRITON_INTERPRET") == "1" else ""
        terminalreporter.write_line(
            "\ntests that passed, each holding one backend against the oracle or what is known of the result"
            + interpreted + ":\n" + ", ".join(f"{backend} {tests}" for backend, tests in COMPARED.items()))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN or the largest integer: an element that no kernel wrote cannot pass by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def ops_of_layers(monkeypatch):
    """Between products, a GPU's decoder_layers calls the ops by the dispatcher, and not Triton's kernels."""
    from specvis_kernels.triton import decoder_layers as kernels
    for op in ("rms_norm", "rotate_into_cache", "swiglu", "tree_attention"):
        monkeypatch.setattr(kernels, op, getattr(torch.ops.specvis_kernels, op))


@pytest.fixture
def as_on_a_gpu(monkeypatch, ops_of_layers):
    """Models read their own weights as on a GPU: by PyTorch's products, and between them the ops' kernels for CPUs."""
    from specvis.models import layers, transformers
    from specvis_kernels import decoder_layers
    from specvis_kernels.compat import _layers, _replay

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # else a CPU has no such backend
    for module in (layers, transformers, _replay):
        monkeypatch.setattr(module, "decoder_layers", partial(decoder_layers, backend="triton"))
    _layers.IN_PANELS.remove("cpu")
    yield
    _layers.IN_PANELS.add("cpu")


@pytest.fixture
def set_threads():
    """torch.set_num_threads, until the test ends."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def host_reads(monkeypatch):
    """The names of the methods by which the host has read tensors. A dispatcher sees no read of a CPU tensor."""
    reads = []
    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name, original=original, **k: (reads.append(name),
                                                                                              original(*a, **k))[1])
    return reads
