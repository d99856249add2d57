"""From a prompt to a picture: the words, GPT, draft models and tokenizer that belong together, and their neighbors."""
from dataclasses import asdict, replace
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor, nn

from specvis_kernels import codebook_neighbors

from ..decoding.baseline import decode
from ..decoding.decoded import Decoded, Finished, Observer, Progress
from ..decoding.draft_model import EagleDraftModel, SmallDraftModel
from ..decoding.jacobi import jacobi_decode
from ..decoding.methods import Method, one_each
from ..decoding.requests import check_known_tokens
from ..decoding.sampling import Sampling, cfg_inputs
from ..decoding.speculative import speculative_decode
from ..files import write_json, write_weights
from ..models.eagle import EagleHead
from ..models.interface import codes, inference
from ..models.llamagen import GPT, GPTConfig
from ..models.vq import VQ, VQConfig
from ..models.words import Words
from . import checkpoint
from .checkpoint import CheckpointError, ModelSettings, Vocabulary, load_weights, read_config
from .prompts import Captions, ClassIds, with_style

SHIPPED = Path(__file__).parent.parent / "weights"
PARTS = ("words", "gpt", "eagle", "tokenizer", "small")  # files of the folder, which may lack words, eagle and small
UNREAD = "quantize.codebook_used"  # a statistic in the official checkpoints

Source = tuple[Tensor, Tensor | None]  # what a GPT's `condition` takes


class Pipeline(nn.Module):
    """A GPT with all that surrounds it: what reads prompts, what drafts, what makes pictures of tokens.

    `prompts` says what a prompt must be, and encodes it. It is the words that the shipped model knows (`Words`), the
    number of a class for a class-conditional GPT (`ClassIds`), or else free text (`Captions`).

    `eagle` is the GPT's EAGLE head, `small` a smaller GPT that drafts by itself, or None.

    Args:
        vocabulary:   the words of prompts; None: they are class ids or free text, as the GPT is conditioned
        draft_config: the smaller GPT's; None: the model has no smaller GPT
        has_eagle:    whether there is an EAGLE head
        settings:     how the pictures are drawn unless one says otherwise, and where the text encoder is
    """

    usual_methods: dict[str, dict] = {}  # parameters of methods that the model's paper has otherwise
    draft_files = {"eagle": "eagle.safetensors", "small": "small.safetensors and small.json"}

    def __init__(self, config: GPTConfig, vq_config: VQConfig, vocabulary: list[str] | None = None,
                 draft_config: GPTConfig | None = None, *, has_eagle: bool = True,
                 settings: ModelSettings = checkpoint.DEFAULTS):
        super().__init__()
        self.settings, self.folder = settings, None
        if vocabulary is not None:
            self.prompts = Words(vocabulary, config.condition_tokens, config.caption_dim)
        elif config.caption_dim is None:
            self.prompts = ClassIds(config.classes)
        else:
            self.prompts = Captions(settings.text_encoder, config.condition_tokens, config.caption_dim)
        self.gpt, self.tokenizer = GPT(config), VQ(vq_config)
        self.eagle = EagleHead(config) if has_eagle else None
        self.small = GPT(draft_config) if draft_config else None
        self.table: Tensor | None = None         # (V, k) neighbors, where the folder has them
        self._neighbors: dict[str, Tensor] = {}  # the key is the metric
        self.requires_grad_(False).eval()

    @staticmethod
    def load(folder: str | Path = SHIPPED, device: torch.device | str = "cpu", *, dtype: torch.dtype = torch.float32,
             text_encoder: str | Path | None = None) -> "Pipeline":
        """The pipeline in `folder`: config.json, tokenizer.json and a safetensors file per part.

        With vocabulary.json and words.safetensors prompts are words. eagle.safetensors may be missing; so may
        small.json and small.safetensors, the draft model's, neighbors.safetensors, a table of neighbors, and
        pipeline.json, see `ModelSettings`. `specvis convert` makes such a folder of published files.

        Args:
            dtype:        the weights': torch.float32, torch.bfloat16 or torch.float16
            text_encoder: folder of the T5 that reads prompts, in place of the one that pipeline.json names
        Raises:
            CheckpointError: no such folder, or a file is missing, truncated, or of another model
            ValueError:      a text encoder for a model whose prompts are words or class ids, another dtype, or a device
                that torch cannot use
        """
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"dtype must be torch.float32, torch.bfloat16 or torch.float16, got {dtype!r}")
        folder = checkpoint.check_place(folder, "config.json", device)
        config = read_config(folder / "config.json", GPTConfig)
        vq_config = read_config(folder / "tokenizer.json", VQConfig)
        if vq_config.codebook_size != config.vocabulary:
            raise CheckpointError(f"tokenizer {folder / 'tokenizer.json'} must have the GPT's {config.vocabulary} "
                                  f"codes, got {vq_config.codebook_size}")
        draft_config = read_config(folder / "small.json", GPTConfig) if (folder / "small.json").exists() else None
        if draft_config:
            checkpoint.check_draft_config(folder / "small.json", draft_config, config)
        has_words = (folder / "vocabulary.json").exists() or (folder / "words.safetensors").exists()
        vocabulary = read_config(folder / "vocabulary.json", Vocabulary).words if has_words else None
        settings = checkpoint.read_settings(folder)
        if text_encoder is not None:
            if has_words or config.caption_dim is None:
                kind = "words" if has_words else "class ids"
                raise ValueError(f"text_encoder must not be given for the model in {folder}: its prompts are {kind}")
            settings = replace(settings, text_encoder=str(text_encoder))
        with torch.device("meta"):  # no weights are made that the files' would replace
            pipeline = Pipeline(config, vq_config, vocabulary, draft_config, settings=settings,
                                has_eagle=(folder / "eagle.safetensors").exists())
        pipeline.to(dtype).folder = folder
        for part in pipeline.parts:
            load_weights(getattr(pipeline, part), folder / f"{part}.safetensors")
        if (folder / "neighbors.safetensors").exists():
            pipeline.table = read_neighbors(folder, config.vocabulary).to(device)
        return pipeline.to(device)

    def save(self, folder: str | Path) -> None:
        """Write what `load` reads, weights in float16."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "config.json", asdict(self.gpt.config))
        write_json(folder / "tokenizer.json", asdict(self.tokenizer.config))
        if self.words:
            write_json(folder / "vocabulary.json", {"words": self.words.vocabulary})
        if self.small:
            write_json(folder / "small.json", asdict(self.small.config))
        if self.settings != checkpoint.DEFAULTS:
            write_json(folder / "pipeline.json", asdict(self.settings))
        for part in self.parts:
            write_weights(folder / f"{part}.safetensors", getattr(self, part), but=UNREAD)

    def __repr__(self) -> str:
        grid, codes = self.gpt.config.grid, self.gpt.config.vocabulary
        what = f"{self.side} x {self.side} pixels of {grid} x {grid} tokens, {codes} codes"
        return checkpoint.in_short(self, self.folder, what)

    @property
    def words(self) -> Words | None:
        """The words that prompts are made of; None: prompts are class ids or free text."""
        return self.prompts if isinstance(self.prompts, Words) else None

    @property
    def parts(self) -> list[str]:
        """The parts that have weights; their files have these names."""
        return [part for part in PARTS if getattr(self, part) is not None]

    @property
    def device(self) -> torch.device:
        return self.gpt.output.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gpt.output.weight.dtype

    @property
    def num_tokens(self) -> int:
        """How many tokens an image has."""
        return self.gpt.config.tokens

    @property
    def side(self) -> int:
        """How many pixels a side a picture has."""
        return self.gpt.config.grid * self.tokenizer.config.stride

    @property
    def missing_draft_models(self) -> list[str]:
        """The names in DRAFT_MODELS of which this model has no weights."""
        return [name for name in ("eagle", "small") if getattr(self, name) is None]

    def neighbors(self, k: int, metric: str = "l2") -> Tensor:
        """(V, k) neighbor table of the tokenizer's codes, computed at the first call for that many.

        Codes have length 1, as the tokenizer uses them. With the metric "raw" they are as they are stored: LANTERN's
        released table is of these. If the folder has a table, "l2" and "raw" are its first columns.
        """
        first, last = codes(self.gpt)
        if not 0 < k < last - first:
            raise ValueError(f"k must be within 1..{last - first - 1} (the codebook has {last - first} codes), got {k}")
        if self.table is not None and metric in ("l2", "raw"):
            if k > self.table.shape[1]:
                raise ValueError(f"k must be at most {self.table.shape[1]}, the columns of its table of neighbors, "
                                 f"got {k}")
            return self.table[:, :k].contiguous()
        if metric not in self._neighbors or self._neighbors[metric].shape[1] < k:
            self._neighbors[metric] = codebook_neighbors(self.codebook(metric == "raw"), k,
                                                         metric="l2" if metric == "raw" else metric)
        return self._neighbors[metric][:, :k].contiguous()

    def codebook(self, as_stored: bool) -> Tensor:
        """(V, channels) the codes as pixels are made of them, or as they are stored."""
        return self.tokenizer.quantize.embedding.weight if as_stored else self.tokenizer.codebook()

    def on_grid(self, tokens: Tensor) -> Tensor:
        """What is of each token (B, L), for each code of the pictures: (B, rows, columns)."""
        return tokens.view(-1, self.gpt.config.grid, self.gpt.config.grid)

    def check(self, method: Method) -> None:
        """Raise ValueError if this model cannot decode by the method; make ready what the method needs."""
        if method.parameters.get("refresh") and "small" in self.missing_draft_models:
            raise ValueError(f"refresh must be 0, got {method.drafts.refresh}: this model has no "
                             f"{self.draft_files['small']}, the draft model that refreshes guesses")
        if method.parameters.get("draft_model") in self.missing_draft_models:
            others = [f"{method.name}:draft_model={name}" for name in self.draft_files
                      if name not in self.missing_draft_models]
            train = "" if others else " (train one: docs/models.md#a-draft-model-for-another-model)"
            raise ValueError(f"method must be {', '.join([*others, 'vanilla', 'jacobi'])} or gsd, got {method.name}: "
                             f"this model has no {self.draft_files[method.drafts.draft_model]}, its draft model{train}")
        if method.num_neighbors:
            self.neighbors(method.num_neighbors, method.acceptance.metric)

    def sampling(self, seeds: list[int] | int, *, guidance: float | list[float] | None = None,
                 temperature: float | list[float] | None = None, top_k: int | list[int] | None = None,
                 top_p: float | list[float] | None = None, min_p: float | list[float] | None = None,
                 log_probs: bool = False) -> Sampling:
        """How `specvis generate` draws with this model and these seeds, one for each prompt, on the model's device.

        Numbers are as for `Sampling.of`, which also says what is refused. What is None is the folder's number
        (pipeline.json), or else guidance 1.2, temperature 1, top_k 100, top_p 0.8, min_p 0.
        """
        return Sampling.of(seeds, **self.settings.filters(guidance, top_k, top_p, temperature, min_p),
                           log_probs=log_probs, device=self.device)

    def source(self, prompts: list[str]) -> Source:
        """What `condition` of `gpt` takes: features (B, S, C) or class ids (B,) int64, and a padding mask or None.

        Raises:
            ValueError: a prompt that the model cannot read, or without the style that it must begin with
        """
        prompts = [with_style(prompt, self.prompts.styles) for prompt in prompts]
        return self.prompts.source(prompts, self.device, self.dtype)

    def condition(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        """Embeddings (B, S, dim) of prompts, and their padding mask (B, S) bool."""
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of strings, got {prompts!r}")
        return self.gpt.condition(*self.source(prompts))

    @inference
    def tokens(self, prompts: list[str], method: str | Method | list[str | Method], sampling: Sampling,
               progress: Progress | None = None, observe: Observer | None = None, *,
               known_tokens: Tensor | None = None, batch: int | None = None,
               finished: Finished | None = None) -> Decoded:
        """Decode the tokens of one image for each prompt.

        All prompts have one method, or each has its own; names are as parse_method takes them. Requests whose methods
        are of one family are decoded together. No request's tokens depend on the others. `observe` is called after
        every step of each such group.

        Args:
            known_tokens: (B, K) int64  the first tokens of each image, which are kept, -1 after them. Of a seed-exact
                method's picture, the first tokens with the same seed give the same picture again.
            batch:        how many images are decoded at once; when one is finished, the next takes its place. All
                prompts have one method then, and nobody observes. None: all of them
            finished:     called with the numbers of prompts whose images are finished, and with these images
        Raises:
            UnknownWords: a prompt has words that the shipped model does not know
            ValueError:   a prompt that the model cannot read, not a method for each prompt, one that this model lacks
                something for, or known tokens that are no beginning of an image
        """
        if isinstance(prompts, str):
            raise ValueError(f"prompts must be a list of strings, got {prompts!r}")
        if sampling is None:
            raise ValueError("sampling must be a Sampling, such as pipeline.sampling(seeds=[0]), got None")
        methods = one_each(method, len(prompts), "method", self.usual_methods)
        if not all(isinstance(m, Method) for m in methods) or not isinstance(sampling, Sampling):
            kinds = ", ".join(sorted({type(m).__name__ for m in methods}))
            raise ValueError("method and sampling must be for discrete tokens, a Method and a Sampling, got "
                             f"{kinds} and {type(sampling).__name__}: MARPair decodes continuous ones")
        if len(sampling.seeds) != len(prompts) or not prompts:
            raise ValueError("sampling must have a seed for each of at least one prompt, "
                             f"got {len(sampling.seeds)} seeds and {len(prompts)} prompts")
        for m in set(methods):
            self.check(m)
        check_known_tokens(known_tokens, len(prompts), self.gpt)
        source, padding_mask = self.source(prompts)
        families = [m.family for m in methods]
        parts, order = [], []
        if finished and len(set(families)) > 1:
            raise ValueError("finished must be None where prompts have methods of several families, got "
                             f"{', '.join(sorted({m.name for m in methods}))}")
        for family in dict.fromkeys(families):
            requests = [i for i, other in enumerate(families) if other == family]
            order += requests
            part = source[requests], None if padding_mask is None else padding_mask[requests]
            parts.append(self._decode(part, [methods[i] for i in requests], sampling[requests], progress, observe,
                                      None if known_tokens is None else known_tokens[requests], batch, finished))
        return Decoded.merged(parts, order)

    def _decode(self, source: Source, methods: list[Method], sampling: Sampling, progress: Progress | None,
                observe: Observer | None, known_tokens: Tensor | None, batch: int | None,
                finished: Finished | None) -> Decoded:
        base, queue = methods[0], {"known_tokens": known_tokens, "batch": batch, "finished": finished}
        condition, padding_mask = self.gpt.condition(*source)
        if base.drafting == "none" and batch is None and finished is None:
            return decode(self.gpt, condition, padding_mask, sampling, progress, known_tokens=known_tokens)
        neighbors = None
        if base.num_neighbors:
            neighbors = self.neighbors(base.num_neighbors, base.acceptance.metric)
        if base.drafting in ("jacobi", "none"):
            small = self._small_draft_model(source) if base.drafts.refresh else None
            return jacobi_decode(self.gpt, condition, padding_mask, sampling, methods, neighbors, progress, observe,
                                 draft_model=small, **queue)
        if base.drafts.draft_model == "small":
            draft_model = self._small_draft_model(source)
        else:
            draft_model = EagleDraftModel(self.gpt, self.eagle, *cfg_inputs(self.gpt, condition, padding_mask))
        return speculative_decode(self.gpt, draft_model, condition, padding_mask, sampling, methods, neighbors,
                                  progress, observe, **queue)

    def _small_draft_model(self, source: Source) -> SmallDraftModel:
        return SmallDraftModel(self.small, *cfg_inputs(self.small, *self.small.condition(*source)))

    @inference
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L) int64 -> B pictures.

        Raises:
            ValueError: no such tensor, or ids that the codebook does not have
        """
        L, V = self.num_tokens, self.gpt.config.vocabulary
        if not isinstance(tokens, Tensor):
            raise ValueError(f"tokens must be an int64 tensor (B, L={L}), got {type(tokens).__name__}")
        if tokens.dtype != torch.int64 or tokens.ndim != 2 or tokens.shape[1] != L:
            raise ValueError(f"tokens must be int64 (B, L={L}), got {str(tokens.dtype)[6:]} {tuple(tokens.shape)}")
        if (wrong := tokens[(tokens < 0) | (tokens >= V)]).numel():
            raise ValueError(f"tokens must be within [0, V={V}), got {wrong[0].item()}")
        images = self.tokenizer.decode(tokens).permute(0, 2, 3, 1)
        return [Image.fromarray(((image + 1) * 127.5).round().byte().cpu().numpy()) for image in images]


def read_neighbors(folder: Path, vocabulary: int) -> Tensor:
    """The table (V, k) of neighbors.safetensors, uint16 or int32; CheckpointError if it is of another codebook."""
    path = folder / "neighbors.safetensors"
    table = checkpoint.read_weights(path).get("neighbors")
    if table is None or table.ndim != 2 or len(table) != vocabulary:
        shape = None if table is None else tuple(table.shape)
        raise CheckpointError(f"neighbors {path} must be a table of {vocabulary} codes, got {shape}")
    if table.dtype not in (torch.uint16, torch.int32) or not table.shape[1]:
        raise CheckpointError(f"neighbors {path} must be uint16 or int32, with at least one column, "
                              f"got {str(table.dtype)[6:]} {tuple(table.shape)}")
    if (wrong := (ids := table.int()) < 0).logical_or_(ids >= vocabulary).any():
        raise CheckpointError(f"neighbors {path} must be codes within [0, {vocabulary}), got {ids[wrong][0].item()}")
    return table
