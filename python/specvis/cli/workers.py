"""Pictures of many prompts drawn by several workers, each a process with a model of its own, on Ray.

The driver gives each worker a small share of the requests, and keeps each picture that comes back. A worker that ends
is replaced. Its unfinished pictures are drawn again, each alone, since one of them may be the reason.
"""
import logging
import os
import queue
import socket
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import ExitStack

import click
import torch

from ..files import first_line
from ..pipelines.invariant import batch_invariant
from ..terminal import printable
from .many import Drawing, Picture, PictureRequest, draw
from .progress import ProgressBar

RETRIES = 2   # a picture whose worker ended is tried again this often
DEATHS = 5    # times the number of workers may end in a row without a picture between them
BATCHES = 4   # the most in a share: the rows of a batch are filled again until a share is at its end


class Worker:
    """The part that runs in a process of its own."""

    def load(self, drawing: Drawing, requests: list[PictureRequest], threads: int) -> tuple[str, str | None]:
        """Load the model and look at all prompts. Returns the name of this process, and an error or None."""
        torch.set_num_threads(threads)
        name, self.settings = f"{os.getpid()} on {socket.gethostname()}", ExitStack()  # until the process ends
        try:
            if drawing.batch_invariant:
                self.settings.enter_context(batch_invariant(drawing.device))
            self.drawing, self.pipeline = drawing, drawing.load(requests)
        except ValueError as error:
            return name, str(error)
        return name, None

    def draw(self, requests: list[PictureRequest]):
        """Yield each picture as soon as it is finished."""
        finished = queue.SimpleQueue()

        def decode():
            try:
                draw(self.pipeline, self.drawing, requests, finished.put)
                finished.put(None)
            except BaseException as error:
                finished.put(error)

        threading.Thread(target=decode, daemon=True).start()
        while (picture := finished.get()) is not None:
            if isinstance(picture, BaseException):
                raise picture
            yield picture


class Seat:
    """A worker as the driver sees it."""

    def __init__(self, actor, pending):
        self.actor = actor
        self.pending = pending  # a reference to its answer, or a generator of references; None: it waits
        self.name = None        # which process it is, once its model is loaded
        self.share = {}         # the requests that it has not finished, by their indices


class Crew:
    """The workers, the waiting requests, and the ones that are given up."""

    def __init__(self, ray, num_workers: int, start: Callable[[], Seat], requests: list[PictureRequest], batch: int):
        self.ray, self.num_workers, self.start, self.batch = ray, num_workers, start, batch
        self.waiting, self.alone = deque(requests), deque()  # alone: those whose worker ended
        self.ends, self.lost, self.deaths = Counter(), {}, 0
        self.seats = [start() for _ in range(num_workers)]

    @property
    def num_loaded(self) -> int:
        return sum(seat.name is not None for seat in self.seats)

    def draw(self, begin: Callable[[], None], keep: Callable[[Picture], None], say: Callable[[str], None]) -> None:
        """Until every request is drawn or given up. ValueError if a worker says that its input is wrong."""
        has_begun = False
        while self.waiting or self.alone or any(seat.share for seat in self.seats):
            self.hand_out()
            pending = {seat.pending: seat for seat in self.seats if seat.pending is not None}
            (ready,), _ = self.ray.wait(list(pending), num_returns=1)
            seat = pending[ready]
            try:
                if seat.name is not None:
                    self.take(seat, keep)
                    continue
                name, wrong = self.ray.get(seat.pending)
            except self.ray.exceptions.RayError as error:
                self.replace(seat, error, say)
                continue
            if wrong:
                raise ValueError(wrong)
            if not has_begun:
                begin()
            has_begun, seat.name, seat.pending = True, name, None

    def hand_out(self) -> None:
        """Give a share to each worker that waits: half of its part of the rest, so that all end together."""
        for seat in self.seats:
            if seat.name is None or seat.pending is not None:
                continue
            if self.waiting:
                size = min(-(-len(self.waiting) // (2 * self.num_workers)), BATCHES * self.batch)
                share = [self.waiting.popleft() for _ in range(size)]
            elif self.alone:
                share = [self.alone.popleft()]
            else:
                break
            seat.share = {request.index: request for request in share}
            seat.pending = seat.actor.draw.remote(share)

    def take(self, seat: Seat, keep: Callable[[Picture], None]) -> None:
        """Keep the picture that the worker has finished, or see that its share is done."""
        try:
            picture = self.ray.get(next(seat.pending))
        except StopIteration:
            seat.pending = None
            return
        del seat.share[picture.request.index]
        self.deaths = 0
        keep(picture)

    def replace(self, seat: Seat, error: Exception, say: Callable[[str], None]) -> None:
        """Let another worker take the place of one that ended, and its requests wait again or be given up."""
        cause = getattr(error, "cause", None)
        reason = f"{type(cause).__name__}: {cause}".splitlines()[0] if cause else "its process ended"
        self.ray.kill(seat.actor)
        self.deaths += 1
        unfinished = list(seat.share.values())
        self.ends.update(request.index for request in unfinished)
        is_hopeless = self.deaths >= DEATHS * self.num_workers
        if is_hopeless:
            unfinished += [*self.waiting, *self.alone, *(r for other in self.seats if other is not seat
                                                         for r in other.share.values())]
            self.waiting.clear()
            self.alone.clear()
        for request in unfinished:
            if is_hopeless or self.ends[request.index] > RETRIES:
                self.lost[request.index] = reason
            else:
                self.alone.append(request)
        if is_hopeless:
            say(f"{self.deaths} workers ended one after the other without a picture: {reason}")
            self.seats = []
            return
        say(f"worker {seat.name or 'that was starting'} is replaced: {reason}")
        self.seats[self.seats.index(seat)] = self.start()


def draw_by_workers(drawing: Drawing, requests: list[PictureRequest], begin: Callable[[], None],
                    keep: Callable[[Picture], None], *, num_workers: int, cpus: float | None,
                    gpus: float | None) -> dict[int, str]:
    """Draw them by `num_workers` workers. `begin` is called when the model and all prompts are known to be right.

    Args:
        cpus: for each worker, as Ray counts them, and as many threads; None: its part of all there are
        gpus: for each worker; None: one if the device is a GPU
    Returns:
        why pictures are given up, by their indices: their workers ended again and again
    Raises:
        ValueError: no Ray, too few CPUs or GPUs, or as `Drawing.load`
        OSError:    Ray does not start
    """
    ray = imported()
    is_ours = not ray.is_initialized()
    try:
        if is_ours:
            try:
                ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as error:  # Ray raises Exception itself where a node does not come up
                raise OSError(f"Ray does not start: {first_line(error)}; the same command tries again, and without "
                              "--workers no Ray is needed") from error
        cpus, gpus = per_worker([node["Resources"] for node in ray.nodes() if node["Alive"]], num_workers, cpus,
                                gpus if gpus is not None else float(drawing.device == "cuda"))
        actor = ray.remote(Worker).options(num_cpus=cpus, num_gpus=gpus)

        def start() -> Seat:
            worker = actor.remote()
            return Seat(worker, worker.load.remote(drawing, requests, max(1, int(cpus))))

        crew, count = Crew(ray, num_workers, start, requests, drawing.batch), 0
        with ProgressBar(len(requests), "picture", drawing.method.label) as progress:
            def then(picture):
                nonlocal count
                keep(picture)
                count += not picture.failed
                progress.update()
                progress.bar.set_postfix_str(f"{crew.num_loaded} of {num_workers} workers")

            def say(line):
                progress.bar.clear()
                click.echo(printable(line), err=True)

            try:
                crew.draw(begin, then, say)
            finally:
                for seat in crew.seats:
                    ray.kill(seat.actor)
        return crew.lost
    finally:
        if is_ours:
            ray.shutdown()


def imported():
    """Ray, which reports nothing home. ValueError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # what later versions do; else it warns
    try:
        import ray
    except ImportError as error:
        raise ValueError('workers must be 0 without Ray: pip install "specvis[ray]"') from error
    return ray


def per_worker(nodes: list[dict], num_workers: int, cpus: float | None, gpus: float) -> tuple[float, float]:
    """How many CPUs and GPUs each worker gets. ValueError if these machines have no place for that many workers."""
    def num_fitting(cpus):
        return sum(int(min(node.get("CPU", 0) / cpus if cpus else num_workers,
                           node.get("GPU", 0) / gpus if gpus else num_workers) + 1e-6) for node in nodes)

    if cpus is None:
        part = int(sum(node.get("CPU", 0) for node in nodes)) // num_workers
        cpus = next((n for n in range(part, 0, -1) if num_fitting(n) >= num_workers), 1)
    if num_fitting(cpus) < num_workers:
        have = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise ValueError(f"workers must be at most {num_fitting(cpus)} of {cpus:g} CPUs and {gpus:g} GPUs each "
                         f"(--cpus-per-worker, --gpus-per-worker) on machines with {have}, got {num_workers}")
    return cpus, gpus
