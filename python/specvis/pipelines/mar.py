"""The continuous models that come with the package: a MAR, a smaller one that drafts, and the tokens they share."""
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from ..decoding.continuous import (
    ContinuousDecoded,
    ContinuousSampling,
    KnownTokens,
    Progress,
    continuous_decode,
    continuous_method,
    mask_lengths,
)
from ..decoding.methods import ContinuousMethod
from ..models.mar import MAR, MARConfig
from ..models.vq import VQ, VQConfig
from ..models.words import Words
from .checkpoint import Vocabulary, load_weights, read_config
from .discrete import SHIPPED

PARTS = ("mar", "mar_draft")  # files of the folder; words and tokenizer are shared with the discrete model


@dataclass(frozen=True)
class Scaling:
    """Tokens are (latents - shift) * scale. Each channel has mean 0, and all channels together have variance 1.

    All channels have the same scale, so that an error of a token is as visible in one direction as in another.
    """

    shift: tuple[float, ...]  # of each channel
    scale: float

    @staticmethod
    def of(latents: Tensor) -> "Scaling":
        """The scaling that fits latents (n, D)."""
        return Scaling(tuple(latents.mean(0).tolist()), latents.var(0).mean().rsqrt().item())

    def tokens(self, latents: Tensor) -> Tensor:
        return (latents - torch.tensor(self.shift, device=latents.device)) * self.scale

    def latents(self, tokens: Tensor) -> Tensor:
        return tokens / self.scale + torch.tensor(self.shift, device=tokens.device)


class MARPair(nn.Module):
    """The target `mar` and its drafter `mar_draft`, with what turns prompts to conditions and tokens to pictures."""

    def __init__(self, config: MARConfig, draft_config: MARConfig, vq_config: VQConfig, vocabulary: list[str],
                 scaling: Scaling):
        super().__init__()
        self.mar, self.mar_draft, self.tokenizer = MAR(config), MAR(draft_config), VQ(vq_config)
        self.words = Words(vocabulary, config.buffer, config.caption_dim)
        self.scaling = scaling
        self.requires_grad_(False).eval()

    @staticmethod
    def load(folder: str | Path = SHIPPED, device: torch.device | str = "cpu") -> "MARPair":
        """The pair in `folder`: mar.json, mar_draft.json, mar_scaling.json and the discrete model's files.

        Raises:
            CheckpointError: a file is missing, truncated, or of another model
        """
        folder = Path(folder)
        configs = [read_config(folder / f"{part}.json", MARConfig) for part in PARTS]
        vocabulary = read_config(folder / "vocabulary.json", Vocabulary).words
        pair = MARPair(*configs, read_config(folder / "tokenizer.json", VQConfig), vocabulary,
                       read_config(folder / "mar_scaling.json", Scaling))
        for part in (*PARTS, "words", "tokenizer"):
            load_weights(getattr(pair, part), folder / f"{part}.safetensors")
        return pair.to(device)

    def save(self, folder: str | Path) -> None:
        """Write the files that `load` reads, except those of the discrete model. Weights are written in float16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            model = getattr(self, part)
            (folder / f"{part}.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n")
            save_file({name: value.half().contiguous() for name, value in model.state_dict().items()},
                      folder / f"{part}.safetensors")
        (folder / "mar_scaling.json").write_text(json.dumps(asdict(self.scaling), indent=1) + "\n")

    @property
    def device(self) -> torch.device:
        return self.mar.mask_token.device

    @property
    def num_tokens(self) -> int:
        """How many tokens an image has."""
        return self.mar.config.tokens

    def check(self, method: ContinuousMethod) -> None:
        """Raise ValueError if this pair cannot decode by the method."""
        mask_lengths(self.num_tokens, continuous_method(method).num_iter or self.num_tokens)

    def features(self, prompts: list[str]) -> Tensor:
        """Caption features (B, S, caption_dim), which `condition` of either model embeds.

        Raises:
            UnknownWords: a prompt has words that the models do not know
        """
        return self.words(self.words.encode(prompts))

    @torch.inference_mode()
    def tokens(self, prompts: list[str], method: str | ContinuousMethod, sampling: ContinuousSampling,
               progress: Progress | None = None, known: KnownTokens | None = None) -> ContinuousDecoded:
        """Decode the tokens of one image for each prompt, by a method or its name (see parse_method).

        Raises:
            UnknownWords: a prompt has words that the models do not know
            ValueError:   not a method for continuous tokens, or not a seed for each prompt
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of strings, got {prompts!r}")
        if not isinstance(sampling, ContinuousSampling):
            raise ValueError(f"sampling must be a ContinuousSampling, got {type(sampling).__name__}")
        if len(sampling.seeds) != len(prompts):
            raise ValueError(f"sampling must have a seed for each of the {len(prompts)} prompts, "
                             f"got {len(sampling.seeds)}")
        return continuous_decode(self.mar, self.mar_draft, self.features(prompts), sampling, method, progress, known)

    @torch.inference_mode()
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L, C) float32 of square images -> B pictures."""
        c = self.mar.config
        if tokens.shape[1:] != (c.tokens, c.channels):
            raise ValueError(f"tokens must be (B, L, C) = (B, {c.tokens}, {c.channels}), got {tuple(tokens.shape)}")
        side = math.isqrt(c.tokens)
        images = self.tokenizer.decode_latents(self.scaling.latents(tokens).unflatten(1, (side, side)))
        images = (images.clamp(-1, 1).permute(0, 2, 3, 1) + 1) * 127.5
        return [Image.fromarray(image.round().byte().cpu().numpy()) for image in images]
