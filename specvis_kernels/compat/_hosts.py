"""What a model of transformers may be whose tokens are read as a tree: each one beside others that it does not see.

The functions of compat/transformers.py and `ImageModel` of specvis ask this at every decoding.
"""
import inspect

from torch import nn

from ._versions import is_older, versions

MASKED = ("sdpa", "eager")  # attention of transformers that takes a mask of four dimensions
FULL = {"full_attention", "global", "attention"}  # kinds of layers that see all tokens before them
POSITIONS = ("wpe", "embed_positions", "position_embeddings", "positions_embed")  # tables of learned positions
WITHOUT = ("imagegpt", "openai-gpt")  # families that have no cache, or that take any mask for padding
FIRST_RIGHT_CHECKPOINTING = 5, 24  # before it, a model in training mode that checkpoints reads its cache wrongly


def unwrapped(model):
    """The model inside of peft's wrapper, which may have adapters in its layers.

    Raises:
        ValueError: the wrapper puts virtual tokens before a prompt, or this is no model of transformers
    """
    if hasattr(model, "get_base_model"):
        kind = getattr(model.active_peft_config, "peft_type", None)
        if model.active_peft_config.is_prompt_learning:
            raise ValueError("model must read its prompts as they are, got a PeftModel that puts virtual tokens before "
                             f"them ({getattr(kind, 'value', kind)}): its own generate does that")
        model = model.get_base_model()
    if not hasattr(model, "get_input_embeddings") or not hasattr(model, "config"):
        raise ValueError("model must be a causal language model of transformers, got a "
                         f"{type(model).__name__} (of a wrapper, give its .module)")
    return model


def check_model(model: nn.Module, config, length: int, attention: tuple[str, ...] = MASKED,
                whole: nn.Module | None = None) -> None:
    """Raise ValueError unless the tokens of a tree have the logits of their paths.

    Args:
        model:     the model or its decoder, whose forward takes position_ids
        config:    of its language model
        length:    how many tokens the prompt and the new ones are together
        attention: which implementations will do
        whole:     the model around the decoder, with the head
    """
    def refuse(is_wrong, what: str, got: str, way_out: str) -> None:
        if is_wrong:
            raise ValueError(f"model must {what}, got {got} ({way_out})")

    if is_older("transformers", 4, 57):
        raise ValueError(f"transformers must be 4.57 or newer ({versions('transformers')})")
    refuse(getattr(config, "is_encoder_decoder", False), "be a causal language model", type(model).__name__,
           "an encoder reads a prompt of its own")
    family = type(model).__name__
    refuse("position_ids" not in inspect.signature(model.forward).parameters, "take position_ids", family,
           "guesses have positions of their own")
    refuse(config.model_type in WITHOUT, "take a cache and a mask of four dimensions", family,
           "its own generate reads it")
    refuse(any(vars(module).get("is_decoder") is False for module in model.modules()), "read from left to right",
           f"{family} with is_decoder=False", "an encoder sees what follows")
    name = getattr(config, "_attn_implementation", None)
    refuse(name not in attention, f"have the attention {' or '.join(MASKED)}, which take a mask of a draft tree",
           repr(name), f"from_pretrained(.., attn_implementation={MASKED[0]!r})")
    check_layers(model, config, length, refuse)
    check_mode(model if whole is None else whole, config, refuse)


def check_layers(model, config, length: int, refuse) -> None:
    window, layers = getattr(config, "sliding_window", None), getattr(config, "layer_types", None)
    if layers is None:  # older configurations have the window alone, others another name
        is_sliding = window and getattr(config, "use_sliding_window", True)
        layers = getattr(config, "attention_layers", None) or ["sliding_attention" if is_sliding else "full_attention"]
    partial = {*layers} - FULL - ({"sliding_attention"} if window and window >= length else set())
    partial = sorted(kind + f" of {window} tokens" * (kind == "sliding_attention") for kind in partial)
    partial = partial or ["recurrent layers"] * getattr(model, "_is_stateful", False)
    refuse(partial, "have full attention in every layer", ", ".join(partial),
           f"prompt and image have {length} tokens: its own generate reads them")
    kept = getattr(config, "keep_window_size", None) or length
    refuse(kept < length, "see every token", f"keep_window_size={kept}", f"prompt and image have {length} tokens")
    scale = getattr(config, "floor_scale", 0) if getattr(config, "attn_temperature_tuning", False) else length
    refuse(scale < length, "attend alike at every length", f"attn_temperature_tuning from {scale} tokens on",
           f"prompt and image have {length} tokens")
    refuse(getattr(config, "alibi", False), "take its positions from position_ids", "alibi=True", "it counts columns")
    for limit, kind in frequencies(config):
        refuse(length > limit, f"have the same rotary embeddings at every length up to the {length} tokens of prompt "
               "and image", f"{kind!r} ones, which change after {limit}", "a guess would change them: decode fewer "
               "tokens, or by its own generate")
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and name.rpartition(".")[2] in POSITIONS:
            size = table.num_embeddings - getattr(table, "offset", 0)
            refuse(length - 1 > size, f"have positions for the {length - 1} tokens that are read", f"a table of {size}",
                   "a shorter prompt or fewer new tokens fit")


def frequencies(config) -> list[tuple[int, str]]:
    """The lengths up to which rotary embeddings are what they are for one token, for kinds that follow the length."""
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = []
    for rope in (parameters, *(of_layer for of_layer in parameters.values() if isinstance(of_layer, dict))):
        kind = rope.get("rope_type", rope.get("type")) or "default"
        if "dynamic" in kind or kind == "longrope":
            trained = (rope.get("original_max_position_embeddings"), config.max_position_embeddings,
                       getattr(config, "original_max_position_embeddings", None))
            kinds.append((min(filter(None, trained)), kind))
    return kinds


def check_mode(model, config, refuse) -> None:
    modules = [module for module in model.modules() if module.training]
    if not modules:
        return
    drops = [f"{key}={value}" for key, value in config.to_dict().items() if ("drop" in key or "jitter" in key)
             and isinstance(value, (int, float)) and value > 0 and value is not True]
    drops += [f"Dropout({module.p})" for module in modules
              if isinstance(module, nn.modules.dropout._DropoutNd) and module.p]
    way_out = "call model.eval() before, and model.train() after"
    refuse(drops, "be in evaluation mode", f"training mode with {', '.join(sorted(set(drops)))}", way_out)
    refuse(is_older("transformers", *FIRST_RIGHT_CHECKPOINTING) and any(
        getattr(module, "gradient_checkpointing", False) for module in modules), "be in evaluation mode",
        "training mode with gradient checkpointing, which this version reads wrongly", f"{way_out}; "
        + versions("transformers"))


def masked_ids(model) -> list[int]:
    """The ids of images whose logits the model's `forward` sets to the least number."""
    if model.config.model_type != "chameleon":
        return []
    return list(model.model.vocabulary_mapping.image_tokens)
