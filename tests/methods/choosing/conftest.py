"""Networks that the tests of choosing share."""

import pytest
from torch import nn

from tests.methods.choosing.small import DATA, noisy, trained


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return trained(DATA)


@pytest.fixture(scope="module")
def overfitted() -> nn.Module:
    """Knows every sample by heart, a third of whose labels are noise."""
    return trained(noisy(), epochs=60)
