"""Continuous models from files: a MAR, a smaller one that drafts if there is one, and the tokens they share."""
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from ..decoding.continuous import continuous_decode, continuous_method, mask_lengths
from ..decoding.continuous_state import ContinuousDecoded, ContinuousSampling, KnownTokens
from ..decoding.decoded import Progress
from ..decoding.limits import MAX_NUMBER, MIN_NUMBER, is_number
from ..decoding.methods import ContinuousMethod
from ..files import write_json, write_weights
from ..models.interface import inference
from ..models.kl_vae import KL, KLConfig
from ..models.mar import MAR, MARConfig
from ..models.vq import VQ, VQConfig
from ..models.words import Words
from . import checkpoint
from .checkpoint import ModelSettings, Vocabulary, load_weights, read_config
from .discrete import SHIPPED
from .prompts import ClassIds, with_style

PARTS = ("mar", "mar_draft")  # files of the folder; the shipped words and tokenizer are the discrete model's


@dataclass(frozen=True)
class Scaling:
    """Tokens are (latents - shift) * scale. Each channel has mean 0, and all channels together have variance 1.

    All channels have the same scale, so that an error of a token is as visible in one direction as in another.
    """

    shift: tuple[float, ...]  # one number a channel
    scale: float

    def __post_init__(self):
        if not isinstance(self.shift, tuple) or not all(is_number(value, -MAX_NUMBER) for value in self.shift):
            raise ValueError(f"shift must be a list of finite numbers in 32 bits, got {self.shift!r}")
        if not is_number(self.scale, MIN_NUMBER):
            raise ValueError(f"scale must be a positive and finite number in 32 bits, got {self.scale!r}")

    @staticmethod
    def of(latents: Tensor) -> "Scaling":
        """The scaling that fits latents (n, D)."""
        return Scaling(tuple(latents.mean(0).tolist()), latents.var(0).mean().rsqrt().item())

    def tokens(self, latents: Tensor) -> Tensor:
        return (latents - torch.tensor(self.shift, dtype=torch.float32, device=latents.device)) * self.scale

    def latents(self, tokens: Tensor) -> Tensor:
        return tokens / self.scale + torch.tensor(self.shift, dtype=torch.float32, device=tokens.device)


class MARPair(nn.Module):
    """The target `mar`, its draft model `mar_draft` or None, and what reads prompts and makes pictures of tokens.

    `prompts` are words of the shipped models, or class ids; see `Pipeline`.

    Args:
        draft_config:     None: there is no draft model, and `mar` is the only method
        tokenizer_config: LlamaGen's tokenizer's, whose latents before quantization are the tokens, or MAR's KL-16
        vocabulary:       the words of prompts; None: they are class ids
        scaling:          scales the tokens; None: the tokenizer decodes them as they are
    """

    def __init__(self, config: MARConfig, draft_config: MARConfig | None, tokenizer_config: VQConfig | KLConfig,
                 vocabulary: list[str] | None = None, scaling: Scaling | None = None, *,
                 settings: ModelSettings = checkpoint.DEFAULTS):
        super().__init__()
        self.mar, self.mar_draft = MAR(config), None if draft_config is None else MAR(draft_config)
        self.tokenizer = (KL if isinstance(tokenizer_config, KLConfig) else VQ)(tokenizer_config)
        if vocabulary is None and config.classes is None:
            raise ValueError("vocabulary must be given for a MAR without classes")
        self.prompts = (ClassIds(config.classes) if vocabulary is None
                        else Words(vocabulary, config.buffer, config.caption_dim))
        self.scaling = scaling or Scaling((0.0,) * config.channels, 1.0)
        if len(self.scaling.shift) != config.channels:
            raise ValueError(f"shift of the scaling must be {config.channels} numbers, one a channel, "
                             f"got {len(self.scaling.shift)}")
        self.settings, self.folder = settings, None
        self.requires_grad_(False).eval()

    @staticmethod
    def load(folder: str | Path = SHIPPED, device: torch.device | str = "cpu") -> "MARPair":
        """The pair in `folder`: mar.json, a tokenizer, what belongs to them, and a safetensors file per part.

        mar_draft.json and the draft model may be missing. The tokenizer is kl.json or else tokenizer.json with
        mar_scaling.json. Without vocabulary.json prompts are class ids. pipeline.json is as for `Pipeline.load`.

        Raises:
            CheckpointError: no such folder, or a file is missing, truncated, or of another model
            ValueError:      a device that torch cannot use
        """
        folder = checkpoint.check_place(folder, "mar.json", device)
        config = read_config(folder / "mar.json", MARConfig)
        draft_config, draft_path = None, folder / "mar_draft.json"
        if draft_path.exists():
            draft_config = read_config(draft_path, MARConfig)
            checkpoint.check_draft_config(draft_path, draft_config, config)
        has_kl = (folder / "kl.json").exists()
        tokenizer_config = (read_config(folder / "kl.json", KLConfig) if has_kl
                            else read_config(folder / "tokenizer.json", VQConfig))
        vocabulary = read_config(folder / "vocabulary.json", Vocabulary).words if config.classes is None else None
        scaling = None if has_kl else read_config(folder / "mar_scaling.json", Scaling)
        with torch.device("meta"):
            pair = MARPair(config, draft_config, tokenizer_config, vocabulary, scaling,
                           settings=checkpoint.read_settings(folder))
        pair.folder = folder
        for part, file in pair.parts.items():
            load_weights(getattr(pair, part), folder / f"{file}.safetensors")
        return pair.to(device)

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` reads, but not the discrete model's. Weights are written in float16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for part in [part for part in PARTS if getattr(self, part) is not None]:
            model = getattr(self, part)
            write_json(folder / f"{part}.json", asdict(model.config))
            write_weights(folder / f"{part}.safetensors", model)
        write_json(folder / "mar_scaling.json", asdict(self.scaling))

    def __repr__(self) -> str:
        c = self.mar.config
        what = f"{self.side} x {self.side} pixels of {c.tokens} tokens of {c.channels} numbers"
        return checkpoint.in_short(self, self.folder, what)

    @property
    def words(self) -> Words | None:
        """The words that prompts are made of; None: prompts are class ids."""
        return self.prompts if isinstance(self.prompts, Words) else None

    @property
    def parts(self) -> dict[str, str]:
        """The parts that have weights, and the names of their files."""
        files = {part: part for part in (*PARTS, "words")} | {
            "tokenizer": "kl" if isinstance(self.tokenizer, KL) else "tokenizer"}
        return {part: file for part, file in files.items() if getattr(self, part) is not None}

    @property
    def device(self) -> torch.device:
        return self.mar.mask_token.device

    @property
    def num_tokens(self) -> int:
        """How many tokens an image has."""
        return self.mar.config.tokens

    @property
    def side(self) -> int:
        """How many pixels a side a picture has."""
        return math.isqrt(self.num_tokens) * self.tokenizer.config.stride

    def check(self, method: ContinuousMethod) -> None:
        """Raise ValueError if this pair cannot decode by the method."""
        if continuous_method(method).gamma and self.mar_draft is None:
            raise ValueError(f"method must be mar, which needs no draft model, got {method.name}: this model has no "
                             "mar_draft.safetensors and mar_draft.json")
        mask_lengths(self.num_tokens, method.num_iter or self.num_tokens)

    def sampling(self, seeds: list[int] | int, *, guidance: float | None = None,
                 temperature: float = 1.0) -> ContinuousSampling:
        """How `specvis generate` draws with this model and these seeds, one for each prompt, on the model's device.

        A guidance that is None is the folder's (pipeline.json), or else 2.5. Errors: `ContinuousSampling.of`'s.
        """
        return ContinuousSampling.of(seeds, guidance=self.settings.continuous_guidance(guidance),
                                     temperature=temperature, device=self.device)

    def features(self, prompts: list[str]) -> Tensor:
        """What `condition` of either model embeds: caption features (B, S, caption_dim) or class ids (B,) int64.

        Raises:
            ValueError: a prompt that the models cannot read, or without the style that it must begin with
        """
        prompts = [with_style(prompt, self.prompts.styles) for prompt in prompts]
        return self.prompts.source(prompts, self.device, self.mar.mask_token.dtype)[0]

    @inference
    def tokens(self, prompts: list[str], method: str | ContinuousMethod, sampling: ContinuousSampling,
               progress: Progress | None = None, known: KnownTokens | None = None) -> ContinuousDecoded:
        """Decode the tokens of one image for each prompt, by a method or its name (see parse_method).

        Raises:
            UnknownWords: a prompt has words that the shipped models do not know
            ValueError:   a prompt that the models cannot read, not a method for continuous tokens or one that lacks its
                draft model, or not a seed for each prompt
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of strings, got {prompts!r}")
        if not isinstance(sampling, ContinuousSampling):
            raise ValueError(f"sampling must be a ContinuousSampling, got {type(sampling).__name__}")
        if len(sampling.seeds) != len(prompts):
            raise ValueError(f"sampling must have a seed for each of the {len(prompts)} prompts, "
                             f"got {len(sampling.seeds)}")
        method = continuous_method(method)
        self.check(method)
        return continuous_decode(self.mar, self.mar_draft, self.features(prompts), sampling, method, progress, known)

    @inference
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L, C) float32 of square images, on any device -> B pictures."""
        c = self.mar.config
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be a float32 tensor (B, L={c.tokens}, C={c.channels}), "
                             f"got {type(tokens).__name__}")
        if tokens.shape[1:] != (c.tokens, c.channels):
            raise ValueError(f"tokens must be (B, L, C) = (B, {c.tokens}, {c.channels}), got {tuple(tokens.shape)}")
        side = math.isqrt(c.tokens)
        latents = self.scaling.latents(tokens.to(self.device)).unflatten(1, (side, side))
        images = self.tokenizer.decode_latents(latents)
        images = (images.clamp(-1, 1).permute(0, 2, 3, 1) + 1) * 127.5
        return [Image.fromarray(image.round().byte().cpu().numpy()) for image in images]
