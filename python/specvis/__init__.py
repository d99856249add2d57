"""Speculative decoding of images: models, draft models, decoding loops and command line.

    pipeline = specvis.Pipeline.load()
    decoded = pipeline.tokens(["fluent-3d red heart"], "jacobi", pipeline.sampling(seeds=[0]))
    pipeline.pictures(decoded.tokens)[0].save("heart.png")
    print(decoded.tau)  # tokens per target forward

The picture is the one that `specvis generate --prompt "red heart" --seed 0` draws: `pipeline.sampling` has its numbers.
`Pipeline` decodes discrete tokens, `FamilyPipeline` those of transformers' families, `MARPair` continuous ones. METHODS
are the recipes by name, and `parse_method` reads what the command line takes. The loops themselves, for models of your
own, are `decode`, `jacobi_decode` and `speculative_decode` (see `specvis.models.interface`), and for continuous tokens
`parallel_decode` and `continuous_decode`.
"""
from importlib import import_module

# Each is imported when it is asked for: --help needs no torch.
_HOMES = {
    "decoding.baseline": ("decode",),
    "decoding.continuous": ("continuous_decode", "parallel_decode"),
    "decoding.continuous_state": ("ContinuousSampling", "KnownTokens"),
    "decoding.jacobi": ("jacobi_decode",),
    "decoding.method_parts": ("Acceptance", "DynamicDrafts", "JacobiDrafts", "NoDrafts", "StaticDrafts"),
    "decoding.methods": ("METHODS", "ContinuousMethod", "Method", "method", "parse_method"),
    "decoding.sampling": ("Sampling",),
    "decoding.speculative": ("speculative_decode",),
    "decoding.trees": ("Adaptation",),
    "pipelines.discrete": ("Pipeline",),
    "pipelines.families": ("FamilyPipeline",),
    "pipelines.invariant": ("batch_invariant",),
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
