"""Prompt to picture: words, GPT, drafter and tokenizer that belong together, and their neighbor table."""
import json
from dataclasses import asdict
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from specvis_kernels import codebook_neighbors

from .checkpoint import load_weights, read_config
from .decode import Decoded, Progress, Sampling, decode, speculative_decode
from .methods import Method
from .models.eagle import Drafter
from .models.llamagen import GPT, GPTConfig
from .models.vq import VQ, VQConfig
from .models.words import Words

SHIPPED = Path(__file__).parent / "weights"
PARTS = ("words", "gpt", "drafter", "tokenizer")
UNREAD = {"quantize.codebook_used"}  # a statistic in the official checkpoints


class Pipeline(nn.Module):
    """A text-conditional GPT with all that surrounds it."""

    def __init__(self, config: GPTConfig, vq_config: VQConfig, vocabulary: list[str]):
        super().__init__()
        self.words = Words(vocabulary, config.condition_tokens, config.caption_dim)
        self.gpt, self.drafter, self.tokenizer = GPT(config), Drafter(config), VQ(vq_config)
        self._neighbors: Tensor | None = None
        self.requires_grad_(False).eval()

    @staticmethod
    def load(folder: str | Path = SHIPPED, device: torch.device | str = "cpu") -> "Pipeline":
        """The pipeline in `folder`: config.json, tokenizer.json, vocabulary.json and a safetensors file per part.

        Raises:
            CheckpointError: a file is missing, truncated, or of another model
        """
        folder = Path(folder)
        config = read_config(folder / "config.json", GPTConfig)
        vq_config = read_config(folder / "tokenizer.json", VQConfig)
        pipeline = Pipeline(config, vq_config, read_config(folder / "vocabulary.json", dict)["words"])
        for part in PARTS:
            load_weights(getattr(pipeline, part), folder / f"{part}.safetensors")
        return pipeline.to(device)

    def save(self, folder: str | Path) -> None:
        """Write what `load` reads, weights in float16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(self.gpt.config), indent=1) + "\n")
        (folder / "tokenizer.json").write_text(json.dumps(asdict(self.tokenizer.config), indent=1) + "\n")
        (folder / "vocabulary.json").write_text(json.dumps({"words": self.words.vocabulary}) + "\n")
        for part in PARTS:
            state = getattr(self, part).state_dict()
            weights = {name: value.half().contiguous() for name, value in state.items() if name not in UNREAD}
            save_file(weights, folder / f"{part}.safetensors")

    @staticmethod
    def tiny(seed: int = 0) -> "Pipeline":
        """Random weights, deliberately small (16 tokens of 64 codes): for tests."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = GPTConfig(dim=32, layers=2, heads=2, vocabulary=64, grid=4, condition_tokens=3, caption_dim=8,
                               ffn_multiple=16)
            vq_config = VQConfig(channels=8, decoder_channels=8, multipliers=(1, 1), residual_blocks=1, z_channels=8,
                                 codebook_size=64, codebook_dim=4, groups=4)
            pipeline = Pipeline(config, vq_config, ["", "plain", "red", "blue", "heart"])
            for weight in (pipeline.gpt.output.weight, pipeline.gpt.tok_embeddings.weight):
                weight.data.normal_(std=0.5)  # peaked enough that tokens depend on what came before
        return pipeline

    @property
    def device(self) -> torch.device:
        return self.gpt.output.weight.device

    def neighbors(self, k: int) -> Tensor:
        """(V, k) neighbor table of the tokenizer's codes, computed at the first call for that many."""
        if not 0 < k < self.gpt.config.vocabulary:
            raise ValueError(f"k must be within 1..{self.gpt.config.vocabulary - 1} "
                             f"(the codebook has {self.gpt.config.vocabulary} codes), got {k}")
        if self._neighbors is None or self._neighbors.shape[1] < k:
            self._neighbors = codebook_neighbors(self.tokenizer.codebook(), k)
        return self._neighbors[:, :k].contiguous()

    @torch.inference_mode()
    def tokens(self, prompts: list[str], method: Method, sampling: Sampling,
               progress: Progress | None = None) -> Decoded:
        """Decode one picture's tokens per prompt.

        Raises:
            UnknownWords: a prompt has words that the model does not know
        """
        condition, valid = self.gpt.condition(self.words(self.words.encode(prompts)))
        if method.drafting == "none":
            return decode(self.gpt, condition, valid, sampling, progress)
        neighbors = self.neighbors(method.k) if method.k else None
        return speculative_decode(self.gpt, self.drafter, condition, valid, sampling, method, neighbors, progress)

    @torch.inference_mode()
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L) int64 -> B pictures."""
        images = self.tokenizer.decode(tokens).permute(0, 2, 3, 1)
        return [Image.fromarray(((image + 1) * 127.5).round().byte().cpu().numpy()) for image in images]
