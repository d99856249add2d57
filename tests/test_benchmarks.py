"""The benchmark checks what it times and says what it measured."""
import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import specvis_kernels
from benchmarks import decode, determinism, forward, harness, jacobi, ops, released
from specvis.decoding.draft_model import EagleDrafter, ModelDrafter
from specvis.decoding.methods import parse_method
from specvis.decoding.sampling import Sampling, cfg_inputs, repeat_for_cfg
from specvis.models import layers
from specvis.models.llamagen import GPTConfig
from specvis_kernels import tree_links, verify_tree
from tests.kernels import inputs
from tests.tiny import tiny_pipeline


def both(op, name, *sizes):
    """What the baseline and the oracle return."""
    baseline, args = ops.prepare(op, sizes, name)
    return baseline(*args), ops.prepare(op, sizes, "oracle")[0](*args)


@pytest.mark.parametrize("options", [{}, {"k": 6, "residual": "relaxed"},
                                     {"k": 6, "residual": "relaxed", "offset": 8}])
def test_the_baseline_accepts_the_same_nodes(options):
    results, expected = both("verify_tree", "python loop", 8, 60, 30, 4, {"branch": 5} | options)
    assert expected.num_accepted.max() > 1
    for b, (nodes, token) in enumerate(results):
        assert nodes == expected.accepted_nodes[b, :expected.num_accepted[b]].tolist()
        assert token == expected.next_token[b]


def test_the_baseline_finds_the_same_equal_tokens():
    results, expected = both("verify_greedy", "python loop", 2, 60, 6, 4)
    assert expected.num_accepted.max() > 2 and not expected.status.any()
    for b, (nodes, token) in enumerate(results):
        assert nodes == expected.accepted_nodes[b, :expected.num_accepted[b]].tolist()
        assert token == expected.next_token[b]


def test_the_baselines_compute_the_same():
    for settings in (ops.IMAGE, ops.NUCLEUS):
        probs, (expected, _) = both("guided_probs", "warpers", 1, 3, 2000, torch.float32, True, settings)
        torch.testing.assert_close(probs, expected)
    (relaxed_mass, count), expected = both("neighborhood_sum", "gather", 3, 300, 20, "tvd", 7)
    torch.testing.assert_close(relaxed_mass, expected.relaxed_mass)
    assert count.equal(expected.num_neighbors.long())
    tokens, (expected, _) = both("sample_residual", "searchsorted", 20, 40)
    assert tokens[:, 0].equal(expected)
    tokens, _ = both("sample_residual", "multinomial", 20, 40)
    assert tokens.shape == (20, 1)
    tokens, expected = both("draw_tokens", "multinomial", 2, 3, 50)
    assert tokens.shape == expected.tokens.shape and tokens.dtype == expected.tokens.dtype
    tokens, (expected, _, _) = both("draw_children", "multinomial", 2, 3, 50, 4)
    assert tokens.shape == expected.shape and tokens.dtype == expected.dtype
    (tokens, probs, _), expected = both("draft_children", "two ops", 3, 3, 50, 4)
    assert tokens[0].equal(expected.tokens[0]) and probs.equal(expected.probs)
    level, expected = both("draft_frontier", "two ops", 3, 3, 50, 4)
    assert all(a.equal(b) for a, b in zip(level, expected, strict=True))
    (_, _, best), (_, _, frontier, _) = both("expand_tree", "topk twice", 2, 3, 50, 4)
    assert best[1].shape == frontier.shape


def test_the_baseline_attends_to_the_same():
    attended, expected = both("tree_attention", "attention", 1, 9, 4, 2, 32, {"mask": False})
    torch.testing.assert_close(attended, expected)


@pytest.mark.parametrize("layout", ["layers", "heads"])
def test_the_baseline_moves_the_same_columns(layout):
    caches = []
    for name in ("index and put", "oracle"):
        call, args = ops.prepare("commit_kv", (2, 9, 4, {"layout": layout}), name)
        caches.append((call(*args), *args[0][0]))
    assert all(a.equal(b) for a, b in zip(*caches))


def test_the_baseline_commits_the_same_tokens():
    steps = []
    for name in ("scatter", "oracle"):
        call, args = ops.prepare("commit_tokens", (8, 20, 6, 30, True, False), name)
        out = call(*args)
        tokens, counts = args[0][0][:, :30], args[0][1]
        is_written = torch.arange(30, device=tokens.device) < counts[:, None]  # the baseline writes zeros behind
        steps.append((*out, tokens.where(is_written, 0), *args[0][1:7]))
    assert all(a.equal(b) for a, b in zip(*steps, strict=True)) and steps[0][2].max() > 3


@pytest.mark.parametrize("options", [{}, {"k": 6, "residual": "relaxed"}, {"group": 6}, {"omega": (1.5, 2.0)}])
def test_the_baseline_keeps_the_same_guesses(options):
    (tokens, is_kept, num_kept), expected = both("couple_tokens", "multinomial", 8, 16, 30, options)
    assert is_kept.equal(expected.is_kept) and 0 < is_kept.sum() < is_kept.numel()
    assert tokens[is_kept].equal(expected.tokens[is_kept]) and num_kept.equal(expected.num_kept.long())


def test_a_record_says_what_was_measured():
    record, *_ = ops.measure("tree_links", (1, 9), "oracle", copy=1e9, seconds=0)
    assert (record["op"], record["backend"], record["shape"], record["dtype"]) == (
        "tree_links", "oracle", "1 9", "int32")
    assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"] and record["bytes"] == 9 * 24
    assert record["share_of_copy"] == pytest.approx(9 * 24 / record["median_us"] * 1e6 / 1e9, rel=1e-2)
    assert harness.machine().keys() > {"device", "cpu", "cores", "torch", "triton", "python", "git"}


def run_ops(monkeypatch, *arguments):
    """The exit status of the benchmark, and the rows that it would time, in their order."""
    timed = []

    def measure(op, case, backend, copy, seconds):
        timed.append((op, ops.format_case(case), backend))
        if (op, backend) in run_ops.failing:
            raise run_ops.failing[op, backend]
        return [{"op": op, "backend": backend, "shape": timed[-1][1], "mode": "eager", "median_us": 2.0, "p10_us": 1.0,
                 "p90_us": 3.0, "bytes": 4, "share_of_copy": 0.5}]

    monkeypatch.setattr(ops, "measure", measure)
    monkeypatch.setattr(ops, "floor", lambda seconds: [])
    monkeypatch.setattr(inputs, "neighbor_table", inputs.neighbor_table)
    monkeypatch.setattr(harness, "bandwidth", lambda device: 1e9)
    monkeypatch.setattr("sys.argv", ["ops", *map(str, arguments)])
    try:
        with pytest.raises(SystemExit) as exit:
            ops.main()
        return exit.value.code, timed
    finally:
        run_ops.failing = {}


run_ops.failing = {}


@pytest.fixture
def on_a_gpu(monkeypatch):
    """As far as the order of the rows and the exit status are concerned."""
    backends = {"accept_gaussian": ["oracle", "triton"]}
    monkeypatch.setattr(inputs, "DEVICE", "cuda")
    monkeypatch.setattr(specvis_kernels, "backends", lambda op, device: backends.get(op, ["oracle", "cuda", "triton"]))
    monkeypatch.setattr(harness, "clocks", dict)


def test_on_a_gpu_the_kernels_of_a_step_come_first_and_oracles_last(on_a_gpu, monkeypatch):
    status, timed = run_ops(monkeypatch, "accept_gaussian", "commit_kv", "tree_links", "verify_tree")
    groups = [ops.group_of(op, backend) for op, _, backend in timed]
    assert status == 0 and groups == sorted(groups, key=ops.GROUPS.index) and set(groups) == set(ops.GROUPS)
    kernels = [(op, backend) for op, _, backend in timed if ops.group_of(op, backend) == "kernels"]
    assert list(dict.fromkeys(kernels)) == [("verify_tree", "cuda"), ("tree_links", "cuda"), ("commit_kv", "cuda"),
                                            ("accept_gaussian", "triton")]
    assert len(timed) == len(set(timed)) and ("commit_kv", ops.format_case((64, 60, 6, ops.XL_CACHE)), "cuda") in timed
    assert run_ops(monkeypatch, "tree_links", "--groups", "others,oracles")[1] == [
        ("tree_links", f"{B} 60", backend) for backend in ("triton", "oracle") for B in (1, 8, 64)]


def test_what_was_measured_stands_in_the_file_whatever_comes_after(on_a_gpu, monkeypatch, tmp_path):
    """A run that breaks off is gone on with. A wrong row leaves the others alone; after any other error the process is
    left; what hung is tried last; and what another revision measured is kept apart."""
    file = tmp_path / "rows.json"
    arguments = "tree_links", "tree_mask", "--groups", "kernels,others", "--json", file, "--resume"
    run_ops.failing = {("tree_links", "cuda"): AssertionError("output 1"), ("tree_mask", "triton"): RuntimeError("bad")}
    status, timed = run_ops(monkeypatch, *arguments)
    found = json.loads(file.read_text())
    assert status == ops.AGAIN and len(timed) == 10 and len(found["rows"]) == 6
    assert [error["error"] for error in found["errors"]] == 3 * ["AssertionError: output 1"] + ["RuntimeError: bad"]
    assert found["running"]["op"] == "tree_mask" and found["running"]["backend"] == "triton"

    status, timed = run_ops(monkeypatch, *arguments)
    assert (status, len(timed)) == (1, 2) and json.loads(file.read_text())["running"] is None
    assert run_ops(monkeypatch, *arguments) == (1, [])

    found["running"] = {"op": "tree_mask", "backend": "triton", "shape": timed[0][1]}
    file.write_text(json.dumps(found))
    assert run_ops(monkeypatch, *arguments)[1] == timed[::-1]

    machine = harness.machine()
    monkeypatch.setattr(harness, "machine", lambda: machine | {"sources": "others"})
    status, timed = run_ops(monkeypatch, *arguments)
    assert (status, len(timed)) == (0, 12)
    assert len(json.loads(file.with_suffix(".before.json").read_text())["rows"]) == 8


def test_each_row_is_written_before_the_next_is_timed(on_a_gpu, monkeypatch, tmp_path):
    file, seen = tmp_path / "rows.json", []
    monkeypatch.setattr(ops, "report", lambda row, oracle: seen.append(len(json.loads(file.read_text())["rows"])))
    assert run_ops(monkeypatch, "tree_links", "--groups", "kernels", "--json", file)[0] == 0 and seen == [1, 2, 3]
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


class FakeGpu:
    """A clock and a memory: what a call reads stays in a cache of 100 bytes, and costs nothing there."""

    def __init__(self, monkeypatch):
        self.now, self.cached, self.calls, self.syncs = 0, [], [], 0
        sizes = SimpleNamespace(L2_cache_size=100, total_memory=10**6)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: sizes)
        monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: self.calls.append(mode))
        monkeypatch.setattr(torch.cuda, "synchronize", self.synchronize)
        monkeypatch.setattr(harness, "perf_counter", lambda: self.now / 1e6)
        monkeypatch.setattr(harness, "captured", self.captured)
        monkeypatch.setattr(harness, "sweep_of", lambda size: lambda: self.read("sweep", size))
        monkeypatch.setattr(harness, "collect", lambda sample, seconds: [sample() for _ in range(3)])

    def synchronize(self):
        self.syncs += 1
        self.now += 1000

    def read(self, name, size):
        self.now += 1 + size * (name not in self.cached)
        self.cached = [] if size > 100 else [*self.cached, name][-(100 // size):]
        self.calls.append(name)

    def captured(self, calls):
        def replay():
            start = self.now
            for call in calls:
                call()
            return self.now - start

        replay()
        return replay


@pytest.mark.parametrize("touched, how", [(10, {"inputs": 30}), (300, {"inputs": 1}), (4, {"swept": 300})])
def test_cold_times_are_of_inputs_that_no_cache_holds(monkeypatch, touched, how):
    """The device's time is 1 us and 1 us for each byte that is not in the cache."""
    gpu = FakeGpu(monkeypatch)
    times = harness.time_on_cuda(lambda a: gpu.read(a.data_ptr(), touched), (torch.zeros(50, dtype=torch.uint8),), 1.0,
                                 touched, graphs=True)
    assert times["graph cold"] == times["graph cold"] | how and times["graph cold"]["median_us"] == 1 + touched
    assert times["graph warm"]["median_us"] == 1 + touched * (touched > 100)
    assert (times["eager"]["calls"], times["eager"]["samples"]) == (64, 3)
    assert times["eager"]["median_us"] == pytest.approx(times["graph warm"]["median_us"] + 1000 / 64) and gpu.syncs < 9


def test_slow_calls_are_timed_fewer_at_a_time_and_those_that_wait_only_eagerly(monkeypatch):
    gpu = FakeGpu(monkeypatch)

    def loop(a):
        gpu.read("loop", 9999)
        if gpu.calls[-2:] == ["error", "loop"]:
            raise RuntimeError("called a synchronizing CUDA operation\nat ..")

    times = harness.time_on_cuda(loop, (torch.zeros(9),), 0.2, 36, graphs=True)
    assert times.keys() == {"eager"} and times["eager"]["calls"] == 3
    assert times["eager"]["not_captured"] == "called a synchronizing CUDA operation" and gpu.calls[-1] == "default"
    assert "not_captured" not in harness.time_on_cuda(loop, (torch.zeros(9),), 0.2, 36, graphs=False)["eager"]


def test_the_gpu_is_asked_about_itself(monkeypatch):
    said = "580.159.03, 1980, 3201"
    monkeypatch.setattr(harness, "said_by", lambda *command: said)
    assert harness.asked_of_the_gpu("driver_version", "clocks.max.sm", "clocks.max.mem") == said.split(", ")
    assert harness.clocks() == {"sm_mhz": None, "memory_mhz": None}  # as many answers as questions, or none


@pytest.mark.parametrize("arguments, message", [
    (["tree"], "no op 'tree', only accept_gaussian"), (["--groups", "rivals"], "no group 'rivals', only kernels"),
    (["--resume"], "--resume needs --json")])
def test_the_benchmark_of_ops_names_what_there_is(arguments, message, monkeypatch, capsys):
    assert run_ops(monkeypatch, *arguments) == (2, []) and message in capsys.readouterr().err


def test_the_shapes_of_the_targets_are_timed():
    """An op at batches 1, 8 and 64, on a GPU."""
    for op in ops.FIRST:
        sizes = ops.ROWS[op][0] + ops.ON_GPUS.get(op, [])
        assert {1, 8, 64} <= {case[0] for case in sizes} or op == "neighborhood_sum", op
    assert {case[0] for case in ops.ROWS["neighborhood_sum"][0]} >= {60, 480, 3840}
    for B in (1, 8, 64):
        assert (B, 60, 16384, 6, ops.STATIC) in ops.ROWS["verify_tree"][0] + ops.ON_GPUS["verify_tree"]
        for op, case in (("draw_tokens", (33, 16384)), ("tree_attention", (60, 20, 20, 64)), ("guided_probs", (60,))):
            assert any(sizes[:len(case) + 1] == (B, *case) for sizes in ops.ROWS[op][0] + ops.ON_GPUS[op])


def test_bytes_that_must_move():
    """Of a few rows, counted from the tensors."""
    (cache, nodes, accepted, _), _ = inputs.commit_kv(1, 60, 6, ops.XL_CACHE)
    moved = 2 * 36 * 2 * 6 * 2 * 1280 * 2  # read and write; layers; rows; nodes; keys and values; 16 bits
    assert cache.shape == (36, 2, 64, 2, 1280) and accepted.tolist() == [6] and (nodes >= 0).all()
    assert ops.ROWS["commit_kv"][1](1, 60, 6, ops.XL_CACHE) == moved
    (probs, *_), named = inputs.verify_tree(2, 60, 512, 6, ops.STATIC)
    rows = probs[:, :1].nbytes + named["draft_probs"][:, :1].nbytes
    assert ops.ROWS["verify_tree"][1](2, 60, 512, 6, ops.STATIC) == rows
    (q, k, v, lengths, _), _ = inputs.tree_attention(1, 60, 20, 20, 64, ops.XL_HEADS)
    columns = int(lengths[0]) + 60
    assert ops.ROWS["tree_attention"][1](1, 60, 20, 20, 64, ops.XL_HEADS) == \
        k[:, :columns].nbytes + v[:, :columns].nbytes + 2 * q.nbytes


def test_all_tensors_of_a_call_take_turns(monkeypatch):
    """Those that are named, too: a table, or what drafts were drawn from."""
    call, arguments = ops.prepare("verify_tree", (2, 60, 512, 6, ops.STATIC), "oracle")
    copies = harness.copies_of(arguments, 3)
    places = {copy[1]["draft_probs"].data_ptr() for copy in copies} | {copy[0][0].data_ptr() for copy in copies}
    assert len(places) == 6 and harness.bytes_of(arguments) > 2 * 512 * 4 * (60 + 10)
    assert all(result.num_accepted.equal(call(*arguments).num_accepted) for result in (call(*copy) for copy in copies))


def test_drawn_trees_are_accepted_and_rejected_as_static_ones_are():
    args, kwargs = inputs.verify_tree(8, 60, 4096, 6, ops.STATIC)
    result = specvis_kernels.verify_tree(*args, **kwargs)
    assert 1.5 < result.num_accepted.float().mean() < 3 and not result.status.any()


PYTHON = """#!/bin/bash
case "$*" in
    "-c import xdist"*) exit 1 ;;
    "-c import sys"*"get_device_capability"*) echo 9.0 ;;
    *setup.py*) echo built > specvis_kernels/_ops_cuda.so ;;
    *"--groups kernels"*) echo row >> "$OUT/ops.json"; (($(wc -l < "$OUT/ops.json") >= 3)) || exit 75 ;;
    *"-k triton"*) sleep 60 ;;
    *"-k (cuda or oracle)"*) echo "1 failed"; exit 1 ;;
    *) echo "did $*" ;;
esac
"""


@pytest.fixture
def run_gpu_script(tmp_path):
    """run(*parts, **variables): its exit status, what it said, and the table's rows of words, with a fake Python and a
    fake compute-sanitizer, without ncu, and with 10 seconds for Triton's tests."""
    script = (harness.ROOT / "benchmarks/gpu.sh").read_text().replace("tests triton 120", "tests triton 10")
    files = {"benchmarks/gpu.sh": script, "setup.py": "", "csrc/a.cu": "", "specvis_kernels/verify_tree.py": "",
             "bin/python3": PYTHON, "bin/compute-sanitizer": "#!/bin/sh\necho watched $*"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*parts, **variables):
        environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "OUT": str(tmp_path / "out"), **variables}
        run = subprocess.run(["bash", "benchmarks/gpu.sh", *parts], cwd=tmp_path, env=environment,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        table = Path(environment["OUT"], "summary.txt")
        rows = [line.split(maxsplit=2) for line in table.read_text().splitlines()[1:]] if table.exists() else []
        return run.returncode, run.stdout, {name: status for name, _, status in rows}

    return run


needs_bash = pytest.mark.skipif(not (shutil.which("bash") and shutil.which("timeout")), reason="needs bash, timeout")


@needs_bash
def test_no_part_of_the_gpu_script_stops_the_next(run_gpu_script, tmp_path):
    """Neither one that fails nor one that hangs, nor a tool that is missing. A row that broke the device is followed by
    the others. A few files are left: what is fetched from a machine elsewhere is little."""
    status, said, parts = run_gpu_script()
    counters = {f"ncu-{op}": "not there: ncu" for op in ("guided_probs", "verify_tree", "expand_tree")}
    assert status == 1 and parts == {"tests": "failed: 1", "triton": "out of time"} | counters | dict.fromkeys(
        ("build", "ops", "graphs", "baselines", "memcheck", "racecheck", "program", "initcheck", "synccheck", "others",
         "oracles"), "ok")
    out = tmp_path / "out"
    assert out.joinpath("ops.json").read_text() == "row\n" * 3
    log = out.joinpath("log.txt").read_text()
    assert log == said and "1 failed" in log and "watched --tool racecheck --error-exitcode 3 --kernel-name" in log
    assert "did -m pytest -q -rfEs" in log and len(list(out.iterdir())) == 4
    assert re.search(r"\ntests +\d+  failed: 1\n", log)


@needs_bash
def test_parts_of_the_gpu_script_are_run_alone_and_go_on_where_the_last_ended(run_gpu_script, tmp_path):
    status, said, parts = run_gpu_script("synccheck")
    assert status == 0 and list(parts) == ["build", "synccheck"]  # without a library nothing could be looked at
    (tmp_path / "specvis_kernels/_ops_cuda.so").unlink()
    (tmp_path / "out/ops.json").write_text("old\n" * 2)
    status, said, parts = run_gpu_script("ops", OUT=str(tmp_path / "next"), BEFORE="out")
    assert (status, parts) == (0, {"ops": "ok"}) and (tmp_path / "next/ops.json").read_text() == "old\nold\nrow\n"
    assert (tmp_path / "specvis_kernels/_ops_cuda.so").read_text() == "built\n"
    (tmp_path / "csrc/a.cu").write_text("changed")
    assert list(run_gpu_script("ops")[2]) == ["build", "ops"]
    status, said, _ = run_gpu_script("rivals")
    assert status == 2 and said.startswith("no part rivals, only build tests ops graphs ")


@needs_bash
def test_the_limits_of_the_gpu_script(run_gpu_script):
    """Half an hour is enough for all, ten minutes for the parts that its first lines name together."""
    status, said, parts = run_gpu_script("graphs", LIMIT="5")
    assert (status, parts) == (1, {"build": "no time left", "graphs": "no time left"})
    script = (harness.ROOT / "benchmarks/gpu.sh").read_text()
    calls = script[script.index("\nparts() {"):]
    limits = {name: int(seconds) for name, seconds in re.findall(r"(?:part|tests|measure) (\w+) (\d+) ", calls)}
    limits |= dict.fromkeys(re.findall(r"sanitize (\w+)", calls), int(re.search(r'part "\$1" (\d+) comp', script)[1]))
    for op in re.search(r"for op in (.*); do counters", calls)[1].split():
        limits[f"ncu-{op}"] = int(re.search(r'part "ncu-\$1" (\d+)', script)[1])
    stays = [line.split()[1:] for line in script.splitlines() if line.startswith("#   ") and line.split()[1] in limits]
    assert sorted(name for names in stays for name in names) == sorted(limits) and stays[0][0] == "build"
    assert all(sum(limits[name] for name in names) <= 580 for names in stays)
    assert int(re.search(r"(\d+) minutes in all", script)[1]) * 60 >= sum(limits.values()) > 20 * 60


@pytest.mark.parametrize("module, arguments", [(decode, ["--device", "cpu"]), (jacobi, ["size"])])
def test_oracles_are_not_timed_as_decoding(module, arguments, monkeypatch):
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments])
    monkeypatch.setattr(specvis_kernels, "backends", lambda name, device="cpu": ["oracle"])
    with pytest.raises(SystemExit, match="has no kernels for cpu: in a clone, build them with"):
        module.main()


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    right = specvis_kernels.tree_links

    def off_by_one(parents, *, backend=None):
        ancestors, depth, *others = right(parents, backend="oracle")
        return ancestors, depth + (backend != "oracle"), *others

    monkeypatch.setattr(specvis_kernels, "tree_links", off_by_one)
    with pytest.raises(AssertionError, match="output 1 of tree_links"):
        ops.measure("tree_links", (1, 9), "triton", copy=1e9, seconds=0)


def test_the_cost_of_a_step_lies_between_those_that_were_measured():
    medians = {1: 10.0, 2: 11.0, 5: 20.0}
    assert [jacobi.interpolated(medians, nodes) for nodes in (1, 2, 3, 4, 5)] == [10, 11, 14, 17, 20]


@pytest.mark.parametrize("windows", ["auto", "4,33", "0", "4,,8"])
def test_a_size_is_timed_with_windows_that_its_steps_have(windows, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jacobi", "size", "--windows", windows])
    with pytest.raises(SystemExit):
        jacobi.main()
    assert f"--windows of size must be numbers from 1 to 32, got {windows}" in capsys.readouterr().err


WIDE = {"guidance": 1.2, "temperature": 1.5, "top_k": 24, "top_p": 0.95}  # at which tiny drafters are accepted often


def tiny_subject(pipeline=None):
    return decode.Subject.of_pipeline(pipeline or tiny_pipeline(), ["red heart", "blue heart", "plain heart"], WIDE)


def decode_as_released(pipeline, drafter, prompts, method, sampling, known_tokens=None):
    with torch.inference_mode():
        features = pipeline.words(pipeline.words.encode(prompts))
        condition, padding_mask = pipeline.gpt.condition(features)
        drafter = drafter(features, padding_mask)
    neighbors = pipeline.neighbors(method.num_neighbors) if method.num_neighbors else None
    return released.released_decode(pipeline.gpt, drafter, condition, padding_mask, sampling, method, neighbors,
                                    known_tokens=known_tokens)


@pytest.mark.parametrize("text", ["eagle1", "lantern:k=6:delta=0.4:width=4:nodes=12"])
def test_the_released_loop_accepts_and_draws_as_ours(text):
    pipeline, method, B = tiny_pipeline(), parse_method(text), 400
    L, prompts, sampling = pipeline.num_tokens, ["red heart"] * B, Sampling.of(list(range(B)), **WIDE)
    at = L - 3  # where the first step begins; two levels are in the image, and the released loop drafts beyond it
    known = torch.randint(64, (1, at - 1), generator=torch.Generator().manual_seed(3)).repeat(B, 1)
    both = (pipeline.tokens(prompts, method, sampling, known_tokens=known),
            decode_as_released(pipeline, lambda _, padding_mask: EagleDrafter(
                pipeline.gpt, pipeline.drafter, repeat_for_cfg(padding_mask)), prompts, method, sampling, known))
    accepted = [decoded.num_accepted[:, at].double() for decoded in both]
    assert accepted[0].mean() > 0.15
    assert abs(accepted[0].mean() - accepted[1].mean()) < 4 * sum(a.var() / B for a in accepted) ** 0.5
    for position in (at - 1, at, at + 1):
        ours, theirs = (torch.bincount(decoded.tokens[:, position], minlength=64).double() for decoded in both)
        chi_square = ((ours - theirs) ** 2 / (ours + theirs).clamp(min=1)).sum()
        freedom = (ours + theirs > 0).sum() - 1
        assert chi_square < freedom + 4 * (2 * freedom) ** 0.5 + 4


@pytest.mark.parametrize("text", ["eagle1", "lantern:k=0"])
def test_the_released_loop_finds_the_likeliest_tokens(text):
    pipeline, method, prompts = tiny_pipeline(), parse_method(text), ["red heart", "blue", "plain heart"]
    sampling = Sampling.of([0, 1, 2], guidance=1.5, temperature=1e-3)
    for layer in pipeline.gpt.layers:  # what comes before counts for much
        layer.attention.wqkv.weight.data.normal_(std=0.4, generator=torch.Generator().manual_seed(1))
        layer.attention.wo.weight.data.normal_(std=0.8, generator=torch.Generator().manual_seed(2))
    expected = pipeline.tokens(prompts, "vanilla", sampling).tokens

    def itself(features, padding_mask):  # so all drafts are right, as deep as the tree is
        return ModelDrafter(pipeline.gpt, *cfg_inputs(pipeline.gpt, *pipeline.gpt.condition(features)))

    decoded = decode_as_released(pipeline, itself, prompts, method, sampling)
    assert decoded.tokens.equal(expected) and decoded.num_accepted[:, 1].tolist() == [method.max_depth] * 3
    known = expected[:, :5]
    assert decode_as_released(pipeline, itself, prompts, method, sampling, known).tokens.equal(expected)


def test_the_released_trees_hold_what_the_drafter_says_along_each_path():
    pipeline, method, S, K = tiny_pipeline(), parse_method("lantern:k=0:width=4:nodes=20"), 3, 2
    head, random = pipeline.drafter, torch.Generator().manual_seed(1)
    head.layers[0].self_attn.o_proj.weight.data.mul_(20)  # what comes before counts for much
    warpers = released.Warpers(1.5, 1.0, 0, 1.0)
    with torch.inference_mode():
        drafter = EagleDrafter(pipeline.gpt, head, torch.ones(2, S, dtype=torch.bool))
        drafts = released.Drafts(drafter, warpers, method, pipeline.num_tokens)
        drafter.prefill(torch.randn(2, S, 32, generator=random), drafts.cache)
        drafts.extend(torch.tensor([[5, 9]]), torch.randn(2, K, 32, generator=random), [0], [K])
        tree = drafts.draft(torch.tensor([9]))
        assert tree.shapes[0].paths.shape[0] > 4 and tree.shapes[0].paths.shape[1] == 5
        for path in tree.shapes[0].paths:
            hidden = drafts.hidden
            for i, node in enumerate(path[1:][path[1:] >= 0]):
                token = tree.tokens[:, node]
                assert token in drafts.guided(hidden)[0, 0].topk(4).indices
                hidden = released.read_chain(drafter, token[None], [drafts.lengths[0] + i], drafts.cache,
                                             drafter.padding_mask, hidden)


class FixedDrafter:
    """Has one distribution, whatever it reads."""
    prefix_len = 1

    def __init__(self, row, batch):
        self.row, self.padding_mask = row, torch.ones(2 * batch, 1, dtype=torch.bool)

    def new_cache(self, columns):
        return None

    def extend(self, tokens, *others):
        return torch.zeros(*tokens.shape, 1)

    def logits(self, hidden):
        return self.row.log().expand(*hidden.shape[:2], -1)


@pytest.mark.parametrize("text", ["eagle1", "eagle1:k=2:delta=0.2:residual=relaxed", "lantern:k=0:width=3:nodes=8",
                                  "lantern:k=2:delta=0.2:width=3:nodes=8",
                                  "lantern++:k=2:delta=1.0:tree=mc_sim_7b_63"])
def test_the_released_walk_has_the_rule_of_verify_tree(text):
    """Of the same trees both accept as many drafts, and emit the same distribution."""
    method, B, V = parse_method(text), 2000, 6
    torch.manual_seed(0)
    p, q = torch.tensor([0.05, 0.3, 0.05, 0.35, 0.05, 0.2]), torch.tensor([0.4, 0.05, 0.3, 0.05, 0.15, 0.05])
    neighbors = torch.tensor([[1, 2], [0, 3], [4, 5], [1, 5], [3, 0], [2, 4]], dtype=torch.int32)
    warpers = released.Warpers(1.0, 1.0, 0, 1.0)
    drafts = released.Drafts(FixedDrafter(q, B), warpers, method, 16)
    drafts.extend(torch.zeros(B, 1, dtype=torch.int64), torch.zeros(2 * B, 1, 1), [0] * B, [1] * B)
    tree = drafts.draft(torch.zeros(B, dtype=torch.int64))
    N = tree.tokens.shape[1]
    walk = released.PathVerifier(warpers, method, neighbors, 0)
    emitted, num_accepted = torch.zeros(2, V), [[], []]
    for b in range(B):
        path, accepted, probs = walk(p.log().expand(N, V), tree, b)
        first = tree.tokens[b, tree.shapes[b].paths[path, 1]]
        emitted[0] += torch.eye(V)[first] if accepted else probs
        num_accepted[0].append(accepted)
    links = tree_links(torch.tensor([shape.parents for shape in tree.shapes], dtype=torch.int32))
    options = {"residual": method.acceptance.residual}
    if tree.probs is not None:
        options |= {"draft_probs": tree.probs.contiguous(),
                    "draft_row": torch.tensor([tree.draft_row] * B, dtype=torch.int32)}
    if method.acceptance.k:
        options |= {"neighbors": neighbors, "delta": torch.full((B,), method.acceptance.delta),
                    "cutoff": method.acceptance.cutoff}
    for _ in range(4):
        ours = verify_tree(p.expand(B, N, V), tree.tokens, links.first_child, links.next_sibling, torch.rand(B, N),
                           max_depth=method.max_depth, **options)
        first = tree.tokens.gather(1, ours.accepted_nodes[:, :1].clamp(min=0).long())[:, 0]
        emitted[1] += torch.bincount(torch.where(ours.num_accepted > 0, first, ours.next_token), minlength=V) / 4
        num_accepted[1] += ours.num_accepted.tolist()
    theirs, ours = (torch.tensor(numbers).double() for numbers in num_accepted)
    assert abs(theirs.mean() - ours.mean()) < 4 * ours.std() / B ** 0.5 and ours.mean() > 0.1
    assert (emitted[0] - emitted[1]).abs().sum() / 2 < 0.03 * B
    if method.lossless:
        assert (emitted[0] - B * p).abs().sum() / 2 < 0.03 * B


def test_the_released_loop_refuses_what_no_release_has():
    with pytest.raises(ValueError, match="method must be eagle1, lantern, lantern\\+\\+ or speculative, got eagle2"):
        released.released_decode(None, None, None, None, None, parse_method("eagle2"))


def test_a_record_says_where_the_time_of_a_picture_goes():
    said = []
    records = decode.measure(tiny_subject(), decode.timed_methods(["vanilla", "jacobi:window=4", "eagle1"]), 2, 0,
                             said.append)
    assert [r["method"] for r in records] == ["vanilla", "jacobi:window=4", "eagle1", "released eagle1"] and said
    for r in records:
        assert (r["size"], r["dtype"], r["batch"], r["timed"], r["turns"]) == ("shipped", "float32", 2, "pictures", 2)
        assert r["picture_s"] > 0 and r["step_ms"] > 0 and r["imposed_tau"] is None and r["times_vanilla"] > 0
        assert sum(r[part] for part in decode.PARTS) == pytest.approx(1, abs=1e-3) and r["rest"] > 0
        assert r["target"] > 0 and (r["drafter"] > 0) == ("eagle1" in r["method"])
        assert (r["ops"] > 0) != r["method"].startswith("released")
        assert r["method"] in decode.line_of(r)
    assert [r["times_released"] is None for r in records] == [True, True, False, True]
    assert (records[0]["tau"], records[0]["times_vanilla"]) == (1, 1) and records[1]["tau"] > 1


@pytest.mark.parametrize("text", ["jacobi:window=4", "eagle1", "eagle2:width=4", "lantern:k=6:delta=0.4:width=4"])
def test_random_weights_accept_what_was_recorded(text):
    recorder = decode.Recorder(tiny_pipeline(), ["red heart", "blue heart", "plain heart"], WIDE)
    method, prompts = parse_method(text), 3
    config = GPTConfig(dim=32, layers=1, heads=2, vocabulary=64, grid=4, classes=10, ffn_multiple=16)
    subject = decode.Subject.random("B", config, recorder, dtype=torch.float32)
    assert recorder(method).num_accepted.max() > 0
    for contender in decode.contenders_of([method]):
        run = decode.run(subject, contender, prompts, 0)
        assert run.tau == pytest.approx(recorder.tau(method)), contender.name


def test_steps_of_larger_sizes_are_timed_in_the_middle_of_pictures(tmp_path):
    pipeline = tiny_pipeline()
    config = GPTConfig(dim=32, layers=1, heads=2, vocabulary=64, grid=4, classes=10, ffn_multiple=16)
    subject = decode.Subject.random("L", config, decode.Recorder(pipeline, ["red heart"], WIDE), dtype=torch.float32)
    methods = decode.timed_methods(["vanilla", "lantern:k=6:width=3:nodes=8"])
    taken = decode.run(subject, decode.Contender(methods[0]), 2, 0, max_steps=3)
    assert (taken.num_steps, taken.tau) == (3, 1)
    records = decode.measure(subject, methods, 2, 0, lambda text: None)
    assert {r["timed"] for r in records} == {"steps"}
    assert records[0]["picture_s"] == pytest.approx(16 * records[0]["step_ms"] / 2e3, rel=1e-3)
    assert records[1]["picture_s"] == pytest.approx(
        16 * records[1]["step_ms"] / 2e3 / records[1]["imposed_tau"], rel=1e-3)
    decode.plot(records, tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000


def test_forwards_of_each_kind_are_timed(monkeypatch):
    subject, calls = tiny_subject(), []
    forward_of_modules = subject.gpt.forward

    def compiled(*args):
        calls.append((layers.USE_DECODER_LAYERS, torch.get_num_threads()))
        return forward_of_modules(*args)

    monkeypatch.setattr(decode, "compiled", lambda gpt: compiled)
    subject.threads, threads = 1, torch.get_num_threads()
    records = decode.measure(subject, decode.timed_methods(["vanilla", "eagle1"]), 2, 0, lambda text: None,
                             decode.FORWARDS)
    assert [r["method"] for r in records] == [
        "vanilla", "eagle1", "released eagle1", "vanilla (eager)", "eagle1 (eager)", "released eagle1 (eager)",
        "vanilla (compile)"]
    assert set(calls) == {(False, 1)} and (layers.USE_DECODER_LAYERS, torch.get_num_threads()) == (True, threads)
    assert subject.gpt.forward == forward_of_modules
    assert all(r["times_eager"] > 0 for r in records) and records[3]["times_eager"] == records[3]["times_vanilla"] == 1
    assert [r["times_released"] is None for r in records] == [True, False, True, True, False, True, True]


def test_decoding_is_timed_with_pytorchs_best_setting(monkeypatch):
    times = {"B": {("default", 1): 3.0, ("default", 2): 4.0, ("passive", 2): 2.0},
             "L": {("default", 1): 3.0, ("default", 2): 2.0, ("passive", 2): 9.0},
             "XL": {("default", 1): 1.0, ("default", 2): 2.0, ("passive", 2): 9.0}}
    begun = []
    monkeypatch.setattr(decode, "eager_times", lambda size, dtype: times[size])
    monkeypatch.setattr("os.execve", lambda *arguments: begun.append(arguments))
    monkeypatch.setattr("sys.argv", ["decode", "--forwards", "eager"])
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    decode.begin_anew(["B", "L", "XL"])
    (_, command, environment), = begun
    assert command[1:] == ["-m", "benchmarks.decode", "--forwards", "eager", "--eager-threads", "1", "2", "1"]
    assert "OMP_WAIT_POLICY" not in environment


def test_a_forward_is_timed_beside_its_limits(tmp_path, monkeypatch, capsys):
    """With an interpreter that has llama.cpp in it, and says a millisecond to everything."""
    python, file, figure = tmp_path / "python", tmp_path / "forward.json", tmp_path / "forward.png"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && echo 1.2 && exit\necho 0\nwhile read line; do echo '[1.0]'; done\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.argv", ["forward", "--sizes", "tiny", "--seconds", "0", "--llama", str(python), "--json",
                                     str(file), "--plot", str(figure)])
    forward.main()
    written = json.loads(file.read_text())
    best = forward.best_of(written["rows"])
    names = {f"{what}, {threads}" for what in ("decoder_layers", "llama.cpp")
             for threads in (1, torch.get_num_threads())} | {"eager"}
    assert set(best) == {(name, nodes) for name in names for nodes in forward.NODES}
    assert all(r["median_ms"] >= r["min_ms"] > 0 and r["of_bandwidth"] > 0 and r["of_product"] > 0
               for r in written["rows"])
    assert {r["median_ms"] for (name, _), r in best.items() if "llama" in name} == {1}
    assert written["machine"]["llama_cpp"] == "1.2"
    assert all(rate > 0 for rate in written["limits"]["tiny"].values()) and figure.stat().st_size > 1000
    assert "| 33 |" in capsys.readouterr().out


def test_forwards_are_timed_without_llama_cpp_and_of_known_sizes(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["forward", "--sizes", "B", "B:float32", "--llama", "false"])
    asked = []
    monkeypatch.setattr(forward, "measure", lambda *arguments: asked.append(arguments) or ([], {}))
    monkeypatch.setattr(forward, "table", lambda records, limits: [])
    forward.main()
    assert asked == [("B", "bfloat16", 60, None, False), ("B", "float32", 60, None, False)]
    assert forward.MISSING in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["forward", "--sizes", "S"])
    with pytest.raises(SystemExit):
        forward.main()
    assert "--sizes must be of shipped, B, L" in capsys.readouterr().err


def test_what_a_part_calls_is_timed_once_and_ops_are_put_back():
    before = torch.ops.specvis_kernels.tree_links.default._op
    watch = decode.Watch(clock := decode.Clock(torch.device("cpu")), tiny_pipeline().gpt)
    clock.now = iter(range(100)).__next__
    tree_links = specvis_kernels.tree_links
    with decode.ops_replaced(lambda name, call: watch.timed("ops", call)):
        watch.timed("target", tree_links)(torch.tensor([[-1, 0]], dtype=torch.int32))
        assert watch.seconds == {"target": 1}
        tree_links(torch.tensor([[-1, 0]], dtype=torch.int32))
        assert watch.seconds == {"target": 1, "ops": 1}
    assert torch.ops.specvis_kernels.tree_links.default._op is before


@pytest.mark.parametrize("arguments, message", [
    (["--sizes", "S"], "no size 'S', only shipped, B, L, XL"),
    (["--methods", "gsd"], "methods must be of vanilla, jacobi, speculative, eagle1"),
    (["--methods", "cspd"], "methods must be of vanilla, jacobi"),
    (["--methods", "eagle1:wide=3"], "method eagle1 has no parameter 'wide'"),
    (["--batch", "0"], "--batch must be at least 1, got 0")])
def test_the_decoding_benchmark_names_what_there_is(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["decode", *arguments])
    with pytest.raises(SystemExit):
        decode.main()
    assert message in capsys.readouterr().err


def test_pictures_that_changed_are_counted(monkeypatch):
    """Two of four have other tokens with two threads, one of them other pixels; three at once change two pixels."""
    def draw(pipeline, name, count, threads, batch):
        tokens, pixels = torch.zeros(count, 5), np.zeros((count, 2, 2, 3), int)
        if threads == 2:
            tokens[1:3, 4], pixels[2, 0, 1] = 1, 7
        if batch == 3:
            pixels[::3, 1, 1, 0] = -1
        return tokens, pixels

    monkeypatch.setattr(determinism, "draw", draw)
    monkeypatch.setattr(determinism.Pipeline, "load", lambda: None)
    assert list(determinism.differences("jacobi", 4)) == [
        ("2 threads", 2, 1, 7), ("4 threads", 0, 0, 0), ("8 threads", 0, 0, 0), ("1 at once", 0, 0, 0),
        ("3 at once", 0, 2, 1), ("plain decoding", 0, 0, 0)]
    assert len(list(determinism.differences("speculative", 4))) == 5  # which does not draw plain decoding's pictures
