"""Tables for all ops, and tensors whose sums are exact, for the makers of inputs."""
from collections import Counter
from functools import lru_cache

import torch

from specvis_kernels import backends

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

COMPARED = Counter()  # backend -> tests passed
CASES = {}       # op -> sizes
TOLERANCES = {}  # op -> {index of an output: (rtol, atol)}; everything else is equal bit for bit
# verify_chain's requests have different lengths, and others have weights or a table: their own tests cover batches
UNBATCHED = {"codebook_neighbors", "decoder_layers", "denoise_tokens", "packed_linear", "rms_norm",
             "rotate_into_cache", "transformer_blocks", "verify_chain"}
MUTATES = {      # op -> the arguments that it writes to, contiguous; tensors or lists of them
    "commit_kv": ("caches",),
    "commit_tokens": ("tokens", "counts", "failed", "target_forwards", "num_accepted_at", "num_drafted_at",
                      "tv_excess"),  # from the third on they may be None
    "decoder_layers": ("kv_cache",),
    "rotate_into_cache": ("kv_cache",),
}
LARGE = {  # sizes that need other amounts of shared memory, or other numbers of blocks for a row, than the small ones
    "draft_children": [(1, 2, 16384, 5), (3, 4, 20000, 8, torch.bfloat16)],
    "draft_frontier": [(1, 2, 16384, 5), (3, 4, 20000, 8, torch.bfloat16)],
    "draw_tokens": [(1, 2, 16384), (3, 4, 20000, torch.bfloat16)],
    "expand_tree": [(1, 2, 16384, 5), (3, 4, 20000, 8)],
    "guided_probs": [(1, 2, 16384), (3, 4, 20000, torch.bfloat16)],
    "token_log_probs": [(1, 2, 16384), (3, 4, 20000, 3, torch.bfloat16)],
    "verify_logits": [(1, 4, 16384, 2), (3, 12, 20000, 3, {"num_draft_rows": 2})],
    "verify_tree": [(1, 4, 16384, 2), (3, 12, 20000, 3, {"num_draft_rows": 2})],
}
MAX_ROWS = 512   # are drawn; more rows repeat them


def backends_but(op, *names):
    """The op's backends here without these."""
    return [name for name in backends(op, DEVICE) if name not in names]


def tensor(values, dtype=torch.float32):
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def exact_probs(rows, V, seed=0, exact=True):
    """(rows, V) float32 probabilities: peaked, as a model's are, and exact to sum. With exact=False nothing about them
    is aligned, and their sums are not 1."""
    g = torch.Generator().manual_seed(seed)
    if not exact:
        probs = (torch.randn(rows, V, generator=g) * 3).softmax(-1)
        return (probs * (0.1 + torch.rand(rows, 1, generator=g))).to(DEVICE)

    def draw(n):
        draws = (torch.rand(n, 2**16, generator=g) ** 4 * V).long()
        counts = torch.zeros(n, V).scatter_add_(1, draws, torch.ones(()).expand_as(draws))
        return (counts / 2**16)[:, torch.randperm(V, generator=g)].to(DEVICE)

    return repeated(draw, rows)


def repeated(draw, rows):
    """(rows, V): the rows that draw(n) gives, a limited number of them, again and again."""
    drawn = draw(min(rows, MAX_ROWS))
    return drawn if rows == len(drawn) else drawn.repeat(-(-rows // max(len(drawn), 1)), 1)[:rows]


def cells(masses):
    """(a uniform number, the token that it draws) for each unit of the masses of a row."""
    tokens = [token for token, mass in enumerate(masses) for _ in range(mass)]
    return [((i + 0.5) / len(tokens), token) for i, token in enumerate(tokens)]


def exact_uniforms(*shape, seed=0):
    """float32 uniforms in [0, 1), multiples of 2**-16."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(2**16, shape, generator=g) / 2**16).to(DEVICE)


def noise_keys(B, N, V):
    """Seeds and positions."""
    g = torch.Generator().manual_seed(B + N + V)
    seeds = torch.randint(-2**62, 2**62, (B,), generator=g)
    return seeds.to(DEVICE), torch.randint(-5, 2**33, (B, N), generator=g).to(DEVICE)


def ids_of(kwargs, V):
    """id_range, first_id and last_id as the schemas have them."""
    ids = kwargs.get("id_range")
    return (ids, 0, V) if ids is None or isinstance(ids, torch.Tensor) else (None, *ids)


def neighbor_table(C, k, offset=0, narrow=True, seed=0):
    """(C, k) codes: distinct, each row without itself."""
    return neighbor_codes(C, k, seed).to(DEVICE, torch.uint16 if narrow else torch.int32, copy=True)


@lru_cache(maxsize=2)  # it takes seconds for a real codebook, and the next case often has the same codes
def neighbor_codes(C, k, seed):
    g = torch.Generator().manual_seed(seed)
    steps = torch.stack([torch.randperm(C - 1, generator=g)[:k] for _ in range(C)]) + 1
    return ((torch.arange(C).unsqueeze(1) + steps) % C).int()


def links(parents):
    """first_child and next_sibling of parents (B, N); siblings are in the order of their indices."""
    first_child, next_sibling = torch.full_like(parents, -1), torch.full_like(parents, -1)
    for b, row in enumerate(parents.tolist()):
        last_child = {}
        for n, parent in enumerate(row[1:], 1):
            table, node = (next_sibling, last_child[parent]) if parent in last_child else (first_child, parent)
            table[b, node] = last_child[parent] = n
    return first_child.to(DEVICE, torch.int32), next_sibling.to(DEVICE, torch.int32)


def parents_of(first_child, next_sibling):
    """(B, N) int64, 0 for the root: what links() was given."""
    parents = torch.zeros_like(first_child, dtype=torch.int64)
    for b, row in enumerate(first_child.tolist()):
        for n, child in enumerate(row):
            while child >= 0:
                parents[b, child], child = n, next_sibling[b, child].item()
    return parents


def random_parents(B, n, g, unused=True):
    """(B, n) parents of nodes 1..n of a tree, level by level; -2 in the last slots of odd requests."""
    parents = (torch.rand(B, n, generator=g) ** 0.7 * torch.arange(1, n + 1)).long().sort(1).values
    if unused:
        parents[1::2, n - n // 4:] = -2
    return parents


def ancestors_of(parents):
    """(B, N, W) words of bits of trees whose nodes from the second on have these parents (B, N - 1), or -2."""
    B, N = parents.shape[0], parents.shape[1] + 1
    is_ancestor = torch.eye(N, dtype=torch.bool).repeat(B, 1, 1)
    for n, parent in enumerate(parents.T, 1):
        is_ancestor[:, n] |= is_ancestor[torch.arange(B), parent.clamp(min=0)]
        is_ancestor[:, n] &= (parent >= 0).unsqueeze(1)
    words = torch.nn.functional.pad(is_ancestor, (0, -N % 64)).unflatten(2, (-1, 64)).long()
    return (words << torch.arange(64)).sum(-1)
