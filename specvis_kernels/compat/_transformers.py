"""The requests, the model with its cache, and the output of one call of `generate`, for compat/transformers.py."""
import functools
import inspect
from collections.abc import Sequence, Sized

import torch
from torch import Tensor

from .. import check_status, commit_kv, token_log_probs, tree_mask
from .._checks import check
from ._hosts import check_model, masked_ids
from ._replay import ReplayedDecoder, decoder_of
from ._settings import GREEDY, WARPERS, settings_of
from ._versions import versions

FILTERS = (*WARPERS, "LogitNormalization")
CACHE_NAMES = ("cache", "past_key_values")  # from transformers 5.24 on; before it
READ = ("attention_mask", "position_ids", "cache_position", *CACHE_NAMES)
CHANGE_NO_TOKEN = ("use_cache", "logits_to_keep")  # whether `generate` keeps a cache, and how many rows it asks for
GLM_IMAGE_KWARGS = ("image_grid_thw", "images_per_sample")
# what a generation config asks logits processors for, which a direct call has not, and the values by which it does not
NO_PROCESSORS = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "bad_words_ids": None, "min_length": 0,
                 "min_new_tokens": None, "suppress_tokens": None, "begin_suppress_tokens": None,
                 "forced_bos_token_id": None, "forced_eos_token_id": None, "sequence_bias": None, "guidance_scale": 1,
                 "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


class Asked:
    """The arguments that `generate` hands to a function, checked. `name` is the function's, for messages."""

    def __init__(self, name, model, input_ids, processors, criteria, config, guidance, id_range, streamer, stats,
                 log_probs, kwargs):
        self.name, self.log_probs = name, log_probs
        self.refuse(log_probs and stats is None, "needs a dict stats with log_probs, which it puts there")
        config = model.generation_config if config is None else config
        self.check_settings(model, config, processors)
        if streamer is not None:
            self.refuse(len(input_ids) != 1, f"needs a batch of one for token_streamer, got {len(input_ids)}")
        self.streamer, self.returns_dict = streamer, config.return_dict_in_generate
        length = self.read_ends(input_ids, criteria, config)
        self.max_tokens = length - input_ids.shape[1]
        check_model(model, model.config.get_text_config(decoder=True), length)
        is_glm_image = model.config.model_type == "glm_image"
        known = *READ, *CHANGE_NO_TOKEN, *GLM_IMAGE_KWARGS * is_glm_image
        self.check_kwargs(model, config, kwargs, known)
        self.check_prompt(model, input_ids, config, kwargs, known)
        self.do_sample = bool(config.do_sample)
        self.settings = self.read_settings(config, processors) if self.do_sample else GREEDY
        self.has_guidance, self.guidance = guidance is not None, 1.0 if guidance is None else guidance
        self.attention_mask = kwargs.get("attention_mask")
        self.keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self.axes = self.read_grids(input_ids, model.config, **kwargs) if is_glm_image else None
        self.id_range = id_range
        if isinstance(id_range, Tensor):
            B, leading = len(input_ids), tuple(id_range.shape[:-2])
            if id_range.ndim < 2 or id_range.shape[-1] != 2 or leading not in ((), (B,)) or 0 in id_range.shape:
                raise ValueError(f"id_range must be int64 (L, 2) or (B={B}, L, 2), got {described(id_range)}")
            self.id_range = id_range.to(input_ids.device, torch.int64).expand(B, -1, 2)
        self.check_masked(model, id_range)

    def refuse(self, is_wrong, message: str) -> None:
        if is_wrong:
            raise ValueError(f"{self.name} {message}")

    def check_settings(self, model, config, processors) -> None:
        others = [type(p).__name__ for p in processors or () if type(p).__name__ not in FILTERS]
        asked = [f"generation_config.{name}={getattr(config, name)!r} (off by {name}={off!r})"
                 for name, off in NO_PROCESSORS.items() if getattr(config, name, off) not in (off, None)]
        by = f" by {', '.join(asked)}" if asked else ""
        self.refuse(others, f"knows temperature, top_k, top_p and min_p alone, got {', '.join(others)}{by}: give "
                            "guidance, with unconditional_ids, and id_range to the function, and leave other logits "
                            "processors out")
        self.refuse((config.num_beams or 1) != 1, f"needs num_beams=1, got {config.num_beams}")
        mode = config.get_generation_mode().value
        self.refuse(mode not in ("greedy_search", "sample", "assisted_generation"),
                    f"needs greedy decoding or sampling, got {mode} by the generation config")
        self.refuse(asked and processors is None,  # not called by `generate`, which makes them
                    f"needs generate, which makes logits processors, for {', '.join(asked)}")

    def read_ends(self, input_ids, criteria, config) -> int:
        """Sets the tokens and criteria that end a request; returns the length at which all end."""
        S, new = input_ids.shape[1], None if criteria is not None else config.max_new_tokens  # else a criterion has it
        self.criteria, lengths, ends = [], [S + new if new else config.max_length or S + 20], config.eos_token_id
        ends = [] if ends is None else torch.as_tensor(ends, device="cpu").flatten().tolist()
        self.pad = config.pad_token_id if config.pad_token_id is not None else ends[0] if ends else 0
        for criterion in criteria or ():
            if type(criterion).__name__ == "MaxLengthCriteria":
                lengths.append(criterion.max_length)
            elif type(criterion).__name__ == "EosTokenCriteria":
                ends += criterion.eos_token_id.flatten().tolist()
            else:
                self.criteria.append(criterion)
        self.ends = torch.tensor(sorted(set(ends)), device=input_ids.device)
        return min(lengths)

    def check_kwargs(self, model, config, kwargs, known, by: str = "") -> None:
        outputs = [key for key in OUTPUTS
                   if config.return_dict_in_generate and getattr(config, key, False) or kwargs.get(key)]
        self.refuse(outputs, f"returns sequences alone, got {', '.join(outputs)} (with log_probs=True a dict stats "
                             "gets the log-probabilities of the new tokens)")
        unknown = [key for key, value in kwargs.items()
                   if key not in (*known, *OUTPUTS) and not _is_off(model, key, value)]
        self.refuse(unknown, f"takes prompts of token ids alone, got {', '.join(unknown)}{by} "
                             f"({versions('transformers')})")
        for key in CACHE_NAMES:
            length = 0 if kwargs.get(key) is None else kwargs[key].get_seq_length()
            self.refuse(length > 0, f"needs an empty {key}, got one with {length} tokens")

    def check_prompt(self, model, input_ids, config, kwargs, known) -> None:
        """What the model makes of the prompts must be the prompts, at positions that count what the mask leaves."""
        B, S = input_ids.shape
        is_real, columns = torch.ones_like(input_ids), torch.arange(S, device=input_ids.device)
        if (mask := kwargs.get("attention_mask")) is not None:
            check("attention_mask", mask, mask.dtype, like=input_ids, B=B, S=S)
            is_real = (mask != 0).long()
        asked = dict(cache_position=columns, use_cache=True) | kwargs
        prepare = model.prepare_inputs_for_generation
        made = prepare(input_ids, **asked, is_first_iteration=True)
        ids, owner = made.pop("input_ids", None), type(getattr(prepare, "__self__", model)).__name__
        made.pop("is_first_iteration", None)
        self.check_kwargs(model, config, made, known, f" by prepare_inputs_for_generation of {owner}, whose own "
                                                      "generate reads them")
        self.refuse(ids is None or not torch.equal(ids, input_ids), "takes prompts of token ids alone, got others by "
                    f"prepare_inputs_for_generation of {owner}")
        for name, wanted in (("position_ids", is_real.cumsum(1) - 1), ("cache_position", columns)):
            for given in (kwargs.get(name), made.get(name)):
                self.refuse(given is not None and (given.shape[-1] != S or not (
                    (given == wanted) | (is_real == 0)).all()), f"needs {name} that count the ids of attention_mask "
                    f"(0 or 1) from 0 on, got others: leave {name} out")

    def read_grids(self, input_ids, config, image_grid_thw=None, images_per_sample=None, **_) -> Tensor:
        """The positions of GLM-Image's new tokens, counted from the prompts' ends: (3, B, L)."""
        self.refuse(image_grid_thw is None, "needs image_grid_thw, the grids that GLM-Image draws, as its processor "
                                            "gives them: positions follow from it")
        B, n = len(input_ids), len(image_grid_thw)
        self.refuse(images_per_sample is None and B > 1,
                    f"needs images_per_sample, how many of image_grid_thw each of B={B} prompts has")
        counts = [n] if images_per_sample is None else images_per_sample.tolist()
        self.refuse(image_grid_thw.shape != (n, 3) or len(counts) != B or min(counts) < 1 or sum(counts) != n,
                    f"needs image_grid_thw (n, 3), n the sum of images_per_sample, which is of B={B} prompts, got "
                    f"{described(image_grid_thw)} and {counts}")
        num_ends = (input_ids == config.image_end_token_id).sum().item()
        self.refuse(num_ends, "needs image_grid_thw of grids that are all drawn, got prompts in which "
                              f"{config.image_end_token_id} ends {num_ends} pictures")
        of_prompts = [[(rows, columns) for _, rows, columns in grids.tolist()][::-1]  # the last is drawn first
                      for grids in image_grid_thw.split(counts)]
        L = min(sum(rows * columns for rows, columns in grids) for grids in of_prompts)
        self.refuse(self.max_tokens > L + 1, f"needs max_new_tokens of at most {L + 1}, the tokens of image_grid_thw "
                                             f"and what ends them, got {self.max_tokens}")
        return torch.stack([grid_positions(grids)[:, :L] for grids in of_prompts], 1).to(input_ids.device)

    def check_masked(self, model, id_range) -> None:
        """Masked ids beside others are never drawn; a range that is made for them would draw nothing else."""
        ids = torch.tensor(masked_ids(model), dtype=torch.int64, device="cpu")
        if id_range is None or not len(ids):
            return
        first, last = torch.as_tensor(id_range, device="cpu").view(-1, 2).unique(dim=0).T[..., None]
        is_all = (first <= 0) & (last >= model.config.get_text_config(decoder=True).vocab_size)
        self.refuse(((ids >= first) & (ids < last) & ~is_all).any(), "needs an id_range without the ids of images, "
                    f"which {type(model).__name__} masks in its forward: specvis.models.transformers draws them "
                    "(anole, lumina_mgpt)")

    def read_settings(self, config, processors) -> dict:
        if processors is None:  # not called by `generate`, which makes them
            temperature = config.temperature if config.temperature is not None else 1.0
            return dict(temperature=float(temperature), top_k=config.top_k or 0, top_p=float(config.top_p or 1.0),
                        min_p=getattr(config, "min_p", None))
        warpers = [p for p in processors if type(p).__name__ != "LogitNormalization"]
        settings = settings_of(warpers)
        self.refuse(settings is None, "needs temperature before top_k and top_p, and min_p after them, each at most "
                    "once, without min_tokens_to_keep and filter_value, and top_p > 0, got "
                    f"{', '.join(type(p).__name__ for p in warpers)} (off by top_k=0, top_p=1.0 and min_p=None of "
                    "generate)")
        return settings

    def ids(self, positions: Tensor):
        """The ranges of new tokens at these positions (B, N), as the ops take them."""
        if not isinstance(self.id_range, Tensor):
            return self.id_range
        index = positions.clamp(max=self.id_range.shape[1] - 1).long()
        return self.id_range.gather(1, index[..., None].expand(-1, -1, 2))


class Target:
    """The model with a cache in which each request has its own length. First the rows with the condition."""

    def __init__(self, model, input_ids, unconditional_ids, unconditional_mask, asked, num_nodes):
        if asked.has_guidance != (unconditional_ids is not None):
            raise ValueError("guidance and unconditional_ids must be given together")
        self.model, self.cache_name = model, cache_name(model)
        self.keeps_logits, self.num_forwards = asked.keeps_logits, 0
        self.batch, (B, S) = len(input_ids), input_ids.shape
        ids, is_real, both = input_ids, torch.ones_like(input_ids, dtype=torch.bool), S
        if asked.attention_mask is not None:
            is_real = asked.attention_mask != 0
        if unconditional_ids is not None:
            R, width = unconditional_ids.shape if unconditional_ids.ndim == 2 else (0, 0)
            check("unconditional_ids", unconditional_ids, torch.int64, like=input_ids, R=R, S=width)
            if not R or B % R:
                raise ValueError(f"unconditional_ids must be int64 (R, S') with R a divisor of B={B}, "
                                 f"got {tuple(unconditional_ids.shape)}")
            mask = torch.ones_like(unconditional_ids) if unconditional_mask is None else unconditional_mask
            check("unconditional_mask", mask, mask.dtype, like=input_ids, R=R, S=width)
            both = max(S, width)
            ids, is_real = (torch.cat([torch.nn.functional.pad(a, (both - S, 0)),
                                       torch.nn.functional.pad(b.repeat_interleave(B // R, 0), (both - width, 0))])
                            for a, b in ((ids, unconditional_ids), (is_real, mask != 0)))
        self.ids, self.is_real, self.prefix_len = ids, is_real, ids.shape[1]
        for name, mask in (("attention_mask", is_real[:self.batch]), ("unconditional_mask", is_real[self.batch:])):
            if not mask[:, -1].all():
                raise ValueError(f"{name} must be padded on the left, got one that ends with 0")
        if both > S:  # else it was asked already
            check_model(model, model.config.get_text_config(decoder=True), both + asked.max_tokens)
        self.axes, self.num_real = asked.axes, is_real.sum(1, keepdim=True)
        self.last_read = max(asked.max_tokens - 2, 0)  # of the new tokens: nothing follows the last one
        num_columns, decoder = self.prefix_len + asked.max_tokens + num_nodes, decoder_of(model)
        self.cache, self.replayed = _cache_class()(len(ids), num_columns), None
        if decoder is not None:
            from transformers.modeling_outputs import BaseModelOutputWithPast as DecoderOutput
            self.replayed = ReplayedDecoder(model, decoder, DecoderOutput, is_real, num_columns,
                                            self.prefix_len + asked.max_tokens)
            self.cache.keys, self.cache.values = self.replayed.caches()

    def twice(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(len(self.ids) // self.batch, *[1] * (tensor.ndim - 1))

    def forward(self, ids, mask, position_ids, slots, **kwargs):
        """Logits (B, N, V) with the condition, and logits without it or None."""
        self.cache.slots, self.cache.num_columns = slots, mask.shape[-1]
        return self.halves(self.model(ids, attention_mask=mask[:, None], position_ids=position_ids, use_cache=True,
                                      **{self.cache_name: self.cache}, **kwargs).logits)

    def halves(self, logits):
        self.num_forwards += 1
        logits = logits.float() if logits.dtype == torch.float64 else logits
        self.vocab_size = logits.shape[-1]  # the head's weights may be packed
        return (logits, None) if len(logits) == self.batch else (logits[:self.batch], logits[self.batch:])

    def prefill(self):
        """The logits (B, 1, V) of the first new token."""
        S = self.prefix_len
        slots = torch.arange(S, device=self.ids.device)
        sees = (slots <= slots[:, None]) & self.is_real[:, None] | (slots == slots[:, None])  # no row may be empty
        mask = torch.zeros(sees.shape, dtype=self.model.dtype, device=sees.device).masked_fill(~sees, -torch.inf)
        logits = self.forward(self.ids, mask, (self.is_real.cumsum(1) - 1).clamp(min=0), slots.expand(len(self.ids), S),
                              **({"logits_to_keep": 1} if self.keeps_logits else {}))
        return tuple(None if x is None else x[:, -1:] for x in logits)

    def read(self, tokens, depth, ancestors, output):
        """The logits of the nodes (B, N) of a tree after each request's tokens; node 0 is the newest token."""
        N = tokens.shape[1]
        lengths, position_ids = self.lengths(output), self.positions(output.num_made[:, None] - 1 + depth)
        if self.replayed:
            return self.halves(self.replayed.logits(self.twice(tokens), position_ids, lengths, ancestors))
        columns = self.prefix_len + max(output.host_made) - 1 + N
        dtype = torch.float32 if self.model.dtype == torch.float64 else self.model.dtype
        mask = tree_mask(ancestors.contiguous(), lengths.int(), form="additive", columns=columns, dtype=dtype)
        mask = self.twice(mask.to(self.model.dtype))
        mask[..., :self.prefix_len].masked_fill_(~self.is_real[:, None], -torch.inf)
        slots = lengths[:, None] + torch.arange(N, device=tokens.device)
        return self.forward(self.twice(tokens), mask, position_ids, self.twice(slots))

    def positions(self, index) -> Tensor:
        """Of the new tokens with these numbers (B, N): (R, N), or (3, R, N) for GLM-Image. Nodes behind the last one
        have its position: a model may know no other."""
        index = index.clamp(max=self.last_read)
        if self.axes is None:
            return self.twice(index) + self.num_real
        axes = self.axes.gather(2, index.expand(3, -1, -1))
        return axes.repeat(1, len(self.ids) // self.batch, 1) + self.num_real

    def lengths(self, output) -> Tensor:
        """(B,) int64: the columns before the newest token, which no forward has read yet."""
        return self.prefix_len + output.num_made - 1

    def commit(self, accepted_nodes, num_accepted, output):
        if self.replayed:
            return self.replayed.commit(accepted_nodes, num_accepted, self.lengths(output))
        for caches in self.cache.groups():
            commit_kv(caches, accepted_nodes, num_accepted, self.lengths(output), row_dim=0, column_dim=2)


class Output:
    """The new tokens of B requests, and which requests are finished."""

    def __init__(self, input_ids, asked):
        B, S = input_ids.shape
        self.prompts, self.asked, self.limit = input_ids, asked, asked.max_tokens
        self.is_real = torch.ones_like(input_ids, dtype=torch.bool)
        if asked.attention_mask is not None:
            self.is_real = asked.attention_mask != 0
        self.tokens = torch.full((B, self.limit + 1), asked.pad, device=input_ids.device)  # the last is scratch
        # (B, .., 2) sampled and full, if asked for
        self.log_probs = torch.zeros(
            *self.tokens.shape, 2, dtype=torch.float32, device=input_ids.device) if asked.log_probs else None
        self.num_made = torch.zeros(B, dtype=torch.int64, device=input_ids.device)
        self.is_finished = torch.zeros(B, dtype=torch.bool, device=input_ids.device)
        self.host_made, self.host_finished = [0] * B, [False] * B
        if asked.streamer is not None:  # as transformers does: some streamers skip the prompt
            asked.streamer.put(input_ids.cpu())

    @property
    def is_done(self) -> bool:
        return all(self.host_finished)

    def open_counts(self) -> list[int]:
        return [made for made, finished in zip(self.host_made, self.host_finished) if not finished]

    def newest(self) -> Tensor:
        return self.tokens.gather(1, self.num_made[:, None] - 1)[:, 0]

    def take(self, tokens: Tensor, num_tokens: Tensor, logits: tuple[Tensor, Tensor | None], positions: Tensor,
             rows: Tensor | None = None, **statuses: Tensor) -> None:
        """Append the first num_tokens (B,) of tokens (B, M), until a request is finished: the loop's host read.

        logits, as `Target` gives them, predict tokens at positions (B, N); rows: see `token_log_probs`
        statuses (B,) are of ops, by their names. They are checked for requests that were not finished before.
        """
        statuses = {op: torch.where(self.is_finished, 0, status) for op, status in statuses.items()}
        bits = functools.reduce(torch.bitwise_or, statuses.values())
        index = torch.arange(tokens.shape[1], device=tokens.device)
        num = torch.where(self.is_finished, 0, num_tokens.minimum(self.limit - self.num_made))
        is_end = torch.isin(tokens, self.asked.ends) & (index < num[:, None])
        has_end = is_end.any(1)
        num = torch.where(has_end, is_end.int().argmax(1) + 1, num)
        is_new = index < num[:, None]
        scratch = torch.where(is_new, self.num_made[:, None] + index, self.limit)
        self.tokens.scatter_(1, scratch, tokens)
        if self.log_probs is not None:
            new = token_log_probs(*logits, self.asked.guidance, **self.asked.settings, tokens=tokens, rows=rows,
                                  id_range=self.asked.ids(positions))
            new = torch.stack([new.sampled, new.full], -1)
            self.log_probs.scatter_(1, scratch[..., None].expand(-1, -1, 2), new)
        self.num_made = self.num_made + num
        self.is_finished = self.is_finished | has_end | (self.num_made >= self.limit)
        before = self.host_made
        self.host_made, finished, bits = torch.stack([self.num_made, self.is_finished.long(), bits.long()]).tolist()
        if any(bits):
            for op, status in statuses.items():
                check_status(status, op)
        self.host_finished = [bool(f) for f in finished]
        if self.asked.criteria:
            for request, first in enumerate(before):
                self.ask_criteria(request, first)
        if self.asked.streamer is not None:
            for token in self.tokens[0, before[0]:self.host_made[0]].cpu():
                self.asked.streamer.put(token[None])

    def ask_criteria(self, request: int, first: int) -> None:
        """Token by token, as one-at-a-time decoding of this request would; their scores are None."""
        for made in range(first + 1, self.host_made[request] + 1):
            ids = torch.cat([self.prompts[request], self.tokens[request, :made]])[None]
            if any(torch.as_tensor(criterion(ids, None), device="cpu").all() for criterion in self.asked.criteria):
                self.tokens[request, made:] = self.asked.pad
                if self.log_probs is not None:
                    self.log_probs[request, made:] = 0
                self.host_made[request], self.host_finished[request] = made, True
                self.num_made[request], self.is_finished[request] = made, True
                return

    def sequences(self, paths: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of F paths from the root down (B, F, D) -> all tokens up to their ends, left-padded; where real."""
        S, F = self.prompts.shape[1], paths.shape[1]
        width = S + max(self.host_made) - 1
        at = (S + self.num_made - 1)[:, None] + torch.arange(-width, 0, device=paths.device)
        ids = torch.cat([self.prompts, self.tokens], 1).gather(1, at.clamp(min=0))
        is_real = torch.nn.functional.pad(self.is_real, (0, self.tokens.shape[1]), value=True)
        is_real = is_real.gather(1, at.clamp(min=0)) & (at >= 0)
        ids, is_real = (x[:, None].expand(-1, F, -1) for x in (ids, is_real))
        return torch.cat([ids, paths], 2), torch.cat([is_real, torch.ones_like(paths, dtype=torch.bool)], 2)

    def result(self, stats: dict | None, target: Target):
        if self.asked.streamer is not None:
            self.asked.streamer.end()
        if stats is not None:
            stats.update(target_forwards=target.num_forwards, num_tokens=list(self.host_made))
        if self.log_probs is not None:
            stats["sampled"], stats["full"] = self.log_probs[:, :max(self.host_made)].unbind(-1)
        sequences = torch.cat([self.prompts, self.tokens[:, :max(self.host_made)]], 1)
        if not self.asked.returns_dict:
            return sequences
        from transformers.generation import GenerateDecoderOnlyOutput
        return GenerateDecoderOnlyOutput(sequences=sequences)


def grid_positions(grids: Sequence[tuple[int, int]]) -> Tensor:
    """GLM-Image's tokens in grids that follow each other, counted from the end of the prompt: (3, L) int64.

    In a grid the first axis stays where the grid starts, and the others count rows and columns from there. The next
    grid starts after the longer side.
    """
    parts, start = [], 0
    for rows, columns in grids:
        cells = torch.cartesian_prod(*(torch.arange(n, device="cpu") for n in (rows, columns))).T
        parts.append(torch.nn.functional.pad(cells, (0, 0, 1, 0)) + start)
        start += max(rows, columns)
    return torch.cat(parts, 1)


def cache_name(model) -> str:
    """The argument of the model's `forward` that takes its cache: "cache" from transformers 5.24 on."""
    return next((name for name in CACHE_NAMES if name in inspect.signature(model.forward).parameters), CACHE_NAMES[1])


def _is_off(model, key: str, value) -> bool:
    """Whether an argument changes nothing: it is None, empty, or the default of `forward` or `generate`."""
    if value is None or isinstance(value, Sized) and getattr(value, "shape", None) != () and len(value) == 0:
        return True
    defaults = [inspect.signature(function).parameters[key].default for function in (model.forward, model.generate)
                if key in inspect.signature(function).parameters]
    return isinstance(value, (bool, int, float, str)) and value in defaults


def described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


@functools.cache
def _cache_class() -> type:
    """A cache of R rows; before each read `slots` says where it is kept. Some models need a subclass of Cache."""
    from transformers import Cache

    class SlotCache(Cache):
        def __init__(self, rows: int, capacity: int):
            super().__init__(layers=[])
            self.rows, self.capacity, self.keys, self.values = rows, capacity, {}, {}

        def update(self, key_states, value_states, layer_idx, *_, **__):
            """Transformers calls this in every layer: it keeps (R, H, N, D) and returns all visible columns."""
            seen = []
            for caches, new in ((self.keys, key_states), (self.values, value_states)):
                if layer_idx not in caches:
                    R, H, _, D = new.shape
                    caches[layer_idx] = new.new_zeros(R, H, self.capacity, D)
                index = self.slots.to(new.device)[:, None, :, None].expand_as(new)
                seen.append(caches[layer_idx].scatter_(2, index, new)[:, :, :self.num_columns])
            return tuple(seen)

        def get_seq_length(self, *_, **__):
            return 0  # used only without position ids

        def groups(self):
            """All layers' tensors, in lists of one shape: as commit_kv takes them."""
            groups = {}
            for cache in (*self.keys.values(), *self.values.values()):
                groups.setdefault((cache.shape, cache.dtype, cache.device), []).append(cache)
            return list(groups.values())

    return SlotCache
