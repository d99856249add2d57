"""Models of Hugging Face's transformers as targets: Chameleon (Anole, Lumina-mGPT), Emu3, Janus-Pro, GLM-Image, others.

The weights stay where they are: a target holds the model that transformers has loaded, and nothing here imports
transformers. Of its vocabulary only the ids that stand for codes of an image are ever looked at. They are numbered as
in the codebook, from 0 to C - 1. Where every row of an image ends in an id of its own, which is forced, that is C.

What is forced after an image (its end, the end of a frame) is not drawn: a picture is whole without it.
"""
import inspect
import operator
import warnings
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from specvis_kernels import decoder_layers
from specvis_kernels.compat._hosts import MASKED, check_model, unwrapped
from specvis_kernels.compat._layers import (
    IN_PANELS,
    are_unchanged,
    is_unchanged,
    pack_decoder,
    parts_of,
    rotations_of,
    why_not,
)

from . import layers
from .interface import Nodes, inference, num_tokens
from .layers import Cache, Packing
from .llamagen import condition_mask

ANOLE_NULL = (0, 8197)            # begin of text, begin of image
EMU3_START, EMU3_IMAGE = "<|image start|>", "<|image token|>"
LUMINA_NEWLINE, LUMINA_IMAGE, LUMINA_SIZE = 8803, 8197, 8804  # the last one: of size 0


def whole_numbers(grid: Sequence[int]) -> tuple[int, int]:
    """(rows, columns), as a list or tensors of a processor may have them."""
    try:
        rows, columns = map(operator.index, grid)
    except (TypeError, ValueError):
        raise ValueError(f"grid must be two whole numbers, rows and columns of codes, got {grid!r}") from None
    return rows, columns


class SlotCache(Cache):
    """Keys and values of R rows, as transformers asks for them; each read says in which columns to keep its own."""

    is_compileable = False

    def begin_read(self, slots: Tensor, columns: int) -> None:
        """slots (R, N) int64: where the next entries are. They may see the first `columns` columns."""
        R, T = self.data.shape[1:3]
        first = torch.arange(0, R * T, T, device=slots.device)  # of each row
        self.slots, self.num_columns = (first[:, None] + slots).flatten(), columns

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """Keep (R, heads, N, head_dim) of a layer, and return all that may be seen."""
        heads = tuple(self.data.shape[4:])
        if not heads == keys.shape[1::2] == values.shape[1::2]:
            raise ValueError(f"model must have keys and values of {heads[0]} heads of {heads[1]}, as its configuration "
                             f"says, got {tuple(keys.shape[1::2])} and {tuple(values.shape[1::2])} "
                             "(jacobi_generate takes others)")
        entries = torch.stack([keys, values], 1).permute(0, 3, 1, 2, 4).flatten(0, 1)
        self.data[layer].flatten(0, 1).index_copy_(0, self.slots, entries)
        seen = self.data[layer, :, :self.num_columns].permute(2, 0, 3, 1, 4)
        return seen[0], seen[1]

    def get_seq_length(self, *_) -> int:
        return 0  # asked for where there are no position_ids


def positions_of(position_ids: Tensor, padding_mask: Tensor) -> Tensor:
    """Positions (R, N) that count from each row's first real entry. padding_mask: (R, S) bool"""
    return (position_ids - (~padding_mask).sum(1, keepdim=True)).clamp(min=0)


class ImageModel:
    """A causal language model of transformers as a `TargetModel`.

    A condition is a prompt, padded on the left to S entries. What guidance is measured against is a prompt too, with
    its own padding. Positions count from a row's first real entry, as in `generate`.
    """

    begin: tuple[int, ...] = ()  # the vocabulary ids that begin an image: a prompt ends with them
    way_out = "give codes_of(tokens) to the one that its authors published"  # for pictures without a decoder

    def __init__(self, model: nn.Module, ids: Sequence[int], prefix_len: int, grid: tuple[int, int],
                 null_prompt: Sequence[int], *, newline: int | None = None, decoder: nn.Module | None = None,
                 vqmodel: nn.Module | None = None):
        """
        Args:
            model:       from transformers; peft's wrapper is taken off, and its adapters stay
            ids:         the vocabulary id of each of C codes
            prefix_len:  S, how many ids a prompt has at most
            grid:        (rows, columns) of codes
            null_prompt: vocabulary ids that are read in place of the prompt, for guidance
            newline:     the vocabulary id that is forced after every row; None: no id is
            decoder:     the language model in it, which embeddings go through; None: model.get_decoder()
            vqmodel:     what turns codes into pixels; None: nothing does

        Raises:
            ValueError: a token of a tree would not have the logits of its path: the attention takes no mask, or sees
                only a window shorter than prompt and image, or drops entries, the layers are recurrent, or rotary
                embeddings change with the length (new_cache asks it again); or an id is not in the vocabulary or is
                there twice, a size is below 1, or null_prompt is empty or longer than prefix_len
        """
        model, grid = unwrapped(model), whole_numbers(grid)
        self.model, self.vqmodel = model, vqmodel
        decoder = model.get_decoder() if decoder is None else decoder
        self.decoder = model.base_model if decoder is model else decoder  # of GPT-2 in transformers 4
        self.config = self.decoder.config
        has_cache = "cache" in inspect.signature(self.decoder.forward).parameters  # from transformers 5.24 on
        self.cache_name = "cache" if has_cache else "past_key_values"
        weight, special = self.embed.weight, [] if newline is None else [newline]
        hook = getattr(self.embed, "_hf_hook", None)  # accelerate's, which brings weights from elsewhere
        self.device = torch.device(hook.execution_device) if weight.is_meta and hook else weight.device
        self.ids = torch.tensor([*ids, *special], dtype=torch.int64, device=self.device)
        if prefix_len < 1 or min(grid) < 1 or not len(ids):
            raise ValueError("prefix_len, grid and the number of ids must be at least 1, "
                             f"got {prefix_len}, {tuple(grid)} and {len(ids)}")
        if outside := [i for i in self.ids.tolist() if not 0 <= i < len(weight)]:
            raise ValueError(f"ids must be within the vocabulary, [0, {len(weight)}), got {outside[0]}")
        if len(set(self.ids.tolist())) < len(self.ids):
            raise ValueError("ids and newline must all be different, got one twice")
        self.num_codes, self.prefix_len = len(ids), prefix_len
        self.vocab_size, self.codes = len(self.ids), (0, len(ids))
        self.has_newline = newline is not None
        self.grid = grid[0], grid[1] + self.has_newline  # of tokens
        self.null_prompt = self.padded([list(null_prompt)], "null_prompt")
        first, last = int(self.ids[0]), int(self.ids[0]) + len(ids)
        are_in_order = self.ids[:len(ids)].tolist() == list(range(first, last))
        self.head_rows = slice(first, last) if are_in_order else self.ids[:len(ids)]  # a slice is not copied
        self.packing, self.num_layers = None, self.config.num_hidden_layers  # packing: see use_decoder_layers
        self.is_replayable = False  # new_cache asks
        if self.device.type not in IN_PANELS:
            self.packing = Packing()
        self.check_model()
        if type(self) is ImageModel:
            self.check_head()

    @property
    def embed(self) -> nn.Module:
        return self.model.get_input_embeddings()  # an adapter may have been added

    def check_model(self) -> None:
        check_model(self.decoder, self.config, self.prefix_len + num_tokens(self), MASKED, self.model)

    @inference
    def check_head(self) -> None:
        """The logits of a prompt must be the head's: some models scale, cap or mask them, or change hidden states."""
        ids, is_real = self.null_prompt
        last = self.ids[:self.num_codes]
        ids = torch.cat([ids[is_real], last[:1]])[None]  # of padding alone all logits may be 0
        own = self.model(input_ids=ids).logits[:, -1:, last].float()
        if not own.isfinite().all():
            raise ValueError("model must give finite logits, got NaN or infinite ones for null_prompt")
        try:
            ours = self.code_logits(self.decoder(input_ids=ids).last_hidden_state[:, -1:]).float()
        except RuntimeError:  # something stands between the two
            ours = torch.full_like(own, torch.nan)
        if not (ours - own).abs().max() <= max(1e-4, 4 * torch.finfo(self.embed.weight.dtype).eps) * own.abs().max():
            raise ValueError("model must give the logits of its head as they are, got a "
                             f"{type(self.model).__name__}, which changes them (jacobi_generate reads what it gives; "
                             "or derive from ImageModel, with a code_logits that does the same)")

    def use_decoder_layers(self) -> None:
        """Let the op `decoder_layers` read what is drafted from now on. On CUDA it does so without being asked.

        On a CPU its copy of the layers takes as much memory as they do; on CUDA some of the model's weights share
        memory from then on. Prompts, and whatever else uses the model, are read by its modules; so is all, if a
        decoding begins after the layers were given hooks, adapters or quantized weights.

        Raises:
            ValueError: the layers are not like Llama's, Emu3's, Chameleon's or, on a GPU, GLM-Image's, or have no dtype
                that the op reads
        """
        self.packing = Packing()
        self.pack_layers()
        if reason := self.packing.why_not:
            self.packing = None
            raise ValueError(f"model must have layers as Llama, Emu3 or Chameleon have them, got {reason} (leave "
                             "use_decoder_layers out: the model's own modules read them)")

    def pack_layers(self) -> None:
        parts, num_positions = parts_of(self.decoder), self.prefix_len + num_tokens(self)
        self.packing.check(parts, tuple({type(module) for part in parts for module in part.modules()}),
                           lambda: pack_decoder(self.decoder, num_positions),
                           why_not=why_not(self.decoder, self.num_layers), on_gpu=True)

    @property
    def can_replay(self) -> bool:
        """Whether CUDA graphs can hold a step: one op reads the layers, and no module runs anybody's hooks."""
        return layers.USE_KERNELS and self.is_replayable

    # --- prompts ---

    def padded(self, prompts: Sequence[Sequence[int]], name: str = "prompts") -> tuple[Tensor, Tensor]:
        """Lists of vocabulary ids -> (B, S) int64, padded on the left, and (B, S) bool: where they are real."""
        lengths, size = [len(prompt) for prompt in prompts], len(self.embed.weight)
        if not lengths or min(lengths) < 1 or max(lengths) > self.prefix_len:
            raise ValueError(f"{name} must have 1 to prefix_len={self.prefix_len} ids each, got {lengths}")
        if outside := [i for prompt in prompts for i in prompt if not 0 <= i < size]:
            raise ValueError(f"{name} must be within the vocabulary, [0, {size}), got {outside[0]}")
        rows = [[0] * (self.prefix_len - len(prompt)) + list(prompt) for prompt in prompts]
        index, first = torch.arange(self.prefix_len, device=self.device), torch.tensor(lengths, device=self.device)
        return torch.tensor(rows, device=self.device), index >= self.prefix_len - first[:, None]

    def condition(self, prompts: Sequence[Sequence[int]] | Tensor,
                  attention_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Embed prompts, each of which ends with what begins an image.

        Args:
            prompts:        B lists of vocabulary ids; or (B, T) int64, as a processor gives them
            attention_mask: (B, T) of such: 0 where it is padding; None: nowhere
        Returns:
            embeddings (B, S, dim), padding_mask (B, S) bool: True where the prompt is real

        Raises:
            ValueError: a prompt is empty or has more than S ids or one outside of the vocabulary, is padded without an
                attention_mask, or does not end with what begins an image of this size, where that is known
        """
        if attention_mask is not None and getattr(prompts, "shape", None) != attention_mask.shape:
            raise ValueError("attention_mask must have the shape of prompts, "
                             f"{tuple(getattr(prompts, 'shape', ()))}, got {tuple(attention_mask.shape)}")
        if isinstance(prompts, Tensor):
            is_real = torch.ones_like(prompts) if attention_mask is None else attention_mask
            pad = self.padding_id()
            if attention_mask is None and pad is not None and (prompts[:, [0, -1]] == pad).any():
                raise ValueError("attention_mask must be given with padded prompts, as a processor makes it, got None "
                                 f"and a prompt that begins or ends with {pad}, the model's pad_token_id")
            prompts = [row[real.bool()].tolist() for row, real in zip(prompts, is_real)]
        ids, padding_mask = self.padded(prompts)
        for prompt in prompts:
            self.check_begin([int(i) for i in prompt])
        return self.embed(ids), padding_mask

    def padding_id(self) -> int | None:
        """The id that stands for padding and for nothing else."""
        for config in (getattr(self.model, "generation_config", None), self.config):
            pad = getattr(config, "pad_token_id", None)
            if pad is not None:
                return None if pad == config.bos_token_id else pad
        return None

    def check_begin(self, prompt: list[int]) -> None:
        if self.begin and tuple(prompt[-len(self.begin):]) != self.begin:
            rows, columns = self.grid
            raise ValueError(f"prompts must end with {', '.join(map(str, self.begin))}, which begins an image of grid "
                             f"({rows}, {columns - self.has_newline}), got {', '.join(map(str, prompt[-3:]))}")

    def null_inputs(self, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        """What guidance is measured against, for prompts with these masks (B, S): see `TargetModel`."""
        ids, is_real = (t.expand(len(padding_mask), -1) for t in self.null_prompt)
        return self.embed(ids), is_real

    def null_condition(self, batch: int) -> Tensor:
        """`null_inputs` for prompts of S ids: (batch, S, dim)."""
        return self.null_inputs(torch.ones(batch, self.prefix_len, dtype=torch.bool, device=self.ids.device))[0]

    # --- reading ---

    def new_cache(self, rows: int, columns: int) -> SlotCache:
        self.check_model()
        if self.packing:
            self.pack_layers()
        self.is_replayable = bool(self.packing and self.packing.packed) and are_unchanged(self.model)
        if self.packing:
            if self.packing.why_not and self.device.type not in IN_PANELS:
                warnings.warn("the model's own modules read each step, without CUDA graphs: decoder_layers cannot read "
                              f"{self.packing.why_not}", stacklevel=2)  # which Python shows once
        c = self.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        heads = getattr(c, "num_key_value_heads", None) or c.num_attention_heads
        return SlotCache(self.num_layers, rows, heads, columns, head_dim, device=self.device,
                         dtype=self.embed.weight.dtype)

    def prefill(self, condition: Tensor, padding_mask: Tensor, cache: SlotCache) -> Tensor:
        """Read conditions (R, S, dim); hidden states (R, S, dim). See `TargetModel.prefill`."""
        slots = torch.arange(self.prefix_len, device=condition.device).expand(len(condition), -1)
        return self.read(condition, slots, padding_mask, condition_mask(padding_mask, self.prefix_len), cache, slots)

    def extend(self, tokens: Tensor, nodes: Nodes, cache: SlotCache) -> Tensor:
        """Read tokens (R, N) after what the cache holds; hidden states (R, N, dim). See `TargetModel.extend`."""
        return self.read_nodes(self.embed_tokens(tokens), nodes, cache)

    def read_nodes(self, x: Tensor, nodes: Nodes, cache: SlotCache) -> Tensor:
        """Embeddings (R, N, dim) after what the cache holds -> hidden states (R, N, dim)."""
        packed = self.packing and self.packing.get(x, self.pack_layers)
        if packed:
            layers, rotations = packed
            positions = self.positions(nodes.position_ids, nodes.padding_mask)
            if positions.ndim == 3:  # on three axes: each node has a rotation of its own
                rotations = rotations_of(self.decoder, positions, x)
                positions = torch.arange(len(rotations), device=x.device).view(positions.shape[1:])
            return decoder_layers(x, layers, cache.data, nodes.lengths, nodes.ancestors, positions, rotations,
                                  first_node=nodes.first, key_mask=nodes.padding_mask)
        return self.read(x, nodes.position_ids, nodes.padding_mask, nodes.mask, cache, nodes.slots)

    def teacher_forced(self, condition: Tensor, padding_mask: Tensor, tokens: Tensor) -> Tensor:
        """Hidden states (R, S + L - 1, dim) at the S entries of conditions and at all but the last of `tokens` (R, L).
        """
        return self.read_causally(torch.cat([condition, self.embed_tokens(tokens[:, :-1])], 1), padding_mask)

    def read_causally(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        """Embeddings (R, N, dim), of which the first are conditions with these masks -> hidden states. No cache."""
        position_ids = torch.arange(x.shape[1], device=x.device).expand(len(x), -1)
        return self.read(x, position_ids, padding_mask, condition_mask(padding_mask, x.shape[1]))

    def read(self, x: Tensor, position_ids: Tensor, padding_mask: Tensor, mask: Tensor,
             cache: SlotCache | None = None, slots: Tensor | None = None) -> Tensor:
        """Embeddings (R, N, dim) -> hidden states after the last norm. They see what `mask` says, and are kept in the
        cache's `slots`."""
        more = {}
        if cache is not None:
            cache.begin_read(slots, mask.shape[-1])
            more[self.cache_name] = cache
        if self.config._attn_implementation == "eager":  # eager attention adds the mask to the scores
            mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min).to(x.dtype)[:, None]
        else:
            mask = mask[:, None]
        positions = self.positions(position_ids, padding_mask)
        return self.decoder(inputs_embeds=x, attention_mask=mask, position_ids=positions, use_cache=cache is not None,
                            **more).last_hidden_state

    def positions(self, position_ids: Tensor, padding_mask: Tensor) -> Tensor:
        """`Nodes.position_ids` (R, N) -> as the language model takes them, for prompts with these masks (R, S)."""
        last_read = self.prefix_len + max(num_tokens(self) - 2, 0)  # a model may know no position behind it
        return positions_of(position_ids.clamp(max=last_read), padding_mask)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.embed(self.ids[tokens])

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, N, dim) hidden states -> (R, N, V) logits. A forced token's is 0: it is the only one in its range."""
        logits = self.code_logits(hidden)
        if logits.dtype == torch.float64:  # which no op reads
            logits = logits.float()
        if not self.has_newline:
            return logits
        padded = logits.new_zeros(*logits.shape[:-1], self.vocab_size)
        padded[..., :self.num_codes] = logits
        return padded

    def code_logits(self, hidden: Tensor) -> Tensor:
        head = self.model.get_output_embeddings()
        if not is_unchanged(head, (nn.Linear,)) or type(head.weight) is not nn.Parameter:  # quantized, for instance
            return head(hidden)[..., self.head_rows]
        bias = head.bias
        return F.linear(hidden, head.weight[self.head_rows], None if bias is None else bias[self.head_rows])

    def id_range(self, positions: Tensor) -> Tensor | None:
        """The ids (.., 2) that tokens may have at positions (..): all codes, or the newline alone."""
        if not self.has_newline:
            return None
        is_newline, C = (positions + 1) % self.grid[1] == 0, self.num_codes
        return torch.stack([torch.where(is_newline, C, 0), torch.where(is_newline, C + 1, C)], -1)

    # --- what becomes of tokens ---

    @property
    def codebook(self) -> Tensor:
        """(C, channels) the codes' vectors, for `codebook_neighbors`."""
        return self.vqmodel.quantize.embedding.weight.detach()

    def codes_of(self, tokens: Tensor) -> Tensor:
        """Tokens (B, L) -> (B, rows, columns) int64, the numbers of their codes."""
        if tokens.shape[1:] != (num_tokens(self),):
            raise ValueError(f"tokens must be (B, L={num_tokens(self)}), got {tuple(tokens.shape)}")
        rows, columns = self.grid
        return tokens[:, -rows * columns:].reshape(-1, rows, columns)[..., :columns - self.has_newline]

    def ids_of(self, tokens: Tensor) -> Tensor:
        """Tokens (B, L) -> their vocabulary ids (B, L), newlines included."""
        return self.ids[tokens]

    @inference
    def pictures(self, tokens: Tensor) -> list[Image.Image]:
        """Tokens (B, L) int64 -> B pictures.

        Raises:
            ValueError: the model has no decoder of codes
        """
        if not hasattr(self.vqmodel, "decode"):
            raise ValueError(f"model must have a decoder of codes for pictures, {type(self.model).__name__} has none: "
                             f"{self.way_out}")
        # one by one: several at once are no faster on a CPU, and take more memory
        images = [self.pixels(codes)[0] for codes in self.codes_of(tokens).split(1)]
        images = [image.float().clamp(-1, 1).permute(1, 2, 0) for image in images]
        return [Image.fromarray(((image + 1) * 127.5).round().byte().cpu().numpy()) for image in images]

    def pixels(self, codes: Tensor, channels_last: bool = False) -> Tensor:
        """(B, rows, columns) -> (B, 3, height, width) within [-1, 1]. channels_last: in float32, too"""
        first = getattr(getattr(self.vqmodel, "decoder", None), "conv_in", None)
        if not isinstance(first, nn.Conv2d) or (first.weight.dtype == torch.float32 and not channels_last):
            return self.vqmodel.decode(codes)
        # its input decides the layout of all that follows; the weights stay as they are
        with first.register_forward_pre_hook(lambda _, z: z[0].contiguous(memory_format=torch.channels_last)):
            return self.vqmodel.decode(codes)


class Chameleon(ImageModel):
    """ChameleonForConditionalGeneration. transformers has no decoder for its codes: `vqmodel` may be set to what
    `pipelines.family_parts.load_vqgan` reads."""

    way_out = "set target.vqmodel = load_vqgan('vqgan.ckpt') of specvis.pipelines.family_parts, Chameleon's own"

    def __init__(self, model: nn.Module, prefix_len: int, grid: tuple[int, int], null_prompt: Sequence[int],
                 newline: int | None = None, begin: Sequence[int] = ()):
        """See `ImageModel`; `anole` and `lumina_mgpt` know the last three, and the ids that every prompt ends with."""
        model, self.begin = unwrapped(model), tuple(begin)
        of_code = model.model.vocabulary_mapping.img2bpe
        super().__init__(model, [of_code[code] for code in sorted(of_code)], prefix_len, grid, null_prompt,
                         newline=newline, vqmodel=model.model.vqmodel)


def anole(model: nn.Module, prefix_len: int, grid: tuple[int, int] = (32, 32)) -> Chameleon:
    """Anole: rows of 32 codes without newlines. Its prompts are 0, the text's ids, 8710, 8197."""
    return Chameleon(model, prefix_len, grid, ANOLE_NULL, begin=ANOLE_NULL[1:])


def lumina_mgpt(model: nn.Module, prefix_len: int, grid: tuple[int, int] = (48, 48)) -> Chameleon:
    """Lumina-mGPT: a newline after each row. Its prompts end with what begins an image and its size, which is all that
    guidance is measured against: 8197, 8804 + rows / 2, 8804 + columns / 2.

    Raises:
        ValueError: grid is not of even numbers
    """
    grid = whole_numbers(grid)
    if grid[0] % 2 or grid[1] % 2:
        raise ValueError(f"grid must be two even numbers, got {grid}")
    null_prompt = LUMINA_IMAGE, LUMINA_SIZE + grid[0] // 2, LUMINA_SIZE + grid[1] // 2
    return Chameleon(model, prefix_len, grid, null_prompt, LUMINA_NEWLINE, null_prompt)


class Emu3(ImageModel):
    """Emu3ForConditionalGeneration: a newline after each row."""

    def __init__(self, model: nn.Module, prefix_len: int, grid: tuple[int, int], null_prompt: Sequence[int]):
        """See `ImageModel`. Both kinds of prompts are what Emu3's processor makes of text for image generation."""
        model = unwrapped(model)
        mapping = model.model.vocabulary_mapping
        self.names = {i: name for name, i in mapping.vocab_map.items()}
        super().__init__(model, [mapping.img2bpe[code] for code in sorted(mapping.img2bpe)], prefix_len, grid,
                         null_prompt, newline=mapping.eol_token_id, decoder=model.model.text_model,
                         vqmodel=model.model.vqmodel)

    def check_begin(self, prompt: list[int]) -> None:
        """The end of a prompt names its image's size in text, where the model's vocabulary_map has its words."""
        begin = f"{EMU3_START}{self.grid[0]}*{self.grid[1] - 1}{EMU3_IMAGE}"
        if {EMU3_START, EMU3_IMAGE} <= {*self.names.values()}:
            text = "".join(self.names.get(i, "") for i in prompt)
            if not text.endswith(begin):
                raise ValueError(f"prompts must end with {begin}, as Emu3's processor makes them with "
                                 f"return_for_image_generation for this grid, got ..{text[-40:]}")


class JanusPro(ImageModel):
    """JanusForConditionalGeneration: image tokens have an embedding and a head of their own."""

    def __init__(self, model: nn.Module, prefix_len: int):
        """See `ImageModel`. What guidance is measured against is each prompt with its text replaced by padding, which
        is seen, as `generate` does it; the ids are in the model's generation_config."""
        model = unwrapped(model)
        c = model.generation_config
        begin_image = (getattr(c, "generation_kwargs", None) or {}).get("boi_token_id")
        if begin_image is None:
            raise ValueError("model must be a JanusForConditionalGeneration with generation_config.generation_kwargs"
                             "['boi_token_id'], the id that begins an image, as Janus-Pro's files have it")
        if c.bos_token_id is None or c.pad_token_id is None:
            raise ValueError("model must have generation_config.bos_token_id and pad_token_id, which guidance reads in "
                             f"place of the text, got {c.bos_token_id} and {c.pad_token_id} (set them to those of the "
                             "processor's tokenizer)")
        self.bos, self.pad, self.begin_image, self.begin = c.bos_token_id, c.pad_token_id, begin_image, (begin_image,)
        vqmodel = model.model.vqmodel
        super().__init__(model, range(vqmodel.config.num_embeddings), prefix_len,
                         tuple(vqmodel.quantize.quant_state_dims), [self.bos, self.begin_image],
                         decoder=model.model.language_model, vqmodel=vqmodel)

    def null_inputs(self, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
        is_first = padding_mask & (padding_mask.cumsum(1) == 1)
        ids = torch.where(is_first, self.bos, self.pad)
        ids[:, -1] = self.begin_image
        return self.embed(ids), padding_mask

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        return self.model.prepare_embeddings_for_image_generation(tokens)

    def code_logits(self, hidden: Tensor) -> Tensor:
        return self.model.model.generation_head(hidden)

    def pixels(self, codes: Tensor) -> Tensor:
        return super().pixels(codes.flatten(1), channels_last=True)


class GLMImage(ImageModel):
    """GlmImageForConditionalGeneration: the codes of a small preview, and those of the picture right after them.

    It has no guidance. A position has three axes. In the prompt all three count its ids. In a grid the first axis stays
    where the grid starts, and the others count rows and columns from there; the next grid starts after the longer side.
    An image's tokens are both grids', and `grid` is the picture's. `codes_of` leaves the preview out.
    """

    has_guidance = False
    way_out = ("GlmImagePipeline of diffusers makes them of the prompts and prior_token_ids, which are "
               "codes_of(tokens), each twice along both sides")

    def __init__(self, model: nn.Module, prefix_len: int, image_grid_thw: Tensor | Sequence[Sequence[int]]):
        """See `ImageModel`.

        Args:
            image_grid_thw: (2B, 3) integers, as GLM-Image's processor gives them: for each of B prompts 1, rows,
                columns of the picture and of its preview

        Raises:
            ValueError: image_grid_thw is not such, or not the same two grids for all prompts
        """
        model, grids = unwrapped(model), torch.as_tensor(image_grid_thw, device="cpu").tolist()
        if not grids or grids != grids[:2] * (len(grids) // 2) or any(
                not isinstance(g, list) or len(g) != 3 or g[0] != 1 or min(g) < 1 for g in grids):
            raise ValueError("image_grid_thw must be 1, rows, columns of the picture and of its preview, the same two "
                             f"for each prompt, got {grids}")
        (_, *picture), (_, *preview) = grids[:2]
        self.image_ids = model.config.image_start_token_id, model.config.image_end_token_id
        vqmodel = model.model.vqmodel
        super().__init__(model, range(vqmodel.config.num_embeddings), prefix_len, tuple(picture), self.image_ids[:1],
                         decoder=model.model.language_model, vqmodel=vqmodel)
        axes, start = [], 0
        for rows, columns in (preview, picture):
            cells = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in (rows, columns))).T
            axes.append(F.pad(cells, (0, 0, 1, 0)) + start)
            start += max(rows, columns)
        self.axes = torch.cat(axes, 1).to(self.ids.device)  # (3, L) of the tokens, from the end of the prompt
        self.num_tokens = self.axes.shape[1]

    def check_begin(self, prompt: list[int]) -> None:
        start, end = self.image_ids
        if prompt[-1] != start or end in prompt:
            raise ValueError(f"prompts must end with {start}, which begins an image, and have no picture, whose end "
                             f"is {end}: both grids of image_grid_thw are drawn; got a prompt that ends with "
                             f"{prompt[-1]} and has {prompt.count(end)} pictures")

    def positions(self, position_ids: Tensor, padding_mask: Tensor) -> Tensor:
        """(R, N) -> (3, R, N)"""
        index = position_ids - self.prefix_len
        drawn = self.axes[:, index.clamp(0, self.num_tokens - 1)] + padding_mask.sum(1, keepdim=True)
        return torch.where(index < 0, super().positions(position_ids, padding_mask), drawn)
