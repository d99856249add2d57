"""The decoder of Chameleon's codes (arXiv:2405.09818), which Anole and Lumina-mGPT use, by its official names."""
from torch import Tensor, nn

from .kl_vae import Decoder, KLConfig


class ChameleonVQ(nn.Module):
    """From codes to pixels. transformers has its encoder, as `model.model.vqmodel`, and no decoder."""

    def __init__(self, config: KLConfig, codebook_size: int, codebook_dim: int):
        """config: of the decoder; its `scale` has no meaning here"""
        super().__init__()
        self.quantize = nn.Module()
        self.quantize.embedding = nn.Embedding(codebook_size, codebook_dim)
        self.post_quant_conv = nn.Conv2d(codebook_dim, config.z_channels, 1)
        self.decoder = Decoder(config)
        self.requires_grad_(False).eval()

    def decode(self, codes: Tensor) -> Tensor:
        """(B, rows, columns) int64 -> (B, 3, height, width), about [-1, 1]. Codes are not scaled to length 1."""
        z = self.quantize.embedding(codes).permute(0, 3, 1, 2)
        return self.decoder(self.post_quant_conv(z))
