"""exp, log and Gumbel noise in float32, bit for bit as in specvis_kernels/_numbers.py and noise.py."""
import triton
import triton.language as tl

GUMBEL_STREAM = tl.constexpr(9)


@triton.jit
def exp(x):
    """exp(x) of float32 x <= 0, to about one unit in the last place; 0 below -87."""
    clamped = tl.where(x < -100.0, -100.0, x)
    shifted = clamped * 1.44269504 + 12582912.0  # 1.5 * 2**23
    n = shifted - 12582912.0
    r = (clamped - n * 0.693359375) + n * 2.12194440e-4
    y = r * 1.9875691500e-4 + 1.3981999507e-3
    y = y * r + 8.3334519073e-3
    y = y * r + 4.1665795894e-2
    y = y * r + 1.6666665459e-1
    y = y * r + 5.0000001201e-1
    y = (y * r) * r + r + 1.0
    power = ((shifted.to(tl.int32, bitcast=True) - 0x4B400000 + 127) << 23).to(tl.float32, bitcast=True)  # 2**n
    return tl.where(x < -87.0, 0.0, y * power)


@triton.jit
def split(x):
    """x = mantissa * 2**exponent, with the mantissa within [sqrt(1/2), sqrt(2))."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23
    return exponent, (bits - (exponent << 23)).to(tl.float32, bitcast=True)


@triton.jit
def log_of_parts(exponent, r):
    """log((1 + r) 2**exponent)."""
    y = r * 7.0376836292e-2 - 1.1514610310e-1
    y = y * r + 1.1676998740e-1
    y = y * r - 1.2420140846e-1
    y = y * r + 1.4249322787e-1
    y = y * r - 1.6668057665e-1
    y = y * r + 2.0000714765e-1
    y = y * r - 2.4999993993e-1
    y = y * r + 3.3333331174e-1
    n = exponent.to(tl.float32)
    z = r * r
    y = (y * r) * z
    y = y + n * -2.12194440e-4
    y = y - z * 0.5
    return (r + y) + n * 0.693359375


@triton.jit
def log(x):
    """log(x) of positive, normal float32, to about one unit in the last place."""
    exponent, mantissa = split(x)
    return log_of_parts(exponent, mantissa - 1.0)


@triton.jit
def log1p_of_negative(v):
    """log(1 - v) of float32 v in (0, 1 - 2**-24]."""
    exponent, mantissa = split(1.0 - v)
    return log_of_parts(exponent, tl.where(exponent == 0, -v, mantissa - 1.0))


@triton.jit
def to_gumbel(words):
    """Words (uint32) -> standard Gumbel noise."""
    v = ((words >> 1).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10  # 2**-31
    return -log(-log1p_of_negative(tl.minimum(v, 0.999999940395355224609375)))  # 1 - 2**-24


@triton.jit
def gumbel_noise(seed, position, first, COUNT: tl.constexpr):
    """The noise of ids first .. first + COUNT - 1; both are multiples of four, and an id is below 2**32.

    A block of Philox has the words of four ids, so each is made once.
    """
    blocks = (first // 4 + tl.arange(0, COUNT // 4)).to(tl.uint32)
    zero = blocks * 0
    w0, w1, w2, w3 = tl.philox(seed, blocks, zero + position.to(tl.uint32), zero + GUMBEL_STREAM, zero)
    return to_gumbel(tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [COUNT]))
