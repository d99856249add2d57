"""Chameleon, Emu3, Janus and GLM-Image in tiny sizes with random weights; in memory, and as folders that users have."""
import json
from pathlib import Path

import pytest
import torch

from specvis.models.chameleon_vq import ChameleonVQ
from specvis.models.kl_vae import KLConfig
from specvis.models.transformers import Chameleon, Emu3, GLMImage, JanusPro
from specvis.models.transformers_eagle import TransformersEagleHead

transformers = pytest.importorskip("transformers")  # which skips the tests of who imports this
C, S = 10, 7
TEXT = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "initializer_range": 0.25, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VQ = {"embed_dim": 4, "latent_channels": 4, "base_channels": 32, "channel_multiplier": [1, 1], "num_res_blocks": 1}
HAS_GLM_IMAGE = hasattr(transformers, "GlmImageForConditionalGeneration")  # not in transformers 4
FAMILIES = ("anole", "lumina", "emu3", "janus", *["glm"] * HAS_GLM_IMAGE)
needs_glm_image = pytest.mark.skipif(not HAS_GLM_IMAGE, reason="needs a transformers with GLM-Image")
GRIDS = [[1, 2, 4], [1, 2, 3]]  # GLM-Image's picture and preview
# special tokens of the processors by their names there; ids below the codes'
SPECIAL = {"pad_token": ("<pad>", 0), "bos_token": ("<s>", 1), "eos_token": ("</s>", 2), "image_token": ("<image>", 3),
           "unk_token": ("<unk>", 4), "boi_token": ("<|image start|>", 7), "eoi_token": ("<|image end|>", 19),
           "image_wrapper_token": ("<|image token|>", 26), "eof_token": ("<|extra_201|>", 27),
           "grid_bos_token": ("<grid>", 28), "grid_eos_token": ("</grid>", 29)}
WORDS = {"a": 20, "red": 21, "heart": 22, "zebra": 23, "at": 24, "noon": 25}
TEMPLATE = "{% for m in messages %}{{ m['content'][0]['text'] }}{% endfor %}"


def chameleon_model(seed, codes=C):
    torch.manual_seed(seed)
    last = 4 + codes - 1
    names = {"<image>": 3, **{f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z": last - code
                              for code in range(codes)}}  # not in order
    return transformers.ChameleonForConditionalGeneration(transformers.ChameleonConfig(
        **TEXT, vocab_size=8900, vocabulary_map=names, vq_config=VQ | {"num_embeddings": codes})).eval()


def emu3_model(seed):
    torch.manual_seed(seed)
    names = {"<image>": 3, "<|extra_200|>": 5, **{f"<|visual token {code:06d}|>": 8 + code for code in range(C)}}
    vq = VQ | {"codebook_size": C, "attn_resolutions": [], "hidden_size": 32}
    return transformers.Emu3ForConditionalGeneration(transformers.Emu3Config(
        text_config=TEXT | {"vocab_size": 40}, vocabulary_map=names, vq_config=vq)).eval()


def janus_model(seed):
    torch.manual_seed(seed)
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "image_size": 16, "patch_size": 4,
              "projection_dim": 64, "depth": 1, "num_image_tokens": 16}
    vq = VQ | {"num_embeddings": C, "projection_dim": 64, "image_token_embed_dim": 64, "initializer_range": 0.7}
    model = transformers.JanusForConditionalGeneration(transformers.JanusConfig(
        text_config=TEXT | {"vocab_size": 40, "model_type": "llama"}, vision_config=vision, vq_config=vq)).eval()
    model.model.generation_head.vision_head.weight.data *= 4
    config = model.generation_config
    config.bos_token_id, config.pad_token_id, config.generation_kwargs = 1, 0, {"boi_token_id": 7}
    return model


def glm_image_model(seed):
    """A picture begins with id 7 and ends with id 11; the head has one id more than the two and the codes need."""
    torch.manual_seed(seed)
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [3, 2, 3]}
    vision = {"hidden_size": 8, "depth": 1, "num_heads": 1, "image_size": 16, "patch_size": 4, "intermediate_size": 8}
    return transformers.GlmImageForConditionalGeneration(transformers.GlmImageConfig(
        text_config=TEXT | {"vocab_size": 40, "vision_vocab_size": 13, "rope_parameters": rope, "eos_token_id": 11},
        vision_config=vision, vq_config={"embed_dim": 4, "latent_channels": 8, "num_embeddings": C},
        image_token_id=3, image_start_token_id=7, image_end_token_id=11)).eval()


def target_of(family, seed=0):
    """A target of its own with a small grid."""
    return {"anole": lambda: Chameleon(chameleon_model(seed), S, (3, 4), [1, 7]),
            "lumina": lambda: Chameleon(chameleon_model(seed), S, (2, 4), [8197, 8805, 8806], 8803),
            "emu3": lambda: Emu3(emu3_model(seed), S, (3, 4), [1, 30, 31, 32, 7]),
            "janus": lambda: JanusPro(janus_model(seed), S),
            "glm": lambda: GLMImage(glm_image_model(seed), S, GRIDS)}[family]()


def saved(family: str, folder: Path, seed: int = 0) -> Path:
    """A folder with a tiny model of one of the command line's families, and what reads its prompts."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = {"emu3": emu3_model, "janus-pro": janus_model, "glm-image": glm_image_model}.get(family, chameleon_model)
    parts = ("vision_language_encoder", "processor") if family == "glm-image" else ("", "")
    model(seed).save_pretrained(folder / parts[0])
    if family == "janus-pro":  # transformers does not write the last one
        settings = {"bos_token_id": 1, "pad_token_id": 0, "generation_kwargs": {"boi_token_id": 7}}
        (folder / "generation_config.json").write_text(json.dumps(settings))
    vocabulary = WORDS | dict(SPECIAL.values())
    tokenizer = Tokenizer(models.WordLevel(vocabulary, SPECIAL["unk_token"][0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    usual = ("pad_token", "bos_token", "eos_token", "unk_token")
    texts = {name: text for name, (text, _) in SPECIAL.items()}
    if family == "glm-image":  # its processor begins an image with bos_token
        texts["bos_token"] = texts["boi_token"]
    kinds = {} if HAS_GLM_IMAGE else {"emu3": "GPT2TokenizerFast", "janus-pro": "LlamaTokenizerFast"}
    tokenizer = getattr(transformers, kinds.get(family, "PreTrainedTokenizerFast"))(
        tokenizer_object=tokenizer, **{name: texts[name] for name in usual},
        extra_special_tokens={name: text for name, text in texts.items() if name not in usual})
    if family in ("anole", "lumina-mgpt"):
        tokenizer.save_pretrained(folder)
        return folder
    name = {"emu3": "Emu3", "janus-pro": "Janus", "glm-image": "GlmImage"}[family]
    images = getattr(transformers, f"{name}ImageProcessor")()
    processor = getattr(transformers, f"{name}Processor")(images, tokenizer, chat_template=TEMPLATE)
    processor.save_pretrained(folder / parts[1])
    return folder


def saved_vqgan(file: Path, codebook: torch.Tensor) -> None:
    """A small VQ-GAN of this codebook under the official names, with what the official file has beside the decoder."""
    torch.manual_seed(3)
    codes, channels = codebook.shape
    vq = ChameleonVQ(KLConfig(32, (1, 1, 1, 1, 1), 1, channels), codes, channels)
    vq.quantize.embedding.weight.data = codebook.clone()
    others = {"encoder.conv_in.weight": torch.zeros(32, 3, 3, 3), "quant_conv.weight": torch.zeros(4, 4, 1, 1),
              "loss.logvar": torch.zeros(())}
    torch.save({"state_dict": vq.state_dict() | others, "global_step": 7}, file)


def released(target, folder, rows=None, **changes):
    """A head with random weights as LANTERN has released its own. rows: of its norms of queries and keys"""
    torch.manual_seed(5)
    tensors = TransformersEagleHead(target).state_dict() | {"embed_tokens.weight": target.embed.weight.detach().clone()}
    for name in [name for name in tensors if rows and "_norm.weight" in name or rows and "_norm.bias" in name]:
        tensors[name] = torch.randn(rows, tensors[name].shape[-1])
    tensors = {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps({"model_type": "chameleon", "num_hidden_layers": 1}))
    return folder
