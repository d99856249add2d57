"""What lists of transformers' logits processors mean to the ops."""
import torch

UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "filters": "k_then_p"}
GREEDY = UNFILTERED | {"temperature": 0.0}
WARPERS = {"TemperatureLogitsWarper": "temperature", "TopKLogitsWarper": "top_k", "TopPLogitsWarper": "top_p"}


def settings_of(logits_processor) -> dict | None:
    """The arguments temperature, top_k, top_p and filters by which the ops do the work of a logits_processor.

    Args:
        logits_processor:  None, greedy; or a list of transformers' TemperatureLogitsWarper, TopPLogitsWarper and
                           TopKLogitsWarper, each at most once and the temperature first, as prepare_logits_processor of
                           EAGLE and LANTERN makes it: top-p before top-k

    Returns:
        settings:          the arguments; None if the list has other processors or another order, or a warper has an
                           option that the ops do not have: min_tokens_to_keep of top-p, filter_value, a top_p of 0
    """
    if logits_processor is None:
        return GREEDY
    names = [WARPERS.get(type(processor).__name__) for processor in logits_processor]
    if None in names or len(set(names)) < len(names) or "temperature" in names[1:]:
        return None
    settings = UNFILTERED | {name: getattr(warper, name) for name, warper in zip(names, logits_processor)}
    for name, warper in zip(names, logits_processor):
        if getattr(warper, "filter_value", -torch.inf) != -torch.inf:
            return None
        if name == "top_p" and (warper.top_p <= 0 or getattr(warper, "min_tokens_to_keep", 1) > 1):
            return None  # (a TopKLogitsWarper has its min_tokens_to_keep in top_k already)
    filters = "p_then_k" if names[-2:] == ["top_p", "top_k"] else "k_then_p"
    return settings | {"top_k": int(settings["top_k"]), "filters": filters}
