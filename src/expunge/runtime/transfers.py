"""Send small tensors to a device without waiting for what runs there."""

from __future__ import annotations

import torch
from torch import Tensor


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device. A plain `.to` of ordinary memory would wait until the GPU has done all that was queued."""
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
