"""Speculative decoding of discrete tokens: a draft model proposes a tree of tokens, one target forward verifies it.

Each step is five calls: draft, target_forward, verify, commit, update. `driver.decode_batch` runs the steps.

A seed-exact method verifies by equality: at every node of a tree the target draws its own token, with the noise of the
node's position as the baseline does. A draft is accepted if it is this token. So the tokens are the baseline's,
whatever the trees. Known tokens are read with the condition, and the other tokens are drawn after them.
"""
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specvis_kernels import INVALID_ROW, CommitTokensResult, VerifyResult, commit_tokens, verify_logits

from ..models.interface import DraftModel, Nodes, TargetModel, id_range, inference, num_tokens
from .batch_state import BatchState
from .decoded import Decoded, Finished, Observer, Progress, Step, decoded_log_probs, keep_log_probs, new_log_probs
from .draft_tree import DraftState, DraftTree, new_draft_state
from .driver import RunningBatch, decode_batch, read_known
from .graphs import GraphKey, can_replay, round_up
from .methods import Method, acceptance_rule
from .requests import Requests, check_batch, check_draft_model, checked_requests
from .sampling import ACCEPT, Sampling, take_nodes, uniforms_at
from .trees import static_tree


@inference
def speculative_decode(target: TargetModel, draft_model: DraftModel, condition: Tensor, padding_mask: Tensor,
                       sampling: Sampling, methods: str | Method | list[str | Method], neighbors: Tensor | None = None,
                       progress: Progress | None = None, observe: Observer | None = None, *,
                       known_tokens: Tensor | None = None, batch: int | None = None,
                       finished: Finished | None = None) -> Decoded:
    """Draft a tree, read it in one target forward, accept a path of it; until every image is finished.

    If the target puts a NaN into its cache, the image ends there. If it does so at a draft that is rejected, the image
    may end or go on.

    Args:
        draft_model:  of both rows of each request, see `sampling.cfg_inputs`
        condition:    (B, S, dim)  as `GPT.condition` gives it
        padding_mask: (B, S) bool  True where the condition is real
        methods:      one for all requests, or one for each, all of one `Method.family`; or their names
        neighbors:    (C, k) uint16 or int32, as `codebook_neighbors` gives it; needed where k > 0. C is V, or the
            number of the target's `codes`
        observe:      called after every step, with tensors that it must not change
        known_tokens: (B, K) int64  the first tokens of each image, -1 after them; None: no token is known
        batch:        how many images are decoded at once; when one is finished, the next takes its row. Then all
            requests have one method, and nobody observes. None: all images
        finished:     called with the numbers of requests whose images are finished, and with these images
    Raises:
        ValueError: an argument differs from the above
    """
    requests = checked_requests(target, condition, padding_mask, sampling, methods, known_tokens, (
        "static", "dynamic"), "methods that draft trees (decode and jacobi_decode take the others)")
    check_draft_model(target, draft_model, condition)
    batch = check_batch(batch, requests.methods, observe, target, draft_model)

    def begin(numbers: list[int]) -> SpeculativeState:
        these = requests[numbers]
        settings = SpeculativeSettings(target, these, neighbors)
        own_draft_model = draft_model if len(numbers) == len(requests) else draft_model.select(numbers)
        state = SpeculativeState(settings, new_draft_state(own_draft_model, these.sampling, these.methods, target),
                                 these.num_known)
        prefill(state, these.condition, these.known_tokens)
        return state

    return decode_batch(begin, run_step, requests.num_known, batch, progress, observe, finished)


class SpeculativeSettings(BatchState):
    """What a step does not change, of B requests."""

    PAIRS, PARTS = ("padding_mask",), ("sampling",)

    def __init__(self, target: TargetModel, requests: Requests, neighbors: Tensor | None):
        methods, self.sampling, self.padding_mask = requests.methods, requests.sampling, requests.padding_mask
        base, device, self.target, self.num_tokens = methods[0], self.padding_mask.device, target, num_tokens(target)
        self.has_id_range, self.seed_exact = hasattr(target, "id_range"), base.seed_exact
        # the most nodes of a tree, drafts that a step can accept, and children of a node
        self.max_nodes, self.max_depth, self.max_width = (
            max(getattr(m, name) for m in methods) for name in ("max_nodes", "max_depth", "max_width"))
        self.rule = acceptance_rule(methods, neighbors, target, self.max_depth, device)  # arguments of verify_logits
        self.is_chain = base.drafting == "static" and static_tree(base.drafts.tree).is_chain


class SpeculativeState(RunningBatch):
    """The images, the draft model's state, and the accounts, see `Decoded`."""

    ROWS = (*RunningBatch.ROWS, "root", "failed", "target_forwards", "num_accepted", "num_drafted")
    PARTS, CACHES = ("settings", "draft_state"), ("cache",)

    def __init__(self, settings: SpeculativeSettings, draft_state: DraftState, num_known: list[int]):
        B, L, device = len(num_known), settings.num_tokens, settings.padding_mask.device
        super().__init__(settings, num_known, settings.target.prefix_len + L + settings.max_nodes)
        self.draft_state = draft_state
        self.tokens = torch.zeros(B, L, dtype=torch.int64, device=device)
        self.counts = self.num_known + 1  # (B,) tokens of each image; L: it is finished, or it failed
        self.root = torch.zeros(B, dtype=torch.int64, device=device)  # (B,) the newest token: not in the cache yet
        self.failed = torch.zeros(B, dtype=torch.bool, device=device)
        self.target_forwards = torch.ones(B, dtype=torch.int64, device=device)
        self.num_accepted = torch.full((B, L), -1, dtype=torch.int64, device=device)
        self.num_drafted = torch.zeros(B, L, dtype=torch.int64, device=device)
        # a step writes the next P + 1 entries; the last one is scratch for finished requests
        self.log_probs = new_log_probs(settings.sampling, L + settings.max_depth + 1)

    @property
    def can_replay(self) -> bool:
        return super().can_replay and can_replay(self.draft_state.draft_model)

    def look(self) -> None:
        """Read how far the images are, and how deep and wide the next trees: the loop's one host read."""
        shapes = self.draft_state.shapes
        self.host_counts, depths, widths = torch.stack([self.counts, shapes.depth, shapes.width]).tolist()
        self.num_steps, self.host_depth, self.host_width = 0, max(depths), max(widths)
        if self.poll > 1 and shapes.adaptation:  # trees may grow before the next look
            self.host_depth, self.host_width = self.settings.max_depth, self.settings.max_width

    def next_graph_key(self) -> GraphKey:
        """The key of the next step, after num_steps steps since the last look."""
        L = self.settings.num_tokens
        count = max((count for count in self.host_counts if count < L), default=L)
        max_count = min(round_up(count + self.num_steps * (self.settings.max_depth + 1), self), L)
        return GraphKey(max_count, self.host_depth, self.host_width)

    def decoded(self) -> Decoded:
        log_probs = decoded_log_probs(self.log_probs, self.num_known, torch.zeros_like(self.tokens, dtype=torch.bool))
        return Decoded(self.tokens, *(account.cpu() for account in (
            self.num_known, self.target_forwards, self.num_accepted, self.num_drafted, self.tv_excess, self.failed)),
                       log_probs)


def prefill(state: SpeculativeState, condition: Tensor, known_tokens: Tensor | None) -> None:
    """Read the conditions (R, S, dim) and the known tokens with target and draft model. Draw the next tokens."""
    settings, num_known, draft_state = state.settings, state.num_known, state.draft_state
    sampling = settings.sampling
    S, L = settings.target.prefix_len, settings.num_tokens
    hidden = read_known(settings.target, condition, settings.padding_mask, known_tokens, state.tokens, state.cache)
    draft_state.prefill(hidden[:, :S])
    hidden = hidden[:, S - 1:]  # at the entry before each token, the next token included
    logits = settings.target.logits(take_nodes(hidden, num_known[:, None]))
    ids = id_range(settings.target, num_known[:, None])
    drawn = sampling.draw(logits, num_known[:, None], ids)
    is_whole = num_known == L
    last = num_known.clamp(max=L - 1)[:, None]
    state.tokens.scatter_(1, last, torch.where(is_whole[:, None], state.tokens.gather(1, last), drawn.tokens))
    keep_log_probs(state, last, sampling, logits, drawn.tokens, ids)
    state.root.copy_(drawn.tokens[:, 0])
    state.failed.copy_(((drawn.status[:, 0] & INVALID_ROW) != 0) & ~is_whole)
    state.counts.copy_((num_known + 1).clamp(max=L).masked_fill(state.failed, L))
    draft_state.shapes.first = state.counts.clone()
    new_tokens = F.pad(state.tokens, (0, 1))[:, :hidden.shape[1]]
    draft_state.extend(new_tokens, hidden, torch.zeros_like(num_known), num_known + 1, 0)
    state.look()


def run_step(state: SpeculativeState) -> Step:
    """One step of all images that are not finished."""
    step = draft(state)
    step.output = target_forward(state, step)
    step.verified = verify(state, step)
    step.committed = commit(state, step)
    update(state, step)
    return Step(step.tree.links, step.position, step.verified.accepted_nodes, step.verified.num_accepted, step.active)


class TargetOutput(NamedTuple):
    """The target's output for the nodes of the trees."""
    hidden: Tensor   # (R, N, H)
    logits: Tensor   # (R, N, V)
    lengths: Tensor  # (B,) int64  the root's column


@dataclass
class TreeStep:
    """A step as far as it has come: each of the five calls reads what those before it have found."""

    position: Tensor  # (B,) int64  of the step's first token in the image
    active: Tensor    # (B,) bool   images that were not finished before the step
    tree: DraftTree
    output: TargetOutput | None = None
    verified: VerifyResult | None = None
    committed: CommitTokensResult | None = None


def draft(state: SpeculativeState) -> TreeStep:
    """Begin a step with the next trees."""
    counts, L = state.counts, state.settings.num_tokens
    return TreeStep(counts.clamp(max=L - 1), counts < L, state.draft_state.draft(state.root, counts, *state.graph_key))


def target_forward(state: SpeculativeState, step: TreeStep) -> TargetOutput:
    """Read all nodes of the trees at once. Each sees the tokens before the root, its ancestors and itself."""
    tree, target = step.tree, state.settings.target
    N, S = tree.tokens.shape[1], target.prefix_len
    lengths, columns = step.position + (S - 1), min(S - 1 + state.graph_key.max_count + N, state.num_columns)
    nodes = Nodes(tree.links.depth, lengths, tree.links.ancestors, state.settings.padding_mask, columns)
    hidden = target.extend(nodes.of_rows(tree.tokens), nodes, state.cache)
    return TargetOutput(hidden, target.logits(hidden), lengths)


def verify(state: SpeculativeState, step: TreeStep) -> VerifyResult:
    """Say which drafts are accepted, and draw the next token. Drafts are limited so that its position exists."""
    settings, tree, links, position = state.settings, step.tree, step.tree.links, step.position[:, None]
    seeds = settings.sampling.seeds
    first_child = torch.where(links.depth < (settings.num_tokens - 1) - position, links.first_child, -1)
    ids = None
    if settings.seed_exact or settings.has_id_range:
        positions = position + links.depth.clamp(min=0)  # of the token after each node
        ids = id_range(settings.target, positions)
    if settings.seed_exact:
        by = {"uniforms": None, "seeds": seeds, "positions": positions}
    else:
        by = {"uniforms": uniforms_at(seeds, step.position, tree.tokens.shape[1], ACCEPT),
              "draft_probs": tree.draft_probs, "draft_row": tree.draft_row, **settings.rule._asdict()}
    return verify_logits(**settings.sampling.rows(step.output.logits), tokens=tree.tokens, first_child=first_child,
                         next_sibling=links.next_sibling, max_depth=settings.max_depth, id_range=ids, **by)


def commit(state: SpeculativeState, step: TreeStep) -> CommitTokensResult:
    """Put the accepted drafts into the cache, and them and the next token into the images and their accounts."""
    verified = step.verified
    if not state.settings.is_chain:  # an accepted part of a chain is where it should be
        state.cache.commit(verified.accepted_nodes, verified.num_accepted, step.output.lengths)
    state.root.copy_(verified.next_token)
    return commit_tokens(state.tokens, state.counts, step.tree.tokens, verified.accepted_nodes, verified.num_accepted,
                         verified.next_token, failed=state.failed, target_forwards=state.target_forwards,
                         num_accepted_at=state.num_accepted, num_drafted_at=state.num_drafted,
                         tv_excess=state.tv_excess, step_excess=verified.tv_excess, status=verified.status,
                         depth=state.draft_state.shapes.depth)


def update(state: SpeculativeState, step: TreeStep) -> None:
    """Let the draft model read the new tokens, and choose the next trees' shapes."""
    settings, shapes, position, committed = state.settings, state.draft_state.shapes, step.position, step.committed
    if state.log_probs is not None:
        index = torch.arange(settings.max_depth + 1, device=position.device)
        ids = id_range(settings.target, position[:, None] + step.tree.links.depth.clamp(min=0))
        places = torch.where(step.active[:, None], position[:, None] + index, state.log_probs.shape[1] - 1)
        keep_log_probs(state, places, settings.sampling, step.output.logits, committed.new_tokens, ids,
                       torch.where(index < committed.num_new[:, None], committed.nodes, -1))
    if shapes.adaptation:
        shapes.record(position, step.verified.num_accepted.long(), step.active & (state.counts < settings.num_tokens))
    hidden = take_nodes(step.output.hidden, committed.nodes)
    state.draft_state.extend(committed.new_tokens, hidden, position, committed.num_new, state.graph_key.max_count)
