"""Many pictures by workers on Ray, of which one is killed."""
import dataclasses
import json
import os
import signal

import pytest
from PIL import Image

from specvis.cli import workers
from specvis.cli.workers import Crew
from specvis.pipelines.discrete import Pipeline
from tests.cli.conftest import lines  # noqa: F401
from tests.cli.test_scale import generate, pictures
from tests.tiny import tiny_pipeline


def test_pictures_are_the_same_whoever_draws_them_and_whoever_is_killed(lines, tmp_path, monkeypatch, request):  # noqa: F811
    pytest.importorskip("ray")
    ray = workers.imported()
    request.addfinalizer(ray.shutdown)
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")  # once for both runs
    config = dataclasses.replace(tiny_pipeline().gpt.config, grid=8)  # slower, so that no share ends at once
    pipeline = Pipeline(config, tiny_pipeline().tokenizer.config, ["", "fluent-3d", "red", "blue", "heart"])
    pipeline.save(tmp_path / "weights")
    killed, original = [], Crew.take

    def take(self, seat, keep):
        original(self, seat, keep)
        if seat.share and not killed:  # it has finished its first picture, and draws the second
            killed.append(int(seat.name.split()[0]))
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(Crew, "take", take)
    options = tmp_path / "weights", "--method", "vanilla", "-n", 2, "--batch", 1
    assert generate(lines, tmp_path / "0", *options).exit_code == 0
    result = generate(lines, tmp_path / "2", *options, "--workers", 2)
    assert result.exit_code == 0 and "8 of 8 pictures, " in result.output, result.output
    assert f"worker {killed[0]} on " in result.output and "is replaced: its process ended" in result.output
    (tmp_path / "1").mkdir()
    settings, *some = (tmp_path / "2" / "manifest.jsonl").read_text().splitlines()
    for line in [line for line in some if json.loads(line)["number"] <= 6]:  # one worker draws two of them
        name = json.loads(line)["file"]
        (tmp_path / "1" / name).write_bytes((tmp_path / "2" / name).read_bytes())
        settings += f"\n{line}"
    (tmp_path / "1" / "manifest.jsonl").write_text(settings + "\n")
    result = generate(lines, tmp_path / "1", *options, "--workers", 1)
    assert result.exit_code == 0 and "8 of 8 pictures (6 were there)" in result.output, result.output
    assert pictures(tmp_path / "0") == pictures(tmp_path / "1") == pictures(tmp_path / "2")
    assert len(pictures(tmp_path / "0")) == 8
    assert Image.open(tmp_path / "2" / "001-red-heart.png").size == (16, 16)
