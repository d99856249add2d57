"""The tuner: what it tries, what it prints, and that all its methods draw plain decoding's pictures."""
import pytest
import torch

from specvis.cli.runs import timed_in_turns
from specvis.cli.tune import methods_for
from specvis.decoding.methods import parse_method
from specvis.pipelines.discrete import Pipeline
from tests.cli.conftest import run
from tests.tiny import tiny_pipeline


def test_refreshes_are_tried_where_there_is_a_small_model():
    pipeline = tiny_pipeline()
    labels = [m.label for m in methods_for(pipeline)]
    assert labels[0] == "vanilla" and {"jacobi:window=4", "jacobi:window=4:refresh=2"} <= set(labels)
    assert all(parse_method(label).seed_exact for label in labels[1:])
    pipeline.small = None
    assert [m.label for m in methods_for(pipeline)] == [label for label in labels if "refresh" not in label]


def test_works_take_turns():
    done = []
    seconds = timed_in_turns([lambda turn, name=name: done.append((name, turn)) for name in "ab"], 3)
    assert done == [(name, turn) for turn in range(3) for name in "ab"]
    assert [len(own) for own in seconds] == [3, 3] and all(one >= 0 for own in seconds for one in own)


def test_the_fastest_is_named(weights, monkeypatch):
    drawn, tokens = {}, Pipeline.tokens

    def watched(self, prompts, method, sampling, progress):
        decoded = tokens(self, prompts, method, sampling, progress)
        drawn.setdefault(method.label, []).append((len(prompts), sampling.seeds.tolist(), decoded.tokens))
        return decoded

    monkeypatch.setattr(Pipeline, "tokens", watched)
    result = run("tune", "--prompt", "red heart", "--prompt", "blue heart", "--batch", 2, "--turns", 3, "--model",
                 weights, status=0)
    head, *lines, _, last = result.stdout.splitlines()
    assert head.split() == ["method", "tau", "seconds", "speedup"]
    rows = {label: [float(number) for number in numbers] for label, *numbers in map(str.split, lines)}
    assert rows["vanilla"][0] == rows["vanilla"][2] == 1 and rows.keys() == drawn.keys()
    best = max(rows, key=lambda label: rows[label][2])
    assert last == f"fastest here, 2 at once: --method {best}, {rows[best][2]:.2f} times plain decoding"
    for calls in drawn.values():  # the first is not timed
        assert [(count, seeds) for count, seeds, _ in calls] == [(2, [0, 1]), (2, [0, 1]), (2, [2, 3]), (2, [4, 5])]
        assert all(torch.equal(own, other) for (*_, own), (*_, other) in zip(calls, drawn["vanilla"]))


@pytest.mark.parametrize("arguments, message", [
    (["--turns", "0"], "0 is not in the range 1<=x<=1000"), (["--top-p", "0"], "top_p must be within (0, 1], got 0.0"),
    (["--prompt", "zebra"], "zebra")])
def test_bad_input(weights, arguments, message):
    assert message in run("tune", *arguments, "--model", weights, status=2).output
