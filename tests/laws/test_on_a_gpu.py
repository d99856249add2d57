"""CUDA graphs, streams and two devices, which only a GPU has; and two threads of the host, which a CPU has too.

Without a GPU these tests run the C++ kernels: operations that are recorded and run again replace a graph of an op, and
nothing replaces a stream or the graphs of a loop.

This file is also a program, `python -m tests.laws.test_on_a_gpu [op ...]`: it calls each CUDA kernel once with each
small input, and compares nothing. compute-sanitizer watches it.
"""
import dataclasses
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch.utils._pytree import tree_map_only

from specvis.decoding.sampling import Sampling
from specvis_kernels import backends
from specvis_kernels.compat._replay import GRAPHS, CUDAGraphs
from tests import cases
from tests.cases.comparing import make, run, same, tensors_of
from tests.decoding.pictures import PROMPTS
from tests.decoding.test_step import METHODS, MORE, Recorded
from tests.laws.test_every_op import TAKES_ROWS
from tests.tiny import tiny_pipeline

ON_GPU = cases.DEVICE == "cuda"
KERNELS = [(op, backend) for op in cases.CASES for backend in backends(op, cases.DEVICE)
           if backend in (("cuda", "triton") if ON_GPU else ("cpu",))]
GRAPHED = KERNELS if ON_GPU else KERNELS + [(op, "cuda_emulated") for op in cases.CASES
                                           if "cuda_emulated" in backends(op)]
SLEEP = 10**9  # cycles of a GPU: half a second, longer than a call of any op by one of many processes


def sizes_of(op):
    """Small ones, and on a GPU large ones."""
    return [cases.CASES[op][1], cases.CASES[op][-1], *cases.LARGE.get(op, [])] if ON_GPU else [cases.CASES[op][1]]


def all_same(got, expected):
    return len(got) == len(expected) and all(map(same, got, expected))


def captured(function):
    """A function that replays the launches of `function`, and returns its outputs, which stay in their memory."""
    function()  # kernels are loaded or compiled before
    if ON_GPU:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph) if ON_GPU else Recorded() as recorded:
        outputs = function()
    if not ON_GPU:
        graph = recorded
        graph.replay()  # which does nothing the first time

    def replay():
        for out in outputs:
            out.zero_()
        graph.replay()
        return outputs

    return replay


def next_request(a):
    """Exchange the requests. A request has two of a model's six rows, three apart."""
    if a.shape[:1] == (3,):
        return a.roll(1, 0)
    return a.unflatten(0, (2, 3)).roll(1, 1).flatten(0, 1) if a.shape[:1] == (6,) else a


@pytest.mark.parametrize("op, backend", GRAPHED)
def test_a_graph_of_it_is_it(op, backend):
    """Also with other values in its memory. No launch is outside of the graph, and no number is frozen in it."""
    for case in sizes_of(op):
        B = 3 if op not in cases.UNBATCHED else case[0]
        args, kwargs = make(op, B, *case[1:])
        replay = captured(lambda args=args, kwargs=kwargs: run(op, args, kwargs, backend, check=False))
        assert all_same(replay(), run(op, args, kwargs, backend))
        if op not in cases.UNBATCHED:
            others = tree_map_only(torch.Tensor, next_request, (args, kwargs))
            expected = run(op, *others, backend)
            for a, b in zip(tensors_of((args, kwargs)), tensors_of(others)):
                a.copy_(b)
            assert all_same(replay(), expected)


@pytest.mark.parametrize("op, backend", KERNELS)
def test_it_runs_on_the_current_stream(op, backend):
    """The default stream is busy for long, and the inputs are written on the stream itself, just before the call."""
    stream = torch.cuda.Stream() if ON_GPU else None
    for case in sizes_of(op):
        args, kwargs = make(op, *case)
        expected = [out.cpu() for out in run(op, args, kwargs, backend)]
        late = tree_map_only(torch.Tensor, torch.zeros_like, (args, kwargs))
        if ON_GPU:
            with torch.cuda.stream(stream):  # its memory is allocated before, and Triton compiles for these strides
                run(op, *late, backend, check=False)
            torch.cuda.synchronize()
            torch.cuda._sleep(SLEEP)
        with torch.cuda.stream(stream) if ON_GPU else nullcontext():
            for a, b in zip(tensors_of(late), tensors_of((args, kwargs))):
                a.copy_(b)
            got = [out.cpu() for out in run(op, *late, backend, check=False)]
        assert not ON_GPU or not torch.cuda.default_stream().query(), "it waited for the default stream"
        assert all_same(got, expected)


@pytest.mark.parametrize("op, backend", KERNELS)
def test_threads_of_the_host_may_call_it_at_once(op, backend):
    """Each with its own sizes, again and again. What a launch needs is set once for a device, or with the launch."""
    jobs = [make(op, *case) for case in (cases.CASES[op][1], cases.CASES[op][-1], *cases.LARGE.get(op, []))]
    expected = [run(op, *job, backend) for job in jobs]
    if ON_GPU:
        torch.cuda.synchronize()
    start = threading.Barrier(len(jobs), timeout=60)

    def work(i):
        with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else nullcontext():
            start.wait()
            outputs = [run(op, *jobs[i], backend, check=False) for _ in range(8)]
            return all(all_same(out, expected[i]) for out in outputs)

    with ThreadPoolExecutor(len(jobs)) as pool:
        assert all(pool.map(work, range(len(jobs))))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op, backend", KERNELS)
def test_it_runs_where_its_tensors_are(op, backend):
    """It runs on a device that is not the current one, after it ran on the current one."""
    for case in sizes_of(op):
        args, kwargs = make(op, *case)
        expected = run(op, args, kwargs, backend)
        there = tree_map_only(torch.Tensor, lambda a: a.to("cuda:1"), (args, kwargs))
        got = run(op, *there, backend)
        assert torch.cuda.current_device() == 0 and {out.device.index for out in got} == {1}
        assert all_same([out.to("cuda:0") for out in got], expected)


@pytest.mark.parametrize("name", METHODS + MORE if ON_GPU else ["vanilla", "jacobi:window=5", "eagle1", "lantern:k=8"])
@pytest.mark.parametrize("batch", [4, 2] if ON_GPU else [2])
def test_a_loop_decodes_the_same_with_graphs_as_without(monkeypatch, name, batch):
    """And the same each time. A method is not compared with another one: a GPU's products depend on how many rows they
    have. Without a GPU there are no graphs: here only the second of these is tested."""
    pipeline, replays = tiny_pipeline().to(cases.DEVICE), 0

    def capture(graphs, function, original=CUDAGraphs.capture):
        replay, result = original(graphs, function)

        def counted():
            nonlocal replays
            replays += 1
            replay()

        return counted, result

    def decoded():
        sampling = Sampling.of(list(range(4)), guidance=2.0, device=cases.DEVICE)
        return pipeline.tokens(PROMPTS[:4], name, sampling, batch=batch)

    monkeypatch.setattr(CUDAGraphs, "capture", capture)
    again = [decoded(), decoded()]
    assert replays > 2 or not ON_GPU or name.startswith("adt-tree")  # whose trees are of many sizes
    monkeypatch.delitem(GRAPHS, cases.DEVICE, raising=False)
    replays, expected = 0, decoded()
    assert not replays and (expected.tokens >= 0).all()
    for one in again:
        for field in dataclasses.fields(expected)[:-1]:
            a, b = (getattr(x, field.name) for x in (one, expected))
            assert torch.equal(a.nan_to_num(-1), b.nan_to_num(-1)), field.name


def main(ops):
    for op, backend in KERNELS:
        if backend == "triton" or ops and op not in ops:
            continue
        print(op, flush=True)
        for case in cases.CASES[op]:
            args, kwargs = make(op, *case)
            run(op, args, kwargs, backend, check=False)
            if (op, backend) in TAKES_ROWS:
                args[0].view(-1)[args[0].numel() // 2] = float("nan")
                run(op, args, kwargs, backend, check=False)
    if ON_GPU:
        torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
