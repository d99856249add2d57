"""Attention, and the table of neighbors."""
import numpy as np

from tests.fuzz.statuses.common import outside, some


def tree_attention(a, out):
    q, k, v = (a[name].astype(np.float64) for name in ("q", "k_cache", "v_cache"))
    R, N, H, D = q.shape
    (T, Hkv), (B, _, W) = k.shape[1:3], a["ancestors"].shape
    scale = D ** -0.5 if a["scale"] is None else a["scale"]

    def of_row(r):
        b, length = r % B, int(a["lengths"][r % B])
        for n in range(N):
            bits = sum((int(word) & (2**64 - 1)) << 64 * w for w, word in enumerate(a["ancestors"][b, n]))
            seen = [t for t in range(T) if length >= 0 and (
                t < length and (a["key_mask"] is None or t >= a["key_mask"].shape[1] or a["key_mask"][r, t])
                or 0 <= t - length < 64 * W and bits >> (t - length) & 1)]
            for h in range(H):
                expected = np.zeros(D)
                if seen:
                    scores = k[r, seen, h // (H // Hkv)] @ q[r, n, h] * scale
                    weights = np.exp(scores - scores.max())
                    expected = weights / weights.sum() @ v[r, seen, h // (H // Hkv)]
                if not np.allclose(out[0][r, n, h], expected, rtol=1e-2, atol=4e-3):
                    return f"node {n}, head {h}: {out[0][r, n, h][:4]}, by the docstring {expected[:4]}"
        return None

    for r in list(some(R))[:4]:
        what = of_row(r)
        if what:
            return f"row {r}: {what}"
    return None


def packed_linear(a, out):
    """The weight's inputs come one by one, or in pairs if they are of 16 bits, which NumPy does not have."""
    (M, K), outputs = a["x"].shape, a["out_features"]
    for pair in (1, 2):
        weight = a["weight"].reshape(-1, K // pair, 32, pair).transpose(0, 2, 1, 3).reshape(-1, K)[:outputs]
        expected = a["x"].astype(np.float64) @ weight.T + (0 if a["bias"] is None else a["bias"])
        if out[0].shape == (M, outputs) and np.allclose(out[0], expected, rtol=1e-4, atol=1e-4, equal_nan=True):
            return None
    return f"the product is not x W^T + bias: {out[0].flatten()[:4]}, by the docstring {expected.flatten()[:4]}"


def decoder_layers(a, out):
    """What it keeps: the last nodes' keys and values nowhere but in their columns."""
    hidden, cache = out
    (T, before), lengths, N = (cache.shape[2], a["kv_cache"]), a["lengths"], a["x"].shape[1]
    column = np.arange(T)
    for r in range(cache.shape[1]):
        length = int(lengths[r % len(lengths)])
        is_written = (column >= length + a["first_node"]) & (column < length + a["first_node"] + N) & (length >= 0)
        if not np.array_equal(cache[:, r, ~is_written], before[:, r, ~is_written]):
            return f"row {r}: a column outside of [{length} + first_node, .. + {N}) was written"
        if (cache[:, r, is_written] == before[:, r, is_written]).mean() > 0.1:
            return f"row {r}: the nodes' columns were not written"
    return None if hidden.shape == a["x"].shape and np.isfinite(hidden).all() else "a hidden state is not finite"


def denoise_tokens(a, out):
    """What follows from the path: it starts at the noise, and a token of finite numbers stays finite and its own."""
    path, log_sigma, log_sigma_sum = out
    noise, z = a["noise"], a["z"]
    if not np.array_equal(path[:, -1], noise[:, -1], equal_nan=True):
        return "x_T is not the last entry of the noise"
    is_good = np.isfinite(noise).all((1, 2)) & np.isfinite(z).all((1, 2))
    if not all(np.isfinite(part[is_good]).all() for part in out):
        return "a number of a token without NaN is not finite"
    if noise.shape[1] == 1 and log_sigma_sum.any():
        return "the last step counts in log_sigma_sum"
    if a["clip_range"] == 0.5:
        mean = np.abs(path[is_good, 0] - a["schedule"][0, 4] * path[is_good, 1])
        if (mean > a["schedule"][0, 3] * 0.5 + 1e-5 * (1 + np.abs(path[is_good, 1]))).any():
            return "a predicted x_0 is beyond clip_range"
    return None if log_sigma.shape == noise[:, 0].shape else f"log_sigma is {log_sigma.shape}"


def transformer_blocks(a, out):
    """An entry that is wanted twice is there twice, up to rounding: the oracle's products may differ in that."""
    (x, wanted), (got,) = (a["x"], a.get("wanted")), out
    if wanted is None:
        return None if got.shape == x.shape and np.isfinite(got).all() else "an entry is not finite"
    column = wanted.clip(0, x.shape[1] - 1)
    for r in range(len(x)):
        for entry in np.unique(column[r]):
            of = got[r, column[r] == entry]
            if not np.isfinite(of).all() or not np.allclose(of, of[0], 1e-2, 2e-2):
                return f"row {r}: entry {entry} is not finite, or differs from itself"
    return None


def codebook_neighbors(a, out):
    table, V = out[0].astype(np.int64), len(a["codebook"])
    what = outside("neighbors", table, V)
    if what:
        return what
    for i, row in enumerate(table.tolist()):
        if len({*row, i}) != a["k"] + 1:
            return f"neighbors of code {i} are {row}"
    if a["metric"] != "l2" or a["normalize"] or not (np.abs(a["codebook"]) < 1e6).all():
        return None
    codes = a["codebook"].astype(np.float64)
    for i in some(V):
        distances = ((codes[i] - codes) ** 2).sum(1)
        distances[i] = np.inf
        nearest = np.sort(distances)[:a["k"]]
        if not np.allclose(distances[table[i]], nearest, rtol=1e-9, atol=1e-9 * (codes ** 2).sum(1).max()):
            return f"neighbors of code {i} are not the nearest"
    return None
