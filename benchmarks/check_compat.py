"""Do our functions still fit? Runs EAGLE's and LANTERN's beside ours, and reads what other decoders define.

    python -m benchmarks.check_compat --lantern LANTERN --eagle EAGLE

The functions are cut out of the checkout's files and executed: nothing else of it is imported, neither models nor CUDA
are needed. Random trees and logits are given to both. Both draw the same numbers from Python's `random`, so the
accepted paths must be equal. The next token is drawn by torch.multinomial there and by one number here: it must
be where that number falls in their distribution. "whole step" begins with the logits of the target's forward and ends
with the next token. Times are of one call, the mean over cases; ours with the defaults (generator="torch").

    python -m benchmarks.check_compat --vllm VLLM --sglang SGLANG

Of these, checkouts or unpacked wheels, nothing is executed: their signatures and imports are read, and what has moved
since the versions that are tested is said (see signatures.py).
"""
import argparse
import ast
import copy
import itertools
import random
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F

from benchmarks import signatures
from benchmarks.compat_cases import (
    GUIDANCE,
    TOPK,
    Processors,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    dynamic_case,
    ring_of_neighbors,
    static_case,
)
from specvis_kernels.compat import eagle, lantern

SLACK = 2e-5      # the error of a sum of float32 probabilities: close to a border both tokens are right
STATIC, STATIC_OF_EAGLE = "naive_extend_57", "mc_sim_7b_63"
LANTERN_FILES = {
    "models/ea_model_llamagen.py": (
        "cfg_logit_process", "calculate_tvd", "EaModel.generate_tree_buffers", "EaModel.evaluate_posterior",
        "EaModel.evaluate_posterior_v1", "EaModel.pad_path", "EaModel.generate_candidates", "EaModel.tree_decoding",
        "EaModel.update_inference_inputs"),
    "models/drafters/cnets_llamagen.py": ("cfg_logit_process", "Model.topK_genrate"),
    "models/drafters/utils_c.py": ("TOPK", "node", "Tree", "generate_tree_buffers"),
    "models/drafters/choices.py": (STATIC,),
    "models/ea_model_anole.py": (
        "cfg_logit_process", "calculate_tvd", "EaModel.evaluate_posterior", "EaModel.evaluate_posterior_v1",
        "EaModel.tree_decoding"),
}
EAGLE_FILES = {
    "eagle/model/utils.py": ("TOPK", "pad_path", "generate_tree_buffers", "tree_decoding", "evaluate_posterior",
                             "update_inference_inputs"),
    "eagle/model/cnets.py": ("Model.topK_genrate",),
    "eagle/model/cnets1.py": ("Model.topK_genrate",),
    "eagle/model/choices.py": (STATIC_OF_EAGLE,),
}


def cut_out(folder: Path, files: dict[str, tuple[str, ...]]) -> dict[str, SimpleNamespace]:
    """The named functions, classes and constants of each file of a checkout, and nothing else of it.

    A method comes as a function of `self`. Annotations are left out.

    Raises:
        ValueError: a file is not there, or a name is not in it
    """
    cut = {}
    for file, names in files.items():
        if not (folder / file).is_file():
            raise ValueError(f"{folder} is no such checkout: {file} is not there")
        found = dict(_definitions(ast.parse((folder / file).read_text())))
        missing = [name for name in names if name not in found]
        if missing:
            raise ValueError(f"{folder} is no such checkout: {file} has no {missing[0]}")
        body = [_without_annotations(found[name]) for name in names]
        space = {"torch": torch, "F": F, "random": random, "copy": copy, "TOPK": TOPK,
                 "np": SimpleNamespace(ndarray=()), "Timer": lambda name: nullcontext()}
        exec(compile(ast.Module(body, []), str(folder / file), "exec"), space)
        cut[file] = SimpleNamespace(**{name.rpartition(".")[2]: space[name.rpartition(".")[2]] for name in names})
    return cut


def _definitions(tree):
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name, node
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef):
                    yield f"{node.name}.{part.name}", part


def _without_annotations(definition):
    for node in ast.walk(definition):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
    return definition


class Setting(NamedTuple):
    """The settings by which a step is verified."""
    name: str
    processors: Processors | None = Processors()
    lantern: tuple = (False, 0, 0.0)  # lantern, lantern_k, lantern_delta


class Target(SimpleNamespace):
    """Takes the place of `self` in the released methods: a model whose forward gives the case's logits."""

    use_eagle3 = False

    def __call__(self, *read, **arguments):
        return None, self.logits, None


class Row(NamedTuple):
    """A line of the table."""
    function: str
    setting: str
    cases: int
    equal: int
    theirs: float  # milliseconds
    ours: float


def is_their_draw(sample_p: torch.Tensor, token: int, uniform: float) -> bool:
    """Whether the token is where this number falls in their distribution."""
    ends = sample_p.double().cumsum(0)
    before = ends[token] - sample_p[token]
    return bool(before - SLACK <= uniform * ends[-1] <= ends[token] + SLACK)


def measure(function: str, setting: str, cases: int, repeats: int, make: Callable, equal: Callable) -> Row:
    """Run theirs and ours on cases: make() -> (theirs, ours), and equal(their answer, our answer, uniform).

    Both begin with one state of Python's `random` and of torch's. `uniform` is the first number of torch's.
    If make() gives a third one, that is ours as it is timed.
    """
    num_equal, seconds = 0, [0.0, 0.0]
    for _ in range(cases):
        theirs, ours, *others = make()
        seed, answers, states, fastest = random.randrange(2**31), [], [], [float("inf")] * 2
        for call in (theirs, ours):
            random.seed(seed), torch.manual_seed(seed)
            answers.append(call()), states.append(random.getstate())
        torch.manual_seed(seed)
        num_equal += states[0] == states[1] and equal(*answers, torch.rand(1).item())
        for _, (i, call) in itertools.product(range(repeats), enumerate([theirs, *(others or [ours])])):
            random.seed(seed), torch.manual_seed(seed)
            start = time.perf_counter()
            call()
            fastest[i] = min(fastest[i], time.perf_counter() - start)
        seconds = [total + time for total, time in zip(seconds, fastest)]
        random.seed(seed + 1), torch.manual_seed(seed + 1)
    return Row(function, setting, cases, num_equal, *(1000 * total / cases for total in seconds))


def verification(name: str, theirs: Callable, ours: Callable, decode: tuple[Callable, Callable], setting: Setting,
                 make_case: Callable, owner: Callable, is_step: bool, options: argparse.Namespace) -> Row:
    """evaluate_posterior given the logits of every path; or, is_step, from tree_decoding's forward to the next token.

    theirs and ours: function(self, case, logits, candidates, processors, *setting.lantern). decode: their and our
    tree_decoding, function(self, tokens, cache, positions, prefix, paths). owner(case) is `self`.
    """
    processors, is_greedy = setting.processors, setting.processors is None

    def make():
        case = make_case()
        if is_greedy and case.proposals is None:  # the release then has the paths in the order of leaves
            case = case._replace(retrieve_indices=case.retrieve_indices[case.retrieve_indices.amax(1).argsort()])
        self, paths = owner(case), case.retrieve_indices
        candidates = torch.cat([case.tokens, torch.full((1, 1), -1)], 1)[0, paths]
        tokens, depths = case.tokens.repeat(len(case.logits), 1), torch.zeros_like(case.tokens[0])

        def read(decode):
            return decode(self, tokens, None, depths, torch.zeros(1, 7, dtype=torch.int64), paths)[0]

        known = read(decode[0])

        def step(evaluate, decode, draw, **options):
            logits = read(decode) if is_step else known
            row, length, sample_p = evaluate(self, case, logits, candidates, processors, *setting.lantern, **options)
            return int(row), int(length), draw(sample_p) if is_step else sample_p

        multinomial = torch.argmax if is_greedy else lambda sample_p: sample_p.multinomial(1)
        own = partial(step, ours, decode[1], torch.argmax)
        return partial(step, theirs, decode[0], multinomial), partial(own, generator="python"), own

    def equal(their_answer, our_answer, uniform):
        if their_answer[:2] != our_answer[:2]:
            return False
        if is_step:  # drawn otherwise, from what the other line compares
            return not is_greedy or int(their_answer[2]) == int(our_answer[2])
        token = int(our_answer[2].argmax())
        return int(their_answer[2].argmax()) == token if is_greedy else is_their_draw(their_answer[2], token, uniform)

    name = f"{name}, whole step" if is_step else name
    return measure(name, setting.name, options.cases, options.repeats, make, equal)


class Layer(SimpleNamespace):
    """A draft layer that depends on all its inputs: tokens, hidden states, positions and the tree's mask."""

    def __call__(self, hidden, input_ids, past_key_values=None, use_cache=True, position_ids=None,
                 attention_mask=None):
        seen = 0 if past_key_values is None else past_key_values[0][0].shape[2]
        if position_ids is None:
            position_ids = torch.arange(seen, seen + hidden.shape[1])
        hidden = hidden.roll(1, 2) + self.embedding[input_ids] + 0.1 * position_ids.view(-1, hidden.shape[1])[..., None]
        if self.tree_mask is not None:
            mask = self.tree_mask[0, 0]
            hidden = hidden + (mask @ torch.arange(1.0, 1 + mask.shape[1]))[:, None] / 30
        hidden = hidden / hidden.std(-1, keepdim=True)
        return hidden, ((torch.zeros(1, 1, seen + hidden.shape[1], 1),),)

    def reset(self):
        self.tree_mask = None


def new_layer(vocab: int, nodes: int, **parts) -> Layer:
    embedding = torch.randn(vocab, 32)
    return Layer(embedding=embedding, embed_tokens=SimpleNamespace(weight=embedding), total_tokens=nodes - 1, depth=4,
                 top_k=TOPK, tree_mask_init=torch.eye(TOPK)[None, None], tree_mask=None, threshold=0.0,
                 position_ids=torch.zeros(TOPK, dtype=torch.int64), logsoftmax=torch.nn.LogSoftmax(dim=-1), **parts)


def same_tree(theirs: tuple, ours: tuple) -> bool:
    """Whether both trees of topK_genrate are equal: ours pads the paths with rows and columns of -1."""
    theirs, ours = ((tree[0], tree[1][tree[1][:, 0] >= 0][:, (tree[1] >= 0).any(0)], *tree[2:])
                    for tree in (theirs, ours))
    return all(torch.equal(a.to(b.dtype), b) for a, b in zip(theirs, ours))


def drafting(name: str, functions: tuple, setting: Setting, rows: int, options: argparse.Namespace, layer=None) -> Row:
    """topK_genrate, called twice: at first, and with a committed cache."""
    def make():
        both, head = layer() if layer else (new_layer(options.vocab, options.nodes), None)
        head = head or torch.nn.Linear(32, options.vocab)
        hidden, ids = torch.randn(rows, 9, 32), torch.randint(options.vocab, (1, 10)).repeat(rows, 1)
        cfg = (GUIDANCE,) if rows == 2 else ()

        def call(function):
            self = copy.copy(both)
            function(self, hidden[:, :5], ids[:, :6], head, setting.processors, *cfg)
            return function(self, hidden[:, 5:], ids, head, setting.processors, *cfg)

        with torch.no_grad():
            head.weight.mul_(3)
        return [torch.no_grad()(lambda function=function: call(function)) for function in functions]

    return measure(name, setting.name, options.cases, options.repeats, make,
                   lambda theirs, ours, uniform: same_tree(theirs, ours))


def same(theirs, ours) -> bool:
    """Whether nested dicts, lists and tensors are equal."""
    if isinstance(theirs, dict):
        return theirs.keys() == ours.keys() and all(same(theirs[name], ours[name]) for name in theirs)
    if isinstance(theirs, (list, tuple)):
        return len(theirs) == len(ours) and all(map(same, theirs, ours))
    return torch.equal(theirs, ours) if isinstance(theirs, torch.Tensor) else theirs == ours


def updating(name: str, functions: tuple, rows: int, options: argparse.Namespace) -> Row:
    """update_inference_inputs: the tokens, the caches, their lengths, and what it gives the draft model to read."""
    def make():
        case, length = dynamic_case(64, options.nodes), 30
        paths = case.retrieve_indices
        row = random.randrange(len(paths))
        accepted = random.randrange(int((paths[row] >= 0).sum()))
        candidates = torch.cat([case.tokens, torch.full((1, 1), -1)], 1)[0, paths]
        cache, hidden = torch.randn(16, rows, 4, length + options.nodes, 32), torch.randn(rows, options.nodes, 8)
        sample_p = F.one_hot(torch.tensor(7), 64).float()

        def call(function):
            data, lengths = [cache.clone()], torch.full((16,), length)
            layer = SimpleNamespace(topK_genrate=given)
            model = SimpleNamespace(ea_layer=layer, base_model=SimpleNamespace(lm_head=None))
            ids = torch.zeros(1, length, dtype=torch.int64)
            common = (ids, candidates, torch.tensor(row), accepted, paths, None, 3, data, lengths)
            answer = (function(model, *common, hidden, sample_p, GUIDANCE) if rows == 2 else
                      function(*common, model, hidden, sample_p))
            return [data[0], lengths, *answer]

        def given(hidden_states, input_ids, head, logits_processor, cfg_scale=None):
            return hidden_states, input_ids, logits_processor, cfg_scale

        return [lambda function=function: call(function) for function in functions]

    return measure(name, "a path at random", options.cases, options.repeats, make,
                   lambda theirs, ours, uniform: same(theirs, ours))


def setting_up(name: str, functions: tuple, tree: str, options: argparse.Namespace) -> Row:
    """generate_tree_buffers."""
    return measure(name, tree, 1, options.repeats, lambda: functions, lambda theirs, ours, uniform: same(theirs, ours))


def check_lantern(cut: dict[str, SimpleNamespace], options: argparse.Namespace):
    """The rows of the table for what was cut out of a checkout of LANTERN, one after the other."""
    llamagen, anole = cut["models/ea_model_llamagen.py"], cut["models/ea_model_anole.py"]
    layer, layer_tree = cut["models/drafters/cnets_llamagen.py"], cut["models/drafters/utils_c.py"]
    k, vocab, nodes = options.k, options.vocab, options.nodes
    top_k = Processors([TopKLogitsWarper(min(1000, vocab // 2))])
    all_three = Processors([TemperatureLogitsWarper(0.9), TopPLogitsWarper(0.9), *top_k])
    relaxed = [Setting("lossless"), Setting("delta 0.1", lantern=(True, k, 0.1)),
               Setting("delta 0.4", lantern=(True, k, 0.4)), Setting("ratio 3", lantern=(True, k, 3.0)),
               Setting("delta 0.1, top-k", top_k, (True, k, 0.1)),
               Setting("delta 0.1, T 0.9, top-p, top-k", all_three, (True, k, 0.1)),
               Setting("greedy", None), Setting("greedy, delta 0.1", None, (True, k, 0.1))]

    def rows(name, module, settings, make_case, codes, columns, read=None, **parts):
        table = ring_of_neighbors(codes, columns)
        model = SimpleNamespace(nearest_latents=table)
        lantern.neighbor_table(model, columns, "cpu")  # kept in the model, beside the table

        def owner(case):
            return Target(logits=case.logits, **vars(model), **parts)

        def evaluate(functions):
            function = getattr(functions, name)
            return lambda self, case, logits, candidates, processors, *rule, **named: function(
                self, logits, candidates, processors, *(read(case) if read else ()), *rule, **named)

        def decode(functions):
            return lambda self, *arguments: functions.tree_decoding(self, *arguments, GUIDANCE, **position)

        position = {"input_position_diff": 3} if parts else {}
        for setting, is_step in itertools.product(settings, (False, True)):
            yield verification(f"{name}{' (Anole)' * bool(parts)}", evaluate(module), evaluate(lantern),
                               (decode(module), decode(lantern)), setting, partial(make_case, setting), owner, is_step,
                               options)

    yield from rows("evaluate_posterior", llamagen, relaxed, lambda setting: dynamic_case(vocab, nodes), vocab, k + 1)
    few = Setting("64 tokens, all neighbors, top-k 20", Processors([TopKLogitsWarper(20)]), (True, 62, 0.05))
    yield from rows("evaluate_posterior", llamagen, [few], lambda setting: dynamic_case(64, nodes), 64, 63)

    codes, text = vocab // 2, torch.tensor([*range(4), *range(4 + vocab // 2, vocab)])
    of_anole = [setting for setting in relaxed if setting.name in ("lossless", "delta 0.1, top-k", "greedy, delta 0.1")]
    yield from rows("evaluate_posterior", anole, of_anole,
                    lambda setting: dynamic_case(vocab, nodes, slice(4, 4 + codes)), codes, k + 1,
                    image_token_offset=4, non_image_tokens=text, _image_range=(4, 4 + codes))

    tree = getattr(cut["models/drafters/choices.py"], STATIC)
    method = SimpleNamespace(pad_path=lambda *read: llamagen.pad_path(None, *read))
    buffers = llamagen.generate_tree_buffers(method, tree, device="cpu")
    yield from rows("evaluate_posterior_v1", llamagen, relaxed,
                    lambda setting: static_case(vocab, buffers, setting.processors), vocab, k + 1,
                    lambda case: (*case.proposals, buffers["p_indices"], case.tokens, buffers["b_indices"]))

    yield setting_up("generate_tree_buffers", (lambda: llamagen.generate_tree_buffers(method, tree, device="cpu"),
                                               lambda: lantern.generate_tree_buffers(method, tree, "cpu")),
                     STATIC, options)
    yield setting_up("generate_tree_buffers (draft model)",
                     (lambda: layer_tree.generate_tree_buffers(tree, "cpu"),
                      lambda: lantern.draft_tree_buffers(tree, "cpu")), STATIC, options)
    for setting in (relaxed[0], relaxed[4], relaxed[6]):
        yield drafting("topK_genrate", (layer.topK_genrate, lantern.topK_genrate), setting, 2, options)
    yield updating("update_inference_inputs", (llamagen.update_inference_inputs, lantern.update_inference_inputs), 2,
                   options)


def check_eagle(cut: dict[str, SimpleNamespace], options: argparse.Namespace):
    """The rows of the table for what was cut out of a checkout of EAGLE, one after the other."""
    loop, tree = cut["eagle/model/utils.py"], getattr(cut["eagle/model/choices.py"], STATIC_OF_EAGLE)
    filters = Processors([TemperatureLogitsWarper(0.7), TopPLogitsWarper(0.9)])
    settings = [Setting("sampled"), Setting("T 0.7, top-p 0.9", filters), Setting("greedy", None)]

    def evaluate(functions):
        return lambda self, case, logits, candidates, processors, *rule, **named: functions.evaluate_posterior(
            logits, candidates, processors, **named)

    for setting, is_step in itertools.product(settings, (False, True)):
        yield verification("evaluate_posterior", evaluate(loop), evaluate(eagle),
                           (loop.tree_decoding, eagle.tree_decoding), setting,
                           lambda: dynamic_case(options.vocab, options.nodes),
                           lambda case: Target(logits=case.logits[:1] * GUIDANCE), is_step, options)

    def of_eagle3():
        drafted = options.vocab // 2
        self = new_layer(options.vocab, options.nodes, norm=lambda hidden: hidden, d2t=torch.arange(drafted),
                         config=SimpleNamespace(vocab_size=options.vocab, draft_vocab_size=drafted))
        self.lm_head = torch.nn.Linear(32, drafted)
        return self, self.lm_head

    for setting in settings[::2]:
        functions = cut["eagle/model/cnets.py"].topK_genrate, eagle.topK_genrate
        yield drafting("topK_genrate (EAGLE-3)", functions, setting, 1, options, of_eagle3)
        functions = cut["eagle/model/cnets1.py"].topK_genrate, eagle.topK_genrate_by_head
        yield drafting("topK_genrate (EAGLE-2)", functions, setting, 1, options)
    yield setting_up("generate_tree_buffers", (lambda: loop.generate_tree_buffers(tree, "cpu"),
                                               lambda: eagle.generate_tree_buffers(tree, "cpu")),
                     STATIC_OF_EAGLE, options)
    yield updating("update_inference_inputs", (loop.update_inference_inputs, eagle.update_inference_inputs), 1, options)


CHECKS = {"lantern": (LANTERN_FILES, check_lantern), "eagle": (EAGLE_FILES, check_eagle)}


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Returns 0 if all is equal and fits, 1 if something differs, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.check_compat", formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__, epilog="The code of a checkout of LANTERN or EAGLE is executed: name one that you trust.")
    parser.add_argument("--lantern", type=Path, metavar="CHECKOUT", help="a folder with LANTERN's repository")
    parser.add_argument("--eagle", type=Path, metavar="CHECKOUT", help="a folder with EAGLE's repository")
    for name in signatures.ROWS:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"a checkout or an unpacked wheel of {name}")
    for name, value, text in (("cases", 20, "random inputs for each line"), ("repeats", 5, "of each case, to time it"),
                              ("vocab", 16384, "tokens"), ("nodes", 59, "of a dynamic tree, the root counted"),
                              ("k", 1000, "neighbors (lantern_k)"), ("seed", 0, "of the inputs"),
                              ("threads", 1, "of torch")):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"{text} (default: {value})")
    options = parser.parse_args(arguments)
    chosen = {name: getattr(options, name) for name in CHECKS if getattr(options, name)}
    read = {name: getattr(options, name) for name in signatures.ROWS if getattr(options, name)}
    if not chosen and not read:
        parser.error(f"name a checkout, with --{', --'.join(CHECKS)} or --{', --'.join(signatures.ROWS)}")
    if min(options.cases, options.repeats, options.threads, options.k) < 1 or options.nodes < 16 \
            or options.vocab < max(64, 2 * options.k + 4):
        parser.error("cases, repeats, threads and k must be at least 1, nodes 16, vocab 64 and 2 k + 4")
    try:
        is_equal = all([signatures.report(name, folder) for name, folder in read.items()])
        cut = {name: cut_out(folder, CHECKS[name][0]) for name, folder in chosen.items()}
    except (ValueError, SyntaxError, OSError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    for name, functions in cut.items():
        random.seed(options.seed), torch.manual_seed(options.seed)
        print(f"{name}: {chosen[name]}\n{'function':40} {'setting':36} {'cases':>5} {'equal':>5} "
              f"{'theirs ms':>10} {'ours ms':>10} {'ratio':>6}")
        for row in CHECKS[name][1](functions, options):
            is_equal &= row.equal == row.cases
            print(f"{row.function:40} {row.setting:36} {row.cases:5} {row.equal:5} {row.theirs:10.3f} "
                  f"{row.ours:10.3f} {row.theirs / row.ours:6.1f}", flush=True)
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
