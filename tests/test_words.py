"""One word for one thing: the words that were given up are not in the code's names any more.

What is read: functions, classes, parameters, fields and constants of specvis_kernels, python/specvis, csrc (structs,
enums and functions there), benchmarks and examples, second names such as `old = new`, the arguments of the registered
ops, the options of the command lines, the parameters of methods, and the columns of tables. Local variables are not
read. A word that has a good meaning elsewhere is old in some files only.
"""
import ast
import re
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import click
import pytest
import torch

import specvis_kernels
from specvis.cli.main import main
from specvis.decoding.methods import CONTINUOUS_PARAMETERS, DRAFTERS, PARAMETERS
from specvis.train.main import main as train

ROOT = Path(__file__).parent.parent
KERNELS, PROGRAM = "specvis_kernels/* csrc/*", "python/specvis/*"
VALUES = ("parameter", "field", "option")
NAMES = (*VALUES, "function", "class", "constant", "file")


@dataclass(frozen=True)
class Name:
    """A name as the code declares it."""

    kind: str        # function, class, parameter, public parameter (of an op), field, constant, file, option or text
    name: str
    file: str
    line: int
    type: str = ""  # as written

    def __str__(self):
        return f"{self.file}:{self.line}: {self.kind} {self.name}"


@dataclass(frozen=True)
class Old:
    """Words that were given up for `new`."""

    words: str
    new: str
    files: str = "*"                   # where they are old
    kinds: tuple[str, ...] = NAMES
    part: bool = False                 # also as a part of longer names: old_name, OldName
    type: str = ""                     # a regular expression: only names of such a type

    def finds(self, name: Name) -> bool:
        parts = re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name.name) if self.part else ()
        words = {name.name.strip("_"), *map(str.lower, parts)}
        return (name.kind in self.kinds and not words.isdisjoint(self.words.split())
                and any(fnmatch(name.file, pattern) for pattern in self.files.split())
                and re.search(self.type, name.type) is not None)


OLD = (
    Old("excess tv meter target_tv", "tv_excess"),
    Old("distance", "tv_excess", "*verify_tree* csrc/shared/rules.h python/specvis/decoding/discrete.py", VALUES),
    Old("odds", "accept_prob", part=True),
    Old("walk judge judged", "verify_sampled, verify_greedy; evaluate_drafts", part=True),
    Old("rest Rest remnant remains", "residual"),
    Old("verdict", "VerifyResult", KERNELS, part=True),
    Old("reach", "reach_prob"),
    Old("sound good fine", "is_valid"),
    Old("own moved rho", "token_mass, neighbor_mass, relaxed_mass", KERNELS),
    Old("weigh to_fixed", "to_fixed_point"),
    Old("spare spare_neighbors", "protect_neighbors", KERNELS),
    Old("departures swerves", "num_non_argmax", part=True),
    Old("P K N M", "max_depth, num_children, num_nodes, num_draft_rows", "specvis_kernels/*", ("public parameter",)),
    Old("cutoff", "delta", kinds=VALUES, type="Tensor|float"),
    Old("kind", "cutoff", f"{KERNELS} python/specvis/decoding/*"),
    Old("path", "accepted_nodes", KERNELS),
    Old("path", "accepted_nodes", "python/specvis/decoding/* python/specvis/studies/*", VALUES, type="Tensor"),
    Old("accepted", "num_accepted"),
    Old("keep redraw", "is_accepted, is_rejected", KERNELS),
    Old("coins", "uniforms", part=True),
    Old("places", "position_ids, positions, num_tokens, timesteps", part=True),
    Old("valid", "padding_mask", PROGRAM),
    Old("shown", "prefix_len; format_cell"),
    Old("twice visible guidance_pair", "repeat_for_cfg, mask_padding, cfg_inputs", PROGRAM),
    Old("read_condition read_tokens deepen", "prefill, extend, expand_level"),
    Old("room most deepest widest going fresh news gained",
        "budget, max_nodes, max_depth, max_width, active, new_tokens, counts, num_new"),
    Old("here before", "position, previous_hidden", PROGRAM),
    Old("drafted tries", "num_drafted, num_tries, max_tries", kinds=VALUES),
    Old("mothers elder", "parents, older_siblings", part=True),
    Old("families", "child_lists", "python/specvis/decoding/*"),
    Old("Eagle Independent", "EagleDrafter, ModelDrafter"),
    Old("small", "model, draft_model", "python/specvis/decoding/* python/specvis/pipelines/*"),
    Old("forwards", "target_forwards"),
    Old("passes", "target_forwards, num_iter", part=True),
    Old("Round", "Step"),
    Old("turn step", "run_step", "python/specvis/decoding/*", ("function",)),
    Old("begun conditioned", "KnownTokens, GuidedMAR", part=True),
    Old("plain", "is_baseline; the method vanilla", part=True),
    Old("Kept kept Seen seen heat", "ResultCache, Features, heatmap"),
    Old("rivals ship", "baselines, export", part=True),
    Old("cuda launch", "block.cuh, bindings.cpp, params.h", "csrc/*", ("file",)),
    Old("columns", "n", "python/specvis/decoding/sampling.py", VALUES),
)
TEXTS = {  # no text of the program has these: columns, messages, help
    "TV meter": "tv_excess", "fidelity meter": "tv_excess", "TV test": "tv_bound", "TV bound": "tv_excess_bound",
    "target passes": "target_forwards", "draft passes": "draft_forwards", "speed-up": "speedup",
    "--target-tv ": "--target-tv-excess", "passes=": "num_iter=", "drafter=small": "drafter=model", "kind=": "cutoff=",
    "tries=": "max_tries=",
}
COLUMNS = {"seconds a picture": "seconds", "forwards": "target_forwards"}  # nor are these, alone, names of columns


# --- reading ----------------------------------------------------------------------------------------------------------

def python_names(text: str, file: str):
    """The names that a Python file declares."""
    tree = ast.parse(text)
    public = {node for node in tree.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
              and Path(file).parent.name == "specvis_kernels"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for target in [target for line in node.body if isinstance(line, ast.Assign) for target in line.targets]:
                for name in [name for name in ast.walk(target) if isinstance(name, ast.Name)]:
                    yield Name("constant", name.id, file, name.lineno)
        if isinstance(node, ast.alias) and node.asname:
            yield Name("constant", node.asname, file, node.lineno)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            if not isinstance(node, ast.Lambda):
                yield Name("function", node.name, file, node.lineno)
            a = node.args
            for arg in [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]:
                type_ = ast.unparse(arg.annotation) if arg.annotation else ""
                yield Name("parameter", arg.arg, file, arg.lineno, type_)
                if node in public:
                    yield Name("public parameter", arg.arg, file, arg.lineno, type_)
        if isinstance(node, ast.ClassDef):
            yield Name("class", node.name, file, node.lineno)
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    yield Name("field", field.target.id, file, field.lineno, ast.unparse(field.annotation))
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield Name("field", node.attr, file, node.lineno)


def python_texts(text: str, file: str):
    """The strings of a Python file that hold an old text, as names of kind text."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for old in TEXTS | COLUMNS:
                if re.search(rf"(?<!\w){re.escape(old)}", node.value) if old not in COLUMNS else node.value == old:
                    yield Name("text", old, file, node.lineno)


def without_comments(text: str) -> str:
    """C++ without comments, strings, templates' parameters and preprocessor lines; lines stay where they are."""
    def blank(match):
        return re.sub(r"[^\n]", " ", match[0])

    text = re.sub(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', blank, text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", blank, text, flags=re.M)
    return re.sub(r"\btemplate\s*<[^<>]*(?:<[^<>]*>[^<>]*)*>", blank, text)


def split(text: str) -> list[str]:
    """At the commas that are in no brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "([{<") - (c in ")]}>")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


def declared(text: str) -> tuple[str, str]:
    """`const float* uniforms = nullptr` -> its name and its type; two empty strings if it is no declaration."""
    match = re.fullmatch(r"\s*(.*?[\s*&>])(\w+)\s*(?:\[[^]]*\])*\s*", text.split("=")[0], re.S)
    return (match[2], match[1].strip()) if match else ("", "")


def cpp_names(text: str, file: str):
    """The names that a C++ or CUDA file declares. A small reading: declarations as these files write them."""
    text = without_comments(text)

    def line(position):
        return text.count("\n", 0, position) + 1

    for match in re.finditer(r"\b(?:struct|enum\s+class|enum|class)\s+(\w+)", text):
        yield Name("class", match[1], file, line(match.start()))
    for match in re.finditer(r"\b(?:constexpr\s[\w:<>\s*]*?|using\s+)(\w+)\s*(?:=|\[)", text):
        yield Name("constant", match[1], file, line(match.start(1)))
    for match in re.finditer(r"\benum\s[^;{(]*\{([^}]*)\}", text):
        for enumerator in split(match[1]):
            yield Name("constant", enumerator.split("=")[0].strip(), file, line(match.start()))
    # a function has a type before its name and a body or, where it is not indented, a semicolon behind it
    arguments, rest = r"\(((?:[^(){};]|\([^(){};]*\))*)\)\s*", r"(?:const\s*|noexcept\s*|mutable\s*)*(?:->[\s\w:]+)?\{"
    body = rf"(?<=[\s*&>])(\w+)\s*{arguments}{rest}"
    prototype = rf"^(?!return|else)[A-Za-z_][\w:<>*&, \t]*[\s*&](\w+)\s*{arguments};"
    closure = rf"\[[^][]*\]()\s*{arguments}{rest}"
    for match in [found for pattern in (body, prototype, closure) for found in re.finditer(pattern, text, re.M)]:
        if match[1] in ("if", "for", "while", "switch", "catch", "return"):
            continue
        if match[1]:
            yield Name("function", match[1], file, line(match.start(1)))
        for part in split(match[2]):
            name, type_ = declared(part)
            if name:
                yield Name("parameter", name, file, line(match.start(1)), type_)
    for match in re.finditer(r"\bstruct\s+\w+[^;{]*\{", text):
        depth, end, members = 1, match.end(), ""
        while depth:  # what stands between inner braces is not of this struct
            depth += (text[end] == "{") - (text[end] == "}")
            members += text[end] if depth == 1 and text[end] != "}" else ";" if text[end] == "}" else " "
            end += 1
        for statement in members.split(";"):
            first, *others = split(statement)
            name, type_ = declared(first)
            if name and "(" not in first.split("=")[0] and not re.match(r"\s*(using|static|friend|enum)\b", first):
                for field in (name, *(other.split("=")[0].strip(" *&\n") for other in others)):
                    yield Name("field", field, file, line(match.start()), type_)


def command_names(command: click.Command, file: str):
    """The options of a command, and of those in it."""
    for option in command.params:
        for word in option.opts:
            yield Name("option", word.lstrip("-").replace("-", "_"), file, 0)
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                yield Name("option", name.replace("-", "_"), file, 0)
                yield from command_names(command.get_command(context, name), f"{file} {name}")


def names_of(text: str, file: str):
    return [*python_names(text, file), *python_texts(text, file)] if file.endswith(".py") else [*cpp_names(text, file)]


def folder_names(folder: str):
    for path in sorted((ROOT / folder).rglob("*")):
        if path.suffix in (".py", ".h", ".cuh", ".cpp", ".cu"):
            file = str(path.relative_to(ROOT))
            yield Name("file", path.stem, file, 0)
            yield from names_of(path.read_text(), file)


def op_names():
    for op in specvis_kernels.ops():
        for argument in getattr(torch.ops.specvis_kernels, op).default._schema.arguments:
            type_ = str(argument.type)
            yield Name("public parameter", argument.name, f"specvis_kernels/{op}.py schema", 0, type_)
            yield Name("parameter", argument.name, f"specvis_kernels/{op}.py schema", 0, type_)


def method_names():
    for name in (*PARAMETERS, *CONTINUOUS_PARAMETERS, *DRAFTERS):
        yield Name("parameter", name, "python/specvis/decoding/methods.py parameters", 0)


def report(names) -> list[str]:
    found = []
    for name in names:
        if name.kind == "text":
            found.append(f"{name.file}:{name.line}: text {name.name!r} -> {(TEXTS | COLUMNS)[name.name]}")
        found += [f"{name} -> {old.new}" for old in OLD if old.finds(name)]
    return list(dict.fromkeys(found))


# --- the test, and its control ----------------------------------------------------------------------------------------

@pytest.mark.parametrize("names", [
    pytest.param(lambda: folder_names("specvis_kernels"), id="specvis_kernels"),
    pytest.param(lambda: folder_names("csrc"), id="csrc"),
    pytest.param(lambda: folder_names("python/specvis"), id="specvis"),
    pytest.param(lambda: folder_names("benchmarks"), id="benchmarks"),
    pytest.param(lambda: folder_names("examples"), id="examples"),
    pytest.param(op_names, id="ops"),
    pytest.param(method_names, id="methods"),
    pytest.param(lambda: command_names(main, "specvis"), id="commands"),
    pytest.param(lambda: command_names(train, "python -m specvis.train"), id="stages"),
])
def test_no_old_name_is_left(names):
    found = report(names())
    assert not found, f"{len(found)} old names:\n" + "\n".join(found)


SOURCES = {
    ".py": {"function": "def {0}(): pass", "class": "class {0}: pass", "parameter": "def _f(x, *, {0}: {1} = 0): pass",
            "public parameter": "def f({0}: {1}): pass", "field": "class C:\n    x: int\n    {0}: {1} = None",
            "constant": "from a import b\nx, {0} = 1, b"},
    ".cu": {"function": "static {1} {0}({1} x) {{\n  return g(x);\n}}", "class": "struct {0} {{\n  {1} x;\n}};",
            "parameter": "template <int W>\nvoid f(int x,  // its\n       {1} {0}) {{\n}}",
            "field": "struct C {{\n  int f(int y) const {{ return y; }}\n  {1} x, {0};  // more\n}};",
            "constant": "enum class E {{ x, {0} }};"},
}
FILES = {"*": ("python/specvis/decoding/x.py", "csrc/x.cu"), "csrc/*": ("csrc/x.cu",), "*verify_tree*": (
    "specvis_kernels/verify_tree.py", "csrc/verify_tree.cu")}
TYPES = {".py": ("Any", "Tensor"), ".cu": ("auto", "const float*")}


def examples():
    """An old name of each kind in a small source, in each file where it is old."""
    for old in OLD:
        for pattern in old.files.split():
            for file in FILES.get(pattern, (pattern.replace("*", "x.py"),)):
                language = ".py" if file.endswith(".py") else ".cu"
                type_ = next(t for t in TYPES[language] if re.search(old.type, t))
                for kind in {*old.kinds} & {*SOURCES[language]}:
                    for word in old.words.split():
                        for name in (word, f"_{word}_", *((f"num_{word}", f"An{word.title()}") if old.part else ())):
                            yield file, kind, name, SOURCES[language][kind].format(name, type_)


def test_every_old_name_would_be_found():
    missed = [(file, kind, name) for file, kind, name, source in examples()
              if not any(f"{kind} {name} ->" in found for found in report(names_of(source, file)))]
    assert not missed


@pytest.mark.parametrize("text", TEXTS | COLUMNS)
def test_every_old_text_would_be_found(text):
    assert report(names_of(f"row = {{'{text}': 1}}", "python/specvis/x.py"))


def test_every_old_option_and_file_would_be_found():
    @click.group()
    def group():
        pass

    @group.command()
    @click.option("--target-tv")
    @click.option("--passes", "num_iter")
    def ship():
        pass

    assert [line.split(" -> ")[0].split()[-1] for line in report(command_names(group, "x"))] == [
        "ship", "target_tv", "passes"]
    assert report([Name("file", "launch", "csrc/launch.h", 0), Name("file", "rivals", "python/specvis/rivals.py", 0)])


@pytest.mark.parametrize("file, source", [
    ("specvis_kernels/x.py", "weigh = to_fixed_point"), ("specvis_kernels/x.py", "from ._numbers import draw as weigh"),
    ("specvis_kernels/x.py", "class Rule(Enum):\n    odds = 1"), ("specvis_kernels/x.py", "f = lambda odds: odds"),
    ("csrc/x.h", "using Rest = Residual;"), ("csrc/x.h", "constexpr int64_t odds = 3;"),
    ("csrc/x.h", "enum class Rule { optimal, odds = 2 };"),
])
def test_a_second_name_would_be_found(file, source):
    assert report(names_of(source, file))


def test_good_names_are_not_found():
    python = """
def save(path: Path, weights: dict, tv_excess: float, num_accepted: Tensor, position_ids: Tensor): pass
class Method:
    cutoff: str = "tvd"
    def run_step(self, accepted_nodes): self.padding_mask = 1
row = {"target_forwards": 1, "speedup": 2}
"""
    cuda = """
#define WALK(P, place) walk(P)
struct Rows { const float *probs, *mass; Cutoff cutoff; int32_t (*f)(int reach); };  // rest
template <int kept> __global__ void verify_sampled(Rows batch, int max_depth) { call(batch, "odds"); }
"""
    assert not report([*names_of(python, "python/specvis/decoding/x.py"), *names_of(cuda, "csrc/x.cu")])
    assert {"probs", "mass", "cutoff", "batch", "max_depth", "verify_sampled"} <= {
        name.name for name in names_of(cuda, "csrc/x.cu")}
