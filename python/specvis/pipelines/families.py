"""Families of transformers from their folders: model, prompts, draft model and pixels. See docs/families.md."""
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ..files import first_line
from ..models.interface import inference, num_tokens
from ..models.transformers import Emu3, GLMImage, ImageModel, JanusPro, anole, lumina_mgpt
from .checkpoint import CheckpointError, ModelSettings, check_device, model_type_of
from .discrete import Pipeline
from .family_parts import DECODER, load_eagle, load_vqgan, read_table
from .sources import files_of, open_source

PREFIX_LEN = 256  # ids that a prompt has at most, with what a family puts around it
# What the releases put around Emu3's prompts.
EMU3_WANTED = ". masterpiece, film grained, best quality."
EMU3_UNWANTED = ("lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, "
                 "worst quality, low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry.")
TREE, LANTERN = {"depth": 5, "width": 10, "nodes": 59}, {"k": 1000, "delta": 0.4}
ADT = TREE | {"width_step": 3, "widths": (4, 13)}


@dataclass(frozen=True)
class Family:
    """What a family's files are, and how its pictures are usually drawn."""

    model_type: str     # in config.json
    model: str          # class of transformers
    processor: str      # likewise: what reads prompts
    image_size: int     # pixels a side of a usual picture
    stride: int         # pixels a side of a code
    settings: ModelSettings
    scaled: bool = False  # codes have length 1 where they become pixels
    # the papers' settings of methods where they are others than for the shipped model; sources: docs/families.md
    methods: dict[str, dict] = field(default_factory=dict)


CHAMELEON = ("chameleon", "ChameleonForConditionalGeneration", "AutoTokenizer")
FAMILIES = {
    "anole": Family(*CHAMELEON, 512, 16, ModelSettings(3.0, 2000, 1.0), methods={
        "eagle2": TREE, "lantern": TREE | LANTERN, "lantern+optimal": TREE | LANTERN, "adt-tree": ADT,
        "adt-tree+lantern": ADT | LANTERN}),
    "lumina-mgpt": Family(*CHAMELEON, 768, 16, ModelSettings(3.0, 2000, 1.0), methods={
        name: TREE | {"depth": 6} for name in ("eagle2", "lantern", "lantern+optimal")}),
    "emu3": Family("emu3", "Emu3ForConditionalGeneration", "Emu3Processor", 720, 8, ModelSettings(3.0, 2048, 1.0)),
    "janus-pro": Family("janus", "JanusForConditionalGeneration", "JanusProcessor", 384, 16,
                        ModelSettings(5.0, 0, 1.0), scaled=True),
    "glm-image": Family("glm_image", "GlmImageForConditionalGeneration", "GlmImageProcessor", 1024, 32,
                        ModelSettings(1.0, 0, 0.75, temperature=0.9), scaled=True),
}
WEIGHTS = {".ckpt", ".pt", ".pth", ".bin", ".safetensors", ".npy"}
TOKENIZERS = "tokenizer.json", "tokenizer.model", "vocab.json"
SUBFOLDERS = "vision_language_encoder", "processor"  # of GLM-Image's files


class FamilyPrompts:
    """Prompts that are free text, around which a family puts what begins an image."""

    styles = ()

    def __init__(self, ids_of: Callable[[str], list[int]], prefix_len: int):
        self.ids_of, self.prefix_len = ids_of, prefix_len

    def encode(self, prompts: Sequence[str]) -> list[list[int]]:
        """The vocabulary ids of each prompt. ValueError: one is no text, or empty, or longer than prefix_len ids"""
        found = []
        for prompt in prompts:
            if not isinstance(prompt, str) or not prompt.strip():
                raise ValueError(f"a prompt must be text with at least one word, got {prompt!r}")
            found.append(list(map(int, self.ids_of(prompt))))
            if len(found[-1]) > self.prefix_len:
                raise ValueError(f"a prompt must have at most prefix_len={self.prefix_len} ids with what the model "
                                 f"puts around it, got {len(found[-1])} of {prompt[:60]!r}; shorten it")
        return found


class FamilyPipeline(Pipeline):
    """A model of one of FAMILIES with what surrounds it: see `Pipeline`, whose methods it has. `gpt` is the target, an
    `ImageModel`; `note` says what is missing for pictures."""

    draft_files = {"eagle": "EAGLE head (--draft)", "small": "small model (--draft)"}

    def __init__(self, name: str, target: ImageModel, prompts: FamilyPrompts, folder: Path, side: int):
        nn.Module.__init__(self)
        family = FAMILIES[name]
        self.family, self.settings, self.folder, self.prompts = family, family.settings, folder, prompts
        self.gpt, self.eagle, self.small, self.table, self._neighbors = target, None, None, None, {}
        self.name, self.usual_methods, self.own_side, self.note = name, family.methods, side, ""
        self.has_codebook = "quantize" not in target.model.missing  # else transformers has filled in random numbers

    @staticmethod
    def load(folder: str | Path, family: str, device: torch.device | str = "cpu", *,
             dtype: torch.dtype = torch.float32, draft: str | Path | None = None, vq: str | Path | None = None,
             image_size: int | None = None, prefix_len: int = PREFIX_LEN) -> "FamilyPipeline":
        """The model in a folder as transformers has it, or by its name on a model hub, if it was fetched before.

        On a CPU the op `decoder_layers` reads what is drafted, where it can. Its copy of the layers takes as much
        memory as they do.

        Args:
            family:     one of FAMILIES
            draft:      folder or file with an EAGLE head, as LANTERN has released them or `python -m training eagle`
                writes them; or folder of a smaller model of the family. LANTERN's table of neighbors in it is used
            vq:         file or folder with Chameleon's VQ-GAN (vqgan.ckpt), which makes pictures of Anole's and
                Lumina-mGPT's codes; None: the model's own files, if they have it
            image_size: pixels a side; None: the family's usual number
            prefix_len: how many ids a prompt has at most

        Raises:
            CheckpointError: files are missing, of another model, or of another family, or do not belong together
            ValueError:      an argument differs from the above, or torch cannot use the device
        """
        check_device(device)
        about = family_of(family)
        folder, draft, vq = (path and found(path) for path in (folder, draft, vq))
        size, step = image_size or about.image_size, about.stride * (1 + (family == "lumina-mgpt"))  # of even grids
        if image_size is not None and (not isinstance(image_size, int) or image_size < step or image_size % step):
            raise ValueError(f"image_size must be a positive multiple of {step} for {family}, got {image_size!r}")
        check_type(folder, about, family)
        processor, model = read_processor(folder, about), read_model(folder, about, family, dtype).to(device)
        target, ids_of = target_of(family, model, processor, size // about.stride, prefix_len)
        if image_size not in (None, target.grid[0] * about.stride):
            raise ValueError(f"image_size must not be given for {family}, whose grid its files say, got {size}")
        pipeline = FamilyPipeline(family, target, FamilyPrompts(ids_of, prefix_len), folder, size)
        pipeline.add_decoder(vq)
        if draft is not None:
            pipeline.add_draft_model(draft, processor)
        for part in filter(None, (target, pipeline.small) if target.device.type == "cpu" else ()):
            with suppress(ValueError):  # of GLM-Image, for instance: its modules read
                part.use_decoder_layers()
        return pipeline.requires_grad_(False).eval()

    def add_decoder(self, vq: Path | None) -> None:
        """Find what makes pictures of Chameleon's codes, in the model's own files if nothing else is given."""
        target = self.gpt
        if self.family.model_type != "chameleon":
            if vq is not None:
                raise ValueError(f"vq must not be given for {type(target).__name__}, whose files have its decoder")
            if not hasattr(target.vqmodel, "decode"):
                self.note = ("GLM-Image's pictures are made by GlmImagePipeline of diffusers; here they show codes as "
                             "colors, and --out NAME.npy keeps the codes for it (docs/families.md)")
            else:
                self.set_side(len(target.vqmodel.config.channel_multiplier))
            return
        source = open_source(self.folder if vq is None else vq)
        if vq is None and not any(map(DECODER.match, source.tensors)):
            self.note = ("the model's files have no decoder of Chameleon's codes: pictures show codes as colors, and "
                         "--vq FILE (vqgan.ckpt) makes real ones")
            return
        target.vqmodel = load_vqgan(source, target.num_codes, target.codebook if self.has_codebook else None).to(
            target.device)
        self.has_codebook = True
        self.set_side(len(target.vqmodel.decoder.up))

    def set_side(self, levels: int) -> None:
        """levels: resolutions of the decoder, each of which has twice the pixels a side of the one before"""
        self.own_side = self.gpt.grid[0] * 2 ** (levels - 1)

    def add_draft_model(self, folder: Path, processor) -> None:
        """An EAGLE head, or a smaller model of the family, and LANTERN's table of neighbors if it is there."""
        tables = sorted(folder.glob("top_*_indices.npy")) if folder.is_dir() else []
        if tables:
            self.table = read_table(tables[0], self.gpt.num_codes).to(self.device)
        source = open_source(part_of(folder, 0))
        if "fc.weight" in source.tensors:
            self.eagle = load_eagle(source, self.gpt)
            return
        model = read_model(folder, self.family, self.name, self.dtype).to(self.device)
        small, _ = target_of(self.name, model, processor, self.gpt.grid[0], self.gpt.prefix_len)
        if small.grid != self.gpt.grid or not torch.equal(small.ids, self.gpt.ids):
            raise CheckpointError(f"draft {folder} must be a model of the target's grid {self.gpt.grid} and ids of "
                                  f"codes, got grid {small.grid} and {small.num_codes} codes")
        self.small = small

    def save(self, folder: str | Path) -> None:
        raise ValueError("a family's files are transformers': save model.save_pretrained(folder)")

    def __repr__(self) -> str:
        return (f"FamilyPipeline({self.folder}: {self.side} x {self.side} pixels, {num_tokens(self.gpt)} tokens, "
                f"{self.gpt.num_codes} codes, {self.device}, {str(self.dtype)[6:]})")

    @property
    def device(self) -> torch.device:
        return self.gpt.device

    @property
    def dtype(self) -> torch.dtype:
        return self.gpt.embed.weight.dtype

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.gpt)

    @property
    def side(self) -> int:
        return self.own_side

    def codebook(self, as_stored: bool) -> Tensor:
        if not self.has_codebook:
            raise ValueError(f"vq must be given (--vq vqgan.ckpt) for neighbors of codes: the files of {self.folder} "
                             "lack the codebook")
        codes = self.gpt.codebook.float()
        return F.normalize(codes, dim=-1) if self.family.scaled and not as_stored else codes

    def source(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        return self.gpt.padded(self.prompts.encode(prompts))

    def on_grid(self, tokens: Tensor) -> Tensor:
        return self.gpt.codes_of(tokens)

    @inference
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L) int64 -> B pictures; without a decoder the codes as colors, as `note` says."""
        if not self.note:
            return self.gpt.pictures(tokens)
        by_number = torch.arange(self.gpt.num_codes, device=self.device).float()[:, None]
        colors = code_colors(self.gpt.codes_of(tokens), self.codebook(True) if self.has_codebook else by_number)
        return [picture.resize((self.side, self.side), Image.Resampling.NEAREST) for picture in colors]


def family_of(name: str) -> Family:
    """ValueError: there is no such family"""
    if name not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, got {name!r}")
    return FAMILIES[name]


def found(folder: str | Path) -> Path:
    """A folder or file that exists, or the copy in Hugging Face's cache of what a model hub has by this name."""
    if (path := Path(folder)).exists():
        return path
    wanted = f"there is no file or folder {folder}"
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(folder)) and path.suffix not in WEIGHTS:
        with suppress(ImportError, OSError, ValueError):  # no transformers, no cache, no such name
            from transformers.utils import cached_file

            for part in ("", SUBFOLDERS[0]):
                if file := cached_file(str(folder), "config.json", subfolder=part, local_files_only=True,
                                       _raise_exceptions_for_missing_entries=False):
                    return Path(file).parent.parent if part else Path(file).parent
        wanted += f"; if it is the name of a model hub, fetch it first: hf download {folder}"
    raise CheckpointError(wanted)


def part_of(folder: Path, which: int) -> Path:
    """The folder itself, or its part for the model (0) or the processor (1)."""
    return part if (part := folder / SUBFOLDERS[which]).is_dir() else folder


def read_model(folder: Path, family: Family, name: str, dtype: torch.dtype) -> nn.Module:
    """The model of a folder; `missing` of it are the parts of its VQ model that the files lack.

    Raises:
        CheckpointError: a file is missing, or is of another family, or a tensor is missing
    """
    check_type(folder, family, name)
    folder = part_of(folder, 0)
    files_of(folder)
    try:
        import transformers

        model_class = getattr(transformers, family.model)
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
    except ImportError as error:
        raise ValueError("a family needs transformers, which is missing: pip install \"specvis[transformers]\""
                         ) from error
    except AttributeError as error:
        raise ValueError(f"transformers must have {family.model} for {name}, got version {transformers.__version__}"
                         ) from error
    try:
        model, report = model_class.from_pretrained(folder, local_files_only=True, dtype=dtype,
                                                    output_loading_info=True)
    except MemoryError:
        raise
    except Exception as error:  # transformers and safetensors raise many kinds, and none is passed over
        raise CheckpointError(f"model {folder} cannot be read by transformers: {first_line(error)}") from error
    missing = sorted(report["missing_keys"])
    if wrong := [key for key in missing if family.model_type != "chameleon" or ".vqmodel." not in key]:
        raise CheckpointError(f"model {folder} lacks {wrong[0]} and {len(wrong) - 1} more tensors of {family.model}")
    model.requires_grad_(False).eval()
    model.missing = {key.split(".vqmodel.")[1].split(".")[0] for key in missing}
    return model


def check_type(folder: Path, family: Family, name: str) -> None:
    """CheckpointError unless config.json is of this family"""
    if (model_type := model_type_of(folder)) != family.model_type:
        raise CheckpointError(f"model must be a folder with a config.json of model_type {family.model_type}, as {name} "
                              f"has it, got {model_type or 'none that can be read'} in {folder}")


def read_processor(folder: Path, family: Family):
    """What reads prompts. CheckpointError if the folder has none"""
    folder = part_of(folder, 1)
    if not any((folder / name).exists() for name in TOKENIZERS):
        raise CheckpointError(f"model must be a folder with its tokenizer ({', '.join(TOKENIZERS)}), got {folder}, "
                              "which has none")
    try:
        import transformers

        return getattr(transformers, family.processor).from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise CheckpointError(f"model {folder} has no {family.processor} that transformers can read: "
                              f"{first_line(error)}") from error


def target_of(family: str, model: nn.Module, processor, side: int,
              prefix_len: int) -> tuple[ImageModel, Callable[[str], list[int]]]:
    """The target for pictures of side x side codes, and what gives a prompt's vocabulary ids."""
    def asked(text, **settings):
        return processor(text=[text], return_tensors="pt", **settings)

    def chat(text):
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    if family in ("anole", "lumina-mgpt"):
        target = (anole if family == "anole" else lumina_mgpt)(model, prefix_len, (side, side))
        size = f"{side * 16}x{side * 16}"
        before = "" if family == "anole" else f"Generate an image of {size} according to the following prompt:\n"
        return target, lambda text: [0, *processor.encode(before + text, add_special_tokens=False), 8710,
                                     *target.begin]
    if family == "emu3":
        settings = {"return_for_image_generation": True, "ratio": "1:1", "image_area": (8 * side) ** 2}
        unwanted = asked(EMU3_UNWANTED, **settings)
        target = Emu3(model, prefix_len, tuple(map(int, unwanted["image_sizes"][0])), unwanted["input_ids"][0].tolist())
        return target, lambda text: asked(text + EMU3_WANTED, **settings)["input_ids"][0].tolist()
    if family == "janus-pro":
        def ids_of(text):
            text = processor.apply_chat_template([chat(text)], add_generation_prompt=True)[0]
            return asked(text, generation_mode="image")["input_ids"][0].tolist()

        return JanusPro(model, prefix_len), ids_of

    size = {"target_h": 32 * side, "target_w": 32 * side}
    if "processor_kwargs" in inspect.signature(processor.apply_chat_template).parameters:  # of later transformers 5
        size = {"processor_kwargs": size}

    def read(text):
        return processor.apply_chat_template([chat(text)], tokenize=True, return_dict=True, return_tensors="pt", **size)

    return GLMImage(model, prefix_len, read("a")["image_grid_thw"]), lambda text: read(text)["input_ids"][0].tolist()


def code_colors(codes: Tensor, codebook: Tensor) -> list[Image.Image]:
    """Codes (B, rows, columns) as pictures of a pixel a code: the codebook's three principal components as colors."""
    centered = codebook - codebook.mean(0)
    axes = torch.linalg.eigh(centered.T @ centered).eigenvectors[:, -3:]
    rank = (centered @ axes).argsort(0).argsort(0)
    colors = (rank * 255 // max(1, len(codebook) - 1)).byte()[codes].expand(*codes.shape, 3).cpu().numpy()
    return [Image.fromarray(np.ascontiguousarray(picture)) for picture in colors]
