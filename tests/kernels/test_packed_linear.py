"""packed_linear against PyTorch's linear layer."""
import os
import subprocess
import sys

import pytest
import torch

from specvis_kernels import backends, pack_weight, packed_linear
from tests import cases


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_a_linear_layer_whose_rows_do_not_depend_on_each_other(dtype):
    g = torch.Generator().manual_seed(0)
    weight, bias = torch.randn(100, 80, generator=g).to(dtype), torch.randn(100, generator=g)
    x = torch.randn(2, 40, 80, generator=g).to(dtype)
    y = packed_linear(x, pack_weight(weight), 100, bias)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, torch.nn.functional.linear(x.float(), weight.float(), bias), rtol=1e-5, atol=2e-5)
    if cases.DEVICE == "cpu":
        for rows in range(1, 40):
            assert torch.equal(packed_linear(x[:, :rows], pack_weight(weight), 100, bias), y[:, :rows])
        one_less = packed_linear(x[..., :64], pack_weight(weight[:, :64].contiguous()), 100, bias)
        assert not torch.equal(one_less, y)


@pytest.mark.skipif(cases.DEVICE != "cpu", reason="of threads on a CPU")
def test_every_thread_knows_denormal_numbers(set_threads):
    weight, x = pack_weight(torch.full((4096, 1024), 1e-20)), torch.full((256, 1024), 1e-22)
    set_threads(2)
    try:
        torch.set_flush_denormal(True)
        assert all(packed_linear(x, weight, 4096).view(torch.int32).all() for _ in range(20))
        assert torch.tensor(1e-40) * 1 == 0, "the caller's own setting is as before"
    finally:
        torch.set_flush_denormal(False)


def test_refuses_what_it_cannot_read():
    weight = pack_weight(torch.zeros(40, 8))
    for x, out_features, message in (
            (torch.zeros(3, 6), 40, r"weight must be float32 \(panels=2, inputs=192\), got float32 \(2, 256\)"),
            (torch.zeros(3, 8), 80, r"weight must be float32 \(panels=3, inputs=256\), got float32 \(2, 256\)"),
            (torch.zeros(3, 8).half(), 40, "x must be float32 or bfloat16 .*, got float16"),
            (torch.zeros(3, 7), 40, r"x must be a tensor \(.., K\) with an even K, got \(3, 7\)")):
        with pytest.raises(ValueError, match=message):
            packed_linear(x, weight, out_features)
    with pytest.raises(ValueError, match="weight must have an output and an even number of inputs"):
        pack_weight(torch.zeros(4, 5))


PINNED = """
import os, time, torch
from specvis_kernels import pack_weight, packed_linear
torch.set_num_threads(2)
x, weight = torch.randn(64, 512), pack_weight(torch.randn(1024, 512))
cores, before = os.sched_getaffinity(0), set(os.listdir("/proc/self/task"))
os.sched_setaffinity(0, {min(cores)})
while not (new := set(os.listdir("/proc/self/task")) - before): packed_linear(x, weight, 1024)
os.sched_setaffinity(0, cores)
while any(os.sched_getaffinity(int(thread)) != cores for thread in new):
    time.sleep(0.01)
    packed_linear(x, weight, 1024)
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2 or "cpu" not in backends("packed_linear"),
                    reason="needs two cores, and the library")
def test_threads_follow_a_widened_affinity():
    subprocess.run([sys.executable, "-c", PINNED], check=True, timeout=120)


FORKED = """
import os, time, torch
from specvis_kernels import pack_weight, packed_linear
torch.set_num_threads(2)
x, weight = torch.randn(64, 512), pack_weight(torch.randn(1024, 512))
expected = packed_linear(x, weight, 1024).numpy()
time.sleep(0.01)  # the other thread sleeps now
child = os.fork()
if not child:
    for _ in range(5):
        same = (packed_linear(x, weight, 1024).numpy() == expected).all()  # OpenMP's threads do not live on
        time.sleep(0.01)
    os._exit(not same)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_process_has_threads_of_its_own():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)
