"""Folders and files of models that are damaged, foreign or absurd: one CheckpointError that names what is wrong."""
import dataclasses
import itertools
import json
import random
import re
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from specvis.decoding.jacobi import jacobi_decode
from specvis.decoding.methods import METHODS
from specvis.decoding.sampling import Sampling
from specvis.models.kl_vae import KLConfig
from specvis.models.llamagen import GPTConfig
from specvis.models.vq import VQConfig
from specvis.pipelines.checkpoint import CheckpointError, fingerprint, read_weights
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.mar import MARPair
from specvis.pipelines.sources import open_file, open_source
from tests.tiny import TINY, tiny_pair, tiny_pipeline


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    tiny_pipeline().save(folder)
    tiny_pair().save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy of its own, of which a test changes a file."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(file, **values):
    """Give the fields of a JSON file these values; None: remove the field."""
    known = (json.loads(file.read_text()) if file.exists() else {}) | values
    file.write_text(json.dumps({name: value for name, value in known.items() if value is not None}))


def change_weights(file, alter):
    """Put what `alter` makes of a file's last tensor in its place."""
    state = load_file(file)
    name = sorted(state)[-1]
    state[name] = alter(state[name])
    save_file(state, file)
    return name


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.int64])
def test_weights_of_other_dtypes_are_refused(dtype, folder):
    name = change_weights(folder / "gpt.safetensors", lambda weights: weights.to(dtype))
    with pytest.raises(CheckpointError, match=rf"gpt.safetensors: {name} must be in one of float32, .*, got "
                                              rf"{str(dtype)[6:]}"):
        Pipeline.load(folder)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_weights_of_these_dtypes_are_read(dtype, folder):
    change_weights(folder / "gpt.safetensors", lambda weights: weights.to(dtype))
    assert Pipeline.load(folder).gpt.output.weight.dtype == torch.float32


@pytest.mark.parametrize("number, dtype", [("nan", torch.float32), ("-inf", torch.float16), ("1e39", torch.float64)])
def test_weights_that_are_not_finite_are_refused(number, dtype, folder):
    def alter(weights):
        weights = weights.to(dtype)
        weights.view(-1)[-1] = float(number)
        return weights

    name = change_weights(folder / "words.safetensors", alter)
    with pytest.raises(CheckpointError, match=f"words.safetensors: {name} must be finite numbers in float32, got NaN "
                                              "or infinite ones, 1 of [0-9]+"):
        Pipeline.load(folder)


@pytest.mark.parametrize("sizes", [
    {"dim": 65536, "heads": 1024}, {"layers": 1024}, {"vocabulary": 2**19}, {"ffn_multiple": 65536},
    {"grid": 256, "condition_tokens": 4096, "dim": 1024, "heads": 16}])
def test_a_config_that_asks_for_more_than_its_file_holds_takes_no_memory(sizes, folder, monkeypatch):
    change(folder / "config.json", **sizes)
    if "vocabulary" in sizes:
        change(folder / "tokenizer.json", codebook_size=sizes["vocabulary"])
    (folder / "small.json").unlink()
    start = time.process_time()
    with pytest.raises(CheckpointError, match="gpt.safetensors (is of another size|lacks)"):
        Pipeline.load(folder)
    assert time.process_time() - start < 20


@pytest.mark.parametrize("config", [GPTConfig(dim=32, layers=2, heads=2, classes=10), TINY, VQConfig(), KLConfig()])
def test_every_number_of_a_config_is_within_its_limit(config):
    for field in dataclasses.fields(config):
        for value in (-1, 10**12, 10**400, 1e300, 0.5, "3", float("nan"), [1], True, (0,), (10**9,), ()):
            if value in (0.5, 10**12) and "float" in str(field.type):
                continue
            with pytest.raises(ValueError, match=f"{field.name}"):
                dataclasses.replace(config, **{field.name: value})


@pytest.mark.parametrize("file, values, message", [
    ("config.json", {"heads": 0}, "heads must be a whole number within 1..1024, got 0"),
    ("config.json", {"rope_base": 0}, "rope_base must be a number, positive and at most 3.40282e\\+38, got 0"),
    ("tokenizer.json", {"multipliers": [1] * 11}, "multipliers must be 1 to 10 whole numbers within 1..64"),
    ("vocabulary.json", {"words": None}, "missing field 'words'"),
    ("vocabulary.json", {"words": [1, 2]}, "words must be a list of strings"),
    ("vocabulary.json", {"words": []}, "words must be 1 to 1048576, got 0"),
    ("vocabulary.json", {"words": ["", "red"]}, "words.safetensors is of another size"),
    ("pipeline.json", {"text_encoder": 5}, "text_encoder must be a string, got 5"),
    ("pipeline.json", {"top_k": 2.5}, "top_k must be a whole number"),
    ("pipeline.json", {"guidance": "2"}, "guidance must be a number, got '2'"),
    ("mar_scaling.json", {"scale": 0}, "scale must be a positive and finite number in 32 bits, got 0"),
    ("mar_scaling.json", {"scale": float("nan")}, "scale must be a positive and finite number in 32 bits, got nan"),
    ("mar_scaling.json", {"shift": [0.0, float("inf")]}, "shift must be a list of finite numbers"),
    ("mar_scaling.json", {"shift": 1.0}, "shift must be a list of finite numbers"),
])
def test_a_wrong_config_is_named(file, values, message, folder):
    change(folder / file, **values)
    with pytest.raises(CheckpointError, match=message):
        (MARPair if "mar" in file else Pipeline).load(folder)


@pytest.mark.parametrize("file", ["config.json", "vocabulary.json", "mar_scaling.json"])
def test_deep_json_is_an_error(file, folder):
    (folder / file).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match=f"{file} cannot be read as"):
        (MARPair if "mar" in file else Pipeline).load(folder)


def test_a_scaling_of_other_channels_is_refused(folder):
    change(folder / "mar_scaling.json", shift=[0.0, 0.0])
    with pytest.raises(ValueError, match="shift of the scaling must be 4 numbers, one a channel, got 2"):
        MARPair.load(folder)


@pytest.mark.parametrize("table, message", [
    (torch.zeros(64, 3), "must be uint16 or int32"), (torch.zeros(64, 0, dtype=torch.int32), "at least one column"),
    (torch.full((64, 3), 64, dtype=torch.int32), r"must be codes within \[0, 64\), got 64"),
    (torch.full((64, 3), -1, dtype=torch.int32), r"must be codes within \[0, 64\), got -1")])
def test_a_wrong_table_of_neighbors_is_refused(table, message, folder):
    save_file({"neighbors": table}, folder / "neighbors.safetensors")
    with pytest.raises(CheckpointError, match=message):
        Pipeline.load(folder)


def hurt(content: bytes, rng: random.Random) -> bytes:
    """Some bytes changed, a part removed or twice there, or the end cut off."""
    content, at = bytearray(content), rng.randrange(len(content))
    kind = rng.randrange(5)
    if kind == 0:
        return bytes(content[:at])
    if kind == 1:
        del content[at: at + rng.randrange(1, 64)]
    elif kind == 2:
        content[at:at] = content[at: at + rng.randrange(1, 64)]
    else:
        for _ in range(rng.randrange(1, 9)):
            content[rng.randrange(len(content))] = rng.randrange(256)
    return bytes(content)


@pytest.mark.filterwarnings("error")  # nothing is said beside the error
@pytest.mark.parametrize("suffix, legacy, times", [(".pth", False, 500), (".pth", True, 500), (".safetensors", False,
                                                                                             400)])
def test_hurt_checkpoints_raise_a_checkpoint_error_or_hold_tensors(suffix, legacy, times, tmp_path):
    path, rng = tmp_path / f"whole{suffix}", random.Random(0)
    state = {"a.weight": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.float16)}
    if suffix == ".pth":
        torch.save({"model": state, "step": 3}, path, _use_new_zipfile_serialization=not legacy)
    else:
        save_file(state, path)
    whole, refused = path.read_bytes(), 0
    for number in range(times):
        path = tmp_path / f"{number}{suffix}"  # another one each time: files stay mapped
        path.write_bytes(hurt(whole, rng))
        try:
            found = read_weights(path)
        except CheckpointError as error:
            assert "\n" not in str(error)
            refused += 1
        else:
            assert all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items())
        path.unlink()
    assert refused > times / 4
    with pytest.raises(CheckpointError, match="does not exist"):
        read_weights(path)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_without_values_are_refused(tmp_path):
    for weight, what in ((torch.empty(2, device="meta"), "one without"), (torch.ones(2).to_sparse(), "a sparse one"),
                         (torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "a nested one")):
        torch.save({"weight": weight}, tmp_path / "a.pth")
        with pytest.raises(CheckpointError, match=f"a.pth: weight must be a tensor with values, got {what}"):
            read_weights(tmp_path / "a.pth")


def test_a_models_files_are_known_again_whatever_is_in_them(tmp_path):
    rng, known = random.Random(0), set()
    torch.save({"a": torch.ones(2)}, tmp_path / "pytorch_model.bin")
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    for _ in range(500):
        (tmp_path / "pytorch_model.bin").write_bytes(hurt(whole, rng))
        known.add(fingerprint(tmp_path))
    assert len(known) > 100
    headers = [b"[" * 100_000, b"", b"[]", b"{", *(b'{"a": %s}' % value for value in (
        b"{}", b"3", b'{"data_offsets": [-99, 1]}', b'{"data_offsets": [0, 1e99]}', b'{"data_offsets": "ab"}',
        b'{"data_offsets": [%d, %d]}' % (2 ** 70, 2 ** 71)))]
    for header, more in itertools.product(headers, (b"", b"\n")):
        for length in {len(header), 2 ** 64 - 1}:
            (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + header + more)
            assert fingerprint(tmp_path) not in known
            known.add(fingerprint(tmp_path))


def test_what_is_to_be_converted_may_be_hurt(tmp_path):
    for name, content in (("a.npy", b""), ("a.npz", b"PK\3\4aaaaaaaa"), ("a.npz", b""), ("a.npy", b"x"),
                          ("a.safetensors", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"checkpoint .*{name} cannot be read: "):
            open_file(tmp_path / name)
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="config .*config.json cannot be read: "):
        open_source(tmp_path)


def test_what_python_users_give_wrongly_is_named(folder):
    with pytest.raises(ValueError, match="dtype must be torch.float32, .* or torch.float16, got 'bfloat16'"):
        Pipeline.load(folder, dtype="bfloat16")
    pipeline, pair, one = Pipeline.load(folder), tiny_pair(), ["red heart"]
    request = pipeline.gpt, *pipeline.condition(one)
    sampling, nowhere, empty = pipeline.sampling([0]), folder / "nowhere", folder / "empty"
    empty.mkdir()
    for call, message in (
            (lambda: Pipeline.load("FoundationVision/LlamaGen"), "there is no folder FoundationVision/LlamaGen; the "
             "names of a model hub are not taken: `specvis convert` makes such a folder of published files"),
            (lambda: MARPair.load(nowhere), f"there is no folder {nowhere}; the names"),
            (lambda: MARPair.load(empty), f"folder {empty} must have mar.json; `specvis convert` makes"),
            (lambda: Pipeline.load(folder, "abacus"), f"device must be one that torch {torch.__version__} can use"),
            (lambda: MARPair.load(folder, "abacus"), "device must be one that torch"),
            (lambda: pipeline.tokens(one, "jacobi", sampling, known_tokens=[[1, 2]]), "known_tokens must be an int64 "),
            (lambda: pipeline.tokens(one, "jacobi", None), "sampling must be a Sampling, such as "
             "pipeline.sampling(seeds=[0]), got None"),
            (lambda: jacobi_decode(*request, None, "jacobi"), "sampling must be a Sampling, got NoneType"),
            (lambda: jacobi_decode(*request[:2], None, sampling, "jacobi"), "padding_mask must be a Tensor, got None"),
            (lambda: jacobi_decode(*request, sampling, "jacob"), "unknown method 'jacob'; did you mean jacobi?"),
            (lambda: jacobi_decode(*request, sampling, None), "methods must be of discrete tokens, each a Method or a "
             "name, got NoneType"),
            (lambda: pipeline.pictures([[1] * 16]), "tokens must be an int64 tensor (B, L=16), got list"),
            (lambda: pipeline.pictures(torch.ones(16)), "tokens must be int64 (B, L=16), got float32 (16,)"),
            (lambda: pipeline.pictures(torch.full((1, 16), 64)), "tokens must be within [0, V=64), got 64"),
            (lambda: pair.pictures([[0.0]]), "tokens must be a float32 tensor (B, L=16, C=4), got list"),
            (lambda: pipeline.sampling(0.5), "seeds must be a list of whole numbers, one for each image, got 0.5"),
            (lambda: Sampling.of([0], top_k=2.5), "top_k must be a whole number within 0..2147483647, got 2.5")):
        with pytest.raises(ValueError, match=re.escape(message)):
            call()


def test_a_pipeline_is_one_line(folder):
    assert repr(Pipeline.load(folder)) == (f"Pipeline({folder}: 8 x 8 pixels of 4 x 4 tokens, 64 codes, "
                                           "0.1 million parameters, cpu, float32)")
    assert repr(tiny_pair()) == ("MARPair(8 x 8 pixels of 16 tokens of 4 numbers, 0.1 million parameters, cpu, "
                                 "float32)")


def test_one_method_is_of_all_requests(folder):
    pipeline = Pipeline.load(folder)
    request = pipeline.gpt, *pipeline.condition(["red heart", "heart"]), pipeline.sampling([0, 1])
    named, listed = (jacobi_decode(*request, methods).tokens for methods in ("jacobi", [METHODS["jacobi"]] * 2))
    assert torch.equal(named, listed)
