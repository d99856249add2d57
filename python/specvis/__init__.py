"""Speculative decoding of images: models, drafters, decoding loops, command line and training.

    pipeline = specvis.Pipeline.load()
    decoded = pipeline.tokens(["fluent-3d red heart"], "jacobi", specvis.Sampling.of([0]))
    pipeline.pictures(decoded.tokens)[0].save("heart.png")
    print(decoded.tau)  # tokens per target forward

`Pipeline` decodes discrete tokens, `MARPair` continuous ones. METHODS are the recipes by name, and `parse_method` reads
what the command line takes. The loops themselves, for models of your own, are `decode`, `jacobi_decode` and
`speculative_decode` (see `specvis.models.interface`), and for continuous tokens `parallel_decode` and
`continuous_decode`.
"""
from importlib import import_module

# Each is imported when it is asked for: cli/main.py sets variables before torch reads them, and --help needs no torch.
_HOMES = {
    "decoding.continuous": ("ContinuousSampling", "KnownTokens", "continuous_decode", "parallel_decode"),
    "decoding.discrete": ("decode", "speculative_decode"),
    "decoding.jacobi": ("jacobi_decode",),
    "decoding.methods": ("METHODS", "ContinuousMethod", "Method", "method", "parse_method"),
    "decoding.sampling": ("Sampling",),
    "pipelines.discrete": ("Pipeline",),
    "pipelines.mar": ("MARPair",),
}
__all__ = sorted(name for names in _HOMES.values() for name in names)


def __getattr__(name: str):
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return __all__
