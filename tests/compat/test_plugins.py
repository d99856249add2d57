"""What vLLM's and SGLang's plugins share: a spawned process of a server finds them by the packages' metadata."""
import logging
import multiprocessing

import torch

from tests.compat import servers


def work():
    """In a worker of both servers: what its functions answer, how often ours were called, and what the log says."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.name}: {record.getMessage()}")
    for server in ("vllm", "sglang"):
        logging.getLogger(server).addHandler(handler)
        logging.getLogger(server).setLevel("INFO")
    from sglang.srt.plugins import load_plugins
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    load_plugins()
    from sglang.srt.speculative import eagle_utils
    from vllm.v1.sample import rejection_sampler

    logits = torch.eye(4)[[2]] * 100
    answers = [rejection_sampler.rejection_sample(
        torch.tensor([2]), [1], 1, torch.tensor([1]), None, logits, torch.tensor([[3]]), None).tolist()
        for _ in range(2)]
    eagle_utils.tree_speculative_sampling_target_only(
        *(torch.zeros(size, dtype=torch.int32) for size in ((1,), (1, 1), (1,))),
        *(torch.full((1, 1), value) for value in (0, 0, -1, -1)), torch.zeros(1, 1), torch.zeros(1),
        torch.ones(1, 1, 1))
    return (answers, rejection_sampler.rejection_sample.num_calls,
            eagle_utils.tree_speculative_sampling_target_only.num_calls, lines)


def test_a_spawned_worker_runs_ours(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(servers.write(tmp_path))
    monkeypatch.setenv("SPECVIS_VLLM", "rejection")
    monkeypatch.setenv("SPECVIS_SGLANG", "1")
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        answers, of_vllm, of_sglang, lines = pool.apply(work)
    assert answers == [[[2, 3]]] * 2 and (of_vllm, of_sglang) == (2, 1)
    assert lines == [f"{server}.specvis_kernels: {target} is the one of specvis_kernels" for server, target in (
        ("vllm", "vllm.v1.sample.rejection_sampler:rejection_sample"),
        ("sglang", "sglang.srt.speculative.eagle_utils:tree_speculative_sampling_target_only"))]
