"""Jacobi decoding by the name of a repository:

    model.generate(ids, custom_generate="path/to/jacobi_generate", trust_remote_code=True, window=16, do_sample=True)
"""
from specvis_kernels.compat.transformers import jacobi_generate


def generate(model, **arguments):
    """`model.generate` with these arguments, and with those of `jacobi_generate`: window, grid, guidance, seeds, ..."""
    return model.generate(custom_generate=jacobi_generate, **arguments)
