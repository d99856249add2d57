"""How kernels are compiled: once for a run, not again when a tree or a window changes its size."""
import inspect

import triton
import triton.language as tl


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own function takes some microseconds of each call."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least one that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def kernel(*fixed):
    """As triton.jit, for a kernel that is compiled once for all values and addresses of its arguments, except `fixed`.

    triton.jit alone compiles anew for an integer that is 1, one that 16 divides, and a tensor that starts at a multiple
    of 16 bytes. In the middle of decoding that takes seconds. `fixed` names arguments that do not change in a run and
    that wide loads need: the vocabulary's size, and tensors with rows of this size. A constexpr must not change either.
    """
    def compiled_once(function):
        changing = [name for name, parameter in inspect.signature(function).parameters.items()
                    if name not in fixed and parameter.annotation is not tl.constexpr]
        return triton.jit(function, do_not_specialize=changing)
    return compiled_once
