"""What the compiler made of the kernels for sm_90: the parser on short listings, rules, and a table of bounds.

The table is benchmarks/results/sm_90-machine-code.json. `python -m benchmarks.sass --bounds` writes it again.
"""
import json
import shutil
import subprocess
import sys
from collections import Counter

import pytest

from benchmarks import bounds, executed, machine_code, sass
from tests.test_cuda_build import NVCC, ROOT, cuda_build

CSRC = ROOT / "csrc"


def routines_of(code: str, *called: str):
    """A kernel `k` of these lines, and routines that it calls."""
    lines = ["\t.section\t.text.k,\"ax\",@progbits"]
    for name, part in zip(["k", "$__internal_0_$__cuda_sm20_div_s64"], [code, *called]):
        lines.append(f"        .type           {name},@function")
        for line in part.strip().splitlines():
            line = line.strip()
            lines.append(line if line.endswith(":") else f"        /*0000*/                   {line} ;")
    return machine_code.parse("\n".join(lines))["k"]


def counts_of(code: str, *called: str) -> dict:
    return machine_code.report(routines_of(code, *called))


# --- the parser -------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("code, loads", [
    ("LDG.E R4, [R2]\nLDG.E R5, [R2+0x4]\nFADD R6, R4, R5", 2),
    ("LDG.E R4, [R2]\nFADD R6, R6, R4\nLDG.E R5, [R2+0x4]\nFADD R6, R6, R5", 1),
    ("LDG.E.128 R4, [R2.64]\nLDG.E.128 R8, [R2.64+0x10]\nFADD R0, R0, R7\nLDG.E R12, [R2]", 2),  # R7 is the first's
    ("LDG.E.128 R4, [R2.64]\nLDG.E.128 R8, [R2.64+0x10]\nLDG.E R12, [R10.64]\nLDG.E R13, [R0]", 2),  # an address
    ("LDG.E R4, [R2]\nLDG.E R5, [R2]\nFADD R0, R4, R0\nLDG.E R6, [R2]\nLDG.E R7, [R2]", 3),  # R5 still waits
    ("@P0 LDG.E R4, desc[UR8][R2.64]\n@!P1 LDG.E R5, desc[UR4][R2.64]\nUIADD3 UR4, UR5, 0x1, URZ\nEXIT", 2),
    ("LDG.E.64 R4, [R2]\nDADD R8, R4, R6\nLDG.E.64 R6, [R2]", 1),
    ("LDG.E R5, [R2]\nDADD R8, R4, R6\nLDG.E R7, [R2]\nSTG.E.64 [R2.64], R6\nLDG.E R9, [R2]", 1),  # halves of pairs
    ("LDG.E R4, [R2]\nMOV R4, R1\nLDG.E R4, [R2]", 1),  # written over
    ("LDG.E R4, [R2]\nISETP.NE.AND P0, PT, R4.reuse, RZ, PT\nLDG.E R5, [R2]", 1),
    ("LD.E.128 R4, [R2.64]\nLDG.E.128 R8, [R2.64]\nLDS R12, [R0]", 2),
    ("LDGSTS.E.128 [R1], [R2.64]\nLDGSTS.E.128 [R1], [R2.64]\nLDGDEPBAR\nLDGSTS.E.128 [R1], [R2.64]\nLDGDEPBAR\n"
     "DEPBAR.LE SB0, 0x1" + "\nLDGSTS.E.128 [R1], [R2.64]" * 3 + "\nLDGDEPBAR", 4),
])
def test_loads_in_flight(code, loads):
    assert counts_of(code)["loads_in_flight"] == loads


def test_loads_of_the_next_round_are_in_flight():
    """Loads at a loop's end whose results its beginning uses are in flight; 4-byte loads are not wide."""
    counts = counts_of("""
        LDG.E.128 R4, [R2]
        .L_x_0:
        LDG.E R0, [R2]
        FADD R12, R12, R4
        FADD R12, R12, R0
        LDG.E.128 R4, [R2]
        LDG.E.128 R8, [R2]
        @P0 BRA `(.L_x_0)
        EXIT""")
    loop, = counts["loops"]
    assert (loop["loads_in_flight"], loop["wide_in_flight"]) == (3, 2)
    assert (counts["loads_in_flight"], counts["once"]["loads_in_flight"]) == (3, 1)
    assert loop["loads"] == {"16 bytes": 2, "4 bytes": 1} and loop["instructions_per_entry"] == 0.8  # 6 / 8


def test_loops():
    """One loop in another.

    A jump back to after a loop makes no loop, and lanes that are apart at a shuffle do not count.
    """
    counts = counts_of("""
        ISETP.NE.AND P0, PT, R0, RZ, PT
        BRA.DIV UR4, `(.L_x_9)
        .L_x_0:
        LDS.64 R2, [R0]
        .L_x_1:
        STS.128 [R0], R4
        @P0 BRA `(.L_x_1)
        @P1 BRA P2, `(.L_x_5)
        .L_x_2:
        @!P0 BRA `(.L_x_0)
        EXIT
        .L_x_5:
        MUFU.RCP R4, R5
        BRA `(.L_x_2)
        .L_x_9:
        WARPSYNC.COLLECTIVE R1, `(.L_x_10)
        .L_x_10:
        BRA `(.L_x_0)
        .L_x_11:
        BRA `(.L_x_11)""")
    outer, inner = counts["loops"]
    assert (outer["depth"], outer["instructions"], outer["reciprocals"], outer["shared_loads"]) == (
        0, 5, 1, {"8 bytes": 1})
    assert (inner["depth"], inner["instructions"], inner["shared_stores"]) == (1, 2, {"16 bytes": 1})
    assert counts["instructions"] == 10 and counts["once"]["instructions"] == 3


def test_a_loop_left_through_a_barrier():
    """BSYNC goes on where the last BSSY of its barrier said."""
    counts = counts_of("""
        BSSY B0, `(.L_x_1)
        .L_x_0:
        @P0 BRA `(.L_x_2)
        BSYNC B0
        .L_x_2:
        IADD3 R0, R0, 0x1, RZ
        BRA `(.L_x_0)
        .L_x_1:
        EXIT""")
    assert [loop["instructions"] for loop in counts["loops"]] == [3] and counts["instructions"] == 6


def test_what_is_dear():
    counts = counts_of("""
        F2I.S64.TRUNC R2, R4
        I2F.F64.S64 R2, R4
        F2F.F64.F32 R2, R4
        F2I.TRUNC.NTZ R2, R4
        I2F.U64.RP R2, R4
        @P0 CALL.REL.NOINC `($__internal_0_$__cuda_sm20_div_s64)
        CALL.REL.NOINC `($k$other)
        MUFU.RCP64H R5, R7
        MUFU.EX2 R5, R7
        DFMA R2, R4, R6, R8
        STL [R1], R2
        LDL.64 R2, [R1]
        BAR.SYNC.DEFER_BLOCKING 0x0
        UCGABAR_ARV
        UCGABAR_WAIT
        MEMBAR.ALL.GPU
        ERRBAR
        CCTL.IVALL
        ATOMG.E.ADD.STRONG.GPU PT, R2, [R4.64], R5
        ATOMS.ADD RZ, [R4], R5
        LDG.E.CONSTANT R8, [R4.64]
        SHFL.BFLY PT, R3, R2, 0x1, 0x1f
        HMMA.16816.F32.BF16 R4, R8, R12, R4
        EXIT""", "MUFU.RCP R4, R5\nRET.REL.NODEC R2 `(k)")
    dear = {"conversions_64": 4, "division_calls": 1, "reciprocals": 1, "exponentials": 1, "fp64": 1, "local": 2,
            "barriers": 1, "cluster_barriers": 1, "fences": 3, "atomics": 1, "shared_atomics": 1, "constant_loads": 1,
            "shuffles": 1, "matrix_products": 1}
    assert {name: counts[name] for name in dear} == dear and counts["called"] == {"sm20_div_s64": 2}


@pytest.mark.parametrize("name, title", [
    ("_ZN7specvis49_GLOBAL__N__8d52ca17_16_verify_logits_cu_6aee7f9920verify_logits_kernelI6__halfEEvNS_12VerifyLogitsE",
     ("verify_logits", "verify_logits<half>")),
    ("_ZN7specvis45_GLOBAL__N__1e9c3151_12_commit_kv_cu_8d31b22816commit_kv_kernelItLb1ELi4EEEvNS_8CommitKvEll",
     ("commit_kv", "commit_kv<uint16, 1, 4>")),
    ("_ZN7specvis9GLOBAL__N__b_9_a_b_cu_6aee7f99_165a_b_cEv", ("a_b", "a_b_c")),
    ("_ZN7specvis9GLOBAL__N__b_3_a_cu_9faa54a48a_kernelINS0_8StreamedI13__nv_bfloat16EEEEvNS_1AEl",
     ("a", "a<Streamed, nv_bfloat16>")),
    ("matrix_kernel", ("", "matrix")),
])
def test_names_of_kernels(name, title):
    assert sass.title_of(name) == title


# --- the kernels ------------------------------------------------------------------------------------------------------

# Kernels that read rows load 16 bytes four times before they use the first, with these exceptions.
FEWER_LOADS = {  # a part of a kernel's name -> how many, and why
    "couple_tokens": (0, "4 bytes a lane, more than 32 of them in flight"),
    "sample_residual": (0, "4 bytes a lane, more than 32 of them in flight"),
    "verify_by_rule": (0, "4 bytes a lane, more than 32 of them in flight"),
    "frontier": (0, "it reads scores, no rows"),
    "verify_by_seeds<Streamed>": (2, "the compiler has no registers for more"),
    "verify_logits<Streamed>": (3, "the compiler has no registers for more"),
}
SPILLING = {"guided_probs<Held>": 16}  # bytes of a stack, so that a multiprocessor has registers for two blocks
ROWS = {"couple_tokens", "draft_children", "draft_frontier", "draw_children", "draw_tokens", "expand_tree",
        "guided_probs", "neighborhood_sum", "sample_residual", "token_log_probs", "verify_chain", "verify_logits",
        "verify_tree"}


@pytest.fixture(scope="module")
def library():
    """The counts of the library, and the compiler that made it."""
    if "sm_90" not in cuda_build().name.split("-"):
        pytest.skip("needs a library for sm_90")
    return sass.read_library()


def test_no_kernel_uses_local_memory(library):
    assert not [title for kernels in library[1].values() for title, kernel in kernels.items()
                if kernel["stack"] > SPILLING.get(title, 0) or title not in SPILLING and "local" in kernel]


def test_rows_are_read_with_four_loads_in_flight(library):
    def least(title):
        return min((loads for part, (loads, _) in FEWER_LOADS.items() if part in title), default=4)

    assert not {title: kernel["wide_in_flight"] for op in ROWS for title, kernel in library[1][op].items()
                if kernel["wide_in_flight"] < least(title)}


def above(bounds: dict, counted: dict) -> list[str]:
    """The numbers of a kernel that are worse than their bounds."""
    return [f"{name} is {counted[name]}, the bound is {bound}" for name, bound in bounds.items()
            if (counted[name] < bound if name == "wide_in_flight" else counted[name] > bound)]


def test_no_count_is_above_its_bound(library):
    compiler, found = library
    results = json.loads(sass.RESULTS.read_text())
    if compiler != results["compiler"]:
        pytest.skip(f"the bounds are for nvcc {results['compiler']}, this is {compiler}")
    write = "if that is right: python -m benchmarks.sass --bounds"
    assert {op: sorted(kernels) for op, kernels in results["kernels"].items()} == {
        op: sorted(kernels) for op, kernels in found.items()}, write
    worse = [f"{title}: {line}" for op, kernels in found.items() for title, kernel in kernels.items()
             for line in above(results["kernels"][op][title], machine_code.bounds_of(kernel))]
    assert not worse, f"{worse}, {write}"


@pytest.mark.skipif(not NVCC, reason="needs nvcc")
@pytest.mark.parametrize("old, new, broken", [
    ("kInFlight = 4", "kInFlight = 1", "single_loads"),
    ("    f(v, p.x);", "    f(v, p.x / threads);", "reciprocals_in_loops"),
    ("int64_t{threads}, p[j]);", "int64_t{threads}, p[(j + i) & 3]);", "local"),
])
def test_a_real_kernel_breaks_its_bounds(old, new, broken, tmp_path):
    shutil.copytree(CSRC, tmp_path / "csrc")
    header, built = tmp_path / "csrc/cuda/block.cuh", tmp_path / "neighborhood_sum.o"
    assert header.read_text().count(old) == 1
    header.write_text(header.read_text().replace(old, new))
    subprocess.run([NVCC, "-O3", "-std=c++17", "-fmad=false", "-w", "-gencode", f"arch=compute_90,code={sass.ARCH}",
                    "-DSPECVIS_CUDA", f"-I{tmp_path}", "-c", tmp_path / "csrc/cuda/neighborhood_sum.cu", "-o", built],
                   check=True)
    kernel, = sass.read_library(built)[1]["neighborhood_sum"].values()
    held = json.loads(sass.RESULTS.read_text())["kernels"]["neighborhood_sum"]["neighborhood_sum"]
    assert broken in {line.partition(" ")[0] for line in above(held, machine_code.bounds_of(kernel))}


# --- how often it runs ------------------------------------------------------------------------------------------------

def test_instructions_that_run():
    """A loop over an array is unrolled twice, in a function with two calls, one of which never runs."""
    def at(*places):
        return "\n".join(f'\t//## File "/csrc/{file}", line {line} inlined at' for file, line in places)

    def code(*instructions):
        return "\n".join(f"        /*0000*/                   {instruction} ;" for instruction in instructions)

    kernel, loop, unused = ("a.cu", 1), (("b.cuh", 7), ("a.cu", 2)), (("b.cuh", 7), ("a.cu", 9))
    listing = "\n".join([
        '\t.section\t.text.k,"ax",@progbits', "        .type           k,@function",
        at(kernel), code("MOV R0, R1"),
        at(*unused), code("LDG.E R4, [R2]", "DADD R4, R4, R4"), at(("d.h", 5), *unused), code("DADD R4, R4, R4"),
        ".L_x_0:", at(*loop), code("LDG.E R4, [R2]", "LDG.E R5, [R2]", "F2I.S64.TRUNC R6, R4"),
        at(("c.h", 3), *loop), code("DADD R6, R6, R6"),
        at(kernel), code("@P0 BRA `(.L_x_0)", "EXIT")])
    routine, = machine_code.parse(listing)["k"]
    stacks = executed.lines_of(listing)["k"]
    assert stacks[1] == unused and stacks[4] == loop and stacks[7] == (("c.h", 3), *loop)
    threads = 64
    lines = Counter({kernel: threads, ("a.cu", 2): threads, ("a.cu", 9): 0, ("b.cuh", 7): threads * 10, ("c.h", 3): 32,
                     ("d.h", 5): 0})
    counts = executed.instructions_run(routine, stacks, lines, threads / 32)
    # of two warps: 5 rounds each of two loads and a conversion; c.h once; the code of a.cu once
    assert counts == {"instructions": 10 * 3 + 1 + 3 * 2, "conversions_64": 10, "fp64": 1}


def test_a_request_runs_on_its_share_as_in_a_batch():
    """As many threads of each kernel. In a process of its own: this one may have loaded the emulation."""
    program = """if True:
        import torch
        from benchmarks import bounds, executed

        def threads(B, N, share):
            with bounds.share_of(share):
                functions = executed.runs_of("draw_tokens", (B, N, 4096, torch.float32, True))[1]
            return executed.threads_of(functions)["draw_tokens_kernel", "Held"]

        for B, N in ((8, 10), (64, 1)):
            assert threads(B, N, 1) == B * threads(1, N, B) > 0
        assert threads(1, 10, 8) < threads(1, 10, 1)"""
    subprocess.run([sys.executable, "-c", program], cwd=sass.ROOT, check=True)


@pytest.mark.parametrize("B, parts, bound, limit", [
    (1, {"memory_us": 0.0, "instructions_us": 0.13}, 1.5, "launch"),     # 1000 / 4 cycles on the one multiprocessor
    (64, {"memory_us": 0.04, "instructions_us": 0.13}, 1.5, "launch"),   # on 64 of them
    (1320, {"memory_us": 0.78, "instructions_us": 1.26}, 2.6, "launch"),
    (6600, {"memory_us": 3.91, "instructions_us": 6.31}, 7.6, "instructions"),
])
def test_bounds(B, parts, bound, limit):
    row = bounds.bound("tree_links", "tree_links", (B, 60), B, {"blocks": 1, "instructions": 1000}, [396], {})
    assert {name: row[name] for name in parts} == parts and (row["bound_us"], row["limit"]) == (bound, limit)
    assert row["bytes"] == B * 60 * 24 and row["chain_us"] == 0.2 and row["conversions_us"] == row["fp64_us"] == 0
