"""The tables of measured numbers in README.md and docs:   python -m benchmarks.tables

Each is written from files in benchmarks/results, between <!-- table: NAME --> and <!-- end -->, with the revision and
machine of the files that say these.
"""
import csv
import json
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"(?<=<!-- table: )([\w-]+) -->\n(.*?)(?=<!-- end -->)", re.S)
CPU, GPU = "AMD-EPYC-2-cores", "NVIDIA-H100-80GB-HBM3"
SIZES = ("shipped", "B", "L", "XL")


# --- reading ----------------------------------------------------------------------------------------------------------

READ = {}  # the files that were read for a table, in their order


def rows_of(name: str) -> list[dict]:
    """The rows of a file: "AMD-EPYC-2-cores.json", "demo/compare.csv" """
    READ[name] = True
    return parsed(name)


@cache
def parsed(name: str) -> list[dict]:
    text = (RESULTS / name).read_text()
    if name.endswith(".csv"):
        return list(csv.DictReader(text.splitlines()))
    return json.loads(text)["rows"]


def row_of(name: str, **where) -> dict:
    """The only row with these values."""
    row, = (row for row in rows_of(name) if where.items() <= row.items())
    return row


def origin(name: str) -> str:
    """The revision and the machine of a file; of a file that does not say these: nothing."""
    path = RESULTS / name
    if path.suffix != ".json":
        return ""
    record = json.loads(path.read_text())
    machine = record.get("machine", record)
    return f"{machine['git']}, {machine['cpu' if machine['device'] == 'cpu' else 'device']}"


# --- writing ----------------------------------------------------------------------------------------------------------

def markdown(head: list[str], *lines: list[str]) -> str:
    head, *lines = (f"| {' | '.join(line)} |".replace("  |", " |") for line in (head, *lines))
    return "\n".join([head, "|" + "---|" * head.count(" |"), *lines])


def short(value: float, digits: int) -> str:
    """Fewer digits after the point from 10 on, none from 100 on."""
    return f"{value:.{digits if value < 10 else min(digits, 1) if value < 100 else 0}f}"


def with_best(values: list[float], digits: int, best=max) -> list[str]:
    """The best in bold."""
    return [f"**{value:.{digits}f}**" if value == best(values) else f"{value:.{digits}f}" for value in values]


def compare() -> str:
    rows = [row for row in rows_of("demo/compare.csv") if row["temperature"] == "1.0"]
    columns = [name for name in rows[0] if name not in ("temperature", "batch_speedup")]
    return markdown(columns, *([row[name] or "-" for name in columns] for row in rows))


def decode() -> str:
    rows, lines = rows_of(f"{CPU}-decode.json"), []
    released = {(row["size"], row["method"]): row for row in rows}
    for row in rows:
        method, other = row["method"], released.get((row["size"], "released " + row["method"]))
        if method.startswith("released"):
            continue
        outside = f"{100 * (row['ops'] + row['rest']):.1f} %"
        lines.append([f"{row['size']}: baseline" if method == "vanilla" else f"`{method}`", short(row["step_ms"], 1),
                      outside + (f" (released: {100 * other['rest']:.1f} %)" if other else ""),
                      "1" if method == "vanilla" else f"{row['times_vanilla']:.2f}",
                      f"{row['times_released']:.2f}" if other else ""])
    return markdown(["", "ms per step", "outside the models' forwards", "speed, baseline = 1",
                     "speed, released loop = 1"], *lines)


def decode_refresh() -> str:
    methods = {"window 8": "jacobi:window=8", "window 4": "jacobi:window=4",
               "with 1 refresh": "jacobi:window=4:refresh=1", "with 2": "jacobi:window=4:refresh=2"}
    return markdown(["speed over plain decoding", *methods], *(
        [size, *with_best([row_of(f"{CPU}-decode-refresh.json", size=size, method=method)["times_vanilla"]
                           for method in methods.values()], 2)] for size in SIZES))


def decode_batch() -> str:
    rows = [row for row in rows_of(f"{CPU}-decode-batch-8.json") if not row["method"].startswith("released")]
    return markdown(["", *(f"`{row['method']}`" for row in rows)],
                    ["s per picture", *(f"{row['picture_s']:.2f}" for row in rows)],
                    ["speed, baseline = 1", *(f"{row['times_vanilla']:.2f}" for row in rows)])


OPS_OF_A_CPU = [  # title, the file's suffix, ops, how sizes begin, the code beside them in the file and in the table
    ("`verify_logits`, one request", "", "verify_logits", "1 ", "two ops", "`guided_probs`, `verify_tree`"),
    ("`verify_logits`, eight", "", "verify_logits", "8 ", "two ops", "the same"),
    ("`draft_frontier`", "", "draft_frontier", "", "two ops", "the ops that it replaces"),
    ("`draft_children`", "", "draft_children", "", "two ops", "the ops that it replaces"),
    ("`tree_attention`", "", "tree_attention", "", "attention", "PyTorch's attention under a mask"),
    ("`commit_kv`", "", "commit_kv", "", "index and put", "index and put"),
    ("`commit_tokens`", "", "commit_tokens", "", "scatter", "scatters"),
    ("`verify_chain`", "-formats", "verify_chain", "", "padded", "padding, `verify_tree`"),
    ("`accept_gaussian`, `resample_gaussian`", "-continuous", "accept_gaussian resample_gaussian", "", "oracle",
     "PyTorch's operators"),
]


def cpu_ops() -> str:
    """How many times as fast as the code beside it each op is, over sizes and modes."""
    lines = []
    for title, suffix, names, sizes, other, beside in OPS_OF_A_CPU:
        times = {(row["op"], row["mode"], row["shape"], row["backend"]): row["p10_us"]
                 for row in rows_of(f"{CPU}{suffix}.json")
                 if row["op"] in names.split() and row["shape"].startswith(sizes)}
        ratios = [times[(*case, other)] / time for (*case, backend), time in times.items()
                  if backend == "cpu" and (*case, other) in times]
        lines.append([title, beside, f"{min(ratios):.1f} to {max(ratios):.1f}"])
    return markdown(["op", "beside", "times as fast"], *lines)


def forward_ms(nodes: int, what: str, **model) -> float:
    """By two threads; of PyTorch's modules by their best setting."""
    return min(row["median_ms"] for row in rows_of(f"{CPU}-forward.json")
               if (model | {"nodes": nodes, "what": what}).items() <= row.items()
               and (what == "eager" or row["threads"] == 2))


NODES = (1, 2, 3, 5, 9, 17, 33)
FORWARDS = {**{f"shipped, {dtype}": {"size": "shipped", "dtype": dtype} for dtype in ("float32", "bfloat16")},
            **{size: {"size": size} for size in SIZES[1:]}}


def forward() -> str:
    lines = []
    for title, model in FORWARDS.items():
        whats = {"decoder_layers": f"{title}: `decoder_layers`", "eager": "PyTorch", "llama.cpp": "llama.cpp"}
        lines += [[name, *(short(forward_ms(nodes, what, **model), 2) for nodes in NODES)]
                  for what, name in whats.items()]
    return markdown(["nodes", *map(str, NODES)], *lines)


def gpu_decode() -> str:
    methods = {"`vanilla`": "vanilla", "`jacobi`, window 16": "jacobi:window=16", "`eagle1`": "eagle1",
               "`lantern`": "lantern"}
    lines = []
    for size in ("XL", "shipped"):
        for batch in (1, 8):
            rows = [row_of(f"{GPU}-decode.json", size=size, batch=batch, method=method) for method in methods.values()]
            lines += [[f"{size}, {batch}", "ms a step", *(f"{row['step_ms']:.2f}" for row in rows)],
                      ["", "s a picture", *with_best([row["picture_s"] for row in rows], 3, min)],
                      ["", "over `vanilla`", "", *(f"{row['times_vanilla']:.1f}" for row in rows[1:])]]
    return markdown(["model, pictures at once", "", *methods], *lines)


def families() -> str:
    """A line for each contender, a column for each device, model and batch. A device without a file has none."""
    columns = {}
    for device, name in (("one core", f"{CPU}-families.json"), ("H100", f"{GPU}-families.json")):
        for row in rows_of(name) if (RESULTS / name).exists() else []:
            times = columns.setdefault(f"{device}: {row['model']}, {row['batch']}", {})
            times[row["what"], row["reader"]] = short(row["step_ms"], 2)
    contenders = dict.fromkeys(key for times in columns.values() for key in times)
    return markdown(["ms a step", "read by", *columns], *(
        [what, reader, *(times.get((what, reader), "-") for times in columns.values())] for what, reader in contenders))


def gpu_refresh() -> str:
    settings = {"16, 0": "16", "16, 1": "16:refresh=1", "16, 2": "16:refresh=2", "16, 3": "16:refresh=3", "32, 0": "32",
                "32, 2": "32:refresh=2"}
    rows = {batch: [row_of(f"{GPU}-decode-refresh.json", batch=batch, method=f"jacobi:window={setting}")
                    for setting in settings.values()] for batch in (1, 8)}
    lines = [["tokens per forward, of the shipped model on the demo's prompts",
              *(f"{row['imposed_tau']:.2f}" for row in rows[1])]]
    for batch, title in ((1, "1 picture"), (8, "8 pictures")):
        lines += [[f"{title}: ms a step", *(f"{row['step_ms']:.2f}" for row in rows[batch])],
                  ["over `vanilla`", *with_best([row["times_vanilla"] for row in rows[batch]], 2)]]
    return markdown(["`jacobi` with window, refreshes", *settings], *lines)


def refresh_pays() -> str:
    """The best window without and with refreshes; in bold what is a twentieth faster."""
    lines = []
    for title, name, where in (
            ("two cores, shipped model", CPU, {"size": "shipped"}), ("two cores, LlamaGen-B", CPU, {"size": "B"}),
            ("two cores, L", CPU, {"size": "L"}), ("two cores, XL", CPU, {"size": "XL"}),
            ("H100, XL, 1 picture", GPU, {"batch": 1}), ("H100, XL, 8 pictures at once", GPU, {"batch": 8})):
        rows = [row for row in rows_of(f"{name}-decode-refresh.json") if where.items() <= row.items()]
        without, refreshed = (max((row for row in rows if ("refresh" in row["method"]) == on),
                                  key=lambda row: row["times_vanilla"]) for on in (False, True))
        speeds = [row["times_vanilla"] for row in (without, refreshed)]
        cells = with_best(speeds, 2) if max(speeds) > 1.05 * min(speeds) else [f"{speed:.2f}" for speed in speeds]
        lines.append([title, cells[0], f"{cells[1]}, `{refreshed['method'].removeprefix('jacobi:')}`"])
    return markdown(["device, sizes", "best window without", "best with refreshes"], *lines)


IMAGE = "[(7.5, 1.0, 1000, 1.0)]"
TREE = f"60 16384 6 {{'branch': 10, 'likely': True, 'settings': {IMAGE}"
LANTERN = ", 'k': 1000, 'residual': 'relaxed'}"
OPS = [  # title, op, its sizes after the batch
    ("`draft_frontier`, 10 pairs of float32", "draft_frontier", f"10 16384 10 float32 True 1 {IMAGE}"),
    ("`draft_children`, 10 pairs of float32", "draft_children", f"10 16384 10 float32 True False {IMAGE}"),
    ("`draft_children`, bfloat16", "draft_children", f"10 16384 10 bfloat16 True False {IMAGE}"),
    ("`select_tree`, of 410 nodes", "select_tree", "410 60"),
    ("`tree_links`", "tree_links", "60"),
    ("`tree_attention`, a layer, 576 columns", "tree_attention",
     "60 20 20 64 {'columns': 640, 'lengths': [576], 'dtype': torch.bfloat16}"),
    ("`verify_logits`", "verify_logits", TREE + "}"),
    ("`verify_logits`, LANTERN, k = 1000", "verify_logits", TREE + LANTERN),
    ("`verify_logits`, bfloat16", "verify_logits", TREE + ", 'dtype': torch.bfloat16}"),
    ("`verify_logits` with seeds", "verify_logits", TREE + ", 'seeds': True}"),
    ("`draw_tokens`, 33 pairs of float32", "draw_tokens", f"33 16384 float32 True {IMAGE}"),
    ("`commit_kv`, 6 nodes", "commit_kv",
     "60 6 {'layout': 'layers', 'count': 36, 'width': 1280, 'columns': 64, 'dtype': torch.bfloat16, "
     "'some_wrong': False, 'all_accepted': True}"),
    ("`commit_tokens`", "commit_tokens", "60 6 576 True False"),
    ("`guided_probs`, 60 pairs of bfloat16", "guided_probs", f"60 16384 bfloat16 True {IMAGE} None"),
    ("`expand_tree`, 10 rows", "expand_tree", "10 16384 10"),
    ("`draw_children`, 10 rows", "draw_children", "10 16384 10"),
    ("`verify_tree`", "verify_tree", "60 16384 6 {'branch': 10}"),
    ("`verify_tree`, LANTERN, k = 1000", "verify_tree", "60 16384 6 {'branch': 10" + LANTERN),
    ("`verify_tree`, draft rows", "verify_tree", "60 16384 6 {'branch': 6, 'drawn': True}"),
    ("`neighborhood_sum`, 60 rows, k = 1000", "neighborhood_sum", "16384 1000"),
    ("`token_log_probs`, 17 pairs, 4 tokens", "token_log_probs", f"17 16384 4 bfloat16 True {IMAGE} None"),
    ("`rotate_into_cache`, a layer", "rotate_into_cache",
     "60 20 20 64 {'columns': 640, 'lengths': [576], 'dtype': torch.bfloat16}"),
    ("`swiglu`, 60 nodes of XL", "swiglu", "3584 bfloat16"),
    ("`rms_norm` with a residual", "rms_norm", "1280 bfloat16 True"),
]
ROWS_OF_A_REQUEST = {"neighborhood_sum": 60, "swiglu": 120, "rms_norm": 120}  # what the sizes have in place of 1
LATER = {"draft_frontier": "cuda", "draw_tokens": "cuda", "token_log_probs": "cuda", "rotate_into_cache": "triton",
         "swiglu": "triton"}  # timed as they are now in the file of experiments
XL_WEIGHTS = 2 * 1280 * (4 * 1280 + 3 * 3584)  # bytes of a layer's matrices in bfloat16
OTHERS = {"triton": "", "two ops": "two ops ", "multinomial": "multinomial ", "index and put": "index and put ",
          "scatter": "scatters ", "Liger's": "Liger ", "flashinfer's": "flashinfer "}


def gpu_ops() -> str:
    """Microseconds of batches of 1 / 8 / 64. In bold what is faster than ours."""
    times = {(row["op"], row["shape"], row["backend"]): row["median_us"] for row in rows_of(f"{GPU}.json")
             if row["mode"] == "graph between"}
    times |= {(row["op"], row["shape"], LATER[row["op"]]): row["us_changed_packs"]
              for row in rows_of(f"{GPU}-experiments.json") if row.get("op") in LATER}
    lines = []
    for title, op, sizes in OPS:
        shapes = [f"{batch * ROWS_OF_A_REQUEST.get(op, 1)} {sizes}" for batch in (1, 8, 64)]
        found = {backend: [times.get((op, shape, backend)) for shape in shapes] for backend in ("cuda", *OTHERS)}
        if op in ("verify_logits", "draft_children"):  # had kernels of their own when this was timed
            found = {"two ops": found["two ops"]}
        found = {backend: us for backend, us in found.items() if any(us)}
        ours, *_ = found.values()
        (_, own), *others = [(backend, " / ".join(
            "-" if us is None else f"**{short(us, 1)}**" if mine and us < mine else short(us, 1)
            for us, mine in zip(row, ours))) for backend, row in found.items()]
        lines.append([title, own, *(", ".join(f"{OTHERS[backend]}{text}" for backend, text in others
                                              if (backend == "triton") == is_triton) for is_triton in (True, False))])
    return markdown(["op", "ours", "Triton", "others"], *lines)


def gpu_layer() -> str:
    """Microseconds of a layer without attention and rotation, for few rows: the fastest of each way."""
    rows = rows_of(f"{GPU}-experiments.json")
    numbers, read = (2, 10, 16, 34), row_of(f"{GPU}-experiments.json", part="read")["TB_s_read"]
    lines = [["its weights, as fast as the card read", *[short(XL_WEIGHTS / read / 1e6, 1)] * len(numbers)]]
    for title, how in (("the products", "products"), ("with norms, gate and residual, five products", "ops"),
                       ("gate and up as one product", "ops, one product of gate and up"),
                       ("one kernel of our own for each", "one kernel")):
        lines.append([title, *(short(min(row["us_a_layer"] for row in rows if row.get("how") == how
                                         and row["rows"] == number and "us_a_layer" in row), 1) for number in numbers)])
    return markdown(["rows", *map(str, numbers)], *lines)


def readme() -> str:
    """Three speedups, each with what it is over."""
    gpu = row_of(f"{GPU}-decode.json", size="XL", batch=1, method="jacobi:window=16")["times_vanilla"]
    cpu = min(row_of(f"{CPU}-decode.json", size=size, method="jacobi:window=4")["times_vanilla"] for size in ("B", "L"))
    llama = [forward_ms(nodes, "llama.cpp", **model) / forward_ms(nodes, "decoder_layers", **model)
             for model in FORWARDS.values() for nodes in NODES]
    return markdown(
        [f"{gpu:.1f} times as fast", f"{cpu:.1f} times as fast", f"{min(llama):.1f} to {max(llama):.1f} times as fast"],
        ["as plain decoding in CUDA graphs: LlamaGen-XL's sizes on an H100",
         "as plain decoding by `decoder_layers`: LlamaGen-B's and L's sizes on two CPU cores",
         "as llama.cpp, per forward: the shipped model's and LlamaGen's sizes on two CPU cores"])


README_OPS = [  # title, op, sizes, its name and that of the code beside it on an H100, and on a CPU
    ("`draw_tokens`, 17 pairs of rows", "draw_tokens", f"1 17 16384 bfloat16 True {IMAGE} None 16",
     ("cuda", "multinomial"), ("cpu", "multinomial"), "softmax, multinomial"),
    ("`verify_logits`, a tree of 60", "verify_logits", f"1 {TREE}}}", ("two ops", None), ("cpu", "LANTERN's loop"),
     "LANTERN's loop"),
    ("`draft_frontier`, 10 pairs", "draft_frontier", f"1 10 16384 10 float32 True 1 {IMAGE}", ("cuda", "two ops"),
     ("cpu", "two ops"), "two ops"),
    ("`sample_residual`, a row", "sample_residual", "1 16384", ("cuda", "searchsorted"), ("cpu", "searchsorted"),
     "cumsum, searchsorted"),
    ("`commit_kv`, 36 layers", "commit_kv", f"1 {OPS[11][2]}",
     ("cuda", "index and put"), ("cpu", "index and put"), "index and put"),
    ("`rms_norm` with a residual", "rms_norm", "120 1280 bfloat16 True", ("triton", "Liger's"), ("cpu", "PyTorch's"),
     "Liger; PyTorch"),
]


def readme_ops() -> str:
    """Microseconds: ours / theirs."""
    times = {(row["op"], row["shape"], row["mode"], row["backend"]): (row["median_us"], row["p10_us"])
             for name in (GPU, CPU) for row in rows_of(f"{name}.json") if row["mode"] in ("graph between", "eager")}

    def cell(op, sizes, mode, i, names):
        us = [times[op, sizes, mode, name][i] if name else None for name in names]
        return " / ".join("-" if one is None else short(one, 1) for one in us)

    return markdown(["op", "on an H100: ours / theirs", "on two CPU cores: ours / theirs", "theirs"], *(
        [title, cell(op, sizes, "graph between", 0, gpu), cell(op, sizes, "eager", 1, cpu), theirs]
        for title, op, sizes, gpu, cpu, theirs in README_OPS))


TABLES = {"compare": compare, "decode": decode, "decode-refresh": decode_refresh, "decode-batch": decode_batch,
          "forward": forward, "ops": cpu_ops, "families": families, "gpu-decode": gpu_decode,
          "gpu-refresh": gpu_refresh, "gpu-ops": gpu_ops, "gpu-layer": gpu_layer, "refresh-pays": refresh_pays,
          "readme": readme, "readme-ops": readme_ops}


def captioned(table, captions: bool = True) -> str:
    """What a function writes, and where it comes from."""
    READ.clear()
    text = table()
    origins = "; ".join(dict.fromkeys(filter(None, map(origin, READ))))
    return f"{text}\n\n*Revisions: {origins}.*" if origins and captions else text


def written(page: str, tables: dict, captions: bool = True) -> str:
    """The page with these tables in its blocks, each with its revisions if `captions`. tables: functions by name"""
    return BLOCK.sub(lambda match: f"{match[1]} -->\n{captioned(tables[match[1]], captions)}\n" if match[1] in tables
                     else match[0], page)


def main():
    for path in DOCUMENTS:
        old, new = path.read_text(), written(path.read_text(), TABLES)
        if new != old:
            print(path.relative_to(ROOT))
            path.write_text(new)


if __name__ == "__main__":
    main()
