"""Fresh values: of which tensors, by whom, and who cannot give any."""

import pytest
import torch
from torch import nn

from expunge.errors import InputError, ModelError
from expunge.model.renewal import fresh_values, renewable
from tests.methods import cases


def test_modules_reset_themselves_and_the_model_stays():
    model = cases.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(4)
    found = fresh_values(model, ["5.weight", "5.bias", "1.weight"])
    torch.manual_seed(4)
    linear = nn.Linear(64, 8)
    # A BatchNorm of which one parameter is wanted keeps its statistics.
    assert found.keys() == {"1.weight", "5.weight", "5.bias"}
    assert torch.equal(found["5.weight"], linear.weight) and torch.equal(found["5.bias"], linear.bias)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_buffers_go_with_a_whole_module_and_frozen_parameters_stay():
    model = cases.model()
    found = fresh_values(model, [name for name, _ in model.named_parameters()])
    assert {"1.running_mean", "1.running_var", "1.num_batches_tracked"} <= found.keys() and "0.bias" not in found
    assert not found["1.running_mean"].any() and found["1.running_mean"].dtype == model[1].running_mean.dtype


def test_statistics_of_norms_without_parameters_go_with_all_the_rest():
    """They were computed from all data, the forgotten ones too."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 2))
    model[1].running_mean.fill_(7.0)
    assert not fresh_values(model, [name for name, _ in model.named_parameters()])["1.running_mean"].any()
    assert "1.running_mean" not in fresh_values(model, ["2.weight", "2.bias"])


def test_a_shared_parameter_is_renewed_under_either_name():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    for name in ("0.weight", "2.weight"):
        assert fresh_values(model, [name]).keys() == {"0.weight"}


def test_values_come_from_a_fresh_network():
    other = cases.model(torch.float64)
    with torch.no_grad():
        other[5].weight.add_(1)
    found = fresh_values(cases.model(), ["5.weight"], other)
    assert (
        other[5].weight.dtype == torch.float64
        and torch.equal(found["5.weight"], other[5].weight.float())
        and found["5.weight"].dtype == torch.float32
    )


def test_what_cannot_be_renewed_is_refused():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))

    model = nn.Sequential(nn.Linear(2, 3), Scale())
    with pytest.raises(ModelError, match="reset_parameters on every module with parameters, or `fresh`; missing in 1 \\(Scale\\)$"):
        fresh_values(model, ["0.weight", "1.scale"])
    # A reset that asks for more, or that is none, gives nothing either.
    Scale.reset_parameters = lambda self, deviation: nn.init.normal_(self.scale, std=deviation)
    assert renewable(model) == ("0.weight", "0.bias")
    for strange in (Scale.reset_parameters, True):
        Scale.reset_parameters = strange
        with pytest.raises(ModelError, match="missing in 1 \\(Scale\\)$"):
            fresh_values(model, ["0.weight", "1.scale"])
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))
    with pytest.raises(ModelError, match="missing in|does not reach"):
        fresh_values(normed, [name for name, _ in normed.named_parameters()])
    with pytest.raises(InputError, match="^fresh: must build a network with the same parameters; found 0.bias, 0.weight"):
        fresh_values(model, ["0.weight"], nn.Linear(2, 3))
