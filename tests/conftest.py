"""Tests work on tensors so small that a second thread only costs."""

import torch

torch.set_num_threads(1)
