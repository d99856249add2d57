"""Fused kernels for speculative decoding of visual autoregressive models: tensors in, tensors out.

`ops()` lists the ops, `help(op)` explains one. Ops report invalid values in `status` and raise nothing about them:
`check_status` does. With SPECVIS_CHECK=1 in the environment it is called after every op, at the price of a host read.
Ops are for inference: no result requires a gradient. Tensors of integers may be int64 or int32. Tensors that describe
a tree may have a batch of 1, which then serves all requests.
"""

from ._define import backends, ops
from .accept_gaussian import AcceptGaussianResult, accept_gaussian
from .codebook_neighbors import codebook_neighbors
from .commit_kv import commit_kv
from .commit_tokens import CommitTokensResult, commit_tokens
from .couple_tokens import CoupleTokensResult, couple_tokens
from .decoder_layers import DecoderLayer, PackedLayers, decoder_layers, join_weights, pack_layers
from .denoise_tokens import DenoiserBlock, DenoiseTokensResult, PackedDenoiser, denoise_tokens, pack_denoiser
from .draft_children import DraftChildrenResult, draft_children
from .draft_frontier import DraftFrontierResult, draft_frontier
from .draw_children import DrawChildrenResult, draw_children
from .draw_tokens import DrawTokensResult, draw_tokens
from .expand_tree import ExpandTreeResult, expand_tree
from .guided_probs import GuidedProbsResult, guided_probs
from .neighborhood_sum import NeighborhoodSumResult, neighborhood_sum
from .noise import gumbel_noise, philox_words
from .packed_linear import pack_weight, packed_linear
from .philox_uniforms import philox_uniforms
from .resample_gaussian import ResampleGaussianResult, resample_gaussian
from .rms_norm import RMSNormResult, rms_norm
from .rotate_into_cache import rotate_into_cache
from .sample_residual import SampleResidualResult, sample_residual
from .select_tree import SelectTreeResult, select_tree
from .status import (
    EMPTY_RESIDUAL,
    INVALID_DRAFT,
    INVALID_ROW,
    INVALID_RULE,
    INVALID_TREE,
    OUT_OF_TRIES,
    StatusError,
    check_status,
)
from .swiglu import swiglu
from .token_log_probs import TokenLogProbsResult, token_log_probs
from .transformer_blocks import PackedBlocks, TransformerBlock, pack_blocks, transformer_blocks
from .tree_attention import tree_attention
from .tree_from_choices import tree_from_choices
from .tree_from_mask import tree_from_mask
from .tree_from_paths import tree_from_paths
from .tree_links import TreeLinksResult, tree_links
from .tree_mask import tree_mask
from .tree_paths import tree_paths
from .verify_chain import VerifyChainResult, verify_chain
from .verify_greedy import VerifyGreedyResult, verify_greedy
from .verify_logits import verify_logits
from .verify_tree import VerifyResult, verify_tree

__version__ = "0.2.0.dev0"
__all__ = [
    "guided_probs", "draw_tokens", "token_log_probs", "philox_uniforms", "codebook_neighbors", "neighborhood_sum",
    "expand_tree", "draft_frontier", "draw_children", "draft_children", "select_tree", "tree_links", "tree_mask",
    "tree_attention", "decoder_layers", "rms_norm", "rotate_into_cache", "swiglu", "packed_linear", "verify_tree",
    "verify_logits", "verify_chain", "verify_greedy", "commit_kv", "commit_tokens", "sample_residual",
    "couple_tokens", "transformer_blocks", "denoise_tokens", "accept_gaussian", "resample_gaussian",
    "AcceptGaussianResult", "CommitTokensResult", "CoupleTokensResult", "DecoderLayer", "DenoiseTokensResult",
    "DenoiserBlock", "DraftChildrenResult", "DraftFrontierResult", "DrawChildrenResult", "DrawTokensResult",
    "ExpandTreeResult", "GuidedProbsResult", "NeighborhoodSumResult", "PackedBlocks", "PackedDenoiser", "PackedLayers",
    "RMSNormResult", "ResampleGaussianResult", "SampleResidualResult", "SelectTreeResult", "StatusError",
    "TokenLogProbsResult", "TransformerBlock", "TreeLinksResult", "VerifyChainResult", "VerifyGreedyResult",
    "VerifyResult",
    "backends", "check_status", "gumbel_noise", "join_weights", "ops", "pack_blocks", "pack_denoiser", "pack_layers",
    "pack_weight", "philox_words", "tree_from_choices", "tree_from_mask", "tree_from_paths", "tree_paths",
    "EMPTY_RESIDUAL", "INVALID_DRAFT", "INVALID_ROW", "INVALID_RULE", "INVALID_TREE", "OUT_OF_TRIES",
]
