"""codebook_neighbors: which codes look alike, computed once when a model is loaded."""
import torch
from torch import Tensor

from ._checks import check, check_count, check_dims, check_one_of, is_traced
from ._define import define

METRICS = ("l2", "cosine", "random")
GRID = 2.0 ** 40      # steps between the smallest and the largest distance
BLOCK = 2**20         # distances at a time, 8 MB
LARGEST = 2**63 - 1


def codebook_neighbors(codebook: Tensor, k: int, *, metric: str = "l2", normalize: bool = False,
                       seed: int = 0, size: int | None = None, backend: str | None = None) -> Tensor:
    """Find the k nearest other codes of every code, nearest first.

    Compute it once, when a model is loaded. Squared distances are computed in float64 and rounded to 2**-40 of the
    largest possible distance. So codes at equal distance tie in spite of the arithmetic. Ties go to the lower id.

    (LANTERN's latent proximity, arXiv:2410.03355, section 4.)

    Args:
        codebook:   (V, D) float64, float32, float16 or bfloat16   finite; one code a row
        k:          how many neighbors, 1 <= k < V
        metric:     "l2": the Euclidean distance; "cosine": the angle, where a zero row is at a right angle to all;
                    "random": k codes without replacement, in random order, for ablations
        normalize:  scale rows to length 1 first, as LlamaGen's tokenizer does before it looks a code up. LANTERN's
                    own tables are of the raw embedding: False, although its tokenizer is LlamaGen's
        seed:       the seed of metric "random"
        size:       how many codes the codebook must have, the size of the image vocabulary: then a transposed
                    codebook is refused. None: any number
        backend:    None or "oracle": there is no other kernel

    Returns:
        neighbors:  (V, k) uint16, or int32 if V > 65536

    Raises:
        ValueError: a dtype, shape, metric or k other than the above, or V is not `size`

    Examples:
        >>> codebook = torch.tensor([[0.0], [1.0], [3.0], [7.0]])   # four codes of one channel
        >>> codebook_neighbors(codebook, 2).int()
        tensor([[1, 2],
                [0, 2],
                [1, 0],
                [2, 1]], dtype=torch.int32)
    """
    V, D = check_dims("codebook", codebook, "VD")
    check("codebook", codebook, (torch.float64, torch.float32, torch.float16, torch.bfloat16), V=V, D=D)
    if size is not None and size != V:
        raise ValueError(f"codebook must have one code a row, size={size} rows, got shape ({V}, {D})"
                         + (": it is transposed" if size == D else ""))
    check_one_of("metric", metric, METRICS)
    k = check_count("k", k, 1, V - 1)
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize must be True or False, got {normalize!r}")
    seed = check_count("seed", seed, 0, 2**63 - 1)
    if not is_traced(codebook) and not codebook.isfinite().all():
        raise ValueError("codebook must be finite, got NaN or an infinity")
    return _call(backend, codebook.detach(), k, metric, normalize, seed)


def _oracle(codebook: Tensor, k: int, metric: str, normalize: bool, seed: int):
    V = len(codebook)
    codes = codebook.double()
    if normalize or metric == "cosine":
        codes = scaled(codes, 1)
        codes = codes / codes.norm(dim=1, keepdim=True).clamp(min=1e-300)
    codes = scaled(codes, (0, 1))
    squares = codes.square().sum(1)
    largest = 4 * squares.max().clamp(min=1e-300)  # two codes are at most twice the longest apart
    ids = torch.arange(V, device=codes.device)
    generator = torch.Generator().manual_seed(seed)
    neighbors = _meta(codebook, k)
    for start in range(0, V, block := max(1, BLOCK // V)):
        rows = codes[start:start + block]
        if metric == "l2":
            distance = squares[start:start + block, None] + squares - 2 * rows @ codes.T
            distance = distance / largest
        elif metric == "cosine":
            distance = (1 - rows @ codes.T) / 2
        else:
            distance = torch.rand(len(rows), V, generator=generator, dtype=torch.float64, device="cpu").to(codes.device)
        keys = (distance * GRID).round().long() * V + ids  # all keys differ
        keys.diagonal(start).fill_(LARGEST)
        neighbors[start:start + block] = keys.topk(k, largest=False).indices.to(neighbors.dtype)
    return neighbors


def scaled(codes, dims):
    """codes, divided by a power of two so that no square is too large or too small for float64."""
    exponent = codes.abs().amax(dims, keepdim=True).frexp().exponent.clamp(-1000, 1000)
    return torch.ldexp(codes, -exponent)


def _meta(codebook, k):
    V = codebook.shape[0]
    return codebook.new_empty((V, k), dtype=torch.uint16 if V <= 65536 else torch.int32)


_call = define("codebook_neighbors", oracle=_oracle, meta=_meta, batch=None)
