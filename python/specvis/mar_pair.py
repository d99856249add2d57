"""The continuous models that come with the package: a MAR, a smaller one that drafts, and the tokens they share."""
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from .checkpoint import load_weights, read_config
from .models.mar import MAR, MARConfig, linear_guidance
from .models.vq import VQ, VQConfig
from .models.words import Words
from .pipeline import SHIPPED

PARTS = ("mar", "mar_draft")  # of the folder's files; words and tokenizer are those of the discrete model


@dataclass(frozen=True)
class Scaling:
    """Tokens are (latents - shift) * scale: of mean 0 in each channel and variance 1 over all of them.

    One scale for all channels keeps a token's error as visible in one direction as in another.
    """

    shift: tuple[float, ...]  # of each channel
    scale: float

    @staticmethod
    def of(latents: Tensor) -> "Scaling":
        """That of latents (n, D)."""
        return Scaling(tuple(latents.mean(0).tolist()), latents.var(0).mean().rsqrt().item())

    def tokens(self, latents: Tensor) -> Tensor:
        return (latents - torch.tensor(self.shift, device=latents.device)) * self.scale

    def latents(self, tokens: Tensor) -> Tensor:
        return tokens / self.scale + torch.tensor(self.shift, device=tokens.device)


class MARPair(nn.Module):
    """Prompts to conditions, and tokens (B, 256, 8) to pictures, for the target `mar` and its drafter `mar_draft`."""

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
        vocabulary = read_config(folder / "vocabulary.json", dict)["words"]
        pair = MARPair(*configs, read_config(folder / "tokenizer.json", VQConfig), vocabulary,
                       read_config(folder / "mar_scaling.json", Scaling))
        for part in (*PARTS, "words", "tokenizer"):
            load_weights(getattr(pair, part), folder / f"{part}.safetensors")
        return pair.to(device)

    def save(self, folder: str | Path) -> None:
        """Write what `load` reads beside the discrete model's files, weights in float16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for part in PARTS:
            model = getattr(self, part)
            (folder / f"{part}.json").write_text(json.dumps(asdict(model.config), indent=1) + "\n")
            save_file({name: value.half().contiguous() for name, value in model.state_dict().items()},
                      folder / f"{part}.safetensors")
        (folder / "mar_scaling.json").write_text(json.dumps(asdict(self.scaling), indent=1) + "\n")

    def features(self, prompts: list[str]) -> Tensor:
        """(B, S, caption_dim), which either model's `condition` embeds.

        Raises:
            UnknownWords: a prompt has words that the models do not know
        """
        return self.words(self.words.encode(prompts))

    @torch.inference_mode()
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L, C) float32 of square images -> B pictures."""
        side = math.isqrt(tokens.shape[1])
        images = self.tokenizer.decode_latents(self.scaling.latents(tokens).unflatten(1, (side, side)))
        images = (images.clamp(-1, 1).permute(0, 2, 3, 1) + 1) * 127.5
        return [Image.fromarray(image.round().byte().cpu().numpy()) for image in images]


def unknown_after(tokens: int, passes: int) -> list[int]:
    """How many tokens each pass of MAR's decoding leaves unknown: a cosine, at least one token a pass."""
    if not 1 <= passes <= tokens:
        raise ValueError(f"passes must be within 1..{tokens} (the tokens of an image), got {passes}")
    left, unknown = [], tokens
    for step in range(1, passes + 1):
        later = passes - step  # each of these passes needs one
        unknown = max(later, min(unknown - 1, math.floor(tokens * math.cos(math.pi / 2 * step / passes))))
        left.append(unknown)
    return left[:-1] + [0]


@torch.inference_mode()
def parallel_decode(mar: MAR, features: Tensor, order: Tensor, noise: Tensor, passes: int, *, guidance: float = 1.0,
                    temperature: float = 1.0, progress=None) -> Tensor:
    """MAR's own decoding: every pass draws the next tokens of the order, independently given the known ones.

    Args:
        features:  (B, ..) what `mar.condition` embeds
        order:     (B, L) int64  places, in the order in which they become known
        noise:     (B, L, T, C) float32  standard normals of each place, see Denoising.sample
        passes:    1..L
        guidance:  1 is none; grows towards this with the known tokens (linear_guidance)
        progress:  called with how many tokens the batch has just gained
    Returns:
        tokens (B, L, C) float32
    """
    c, B = mar.config, len(order)
    if order.shape != (B, c.tokens):
        raise ValueError(f"order must be (B, L={c.tokens}), got {tuple(order.shape)}")
    expected = (B, c.tokens, len(mar.diffloss.schedule), c.channels)
    if noise.shape != expected:
        raise ValueError(f"noise must be (B, L, T, C) = {expected}, got {tuple(noise.shape)}")
    condition = mar.condition(features)
    guided = guidance != 1.0
    if guided:
        null = mar.null_condition(B)
        null = null[:, None].expand_as(condition) if condition.ndim == 3 else null
        condition = torch.cat([condition, null])
    tokens = torch.zeros(B, c.tokens, c.channels, device=noise.device)
    known = torch.zeros(B, c.tokens, dtype=torch.bool, device=noise.device)
    unknown = c.tokens
    rows = torch.arange(B, device=noise.device)[:, None]
    for left in unknown_after(c.tokens, passes):
        places = order[:, c.tokens - unknown:c.tokens - left]                                       # (B, n)
        copies = 2 if guided else 1
        z = mar(tokens.repeat(copies, 1, 1), known.repeat(copies, 1), condition, most=c.tokens - unknown)
        z, *null = (part[rows, places] for part in z.chunk(copies))
        scale = linear_guidance(guidance, left, c.tokens) if guided else 1.0
        denoising = mar.diffloss.given(z, null=null[0] if null else None, guidance=scale, temperature=temperature)
        tokens[rows, places] = denoising.sample(noise[rows, places]).mean
        known[rows, places] = True
        unknown = left
        if progress:
            progress(places.numel())
    return tokens
