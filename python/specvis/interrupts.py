"""What Ctrl-C does to a process. Nothing heavy is imported here: this stands before anything else is imported."""
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT  # the exit status, as shells count it


def end_quietly(*_) -> None:
    """End the process at once. For as long as nothing is begun that would have to be left in order."""
    os._exit(INTERRUPTED)


@contextmanager
def answered_by(handler: Callable, in_place_of: Callable) -> Iterator[None]:
    """Within, Ctrl-C calls `handler`. Whatever else than `in_place_of` was to answer it goes on to do so."""
    stands = (threading.current_thread() is threading.main_thread()  # no other one may set it
              and signal.getsignal(signal.SIGINT) is in_place_of)
    if stands:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if stands:
            signal.signal(signal.SIGINT, in_place_of)


def quiet():
    """Within, Ctrl-C ends the process without a word: an import that it broke off would be told by a traceback."""
    return answered_by(end_quietly, signal.default_int_handler)


def raising():
    """Within, Ctrl-C raises KeyboardInterrupt again, although `quiet` stands around."""
    return answered_by(signal.default_int_handler, end_quietly)
