"""What a prompt is to a model that was not shipped: the number of a class, or a caption that a T5 encoder reads.

The shipped models' prompts are words (models/words.py). Each of the three has `encode`, which refuses a prompt that the
model cannot take, and `source`, which gives what the model's `condition` embeds.
"""
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .captions import cleaned

INSTALL = "pip install transformers sentencepiece"


class ClassIds:
    """Prompts that are numbers of classes, such as 207."""

    def __init__(self, classes: int):
        self.classes = classes

    def encode(self, prompts: list[str]) -> Tensor:
        """Numbers, as strings or integers -> (B,) int64. ValueError names a prompt that is no class."""
        ids = [int(text) if (text := str(prompt).strip()).isdecimal() else -1 for prompt in prompts]
        for prompt, number in zip(prompts, ids):
            if not 0 <= number < self.classes:
                raise ValueError(f"a prompt of this model must be the number of a class within 0..{self.classes - 1}, "
                                 f"got {prompt!r}")
        return torch.tensor(ids)

    def source(self, prompts: list[str], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, None]:
        """What `condition` takes: (B,) int64 class ids, and no padding mask."""
        return self.encode(prompts).to(device), None


class Captions:
    """Prompts that are free text, read by the encoder of a T5 as LlamaGen does: FLAN-T5-XL for its published models.

    Tokenizer and encoder are read from `folder` when they are first needed. A caption's features do not depend on the
    captions beside it: each is encoded alone.

    Args:
        folder: with the T5 as transformers reads it; None: `encode` and `source` say what is missing
        length: how many tokens a caption has, the rest of it is cut off
        width:  of the features
    """

    def __init__(self, folder: str | Path | None, length: int, width: int):
        self.folder, self.length, self.width = folder, length, width
        self._tokenizer = self._encoder = None

    def encode(self, prompts: list[str]) -> Tensor:
        """Captions -> (B, length) int64 ids of tokens, padded at the end.

        Raises:
            ValueError: an empty caption, one of which the cleaning leaves nothing, or no tokenizer
        """
        captions = [cleaned(prompt) for prompt in prompts]
        for prompt, caption in zip(prompts, captions):
            if not caption:
                raise ValueError("a prompt must have words that LlamaGen's cleaning of captions leaves, "
                                 f"got {prompt!r}")
        if self._tokenizer is None:
            self._tokenizer = self._read("AutoTokenizer")
        return self._tokenizer(captions, max_length=self.length, padding="max_length", truncation=True,
                               return_tensors="pt")["input_ids"]

    @torch.inference_mode()
    def source(self, prompts: list[str], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What `condition` takes: features (B, length, width) at the end of their places, zero before, and where.

        Raises:
            ValueError: as `encode`; or no encoder, or one whose features have another width
        """
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
