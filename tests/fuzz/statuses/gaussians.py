"""Ops on continuous tokens."""
import math

import numpy as np

from specvis_kernels import INVALID_ROW, INVALID_RULE, OUT_OF_TRIES
from tests.fuzz.statuses.common import Unclear, each, not_a_number, outside, unlike

LARGEST_FLOAT = 3.4028234663852886e38


def log_ratio_of(x, log_ratio, last_step, temperature):
    """log r in float64. Unclear where terms cancel or the result is near the largest float32."""
    terms = [np.float64(log_ratio)]
    if last_step[0] is not None:
        mean_p, sigma_p, mean_q, sigma_q = (np.asarray(t, dtype=np.float64) for t in last_step)
        d_p, d_q = (x - mean_p) * exp(-sigma_p), (x - mean_q) * exp(-sigma_q)
        factor = 0.5 / np.float64(temperature) ** 2
        terms += [*(sigma_q - sigma_p), *(d_q * d_q * factor), *(-d_p * d_p * factor)]
    value, doubt = np.sum(terms), np.abs(terms).sum() * 1e-9
    if np.isfinite(value) and abs(abs(value) - LARGEST_FLOAT) <= doubt + 1e31 or not np.isfinite(value) and np.isfinite(
            terms).all():
        raise Unclear
    return value, doubt


def exp(x):
    """As the docstrings have it: 0 below -708 and for a NaN, and at most that of 709."""
    return np.where(x > -708, np.exp(np.clip(x, -708, 709)), 0)


def is_number(*values):
    return all(np.isfinite(np.asarray(value, dtype=np.float64)).all() for value in values)


def last_step_of(a, b, g):
    names = ("target_means", "target_log_sigmas", "draft_means", "draft_log_sigmas")
    return [None if a[name] is None else a[name][b, g] for name in names]


def accept_gaussian(a, out):
    num_accepted, is_accepted, is_rejected, log_r, status = out
    B, G, _ = a["tokens"].shape

    def of_request(b):
        temperature = np.float32(1) if a["temperature"] is None else a["temperature"][b]
        undefined = not 0 < temperature < np.inf
        count = G if a["num_drafted"] is None else max(0, min(G, int(a["num_drafted"][b])))
        valid = True
        for g in range(count):
            sign = -1 if a["variant"] == "released" else 1
            numbers = a["tokens"][b, g], a["log_ratio"][b, g], a["uniforms"][b, g]
            if not is_number(*numbers):
                valid = False
                continue
            ratio, _ = log_ratio_of(a["tokens"][b, g].astype(np.float64), sign * numbers[1], last_step_of(a, b, g),
                                    1 if undefined else temperature)
            valid = valid and abs(ratio) <= LARGEST_FLOAT
        bits = (0 if valid else INVALID_ROW) | (INVALID_RULE if undefined else 0)
        if bits and (is_accepted[b].any() or is_rejected[b].any()):
            return "a draft was decided although the request is invalid"
        decided = is_accepted[b] | is_rejected[b]
        if not bits and not a["truncate"] and decided.sum() != count or decided[count:].any():
            return f"{decided.sum()} drafts were decided of {count}"
        return unlike("status", status[b], bits)

    return unlike("num_accepted", num_accepted, is_accepted.sum(1)) or each(of_request, B)


def resample_gaussian(a, out):
    tokens, num_tries, status = out
    B, G, M, _ = a["proposals"].shape
    is_path, sign = a["variant"] == "path", -1 if a["variant"] == "released" else 1

    def of_position(b, g):
        temperature = np.float32(1) if a["temperature"] is None else a["temperature"][b]
        if not a["is_rejected"][b, g]:
            return 0 if not a["is_accepted"][b, g] or is_number(a["tokens"][b, g]) else INVALID_ROW
        if not 0 < temperature < np.inf:
            return INVALID_RULE
        last_step = last_step_of(a, b, g)
        for m in range(M):
            x, u = a["proposals"][b, g, m], a["uniforms"][b, g, m]
            if is_path:
                ratio, doubt = np.float64(a["log_ratio"][b, g, m]), 0.0
            else:
                exact = last_step[0].astype(np.float64) + exp(last_step[1].astype(np.float64)) * x
                x = exact.astype(np.float32)
                if not is_number(x, u):
                    return INVALID_ROW
                ratio, doubt = log_ratio_of(x.astype(np.float64), sign * a["log_ratio"][b, g], last_step, temperature)
            if not is_number(x, u) or not abs(ratio) <= LARGEST_FLOAT:
                return INVALID_ROW
            ratio32 = float(np.float32(ratio))
            bound = 1 - math.exp(-min(ratio32, 700)) if ratio32 > -700 else -math.inf
            if not is_path and (abs(ratio) < 1e-6 + doubt or abs(u - bound) < 1e-5 + doubt):
                raise Unclear
            if abs(u - bound) < 1e-14:
                raise Unclear
            if ratio32 > 0 and u < bound:
                return 0
        return OUT_OF_TRIES | (0 if is_number(a["fallback"][b, g]) else INVALID_ROW)

    def of_request(b):
        for g in range(G):
            bits = of_position(b, g)
            if status[b, g] != bits:
                return f"status of position {g} is {status[b, g]}, by the docstring {bits}"
            if bits & ~OUT_OF_TRIES and tokens[b, g].any():
                return f"position {g} is invalid, but has a token"
        return None

    return outside("num_tries", num_tries, M + 1) or not_a_number("tokens", tokens) or each(of_request, B)
