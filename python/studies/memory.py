"""How much memory the decoding of a picture takes."""
import gc
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from specvis.cli.discrete_study import DiscreteStudy, PictureRun
from specvis.cli.study import Job, NotWhole, read_json
from specvis.decoding.methods import Method
from specvis.files import write_whole

STEPS = 12  # of the decoding that is looked at: caches have their full size from the first
SECOND_TIME = "second time"  # a mark in the profile


@dataclass(frozen=True)
class Memory(Job):
    """The most bytes that the tensors of one picture take between operations, in the first steps of its decoding."""

    method: Method
    temperature: float = 1.0
    suffix = "json"
    title = PictureRun.title

    def cost(self, study: DiscreteStudy) -> float:
        return 5.0

    def make(self, study: DiscreteStudy, progress: Callable[[float], None] = lambda share: None) -> None:
        write_whole(study.path(self), json.dumps({"bytes": self.peak(study)}) + "\n")
        progress(1)

    def bytes(self, study: DiscreteStudy) -> int:
        """The bytes of all tensors together, without the model's weights."""
        def read(path: Path) -> int:
            found = read_json(path)
            if not isinstance(found.get("bytes"), int):
                raise NotWhole(f"{path} must hold a number of bytes")
            return found["bytes"]

        return study.read_or_make(study.path(self), read, lambda: self.make(study))

    def peak(self, study: DiscreteStudy) -> int:
        """`bytes`, measured now."""
        def decode_some_steps() -> None:
            steps = iter(range(STEPS))

            def stop_after_steps(_) -> None:
                if next(steps, None) is None:
                    raise StopDecoding

            with suppress(StopDecoding):
                study.pipeline.tokens(study.prompts_of(0, 1), self.method, study.sampling_of(0, 1, self.temperature),
                                      stop_after_steps)

        if (device := study.pipeline.device).type == "cuda":
            decode_some_steps()  # weights are packed at the first time, and they do not count
            gc.collect()
            torch.cuda.reset_peak_memory_stats(device)
            allocated = torch.cuda.memory_allocated(device)
            decode_some_steps()
            return torch.cuda.max_memory_allocated(device) - allocated
        # The profiler sees the first time too. It does not know the size of memory that was allocated before, or takes
        # the size of an older profile's tensor at the same address.
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            decode_some_steps()
            gc.collect()
            with torch.profiler.record_function(SECOND_TIME):
                decode_some_steps()
        events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
        second = next(i for i, event in enumerate(events) if event.name() == SECOND_TIME)
        allocated = np.cumsum([event.nbytes() if event.name() == "[memory]" else 0 for event in events])
        return int(allocated[second:].max() - allocated[second])


class StopDecoding(Exception):
    """The wanted number of steps is decoded."""
