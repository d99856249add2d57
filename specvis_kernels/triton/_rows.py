"""What the verification kernels do with a row of probabilities: one program, BLOCK entries at a time."""
import torch
import triton
import triton.language as tl

FIXED_ONE = tl.constexpr(2.0 ** 42)
FIXED_UNIT = tl.constexpr(2.0 ** -42)
CEILING = tl.constexpr(2.0 ** 62)
EMPTY_RESIDUAL = tl.constexpr(1)  # the status bits of specvis_kernels/_dispatch.py
INVALID_ROW = tl.constexpr(2)
INVALID_TREE = tl.constexpr(4)
INVALID_RULE = tl.constexpr(8)
OUT_OF_TRIES = tl.constexpr(16)

MOST_WARPS = 16 if torch.version.hip else 32  # 1024 threads: AMD's warps have 64
WIDEST = {"V": 4096, "k": 256}  # tokens and neighbors that a program takes at a time, at most


def block(kind, size):
    return min(triton.next_power_of_2(size), WIDEST[kind])


@triton.jit
def load_weights(row, v, mask, FLOAT: tl.constexpr):
    """Entries of a row in fixed point: of probabilities (FLOAT), or of weights as they are."""
    if FLOAT:
        p = tl.load(row + v, mask=mask, other=0.0)
        return (tl.where((p >= 0.0) & (p <= 2.0), p, 0.0) * FIXED_ONE).to(tl.int64)
    else:
        return tl.load(row + v, mask=mask, other=0)


@triton.jit
def weigh(probs, V, copy, copied, BLOCK: tl.constexpr):
    """A row's total in fixed point and its validity. The first `copied` weights go to `copy`, if not None."""
    total = tl.zeros([BLOCK], tl.int64)
    bad = tl.zeros([BLOCK], tl.int32)
    start = 0
    while start < V:
        v = start + tl.arange(0, BLOCK)
        p = tl.load(probs + v, mask=v < V, other=0.0)
        sound = (p >= 0.0) & (p <= 2.0)
        weight = (tl.where(sound, p, 0.0) * FIXED_ONE).to(tl.int64)
        if copy is not None:
            tl.store(copy + v, weight, mask=v < copied)
        total += weight
        bad += tl.where(sound, 0, 1)
        start += BLOCK
    mass = tl.sum(total, axis=0)
    return mass, (tl.sum(bad, axis=0) == 0) & (mass > 0)


@triton.jit
def jsd(moved, own):
    half = own + moved / 2
    both = own + moved
    some = tl.where(half > 0, half, 1.0)
    first = own * tl.log(tl.where(own > 0, own / some, 1.0))
    second = both * tl.log(tl.where(both > 0, both / some, 1.0))
    return 0.5 * (moved * 0.6931471805599453 + first + second)


@triton.jit
def kept_prefix(row, V, neighbors, C, columns, looked, offset, token, own, total, cutoff,
                KIND: tl.constexpr, FLOAT: tl.constexpr, BLOCK_K: tl.constexpr):
    """How much weight and how many of the token's first `looked` neighbors the cutoff keeps."""
    share = own.to(tl.float64) / total.to(tl.float64)
    bound = cutoff.to(tl.float64)
    if KIND == "tvd":
        bound *= total.to(tl.float64)
    if KIND == "ratio":
        bound *= own.to(tl.float64)
    bound = tl.where(cutoff >= 0.0, bound, 0.0)
    threshold = tl.where(bound < CEILING, bound, CEILING).to(tl.int64)

    code = token - offset
    going = (cutoff >= 0.0) & (code >= 0) & (code < C) & (looked > 0)
    sums = total * 0
    kept = looked * 0
    while going:
        j = tl.arange(0, BLOCK_K)
        listed = kept + j < looked
        ids = tl.load(neighbors + code * columns + kept + j, mask=listed, other=0).to(tl.int64) + offset
        near = load_weights(row, ids, listed & (ids >= 0) & (ids < V), FLOAT)
        running = sums + tl.cumsum(near, axis=0)
        if KIND == "jsd":
            over = jsd(running.to(tl.float64) / total.to(tl.float64), share) > bound
        else:
            over = running > threshold
        # Sums only grow: the first entry that is over, or the table's end, ends the prefix.
        more = tl.min(tl.where(over | (kept + j >= looked), j, BLOCK_K), axis=0)
        sums += tl.sum(tl.where(j < more, near, 0), axis=0)
        kept += more
        going = (more == BLOCK_K) & (kept < looked)
    return sums, kept


@triton.jit
def draw_at(uniform, total):
    """Inverse CDF: the token is the first whose running sum of weights exceeds this. A NaN counts as 0."""
    aim = uniform.to(tl.float64) * total.to(tl.float64)
    inside = (aim > 0.0) & (aim < total.to(tl.float64))
    at = tl.where(inside, aim, 0.0).to(tl.int64)
    return tl.where(aim >= total.to(tl.float64), total - 1, at)


@triton.jit
def draw(row, V, total, uniform, FLOAT: tl.constexpr, BLOCK: tl.constexpr):
    at = draw_at(uniform, total)
    start = 0
    below = total * 0
    v = tl.arange(0, BLOCK)
    weight = load_weights(row, v, v < V, FLOAT)
    mass = tl.sum(weight, axis=0)
    while (start + BLOCK < V) & (below + mass <= at):
        below += mass
        start += BLOCK
        weight = load_weights(row, start + v, start + v < V, FLOAT)
        mass = tl.sum(weight, axis=0)
    before = (below + tl.cumsum(weight, axis=0) <= at).to(tl.int64)
    return tl.minimum(start + tl.sum(before, axis=0), V - 1)


@triton.jit
def residual_weights(weight, total, drafted, draft_total, slack):
    """max(R - Q, slack R, 0) in fixed point."""
    r = weight.to(tl.float64) * (1.0 / total.to(tl.float64))
    rest = tl.maximum(r - drafted.to(tl.float64) * (1.0 / draft_total.to(tl.float64)), slack * r)
    return (tl.maximum(rest, 0.0) * FIXED_ONE).to(tl.int64)
