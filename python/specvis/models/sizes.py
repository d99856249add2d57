"""How large a model may be. What is beyond, or no size at all, is an error before memory is taken.

The limits are far above published models (in brackets). They hold for what a config makes by itself, the number of
layers or a table of positions; whether the weights are as large as the config says, their files decide.
"""
from dataclasses import fields
from typing import get_args

WIDTH = 2**16                    # of a layer, in numbers [4096]
MAX_NUMBER = (2 - 2.0**-23) * 2.0**127  # numbers are kept in float32
LIMITS = {
    "layers": 1024, "encoder_layers": 1024, "decoder_layers": 1024, "diffusion_blocks": 1024,  # [48]
    "residual_blocks": 64,       # [2]
    "heads": 1024,               # [40]
    "vocabulary": 2**19, "codebook_size": 2**19,  # what the ops take [16384]
    "grid": 256, "tokens": 2**16,  # [32 x 32]
    "condition_tokens": 4096, "buffer": 4096,  # [120]
    "classes": 2**20,            # [1000]
    "patch": 64,                 # [1]
    "multipliers": 64,           # [4]
    "mlp_ratio": 1024,           # [4]
    "num_train_timesteps": 100_000, "num_sampling_steps": 100_000,  # [1000]
}
MAX_LEVELS = 10                  # of an autoencoder [5]: each halves the picture's sides
MAX_WORDS = 2**20                # of prompts [about 2000]
MAY_BE_ZERO = ("dropout", "norm_eps", "encoder_layers", "decoder_layers", "diffusion_blocks")


def check_sizes(config) -> None:
    """ValueError unless each number of a config, a dataclass, is what its field says, and within its limit."""
    for field in fields(config):
        value, types = getattr(config, field.name), get_args(field.type) or (field.type,)
        if value is None and type(None) in types:
            continue
        least = int(field.name not in MAY_BE_ZERO)
        most = LIMITS.get(field.name, MAX_NUMBER if float in types else WIDTH)
        if float in types:
            wanted = "at least 0" if least == 0 else "positive"
            if type(value) not in (int, float) or not (value >= 0 if least == 0 else value > 0) or value > most:
                raise ValueError(f"{field.name} must be a number, {wanted} and at most {most:g}, got {value!r}")
        elif field.name != "multipliers":
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"{field.name} must be a whole number within {least}..{most}, got {value!r}")
        elif not isinstance(value, tuple) or not 1 <= len(value) <= MAX_LEVELS or not all(
                type(one) is int and 1 <= one <= most for one in value):
            raise ValueError(f"{field.name} must be 1 to {MAX_LEVELS} whole numbers within 1..{most}, got {value!r}")
