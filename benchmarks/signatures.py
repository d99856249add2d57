"""Do the functions that are ours still fit in their places in vLLM and SGLang, as these are today?

    python -m benchmarks.signatures --vllm FOLDER --sglang FOLDER

The files of a checkout or of an unpacked wheel are parsed, and nothing of them is executed. Each row of
the table is one such place. Results of functions are not compared. The tests run with transformers itself.
"""
import argparse
import ast
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from specvis_kernels.compat import sglang, vllm
from specvis_kernels.compat._versions import TESTED

_required = inspect.Parameter.empty  # in place of a default


class Defined(NamedTuple):
    """A function that ours replaces: each of its arguments must be one of ours, in its place."""
    file: str
    name: str
    ours: Callable

    def changes(self, text: str) -> list[str]:
        function = next((node for node in ast.parse(text).body if getattr(node, "name", None) == self.name), None)
        if not isinstance(function, ast.FunctionDef):
            return [f"{self.name} is not defined any more"]
        theirs = _arguments(function)
        ours = {name: parameter.default for name, parameter in inspect.signature(self.ours).parameters.items()
                if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
        places, changes = list(ours), []
        for place, (name, default) in enumerate(theirs.items()):
            if name not in ours:
                changes.append(f"{name} is new")
            elif places.index(name) != place:
                changes.append(f"{name} is argument {place + 1} there, {places.index(name) + 1} here")
            elif default != _required and ours[name] != default:
                here = "required" if ours[name] is _required else repr(ours[name])
                changes.append(f"{name} is {default!r} by default there, {here} here")
        changes += [f"{stars}{rest.arg} is new" for stars, rest in (("*", function.args.vararg),
                                                                    ("**", function.args.kwarg)) if rest]
        return changes + [f"{name} is gone" for name in ours if ours[name] is _required and name not in theirs]


class Imported(NamedTuple):
    """A name that a plugin sets in this module, whose functions look for it there."""
    file: str
    name: str

    def changes(self, text: str) -> list[str]:
        tree = ast.parse(text)
        inside = {part for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for part in ast.walk(node)}
        is_there = any(isinstance(node, ast.ImportFrom) and node not in inside
                       and self.name in [alias.asname or alias.name for alias in node.names] for node in ast.walk(tree))
        return [] if is_there else [f"{self.name} is not imported any more"]


class Said(NamedTuple):
    """A remark in their code by which a meaning is known that no signature shows."""
    file: str
    name: str
    meaning: str

    def changes(self, text: str) -> list[str]:
        return [] if self.name in text else [f"{self.name!r} is not said any more: {self.meaning}"]


def _arguments(function: ast.FunctionDef) -> dict[str, object]:
    """Names -> defaults, where they are literals; None for others."""
    def literal(node):
        try:
            return _required if node is None else ast.literal_eval(node)
        except ValueError:
            return None

    args = function.args
    positional = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(positional) - len(args.defaults)) + args.defaults + args.kw_defaults
    return {argument.arg: literal(node) for argument, node in zip(positional + args.kwonlyargs, defaults)}


V1, V2, RUNNER = "vllm/v1/sample", "vllm/v1/worker/gpu", "vllm/v1/worker/gpu_model_runner.py"
OPS, SRT = "sglang/kernels/ops/speculative", "sglang/srt/speculative"
SAMPLER = "tree_speculative_sampling_target_only"
ROWS = {
    "vllm": (
        Defined(f"{V1}/rejection_sampler.py", "rejection_sample", vllm.rejection_sample),
        Defined(f"{V2}/spec_decode/rejection_sampler_utils.py", "rejection_sample",
                vllm.probabilistic_rejection_sample),
        Said(f"{V2}/spec_decode/rejection_sampler_utils.py", "draft_logits is stored pre-temperature",
             "draft_is_scaled must be True before 0.28, and has to be decided anew after 0.33"),
        Imported(f"{V2}/spec_decode/rejection_sampler.py", "rejection_sample"),
        Imported(f"{V2}/sample/sampler.py", "gumbel_sample"),
        Said(f"{V2}/sample/sampler.py", "is_drafting=False,", "gumbel_sample draws the target's tokens by it"),
        Said(f"{V1}/ops/topk_topp_sampler.py", "random_sample(probs, generators, self.use_fp64_gumbel)",
             "forward_native draws by random_sample"),
        *(Said(RUNNER, text, "seed_exact reads seeds and positions there") for text in (
            "self.rejection_sampler(", "self.positions[:total_num_scheduled_tokens]", "self.query_start_loc.gpu[",
            "self.input_batch.generators.get(", "self.model_config = ")),
        Said("vllm/config/model.py", "    seed: int", "seed_exact makes seeds of it for requests without one"),
        Said(RUNNER, "cast(Any, self.drafter).propose(", "JacobiProposer is called after each step"),
        Said("vllm/v1/spec_decode/custom_class_proposer.py", "user_class(vllm_config)", "it makes JacobiProposer"),
    ),
    "sglang": (
        Defined(f"{OPS}/sampling.py", SAMPLER, sglang.tree_speculative_sampling_target_only),
        Imported(f"{SRT}/eagle_utils.py", SAMPLER),
        Imported(f"{SRT}/dflash_utils.py", SAMPLER),
        *(Imported(f"{SRT}/eagle_utils.py", name) for name in ("top_k_renorm_prob", "top_p_renorm_prob")),
        Defined(f"{SRT}/eagle_utils.py", "_verify_uses_greedy", sglang._verify_uses_greedy),
        *(Defined(f"{OPS}/spec_tree.py", name, getattr(sglang, name))
          for name in ("verify_tree_greedy_func", "build_tree_kernel_efficient_func")),
        Said("sglang/srt/plugins/hook_registry.py", "REPLACE = ", "the hooks by which functions are replaced"),
    ),
}


def report(decoder: str, folder: Path) -> bool:
    """Print for each row what has moved in a checkout or an unpacked wheel. Returns whether nothing has.

    Raises:
        ValueError: the folder holds no such package
    """
    root = next((folder / part for part in ("", "python") if (folder / part / decoder).is_dir()), None)
    if root is None:
        raise ValueError(f"{folder} holds no checkout and no unpacked wheel of {decoder}: it has no folder {decoder}")
    print(f"{decoder} (tested with {', '.join(TESTED[decoder])}): {folder}")
    fits = True
    for row in ROWS[decoder]:
        try:
            changes = row.changes((root / row.file).read_text(encoding="utf-8"))
        except FileNotFoundError:
            changes = ["the file is not there any more"]
        except (SyntaxError, UnicodeDecodeError) as error:
            changes = [f"it cannot be read: {error}"]
        where = f"{row.file} {row.name} ({type(row).__name__.lower()})"
        print(f"    {where:120} {'; '.join(changes) or 'as expected'}")
        fits &= not changes
    return fits


def main(arguments: list[str] | None = None) -> int:
    """Print the tables. Returns 0 if all fits, 1 if something has moved, 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.signatures", description=__doc__.partition("\n")[0])
    for name in ROWS:
        parser.add_argument(f"--{name}", type=Path, metavar="FOLDER", help=f"a checkout or an unpacked wheel of {name}")
    folders = {name: folder for name, folder in vars(parser.parse_args(arguments)).items() if folder}
    if not folders:
        parser.error(f"name a folder, with --{' or --'.join(ROWS)}")
    try:
        return int(not all([report(name, folder) for name, folder in folders.items()]))
    except ValueError as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
