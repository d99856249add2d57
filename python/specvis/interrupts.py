"""What Ctrl-C does to a process. Nothing heavy is imported here: this is imported first."""
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED = 128 + signal.SIGINT  # the exit status, as shells count it


def end_quietly(*_) -> None:
    """End the process at once. It is used before anything has begun that needs to be finished."""
    os._exit(INTERRUPTED)


@contextmanager
def answered_by(handler: Callable, in_place_of: Callable) -> Iterator[None]:
    """Within, Ctrl-C calls `handler`, if it would call `in_place_of` otherwise. Any other handler stays."""
    replaces = (threading.current_thread() is threading.main_thread()  # no other thread may set it
                and signal.getsignal(signal.SIGINT) is in_place_of)
    if replaces:
        signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        if replaces:
            signal.signal(signal.SIGINT, in_place_of)


def quiet():
    """Within, Ctrl-C ends the process without a word: during an import it would print a traceback."""
    return answered_by(end_quietly, signal.default_int_handler)


def raising():
    """Within, Ctrl-C raises KeyboardInterrupt again, although `quiet` is around."""
    return answered_by(signal.default_int_handler, end_quietly)
