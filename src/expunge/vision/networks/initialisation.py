"""Draw a fresh network's weights."""

from __future__ import annotations

from torch import nn


def he_initialise(network: nn.Module) -> None:
    """Draw w ~ N(0, 2/n): n is k²·(output channels) of a convolution, the inputs of a Linear; biases are 0, norms are the identity.

    He et al. 2015, arXiv:1502.01852, eq. 10 and 14.
    """
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)
