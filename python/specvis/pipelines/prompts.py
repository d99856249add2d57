"""What a prompt is: words, of which the first is a style, the number or name of a class, or a caption that a T5 reads.

Words are in models/words.py: the shipped models' prompts. Each of the three has `styles`, `encode`, which refuses a
prompt that the model cannot take, and `source`, which gives what the model's `condition` embeds.
"""
import difflib
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.interface import inference
from ..models.words import bare
from .captions import cleaned

INSTALL = "pip install transformers sentencepiece"


def with_style(prompt: str, styles: Sequence[str], style: str | None = None, *, default: bool = False) -> str:
    """The prompt as a model reads it, that was trained with `styles`: its first word is one of them.

    Args:
        styles:  the model's, `pipeline.prompts.styles`; of a model without styles () and the prompt is as it is
        style:   to put before a prompt that has none; None: the prompt has its own
        default: put the first of `styles` before a prompt that has none, where no `style` is given
    Raises:
        ValueError: a style for a prompt that has one or a model that has none, another style than the model's, or
            none at all
    """
    if style is not None and style not in styles:
        raise ValueError(f"style must be one of {', '.join(styles)}, got {style!r}" if styles else
                         f"style must not be given for this model, which was trained without styles, got {style!r}")
    words = str(prompt).split()
    if not words or not styles:
        return prompt
    if bare(words[0]) in styles:
        if style is not None:
            raise ValueError(f"style must not be given for a prompt that begins with one, got {style!r} and {prompt!r}")
        return prompt
    if style is None and not default:
        *others, last = styles
        known = f"{', '.join(others)} or {last}" if others else last
        raise ValueError(f"prompt must begin with a style: {known}, got {prompt!r}")
    return f"{style or styles[0]} {prompt}"


class ClassIds:
    """Prompts that are numbers of classes, such as 207; of a model of 1000 classes their names in ImageNet, too."""

    styles = ()

    def __init__(self, classes: int):
        self.classes = classes

    def encode(self, prompts: list[str]) -> Tensor:
        """Numbers, as strings or integers, or names -> (B,) int64. ValueError names a prompt that is no class, and near
        names"""
        return torch.tensor([self._number(prompt) for prompt in prompts], device="cpu", dtype=torch.int64)

    def _number(self, prompt: str) -> int:
        text, names = " ".join(str(prompt).lower().split()), imagenet_classes() if self.classes == 1000 else {}
        numbers = [int(text)] if text.isdecimal() else names.get(text, [])
        if len(numbers) == 1 and numbers[0] < self.classes:
            return numbers[0]
        near = difflib.get_close_matches(text[:100], names, n=3)
        raise ValueError(f"a prompt of this model must be the number of a class within 0..{self.classes - 1}"
                         + " or its name in ImageNet" * bool(names) + f", got {prompt!r}"
                         + (f", which {' and '.join(map(str, numbers))} have" if len(numbers) > 1 else
                            f" (near: {', '.join(near)})" if near else ""))

    def source(self, prompts: list[str], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, None]:
        """What `condition` takes: (B,) int64 class ids, and no padding mask."""
        return self.encode(prompts).to(device), None


@cache
def imagenet_classes() -> dict[str, list[int]]:
    """The numbers of the classes that have a name, in small letters. Some have one together, such as crane."""
    lines = (Path(__file__).parent / "imagenet_classes.txt").read_text("utf-8").lower().splitlines()
    found = {}
    for number, line in enumerate(line for line in lines if not line.startswith("#")):
        for name in line.split(", "):
            found.setdefault(name, []).append(number)
    return found


class Captions:
    """Prompts that are free text, read by the encoder of a T5 as LlamaGen does: FLAN-T5-XL for its published models.

    Tokenizer and encoder are read from `folder` when they are first needed. A caption's features do not depend on the
    captions beside it: each is encoded alone.

    Args:
        folder: with the T5 as transformers reads it; None: `encode` and `source` say what is missing
        length: how many tokens a caption has, the rest of it is cut off
        width:  the features' width
    """

    styles = ()

    def __init__(self, folder: str | Path | None, length: int, width: int):
        self.folder, self.length, self.width = folder, length, width
        self._tokenizer = self._encoder = None

    def encode(self, prompts: list[str]) -> Tensor:
        """Captions -> (B, length) int64 ids of tokens, padded at the end. ValueError: an empty caption, one of which
        the cleaning leaves nothing, one that is no text, or no tokenizer"""
        for prompt in prompts:
            try:
                prompt.encode()
            except (AttributeError, UnicodeEncodeError) as error:
                raise ValueError(f"a prompt must be text that UTF-8 can write, got {prompt!r}") from error
        captions = [cleaned(prompt) for prompt in prompts]
        for prompt, caption in zip(prompts, captions):
            if not caption:
                raise ValueError("a prompt must have words that LlamaGen's cleaning of captions leaves, "
                                 f"got {prompt!r}")
        if self._tokenizer is None:
            self._tokenizer = self._read("AutoTokenizer")
        return self._tokenizer(captions, max_length=self.length, padding="max_length", truncation=True,
                               return_tensors="pt")["input_ids"]

    @inference
    def source(self, prompts: list[str], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `condition` takes: features (B, length, width) at the end of their places, zero before, and where.
        ValueError: as `encode`; or no encoder, or one whose features have another width"""
        ids = self.encode(prompts)
        if self._encoder is None:
            encoder, report = self._read("T5EncoderModel", dtype=dtype, output_loading_info=True)
            encoder = encoder.to(device).eval()
            if missing := sorted(report["missing_keys"]):  # transformers goes on with random numbers
                raise ValueError(f"text_encoder must hold a whole T5 encoder, but {self.folder} lacks {missing[0]}")
            if encoder.config.d_model != self.width:
                raise ValueError(f"text_encoder must have features of width {self.width}, as the model needs, "
                                 f"got {encoder.config.d_model} in {self.folder}")
            self._encoder = encoder
        is_padding = (ids == self._tokenizer.pad_token_id).flip(1).cumprod(1).flip(1).bool()
        rows, inverse = torch.cat([ids, is_padding], 1).unique(dim=0, return_inverse=True)
        features = []
        for row in rows.to(device):
            row_ids, is_real = row[: self.length], row[self.length:] == 0
            hidden = self._encoder(input_ids=row_ids[None], attention_mask=is_real[None].long()).last_hidden_state[0]
            features.append(F.pad(hidden[is_real], (0, 0, int((~is_real).sum()), 0)))
        inverse = inverse.to(device)
        return torch.stack(features)[inverse], ~is_padding.flip(1).to(device)

    def _read(self, kind: str, **options):
        wanted = ("text_encoder must be a folder with FLAN-T5-XL as transformers reads it: config.json, "
                  "tokenizer.json or spiece.model, and the weights")
        if self.folder is None:
            raise ValueError(f"{wanted}; put them into one and give it as --text-encoder, here or to specvis convert")
        files = {"config.json": ["config.json"], "tokenizer.json or spiece.model": ["tokenizer.json", "spiece.model"]}
        for described, names in files.items():  # transformers makes an empty tokenizer of none
            if not any((Path(self.folder) / name).is_file() for name in names):
                raise ValueError(f"{wanted}, got {self.folder}, which has no {described}")
        try:
            import transformers
        except ImportError as error:
            raise ValueError(f"this model's prompts are read by transformers, which is missing: {INSTALL}") from error
        try:
            return getattr(transformers, kind).from_pretrained(self.folder, local_files_only=True, **options)
        except Exception as error:  # tokenizers raises no narrower type
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(f"{wanted}, got {self.folder}, of which {kind} says: {reason}") from error
