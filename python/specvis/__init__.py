"""Speculative decoding of images: models, drafters, decoding loops, command line and training.

    pipeline = specvis.Pipeline.load()
    decoded = pipeline.tokens(["fluent-3d red heart"], "lantern:delta=0.1", specvis.Sampling.of([0]))
    pipeline.pictures(decoded.tokens)[0].save("heart.png")
    print(decoded.tau)  # tokens per target forward

`Pipeline` decodes discrete tokens, `MARPair` continuous ones. METHODS are the recipes by name, and `parse_method` reads
what the command line takes. The loops themselves, for models of your own, are `decode` and `speculative_decode` (see
`specvis.models.interface`), and for continuous tokens `parallel_decode` and `continuous_decode`.
"""
from .decoding.continuous import ContinuousSampling, KnownTokens, continuous_decode, parallel_decode
from .decoding.discrete import decode, speculative_decode
from .decoding.methods import METHODS, ContinuousMethod, Method, method, parse_method
from .decoding.sampling import Sampling
from .pipelines.discrete import Pipeline
from .pipelines.mar import MARPair

__all__ = [
    "METHODS", "ContinuousMethod", "ContinuousSampling", "KnownTokens", "MARPair", "Method", "Pipeline", "Sampling",
    "continuous_decode", "decode", "method", "parallel_decode", "parse_method", "speculative_decode",
]
