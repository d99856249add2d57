"""What lists of transformers' logits processors mean to the ops."""
import torch

UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None, "filters": "k_then_p"}
GREEDY = UNFILTERED | {"temperature": 0.0}
WARPERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p",
           "MinPLogitsWarper": "min_p"}


def settings_of(logits_processor) -> dict | None:
    """The arguments temperature, top_k, top_p, min_p and filters by which the ops do the work of a logits_processor.

    Args:
        logits_processor:  None, greedy; or a list of transformers' warpers of these, each at most once, the temperature
                           first and min-p last. prepare_logits_processor of EAGLE and LANTERN has top-p before top-k

    Returns:
        settings:          the arguments; None if the list has other processors or another order, or a warper has an
                           option that the ops do not have: min_tokens_to_keep, filter_value, a top_p of 0
    """
    if logits_processor is None:
        return GREEDY
    names = [WARPERS.get(type(processor).__name__) for processor in logits_processor]
    if None in names or len(set(names)) < len(names) or "temperature" in names[1:] or "min_p" in names[:-1]:
        return None
    settings = UNFILTERED | {name: getattr(warper, name) for name, warper in zip(names, logits_processor)}
    for name, warper in zip(names, logits_processor):
        if getattr(warper, "filter_value", -torch.inf) != -torch.inf:
            return None
        if name == "top_p" and warper.top_p <= 0 or name != "top_k" and getattr(warper, "min_tokens_to_keep", 1) > 1:
            return None  # (a TopKLogitsWarper has its min_tokens_to_keep in top_k already)
    names = [name for name in names if name in ("top_k", "top_p")]
    filters = "p_then_k" if names == ["top_p", "top_k"] else "k_then_p"
    return settings | {"top_k": int(settings["top_k"]), "filters": filters}
