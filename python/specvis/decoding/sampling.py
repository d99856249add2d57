"""How a request draws its tokens: its settings, classifier-free guidance, and numbers that its seed alone decides."""
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from specvis_kernels import DrawTokensResult, draw_tokens, philox_uniforms

from ..models.interface import TargetModel, has_guidance
from ..models.threads import in_parts
from .batch_state import BatchState
from .limits import MAX_NUMBER, MAX_TOP_K, count_within, is_count, is_number

# streams of philox_uniforms: what a number is used for
ACCEPT, DRAFT, SHAPE, ORDER, NOISE, UNALIGNED, RESAMPLE, RESAMPLE_NOISE, FRESH = range(9)


@dataclass(frozen=True)
class Sampling(BatchState):
    """How each of B requests draws its tokens."""

    ROWS = ("seeds", "guidance", "temperature", "top_k", "top_p", "min_p")

    seeds: Tensor        # (B,) int64
    guidance: Tensor     # (B,) float32   1 is off
    temperature: Tensor  # (B,) float32   0 is greedy
    top_k: Tensor        # (B,) int32     0 is off
    top_p: Tensor        # (B,) float32   1 is off
    min_p: Tensor        # (B,) float32   0 is off
    log_probs: bool = False  # whether Decoded has the tokens' log-probabilities

    @staticmethod
    def of(seeds: list[int] | int, *, guidance: float | list[float] = 2.0, temperature: float | list[float] = 1.0,
           top_k: int | list[int] | None = 0, top_p: float | list[float] | None = 1.0,
           min_p: float | list[float] | None = 0.0, log_probs: bool = False,
           device: torch.device | str = "cpu") -> "Sampling":
        """The same number for all requests, or a list with one for each. Seeds: one for each, alone the one request's.

        log_probs: whether `Decoded.log_probs` is wanted

        Raises:
            ValueError: seeds are no list of whole numbers of 64 bits, temperature < 0, top_k no whole number of at
                least 0, top_p outside (0, 1], min_p outside [0, 1], guidance not finite, a number that does not fit
                into 32 bits, a list of another length
        """
        seeds, top_k, top_p = check_seeds(seeds), 0 if top_k is None else top_k, 1.0 if top_p is None else top_p
        min_p = 0.0 if min_p is None else min_p

        def each(name, value, holds, wanted, dtype=torch.float32):
            values = list(value) if isinstance(value, (list, tuple)) else [value] * len(seeds)
            if len(values) != len(seeds):
                raise ValueError(f"{name} must be one number or {len(seeds)}, one for each seed, got {len(values)}")
            for one in values:
                if not holds(one):
                    raise ValueError(f"{name} must be {wanted}, got {one!r}")
            return torch.tensor(values, dtype=dtype, device=device)

        return Sampling(
            torch.tensor(seeds, dtype=torch.int64, device=device),
            each("guidance", guidance, lambda x: is_number(x, -MAX_NUMBER), "a finite number in 32 bits"),
            each("temperature", temperature, lambda x: is_number(x, 0), "at least 0 and finite in 32 bits"),
            each("top_k", top_k, lambda x: is_count(x, 0, MAX_TOP_K), count_within(0, MAX_TOP_K), torch.int32),
            each("top_p", top_p, lambda x: is_number(x, 0, 1) and x > 0, "within (0, 1]"),
            each("min_p", min_p, lambda x: is_number(x, 0, 1), "within [0, 1]"), log_probs)

    def __getitem__(self, requests: list[int]) -> "Sampling":
        return Sampling(*(getattr(self, name)[requests] for name in self.ROWS), self.log_probs)

    def select(self, rows: list[int], batch: int) -> "Sampling":
        return self[rows]

    def rows(self, logits: Tensor) -> dict[str, Tensor | None]:
        """The arguments by which ops take logits (R, N, V): each request's rows, its guidance and its filters."""
        cond, uncond = (logits, None) if len(logits) == len(self.seeds) else logits.chunk(2)
        return {"logits": cond, "uncond": uncond, "guidance": self.guidance, "temperature": self.temperature,
                "top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}

    def draw(self, logits: Tensor, positions: Tensor, ids: Tensor | None = None, guesses: Tensor | None = None,
             ahead: int = 0) -> DrawTokensResult:
        """The target's own draws from logits (R, N, V), for the positions (B, N) int64 in the image.

        ids (B, N, 2): see `id_range`; guesses (B, N) int64 and ahead: see `draw_tokens`
        """
        return draw_tokens(**self.rows(logits), seeds=self.seeds, positions=positions, id_range=ids, guesses=guesses,
                           ahead=ahead)

    @property
    def greedy(self) -> Tensor:
        """(B,) bool: which requests take the likeliest token."""
        return self.temperature == 0


def check_seeds(seeds: list[int] | int) -> list[int]:
    """The seeds of all images, or of the one. ValueError unless these are whole numbers of 64 bits."""
    seeds = [seeds] if isinstance(seeds, int) else seeds
    if not isinstance(seeds, (list, tuple, range)) or not all(isinstance(seed, int) for seed in seeds):
        raise ValueError(f"seeds must be a list of whole numbers, one for each image, got {seeds!r}")
    for seed in seeds:
        if not -2**63 <= seed < 2**63:
            raise ValueError(f"seeds must be within [-2**63, 2**63), got {seed}")
    return seeds


def cfg_inputs(model: TargetModel, condition: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Stack the null condition below the conditions: under the same mask, as LlamaGen does, or as `null_inputs` says.

    Classifier-free guidance reads every request twice: row b of R = 2B reads its condition, row B + b reads none. A
    model without guidance reads it once: R = B.

    Args:
        condition:    (B, S, dim)
        padding_mask: (B, S) bool  True where the condition is real
    Returns:
        condition (R, S, dim), padding_mask (R, S)
    """
    if not has_guidance(model):
        return condition, padding_mask
    if hasattr(model, "null_inputs"):
        null, null_mask = model.null_inputs(padding_mask)
        return torch.cat([condition, null]), torch.cat([padding_mask, null_mask])
    return torch.cat([condition, model.null_condition(len(condition))]), repeat_for_cfg(padding_mask)


def repeat_for_cfg(x: Tensor) -> Tensor:
    """(B, ...) -> (2B, ...): equal rows with the condition and without it."""
    return torch.cat([x, x])


def take_nodes(x: Tensor, nodes: Tensor) -> Tensor:
    """The entries of some nodes: x (R, N, H), nodes (B, K) int64 -> (R, K, H). Row r is of request r % B."""
    (R, N, H), (B, K) = x.shape, nodes.shape
    index = nodes[0]
    if B > 1:
        x = x.reshape(-1, B * N, H)
        index = (nodes + torch.arange(0, B * N, N, device=nodes.device)[:, None]).view(-1)
    return in_parts(partial(torch.index_select, x, 1), len(x) * H, index, dim=1).view(R, K, H)


def uniforms_at(seeds: Tensor, positions: Tensor, n: int, stream: int) -> Tensor:
    """The first n uniforms of a position of each request, in that stream: seeds (B,), positions (B,) -> (B, n)."""
    return philox_uniforms(seeds, positions[:, None], n, stream=stream)[:, 0]


def philox_normals(seeds: Tensor, positions: Tensor | int, n: int, *, stream: int, turn: int = 0) -> Tensor:
    """Standard normal numbers from `philox_uniforms` of these arguments, by the inverse CDF. All are within 5.6."""
    middles = philox_uniforms(seeds, positions, n, stream=stream, turn=turn).double() + 2.0 ** -25
    return torch.special.ndtri(middles).float()
