"""Each benchmark checks what it times, runs small once, and writes the fields that it should."""
import functools
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import specvis_kernels
from benchmarks import decode, families, forward, harness, ops, papers, smoke, tables
from specvis.decoding.driver import POLL
from specvis.decoding.methods import parse_method
from specvis.models import layers
from specvis.models.llamagen import GPTConfig
from tests import cases
from tests.test_released import WIDE
from tests.tiny import tiny_pipeline


def both(op, name, *sizes):
    """The outputs of the baseline and of the oracle."""
    baseline, args = ops.prepare(op, sizes, name)
    return baseline(*args), ops.prepare(op, sizes, "oracle")[0](*args)


def test_the_baselines_compute_the_same():
    tokens, expected = both("draw_tokens", "multinomial", 2, 3, 50)
    assert tokens.shape == expected.tokens.shape and tokens.dtype == expected.tokens.dtype
    (tokens, probs, _), expected = both("draft_children", "two ops", 3, 3, 50, 4)
    assert tokens[0].equal(expected.tokens[0]) and probs.equal(expected.probs)
    for draft in (False, True):
        padded, expected = both("verify_chain", "padded", 6, 50, {"num_drafts": [1, 2, 3, 4, 5], "draft": draft})
        assert padded.num_accepted.equal(expected.num_accepted) and padded.next_token.equal(expected.next_token)
    torch.testing.assert_close(*both("tree_attention", "attention", 1, 9, 4, 2, 32, {"mask": False}))


@pytest.mark.parametrize("layout", ["layers", "heads"])
def test_the_baseline_moves_the_same_columns(layout):
    caches = []
    for name in ("index and put", "oracle"):
        call, args = ops.prepare("commit_kv", (2, 9, 4, {"layout": layout}), name)
        caches.append((call(*args), *args[0][0]))
    assert all(a.equal(b) for a, b in zip(*caches))


def test_bytes_that_must_move():
    """Count them from the tensors, for a few rows."""
    (cache, nodes, accepted, _), _ = cases.commit_kv(1, 60, 6, ops.XL_CACHE)
    moved = 2 * 36 * 2 * 6 * 2 * 1280 * 2  # read and write; layers; rows; nodes; keys and values; 16 bits
    assert cache.shape == (36, 2, 64, 2, 1280) and accepted.tolist() == [6] and (nodes >= 0).all()
    assert ops.ROWS["commit_kv"][1](1, 60, 6, ops.XL_CACHE) == moved
    (probs, *_), named = cases.verify_tree(2, 60, 512, 6, ops.STATIC)
    rows = probs[:, :1].nbytes + named["draft_probs"][:, :1].nbytes
    assert ops.ROWS["verify_tree"][1](2, 60, 512, 6, ops.STATIC) == rows
    (q, k, v, lengths, _), _ = cases.tree_attention(1, 60, 20, 20, 64, ops.XL_HEADS)
    columns = int(lengths[0]) + 60
    assert ops.ROWS["tree_attention"][1](1, 60, 20, 20, 64, ops.XL_HEADS) == \
        k[:, :columns].nbytes + v[:, :columns].nbytes + 2 * q.nbytes


def subject_of(name, grid=4, prompts=("red heart",)):
    """Random weights of another size, beside a recorder of the tiny model."""
    config = GPTConfig(dim=32, layers=1, heads=2, vocabulary=64, grid=grid, classes=10, ffn_multiple=16)
    recorder = decode.Recorder(tiny_pipeline(), list(prompts), WIDE)
    return decode.Subject.random(name, config, recorder, "cpu", torch.float32), recorder


def run_main(module, monkeypatch, *arguments):
    """Run a benchmark's command; its exit status."""
    monkeypatch.setattr("sys.argv", [module.__name__, *map(str, arguments)])
    with pytest.raises(SystemExit) as exit:
        module.main()
    return exit.value.code


def test_ops_are_timed_and_a_run_is_resumed(monkeypatch, tmp_path):
    """A wrong row is an error of its own, the other rows are timed, and a second run has nothing left to do."""
    right, file = specvis_kernels.tree_mask, tmp_path / "rows.json"

    @functools.wraps(right)
    def wrong(*args, backend=None, **kwargs):
        mask = right(*args, backend=backend, **kwargs)
        return ~mask if backend == "cpu" else mask

    monkeypatch.setattr(specvis_kernels, "tree_mask", wrong)
    monkeypatch.setattr(harness, "bandwidth", lambda device: 1e9)
    monkeypatch.setitem(ops.ROWS, "tree_links", ([(1, 9)], ops.ROWS["tree_links"][1]))
    monkeypatch.setitem(ops.ROWS, "tree_mask", ([(2, 9, True, "bool", 20, torch.float32)], ops.ROWS["tree_mask"][1]))
    arguments = "tree_links", "tree_mask", "--groups", "kernels,oracles", "--seconds", 0, "--json", file, "--resume"
    assert run_main(ops, monkeypatch, *arguments) == 1
    written = json.loads(file.read_text())
    assert {(row["op"], row["backend"]) for row in written["rows"]} == {
        ("tree_links", "oracle"), ("tree_links", "cpu"), ("tree_mask", "oracle")}
    assert [(error["op"], error["backend"]) for error in written["errors"]] == [("tree_mask", "cpu")]
    assert "output 0 of tree_mask" in written["errors"][0]["error"] and written["running"] is None
    row = next(row for row in written["rows"] if row["backend"] == "cpu")
    assert (row["shape"], row["dtype"], row["bytes"]) == ("1 9", "int32", 9 * 24)
    assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]
    assert row["share_of_copy"] == pytest.approx(9 * 24 / row["median_us"] * 1e6 / 1e9, rel=1e-2)
    assert written["machine"].keys() > {"device", "cpu", "cores", "torch", "triton", "python", "git"}
    assert run_main(ops, monkeypatch, *arguments) == 1 and json.loads(file.read_text()) == written


def test_a_run_on_a_gpu_that_breaks_off_is_gone_on_with(monkeypatch, tmp_path):
    """Kernels come first, and of these a step's slowest. After an error the process is left; what hung comes last."""
    assert set(ops.FIRST) | set(ops.LAST) <= set(ops.ROWS) and not set(ops.FIRST) & set(ops.LAST)
    file, timed = tmp_path / "rows.json", []

    def measure(op, case, backend, *_):
        timed.append((op, backend))
        if len(timed) == 4:
            raise RuntimeError("the device is lost")
        return [{"op": op, "backend": backend, "shape": ops.format_case(case)}]

    for owner, name, value in ((cases, "DEVICE", "cuda"), (ops, "measure", measure),
                               (specvis_kernels, "backends", lambda *_: ["oracle", "cuda", "triton"]),
                               (ops, "report", lambda *_: None), (harness, "bandwidth", lambda _: 1e9)):
        monkeypatch.setattr(owner, name, value)
    arguments = "tree_mask", "tree_links", "--groups", "others,kernels", "--json", file, "--resume"
    assert run_main(ops, monkeypatch, *arguments) == ops.AGAIN == 75
    assert timed == 3 * [("tree_links", "cuda")] + [("tree_mask", "cuda")]
    assert run_main(ops, monkeypatch, *arguments) == 1  # the error is still in the file
    assert timed[4:] == 2 * [("tree_mask", "cuda")] + 3 * [("tree_links", "triton")] + 3 * [("tree_mask", "triton")]
    hung = {"op": "tree_mask", "backend": "cuda", "shape": ops.format_case(ops.ROWS["tree_mask"][0][0])}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rows": [], "errors": [], "running": hung}))
    assert run_main(ops, monkeypatch, *arguments) == 0 and len(timed) == 24 and timed[-1] == ("tree_mask", "cuda")


@pytest.mark.parametrize("module, arguments, message", [
    (ops, ["tree"], "no op 'tree', only accept_gaussian"),
    (ops, ["--groups", "rivals"], "no group 'rivals', only kernels"), (ops, ["--resume"], "--resume needs --json"),
    (smoke, ["tree"], "no op 'tree', only"),
    (decode, ["--sizes", "S"], "no size 'S', only shipped, B, L, XL"),
    (decode, ["--methods", "gsd"], "methods must be of vanilla, jacobi, speculative, eagle1"),
    (decode, ["--methods", "eagle1:wide=3"], "method eagle1 has no parameter 'wide'"),
    (decode, ["--batch", "0"], "--batch must be at least 1, got 0"),
    (families, ["--methods", "eagle1"], "--methods must have no draft model, got eagle1"),
    (forward, ["--sizes", "S"], "--sizes must be of shipped, B, L")])
def test_a_wrong_argument_is_named(module, arguments, message, monkeypatch, capsys):
    assert run_main(module, monkeypatch, *arguments) == 2 and message in capsys.readouterr().err


def test_oracles_are_not_timed_as_decoding(monkeypatch):
    monkeypatch.setattr(specvis_kernels, "backends", lambda name, device="cpu": ["oracle"])
    assert "has no kernels for cpu: in a clone, build them with" in run_main(decode, monkeypatch, "--device", "cpu")


def test_smoke_finds_what_is_wrong(monkeypatch, capsys):
    """A wrong result, one that changes, and an op that does not end. The others are tried all the same."""
    right, num_masks = specvis_kernels.tree_mask, 0

    @functools.wraps(right)
    def replaced(*args, backend=None, **kwargs):
        nonlocal num_masks
        mask = right(*args, backend=backend, **kwargs)
        num_masks += backend == "cpu" and mask.dtype == torch.bool
        return ~mask if backend == "cpu" and mask.dtype == torch.bool and num_masks > 1 else mask

    monkeypatch.setattr(specvis_kernels, "tree_mask", replaced)
    for says in ("it differs from run to run", r"output 0 of tree_mask \(.*\[\(0, .*, \[\[0, 0, 0\]\]\)\]"):
        with pytest.raises(AssertionError, match=says):
            smoke.try_op("tree_mask")
    monkeypatch.setattr(smoke, "SECONDS", 0.01)
    assert smoke.alone("tree_links") == (False, "tree_links: after 0.01 s it still runs\n")
    monkeypatch.setattr(smoke, "alone", lambda op, watch=(): (op != "tree_mask", f"tried {op} {watch[:1]}\n"))
    monkeypatch.setattr(shutil, "which", str)
    assert run_main(smoke, monkeypatch) == 3
    said = capsys.readouterr().out
    assert said.endswith("wrong: tree_mask\n") and "tree_mask, watched:\ntried tree_mask ('compute-san" in said
    assert said.count("tried") == len(cases.CASES) + 1


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


def test_a_record_says_where_the_time_of_a_picture_goes():
    said = []
    subject = decode.Subject.of_pipeline(tiny_pipeline(), ["red heart", "blue heart", "plain heart"], WIDE)
    records = decode.measure(subject, decode.timed_methods(["vanilla", "jacobi:window=4", "eagle1"]), 2, 0, said.append)
    assert [r["method"] for r in records] == ["vanilla", "jacobi:window=4", "eagle1", "released eagle1"] and said
    for r in records:
        assert (r["size"], r["dtype"], r["batch"], r["timed"], r["turns"]) == ("shipped", "float32", 2, "pictures", 2)
        assert r["picture_s"] > 0 and r["step_ms"] > 0 and r["imposed_tau"] is None and r["times_vanilla"] > 0
        assert sum(r[part] for part in decode.PARTS) == pytest.approx(1, abs=1e-3) and r["rest"] > 0
        assert r["target"] > 0 and (r["draft"] > 0) == ("eagle1" in r["method"])
        assert (r["ops"] > 0) != r["method"].startswith("released")
        assert r["method"] in decode.line_of(r)
    assert [r["times_released"] is None for r in records] == [True, True, False, True]
    assert (records[0]["tau"], records[0]["times_vanilla"]) == (1, 1) and records[1]["tau"] > 1


@pytest.mark.parametrize("text", ["jacobi:window=4", "eagle1", "eagle2:width=4", "lantern:k=6:delta=0.4:width=4"])
def test_random_weights_accept_what_was_recorded(text):
    subject, recorder = subject_of("B", prompts=["red heart", "blue heart", "plain heart"])
    method = parse_method(text)
    assert recorder(method).num_accepted.max() > 0
    for contender in decode.contenders_of([method]):
        run = decode.run(subject, contender, 3, 0)
        assert run.tau == pytest.approx(recorder.tau(method)), contender.name


def test_steps_of_larger_sizes_are_timed_in_the_middle_of_pictures(tmp_path):
    subject, _ = subject_of("L")
    methods = decode.timed_methods(["vanilla", "lantern:k=6:width=3:nodes=8"])
    records = decode.measure(subject, methods, 2, 0, lambda text: None, ["fast", "eager"])
    assert {r["timed"] for r in records} == {"steps"} and layers.USE_KERNELS
    assert [r["method"].endswith(" (eager)") for r in records] == [False] * 3 + [True] * 3
    assert records[0]["picture_s"] == pytest.approx(16 * records[0]["step_ms"] / 2e3, rel=1e-3)
    assert records[1]["picture_s"] == pytest.approx(
        16 * records[1]["step_ms"] / 2e3 / records[1]["imposed_tau"], rel=1e-3)
    decode.plot(records, tmp_path / "parts.png")
    assert (tmp_path / "parts.png").stat().st_size > 1000


def test_each_sample_finds_the_same_counts_and_the_others_time_is_subtracted(monkeypatch):
    found = []

    def call(counts):
        found.append(counts.tolist())
        counts += 5

    harness.time(call, (torch.zeros(2),), 0.01, rewind=torch.Tensor.zero_)
    assert len(found) > 20 and all(counts == [0, 0] for counts in found)
    # a replay takes as long as what it replays says
    monkeypatch.setattr(harness, "captured", lambda calls: lambda: sum(call() for call in calls))
    assert harness.between([lambda: 3.0, lambda: 4.0], lambda: 50.0)() == 7
    assert harness.between([lambda: -1.0], lambda: 50.0)() == 1e-3


def test_steps_on_a_gpu_are_counted_and_its_graphs_captured_before(monkeypatch):
    """Progress is reported once in four steps there. A CPU stands for the GPU."""
    looks, clock = [], SimpleNamespace(is_cuda=True, now=lambda: looks.append(1) or len(looks))
    monkeypatch.setattr(decode, "Clock", lambda device: clock)
    monkeypatch.setitem(POLL, "cpu", 4)
    subject, _ = subject_of("B", grid=8)
    for contender in decode.contenders_of(decode.timed_methods(["vanilla", "lantern:k=6:width=3:nodes=8"])):
        looks.clear()
        run = decode.run(subject, contender, 2, 0, max_steps=6)
        assert run.num_steps == (8 if contender.name.startswith("lantern") else 6) and run.tau >= 1
        assert len(looks) == 3  # the device is waited for before, after the first graph, and at the end
    assert contender.is_released and len(decode.contenders_of([contender.method], ours=True)) == 1


@pytest.mark.parametrize("family", ["Llama", "Chameleon"])
def test_a_familys_steps_are_timed_beside_generate(family, tmp_path, monkeypatch, capsys):
    """On a CPU nothing is compiled. A target that has only its modules is timed once."""
    pytest.importorskip("transformers")
    monkeypatch.setitem(families.MODELS, "tiny", (family, *families.MODELS["tiny"][1:]))
    arguments = ["families", "--models", "tiny", "--batch", "2", "--steps", "3", "--runs", "1", "--json"]
    for is_packed, name in ((True, "packed.json"), (False, "modules.json")):
        if not is_packed:
            monkeypatch.setattr(families.Target, "pack_layers", lambda target: None)
        monkeypatch.setattr("sys.argv", [*arguments, str(tmp_path / name)])
        families.main()
        rows = json.loads(Path(tmp_path, name).read_text())["rows"]
        assert [(r["what"], r["reader"]) for r in rows] == [(families.WEIGHTS, ""), ("generate", "modules"), *(
            (method, reader) for method in ("vanilla", "jacobi:window=16")
            for reader in ("modules", "decoder_layers")[:1 + is_packed])]
        assert all(r["step_ms"] >= r["min_ms"] > 0 and r["times_weights"] >= 1 for r in rows)
    assert "generate, compiled: left out" in capsys.readouterr().out


def test_a_forward_is_timed_beside_its_limits(tmp_path, monkeypatch, capsys):
    """The interpreter claims to have llama.cpp, and answers each question with a millisecond."""
    python, file = tmp_path / "python", tmp_path / "forward.json"
    python.write_text("#!/bin/sh\n[ $1 = -c ] && echo 1.2 && exit\necho 0\nwhile read line; do echo '[1.0]'; done\n")
    python.chmod(0o755)
    monkeypatch.setattr("sys.argv", ["forward", "--sizes", "tiny", "--seconds", "0", "--llama", str(python), "--json",
                                     str(file)])
    forward.main()
    written = json.loads(file.read_text())
    best = forward.best_of(written["rows"])
    names = {f"{what}, threads: {threads}" for what in ("decoder_layers", "llama.cpp")
             for threads in (1, torch.get_num_threads())} | {"PyTorch"}
    assert set(best) == {(name, nodes) for name in names for nodes in forward.NODES}
    assert all(r["median_ms"] >= r["min_ms"] > 0 and r["of_bandwidth"] > 0 and r["of_product"] > 0
               for r in written["rows"])
    assert {r["median_ms"] for (name, _), r in best.items() if "llama" in name} == {1}
    assert written["machine"]["llama_cpp"] == "1.2"
    assert all(rate > 0 for rate in written["limits"]["tiny"].values())
    assert "| 33 |" in capsys.readouterr().out


PYTHON = """#!/bin/bash
case "$*" in
    "-c import xdist"*) exit 1 ;;
    "-c import sys"*"get_device_capability"*) [[ ! $NO_GPU ]] && echo 9.0 || exit 1 ;;
    *setup.py*) [[ ! $NO_BUILD ]] || exit 1; echo built > specvis_kernels/_ops_cuda.so ;;
    *"--groups kernels"*) echo row >> "$OUT/ops.json"; (($(wc -l < "$OUT/ops.json") >= 3)) || exit 75 ;;
    *"-k (cuda or oracle)"*) echo "1 failed"; exit 1 ;;
    *smoke*) exit ${SMOKE:-0} ;;
    *decode*) [[ ! $HANGS ]] || exec sleep 60 ;;
    *) echo "did $* in $PYTHONPATH" ;;
esac
"""


@pytest.fixture
def gpu_script(tmp_path):
    """Runs benchmarks/gpu.sh where programs of these names do as if: its exit status, what it said, and its parts."""
    if not shutil.which("bash") or not shutil.which("timeout"):
        pytest.skip("needs bash, timeout")
    files = {"benchmarks/gpu.sh": (harness.ROOT / "benchmarks/gpu.sh").read_text(), "setup.py": "", "csrc/a.cu": "",
             "specvis_kernels/verify_tree.py": "", "bin/python3": PYTHON,
             "bin/compute-sanitizer": "#!/bin/sh\necho watched $*"}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)

    def run(*arguments, out="out", **variables):
        variables |= {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "OUT": str(tmp_path / out)}
        done = subprocess.run(["bash", "benchmarks/gpu.sh", *arguments], cwd=tmp_path, env=variables, text=True,
                              stdout=subprocess.PIPE)
        table = Path(tmp_path, out, "summary.txt").read_text().splitlines()[1:]
        return done.returncode, done.stdout, {name: status for name, _, status in (
            line.split(maxsplit=2) for line in table)}

    return run


def test_no_part_of_the_gpu_script_stops_the_next(gpu_script, tmp_path):
    """One part fails and a tool is missing. A row that broke the device is followed by the others."""
    status, said, parts = gpu_script()
    assert status == 1 and parts.pop("tests") == "failed: 1"
    assert {parts.pop(f"ncu-{op}") for op in ("draft_frontier", "verify_logits", "tree_attention")} == {
        "not there: ncu"}
    assert list(parts) == ["build", "smoke", "ops", "families", "graphs", "loops", "decode", "memcheck", "racecheck",
                           "baselines", "triton", "initcheck", "synccheck", "others"] and set(parts.values()) == {"ok"}
    assert Path(tmp_path, "out/ops.json").read_text() == "row\n" * 3 and "watched --tool racecheck" in said
    assert f"in {tmp_path}:{tmp_path}/python\n" in said  # nothing need be installed


def test_the_gpu_script_stops_where_an_op_is_wrong(gpu_script):
    assert gpu_script("ops", NO_BUILD="1")[2] == {"build": "failed: 1"}
    status, _, parts = gpu_script(SMOKE="3")
    assert status == 1 and list(parts) == ["build", "smoke"] and parts["smoke"] == "failed: 3"
    assert gpu_script("smoke", "ops", SMOKE="1")[2] == {"smoke": "failed: 1", "ops": "ok"}  # another reason


def test_the_gpu_script_ends_in_time(gpu_script):
    status, said, parts = gpu_script("memcheck", "decode", LIMIT="12", HANGS="1")
    assert status == 1 and parts == {"build": "ok", "decode": "out of time", "memcheck": "no time left"}


@pytest.mark.parametrize("name, value, message", [
    ("LIMIT", "10m", "LIMIT must be seconds, got 10m"), ("OUT", "/proc/x", "OUT=/proc/x is no folder to write to"),
    ("BEFORE", "nowhere", "BEFORE=nowhere is no folder")])
def test_a_wrong_variable_of_the_gpu_script_is_named(name, value, message):
    done = subprocess.run(["bash", "benchmarks/gpu.sh", "build"], cwd=harness.ROOT, env=os.environ | {name: value},
                          capture_output=True, text=True)
    assert done.returncode == 2 and message in done.stdout


def test_a_library_for_a_gpu_is_built_without_one_and_travels(gpu_script, tmp_path):
    library = tmp_path / "specvis_kernels/_ops_cuda.so"
    status, _, parts = gpu_script("build", out="before", NO_GPU="1", TORCH_CUDA_ARCH_LIST="9.0")
    assert status == 0 and parts == {"build": "ok"} and library.read_text() == "built\n"
    library.unlink()
    status, said, parts = gpu_script("smoke", BEFORE="before")
    assert status == 0 and parts == {"smoke": "ok"} and library.read_text() == "built\n"
    (tmp_path / "csrc/a.cu").write_text("changed")
    assert gpu_script("smoke", BEFORE="before")[2] == {"build": "ok", "smoke": "ok"}


def test_the_papers_tables_are_the_file_and_every_row_is_a_method_that_is_run():
    page = papers.PAGE.read_text()
    assert page == tables.written(page, papers.BLOCKS, captions=False), "python -m benchmarks.papers --tables"
    wanted, run = papers.runs(), {key for key in papers.results()}
    assert set(wanted) == run and len(wanted) > 60
    for text, temperature in wanted:
        assert parse_method(text) and temperature in (0, 1)
    names = {path.stem for path in papers.PUBLISHED.glob("*.csv")}
    assert names == {"tables", *(table.name for table in papers.TABLES)}
    for table in papers.TABLES:
        rows = list(papers.rows_of(table))
        assert rows and all(set(table.columns.values()) <= row.keys() for row, _ in rows), table.name
        assert {of for of, _ in table.measured.values()} == table.methods.keys()


def test_papers_methods_are_measured_in_turns_and_gone_on_with(monkeypatch):
    monkeypatch.setattr(papers, "PROMPTS", ["red heart", "blue heart"])
    records, kept, keys = {}, [], [("eagle1", 1.0), ("jacobi:window=4", 1.0), ("lantern:k=8:width=4", 0.0)]
    pipeline = tiny_pipeline()
    papers.measure(pipeline, keys[:2], 1, records, lambda: kept.append(1))
    first = json.loads(json.dumps(records["eagle1", 1.0]))
    papers.measure(pipeline, keys, 3, records, lambda: kept.append(1))
    assert len(kept) == 9 and list(records) == keys
    for record in records.values():
        assert {len(value) for value in record.values() if isinstance(value, list)} == {3}
        assert min(record["seconds"]) > 0 and min(record["tau"]) >= 1 and papers.speedup(record) > 0
    assert [records["eagle1", 1.0][name][:1] for name in ("tau", "seconds")] == [first["tau"], first["seconds"]]
    assert records["jacobi:window=4", 1.0]["tv_excess"] == [0, 0, 0]
    assert papers.cell(records["eagle1", 1.0], "tau").count("±") == 1 and papers.cell(None, "tau") == "-"
