import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning turns 0.05 ms into 16 where cores are shared
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")   # NumPy's threads spin too, and take 7 times the CPU

import pytest  # noqa: E402  the variables are read when torch, numpy and triton are first imported
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton kernels run on the CPU,
    from tests import cuda_on_cpu
    cuda_on_cpu.load()  # and so do the CUDA ones

from tests.kernels.inputs import COMPARED  # noqa: E402  now that it is known which backends there are

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:  # the cores are shared by as many processes
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

MEASURED = {}         # compiler -> kernel -> GPU -> the most of any variant, and which one spills most


def pytest_addoption(parser):
    parser.addoption("--triton", action="store_true", help="hand-worked cases in Triton's interpreter too")


@pytest.fixture
def measured():
    """measured(compiler, op, kernel, gpu, registers, spilled, shared, variant): shown at the end of the run."""
    def add(compiler, op, kernel, gpu, registers, spilled, shared, variant=""):
        name = " ".join(dict.fromkeys([op, kernel.removesuffix("_kernel")]))
        merge_measured(compiler, name, gpu, registers, spilled, shared, variant)
    return add


def merge_measured(compiler, name, gpu, registers, spilled, shared, variant):
    row = MEASURED.setdefault(compiler, {}).setdefault(name, {})
    largest = row.get(gpu, (0, 0, 0, ""))
    row[gpu] = (max(largest[0], registers), max(largest[1], spilled), max(largest[2], shared),
                variant if spilled > largest[1] else largest[3])


def pytest_runtest_makereport(item, call):
    """Counts the tests of an op on one backend: they have the parameter `backend`."""
    if call.when == "call" and not call.excinfo and hasattr(item, "callspec") and "backend" in item.callspec.params:
        COMPARED[item.callspec.params["backend"] or "PyTorch's choice"] += 1
        COMPARED.update(getattr(item, "compared", ()))


def pytest_sessionfinish(session):
    """A worker of pytest-xdist hands over what it counted."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput.update(compared=dict(COMPARED), measured=MEASURED)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """The process that shows the summary takes what a worker hands over."""
    output = getattr(node, "workeroutput", {})
    COMPARED.update(output.get("compared", {}))
    for compiler, kernels in output.get("measured", {}).items():
        for kernel, row in kernels.items():
            for gpu, numbers in row.items():
                merge_measured(compiler, kernel, gpu, *numbers)


def pytest_terminal_summary(terminalreporter):
    say = terminalreporter.write_line
    if COMPARED:
        interpreted = " (Triton in its interpreter)" if os.environ.get("TRITON_INTERPRET") == "1" else ""
        say("\ntests that passed, each holding one backend against the oracle or what is known of the result"
            + interpreted + ":\n" + ", ".join(f"{backend} {tests}" for backend, tests in COMPARED.items()))
    for compiler, kernels in MEASURED.items():
        gpus = dict.fromkeys(gpu for row in kernels.values() for gpu in row)
        say(f"\nregisters / bytes spilled / bytes shared, {compiler}\n"
            f"{'the most of any variant':24}" + "".join(f"{gpu:>17}" for gpu in gpus))
        for kernel, row in kernels.items():
            cells = "".join(f"{'%d / %d / %d' % row[gpu][:3] if gpu in row else '':>17}" for gpu in gpus)
            spills = ", ".join(f"{gpu} at sizes {row[gpu][3]}" for gpu in row if row[gpu][1])
            say(f"{kernel:24}{cells}" + f"  spills most: {spills}" * bool(spills))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """torch.empty gives NaN or the largest integer: an element that no kernel wrote cannot pass by luck."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def host_reads(monkeypatch):
    """The names of the methods by which the host has read tensors. A dispatcher sees no read of a CPU tensor."""
    reads = []
    for name in ("tolist", "item", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        original = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda *a, name=name, original=original, **k: (reads.append(name),
                                                                                              original(*a, **k))[1])
    return reads
