"""The measured numbers of README.md and docs: tables are written from committed files, prose is found in files."""
import csv
import json
import re
from collections import defaultdict
from itertools import permutations

import pytest

from benchmarks import tables

OTHERS = {  # page -> its sections without measurements of ours: settings, examples, versions, other people's
    "design.md": ("How an op finds its kernel",),
    "differences.md": ("Jacobi decoding: SJD, SCD and GSD",),
    "families.md": ("", "Memory"),
    "faults.md": ("When the package is imported", "Exit statuses of `specvis` and `python -m training`"),
    "methods.md": ("The recipes", "What beats speculation"),
    "models.md": ("The published models", "A draft model for another model"),
    "python.md": ("A picture",),
    "use_it.md": ("vLLM",),
    "verification.md": ("The rule",),
}
SETTINGS = re.compile(r"(?:torch|CUDA|Triton|Python|transformers|glibc|Liger|flashinfer|version|guidance|temperature"
                      r"|top-p|delta|omega|interval of|Apache-)[ -]?(?:(?:, | and | or | to )?\d[\d.]*\d(?: %)?)+"
                      r"|\d+ % faster than plain|0\.6 \(r|70 to 100 % of the tokens masked|10 % of the captions")
UNIT = r"(?:(?: to [\d.]+)? (times|%|ms|us|s)(?!\w))"
DECIMAL = r"(?<![\w.])\d+\.\d+(?![\w.]*\w)"
MEASURED = re.compile(rf"({DECIMAL}|\b\d+(?={UNIT}))(?={UNIT}?)")
SCALES = {  # unit -> what says the unit of a column, with the factor
    "us": {"us": 1}, "ms": {"us": 1e-3, "ms": 1}, "s": {"us": 1e-6, "ms": 1e-3, "s|seconds": 1}, "%": {"%": 1},
    "times": {"times|speed|speedup|over": 1},
}
CASE = ("op", "nodes", "mode", "shape", "size", "dtype", "batch")  # times of equal ones are compared
UNSAID = re.compile(r"p90_|p10_(?!us)|min_|split_|samples|share_of_copy|turns|threads|epochs|lr$|bytes")  # columns
LINK = re.compile(r"\]\((?:\.\./)?benchmarks/results/([^)]+\.(?:jsonl?|csv|md))\)")


def sections(page: str) -> dict[str, str]:
    """Texts by titles, without code in lines of its own."""
    text = re.sub(r"^```(?s:.*?)^```|^ {4,}.*$", "", page, flags=re.M)
    introduction, *others = re.split(r"^## (.*)$", text, flags=re.M)
    return {"": introduction} | dict(zip(others[::2], others[1::2]))


PAGES = {path.name: path.read_text() for path in tables.DOCUMENTS}
SECTIONS = [(name, title) for name, page in PAGES.items() for title in sections(page)
            if title not in OTHERS.get(name, ())]


def bare(text: str) -> str:
    """Without code, links' goals, pictures and settings."""
    return SETTINGS.sub("", re.sub(r"`[^`]*`|!\[[^]]*\]|\]\([^)]*\)", "", text))


def tables_of(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n)+", text + "\n", re.M)


def columns_of_tables(text: str) -> dict[tuple, list[float]]:
    """The numbers in each cell of the tables in Markdown, by what is said of it: headings and its line."""
    columns = defaultdict(list)
    for head, _, *lines in map(str.splitlines, tables_of(text)):
        titles = head.split("|")
        for line in lines:
            for title, cell in zip(titles, line.split("|")):
                numbers = re.findall(r"\d[\d,]*(?:\.\d+)?", re.sub(r"`[^`]*`", "", cell))
                columns[titles[1] + title + line,] += [float(number.replace(",", "")) for number in numbers]
    return columns


def objects_of(data) -> list[dict]:
    below = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [data] * isinstance(data, dict) + [found for value in below for found in objects_of(value)]


def columns_of_file(name: str, ops: set[str]) -> dict[tuple, list[float]]:
    """The numbers in each column of a file, for each case of its rows. ops: which count, in a file of ops

    Prose says the times that the fastest tenth of an op's calls stay below, and medians of a graph's.
    """
    text, columns = (tables.RESULTS / name).read_text(), defaultdict(list)
    if name.endswith(".md"):
        return columns_of_tables(text)
    for row in csv.DictReader(text.splitlines()) if name.endswith(".csv") else objects_of(
            json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]):
        if row.get("op", "") in ops | {""} and "cores" not in row:
            unsaid = "median_us" if row.get("mode", "").startswith("eager") else "p10_us"
            for column, value in row.items():
                is_number = re.fullmatch(r"-?\d+(?:\.\d+)?(?:e-?\d+)?", str(value))
                if is_number and column != unsaid and not UNSAID.match(column):
                    columns[(*map(row.get, CASE), column)].append(float(value))
    return columns


def says(words: str, column: str) -> bool:
    return re.search(rf"(?<![a-z])(?:{words})(?![a-z])", column) is not None


def is_there(number: str, unit: str, columns: dict[tuple, list[float]], ratios: bool) -> bool:
    """Whether a column has the number, as it is rounded. ratios: or two of its times have it as their ratio"""
    half = 0.5 * 10 ** -len(number.partition(".")[2]) + 1e-9
    for (*case, column), values in columns.items():
        is_time = says("us|ms|s|seconds", column)
        factors = [factor for words, factor in SCALES[unit].items() if says(words, column)] if unit else [1]
        factors += [100] * (unit == "%" and bool(case) and not is_time and not says("times", column))  # a share
        candidates = [value * factor for value in values for factor in factors]
        if ratios and unit in ("", "times") and is_time and any(case[:2]):
            candidates += [a / b for a, b in permutations(values, 2) if b]
        if any(abs(value - float(number)) <= half for value in candidates):
            return True
    return False


def not_found(page: str, title: str) -> list[str]:
    """The measured numbers in a section's prose that are nowhere.

    A number is measured if it has a decimal point, or one of the units times, %, ms, us and s, and is no setting (a
    version, a temperature and the like). Rounded as it is, it must be in a table of the section or of a section that
    it links, or in a file of benchmarks/results that it links: with a unit of time beside such a unit, with % as a
    share, and in a sentence that says "times" also as the ratio of two times of one op or forward. A file of ops counts
    with the ops that the paragraph names. Paragraphs that say "by hand" are left out. A number that another row has is
    not noticed here, but by test_what_prose_says_of_the_files where that has the sentence.
    """
    text = sections(page)[title]
    linked = [other for file, page in PAGES.items() for name, other in sections(page).items()
              if f"{file}#{re.sub('[^a-z0-9 -]', '', name.lower()).replace(' ', '-')})" in text]
    missing = []
    for paragraph in re.split(r"\n\n|\n(?=- )", re.sub(r"^\|.*$", "", text, flags=re.M)):
        ops = set(re.findall(r"`(\w+)`", paragraph))
        sources = [columns_of_tables(part) for part in [text, *linked]] + [
            columns_of_file(file, ops) for file in LINK.findall(text)]
        for sentence in re.split(r"(?<=\.)\s", bare(paragraph)) if "by hand" not in paragraph.lower() else ():
            for match in MEASURED.finditer(sentence):
                number, unit = match[1], match[2] or match[3] or ""
                if not any(is_there(number, unit, columns, "times" in sentence) for columns in sources):
                    missing.append(f"{number} {unit}".strip())
    return missing


def test_what_is_left_out_exists():
    for name, titles in OTHERS.items():
        assert set(titles) <= set(sections(PAGES[name])), name


def test_the_tables_are_the_files():
    for page in PAGES.values():
        assert page == tables.written(page, tables.TABLES), "python -m benchmarks.tables"


def test_every_table_is_shown_once():
    blocks = [name for page in PAGES.values() for name, *_ in tables.BLOCK.findall(page)]
    assert sorted(blocks) == sorted([*tables.TABLES, "bounds", "refresh"])


def test_only_blocks_with_a_table_are_written():
    page = "1.0\n<!-- table: new -->\n<!-- end -->\n2.0\n<!-- table: old -->\n| 3.0 |\n<!-- end -->\n"
    new = "1.0\n<!-- table: new -->\n| 4.0 |\n<!-- end -->\n2.0\n<!-- table: old -->\n| 3.0 |\n<!-- end -->\n"
    assert tables.written(page, {"new": lambda: "| 4.0 |"}) == new
    assert tables.written(new, {"new": lambda: "| 4.0 |"}) == new


@pytest.mark.parametrize("name, title", SECTIONS)
def test_other_tables_say_that_they_are_written_by_hand(name, title):
    text = sections(PAGES[name])[title]
    if re.search(DECIMAL, bare("".join(tables_of(tables.BLOCK.sub("", text))))):
        assert "by hand" in text


@pytest.mark.parametrize("name, title", SECTIONS)
def test_the_numbers_of_prose_are_in_the_files(name, title):
    assert not_found(PAGES[name], title) == []


@pytest.mark.parametrize("name, title, right, wrong, unit", [
    ("measurements.md", "Where the time of a picture goes", "4.8 times", "4.9 times", "times"),
    ("measurements.md", "Forwards on a CPU", "33 nodes) to 15", "33 nodes) to 18", "times"),
    ("measurements.md", "Forwards on a CPU", "and 85 %", "and 87 %", "%"),
    ("measurements.md", "Ops", "take 4.6 ms", "take 4.9 ms", "ms"),
    ("gpu.md", "Decoding", "takes 0.155 s", "takes 0.156 s", "s"),
])
def test_a_changed_number_of_prose_is_found(name, title, right, wrong, unit):
    assert PAGES[name].count(right) == 1
    missing, = not_found(PAGES[name].replace(right, wrong), title)
    assert missing.split()[0] in wrong and missing.endswith(unit)


def between(name: str, op: str, other: str, digits: int = 1, batch: str = "") -> str:
    """How many times as fast as the other backend the C++ kernel is, over sizes and modes: 1.6 to 6.4"""
    times = {(row["op"], row["mode"], row["shape"], row["backend"]): row["p10_us"] for row in tables.rows_of(name)
             if row["op"] in op.split() and row["shape"].startswith(batch)}
    ratios = [times[(*case, other)] / time for (*case, backend), time in times.items()
              if backend == "cpu" and (*case, other) in times]
    return f"{min(ratios):.{digits}f} to {max(ratios):.{digits}f}"


def sentences():
    """What prose says of the files, as the files say it now: pages and texts."""
    page, ops, eager = "measurements.md", f"{tables.CPU}.json", f"{tables.CPU}-decode-eager.json"
    one, eight = (between(ops, "verify_logits", "two ops", 0, batch) for batch in ("1 ", "8 "))
    yield page, f"`verify_logits` is {one} times as fast for one request, and {eight} times for eight"
    yield page, (
        f"`commit_kv` is {between(ops, 'commit_kv', 'index and put', 0)} times as fast as index and put, "
        f"`commit_tokens` {between(ops, 'commit_tokens', 'scatter')} times as fast as scatters, "
        f"`draft_frontier` {between(ops, 'draft_frontier', 'two ops')} times and "
        f"`draft_children` {between(ops, 'draft_children', 'two ops')} times as fast as the ops that they replace, and "
        f"`tree_attention` {between(ops, 'tree_attention', 'attention')} times as fast as PyTorch's attention")
    gaussian = between(f"{tables.CPU}-continuous.json", "accept_gaussian resample_gaussian", "oracle", 0)
    yield page, f"`resample_gaussian` is {gaussian} times as fast as PyTorch's"
    codebook = tables.row_of(ops, op="codebook_neighbors", mode="eager")["p10_us"] / 1e6
    yield page, f"`codebook_neighbors` for a codebook of LlamaGen's size, 16384 x 8, k = 1000: {codebook:.1f} s"
    formats = [row for row in tables.rows_of(f"{tables.CPU}-formats.json") if row["backend"] != "oracle"]
    trees = [row["p10_us"] for row in formats if row["op"].startswith("tree_") and row["shape"].startswith("1 ")]
    yield page, f"`tree_paths` take {min(trees):.0f} to {max(trees):.0f} us each"
    many, _, large = ({row["backend"]: row["p10_us"] / 1e3 for row in formats
                       if row["mode"] == "eager cold" and row["shape"].startswith(shape)}
                      for shape in ("64 16384 ", "16 16384 ", "8 151936 "))
    yield page, (
        f"`verify_chain` for 64 requests with 1 to 5 drafts and 16384 ids, in that run: {many['cpu']:.2f} ms, while "
        f"padding and `verify_tree` take {many['padded']:.1f} ms; for 8 requests and 151936 ids {large['cpu']:.2f} ms "
        f"and {large['padded']:.1f} ms (caches cold)")

    llama, pytorch = ({(title, nodes): tables.forward_ms(nodes, what, **model)
                       / tables.forward_ms(nodes, "decoder_layers", **model)
                       for title, model in tables.FORWARDS.items() for nodes in tables.NODES}
                      for what in ("llama.cpp", "eager"))
    alone = llama.pop(("XL", 1))
    assert min(pytorch, key=pytorch.get) == ("XL", 33) and max(pytorch, key=pytorch.get) == ("shipped, bfloat16", 1)
    yield page, (
        f"`decoder_layers` is {min(llama.values()):.1f} to {max(llama.values()):.1f} times as fast as llama.cpp up to "
        f"33 nodes; for one node of XL, where both wait for memory, it is {alone:.2f} times as fast. It is "
        f"{pytorch['XL', 33]:.1f} times (XL at 33 nodes) to {max(pytorch.values()):.0f} times (the shipped model in "
        "bfloat16, one node) as fast as PyTorch")

    limit = {(row["size"], row["nodes"]): row for row in tables.rows_of(f"{tables.CPU}-forward.json")
             if row["what"] == "decoder_layers" and row["threads"] == 2 and row["size"] != "shipped"}
    b, xl, large = (f"{100 * limit[size, 1]['of_bandwidth']:.0f} % ({size})" for size in ("B", "XL", "L"))
    yield page, f"are read for one node at {b}, {xl} and {large} of the rate"
    product = [100 * row["of_product"] for (_, nodes), row in limit.items() if nodes >= 17]
    yield page, f"From 17 nodes on, B, L and XL multiply at {min(product):.0f} to {max(product):.0f} % of the rate"

    def speeds(method: str, name: str = f"{tables.CPU}-decode.json", column: str = "times_vanilla") -> list[str]:
        return [f"{tables.row_of(name, size=size, method=method)[column]:.1f}" for size in tables.SIZES]

    window, chain, plain = speeds("jacobi:window=4"), speeds("speculative"), speeds("vanilla", eager, "times_eager")
    assert window[1] == window[2]
    yield page, f"is {window[1]} times as fast as plain decoding at B and L, {window[3]} times at XL"
    yield page, f"a chain of 4 drafts, is {min(chain[1:])} to {max(chain[1:])} times as fast from B on"
    yield page, (f"takes {plain[0]} times as long on the shipped model, {plain[1]} times at B, {plain[2]} times at L "
                 f"and {plain[3]} times at XL")
    yield page, (f"would look {speeds('jacobi:window=8 (eager)', eager)[0]} times as fast on the shipped model; in "
                 f"that run it is {speeds('jacobi:window=8', eager)[0]} times as fast")

    taken = {(row["refreshes"], row["window"]): row["forwards"] for row in tables.rows_of(f"{tables.GPU}-refresh.json")
             if row["rule"] in ("no refresh", "logits") and row["model"] in ("-", "small GPT")}
    means = [100 * (sum(1 / n for n in taken[2, window]) / sum(1 / n for n in taken[0, window]) - 1)
             for window in (8, 16, 32, 64)]
    sums = [100 * (sum(taken[0, window]) / sum(taken[2, window]) - 1) for window in (16, 32)]
    in_mean = f"{min(means):.0f} to {max(means):.0f} %"
    yield page, f"Two refreshes by `logits` gain {in_mean} in the mean"
    yield "methods.md", (
        f"Two refreshes give {in_mean} more tokens per forward in the mean over pictures, at windows of 8 to 64; by "
        f"the sum of forwards, which seconds follow, {sums[0]:.0f} % at a window of 16 and {sums[1]:.0f} % at 32")
    yield "gpu.md", f"two refreshes give {sums[0]:.0f} % more tokens per forward at a window of 16"
    on_cpu = f"{tables.CPU}-decode-refresh.json"
    one, none = (tables.row_of(on_cpu, size="XL", method=f"jacobi:window=4{more}")["imposed_tau"]
                 for more in (":refresh=1", ""))
    yield page, f"With one refresh there are {one:.2f} tokens per forward, and {none:.2f} without"

    of_gpu = [row for file in ("decode", "decode-bfloat16") for row in tables.rows_of(f"{tables.GPU}-{file}.json")]
    vanilla, jacobi = (100 * min(row["target"] for row in of_gpu if row["method"] == method)
                       for method in ("vanilla", "jacobi:window=16"))
    yield "gpu.md", (f"At least {vanilla:.0f} % of a step of `vanilla` and {jacobi:.0f} % of one of `jacobi` is the "
                     "target's forward")
    seconds = [f"{tables.row_of(f'{tables.GPU}-decode-bfloat16.json', batch=batch, method=method)['picture_s']:.3f}"
               for batch in (1, 8) for method in ("vanilla", "jacobi:window=16")]
    yield "gpu.md", (f"takes {seconds[0]} s a picture by `vanilla` and {seconds[1]} s by `jacobi`; of 8 at once "
                     f"{seconds[2]} s by `vanilla` and {seconds[3]} s by `jacobi`")

    jacobi, vanilla, together = (json.loads((tables.RESULTS / "rollouts" / f"{name}.json").read_text())
                                 for name in ("jacobi", "vanilla", "vanilla-together"))
    yield "python.md", f"{jacobi['drawing_s']:.0f} s of drawing by `jacobi`"
    yield "python.md", f"{vanilla['drawing_s']:.0f} s with `--method vanilla`"
    yield "python.md", f"and {jacobi['training_s']:.0f} s of training"
    yield "python.md", f"by plain decoding, {together['drawing_s']:.0f} s for 20 updates"

    greedy = {row["method"]: f"{float(row['tau']):.2f}" for row in tables.rows_of("demo/compare.csv")
              if row["temperature"] == "0.0"}
    yield page, f"at {greedy['speculative']} (`speculative`) to {greedy['adt-tree']} (`adt-tree`) tokens per target"
    yield "methods.md", (f"At temperature 0 `adt-tree` has {greedy['adt-tree']} tokens per target forward, `eagle1` "
                         f"{greedy['eagle1']} and `eagle2` {greedy['eagle2']}")


@pytest.mark.parametrize("name, sentence", [*sentences()])
def test_what_prose_says_of_the_files(name, sentence):
    assert sentence in " ".join(PAGES[name].split())


def test_the_memory_of_families_is_its_formula():
    """Two rows for each picture, or one, of prompts of 128 and of L tokens."""
    rows = re.findall(r"^\| (.*) \| ([\d,]+) \| (\d+) \| ([\d.]+) \|$", sections(PAGES["families.md"])["Memory"], re.M)
    assert len(rows) == 6
    for name, size, length, shown in rows:
        memory = (1 if name.startswith("GLM") else 2) * (128 + int(length)) * int(size.replace(",", "")) / 1e9
        assert f"{memory:.{len(shown.partition('.')[2])}f}" == shown, name
