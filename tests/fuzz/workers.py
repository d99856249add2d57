"""Many cases in several processes. A process that dies or hangs is a finding too, and a new one takes its place.

A worker prints a line of JSON before and after each case. It takes the op that has had the least time so far;
verification gets three times as much, since it has most rules.
"""
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PATIENCE = 300.0  # seconds that one case may take
TO_START = 1200.0  # and a process before its first one, which may compile


@dataclass
class Totals:
    """The cases that were run, and the findings."""

    rows: dict = field(default_factory=lambda: defaultdict(Counter))   # op -> backend -> rows
    cases: dict = field(default_factory=lambda: defaultdict(Counter))  # op -> backend -> cases
    last: dict = field(default_factory=dict)                           # op -> the largest number of a case
    found: list = field(default_factory=list)
    seconds: float = 0.0

    def add(self, op, number, backends, rows, found):
        self.last[op] = max(number, self.last.get(op, number))
        self.found += found
        for backend in backends:
            self.rows[op][backend] += rows
            self.cases[op][backend] += 1

    def of_backends(self):
        """backend -> (rows, cases)."""
        names = sorted({backend for row in self.rows.values() for backend in row})
        return {name: (sum(row[name] for row in self.rows.values()), sum(row[name] for row in self.cases.values()))
                for name in names}

    def line(self):
        parts = [f"{name} {rows:,} rows in {cases:,} cases ({rows / max(self.seconds, 1):,.0f} a second)"
                 for name, (rows, cases) in self.of_backends().items()]
        return f"{self.seconds:5.0f} s  {'; '.join(parts)}; found {len(self.found)}"

    def table(self):
        names = list(self.of_backends())
        lines = [f"{'op: rows (cases)':22}" + "".join(f"{name:>24}" for name in names)]
        for op in sorted(self.rows):
            lines.append(f"{op:22}" + "".join(f"{f'{self.rows[op][name]:,} ({self.cases[op][name]:,})':>24}"
                                              for name in names))
        total = "".join(f"{f'{rows:,} ({cases:,})':>24}" for rows, cases in self.of_backends().values())
        return "\n".join([*lines, f"{'all':22}{total}"])


def work(ops, numbers, step, seconds, is_sanitized):
    """A worker: cases of these ops, from numbers[op] on, each `step` further."""
    from tests.fuzz import cases, check, setup
    setup(is_sanitized)
    deadline, spent = time.monotonic() + seconds, Counter()
    while True:  # one case at least, as where one is asked for
        op = min(ops, key=lambda op: spent[op] / (3 if op.startswith("verify") else 1))
        number, began = numbers[op], time.monotonic()
        numbers[op] += step
        say({"begin": [op, number]})
        case = cases.make(op, number)
        found = [asdict(finding) for finding in check.check(case)]
        say({"end": [op, number, ["oracle", *case.backends], case.rows, found]})
        spent[op] += max(time.monotonic() - began, 1e-4)
        if time.monotonic() >= deadline:
            return


def say(message):
    print(json.dumps(message), flush=True)


class Worker:
    """A process that runs cases."""

    def __init__(self, settings, environment, messages):
        self.settings, self.environment, self.messages = settings, environment, messages
        self.at = None
        self.start()

    def start(self):
        self.errors, self.since = tempfile.TemporaryFile("w+"), time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.workers", json.dumps(self.settings)], cwd=ROOT, stderr=self.errors,
            stdout=subprocess.PIPE, text=True, env=os.environ | self.environment, start_new_session=True)
        threading.Thread(target=self.read, args=(self.process,), daemon=True).start()

    def read(self, process):
        for line in process.stdout:
            if line.startswith("{"):
                self.messages.put((self, json.loads(line)))
        self.messages.put((self, {"ended": process.wait()}))

    def is_late(self):
        return time.monotonic() - self.since > (PATIENCE if self.at else TO_START)

    def said(self):
        """Its last output; for a sanitizer's report the first lines."""
        self.errors.seek(0)
        text = self.errors.read()
        report = re.search(r"^.*(runtime error|ERROR: AddressSanitizer).*\n(.*\n){0,12}", text, re.M)
        return report[0] if report else text[-1000:]


def run(ops, first, minutes, count, is_sanitized, environment, show=print):
    """Totals of `minutes` minutes in `count` workers. An interruption ends it early."""
    totals, messages, began = Totals(), queue.Queue(), time.monotonic()
    deadline, shown = began + 60 * minutes, began
    workers = [Worker({"ops": ops, "numbers": {op: first + i for op in ops}, "step": count,
                       "seconds": 60 * minutes, "is_sanitized": is_sanitized}, environment, messages)
               for i in range(count)]
    active = {*workers}
    try:
        while active:
            handle_next(messages, totals, active, deadline, show)
            totals.seconds = time.monotonic() - began
            for worker in active:
                if worker.is_late():
                    worker.process.kill()
            if time.monotonic() - shown > 5:
                shown = time.monotonic()
                show(totals.line())
    except KeyboardInterrupt:
        show("interrupted")
    finally:
        for worker in workers:
            worker.process.kill()
    totals.seconds = time.monotonic() - began
    return totals


def handle_next(messages, totals, active, deadline, show):
    try:
        worker, message = messages.get(timeout=1)
    except queue.Empty:
        return
    if "begin" in message:
        worker.at, worker.since = message["begin"], time.monotonic()
    if "end" in message:
        op, number, backends, rows, found = message["end"]
        worker.at = None
        totals.add(op, number, backends, rows, found)
        for finding in found:
            show_finding(finding, show)
    if "ended" in message and worker in active:
        active.discard(worker)
        if message["ended"] == 0:
            return
        op, number = worker.at or ("", -1)
        how = "took too long" if worker.is_late() else f"ended with {message['ended']}"
        finding = {"op": op, "number": number, "backend": "process", "what": f"the process {how}: {worker.said()}"}
        totals.found.append(finding)
        show_finding(finding, show)
        if worker.at and time.monotonic() < deadline:  # go on after the case
            numbers, step = worker.settings["numbers"], worker.settings["step"]
            for name in numbers:
                missed = max(totals.last.get(name, -1) + 1 - numbers[name], 0)
                numbers[name] += -(-missed // step) * step
            numbers[op] = max(numbers[op], number + step)
            worker.settings["seconds"] = deadline - time.monotonic()
            worker.at = None
            worker.start()
            active.add(worker)


def show_finding(finding, show):
    show(f"\nFOUND by --op {finding['op']} --case {finding['number']} on {finding['backend']}: {finding['what']}")


if __name__ == "__main__":
    work(**json.loads(sys.argv[1]))
