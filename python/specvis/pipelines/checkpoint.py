"""Weights from files: safetensors, or PyTorch's own format, of which no code is run."""
import hashlib
import json
import re
import struct
import warnings
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from ..models.sizes import MAX_WORDS

KNOWN = (".json", ".safetensors", ".bin", ".model")  # files of a model
FAMILY_FILES = (*KNOWN, ".jinja", ".txt", ".npy")     # of one of transformers' families
END = 1 << 12  # bytes at each end of a tensor by which it is known again

WRAPPINGS = ("model", "module", "state_dict")  # what releases keep weights in
AVERAGES = ("model_ema", "ema")                # and moving averages of them
AVERAGED = re.compile(r"(en|de)coder\.conv_blocks\.|encoder_blocks\.|diffloss\.")  # models that use the averages
WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"}  # PyTorch's
SHOWN = 5      # names in an error

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # weights in a file may have them

# What a draft model has in common with its target.
SHARED = ("vocabulary", "grid", "condition_tokens", "tokens", "channels", "classes", "caption_dim")

FILTERS = {"guidance": 1.2, "top_k": 100, "top_p": 0.8, "min_p": 0.0}  # where pipeline.json has none
CONTINUOUS_GUIDANCE = 2.5


class CheckpointError(ValueError):
    """A checkpoint cannot be read, or is of another model."""


@dataclass(frozen=True)
class Vocabulary:
    """What vocabulary.json holds."""

    words: tuple[str, ...]

    def __post_init__(self):
        if not isinstance(self.words, tuple) or not all(isinstance(word, str) for word in self.words):
            raise ValueError("words must be a list of strings")
        if not 1 <= len(self.words) <= MAX_WORDS:
            raise ValueError(f"words must be 1 to {MAX_WORDS}, got {len(self.words)}")


@dataclass(frozen=True)
class ModelSettings:
    """What pipeline.json holds: how a model's pictures are drawn unless one says otherwise, and by which text encoder.

    A number that is None is that of FILTERS, a temperature 1.
    """

    guidance: float | None = None
    top_k: int | None = None         # 0 keeps all
    top_p: float | None = None       # 1 keeps all
    min_p: float | None = None       # 0 keeps all
    text_encoder: str | None = None  # folder of the T5 that reads prompts
    temperature: float | None = None

    def __post_init__(self):
        number = (int, float), "a number"
        for name, (kinds, wanted) in {"guidance": number, "top_k": ((int,), "a whole number"), "top_p": number,
                                      "min_p": number, "temperature": number,
                                      "text_encoder": ((str,), "a string")}.items():
            if (value := getattr(self, name)) is not None and type(value) not in kinds:
                raise ValueError(f"{name} must be {wanted}, got {value!r}")

    def filters(self, guidance=None, top_k=None, top_p=None, temperature=None, min_p=None) -> dict:
        """How discrete tokens are drawn: as given, or where that is None as these settings say."""
        given = {"guidance": guidance, "top_k": top_k, "top_p": top_p, "temperature": temperature,
                 "min_p": min_p}
        for source in (vars(self), FILTERS | {"temperature": 1.0}):
            given = {name: source[name] if value is None else value for name, value in given.items()}
        return given

    def continuous_guidance(self, given: float | None) -> float:
        """Guidance of continuous tokens: as given, or where that is None as these settings say."""
        return next(value for value in (given, self.guidance, CONTINUOUS_GUIDANCE) if value is not None)


DEFAULTS = ModelSettings()


def check_place(folder: str | Path, file: str, device: torch.device | str) -> Path:
    """The folder of a model, which has this file, to be loaded on a device. CheckpointError: there is no such folder or
    no such file in it. ValueError: torch cannot use the device here"""
    check_device(device)
    folder, advice = Path(folder), "`specvis convert` makes such a folder of published files"
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}; the names of a model hub are not taken: {advice}")
    if model_type := model_type_of(folder):
        raise CheckpointError(f"folder {folder} is of transformers, a model of type {model_type}: give --family with "
                              "it (FamilyPipeline.load in Python, see docs/families.md)")
    if not (folder / file).exists():
        raise CheckpointError(f"folder {folder} must have {file}; {advice}")
    return folder


def check_device(device: torch.device | str) -> None:
    """ValueError unless tensors can be made and read on the device."""
    try:
        torch.zeros(1, device=device).item()  # "meta" has tensors, without numbers
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:  # no such kind, no driver, not built in
        raise ValueError(f"device must be one that torch {torch.__version__} can use here, got {str(device)!r}"
                         ) from error


def in_short(model: nn.Module, folder: Path | None, what: str) -> str:
    """One line about a model of several parts, and the folder that it was read from."""
    first = next(model.parameters())
    count = sum(parameter.numel() for parameter in model.parameters())
    return (f"{type(model).__name__}({f'{folder}: ' if folder else ''}{what}, {count / 1e6:.1f} million parameters, "
            f"{first.device}, {str(first.dtype)[6:]})")


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a checkpoint, by name.

    Some releases wrap the tensors in "model", "module" or "state_dict", and moving averages of them in "model_ema" or
    "ema". The wrapping is taken off: the averages' of MAR, which samples with them, and of LlamaGen's tokenizers, which
    reconstruct pictures with them; of other models the weights' own.

    Raises:
        CheckpointError: as `read_state`; or not a dictionary of tensors
    """
    return tensors_of(read_state(path), path)


def tensors_of(state, path: str | Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Tensor]:
    """The tensors in what `read_state` read from a file, by name. `say` is told what was taken of several."""
    for _ in WRAPPINGS:  # each may be in another
        found = [key for key in (*WRAPPINGS, *AVERAGES) if isinstance(state, dict) and isinstance(state.get(key), dict)
                 and any(isinstance(value, (Tensor, dict)) for value in state[key].values())]
        if not found:
            break
        is_averaged = any(AVERAGED.search(unwrapped(str(name))) for key in found for name in state[key])
        taken = min(found, key=lambda key: (key in AVERAGES) != is_averaged)
        others = [key for key, value in state.items() if key != taken and isinstance(value, dict)
                  and any(isinstance(tensor, Tensor) for tensor in value.values())]
        if others or taken in AVERAGES:
            say(f"{path}: took {taken!r}" + ", a moving average of the weights" * (taken in AVERAGES)
                + f"; it also has {' and '.join(map(repr, others))}" * bool(others))
        state = state[taken]
    strange = [f"{str(name)[:60]!r} ({type(value).__name__}{f' of {len(value)}' if isinstance(value, dict) else ''})"
               for name, value in state.items() if not isinstance(name, str) or not isinstance(value, Tensor)
               ] if isinstance(state, dict) else [type(state).__name__]
    if strange:
        raise CheckpointError(f"checkpoint {path} must hold a dictionary of tensors, by itself or in "
                              f"{', '.join(map(repr, (*WRAPPINGS, *AVERAGES)))}, got {', '.join(strange[:SHOWN])}")
    for name, value in state.items():
        if value.is_meta or value.is_nested or value.layout is not torch.strided:
            got = "one without" if value.is_meta else "a nested one" if value.is_nested else "a sparse one"
            raise CheckpointError(f"checkpoint {path}: {name} must be a tensor with values, got {got}")
    return state


def unwrapped(name: str) -> str:
    """A tensor's name without the names that DDP, FSDP, torch.compile and checkpointing of activations put into it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS) or name


def check_finite(path: str | Path, name: str, value: Tensor, advice: str = "") -> None:
    """CheckpointError if a tensor of the checkpoint has NaN or infinite numbers."""
    if value.numel() and value.is_floating_point() and not torch.stack(value.aminmax()).isfinite().all():
        raise CheckpointError(f"checkpoint {path}: {name} must be finite numbers in {str(value.dtype)[6:]}, got NaN or "
                              f"infinite ones, {int((~value.isfinite()).sum())} of {value.numel()}{advice}")


def read_state(path: str | Path):
    """What a checkpoint holds. Tensors stay in the file, mapped into memory, where its format lets them.
    CheckpointError: no such file, truncated, or a pickle that is more than tensors: it is not run, and the types that
    it needs are named"""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # MAR keeps its command line beside the weights. One line below says what is wrong with a damaged file.
        with torch.serialization.safe_globals([Namespace]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_mappable(path))
    except Exception as error:  # a damaged pickle raises nearly any error
        if needed := dict.fromkeys(re.findall(r"(?:GLOBAL |with (?=TorchScript))([^\s\x1b]+)", str(error))):
            raise CheckpointError(f"checkpoint {path} is a pickle that is more than tensors: to read it, code would be "
                                  f"run ({', '.join(needed)}), which is refused; save its tensors alone") from error
        says_why = isinstance(error, (SafetensorError, RuntimeError, EOFError, ValueError, OSError)) and str(error)
        reason = f": {str(error).splitlines()[0]}" if says_why else ""
        raise CheckpointError(f"checkpoint {path} cannot be read (truncated, or not a checkpoint?){reason}") from error


def is_mappable(path: Path) -> bool:
    """Is the file in PyTorch's present format? The one before version 1.6 has to be read whole."""
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"


def load_weights(module: nn.Module, path: str | Path) -> None:
    """Fill `module` from a checkpoint, which must hold every parameter in its size, as finite numbers.

    A module on the device "meta" gets parameters in its dtype; no others are made before. Weights are read in DTYPES;
    those in float64 are rounded.

    Raises:
        CheckpointError: as `read_weights`; or a tensor is missing, unknown, of another size or dtype, or has NaN or
            infinite numbers, or such that are in the module's dtype: the first is named
    """
    state, expected = read_weights(path), module.state_dict()
    for name, wanted in expected.items():
        if name not in state and name in dict(module.named_parameters()):
            raise CheckpointError(f"checkpoint {path} lacks {name} {tuple(wanted.shape)} of {type(module).__name__}")
        if name in state and state[name].shape != wanted.shape:
            raise CheckpointError(f"checkpoint {path} is of another size: {name} must be {tuple(wanted.shape)}, "
                                  f"got {tuple(state[name].shape)}")
        if name in state and wanted.is_floating_point() and state[name].dtype not in DTYPES:
            raise CheckpointError(f"checkpoint {path}: {name} must be in one of "
                                  f"{', '.join(str(dtype)[6:] for dtype in DTYPES)}, got {str(state[name].dtype)[6:]}")
    # left out by the releases' own loading too: tables of rotations, and what an autoencoder was trained against
    unknown = [name for name in state
               if name not in expected and not name.endswith("freqs_cis") and not name.startswith("loss.")]
    if unknown:
        raise CheckpointError(f"checkpoint {path} is not of a {type(module).__name__}: it holds {unknown[0]}")
    is_empty = any(parameter.is_meta for parameter in module.parameters())
    # copied: in the file's memory a tensor does not begin where kernels read fastest, and the file may be overwritten
    weights = {name: state[name].to(expected[name].dtype, copy=is_empty) for name in expected if name in state}
    for name, value in weights.items():
        check_finite(path, name, value)
    module.load_state_dict(weights, strict=False, assign=is_empty)
    for name, buffer in module.named_buffers():
        if buffer.is_meta:  # the file has no such statistic
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, torch.zeros_like(buffer, device="cpu"))


def model_type_of(folder: Path) -> str | None:
    """What config.json of a folder calls the model, if transformers wrote it."""
    for file in (folder / "config.json", folder / "vision_language_encoder" / "config.json"):
        try:
            if found := json.loads(file.read_text("utf-8")).get("model_type"):
                return found
        except (OSError, ValueError, AttributeError, RecursionError):
            continue
    return None


def read_config(path: str | Path, dataclass_type):
    """A config dataclass from its JSON file; lists become tuples. CheckpointError: no such file, not JSON, a field that
    the dataclass does not have or one that it must be given"""
    try:
        values = {key: tuple(value) if isinstance(value, list) else value
                  for key, value in json.loads(Path(path).read_text("utf-8")).items()}
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"config {path} cannot be read as {dataclass_type.__name__}: {error}") from error
    known = {field.name: field.default is MISSING and field.default_factory is MISSING
             for field in fields(dataclass_type)}  # name -> must it be given?
    wrong = [f"unknown field {name!r}" for name in values if name not in known]
    wrong += [f"missing field {name!r}" for name, is_required in known.items() if is_required and name not in values]
    if wrong:
        raise CheckpointError(f"config {path}: {', '.join(wrong)}; its fields are {', '.join(known)}")
    try:
        return dataclass_type(**values)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"config {path} cannot be read as {dataclass_type.__name__}: {error}") from error


def read_settings(folder: Path) -> ModelSettings:
    """`ModelSettings` of pipeline.json, or of none."""
    path = folder / "pipeline.json"
    return read_config(path, ModelSettings) if path.exists() else DEFAULTS


def fingerprint(folder: Path, but: tuple[str, ...] = (), known_files: tuple[str, ...] = KNOWN) -> str:
    """What a model's folder, or a file, is known by: its files, of which large ones are read in part, see `samples`.

    but: names of files that do not count; known_files: endings of those that do
    """
    known = hashlib.sha256()
    for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
        if path != folder and path.suffix not in known_files or path.name in but or not path.is_file():
            continue
        known.update(f"{path.relative_to(folder)} {path.stat().st_size}\n".encode())
        with open(path, "rb") as file:
            for sample in samples(file, path):
                known.update(sample)
    return known.hexdigest()[:16]


def samples(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """The parts of a file that tell it from others.

    Of safetensors: the header, and the first and last 4 KB of each tensor. Of PyTorch's format: the checksum of each
    tensor, which is in the file. Of any other file: all of it.
    """
    if path.suffix == ".safetensors":
        try:
            length, = struct.unpack("<Q", file.read(8))
            header = file.read(min(length, path.stat().st_size))
            offsets = sorted(x["data_offsets"] for name, x in json.loads(header).items() if name != "__metadata__")
            yield header
            for start, end in offsets:
                for at in (start, max(start + END, end - END)):
                    file.seek(8 + length + at)
                    yield file.read(max(0, min(END, end - at)))
            return
        except Exception:
            file.seek(0)  # it is no such file, as reading it will say
    elif path.suffix in (".bin", ".ckpt") and is_mappable(path):
        try:
            entries = zipfile.ZipFile(file).infolist()
            yield repr([(entry.filename, entry.file_size, entry.CRC) for entry in entries]).encode()
            return
        except Exception:
            file.seek(0)
    while piece := file.read(1 << 20):
        yield piece


def check_draft_config(path: Path, draft_config, config) -> None:
    """CheckpointError unless the draft model, a GPT or MAR of `path`, has the target's tokens and prompts."""
    for name in SHARED:
        if hasattr(config, name) and (got := getattr(draft_config, name)) != (wanted := getattr(config, name)):
            raise CheckpointError(f"{path} must have the target's {name}, {wanted}, to draft for it, got {got}")
