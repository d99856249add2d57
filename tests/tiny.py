"""Small models with random weights, for tests: 16 tokens an image, of 64 codes or of 4 numbers."""
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from specvis.models.llamagen import GPTConfig
from specvis.models.mar import MARConfig
from specvis.models.vq import VQConfig
from specvis.pipelines.discrete import Pipeline
from specvis.pipelines.mar import MARPair, Scaling

TINY = MARConfig(dim=32, heads=2, encoder_layers=2, decoder_layers=2, diffusion_width=32, diffusion_blocks=2,
                 tokens=16, channels=4, buffer=6, classes=10, num_sampling_steps=8)
VOCABULARY = ["", "plain", "red", "blue", "heart"]
STYLED = [*VOCABULARY, *"fluent-3d fluent-flat noto grinning face neutral raised fist thumbs up pirate flag "
          "chequered".split()]  # the program's own styles, and the words of its own prompts


def tiny_pipeline(seed: int = 0) -> Pipeline:
    """A pipeline with every part, the draft model too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = GPTConfig(dim=32, layers=2, heads=2, vocabulary=64, grid=4, condition_tokens=3, caption_dim=8,
                           ffn_multiple=16)
        pipeline = Pipeline(config, vq_config(4), VOCABULARY, replace(config, dim=16, layers=1))
        for gpt in (pipeline.gpt, pipeline.small):
            for weight in (gpt.output.weight, gpt.tok_embeddings.weight):
                weight.data.normal_(std=0.5)  # peaked enough that tokens depend on what came before
    return pipeline


def tiny_pair(seed: int = 0) -> MARPair:
    """A target and a smaller draft model. Both denoise alike, so that some drafts are accepted."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = replace(TINY, classes=None, caption_dim=8, clip_sample_range=3.0)
        pair = MARPair(config, replace(config, dim=16, encoder_layers=1, decoder_layers=1), vq_config(config.channels),
                       VOCABULARY, Scaling((0.0,) * config.channels, 1.0))
        net, draft_net = pair.mar.diffloss.net, pair.mar_draft.diffloss.net
        for block in (*net.res_blocks, net.final_layer):
            block.adaLN_modulation[1].weight.normal_(std=0.2)  # tokens depend on the known ones
        net.final_layer.linear.weight.normal_(std=0.01)
        draft_net.load_state_dict(net.state_dict() | {"cond_embed.weight": draft_net.cond_embed.weight})
    return pair


def vq_config(codebook_dim: int) -> VQConfig:
    return VQConfig(channels=8, decoder_channels=8, multipliers=(1, 1), residual_blocks=1, z_channels=8,
                    codebook_size=64, codebook_dim=codebook_dim, groups=4)


def save_models(folder: Path) -> None:
    """A folder with both models, and a file of prompts."""
    folder.mkdir()
    for pipeline in (tiny_pipeline(), tiny_pair()):
        pipeline.words.vocabulary = STYLED
        pipeline.words.table = nn.Embedding(len(STYLED), 8)
        pipeline.requires_grad_(False).save(folder)
    (folder / "prompts.txt").write_text("red heart\nblue heart\n")
