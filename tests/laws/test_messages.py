"""What errors say of arguments that are out of range or do not go together. test_arguments.py is about each alone."""
import inspect
import math
import re

import pytest
import torch
from torch.utils._pytree import tree_map_only

import specvis_kernels
from tests import cases
from tests.cases import DEVICE, neighbor_table
from tests.cases.comparing import make


def parameters(op):
    return inspect.signature(getattr(specvis_kernels, op)).parameters


ROWS, IDS, EACH = torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.int64), torch.ones(2)
MEANS = ("target_means", "target_log_sigmas", "draft_means", "draft_log_sigmas")
PAIR = (torch.zeros(2, 4, 1), torch.zeros(2, 4, 1))
COMMITTED = make("commit_tokens", 2, 3, 3, 5)
# B = 2 requests of three nodes, V = 5. What ops share, and what one has otherwise.
ARGUMENTS = {
    "logits": ROWS, "uncond": None, "guidance": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0,
    "target_probs": ROWS, "draft_probs": ROWS, "uniforms": ROWS[..., 0], "scores": ROWS[..., 0],
    "tokens": IDS, "target_tokens": IDS, "node_tokens": IDS, "first_child": IDS, "next_sibling": IDS, "parents": IDS,
    "seeds": IDS[:, 0], "positions": IDS, "draft_row": IDS, "ancestors": IDS[..., None] + 1, "candidates": IDS,
    "lengths": IDS[:, 0], "width": EACH.long(), "depth": EACH.long(), "neighbors": neighbor_table(5, 2).cpu(),
    "delta": 0.5, "num_children": 4, "level": 1, "first_node": 1, "first_candidate": 0,
}
OWN = {
    "accept_gaussian": {"tokens": torch.zeros(2, 3, 4), "log_ratio": IDS.float()}
    | dict.fromkeys(MEANS, torch.zeros(2, 3, 4)),
    "codebook_neighbors": {"codebook": torch.zeros(4, 2), "k": 2},
    "commit_kv": {"caches": torch.zeros(4, 9), "accepted_nodes": IDS, "num_accepted": IDS[:, 0]},
    "commit_tokens": dict(zip(parameters("commit_tokens"), COMMITTED[0])) | COMMITTED[1],
    "couple_tokens": {"uniforms": torch.zeros(2, 3, 2)},
    "draw_children": {"uniforms": torch.zeros(2, 3, 4)},
    "draft_children": {"uniforms": torch.zeros(2, 3, 4)},
    "neighborhood_sum": {"probs": ROWS[0], "tokens": IDS[0]},
    "philox_uniforms": {"positions": 3, "n": 4, "stream": 0},
    "philox_words": {"n": 3, "stream": 9},
    "resample_gaussian": {"tokens": torch.zeros(2, 3, 4), "is_accepted": IDS > 0, "is_rejected": IDS == 0,
                          "proposals": torch.zeros(2, 3, 5, 4), "log_ratio": IDS.float(), "uniforms": ROWS,
                          "fallback": torch.zeros(2, 3, 4)} | dict.fromkeys(MEANS, torch.zeros(2, 3, 4)),
    "rms_norm": {"x": torch.zeros(2, 4), "weight": torch.ones(4)},
    "rotate_into_cache": {"qkv": torch.zeros(2, 1, 6), "kv_cache": torch.zeros(2, 4, 2, 1, 2), "lengths": IDS[0, :1],
                          "positions": IDS[:1, :1], "rotations": torch.zeros(5, 1, 2)},
    "sample_residual": {"target_probs": ROWS[0], "draft_probs": None, "uniforms": ROWS[0, :, 0]},
    "swiglu": {"gate": torch.zeros(2, 4), "up": torch.zeros(2, 4)},
    "tree_attention": {"q": torch.zeros(4, 3, 4, 32)}
    | dict.fromkeys(("k_cache", "v_cache"), torch.zeros(4, 9, 2, 32)),
    "tree_from_paths": {"paths": IDS, "num_nodes": 4},
    "tree_mask": {"lengths": IDS[:, 0], "columns": 5},
    "verify_chain": {"target_probs": torch.zeros(5, 5), "draft_tokens": IDS[0], "cu_num_draft_tokens": IDS[:, 0],
                     "uniforms": torch.zeros(5)},
}


def refuses(op, changes, message):
    """The op, with arguments that fit but for these changes, raises this error."""
    needed = {name for name, parameter in parameters(op).items() if parameter.default is parameter.empty}
    given = {name: ARGUMENTS[name] for name in needed & ARGUMENTS.keys()} | OWN.get(op, {}) | changes
    with pytest.raises(ValueError, match=message):
        getattr(specvis_kernels, op)(**tree_map_only(torch.Tensor, lambda t: t.to(DEVICE), given))


NAMES = {
    "cutoff": "tvd, ratio, jsd", "dtype": "float32, float16, bfloat16", "empty": "target, uniform",
    "filters": "k_then_p, p_then_k", "form": "bool, additive, packed, packed_rows", "metric": "l2, cosine, random",
    "residual": "optimal, relaxed, released", "rule": "strict, block, fly", "variant": "paper, released, path",
}


@pytest.mark.parametrize("op, name", [
    (op, name) for op in cases.CASES for name, parameter in parameters(op).items()
    if name in NAMES and parameter.default is not None])
def test_a_name_is_one_of_some(op, name):
    refuses(op, {name: "none"}, f"{name} must be one of {NAMES[name]}, got 'none'")


@pytest.mark.parametrize("op, name, sizes", [  # a dash: this size may be 0
    ("accept_gaussian", "tokens", "-GC"), ("commit_tokens", "node_tokens", "-N"),
    ("commit_tokens", "tokens", "-C"), ("commit_tokens", "num_accepted_at", "-L"),
    ("couple_tokens", "target_probs", "-W-"), ("draft_children", "logits", "-FV"), ("draft_frontier", "logits", "-FV"),
    ("draw_children", "draft_probs", "-FV"), ("draw_children", "uniforms", "--K"), ("draw_tokens", "logits", "-NV"),
    ("expand_tree", "draft_probs", "-FV"), ("guided_probs", "logits", "--V"), ("resample_gaussian", "tokens", "-G-"),
    ("resample_gaussian", "proposals", "--M-"), ("rotate_into_cache", "rotations", "P--"),
    ("sample_residual", "target_probs", "-V"), ("tree_links", "parents", "-N"), ("tree_mask", "ancestors", "-N-"),
    ("tree_paths", "parents", "-N"), ("verify_chain", "target_probs", "-V"), ("verify_greedy", "target_tokens", "-N"),
    ("verify_logits", "logits", "-N-"), ("verify_tree", "target_probs", "-N-"),
])
def test_there_must_be_one(op, name, sizes):
    tensor = (ARGUMENTS | OWN.get(op, {}))[name]
    for dim, letter in enumerate(sizes):
        if letter != "-":
            empty = tensor.narrow(dim, 0, 0)
            refuses(op, {name: empty}, rf"{name} must have {letter} >= 1, got shape {re.escape(str((*empty.shape,)))}")


@pytest.mark.parametrize("op, names", [
    (op, names) for op in ("couple_tokens", "verify_chain", "verify_logits", "verify_tree")
    for names in (("neighbors", "delta"), ("draft_probs", "draft_row"), ("seeds", "positions"))
    if {*names} <= parameters(op).keys()])
def test_two_are_given_together(op, names):
    for one, missing in (names, names[::-1]):
        refuses(op, {one: ARGUMENTS[one]}, f"{' and '.join(names)} must be given together, but {missing} is missing")


@pytest.mark.parametrize("op", [op for op in cases.CASES if "id_range" in parameters(op)])
@pytest.mark.parametrize("ids", [(0, 6), (5, 5), (2, 1), (-1, 5), (0, 2.0), (0, 1, 2)])
def test_a_range_has_two_ends_in_the_vocabulary(op, ids):
    refuses(op, {"id_range": ids}, r"id_range must be int64 or int32 \(B=2, [NF]=3, bounds=2\), or two integers with "
                                   rf"0 <= first < last <= V=5, got {re.escape(str(ids))}")


SEEDED = {"uniforms": None, "seeds": IDS[:, 0], "positions": IDS, "num_children": 5}
TABLE = {"neighbors": ARGUMENTS["neighbors"], "delta": 0.5}
ONE_COLUMN = {"neighbors": neighbor_table(5, 1).cpu(), "delta": 0.5}
GROUPS = IDS[..., None]
EQUALITY = {"uniforms": None, "seeds": IDS[:, 0], "positions": IDS}
CHILDREN = [
    ({"uniforms": None}, "exactly one of uniforms and seeds must be given, got neither"),
    ({"seeds": IDS[:, 0]}, "exactly one of uniforms and seeds must be given, got both"),
    ({"positions": IDS}, "positions must be None with uniforms, got Tensor"),
    ({"num_children": 5}, "num_children must be None with uniforms, got int"),
    (SEEDED | {"positions": None}, r"positions must be int64 or int32 \(B=2, F=3\), got NoneType, not a tensor"),
    (SEEDED | {"num_children": None}, "num_children must be an integer >= 1, got None"),
]
PHILOX = [({name: wrong}, f"{name} must be an integer >= 0, got {wrong}")
          for name, wrong in (("n", -1), ("stream", -1), ("turn", 0.5))]
REFUSED = {
    "accept_gaussian": [
        ({"draft_log_sigmas": None}, r"draft_log_sigmas must be float32 \(B=2, G=3, C=4\), got NoneType"),
        ({"variant": "path"}, "target_means must be None with variant 'path', .* got Tensor"),
        ({"truncate": 1}, "truncate must be True or False, got 1"),
    ],
    "codebook_neighbors": [
        ({"k": 4}, "k must be at most 3, got 4"),
        ({"codebook": torch.zeros(2, 4), "size": 4, "k": 1},
         r"codebook must have one code a row, size=4 rows, got shape \(2, 4\): it is transposed"),
        ({"size": 5}, r"codebook must have one code a row, size=5 rows, got shape \(4, \d\)$"),
        ({"backend": "cpu"}, f"must be one of oracle for {DEVICE} tensors"),
    ],
    "commit_kv": [
        ({"caches": []}, "caches must be a tensor or a list of at least one tensor"),
        ({"caches": None}, "caches must be a tensor or a list of at least one tensor"),
        ({"caches": [PAIR, PAIR]}, r"caches\[0\] is a tuple: flatten the pairs into one list of tensors$"),
        ({"caches": [PAIR[0], [*PAIR]]}, r"caches\[1\] is a list: flatten"),
        ({"caches": [PAIR[0], None]}, r"list of tensors, but caches\[1\] is a NoneType$"),
        ({"caches": [torch.zeros(4, 9), torch.zeros(4, 8)]},
         r"one shape and dtype, got float32 \(4, 9\) and float32 \("),
        ({"caches": [torch.zeros(4, 9), torch.zeros(4, 9).half()]}, "one shape and dtype, got float32 .* and float16"),
        ({"caches": torch.zeros(4, 9, dtype=torch.complex128)}, "1, 2, 4 or 8 bytes an element, got torch.complex128"),
        ({"caches": torch.zeros(3, 9)}, "the rows must be a multiple of B=2, got 3"),
        ({"caches": torch.zeros(4, 0)}, r"caches must have a column, got shape \(4, 0\)"),
        ({"slots": torch.zeros(4, 9).long()}, "row_dim must be None with slots, and only then, got 0"),
        ({"row_dim": None}, "row_dim must be None with slots, and only then, got None"),
        ({"row_dim": 1}, "must be dimensions of .* the row's first, got 1 and 1"),
        ({"row_dim": -2}, "must be dimensions of .* the row's first, got -2 and 1"),
        ({"column_dim": 2}, "must be dimensions of .* the row's first, got 0 and 2"),
        ({"row_dim": 0.0}, "row_dim must be an integer or None, got 0.0"),
        ({"column_dim": "1"}, "column_dim must be an integer, got '1'"),
        ({"caches": torch.zeros(4, 9, 2, 3)}, r"column_dim must be given for .* 2 for \(R, H, T, D\), as transf"),
    ],
    "commit_tokens": [
        ({"tokens": torch.zeros(2, 4).long()}, "tokens must have at least the L=5 columns of num_accepted_at, got C=4"),
        ({"depth": None}, "failed and .* and depth must be given together, but depth is missing"),
        (dict.fromkeys(COMMITTED[1]) | {"tv_excess": EACH}, "together, but failed and .* and depth are missing"),
    ],
    "couple_tokens": [
        ({"uniforms": torch.zeros(2, 3)}, r"uniforms must be float32 \(B=2, W=3, accept and draw=2\), got float32"),
        (TABLE | {"delta": torch.ones(3)}, r"delta must be float32 \(B=2\), got float32 \(3,\)"),
        (ONE_COLUMN | {"residual": "released"}, "neighbors must have at least two columns under 'released', got one"),
        (TABLE | {"groups": GROUPS}, "neighbors must be None with groups"),
        ({"groups": GROUPS, "residual": "relaxed"}, "residual must be 'optimal' with groups, got 'relaxed'"),
    ],
    "draft_children": CHILDREN,
    "draft_frontier": [
        ({"first_node": 61}, r"must have words for first_node \+ num_children = 65 nodes, 64 each, got W=1"),
    ],
    "draw_children": CHILDREN,
    "gumbel_noise": [
        ({"seeds": EACH, "n": 3}, "seeds must be int64"),
    ],
    "guided_probs": [
        ({"top_k": 2**31}, "top_k must fit into int32, got 2147483648"),
    ],
    "neighborhood_sum": [
        ({"neighbors": torch.ones(5, 0).int()}, "neighbors must have at least one row and one column"),
        ({"offset": 1}, r"offset must be in \[0, V - C\] = \[0, 0\], got 1 with V=5, C=5"),
        ({"offset": -1}, r"offset must be in \[0, V - C\] = \[0, 0\], got -1"),
    ],
    "philox_uniforms": [
        ({"seeds": 0.5}, r"seeds must be int64 or int32 \(B=1\), or integers of 64 bits, one for each .*, got 0.5"),
        ({"positions": -1}, "positions must be .*, or an integer >= 0, got -1"),
        ({"positions": torch.zeros(3, 1).long()}, r"seeds must be int64 or int32 \(B=3\), got int64 \(2,\)"),
        *PHILOX,
    ],
    "philox_words": [
        ({"seeds": EACH}, r"seeds must be int64 or int32 \(B=2\), got float32"),
        ({"positions": IDS.float()}, r"positions must be int64 or int32 \(B=2, L=3\)"),
        ({"positions": IDS[0]}, r"positions must have 2 dimensions \(B, L\)"),
        *PHILOX,
    ],
    "resample_gaussian": [
        ({"variant": "path"}, "target_means must be None with variant 'path', .* got Tensor"),
        (dict.fromkeys(MEANS) | {"variant": "path"},
         r"log_ratio must be float32 \(B=2, G=3, M=5\), got float32 \(2, 3\)"),
    ],
    "rms_norm": [
        ({"x": torch.zeros(2, 0)}, r"x must be a tensor \(.., E\) with E >= 1, got \(2, 0\)"),
        ({"x": torch.zeros(2, 4).int()}, r"x must be float32 or float16 or bfloat16 \(a=2, E=4\), got int32 \(2, 4\)"),
        ({"weight": torch.ones(3)}, r"weight must be float32 \(E=4\), got float32 \(3,\)"),
        ({"residual": torch.ones(4, 2)}, r"residual must be float32 \(a=2, E=4\), got float32 \(4, 2\)"),
        ({"eps": -1e-6}, "eps must be a number >= 0 that fits into float32, got -1e-06"),
        ({"eps": math.nan}, "eps must be a number >= 0 that fits into float32, got nan"),
        ({"eps": torch.zeros(2, 4)}, "eps must be .* got a tensor: residual is given by name"),
        ({"eps": 1e39}, r"eps must be a number >= 0 that fits into float32, got 1e\+39"),
    ],
    "rotate_into_cache": [
        ({"qkv": torch.zeros(2, 1, 4)}, r"qkv must have Q = \(H \+ 2 Hkv\) D with H >= 1, .* got Q=4, Hkv=1 and D=2"),
        ({"qkv": torch.zeros(2, 1, 7)}, "qkv must have Q = .* got Q=7"),
        ({"qkv": torch.zeros(3, 1, 6)},
         r"kv_cache must be float32 \(R=3, T=4, two=2, Hkv=1, D=2\), got float32 \(2, 4, "),
        ({"lengths": IDS[0]}, "qkv must be a multiple of .* lengths, B=3, got 2"),
        ({"positions": IDS[:1, :2]}, r"positions must be int64 or int32 \(Y=1, N=1\), got int64"),
        ({"rotations": torch.zeros(5, 2, 2)},
         r"rotations must be float32 \(P=5, pairs=1, two=2\), got float32 \(5, 2, 2"),
        ({"positions": torch.zeros(3, 1).long()}, "qkv must be .* rows of positions, Y=3, got 2"),
        ({"rotates_halves": "no"}, "rotates_halves must be a bool, got 'no'"),
        ({"first_node": -1}, "first_node must be an integer >= 0, got -1"),
    ],
    "swiglu": [
        ({"gate": torch.tensor(1.)}, r"gate must be a tensor \(.., F\) with F >= 1, got \(\)"),
        ({"gate": torch.zeros(2, 4).double()},
         r"gate must be float32 or float16 or bfloat16 \(a=2, F=4\), got float64"),
        ({"up": torch.zeros(2, 5)}, r"up must be float32 \(a=2, F=4\), got float32 \(2, 5\)"),
    ],
    "token_log_probs": [
        ({"tokens": IDS[:, :2]}, r"tokens must be int64 or int32 \(B=2, K=3\)"),
        ({"rows": IDS[:, :2]}, r"tokens must be int64 or int32 \(B=2, K=2\)"),
    ],
    "tree_attention": [
        ({"q": torch.zeros(4, 3, 3, 32)}, "the heads of q must be a multiple of .* of k_cache, got H=3 and Hkv=2"),
        ({"lengths": torch.zeros(4).long()}, r"ancestors must be int64 \(B=4 or 1, N=3, W=1\), got"),
        ({"ancestors": torch.ones(3, 3, 1).long(), "lengths": IDS[0]}, "a multiple of B=3, got 4"),
        ({"ancestors": torch.ones(2, 3, 0).long()}, "there must be a node, a column and a word, got N=3, T=9, W=0"),
        ({"scale": "small"}, "scale must be a number or None, got 'small'"),
        (dict.fromkeys(("q", "k_cache", "v_cache"), torch.zeros(4, 3, 2, 257)), "q must have D from 1 to 256, got 257"),
    ],
    "tree_from_mask": [
        ({"mask": [[1]]}, "mask must be a tensor, got list"),
        ({"mask": torch.zeros(2)}, r"mask must have 3 dimensions \(B, N, N\), got shape \(2,\)"),
        ({"mask": torch.zeros(2, 3)}, r"mask must be \(.., N, N\) with N >= 1, got shape \(1, 2, 3\)"),
        ({"mask": torch.zeros(2, 0, 0)}, r"mask must be \(.., N, N\) with N >= 1, got shape \(2, 0, 0\)"),
    ],
    "tree_from_paths": [
        ({"paths": [[0, 1]]}, "paths must be a tensor, got list"),
        ({"paths": torch.zeros(2, 2)}, r"paths must be int64 or int32 \(B=1, L=2, D=2\), got float32 \(1, 2, 2"),
        ({"paths": IDS[0]}, r"paths must have 3 dimensions \(B, L, D\), got shape \(3,\)"),
        ({"num_nodes": 0}, "num_nodes must be an integer >= 1, got 0"),
        ({"num_nodes": 2.0}, "num_nodes must be an integer >= 1, got 2.0"),
    ],
    "tree_links": [
        ({"parents": [-1, 0]}, "parents must be a tensor, got list"),
    ],
    "tree_mask": [
        ({"ancestors": torch.zeros(2, 65, 1).long()},
         r"ancestors must be int64 \(B=2 or 1, N=65, W=2\), got int64 \(2, 65, 1\)"),
        ({"columns": None}, "columns must be given when lengths or start are"),
        ({"dtype": torch.float64}, "dtype must be one of float32, float16, bfloat16, got torch.float64"),
    ],
    "tree_paths": [
        ({"parents": [[-1]]}, "parents must be a tensor, got list"),
        ({"parents": IDS.short()}, r"parents must be int64 or int32 \(B=2, N=3\), got int16 \(2, 3\)"),
        ({"max_depth": -1}, "max_depth must be an integer >= 0, got -1"),
    ],
    "verify_chain": [
        ({"cu_num_draft_tokens": torch.tensor([0, 1, 3])},
         "cu_num_draft_tokens must be .* got 3 .* 2 req.* a leading 0"),
        ({"bonus_tokens": torch.zeros(2)}, r"target_probs must be float32 \(T=3, V=5\), got float32 \(5, 5\)"),
        ({"rule": "block", "omega": 1.0}, "omega must be None for rule 'block', got a tensor"),
        ({"rule": "block"} | TABLE, "neighbors must be None for rule 'block', got a tensor"),
        ({"rule": "block", "empty": "uniform"}, "empty must be 'target' for rule 'block', got 'uniform'"),
        ({"rule": "block", "entropy": 0.5}, "window and entropy must be None for rule 'block', got None and 0.5"),
        ({"window": 1}, "window and entropy must be None for rule 'strict', got 1 and None"),
        ({"rule": "fly", "residual": "relaxed"}, "residual must be 'optimal' for rule 'fly', got 'relaxed'"),
        ({"rule": "fly", "entropy": 0.5}, "window must be an integer >= 1, got None"),
        ({"rule": "fly", "window": 0, "entropy": 0.5}, "window must be an integer >= 1, got 0"),
        ({"rule": "fly", "window": 1}, "entropy must be a number >= 0 for rule 'fly', got None"),
        ({"rule": "fly", "window": 1, "entropy": math.nan}, "entropy must be a number >= 0 for rule 'fly', got nan"),
    ],
    "verify_logits": [
        ({"uniforms": None}, "uniforms or seeds must be given"),
        ({"offset": 1.5}, "offset must be an integer, got 1.5"),
        (TABLE | {"offset": 1}, r"offset must be in \[0, V - C\] = \[0, 0\]"),
        (ONE_COLUMN | {"residual": "released"}, "at least two columns"),
        (EQUALITY | {"uniforms": ROWS[..., 0]}, "uniforms must be None with seeds: by seeds a token is accepted if it "
         "equals the target's own draw, and uniforms plays no part in that"),
        (EQUALITY | {"draft_probs": ROWS, "draft_row": IDS}, "draft_probs must be None with seeds"),
        (EQUALITY | TABLE, "neighbors must be None with seeds"),
        (EQUALITY | {"omega": torch.ones(2, 2)}, "omega must be None with seeds"),
    ],
    "verify_tree": [
        ({"draft_probs": ROWS[:, :0], "draft_row": IDS}, r"draft_probs must have M >= 1, got shape \(2, 0, 5\)"),
        (ONE_COLUMN | {"residual": "released"}, "two columns under 'released', got one"),
        (TABLE | {"offset": 1}, r"offset must be in \[0, V - C\] = \[0, 0\], got 1"),
    ],
}


@pytest.mark.parametrize("op, changes, message", [(op, *case) for op, table in REFUSED.items() for case in table])
def test_says_what_is_wrong(op, changes, message):
    refuses(op, changes, message)
