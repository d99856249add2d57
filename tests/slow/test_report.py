"""The report: runs are kept and gone on with, what they record is right, every section can be written."""
import csv
import dataclasses
import json
import re
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image
from scipy.stats import t

from specvis.cli.main import main
from specvis.decoding.decoded import Step
from specvis.decoding.methods import parse_method
from specvis.models.llamagen import GPTConfig
from specvis.models.vq import VQConfig
from specvis.pipelines.discrete import Pipeline
from specvis.study import jobs as study_module
from specvis.study.discrete import DiscreteStudy, Latency, PictureRun, Recorder
from specvis_kernels import tree_links
from studies import page, quality
from studies.base import Finding, decided, draw_until_decided, pixels
from studies.discrete import FULL, QUICK, DiscreteReport
from studies.general import curve_gap
from studies.page import Section, format_cell
from studies.quality import MORE_SCORES
from studies.report import ITEMS
from tests.studies.test_quality import NETWORK
from tests.tiny import tiny_pipeline

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results" / "report"
PROMPTS = ["red heart", "blue heart", "plain red heart", "heart"]


@pytest.fixture(scope="module")
def pipeline():
    """16 tokens of 1100 codes."""
    tiny = tiny_pipeline()
    config = dataclasses.replace(tiny.gpt.config, vocabulary=1100)
    codes = dataclasses.replace(tiny.tokenizer.config, codebook_size=1100)
    assert isinstance(config, GPTConfig) and isinstance(codes, VQConfig)
    torch.manual_seed(0)
    pipeline = Pipeline(config, codes, tiny.words.vocabulary, dataclasses.replace(config, dim=16, layers=1))
    for gpt in (pipeline.gpt, pipeline.small):
        for weight in (gpt.output.weight, gpt.tok_embeddings.weight):
            weight.data.normal_(std=0.5)
    return pipeline


@pytest.fixture(scope="module")
def weights(pipeline, tmp_path_factory):
    """The same in a folder, with pictures of its prompts."""
    folder = tmp_path_factory.mktemp("weights")
    pipeline.save(folder)
    (folder / "prompts.json").write_text(json.dumps(PROMPTS))
    pixels = np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "prompts.png")
    return folder


@pytest.fixture
def study(pipeline, tmp_path):
    return DiscreteStudy(pipeline, tmp_path / "runs", PROMPTS, images=6, timed=2)


def run(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def small_side(monkeypatch):
    """The network sees the pictures of 8 pixels in 64 instead of 224: what it makes of them plays no part."""
    monkeypatch.setattr(quality, "SIDE", 64)


def refuse(*_):
    raise AssertionError("decoded again")


# --- runs ------------------------------------------------------------------------------------------------------------

def test_a_run_is_done_once_and_kept(study, pipeline, monkeypatch):
    wanted = PictureRun.of("eagle2")
    first = study.pictures(wanted)
    monkeypatch.setattr(pipeline, "tokens", refuse)
    again = DiscreteStudy(pipeline, study.folder, PROMPTS, images=6).pictures(wanted)
    for field in dataclasses.fields(first.decoded)[:-1]:
        a, b = (getattr(p.decoded, field.name) for p in (first, again))
        assert a.dtype == b.dtype and torch.equal(a, b), field.name
    assert torch.equal(first.nodes, again.nodes)
    assert study.pending([wanted, Latency(wanted.method)]) == [Latency(wanted.method, count=2)]


def test_a_run_is_what_the_pipeline_draws(study, pipeline):
    wanted = PictureRun.of("lantern:k=8:delta=0.2", 0.7, count=5, start=3)
    expected = pipeline.tokens([PROMPTS[i % 4] for i in range(3, 8)], wanted.method, study.sampling_of(3, 5, 0.7))
    pictures = study.pictures(wanted)
    assert torch.equal(pictures.decoded.tokens, expected.tokens)
    assert torch.equal(pictures.decoded.num_accepted, expected.num_accepted)
    assert pixels(study, pictures.decoded.tokens).shape == (5, 8, 8, 3)


def test_long_runs_share_batches_with_short_ones(study, pipeline, tmp_path):
    def parts(count, start=0, study=study):
        return [(part.start, part.count) for part in study.parts(PictureRun.of("eagle2", start=start, count=count))]

    assert parts(20) == [(0, 6), (6, 6), (12, 6), (18, 2)] and parts(6) == [(0, 6)]  # as many as the study has
    assert parts(3, start=4) == [(4, 2), (6, 1)]
    many = DiscreteStudy(pipeline, tmp_path / "many", PROMPTS, images=40)
    assert parts(40, study=many) == [(0, 16), (16, 16), (32, 8)]
    assert [(c.start, c.count) for c in study.parts(dataclasses.replace(Latency.of("eagle2"), count=5))] == [
        (0, 2), (2, 2), (4, 1)]


def test_an_interruption_loses_only_the_batch_at_work(study, pipeline, monkeypatch):
    jobs = [PictureRun.of(text) for text in ("eagle2", "cool-sd", "speculative")]
    tokens = pipeline.tokens

    def interrupted(prompts, method, *others):
        if method.name == "cool-sd":
            raise KeyboardInterrupt
        return tokens(prompts, method, *others)

    monkeypatch.setattr(pipeline, "tokens", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study.compute(jobs)
    assert study.pending(jobs) == [PictureRun(job.method, 1.0, 6, 0) for job in jobs[1:]]
    assert not list(study.folder.glob(".*"))
    monkeypatch.setattr(pipeline, "tokens", tokens)
    study.compute(jobs)
    assert study.pending(jobs) == []


def test_a_folder_of_another_study_is_refused(study, pipeline, monkeypatch):
    for change, says in (({"guidance": 3.0}, r"another guidance \(1.2; here it is 3.0\)"),
                         ({"seed": 5}, r"another seed \(0; here it is 5\)"),
                         ({"prompts": PROMPTS[:2]}, "of other prompts: choose")):
        with pytest.raises(ValueError, match=says):
            DiscreteStudy(pipeline, study.folder, **{"prompts": PROMPTS, "images": 6} | change)
    shorter = DiscreteStudy(pipeline, study.folder, PROMPTS, images=3)  # may go on there
    assert shorter.prompts == PROMPTS[:3]
    with pytest.raises(ValueError, match="holds results of another model"):
        DiscreteStudy(tiny_pipeline(), study.folder, PROMPTS, images=6)
    monkeypatch.setattr(study_module.specvis_kernels, "__version__", "9")
    with pytest.raises(ValueError, match=r"another version \(.*; here it is 9\)"):
        DiscreteStudy(pipeline, study.folder, PROMPTS, images=6)


def test_runs_of_other_prompts_or_machines_are_others(study, pipeline, monkeypatch):
    few = DiscreteStudy(pipeline, study.folder, PROMPTS, images=3)
    assert few.path(PictureRun.of("eagle2", count=3)) != study.path(PictureRun.of("eagle2", count=3))
    monkeypatch.setattr(study_module, "machine", lambda device: "another")
    other = DiscreteStudy(pipeline, study.folder, PROMPTS, images=6)
    same, latency = PictureRun.of("eagle2", count=3), Latency(parse_method("eagle2"), count=2)
    assert other.path(same) == study.path(same) and other.path(latency) != study.path(latency)


def test_where_runs_come_from_is_kept(study):
    assert study.origins == []
    study.compute([PictureRun.of("eagle2")])
    origins = study.origins
    assert len(origins) == 1 and study.machine in origins[0] and study.origins_text == origins[0]
    study.compute([PictureRun.of("eagle2"), PictureRun.of("cool-sd")])
    assert study.origins == origins
    record = json.loads(study.record.read_text())
    study.record.write_text(json.dumps(record | {"origins": ["a, cpu, monday", "b, cpu, monday", "b, gpu, monday"]}))
    assert study.origins_text == "a b, cpu, monday; b, gpu, monday"


def test_a_hurt_file_is_named_and_made_again(study, capsys):
    run, latency = PictureRun.of("eagle2", count=2), Latency.of("eagle2")
    tokens, seconds = study.pictures(run).decoded.tokens, study.seconds(latency)
    foreign = {"vectors": np.zeros((2, 3))}
    np.savez(study.folder / "foreign.npz", **foreign)
    other = study.path(PictureRun.of("vanilla", count=3))
    study.pictures(PictureRun.of("vanilla", count=3))
    whole = study.path(run).read_bytes()
    for hurt in (whole[:100], b"", (study.folder / "foreign.npz").read_bytes(), other.read_bytes()):
        study.path(run).write_bytes(hurt)
        study.loaded.clear()
        assert torch.equal(study.pictures(run).decoded.tokens, tokens)
        assert re.search(rf"{study.path(run).name} .*; it is made again\n", capsys.readouterr().err)
    latency, = study.parts(latency)
    for hurt in (b"[]", whole, (study.folder / "foreign.npz").read_bytes()):
        study.path(latency).write_bytes(hurt)
        assert np.array_equal(study.seconds(latency).tokens, seconds.tokens)
        assert capsys.readouterr().err.count("; it is made again\n") == 1
    for text in ("[]", "{}", ""):
        study.record.write_text(text)
        with pytest.raises(ValueError, match="study.json cannot be read: .*; choose another folder, or remove"):
            DiscreteStudy(study.pipeline, study.folder, PROMPTS, images=6)


def test_no_hurt_archive_is_taken_for_another(study):
    """Bytes changed, cut out, put in and exchanged: the archive is refused, or says what it said."""
    run = PictureRun.of("jacobi", count=2)
    study.pictures(run)
    path, random = study.path(run), np.random.default_rng(0)
    whole, wanted, refused = path.read_bytes(), read_arrays_of(study, run), 0
    for _ in range(1500):
        hurt = bytearray(whole)
        at, length = random.integers(len(hurt)), random.integers(1, 40)
        match random.integers(4):
            case 0:
                hurt[at] ^= 1 << random.integers(8)
            case 1:
                del hurt[at: at + length]
            case 2:
                hurt[at: at] = random.bytes(length)
            case 3:
                hurt[at: at + length] = random.bytes(len(hurt[at: at + length]))
        path.write_bytes(hurt)
        try:
            found = read_arrays_of(study, run)
        except study_module.NotWhole:
            refused += 1
        else:
            assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted))
    assert refused > 1000


def read_arrays_of(study, run):
    return [torch.from_numpy(array).double() for array in study.read(run).values()]


def test_single_pictures_are_timed_beside_the_baselines(study, pipeline, monkeypatch):
    calls, tokens = [], pipeline.tokens

    def counted(prompts, method, sampling):
        calls.append((method.name, prompts, sampling.seeds.tolist()))
        return tokens(prompts, method, sampling)

    monkeypatch.setattr(pipeline, "tokens", counted)
    seconds = study.seconds(Latency.of("eagle2"))
    pair = [[("vanilla", [PROMPTS[i]], [i]), ("eagle2", [PROMPTS[i]], [i])] for i in (0, 0, 1)]  # the first warms up
    assert calls == sum(pair, [])
    assert len(seconds.baseline) == len(seconds.method) == len(seconds.tau) == 2 and (seconds.speedup > 0).all()
    assert seconds.tokens.shape == (2, 16)


def test_the_recorder_writes_nodes():
    """Root 0 has the children 1, 2, 3; 2 has 4, 5, and one of the two trees lacks 3. They begin at tokens 0 and 4."""
    links = tree_links(torch.tensor([[-1, 0, 0, 0, 2, 2], [-1, 0, 0, -2, 2, 2]], dtype=torch.int32))
    recorder = Recorder(2, 8)
    nodes, num_accepted = torch.tensor([[3, -1], [2, 5]]).int(), torch.tensor([1, 2]).int()
    recorder(Step(links, torch.tensor([0, 4]), nodes, num_accepted, torch.tensor([True, True])))
    assert recorder.nodes.tolist() == [[6, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 5, 0, 0, 0]]
    recorder(Step(links, torch.tensor([5, 6]), nodes, num_accepted, torch.tensor([False, False])))
    assert recorder.nodes.sum() == 11


def test_nodes_of_a_run(study):
    pictures = study.pictures(PictureRun.of("eagle1"))
    began = pictures.decoded.num_accepted >= 0
    assert torch.equal(pictures.nodes > 0, began) and (pictures.nodes[began] == 26).all()
    assert pictures.accepted_per_step.sum() == pictures.decoded.num_accepted.clamp(min=0).sum()
    assert (study.pictures(PictureRun.of("vanilla")).nodes == 0).all()


# --- sections --------------------------------------------------------------------------------------------------------

class FakeReport:
    """tau and distance of runs, without pictures."""

    def __init__(self, points):
        self.points, self.study = points, self

    def pictures(self, run):
        return SimpleNamespace(tau=self.points[run][0])

    def contrast(self, number, weights):
        return Finding(sum(weight * self.points[run][1] for run, weight in weights.items()), 0.1, 24, True, 24)


def test_curves_are_compared_where_both_are():
    points = {"a": (0.0, 1.0), "b": (2.0, 3.0), "c": (1.0, 0.0), "d": (3.0, 2.0), "e": (9.0, 9.0), "f": (8.0, 9.0)}
    gap, shared = curve_gap(FakeReport(points), "kernel distance", ["b", "a"], ["c", "d"])
    assert gap.value == pytest.approx(2.0) and shared == (1.0, 2.0)
    assert curve_gap(FakeReport(points), "kernel distance", ["a", "b"], ["e", "f"])[0] is None


@NETWORK
def test_a_claim_draws_as_many_pictures_as_decide(study, pipeline, small_side):
    """A clear difference takes the first pictures. Every claim's number is that of the pictures that it says."""
    scope = dataclasses.replace(FULL, images=4, most=16)
    references = np.random.default_rng(0).normal(size=(4, 1280))
    report = DiscreteReport(study, scope, study.folder.parent, references=references, at_work="an item")
    clear = report.contrast("tau", {"lantern:k=250:delta=0.4": 1.0, "vanilla": -1.0})
    assert clear.holds and clear.pictures == 4
    assert not report.contrast("tau", {"vanilla": 1.0, "lantern:k=250:delta=0.4": -1.0}).holds
    runs = {"eagle1": 1.0, "speculative": -1.0}
    taus = {count: sum(weight * study.pictures(PictureRun.of(text, count=count)).decoded.tau
                       for text, weight in runs.items()) for count in (4, 8, 16)}
    finding = report.contrast("tau", runs)
    assert finding.pictures > 4 and finding.value == pytest.approx(taus[finding.pictures].mean().item(), rel=1e-4)
    own = report.contrast("an item's own", runs, lambda run: 2 * report.numbers("tau", run))
    assert own.pictures == finding.pictures and own.value == pytest.approx(2 * finding.value)
    _, error, freedom = quality.mean_and_error(taus[finding.pictures].double().numpy(),
                                               np.arange(finding.pictures) % len(PROMPTS))
    assert finding.half == pytest.approx(t.ppf(1 - 0.05 / 6, freedom) * error)  # three looks, two sides
    greedy = report.contrast("tau", {PictureRun.of("eagle1", 0.0): 1.0, PictureRun.of("speculative", 0.0): -1.0})
    assert greedy.pictures == 4, "more greedy pictures would be the same ones again"
    distance = report.contrast("kernel distance", {"lantern:k=250:delta=0.4": 1.0})
    assert distance.half > 0


def world(number, run):
    """Numbers of a world in which the papers' claims are so."""
    method, rule = run.method, run.method.acceptance
    by_name = {"vanilla": 1.0, "speculative": 1.3, "eagle1": 2.4, "lantern++": 2.6, "eagle2": 1.2, "gsd": 3.4}
    if method.name == "lantern":
        tau = 1.3 + rule.delta * (1 + 0.2 * np.log10(rule.k + 1) + 0.5 * (rule.cutoff == "jsd"))
        tau = 1.22 if rule.metric == "random" else tau
    elif method.name.startswith("adt-tree"):
        adaptation = method.drafts.adaptation
        tau = {True: 1.8, False: 1.19}["lantern" in method.name] + 0.9 * (adaptation.width_step == 10)
        tau -= 0.2 * (adaptation.flat_depth is not None) + 0.3 * (adaptation.start in ("vertical", "random"))
    elif method.name == "jacobi":
        tau = 3.0 if rule.coupling == "none" else 3.5
    else:
        tau = 1.6 + rule.omega if method.name == "cool-sd" else by_name[method.name]
    return {"tau": tau, "speed": tau + 0.1 * ("width_step=3" in method.label), "nearest name": 0.5,
            "mean depth": 2.0 if "adt" in method.name else 5.0, "kernel distance": tau - 1,
            "tv_excess": 1 + np.log10(rule.k) if rule.residual == "relaxed" else 0.5}[number]


@NETWORK
@pytest.mark.parametrize("sign, agree, differ", [(1, 35, 0), (-1, 5, 29)])
def test_the_verdicts_of_claims_have_the_papers_signs(sign, agree, differ, weights, tmp_path, small_side, monkeypatch):
    """In a world in which all is as the papers say they agree; turned round only those that ask for no difference."""
    def contrast(report, number, weights, **asked):
        runs = {PictureRun.of(run) if isinstance(run, str) else run: weight for run, weight in weights.items()}
        value = sign * sum(weight * world(number, run) for run, weight in runs.items())
        return draw_until_decided(lambda count: (value, 1e-9, 9), [12], **asked)

    def faster(report, a, b, temperature=1.0):
        return contrast(report, "speed", {a: 1.0, b: -1.0})

    monkeypatch.setattr(DiscreteReport, "contrast", contrast)
    monkeypatch.setattr(DiscreteReport, "faster", faster)
    names = ("lantern-table-2,lantern-table-3,lantern-table-4,lantern-figures-5-7,adt-table-1,adt-table-5,adt-figure-8,"
             "cool-table-1,cool-figure-4,jacobi-relaxed,latency")
    assert run("report", "--quick", "--timed", 2, "--only", names, "--out", tmp_path, "--model", weights).exit_code == 0
    pages = "\n".join((tmp_path / f"{name}.md").read_text() for name in names.split(","))
    found = {word: re.findall(rf"^- \*\*{word}\*\*: (.*?) Here:", pages, re.M) for word in (
        "agrees", "does not agree", "not decided")}
    assert (len(found["agrees"]), len(found["does not agree"])) == (agree, differ)


def test_what_is_decided(tmp_path):
    assert decided(2, 1) is True and decided(-2, 1) is False and decided(1, 2) is None
    assert [format_cell(x) for x in (0.18349, 1.23456, 123.456, 5, None)] == [
        "0.183", "1.23", "123.5", "5", "not measured"]
    section = Section("table", "A table", tmp_path, "origin")
    words = {True: "agrees", False: "does not agree", None: "not decided"}
    for holds, word in words.items():
        section.claim(f"claim {word}", holds, "from 1 to 2")
    assert all(f"**{word}**: claim {word}. Here: from 1 to 2." in section.markdown() for word in words.values())


@NETWORK
def test_every_section_can_be_written(weights, tmp_path, small_side, monkeypatch):
    result = run("report", "--quick", "--out", tmp_path, "--model", weights)
    assert result.exit_code == 0, result.output
    cover = (tmp_path / "README.md").read_text()
    left_out = [name for name, item in ITEMS.items() if not item.quick]
    others = run("report", "--quick", "--out", tmp_path, "--model", weights, "--only", ",".join(left_out))
    assert others.exit_code == 0, others.output
    assert (tmp_path / "README.md").read_text() == cover
    for name in ITEMS:
        text = (tmp_path / f"{name}.md").read_text()
        assert (f"({name}.md)" in cover) == ITEMS[name].quick and text.startswith(f"## {ITEMS[name].title}")
        assert "nan" not in text.replace("nano", ""), text
        for link in [part.split(")")[0] for part in text.split("](")[1:]]:
            assert (tmp_path / link).stat().st_size > 0, link
    yes, no, unknown = (cover.count(f"| {finding} |") for finding in ("agrees", "does not agree", "not decided"))
    verdicts = f"{yes} agree, {no} do not agree, {unknown} are not decided"
    assert yes + no + unknown == 7 and f"| {verdicts} |" in cover
    assert f"of {yes + no + unknown} claims of the papers {verdicts}" in result.output
    (tmp_path / "README.md").unlink()
    monkeypatch.setattr(page, "save_figure", lambda figure, path: plt.close(figure))  # they are there
    again = run("report", "--quick", "--out", tmp_path, "--model", weights)
    assert again.exit_code == 0 and ", T = " not in again.output  # nothing is decoded again
    assert "lantern-table-3" in (tmp_path / "README.md").read_text()


def test_the_committed_report_is_whole():
    cover = (RESULTS / "README.md").read_text()
    for item in ITEMS.values():
        text = (RESULTS / f"{item.name}.md").read_text()
        assert text.startswith(f"## {item.title}") and f"[{item.title}]({item.name}.md)" in cover
        for link in [part.split(")")[0] for part in text.split("](")[1:]]:
            assert (RESULTS / link).stat().st_size > 0, link


def test_k_is_as_large_a_part_of_the_codebook_as_the_papers():
    assert [dataclasses.replace(FULL, codes=codes).k for codes in (16384, 4096, 64, 65536)] == [
        (100, 300, 1000), (25, 75, 250), (1, 4), (100, 300, 1000)]
    assert dataclasses.replace(FULL, codes=4096).about_k(100, 1000) == (
        "Here k is 25, 250 of 4096 codes: as large a part as 100, 1000 of LlamaGen's 16384.")


def test_a_claim_has_no_fewer_pictures_than_the_tables(study):
    report = DiscreteReport(study, dataclasses.replace(FULL, images=16, most=4), study.folder, references=None)
    assert report.looks(16, 4, 1.0) == [16] and report.looks(16, 13, 1.0) == [16]
    assert report.looks(16, 48, 1.0) == [16, 32, 48] and report.looks(16, 48, 0.0) == [4]


def test_seconds_are_of_eight_pictures_or_more(study, monkeypatch):
    """The machine's drift decided a claim on four."""
    monkeypatch.setattr("studies.discrete.draw_until_decided", lambda estimate, counts, **asked: counts)
    for most, counts in ((12, [8]), (32, [8]), (400, [8, 16, 32, 64, 128])):
        report = DiscreteReport(study, dataclasses.replace(FULL, most=most), study.folder, references=None)
        assert report.faster("jacobi", "vanilla") == counts


def test_a_quick_report_is_shorter(study):
    def cost(items, scope):
        jobs = {job for item in items for job in item.jobs(scope)}
        return sum(dataclasses.replace(job, count=job.count or (
            scope.images if isinstance(job, PictureRun) else scope.timed)).cost(study) for job in jobs)

    assert 0 < 5 * cost([item for item in ITEMS.values() if item.quick], QUICK) < cost(ITEMS.values(), FULL)


@pytest.mark.parametrize("arguments, message", [
    (["--only", "lantern-table-9"], "unknown table or figure 'lantern-table-9'; known: trade-off, jacobi-window"),
    (["--only", "trade-off,magic"], "unknown table or figure 'magic'"),
    (["--images", "4"], "images must be at least 12, got 4: with fewer"),
    (["--images", "14"], "images must be at most 4 or a multiple of it, the number of prompts, got 14"),
    (["--score", "clip"], "score must be like clip=my_module:function, got 'clip'"),
    (["--score", "clip=json:dumps"], "got 'clip=json:dumps'"),
    (["--score", "kernel distance=numpy:zeros"], "got 'kernel distance=numpy:zeros'"),
    (["--score", "clip=json:nothing"], "score must be like clip=my_module:function, got 'clip=json:nothing': module"),
    (["--top-p", "0"], "top_p must be within (0, 1], got 0.0"),
])
def test_bad_input_is_one_clear_line(weights, tmp_path, arguments, message):
    result = run("report", *arguments, "--out", tmp_path / "out", "--model", weights)
    assert result.exit_code == 2 and message in result.output, result.output
    assert not (tmp_path / "out").exists()


@NETWORK
def test_one_more_score(weights, tmp_path, monkeypatch, small_side):
    (tmp_path / "my_scores.py").write_text("def red(pictures, prompts):\n    assert prompts[1] == 'blue heart'\n"
                                           "    return pictures[..., 0].mean((1, 2))\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(MORE_SCORES, "redness", None)  # to be taken out again
    result = run("report", "--only", "lantern-table-4", "--quick", "--score", "redness=my_scores:red", "--out",
                 tmp_path / "out", "--model", weights)
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader(open(tmp_path / "out" / "lantern-table-4.csv")))
    assert all(50 < float(row["redness"]) < 200 and row["redness differs"] in ("yes", "no") for row in rows)
    taken = run("report", "--score", "tau=my_scores:red", "--out", tmp_path / "out", "--model", weights)
    assert taken.exit_code == 2 and "score must have a name of its own, not a column's" in taken.output


def test_prompts_without_their_pictures_are_refused(weights, pipeline, tmp_path):
    pipeline.save(tmp_path / "bare")
    result = run("report", "--out", tmp_path / "out", "--model", tmp_path / "bare")
    assert result.exit_code == 2 and "weights must have prompts.json" in result.output
    for content in ("[]", "{bad", "[1]", "[" * 100_000):
        (tmp_path / "bare" / "prompts.json").write_text(content)
        result = run("report", "--out", tmp_path / "out", "--model", tmp_path / "bare")
        assert result.exit_code == 2 and "weights must have prompts.json" in result.output
    (tmp_path / "bare" / "prompts.json").write_text(json.dumps(PROMPTS[:3]))
    Image.open(weights / "prompts.png").save(tmp_path / "bare" / "prompts.png")
    result = run("report", "--out", tmp_path / "out", "--model", tmp_path / "bare")
    assert result.exit_code == 2 and "must be a square of as many pictures" in result.output
