"""Reads what vLLM, SGLang and transformers call and define today: does it still fit the functions that are ours?

The files of a checkout or of an unpacked wheel are parsed, and nothing of them is executed. Each row of
the table is one such place. Results of functions are not compared.
"""
import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from specvis_kernels.compat import _transformers, sglang, transformers, vllm
from specvis_kernels.compat._versions import TESTED

_required = object()  # in place of a default


class Defined(NamedTuple):
    """A function that ours replaces: each of its arguments must be one of ours, in its place."""
    file: str
    name: str
    ours: Callable

    def changes(self, text: str) -> list[str]:
        function = _defined(ast.parse(text), self.name)
        if function is None:
            return [f"{self.name} is not defined any more"]
        theirs, ours = _arguments(function), _parameters(self.ours)
        places, changes = list(ours), []
        for place, (name, default) in enumerate(theirs.items()):
            if name not in ours:
                changes.append(f"{name} is new")
            elif places.index(name) != place:
                changes.append(f"{name} is argument {place + 1} there, {places.index(name) + 1} here")
            elif default != _required and ours[name].default != default:
                here = "required" if ours[name].default is inspect.Parameter.empty else repr(ours[name].default)
                changes.append(f"{name} is {default!r} by default there, {here} here")
        if function.args.kwarg:
            changes.append(f"**{function.args.kwarg.arg} is new")
        needed = [name for name, parameter in ours.items() if parameter.default is inspect.Parameter.empty]
        return changes + [f"{name} is gone" for name in needed if name not in theirs]


class Called(NamedTuple):
    """A function that ours replaces, where it is called: ours must take the arguments."""
    file: str
    name: str
    ours: Callable

    def changes(self, text: str) -> list[str]:
        calls = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)
                 and getattr(node.func, "id", getattr(node.func, "attr", None)) == self.name]
        signature, changes = inspect.Signature(list(_parameters(self.ours).values())), []
        for call in calls:
            names = [keyword.arg for keyword in call.keywords]
            is_whole = None not in names and not any(isinstance(read, ast.Starred) for read in call.args)
            try:  # the contents of *args and **kwargs are not seen
                (signature.bind if is_whole else signature.bind_partial)(
                    *[read for read in call.args if not isinstance(read, ast.Starred)],
                    **{name: None for name in names if name})
            except TypeError as error:
                changes.append(f"line {call.lineno}: {error}")
        return changes if calls else [f"{self.name} is not called any more"]


class Imported(NamedTuple):
    """A name that docs/use_it.md sets in a module: this one, whose functions look for it there; or `module`, from which
    a function of this one imports it at each call."""
    file: str
    name: str
    module: str = ""

    def changes(self, text: str) -> list[str]:
        tree = ast.parse(text)
        if not self.module:
            return [] if self.name in _names(tree.body) else [f"{self.name} is not imported any more"]
        inside = [part for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for part in ast.walk(node)]
        is_there = any(isinstance(part, ast.ImportFrom) and part.module == self.module
                       and self.name in [alias.name for alias in part.names] for part in inside)
        return [] if is_there else [f"no function imports {self.name} from {self.module} any more"]


class Takes(NamedTuple):
    """A function of theirs that ours calls: it must have these arguments, or for a pair of names one of the two."""
    file: str
    name: str
    ours: tuple[str | tuple[str, ...], ...]

    def changes(self, text: str) -> list[str]:
        function = _defined(ast.parse(text), self.name)
        if function is None:
            return [f"{self.name} is not defined any more"]
        theirs = _arguments(function)
        wanted = [(names,) if isinstance(names, str) else names for names in self.ours]
        return [f"{' or '.join(names)} is gone" for names in wanted if not theirs.keys() & {*names}]


class Handed(NamedTuple):
    """The keys of a dict of keyword arguments for ours, by its name or by the function that returns it."""
    file: str
    name: str
    ours: tuple[str, ...]

    def changes(self, text: str) -> list[str]:
        keys = {}
        for node in ast.walk(ast.parse(text)):  # d["key"] = .., and d.setdefault("key", ..)
            holder, key = None, None
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                holder, key = node.targets[0].value, node.targets[0].slice
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "setdefault":
                holder, key = node.func.value, node.args[0]
            if isinstance(holder, ast.Name) and holder.id == self.name and isinstance(key, ast.Constant):
                keys.setdefault(key.value, node.lineno)
        function = next((node for node in ast.walk(ast.parse(text)) if getattr(node, "name", None) == self.name), None)
        for node in ast.walk(function) if function else ():
            keys |= {key.value: key.lineno for key in getattr(node, "keys", ()) if isinstance(key, ast.Constant)}
        if not keys:
            return [f"{self.name} has no keys any more"]
        return [f"line {line}: {key} is new" for key, line in keys.items() if key not in self.ours]


class Said(NamedTuple):
    """A remark in their code by which a meaning is known that no signature shows."""
    file: str
    name: str
    ours: str

    def changes(self, text: str) -> list[str]:
        return [] if self.name in text else [f"{self.name!r} is not said any more: {self.ours}"]


def _parameters(function: Callable) -> dict[str, inspect.Parameter]:
    return {name: parameter for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD}


V1, V2 = "vllm/v1/sample", "vllm/v1/worker/gpu/spec_decode"
OPS, SRT = "sglang/kernels/ops/speculative", "sglang/srt/speculative"
SAMPLER = "tree_speculative_sampling_target_only"
WARPERS = "transformers/generation/logits_process.py"
HANDED = (*_transformers.KNOWN_KWARGS, "mm_encoder_outputs", "encoder_outputs", "decoder_attention_mask", "input_ids",
          "inputs_embeds", "token_type_ids", "mm_token_type_ids", "output_attentions", "output_hidden_states")
ROWS = {
    "vllm": (
        Defined(f"{V1}/rejection_sampler.py", "rejection_sample", vllm.rejection_sample),
        Called(f"{V1}/rejection_sampler.py", "rejection_sample", vllm.rejection_sample),
        Defined(f"{V2}/rejection_sampler_utils.py", "rejection_sample", vllm.probabilistic_rejection_sample),
        Said(f"{V2}/rejection_sampler_utils.py", "draft_logits is stored pre-temperature",
             "draft_is_scaled must be True before 0.28, and has to be decided anew after 0.33"),
        Called(f"{V2}/rejection_sampler.py", "rejection_sample", vllm.probabilistic_rejection_sample),
        Handed(f"{V2}/rejection_sampler.py", "_watermarking_kwargs",
               tuple(_parameters(vllm.probabilistic_rejection_sample))),
        Imported(f"{V2}/rejection_sampler.py", "rejection_sample"),
    ),
    "sglang": (
        Defined(f"{OPS}/sampling.py", SAMPLER, sglang.tree_speculative_sampling_target_only),
        Imported(f"{SRT}/eagle_utils.py", SAMPLER),
        Called(f"{SRT}/eagle_utils.py", "sampling_fn", sglang.tree_speculative_sampling_target_only),
        Imported(f"{SRT}/dflash_utils.py", SAMPLER),
        Called(f"{SRT}/dflash_utils.py", SAMPLER, sglang.tree_speculative_sampling_target_only),
        Defined(f"{OPS}/tree.py", "verify_tree_greedy", sglang.verify_tree_greedy),
        Imported(f"{OPS}/spec_tree.py", "verify_tree_greedy", f"{OPS}/tree".replace("/", ".")),
        Called(f"{OPS}/spec_tree.py", "verify_tree_greedy", sglang.verify_tree_greedy),
        Defined(f"{OPS}/tree.py", "build_tree_kernel_efficient", sglang.build_tree_kernel_efficient),
        Imported(f"{OPS}/spec_tree.py", "sgl_build_tree_kernel_efficient"),
        Called(f"{OPS}/spec_tree.py", "sgl_build_tree_kernel_efficient", sglang.build_tree_kernel_efficient),
    ),
    "transformers": (
        Called("transformers/generation/utils.py", "decoding_method", transformers.jacobi_generate),
        Called("transformers/generation/utils.py", "decoding_method", transformers.tree_generate),
        Handed("transformers/generation/utils.py", "model_kwargs", HANDED),
        Takes("transformers/cache_utils.py", "Cache.__init__", ("layers",)),
        Takes("transformers/cache_utils.py", "Cache.update", ("key_states", "value_states", "layer_idx")),
        Takes("transformers/models/llama/modeling_llama.py", "LlamaForCausalLM.forward",
              ("attention_mask", "position_ids", _transformers.CACHE_NAMES, "use_cache", "logits_to_keep")),
        Takes(WARPERS, "TemperatureLogitsWarper.__init__", ("temperature",)),
        Takes(WARPERS, "TopKLogitsWarper.__init__", ("top_k", "min_tokens_to_keep")),
        Takes(WARPERS, "TopPLogitsWarper.__init__", ("top_p", "min_tokens_to_keep")),
    ),
}


def read(decoder: str, folder: Path) -> tuple[str, Iterator[tuple[str, list[str]]]]:
    """The version of a checkout or an unpacked wheel, and for each row where it is and what has moved.

    Raises:
        ValueError: the folder holds no such package
    """
    root = next((folder / part for part in ("", "python", "src") if (folder / part / decoder).is_dir()), None)
    if root is None:
        raise ValueError(f"{folder} holds no checkout and no unpacked wheel of {decoder}: it has no folder {decoder}")

    def rows():
        for row in ROWS[decoder]:
            where = f"{row.file} {row.name} ({type(row).__name__.lower()}{_for(row)})"
            try:
                yield where, row.changes((root / row.file).read_text(encoding="utf-8"))
            except FileNotFoundError:
                yield where, ["the file is not there any more"]
            except (SyntaxError, UnicodeDecodeError) as error:
                yield where, [f"it cannot be read: {error}"]

    return _version(decoder, root), rows()


def _for(row) -> str:
    name = getattr(getattr(row, "ours", None), "__name__", row.name)
    return "" if name == row.name else f", {name}"


def _version(decoder: str, root: Path) -> str:
    for path in (*root.glob(f"{decoder}-*.dist-info/METADATA"), root / decoder / "_version.py",
                 root / decoder / "version.py", root / decoder / "__init__.py"):
        text = path.read_text() if path.is_file() else ""
        found = re.search(r"""^(?:Version: |(?:__)?version(?:__)? = ["'])([\w.+]+)""", text, re.M)
        if found:
            return found[1]
    return "of an unknown version"


def _names(body: list[ast.stmt]) -> set[str]:
    """The names that a module imports, also below an `if` or a `try`, but not inside of a function."""
    names = set()
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, (ast.If, ast.Try)):
            names |= _names([*node.body, *node.orelse, *(part for handler in getattr(node, "handlers", ())
                                                         for part in handler.body)])
    return names


def _defined(tree: ast.Module, name: str) -> ast.FunctionDef | None:
    body = tree.body
    for part in name.split("."):
        found = next((node for node in body if getattr(node, "name", None) == part), None)
        body = getattr(found, "body", ())
    return found if isinstance(found, ast.FunctionDef) else None


def _arguments(function: ast.FunctionDef) -> dict[str, object]:
    """Names -> defaults, where they are literals; None for others."""
    def literal(node):
        try:
            return ast.literal_eval(node)
        except ValueError:
            return None

    args = function.args
    positional = [argument.arg for argument in (*args.posonlyargs, *args.args)]
    defaults = [_required] * (len(positional) - len(args.defaults)) + [literal(node) for node in args.defaults]
    return dict(zip(positional, defaults)) | {
        argument.arg: _required if node is None else literal(node)
        for argument, node in zip(args.kwonlyargs, args.kw_defaults)}


def report(decoder: str, folder: Path) -> bool:
    """Print a line for each row. Returns whether all fits.

    Raises:
        ValueError: the folder holds no such package
    """
    version, rows = read(decoder, folder)
    print(f"{decoder} {version} (tested with {', '.join(TESTED[decoder])}): {folder}")
    fits = True
    for where, changes in rows:
        print(f"    {where:120} {'; '.join(changes) or 'as expected'}")
        fits &= not changes
    return fits
