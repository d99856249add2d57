"""What the plugins for vLLM and SGLang share: which function of a server is replaced, and the proof that ours runs."""
import functools
import importlib
import logging
from collections.abc import Callable

from ._versions import versions


def place_of(decoder: str, target: str) -> tuple[object, str]:
    """The module or class in which the last name of `target` is set, and that name. "a.b:C.f" is f of class C of a.b.
    Raises RuntimeError if this version of the decoder has no such name."""
    module, _, path = target.partition(":")
    *owners, name = path.split(".")
    try:
        place = functools.reduce(getattr, owners, importlib.import_module(module))
        getattr(place, name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise RuntimeError(f"{decoder} must have {target}, which specvis_kernels replaces or calls, got: {error} "
                           f"({versions(decoder)})") from error
    return place, name


def counted(decoder: str, target: str, function: Callable) -> Callable:
    """`function`, which counts its calls in `num_calls` and says in the log of `decoder` at the first one that it runs.

    The name of the logger begins with the decoder's, whose handlers show it.
    """
    @functools.wraps(function)
    def call(*args, **kwargs):
        call.num_calls += 1
        if call.num_calls == 1:
            logging.getLogger(f"{decoder}.specvis_kernels").info("%s is the one of specvis_kernels", target)
        return function(*args, **kwargs)

    call.num_calls = 0
    return call


def check_own(decoder: str, target: str, function: Callable, packages: tuple[str, ...] = ()) -> None:
    """Raise RuntimeError unless the decoder itself defines `function`: two plugins cannot replace it both.

    packages: the decoder's own, if it has several
    """
    module = getattr(function, "__globals__", {}).get("__name__", type(function).__module__)
    if module.partition(".")[0] not in (packages or (decoder,)):
        raise RuntimeError(f"{target} must be {decoder}'s own function, got one of {module}: another plugin has "
                           f"replaced it. {decoder.upper()}_PLUGINS names the plugins that {decoder} loads: leave one "
                           "of the two out")


def replace(decoder: str, functions: dict[str, Callable]) -> list[Callable]:
    """Set these functions, counted, in place of the decoder's, each at its target. Returns the decoder's own. Raises
    RuntimeError if this version lacks one of them, or another plugin has replaced it: then none is replaced here."""
    places = [place_of(decoder, target) for target in functions]
    own = [getattr(place, name) for place, name in places]
    for target, function in zip(functions, own):
        check_own(decoder, target, function)
    for (place, name), (target, function) in zip(places, functions.items()):
        setattr(place, name, counted(decoder, target, function))
    return own
