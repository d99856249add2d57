"""The window of Jacobi decoding where it is "auto": as many guesses as are fastest here, by a short timing."""
import math
from collections.abc import Callable

import numpy as np

# The windows that "auto" chooses from, 0 is plain decoding, and the shipped model's tokens per forward with each, over
# 32 pictures. `specvis compare --methods vanilla,jacobi:window=4 -n 32 --singles 0` measures one of them.
TAU = {0: 1.0, 1: 1.39, 2: 1.66, 3: 1.9, 4: 2.11, 6: 2.44, 8: 2.71, 12: 3.37, 16: 3.84, 24: 4.29, 32: 4.59}
TIMED = (0, 0, 0, 0, 2, 2, 8, 8, 32)  # the windows of which a step is timed in each round, short steps oftener
ROUNDS = 5                            # the first ones allocate, compile and capture
GAIN = 1.15                           # a window must promise that many times the speed of a step without guesses:
                                      # the baseline's own step is quicker than that one, and images differ


def fastest_window(seconds: dict[int, float]) -> int:
    """The window with the most tokens a second, by TAU and the seconds of a step with some windows; 0 unless it
    promises GAIN."""
    speeds = {window: tau / float(np.interp(window, list(seconds), list(seconds.values())))
              for window, tau in TAU.items() if window <= max(seconds)}
    best = max(speeds, key=speeds.get)
    return best if speeds[best] > GAIN * speeds[0] else 0


def timed_window(seconds_of: Callable[[int], float], num_tokens: int) -> int:
    """The fastest window for images of that many tokens. seconds_of: (window) -> the seconds of a step with it"""
    seconds = {}
    for windows in (TIMED[:-1], TIMED[-1:]):
        for window in windows * ROUNDS:  # in rounds, so that the machine's other work slows all windows alike
            window = min(window, num_tokens)
            seconds[window] = min(seconds.get(window, math.inf), seconds_of(window))
        if not fastest_window(seconds):  # a wider window does not pay either
            break
    return fastest_window(seconds)
