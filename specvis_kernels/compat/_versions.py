"""The versions of other decoders with which the modules here are tested, and the error for another version."""
import functools
import re
import sys
from importlib.metadata import PackageNotFoundError, version

TESTED = {"transformers": ("4.57.6", "5.19.0", "5.20.2", "5.23.0", "5.24.0"), "vllm": ("0.33.0",),
          "sglang": ("0.5.23",)}


def installed(decoder: str) -> str | None:
    """Its version, also where it is imported from a source folder."""
    try:
        return version(decoder)
    except PackageNotFoundError:
        return getattr(sys.modules.get(decoder), "__version__", None)


def is_older(decoder: str, major: int, minor: int) -> bool:
    """Whether an older version is installed than this one."""
    number = re.match(r"(\d+)\.(\d+)", installed(decoder) or "")
    return bool(number) and (int(number[1]), int(number[2])) < (major, minor)


def versions(decoder: str) -> str:
    """E.g. "vllm 0.34.0 is installed, tested with 0.33.0"."""
    number = installed(decoder)
    return f"{decoder} {f'{number} is' if number else 'is not'} installed, tested with {', '.join(TESTED[decoder])}"


def called_by(decoder: str):
    """For functions that `decoder` calls: the error of a call with unknown arguments names both versions."""
    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                if error.__traceback__.tb_next is not None:  # raised inside the function
                    raise
                raise TypeError(f"{error} ({versions(decoder)})") from None
        return call
    return decorate
