"""Prompt to picture: words, GPT, drafter and tokenizer that belong together, and their neighbor table."""
import json
from dataclasses import asdict, replace
from pathlib import Path

import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from specvis_kernels import codebook_neighbors

from .checkpoint import load_weights, read_config
from ..decoding.discrete import Decoded, Observer, Progress, Sampling, decode, guidance_pair, speculative_decode, twice
from ..decoding.drafters import Eagle, Independent
from ..decoding.methods import Method, parse_method
from ..models.eagle import Drafter
from ..models.llamagen import GPT, GPTConfig
from ..models.vq import VQ, VQConfig
from ..models.words import Words

SHIPPED = Path(__file__).parent.parent / "weights"
PARTS = ("words", "gpt", "drafter", "tokenizer")
SMALL = "small"  # a smaller GPT that drafts on its own; a folder need not have one
UNREAD = {"quantize.codebook_used"}  # a statistic in the official checkpoints


class Pipeline(nn.Module):
    """A text-conditional GPT with all that surrounds it."""

    def __init__(self, config: GPTConfig, vq_config: VQConfig, vocabulary: list[str], small: GPTConfig | None = None):
        super().__init__()
        self.words = Words(vocabulary, config.condition_tokens, config.caption_dim)
        self.gpt, self.drafter, self.tokenizer = GPT(config), Drafter(config), VQ(vq_config)
        self.small = GPT(small) if small else None
        self._neighbors: dict[str, Tensor] = {}  # by metric
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
        small = read_config(folder / f"{SMALL}.json", GPTConfig) if (folder / f"{SMALL}.json").exists() else None
        pipeline = Pipeline(config, vq_config, read_config(folder / "vocabulary.json", dict)["words"], small)
        for part in pipeline.parts:
            load_weights(getattr(pipeline, part), folder / f"{part}.safetensors")
        return pipeline.to(device)

    def save(self, folder: str | Path) -> None:
        """Write what `load` reads, weights in float16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(self.gpt.config), indent=1) + "\n")
        (folder / "tokenizer.json").write_text(json.dumps(asdict(self.tokenizer.config), indent=1) + "\n")
        (folder / "vocabulary.json").write_text(json.dumps({"words": self.words.vocabulary}) + "\n")
        if self.small:
            (folder / f"{SMALL}.json").write_text(json.dumps(asdict(self.small.config), indent=1) + "\n")
        for part in self.parts:
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
            pipeline = Pipeline(config, vq_config, ["", "plain", "red", "blue", "heart"],
                                replace(config, dim=16, layers=1))
            for gpt in (pipeline.gpt, pipeline.small):
                for weight in (gpt.output.weight, gpt.tok_embeddings.weight):
                    weight.data.normal_(std=0.5)  # peaked enough that tokens depend on what came before
        return pipeline

    @property
    def parts(self) -> tuple[str, ...]:
        return (*PARTS, SMALL) if self.small else PARTS

    @property
    def device(self) -> torch.device:
        return self.gpt.output.weight.device

    @property
    def places(self) -> int:
        """Tokens of a picture."""
        return self.gpt.config.tokens

    def neighbors(self, k: int, metric: str = "l2") -> Tensor:
        """(V, k) neighbor table of the tokenizer's codes, computed at the first call for that many."""
        if not 0 < k < self.gpt.config.vocabulary:
            raise ValueError(f"k must be within 1..{self.gpt.config.vocabulary - 1} "
                             f"(the codebook has {self.gpt.config.vocabulary} codes), got {k}")
        if metric not in self._neighbors or self._neighbors[metric].shape[1] < k:
            self._neighbors[metric] = codebook_neighbors(self.tokenizer.codebook(), k, metric=metric)
        return self._neighbors[metric][:, :k].contiguous()

    def check(self, method: Method) -> None:
        """Raise ValueError where this model cannot decode by the method; make ready what it needs."""
        if method.drafter == SMALL and method.drafting != "none" and self.small is None:
            raise ValueError(f"drafter must be eagle: this model has no {SMALL}.safetensors and {SMALL}.json")
        if method.k:
            self.neighbors(method.columns, method.metric)

    @torch.inference_mode()
    def tokens(self, prompts: list[str], method: str | Method | list[Method], sampling: Sampling,
               progress: Progress | None = None, observe: Observer | None = None) -> Decoded:
        """Decode one picture's tokens per prompt, all by one method (or its name, see parse_method) or each by its own.

        Requests whose methods are of one family are decoded together; no request's tokens depend on the others.
        `observe` is called after every step of each such group.

        Raises:
            UnknownWords: a prompt has words that the model does not know
            ValueError:   not a method for each prompt, or one that this model lacks something for
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of strings, got {prompts!r}")
        if isinstance(method, str):
            method = parse_method(method)
        methods = [method] * len(prompts) if isinstance(method, Method) else method
        if len(methods) != len(prompts):
            raise ValueError(f"method must be one, or one for each of the {len(prompts)} prompts, got {len(methods)}")
        if len(sampling.seeds) != len(prompts) or not prompts:
            raise ValueError("sampling must have a seed for each of at least one prompt, "
                             f"got {len(sampling.seeds)} seeds and {len(prompts)} prompts")
        for m in set(methods):
            self.check(m)
        features = self.words(self.words.encode(prompts))
        families = [m.family for m in methods]
        parts, order = [], []
        for family in dict.fromkeys(families):
            those = [i for i, other in enumerate(families) if other == family]
            order += those
            parts.append(self._decode(features[those], [methods[i] for i in those], sampling[those], progress,
                                      observe))
        return Decoded.merged(parts, torch.tensor(order))

    def _decode(self, features: Tensor, methods: list[Method], sampling: Sampling,
                progress: Progress | None, observe: Observer | None) -> Decoded:
        base = methods[0]
        condition, valid = self.gpt.condition(features)
        if base.drafting == "none":
            return decode(self.gpt, condition, valid, sampling, progress)
        if base.drafter == SMALL:
            drafter = Independent(self.small, *guidance_pair(self.small, *self.small.condition(features)))
        else:
            drafter = Eagle(self.gpt, self.drafter, twice(valid))
        neighbors = self.neighbors(base.columns, base.metric) if base.k else None
        return speculative_decode(self.gpt, drafter, condition, valid, sampling, methods, neighbors, progress,
                                  observe)

    @torch.inference_mode()
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L) int64 -> B pictures."""
        images = self.tokenizer.decode(tokens).permute(0, 2, 3, 1)
        return [Image.fromarray(((image + 1) * 127.5).round().byte().cpu().numpy()) for image in images]
