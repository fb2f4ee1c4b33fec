"""Residual streams of hyper-connections in plain torch: what a part reads, and where it adds (arXiv 2512.24880).

B sequences · S tokens · n streams · D hidden · M logits of a token: n of pre, n of post, n² of comb, row after row.
Sums, not products of matrices: their FLOPs are in no published count.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.reference.attention import weight
from tests.reference.config import Config


class Mixing(nn.Module):
    """The parameters that mix streams before a part: a matrix, biases and scales. The end of a model only has those of
    pre."""

    def __init__(self, config: Config, *, is_end: bool = False) -> None:
        super().__init__()
        assert config.hyper_connections is not None
        n = config.hyper_connections.streams
        logits, scales = (n, 1) if is_end else (n * n + 2 * n, 3)
        self.fn, self.base, self.scale = weight(logits, n * config.hidden), weight(logits), weight(scales)


def mixings(config: Config) -> tuple[Mixing | None, Mixing | None]:
    """The mixings of the two parts of a block, if there are several streams."""
    return (Mixing(config), Mixing(config)) if config.hyper_connections else (None, None)


def copied(h_BSD: Tensor, config: Config) -> Tensor:
    """The embeddings as the first layer reads them: once, or once for each of several streams [B, S, n, D]."""
    streams = config.hyper_connections
    return h_BSD if streams is None else torch.stack([h_BSD] * streams.streams, dim=2)


def read(mixing: Mixing | None, h_BSnD: Tensor, config: Config) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The input of a part, from one or several residual streams, and the function that adds its output to them."""
    if mixing is None:
        return h_BSnD, lambda y_BSD: h_BSnD + y_BSD
    x_BSD, post_BSn, comb_BSnn = mixed(mixing, h_BSnD, config)
    return x_BSD, lambda y_BSD: added(h_BSnD, y_BSD, post_BSn, comb_BSnn)


def mixed(mixing: Mixing, h_BSnD: Tensor, config: Config) -> tuple[Tensor, Tensor, Tensor]:
    """x_BSD, which a part reads, post_BSn and comb_BSnn."""
    hyper, n = config.hyper_connections, h_BSnD.shape[2]
    assert hyper is not None
    products_BSM = _products(mixing, h_BSnD, config)
    pre, post, comb = products_BSM[..., :n], products_BSM[..., n : 2 * n], products_BSM[..., 2 * n :]
    base, scale = mixing.base, mixing.scale
    pre_BSn = torch.sigmoid(scale[0] * pre + base[:n]) + hyper.eps
    post_BSn = 2 * torch.sigmoid(scale[1] * post + base[n : 2 * n])
    comb_BSnn = torch.softmax((scale[2] * comb + base[2 * n :]).unflatten(-1, (n, n)), dim=-1) + hyper.eps
    for number in range(hyper.rounds):
        if number:
            comb_BSnn = comb_BSnn / (comb_BSnn.sum(-1, keepdim=True) + hyper.eps)
        comb_BSnn = comb_BSnn / (comb_BSnn.sum(-2, keepdim=True) + hyper.eps)
    return (pre_BSn[..., None] * h_BSnD).sum(2), post_BSn, comb_BSnn


def collapsed(mixing: Mixing, h_BSnD: Tensor, config: Config) -> Tensor:
    """x_BSD, which the end of a model reads."""
    assert config.hyper_connections is not None
    pre_BSn = torch.sigmoid(mixing.scale * _products(mixing, h_BSnD, config) + mixing.base)
    return ((pre_BSn + config.hyper_connections.eps)[..., None] * h_BSnD).sum(2)


def added(h_BSnD: Tensor, y_BSD: Tensor, post_BSn: Tensor, comb_BSnn: Tensor) -> Tensor:
    """The streams after a part with output y."""
    mixed_BSnD = (comb_BSnn[..., None] * h_BSnD[:, :, :, None]).sum(2)
    return post_BSn[..., None] * y_BSD[:, :, None] + mixed_BSnD


def _products(mixing: Mixing, h_BSnD: Tensor, config: Config) -> Tensor:
    """[B, S, M]: of a norm of all streams, without a gain."""
    h_BSN = h_BSnD.flatten(2)
    normed_BSN = h_BSN / torch.sqrt((h_BSN**2).mean(-1, keepdim=True) + config.norm_eps)
    return (normed_BSN[:, :, None] * mixing.fn).sum(-1)
