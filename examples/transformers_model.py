"""A causal language model of transformers, decoded by `jacobi`: the tokens of plain decoding, in fewer forwards.

    python examples/transformers_model.py

Needs `pip install transformers`. The model is tiny and random, and nothing is downloaded. Its vocabulary is mixed: ids
of text, then ids of image codes, then one id that ends each row. Another such model needs only these arguments of
`ImageModel`; for Chameleon, Emu3, Janus-Pro and GLM-Image they are known (docs/families.md).
"""
import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from specvis import Sampling, decode, jacobi_decode, parse_method
from specvis.models.transformers import ImageModel
from specvis_kernels import backends

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--method", default="jacobi:window=16", help="jacobi and its settings, see `specvis methods`")
parser.add_argument("--temperature", type=float, default=1.0)
options = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=16, initializer_range=0.2, attn_implementation="sdpa")
model = LlamaForCausalLM(config).eval().requires_grad_(False)
target = ImageModel(model, ids=range(32, 96), prefix_len=5, grid=(6, 8), null_prompt=[0], newline=96)
if "cpu" in backends("decoder_layers"):
    target.use_decoder_layers()  # on a CPU one op reads every token but the prompt

prompts = [[3, 14, 15], [9, 2, 6, 5, 30], [7, 9, 31, 2, 8]]  # ids; shorter prompts are padded on the left
condition, is_real = target.condition(prompts)
sampling = Sampling.of([0, 1, 2], guidance=1.5, temperature=options.temperature, top_k=20)
method = parse_method(options.method)
baseline = decode(target, condition, is_real, sampling)
decoded = jacobi_decode(target, condition, is_real, sampling, [method] * 3)
print(f"{method.label}: {decoded.tau.mean():.2f} tokens per target forward; "
      f"{(decoded.tokens == baseline.tokens).float().mean():.0%} of the tokens are the baseline's; "
      f"a row of the first image: {target.ids_of(decoded.tokens)[0, :9].tolist()}")
