"""verify_logits: verify_tree, or verification by equality, from a model's logits."""
import torch
from torch import Tensor

from ._checks import Seeds, check, check_seeds, check_together, check_tree, integers
from ._define import checked_once, define
from ._filters import check_filters, check_logits, check_settings, range_of_nodes
from .draw_tokens import _oracle as draw_tokens_oracle
from .guided_probs import _oracle as guided_probs_oracle
from .status import INVALID_ROW
from .verify_greedy import _oracle as verify_greedy_oracle
from .verify_tree import Rule, VerifyResult, check_rule, verify_rows


@checked_once
def verify_logits(logits: Tensor, uncond: Tensor | None, tokens: Tensor, first_child: Tensor, next_sibling: Tensor,
                  uniforms: Tensor | None, guidance: Tensor | float | None, temperature: Tensor | float,
                  top_k: Tensor | int | None, top_p: Tensor | float | None, *, min_p: Tensor | float | None = None,
                  max_depth: int | None = None, id_range: Tensor | tuple[int, int] | None = None,
                  filters: str = "k_then_p", draft_probs: Tensor | None = None, draft_row: Tensor | None = None,
                  neighbors: Tensor | None = None, delta: Tensor | float | None = None, cutoff: str = "tvd",
                  offset: int = 0, omega: Tensor | float | None = None, residual: str = "optimal",
                  empty: str = "target", seeds: Seeds | None = None, positions: Tensor | None = None,
                  backend: str | None = None) -> VerifyResult:
    """Accept drafted tokens along one path of each request's tree, straight from the logits of the tree's nodes.

    With `uniforms` this is `guided_probs` of all rows, and then `verify_tree` on them with greedy = (temperature is
    0), bit for bit. The content of rows that verification does not reach does not matter. On a CPU they are not read;
    on a GPU all rows are filtered first, in scratch memory of at most 256 MB or one request's probabilities.

    One rule is added, for rows with a range of ids. A token outside the range of its parent node keeps no neighbors:
    it has no relaxed mass, and is never accepted. So where a range forces a token, no other token can take its place.

    With `seeds` it is verification by equality: `draw_tokens` of all rows at their positions, and then
    `verify_greedy` with the tokens drawn: the tokens that decoding one by one draws with the same seeds, whatever the
    tree. An invalid row ends the path.

    (LANTERN, arXiv:2410.03355, whose released code also filters rows as it reaches them; COOL-SD, arXiv:2601.09212;
    the Gumbel-max trick: Maddison, Tarlow and Minka, arXiv:1411.0030.)

    Args:
        logits:        (B, N, V) float32, float16 or bfloat16   after each node; node 0 is the root
        uncond:        (B, N, V) the same dtype                 without the condition; None: no guidance
        tokens:        (B, N) int32 or int64    the token at each node, in [0, V); the root's is not read
        first_child:   (B, N) or (1, N) int32 or int64   each node's first child, a later node; negative: none
        next_sibling:  (B, N) or (1, N) int32 or int64   the child of the same parent tried next, a later node;
                                                         negative: none. With seeds, -1: none, in both
        uniforms:      (B, N)    float32        in [0, 1): column n > 0 decides node n, column 0 the next token. None
                                                with `seeds`
        guidance:      (B,) float32 or a number   s, the guidance scale; None, or the number 1, without `uncond`
        temperature:   (B,) float32 or a number   >= 0; requests of temperature 0 are greedy
        top_k:         (B,) int32 or int64, or a number   off if <= 0 or at least the number of ids; None: off
        top_p:         (B,) float32 or a number in [0, 1]   off if <= 0 or >= 1; None: off
        min_p:         (B,) float32 or a number in [0, 1]   off if <= 0; None: off
        max_depth:     P, the most nodes that can be accepted; None: N - 1
        id_range:      two integers first, last: the ids [first, last) of every row; or (B, N, 2) int32 or int64, the
                       ids of each row: [x, x + 1) forces token x. None: all ids
        filters:       "k_then_p" or "p_then_k", the order of top-k and top-p
        draft_probs:   (B, M, V) float32        rows from which children were drawn without replacement
        draft_row:     (B, N) or (1, N) int32 or int64   the row that node n's children were drawn from; if negative,
                                                         each child is a point mass
        neighbors:     (C, k) uint16, int32 or int64  each code's neighbors, nearest first: distinct, itself excluded
        delta:         (B,) float32 or a number >= 0   how much the cutoff allows
        cutoff:        the rule by which delta limits the neighbors: "tvd", "ratio" or "jsd"
        offset:        the token id of code 0; a token outside [offset, offset + C) has no neighbors
        omega:         (B, P) float32 or a number >= 0   the factor on the accept test at depths 1..P; None is 1
        residual:      "optimal", "relaxed" or "released"
        empty:         "target" or "uniform": what takes the place of an empty residual. "uniform" is over the whole
                       vocabulary, whatever the filters and ranges leave
        seeds:         (B,) int32 or int64, or integers   verification by equality: one for each request. Then uniforms,
                                                draft_probs, neighbors, delta and omega are None
        positions:     (B, N) int32 or int64    of the token that each row predicts; the low 32 bits count. With seeds
        backend:       None for the device's own kernel; a name from `backends()` to force one

    Returns:
        accepted_nodes:  (B, P) int32    the accepted nodes from the root down, without the root; -1 pads
        num_accepted:    (B,)   int32    how many there are
        next_token:      (B,)   int64    the token that follows them, in [0, V)
        tv_excess:       (B,)   float32  the added total variation, estimated, as in verify_tree; 0 with seeds
        status:          (B,)   int32    INVALID_ROW: the row at the end of the path is invalid, as in guided_probs;
                                         next_token is 0.
                                         INVALID_DRAFT, INVALID_TREE, INVALID_RULE, EMPTY_RESIDUAL: as in verify_tree;
                                         with seeds, INVALID_TREE as in verify_greedy and no other bit

    Raises:
        ValueError: a dtype, shape or device differs from the above, N is 0, V is 0 or above 2**19, M is 0, id_range is
            two integers but not 0 <= first < last <= V, filters, cutoff or residual is unknown, draft_probs
            comes without draft_row or neighbors without delta, "released" with a single column, neither uniforms nor
            seeds are given, or seeds come without positions or with an argument that equality does not use

    Examples:
        >>> logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log().repeat(1, 3, 1)
        >>> links = tree_links(torch.tensor([[-1, 0, 0]]))  # a root and its two children
        >>> tokens, uniforms = torch.tensor([[3, 0, 1]]), torch.tensor([[0.9, 0.5, 0.4]])
        >>> result = verify_logits(logits, None, tokens, links.first_child, links.next_sibling, uniforms, guidance=1.0,
        ...                        temperature=1.0, top_k=0, top_p=1.0, max_depth=1)
        >>> result.accepted_nodes, result.next_token  # as verify_tree decides on these probabilities
        (tensor([[2]], dtype=torch.int32), tensor([3]))
    """
    B, N, V = check_logits(logits, uncond)
    *tree, max_depth = check_tree(tokens, first_child, next_sibling, max_depth, logits)
    settings = check_settings(guidance, temperature, top_k, top_p, min_p, logits, uncond)
    ids = check_filters(id_range, filters, like=logits)
    draft_row, delta, omega, offset = check_rule(draft_probs, draft_row, neighbors, delta, cutoff, offset, omega,
                                                 residual, empty, max_depth, logits)
    check_together(seeds=seeds, positions=positions)
    if seeds is None:
        if uniforms is None:
            raise ValueError("uniforms or seeds must be given")
        check("uniforms", uniforms, torch.float32, like=logits, B=B, N=N)
    else:
        for name, value in {"uniforms": uniforms, "draft_probs": draft_probs, "neighbors": neighbors,
                            "omega": omega}.items():
            if value is not None:
                raise ValueError(f"{name} must be None with seeds: by seeds a token is accepted if it equals the "
                                 f"target's own draw, and {name} plays no part in that")
        seeds = check_seeds(seeds, logits, B)
        positions = integers("positions", positions, torch.int64, logits, B=B, N=N)
    return _call(backend, logits, uncond, *tree, uniforms, *settings, ids[0], draft_probs, draft_row, neighbors, delta,
                 omega, seeds, positions, *ids[1:], filters, cutoff, offset, residual, empty, max_depth)


def _oracle(logits: Tensor, uncond: Tensor | None, tokens: Tensor, first_child: Tensor, next_sibling: Tensor,
            uniforms: Tensor | None, guidance: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor,
            min_p: Tensor | None, id_range: Tensor | None, draft_probs: Tensor | None, draft_row: Tensor | None,
            neighbors: Tensor | None, delta: Tensor | None, omega: Tensor | None, seeds: Tensor | None,
            positions: Tensor | None, first_id: int, last_id: int, filters: str, cutoff: str,
            offset: int, residual: str, empty: str, max_depth: int):
    settings = (guidance, temperature, top_k, top_p, min_p)
    ids = (id_range, first_id, last_id, filters)
    if seeds is None:
        target_probs, _ = guided_probs_oracle(logits, uncond, *settings, *ids)
        return verify_rows(
            target_probs, (tokens, first_child, next_sibling, uniforms), draft_probs, draft_row,
            Rule(neighbors, delta, omega, cutoff, offset, residual, empty, max_depth), temperature == 0,
            id_range=range_of_nodes(id_range, first_id, last_id, like=logits))

    target_tokens, _, _, row_status = draw_tokens_oracle(logits, uncond, *settings, seeds, positions, *ids, None, 0)
    first_child = torch.where(row_status == 0, first_child, -1)  # an invalid row ends the path
    accepted_nodes, num_accepted, next_token, status = verify_greedy_oracle(
        target_tokens, tokens, first_child, next_sibling, max_depth)
    path = torch.nn.functional.pad(accepted_nodes, (1, 0))  # the root is first
    end = path.gather(1, num_accepted[:, None].long()).long()
    is_invalid = row_status.gather(1, end)[:, 0] != 0
    status = status | torch.where(is_invalid, INVALID_ROW, 0)
    return accepted_nodes, num_accepted, next_token, torch.zeros_like(guidance), status.int()


def _meta(logits, tokens, guidance, max_depth):
    B = logits.shape[0]
    return (tokens.new_empty(B, max_depth, dtype=torch.int32), tokens.new_empty(B, dtype=torch.int32),
            tokens.new_empty(B), guidance.new_empty(B), tokens.new_empty(B, dtype=torch.int32))


_call = define("verify_logits", oracle=_oracle, meta=_meta, result=VerifyResult)
