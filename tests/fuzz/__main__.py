"""python -m tests.fuzz: hostile inputs for every op, for a number of minutes."""
import argparse
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

from tests.fuzz import sanitized, workers


def arguments():
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="how long")
    parser.add_argument("--seed", type=int, default=0, help="the number of the first case")
    parser.add_argument("--op", help="this op only")
    parser.add_argument("--case", type=int, help="this case of the op only: its arguments are shown")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--sanitized", action="store_true",
                        help="with the address and undefined behaviour sanitizers in C++ and emulated CUDA kernels")
    parser.add_argument("--json", type=Path, help="where to write what was run and found")
    given = parser.parse_args()
    if given.case is not None and given.op is None:
        parser.error("--case needs --op")
    if given.minutes <= 0 or given.workers < 1:
        parser.error(f"--minutes and --workers must be positive, got {given.minutes} and {given.workers}")
    return parser, given


def main():
    parser, given = arguments()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not given.sanitized:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    environment = sanitized.prepare() if given.sanitized else {}
    from tests import fuzz
    from tests.fuzz import cases
    if given.op is not None and given.op not in cases.ops():
        parser.error(f"--op must be one of {', '.join(cases.ops())}, got {given.op}")
    if given.case is not None and not given.sanitized:
        fuzz.setup(False)
        return one_case(given.op, given.case)
    ops = [given.op] if given.op else cases.ops()
    first, minutes, count = given.seed, given.minutes, given.workers
    if given.case is not None:
        first, minutes, count = given.case, 1e-9, 1
    totals = workers.run(ops, first, minutes, count, given.sanitized, environment, lambda text: print(text, flush=True))
    print(totals.table())
    print(f"{len(totals.found)} found in {totals.seconds:.0f} s, cases from {first} on")
    if given.json:
        from benchmarks import harness
        given.json.write_text(harness.text_of(summary(totals, given)) + "\n")
    return 1 if totals.found else 0


def one_case(op, number):
    from tests.fuzz import cases, check
    case = cases.make(op, number)
    print(case)
    found = check.check(case)
    for finding in found:
        workers.show_finding(asdict(finding), print)
    print(f"{len(found)} found")
    return 1 if found else 0


def summary(totals, given):
    root = Path(__file__).parent.parent.parent
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True).stdout.strip()
    rows = {op: {backend: {"rows": totals.rows[op][backend], "cases": totals.cases[op][backend]}
                 for backend in sorted(totals.rows[op])} for op in sorted(totals.rows)}
    return {"revision": revision, "date": time.strftime("%Y-%m-%d"), "sanitized": given.sanitized,
            "seconds": round(totals.seconds), "workers": given.workers,
            "total": {name: {"rows": rows, "cases": cases} for name, (rows, cases) in totals.of_backends().items()},
            "first": given.seed, "last": totals.last, "ops": rows,
            "found": totals.found}


if __name__ == "__main__":
    sys.exit(main())
