"""How the releases of EAGLE and LANTERN decode, in plain PyTorch: the loop that a decoder has without the ops.

Like theirs, a step drafts with `multinomial` or `topk` a level at a time, builds the tree's mask and its paths in
Python on the host, reads the whole tree in one target forward, copies the logits for every path, and walks these paths
in Python, with a host read for each path and each draft; then it moves the accepted entries in the cache by indexing.

Where the releases differ among themselves or from their papers, this loop follows `eagle1` and `lantern` of this
library, so that drafts are accepted with equal probabilities: top-k comes before top-p, the padding is masked, a
rejected draft takes the neighbors that were kept with it (LANTERN, equation 3), and an empty residual becomes the
target's row. The requests of a batch share the forwards and the drafting. (The releases
decode one request at a time.) Their trees are built, verified and committed one by one.

As in the releases, trees may reach beyond the end of an image, and the tokens beyond the end are dropped. Our loop
draws the last token of an image without a draft. So under a relaxed rule the two differ in that token.
"""
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from specvis.decoding.decoded import Decoded, Progress
from specvis.decoding.methods import Method
from specvis.decoding.sampling import Sampling, cfg_inputs, repeat_for_cfg
from specvis.decoding.trees import static_tree
from specvis.models.interface import DraftModel, ModelCache, Nodes, TargetModel


def read(model: TargetModel | DraftModel, tokens: Tensor, depth: Tensor, sees: Tensor, lengths: list[int], cache,
         padding_mask: Tensor, previous_hidden: Tensor | None = None) -> Tensor:
    """Every read of tokens after the condition: hidden states (2B, F, H) of F nodes.

    Node j of request b is in column lengths[b] + j. It sees the columns before lengths[b] without the padding.

    Args:
        tokens:          (B, F) int64
        depth:           (B, F) int64    of each node; the first position that is not read yet has depth 0
        sees:            (B, F, n) bool  which of the n nodes so far each node sees; the F nodes are the last of them
        padding_mask:    (2B, S) bool
        previous_hidden: (2B, F, H)      for a draft model
    """
    (F, n), device = sees.shape[1:], tokens.device
    bits = pad(sees, (0, -n % 64)).unflatten(2, (-1, 64)).long() << torch.arange(64, device=device)
    length = torch.tensor(lengths, device=device)
    nodes = Nodes(depth, length, bits.sum(-1), padding_mask, max(lengths) + n, n - F)
    read_before = () if previous_hidden is None else (previous_hidden,)
    return model.extend(repeat_for_cfg(tokens), *read_before, nodes, cache)


def read_chain(model: TargetModel | DraftModel, tokens: Tensor, lengths: list[int], cache, padding_mask: Tensor,
               previous_hidden: Tensor | None = None) -> Tensor:
    """Read a chain of tokens (B, F)."""
    (B, F), device = tokens.shape, tokens.device
    sees = torch.ones(F, F, dtype=torch.bool, device=device).tril()
    return read(model, tokens, torch.arange(F, device=device).expand(B, -1), sees.expand(B, -1, -1), lengths, cache,
                padding_mask, previous_hidden)


def move(cache: ModelCache, request: int, root: int, accepted_nodes: Tensor) -> None:
    """Copy the entries of the accepted nodes to the columns from the root's on, in both rows of the request."""
    rows = torch.tensor([[request], [request + cache.data.shape[1] // 2]], device=accepted_nodes.device)
    kept = cache.data[:, rows, root + accepted_nodes]
    cache.data[:, rows[:, 0], root: root + len(accepted_nodes)] = kept


@dataclass
class Warpers:
    """Guidance, temperature, top-k and top-p, one after another, no min-p. All requests have one setting."""

    guidance: float
    temperature: float
    top_k: int
    top_p: float

    @staticmethod
    def of(sampling: Sampling) -> "Warpers":
        values = [getattr(sampling, name).tolist() for name in ("guidance", "temperature", "top_k", "top_p")]
        is_one = all(min(each) == max(each) for each in values)
        if not is_one or min(values[1]) <= 0 or sampling.min_p.any():
            raise ValueError("sampling must be the same for all requests, with a temperature above 0 and without "
                             f"min_p, got {sampling}")
        return Warpers(*(each[0] for each in values))

    def guide(self, logits: Tensor) -> Tensor:
        conditional, unconditional = logits.float().chunk(2)
        return unconditional + (conditional - unconditional) * self.guidance

    def probs(self, logits: Tensor) -> Tensor:
        """Guided logits (.., V) -> probabilities (.., V)."""
        return filtered(logits, self.temperature, self.top_k, self.top_p)


def filtered(x: Tensor, temperature, top_k: int, top_p: float) -> Tensor:
    """Logits (.., V) -> probabilities after temperature, top-k and top-p, by sorting as the releases do."""
    x = x.float() / temperature
    if 0 < top_k < x.shape[-1]:
        x = x.masked_fill(x < x.topk(top_k).values[..., -1:], -torch.inf)
    if 0 < top_p < 1:
        descending, order = x.sort(-1, descending=True)
        probs = descending.softmax(-1)
        is_beyond = probs.cumsum(-1) - probs >= top_p
        x = x.masked_fill(is_beyond.scatter(-1, order, is_beyond), -torch.inf)
    return x.softmax(-1)


@dataclass
class Shape:
    """The shape of a tree, worked out in Python on the host."""

    parents: list[int]  # for every node; -1 for the root, -2 for an unused node
    mask: Tensor        # (N, N) bool  does the row's node see the column's?
    paths: Tensor       # (leaves, depth + 1) int64  from the root to every leaf; -1 pads

    @staticmethod
    def of(parents: list[int], device: torch.device) -> "Shape":
        mask = torch.eye(len(parents), dtype=torch.bool)
        for node, parent in enumerate(parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        leaves = [node for node, parent in enumerate(parents) if parent != -2 and node not in parents]
        paths = []
        for node in leaves:
            path = []
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            paths.append(path)
        width = max(map(len, paths))
        paths = [path + [-1] * (width - len(path)) for path in sorted(paths)]  # siblings in order
        return Shape(parents, mask.to(device), torch.tensor(paths, device=device))


@dataclass
class Tree:
    """The drafts of a step, for B requests."""

    tokens: Tensor               # (B, N) int64
    shapes: list[Shape]          # one for each request
    probs: Tensor | None = None  # (B, M, V) the rows that children were drawn from; None: they are point masses
    draft_row: list[int] | None = None  # which of these rows a node's children were drawn from
    shares: Tensor | None = None        # (B, N) the probability of each draft without its earlier siblings

    def along_paths(self, request: int) -> Tensor:
        """The tokens (paths, levels) of a request's tree along its paths; -1 pads."""
        return pad(self.tokens[request], (0, 1), value=-1)[self.shapes[request].paths]

    def drawn(self, request: int) -> tuple[Callable | None, Callable | None]:
        """draft_row_of and share_of as `walk` takes them."""
        if self.probs is None:
            return None, None
        paths = self.shapes[request].paths
        return (lambda path, level: self.probs[request, self.draft_row[paths[path, level].item()]],
                lambda path, level: self.shares[request, paths[path, level]])


class Drafts:
    """The draft model's cache, and its state at the newest token of each request."""

    def __init__(self, draft_model: DraftModel, warpers: Warpers, method: Method, num_tokens: int):
        self.draft_model, self.warpers, self.method = draft_model, warpers, method
        self.cache = draft_model.new_cache(draft_model.prefix_len + num_tokens + method.max_nodes + method.max_depth
                                           + method.max_width * method.max_depth + 1)
        if method.drafting == "static":
            self.tree = static_tree(method.drafts.tree)

    def extend(self, tokens: Tensor, previous_hidden: Tensor, counts: list[int], num_new: list[int]) -> None:
        """Read the new tokens (B, A) of requests that had `counts` tokens; the first num_new[b] are not padding."""
        prefix_len, device = self.draft_model.prefix_len, tokens.device
        hidden = read_chain(self.draft_model, tokens, [prefix_len + n for n in counts], self.cache,
                            self.draft_model.padding_mask, previous_hidden)
        last = repeat_for_cfg(torch.tensor(num_new, device=device) - 1)
        self.hidden = hidden[torch.arange(len(hidden), device=device), last][:, None]
        self.lengths = [prefix_len + n + new for n, new in zip(counts, num_new)]

    def read_level(self, tokens: Tensor, previous_hidden: Tensor, sees: Tensor, level: int) -> Tensor:
        return read(self.draft_model, tokens, torch.full_like(tokens, level - 1), sees, self.lengths, self.cache,
                    self.draft_model.padding_mask, previous_hidden)

    def guided(self, hidden: Tensor) -> Tensor:
        return self.warpers.guide(self.draft_model.logits(hidden))

    def draft(self, root: Tensor) -> Tree:
        return self.draft_static(root) if self.method.drafting == "static" else self.draft_dynamic(root)

    def draft_static(self, root: Tensor) -> Tree:
        """EAGLE's first trees: children drawn without replacement, in a tree of one shape."""
        tree, (B,), device = self.tree, root.shape, root.device
        if not hasattr(self, "shape"):
            self.shape = Shape.of(list(tree.parents), device)
            self.inner = [node for node in range(len(tree.parents)) if tree.children(node)]
        hidden, tokens, shares, rows = self.hidden, [root], [torch.ones_like(root, dtype=torch.float32)], []
        for level in range(1, tree.depth + 1):
            above = [node for node in self.inner if tree.depths[node] == level - 1]
            K = max(len(tree.children(node)) for node in above)
            probs = self.warpers.probs(self.guided(hidden))                       # (B, F, V)
            children = torch.multinomial(probs.flatten(0, 1), K).view(B, len(above), K)
            drawn = probs.gather(2, children)
            left = 1 - (drawn.cumsum(2) - drawn)
            share = torch.where(left > 0, drawn / left, 0).clamp(0, 1)
            rows.append(probs)
            picked = [(f, i) for f, node in enumerate(above) for i in range(len(tree.children(node)))]
            tokens += [children[:, f, i] for f, i in picked]
            shares += [share[:, f, i] for f, i in picked]
            inner = [node for node in self.inner if tree.depths[node] == level]
            if inner:
                read_so_far = self.inner[1: 1 + self.inner.index(inner[-1])]
                sees = self.shape.mask[inner][:, read_so_far].expand(B, -1, -1)
                parents = [above.index(tree.parents[node]) for node in inner]
                hidden = self.read_level(torch.stack([tokens[node] for node in inner], 1), hidden[:, parents], sees,
                                         level)
        draft_row = [self.inner.index(node) if node in self.inner else -1 for node in range(len(tree.parents))]
        return Tree(torch.stack(tokens, 1), [self.shape] * B, torch.cat(rows, 1), draft_row, torch.stack(shares, 1))

    def draft_dynamic(self, root: Tensor) -> Tree:
        """EAGLE-2's trees: the likeliest paths are continued, and the likeliest drafts are kept."""
        B, k, device = len(root), self.method.drafts.width, root.device
        batch = torch.arange(2 * B, device=device)[:, None]
        scores, tokens = self.warpers.probs(self.guided(self.hidden))[:, 0].log().topk(k)  # (B, k)
        all_tokens, all_scores, origins = [tokens], [scores], [torch.full_like(tokens, -1)]
        frontier = torch.arange(k, device=device).expand(B, -1)  # which candidates the next level continues
        hidden, sees = self.hidden.expand(-1, k, -1), torch.eye(k, dtype=torch.bool, device=device).expand(B, -1, -1)
        num_candidates = k
        for level in range(1, self.method.drafts.depth):
            hidden = self.read_level(tokens, hidden, sees, level)
            best, children = self.warpers.probs(self.guided(hidden)).log().topk(k)          # (B, k, k)
            child_scores, children = (best + scores[..., None]).flatten(1), children.flatten(1)
            all_tokens.append(children)
            all_scores.append(child_scores)
            origins.append(frontier.repeat_interleave(k, 1))
            scores, chosen = child_scores.topk(k)
            tokens, parents = children.gather(1, chosen), chosen // k
            frontier = num_candidates + chosen
            num_candidates += k * k
            hidden = hidden[batch, repeat_for_cfg(parents)]
            sees = torch.cat([sees[batch[:B], parents],
                              torch.eye(k, dtype=torch.bool, device=device).expand(B, -1, -1)], 2)
        all_tokens, all_scores, origins = (torch.cat(x, 1) for x in (all_tokens, all_scores, origins))
        kept = all_scores.topk(min(self.method.drafts.nodes - 1, num_candidates)).indices.sort().values
        tokens = torch.cat([root[:, None], all_tokens.gather(1, kept)], 1)
        shapes = []
        for b in range(B):
            ids, origin = kept[b].tolist(), origins[b, kept[b]].tolist()
            exists = (all_scores[b, kept[b]] > -torch.inf).tolist()
            node_of, parents = {-1: 0}, [-1]
            for node, (candidate, parent) in enumerate(zip(ids, origin), 1):
                parents.append(node_of[parent] if exists[node - 1] and parent in node_of else -2)
                if parents[-1] >= 0:
                    node_of[candidate] = node
            shapes.append(Shape.of(parents, device))
        return Tree(tokens, shapes)


@dataclass
class Relaxation:
    """LANTERN's rule: a draft's nearest neighbors lend it their probability, as long as their sum keeps a limit."""

    table: Tensor              # (codes, at least k) each code's nearest others, nearest first
    k: int                     # how many of them may lend
    delta: float               # the limit: delta itself (tvd), or delta times the draft's own probability (ratio)
    cutoff: str = "tvd"
    offset: int = 0            # the id of code 0
    residual: str = "relaxed"  # a rejection removes the neighbors that lent; "released": all k + 1 nearest, if any lent
    empty: str = "target"      # takes the place of an empty residual: the target's row, or all ids alike ("uniform")

    def lent(self, probs: Tensor, token: int) -> tuple[Tensor | float, Tensor | list]:
        """What neighbors lend the token, and the ids that its rejection removes too."""
        code = token - self.offset
        if not 0 <= code < len(self.table):
            return 0.0, []
        near = self.table[code, :self.k + 1].to(probs.device).long() + self.offset
        sums = probs[near[:self.k]].cumsum(0)
        num_kept = int((sums <= (self.delta * probs[token] if self.cutoff == "ratio" else self.delta)).sum())
        if num_kept == 0:
            return 0.0, []
        return sums[num_kept - 1], {"optimal": [], "relaxed": near[:num_kept], "released": near}[self.residual]


def walk(tokens: Tensor, row_of: Callable, coin_of: Callable, relaxation: Relaxation | None = None,
         draft_row_of: Callable | None = None, share_of: Callable | None = None) -> tuple[int, int, Tensor]:
    """The verification of EAGLE's and LANTERN's releases: a level at a time, and in a level the paths one by one.

    Args:
        tokens:       (paths, levels) from the root's on, -1 pads
        row_of:       (path, level) -> the target's probabilities (V,) at that node
        coin_of:      (path, level) -> a number in [0, 1) that decides about the draft there
        draft_row_of: (path, level) -> the probabilities (V,) that the node's children were drawn from, without
                      replacement; None: children are point masses
        share_of:     (path, level) -> the probability of that draft without its earlier siblings; with draft_row_of

    Returns:
        A path, how many of its drafts are accepted, and the probabilities (V,) of the next token.
    """
    best, prefix = 0, tokens[0, :1]
    while True:
        level = len(prefix)
        paths = (tokens[:, :level] == prefix).all(1).nonzero()[:, 0].tolist()
        row = probs = row_of(paths[0], level - 1)
        tried = []
        for path in paths if level < tokens.shape[1] else []:
            token = tokens[path, level].item()
            if token == -1 or token in tried:
                continue
            tried.append(token)
            share = 1.0 if draft_row_of is None else share_of(path, level)
            if share <= 0:
                continue
            lent, removed = relaxation.lent(probs, token) if relaxation else (0.0, [])
            if coin_of(path, level) * share <= probs[token] + lent:
                best, prefix = path, tokens[path, :level + 1]
                break
            left = probs.clone()
            if draft_row_of is None:
                left[removed] = left[token] = 0
            else:
                draft = draft_row_of(path, level - 1).clone()
                if len(tried) > 1:
                    draft[tried[:-1]] = 0
                    draft = draft / draft.sum()
                (draft if relaxation and relaxation.residual == "released" else left)[removed] = 0
                left = (left - draft).clamp(min=0)
            if left.sum().item() > 0:
                probs = left / left.sum()
            else:
                probs = torch.full_like(row, 1 / len(row)) if relaxation and relaxation.empty == "uniform" else row
        else:
            return best, level - 1, probs


@torch.inference_mode()
def released_decode(target: TargetModel, draft_model: DraftModel, condition: Tensor, padding_mask: Tensor,
                    sampling: Sampling, method: Method, neighbors: Tensor | None = None,
                    progress: Progress | None = None, script=None, *, known_tokens: Tensor | None = None) -> Decoded:
    """Decode as the releases do. It takes the arguments of `speculative_decode`, but one method for all requests.

    Args:
        script:       called before each walk with the guided logits (B, N, V), the trees' tokens (B, N) and their
                      parents, lists of B lists; it may change the logits
        known_tokens: (B, K) int64  the first tokens of all images

    Raises:
        ValueError: a method that no release has: one that is verified by equality, or another rule of acceptance
    """
    is_known = (method.drafting in ("static", "dynamic") and not method.seed_exact and "start" not in method.parameters
                and set(method.omegas) == {1.0} and method.drafts.draft_guidance == 1
                and method.acceptance.cutoff in ("tvd", "ratio")
                and (not method.acceptance.k or method.acceptance.residual == "relaxed"))
    if not is_known:
        raise ValueError(f"method must be eagle1, lantern, lantern++ or speculative, got {method.label}")
    warpers, B, L, S = Warpers.of(sampling), len(condition), target.grid ** 2, target.prefix_len
    device, seed = condition.device, sampling.seeds[0].item()
    both = [torch.tensor([b, B + b], device=device)[:, None, None] for b in range(B)]
    condition, padding_mask = cfg_inputs(target, condition, padding_mask)
    K = 0 if known_tokens is None else known_tokens.shape[1]
    num_accepted, num_drafted = torch.full((B, L), -1), torch.zeros(B, L, dtype=torch.int64)
    forwards = [1] * B
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        drafts, coins, relaxation = Drafts(draft_model, warpers, method, L), random.Random(seed), None
        if (rule := method.acceptance).k:
            relaxation = Relaxation(neighbors, rule.k, rule.delta, rule.cutoff)
        cache = target.new_cache(2 * B, S + L + method.max_nodes)
        hidden = target.prefill(condition, padding_mask, cache)
        draft_model.prefill(hidden, drafts.cache)
        if K:
            hidden = torch.cat([hidden, read_chain(target, known_tokens, [S] * B, cache, padding_mask)], 1)
        root = torch.multinomial(warpers.probs(warpers.guide(target.logits(hidden[:, -1:])))[:, 0], 1)
        images = torch.cat([root] if known_tokens is None else [known_tokens, root], 1)
        drafts.extend(images, hidden[:, S - 1:], [0] * B, [K + 1] * B)
        images, root, counts = list(images), root[:, 0], [K + 1] * B
        if progress:
            progress(B)
        while min(counts) < L:
            tree = drafts.draft(root)
            sees = torch.stack([shape.mask for shape in tree.shapes])
            hidden = read(target, tree.tokens, sees.sum(2) - 1, sees, [S + n - 1 for n in counts], cache, padding_mask)
            logits = warpers.guide(target.logits(hidden))
            if script:
                script(logits, tree.tokens, [shape.parents for shape in tree.shapes])
            new_tokens, previous_hidden, num_new = [], [], []
            for b, count in enumerate(counts):
                if count == L:  # a finished image goes on in the batch, with its last token
                    new_tokens.append(images[b][-1:])
                    previous_hidden.append(hidden[both[b][:, 0, 0], :1])
                    num_new.append(0)
                    continue
                along = logits[b][tree.shapes[b].paths]  # a copy for each path
                best, accepted, probs = walk(
                    tree.along_paths(b), lambda path, level, along=along: warpers.probs(along[path, level]),
                    lambda path, level: coins.random(), relaxation, *tree.drawn(b))
                path = tree.shapes[b].paths[best, : accepted + 1]
                move(cache, b, S + count - 1, path)
                next_token = torch.multinomial(probs, 1)
                new_tokens.append(torch.cat([tree.tokens[b, path[1:]], next_token]))
                previous_hidden.append(hidden[both[b], tree.shapes[b].paths][:, best, : accepted + 1])
                images[b] = torch.cat([images[b], new_tokens[-1]])[:L]
                num_accepted[b, count] = min(accepted, L - 1 - count)
                num_drafted[b, count] = min(method.max_depth, L - 1 - count)
                forwards[b] += 1
                num_new.append(accepted + 1)
            before, counts = counts, [len(image) for image in images]
            A = max(map(len, new_tokens))
            root = torch.stack([new[-1] for new in new_tokens])
            padded = torch.nn.utils.rnn.pad_sequence(new_tokens, batch_first=True)
            states = hidden.new_zeros(2 * B, A, hidden.shape[-1])
            for b, states_of in enumerate(previous_hidden):
                states[both[b][:, 0], torch.arange(states_of.shape[1], device=device)] = states_of
            drafts.extend(padded, states, before, [max(n, 1) for n in num_new])
            if progress:
                progress(sum(counts) - sum(before))
    zeros = torch.zeros(B)
    bound = zeros if method.lossless else zeros + torch.nan
    return Decoded(torch.stack(images), torch.full((B,), K), torch.tensor(forwards), num_accepted, num_drafted, zeros,
                   bound, torch.zeros(B, dtype=torch.bool))
