"""What is sent back from the logits: the sampled Fisher information is the expected one in the mean, seeded, at any batch size."""

from __future__ import annotations

import itertools
import statistics

import pytest
import torch
from torch import nn

from benchmarks import sampled_error
from expunge.errors import InputError, ModelError
from expunge.fisher import by_chunks, diagonal, sharded_diagonal
from expunge.fisher.kinds import expected, sampled, uniform_noise
from tests import reference

CLASSES = 5


@pytest.fixture(scope="module")
def case():
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()
        with torch.no_grad():
            model[2].weight.mul_(4)  # neither uniform nor saturated
        return model, (torch.randn(12, 4, dtype=torch.float64), torch.randint(0, CLASSES, (12,)))


def flat(sums):
    return torch.cat([total.flatten() for total in sums.sums.values()])


def estimates(model, batch, seeds, draws=1):
    return torch.stack([flat(diagonal(model, [batch], kind="sampled", draws=draws, seed=seed)) for seed in range(seeds)])


@pytest.mark.parametrize("draws", [1, 3])
def test_sampled_is_the_expected_one_in_the_mean(case, draws):
    found, exact = estimates(*case, seeds=400, draws=draws), flat(diagonal(case[0], [case[1]], kind="expected"))
    error = (found.mean(0) - exact).abs()
    deviation = found.std(0) / 400**0.5
    assert bool((error <= 5 * deviation + 1e-12 * exact.max()).all())
    assert float((error / deviation.clamp(min=1e-15)).square().mean()) < 2  # about 1 for an unbiased one
    assert float(deviation.max() / exact.max()) < 0.1  # so that the first line says something


def test_error_falls_with_the_root_of_the_draws(case):
    exact = flat(diagonal(case[0], [case[1]], kind="expected"))
    one, sixteen = ((estimates(*case, seeds=60, draws=draws) - exact).norm(dim=1).square().mean().sqrt() for draws in (1, 16))
    assert 3 < float(one / sixteen) < 5.3


def test_the_seed_decides(case):
    model, batch = case
    first, again, other = (diagonal(model, [batch], kind="sampled", seed=seed) for seed in (7, 7, 8))
    assert torch.equal(flat(first), flat(again)) and not torch.allclose(flat(first), flat(other), rtol=1e-3)


@pytest.mark.parametrize("sizes", [[1] * 12, [5, 7], [4, 4, 4]])
def test_the_batch_size_does_not_matter(case, sizes):
    model, batch = case
    parts = list(zip(*(tensor.split(sizes) for tensor in batch), strict=True))
    whole = diagonal(model, [batch], kind="sampled", draws=2, seed=3)
    assert reference.worst_error(diagonal(model, parts, kind="sampled", draws=2, seed=3).sums, whole.sums) <= 1e-12


@pytest.mark.parametrize("scale", [0.1, 1, 10, 40, 100, 300])
def test_every_draw_has_the_size_of_the_whole(scale):
    """‖c‖² = Σ_k p_k‖e_k − p‖² whichever label is drawn, also where p is 1 but for rounding."""
    logits = scale * torch.randn(500, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    nobody = torch.zeros(500, dtype=torch.int64)
    (drawn,) = sampled(logits, nobody, torch.rand(500, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
    whole = sum(each.square().sum(1) for each in expected(logits, nobody, torch.empty(0)))
    certain = whole < 1e-25  # p − e_top itself is rounding there
    assert torch.allclose(drawn.square().sum(1)[~certain], whole[~certain], rtol=1e-5, atol=0)
    assert bool((drawn.square().sum(1)[certain] < 1e-24).all())


def test_no_gradient_where_the_network_is_certain():
    logits = torch.tensor([[0.0, 2000.0, 0.0]], dtype=torch.float64)
    for number in (0.0, 0.5, 1 - 2**-53):
        (drawn,) = sampled(logits, torch.zeros(1, dtype=torch.int64), torch.tensor([[number]], dtype=torch.float64))
        assert torch.equal(drawn, torch.zeros(1, 3, dtype=torch.float64))


def test_noise_follows_the_samples():
    import numpy

    def generator():
        return numpy.random.Generator(numpy.random.Philox(2))

    parts, whole = generator(), uniform_noise(generator(), 9, 3)
    assert torch.equal(torch.cat([uniform_noise(parts, size, 3) for size in (4, 1, 4)]), whole)


def test_own_distribution_needs_one_row_of_logits_a_sample():
    model, batch = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), (torch.randn(4, 5), torch.zeros(4, dtype=torch.int64))
    for kind in ("expected", "sampled"):
        with pytest.raises(InputError, match=r"logits of shape \(N, K, \.\.\.\).*found \(4,\)"):
            diagonal(model, [batch], kind=kind)
    with pytest.raises(InputError, match="draws: must be a whole number of at least 1; found 0"):
        diagonal(model, [batch], kind="sampled", draws=0)


def test_draws_of_a_kind_that_does_not_draw_are_refused():
    model, batch = nn.Linear(5, 3), (torch.randn(4, 5), torch.zeros(4, dtype=torch.int64))
    for kind, call in itertools.product(("empirical", "expected", "batch"), (diagonal, by_chunks, sharded_diagonal)):
        if (kind, call) != ("batch", sharded_diagonal):  # a kind that it does not have
            with pytest.raises(InputError, match=f'draws: must be 1 unless the kind is "sampled", .*; found 3 with the kind "{kind}"'):
                call(model, [batch], kind=kind, draws=3)


@pytest.fixture(scope="module")
def compared():
    """Median relative error of one draw over 10 seeds: network -> estimator -> error."""
    found = {}
    images, labels = sampled_error.digits(0).train.tensors
    batches = [(images[:300].double(), labels[:300])]
    for name, (model, _) in sampled_error.networks(fresh=0, trained=30).items():
        exact = diagonal(model, batches, kind="expected").sums
        sums = {
            key: [sampled_error.estimate(model, batches, estimator, seed) for seed in range(10)]
            for key, estimator in sampled_error.ESTIMATORS.items()
        }
        sums["engine"] = [diagonal(model, batches, kind="sampled", seed=seed).sums for seed in range(10)]
        found[name] = {key: statistics.median(sampled_error.relative_error(one, exact) for one in each) for key, each in sums.items()}
    return found


def test_importance_draws_are_the_ones_to_use_on_a_trained_network(compared):
    trained = compared["trained"]
    assert trained["engine"] == pytest.approx(trained["importance"], rel=0.5)
    assert trained["importance"] < trained["signs"] < trained["plain"]


def test_all_estimators_are_near_on_a_fresh_network(compared):
    assert all(error < 0.4 for error in compared["fresh"].values())


@pytest.mark.parametrize("change", [lambda g: g.clamp(-0.01, 0.01), lambda g: g * (g > 0)])
def test_gradients_that_hooks_change_other_than_linearly_are_refused(change):
    """√p ∂ log p is no gradient of √p log p then."""

    class Hooked(nn.Linear):
        def forward(self, x):
            x = super().forward(x)
            x.register_hook(change)
            return torch.tanh(x)

    torch.manual_seed(0)
    model, batch = Hooked(5, 3).double(), (torch.randn(4, 5).double(), torch.tensor([0, 1, 2, 0]))
    for kind in ("expected", "sampled"):
        with pytest.raises(ModelError, match='only kind="empirical" is defined'):
            diagonal(model, [batch], kind=kind)
    expected = 0
    for x, y in zip(*batch, strict=True):
        model.zero_grad()
        nn.functional.cross_entropy(model(x[None]), y[None]).backward()
        expected = expected + model.weight.grad**2
    assert torch.allclose(diagonal(model, [batch]).sums["weight"], expected)
