"""Published checkpoints as files of tensors. A tensor is read when it is written: no second copy of a model is held."""
import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from ..files import first_line
from .checkpoint import CheckpointError, read_state, tensors_of, unwrapped

CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
         torch.int32: "I32", torch.int16: "I16", torch.uint16: "U16", torch.uint8: "U8", torch.bool: "BOOL"}
UNPACKED = 100  # times the size of its file an archive of arrays may have [3, of a table of neighbors]; zeros have 1000


@dataclass(frozen=True)
class Lazy:
    """A tensor that is read, or made, when it is written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]

    @staticmethod
    def of(tensor: Tensor) -> "Lazy":
        return Lazy(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def to(self, dtype: torch.dtype | None) -> "Lazy":
        """The tensor in another dtype; None: as it is."""
        return self if dtype in (None, self.dtype) else Lazy(self.shape, dtype, lambda: self.make().to(dtype))


@dataclass
class SourceFile:
    """What was given: tensors by name, and the config.json beside them, if there is one."""

    path: Path
    tensors: dict[str, Lazy]
    config: dict = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor that tells the model's size. CheckpointError if it is missing."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} lacks {name}")
        return self.tensors[name].shape

    def width(self, name: str, dim: int = 0) -> int:
        if len(shape := self.shape(name)) <= dim:
            raise CheckpointError(f"{self.path} is of no known model: {name} must have more than {dim} dimensions, "
                                  f"got {len(shape)}")
        return shape[dim]

    def count(self, prefix: str) -> int:
        """How many blocks there are whose names begin so and have a number after it."""
        numbers = [int(match[1]) for name in self.tensors if (match := re.match(rf"{prefix}\.(\d+)\.", name))]
        return max(numbers, default=-1) + 1


def open_source(path: Path, say: Callable[[str], None] = lambda line: None) -> SourceFile:
    """The tensors of a file or folder, none of them read yet. `say` is told what was taken of several."""
    if not path.exists():
        raise CheckpointError(f"source {path} does not exist")
    folder, files = (path, files_of(path)) if path.is_dir() else (path.parent, [path])
    if path.name.endswith(".index.json"):
        files = files_of(folder, path)
    tensors = {}
    for file in files:
        tensors |= open_file(file, say)
    names = {}
    for name in tensors:
        if (other := names.setdefault(unwrapped(name), name)) != name:
            raise CheckpointError(f"{path} holds {other} and {name}, which are one tensor's names but for those of "
                                  "PyTorch's wrappers; remove one of them")
    tensors = {name: tensors[wrapped] for name, wrapped in names.items()}
    config = {}
    if path.is_dir() or path.name.startswith(("model", "pytorch_model")):
        try:
            file = folder / "config.json"
            config = json.loads(file.read_text("utf-8")) if file.exists() else {}
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"config {folder / 'config.json'} cannot be read: {error}") from error
    return SourceFile(path, tensors, config if isinstance(config, dict) else {})


def files_of(folder: Path, index: Path | None = None) -> list[Path]:
    """The files of weights in a folder as transformers writes it, one or several with an index."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if index is None and (folder / name).exists():
            return [folder / name]
        listed = index or folder / f"{name}.index.json"
        if listed.exists():
            try:
                weights = json.loads(listed.read_text("utf-8"))["weight_map"]
                files = sorted({Path(file).name for file in weights.values()})
            except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise CheckpointError(f"index {listed} cannot be read: {error!r}") from error
            return [folder / file for file in files]
    raise CheckpointError(f"source {folder} must be a file, or a folder with model.safetensors or pytorch_model.bin")


def open_file(path: Path, say: Callable[[str], None] = lambda line: None) -> dict[str, Lazy]:
    """The tensors of a file: safetensors, NumPy's, or PyTorch's, of which no code is run."""
    if not path.is_file():
        raise CheckpointError(f"checkpoint {path} does not exist")
    try:
        if path.suffix == ".safetensors":
            dtypes = {code: dtype for dtype, code in CODES.items()}
            with safe_open(path, "pt") as file:
                slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  it is no dictionary
                described = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
            if unknown := {code for _, code in described.values()} - set(dtypes):
                raise CheckpointError(f"checkpoint {path} must hold numbers of known types, got {', '.join(unknown)}")

            def read(name):
                with safe_open(path, "pt") as file:
                    return file.get_tensor(name)
            return {name: Lazy(shape, dtypes[code], lambda name=name: read(name))
                    for name, (shape, code) in described.items()}
        if path.suffix in (".npy", ".npz"):
            array = np.load(path, mmap_mode="c", allow_pickle=False)
            if isinstance(array, np.ndarray):
                arrays = {"table": array}
            elif (unpacked := sum(entry.file_size for entry in array.zip.infolist())) > UNPACKED * path.stat().st_size:
                raise CheckpointError(f"checkpoint {path} must unpack to at most {UNPACKED} times its size, got "
                                      f"{unpacked / 2**20:.0f} MB; numpy.savez writes its arrays without packing them")
            else:
                arrays = dict(array)
            return {name: Lazy(value.shape, torch.from_numpy(value[:0].copy()).dtype,
                               lambda value=value: torch.from_numpy(value)) for name, value in arrays.items()}
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # a damaged file raises nearly any error
        raise CheckpointError(f"checkpoint {path} cannot be read: {first_line(error)}") from error
    state = read_state(path)
    if isinstance(state, Tensor):
        return {"table": Lazy.of(state)}
    return {name: Lazy.of(tensor) for name, tensor in tensors_of(state, path, say).items()}


def write_lazy_tensors(path: Path, tensors: dict[str, Lazy], progress: Callable[[int], None]) -> None:
    """A safetensors file, one tensor after the other. (safetensors' own writer takes all of them at once.)"""
    order = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))  # so that each is aligned
    header, start = {}, 0
    for name in order:
        tensor = tensors[name]
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [start, start := start + tensor.num_bytes]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)

    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            file.write(tensors[name].make().contiguous().reshape(-1).view(torch.uint8).numpy())
            progress(tensors[name].num_bytes)
