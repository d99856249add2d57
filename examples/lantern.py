"""A decoder with LANTERN's interfaces, without and with the ops: `specvis_kernels.compat.lantern.patch`.

    python examples/lantern.py

The decoder has one layer of attention with random weights, and the methods of the release's EaModel, with its own
loops in plain torch. The patch does not change `generate`.
"""
import argparse
import random
import time
from types import SimpleNamespace

import torch

from specvis_kernels.compat import lantern

CODES, DIM, PREFIX, COLUMNS = 4096, 32, 4, 512


class TopKLogitsWarper:
    """Transformers' logits processor of this name; the ops recognize it by the name."""

    def __init__(self, top_k):
        self.top_k = top_k

    def __call__(self, input_ids, scores):
        return scores.masked_fill(scores < scores.topk(self.top_k).values[..., -1:], -torch.inf)


class Processors(list):
    def __call__(self, input_ids, scores):
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class Target:
    """The base model: row 0 reads with the condition, row 1 without it."""

    def __init__(self):
        self.embedding, self.positions = torch.randn(CODES, DIM), 0.3 * torch.randn(COLUMNS, DIM)
        self.query, self.key, self.value = (torch.randn(DIM, DIM) / DIM**0.5 for _ in range(3))
        self.condition = torch.stack([torch.randn(1, DIM) / 2, torch.zeros(1, DIM)])
        self.lm_head = torch.nn.Linear(DIM, CODES, bias=False).requires_grad_(False)
        self.lm_head.weight.copy_(torch.randn(CODES, DIM) / 2)
        self.model, self.tree_mask = self, None
        self.past_key_values_data = torch.zeros(2, 2, 1, COLUMNS, DIM)  # keys and values, rows, heads
        self.current_length_data = torch.zeros(2, dtype=torch.int64)

    def read(self, ids, position_ids):
        """The hidden states of tokens (2, n), which are cached; a token sees all earlier ones, a node its path."""
        length, n = int(self.current_length_data[0]), ids.shape[1]
        x = self.embedding[ids] + self.condition
        placed = x + self.positions[position_ids]
        self.past_key_values_data[:, :, 0, length:length + n] = torch.stack([placed @ self.key, placed @ self.value])
        self.current_length_data += n
        keys, values = self.past_key_values_data[:, :, 0, :length + n]
        mask = torch.ones(n, n).tril() if self.tree_mask is None else self.tree_mask[0, 0]
        mask = torch.cat([torch.ones(n, length), mask], 1)
        scores = (placed @ self.query @ keys.mT / DIM**0.5).masked_fill(mask == 0, -torch.inf)
        return x + scores.softmax(-1) @ values / 2


class Model:
    """The draft layer: it knows only the newest token."""

    total_tokens, depth, top_k = 58, 4, 10

    def __init__(self, target):
        self.target, self.tree_mask_init = target, torch.eye(self.top_k)[None, None]
        self.position_ids, self.stable_kv = torch.zeros(self.top_k, dtype=torch.int64), None

    def reset(self):
        self.tree_mask = None

    def __call__(self, hidden_states, input_ids, past_key_values=None, use_cache=True, position_ids=None):
        columns = input_ids.shape[1] + (0 if past_key_values is None else past_key_values[0][0].shape[2])
        hidden = self.target.embedding[input_ids] + self.target.condition + hidden_states / 10
        return hidden, ((torch.zeros(2, 1, columns, 1),),)

    def topK_genrate(self, hidden_states, input_ids, head, logits_processor, cfg_scale):
        ids, K = input_ids[:, 1:], self.top_k
        known = 0 if self.stable_kv is None else self.stable_kv[0][0].shape[2]
        hidden, cache = self(hidden_states, ids[:, known:], self.stable_kv)
        self.stable_kv, hidden = cache, hidden[:, -1:]
        drafted, nodes, scores = [], [None], torch.zeros(1, 1)
        for _ in range(self.depth + 1):
            cond, uncond = head(hidden)
            logits = uncond + cfg_scale * (cond - uncond)
            if logits_processor is not None:
                logits = logits_processor(None, logits)
            children = logits.log_softmax(-1).topk(K)
            total = children.values + scores.view(-1, 1)
            first = len(drafted)
            drafted += [(score, token, node) for node, row, ids in zip(nodes, total.tolist(), children.indices.tolist())
                        for score, token in zip(row, ids)]
            scores, chosen = total.flatten().topk(K)
            nodes, tokens = (chosen + first).tolist(), children.indices.flatten()[chosen]
            hidden, cache = self(hidden[:, chosen // K], tokens.repeat(2, 1), cache)
        best = sorted(sorted(range(len(drafted)), key=lambda i: -drafted[i][0])[:self.total_tokens])
        node_of = {None: 0} | {candidate: 1 + node for node, candidate in enumerate(best)}
        paths, mask = [[0]], torch.eye(len(node_of))
        mask[:, 0] = 1
        for candidate in best:
            paths.append([*paths[node_of[drafted[candidate][2]]], node_of[candidate]])
            mask[paths[-1][-1], paths[-1]] = 1
        leaves = [path for path in paths if not any(path == other[:-1] for other in paths)]
        if logits_processor is not None:
            leaves.sort()
        width = max(map(len, leaves))
        tokens = torch.tensor([[input_ids[0, -1].item(), *(drafted[candidate][1] for candidate in best)]])
        return (tokens, torch.tensor([path + [-1] * (width - len(path)) for path in leaves]), mask[None, None],
                torch.tensor([len(path) - 1 for path in paths]))


class EaModel:
    def __init__(self):
        self.base_model = Target()
        self.ea_layer = Model(self.base_model)
        distance = torch.cdist(self.base_model.embedding, self.base_model.embedding).fill_diagonal_(torch.inf)
        self.nearest_latents = distance.topk(200, largest=False).indices

    def __call__(self, input_ids, past_key_values=None, output_orig=True, position_ids=None, attention_mask=None):
        hidden = self.base_model.read(input_ids, position_ids)
        return None, self.base_model.lm_head(hidden), hidden

    def tree_decoding(self, tree_candidates, past_key_values, tree_position_ids, input_ids, retrieve_indices, cfg_scale,
                      attention_mask=None):
        outputs, logits, hidden = self(tree_candidates, past_key_values,
                                       position_ids=tree_position_ids + input_ids.shape[1])
        return (logits[1] + cfg_scale * (logits[0] - logits[1]))[retrieve_indices], hidden, outputs

    def evaluate_posterior(self, logits, candidates, logits_processor=None, lantern=False, lantern_k=1000,
                           lantern_delta=0.1):
        rows, row, length = range(len(candidates)), 0, 0
        while True:
            scores = logits[row, length]
            if logits_processor is not None:
                scores = logits_processor(None, scores[None])[0]
            probs, tried = scores.softmax(-1), set()
            rows = [i for i in rows if torch.equal(candidates[i, :length + 1], candidates[row, :length + 1])]
            for i in rows if length + 1 < candidates.shape[1] else ():
                token = candidates[i, length + 1].item()
                if token < 0 or token in tried:
                    continue
                tried.add(token)
                neighbors = self.nearest_latents[token, :lantern_k + 1] if lantern else torch.empty(0).long()
                lent = probs[neighbors[:lantern_k]].cumsum(0)
                lent = lent[lent <= (lantern_delta if lantern_delta <= 1 else (lantern_delta - 1) * probs[token])]
                relaxed = probs[token] + (lent[-1] if len(lent) else 0)
                if logits_processor is None:
                    is_accepted = probs.argmax() == token or relaxed > probs.max()
                else:
                    is_accepted = random.random() <= relaxed
                    if not is_accepted:
                        probs[token] = 0
                        probs[neighbors[:len(neighbors) * (len(lent) > 0)]] = 0
                        probs = probs / probs.sum() if probs.sum() > 0 else torch.full_like(probs, 1 / len(probs))
                if is_accepted:
                    row, length = i, length + 1
                    break
            else:
                return row, length, probs

    def update_inference_inputs(self, input_ids, candidates, best_candidate, accept_length, retrieve_indices,
                                logits_processor, new_token, past_key_values_data_list, current_length_data,
                                hidden_state_new, sample_p, cfg_scale, static_tree=False):
        nodes, length = retrieve_indices[best_candidate, :accept_length + 1], input_ids.shape[1]
        input_ids = torch.cat([input_ids, candidates[None, best_candidate, :accept_length + 1]], 1)
        for data in past_key_values_data_list:
            data[..., length:length + len(nodes), :] = data[..., length + nodes, :]
        current_length_data.fill_(length + len(nodes))
        token = (sample_p.argmax()[None] if logits_processor is None else torch.multinomial(sample_p, 1))[None]
        tree = self.ea_layer.topK_genrate(hidden_state_new[:, nodes], torch.cat([input_ids, token], 1).repeat(2, 1),
                                          self.base_model.lm_head, logits_processor, cfg_scale)
        return input_ids, *tree, new_token + len(nodes), None, token

    def generate(self, max_length, temperature, top_k, cfg, lantern, lantern_k, lantern_delta):
        """Tokens (1, max_length), and how many of them a forward of the target gave."""
        target, processors = self.base_model, Processors([TopKLogitsWarper(top_k)]) if temperature else None
        target.current_length_data.zero_()
        self.ea_layer.stable_kv = target.tree_mask = None
        input_ids = torch.zeros(1, PREFIX, dtype=torch.int64)
        _, logits, hidden = self(input_ids.repeat(2, 1), position_ids=torch.arange(PREFIX))
        token = (logits[1, -1] + cfg * (logits[0, -1] - logits[1, -1])).argmax()[None, None]
        tree = self.ea_layer.topK_genrate(hidden, torch.cat([input_ids, token], 1).repeat(2, 1), target.lm_head,
                                          processors, cfg)
        new_token, num_forwards = 0, 0
        while new_token <= max_length:
            draft_tokens, retrieve_indices, target.tree_mask, positions = tree
            logits, hidden, _ = self.tree_decoding(draft_tokens.repeat(2, 1), None, positions, input_ids,
                                                   retrieve_indices, cfg)
            candidates = torch.cat([draft_tokens, torch.full((1, 1), -1)], 1)[0, retrieve_indices]
            row, length, sample_p = self.evaluate_posterior(logits, candidates, processors, lantern, lantern_k,
                                                            lantern_delta)
            input_ids, *tree, new_token, _, _ = self.update_inference_inputs(
                input_ids, candidates, row, length, retrieve_indices, processors, new_token,
                [target.past_key_values_data], target.current_length_data, hidden, sample_p, cfg)
            num_forwards += 1
        return input_ids[:, PREFIX:PREFIX + max_length], new_token / num_forwards


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--temperature", type=float, default=1.0, help="1, or 0: greedy")
parser.add_argument("--delta", type=float, default=0.1, help="lantern_delta; 0: without neighbors")
parser.add_argument("--tokens", type=int, default=256)
options = parser.parse_args()

torch.manual_seed(0)
model, runs = EaModel(), {}
for name in ("as it stands", "patched"):
    undo = lantern.patch(EaModel) if name == "patched" else None
    random.seed(1), torch.manual_seed(1)
    start = time.perf_counter()
    tokens, tau = model.generate(options.tokens, options.temperature, 1000, 3.0, options.delta > 0, 100, options.delta)
    runs[name] = SimpleNamespace(tokens=tokens, tau=tau, seconds=time.perf_counter() - start)
    milliseconds = 1000 * runs[name].seconds / options.tokens
    print(f"{name:12}  {tau:.2f} tokens per target forward, {milliseconds:.1f} ms a token")
undo()
if options.temperature == 0:
    share = (runs["patched"].tokens == runs["as it stands"].tokens).float().mean()
    print(f"{share:.0%} of the tokens are the same")
