"""A model's folder and a file of prompts that the tests of commands draw with."""
import dataclasses

import pytest
from click.testing import CliRunner

from specvis.cli.main import main
from specvis.models.mar import MAR
from tests.tiny import tiny_pair, tiny_pipeline

LINES = "red heart\n\n# of two words\n  Blue   heart\nred heart\nheart\n"


def run(*arguments, status=None, group=main):
    """What a command answers. Its exit status must be this one, if one is given."""
    result = CliRunner().invoke(group, [str(argument) for argument in arguments])
    assert status in (None, result.exit_code), result.output
    return result


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    pipeline = tiny_pipeline()
    pipeline.words.vocabulary = ["", "fluent-3d", "red", "blue", "heart"]
    pipeline.small = None
    pipeline.save(folder)
    pair = tiny_pair()
    pair.mar, pair.mar_draft = (MAR(dataclasses.replace(m.config, clip_sample_range=3.0))
                                for m in (pair.mar, pair.mar_draft))
    pair.save(folder)
    return folder


@pytest.fixture
def lines(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text(LINES)
    return file
