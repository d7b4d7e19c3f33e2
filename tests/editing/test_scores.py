"""Scores against plain arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from expunge.editing import scores
from expunge.errors import InputError, MismatchError
from expunge.fisher.sums import FisherSums
from expunge.model.activations import Activations


def sums_of(sums: dict[str, Tensor], count: int, digest: str = "same") -> FisherSums:
    return FisherSums(sums, count, "empirical", digest)


def drawn(seed: int, count: int, scale: float = 1.0) -> FisherSums:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (3, 4), "b.weight": (2, 3, 2, 2), "b.bias": (2,)}
    return sums_of({name: scale * torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}, count)


def assert_close(found: scores.Score, expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert tensor.dtype == torch.float64
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=0)


def order(score: scores.Score) -> list[int]:
    return torch.cat([tensor.flatten() for tensor in score.values()]).argsort(stable=True).tolist()


@pytest.mark.parametrize("weight", [0, 0.5, 3.0])
def test_difference_of_means(weight: float) -> None:
    forget, remain = drawn(0, 5), drawn(1, 40)
    expected = {name: forget.sums[name] / 5 - weight * remain.sums[name] / 40 for name in forget.sums}
    assert_close(scores.fisher_difference(forget, remain, weight), expected)


def test_default_weight_is_that_of_sums() -> None:
    forget, remain = drawn(0, 5), drawn(1, 40)
    default = scores.fisher_difference(forget, remain)
    assert_close(default, scores.fisher_difference(forget, remain, 40 / 5))
    assert order(default) == order({name: forget.sums[name] - remain.sums[name] for name in forget.sums})
    assert order(default) != order(scores.fisher_difference(forget, remain, 1.0))


def test_forget_alone() -> None:
    assert_close(scores.fisher_difference(drawn(0, 5)), {name: tensor / 5 for name, tensor in drawn(0, 5).sums.items()})


@pytest.mark.parametrize("weight", [-0.1, float("nan"), float("inf"), "1", True])
def test_difference_refuses_weight(weight: float) -> None:
    with pytest.raises(InputError, match="remain_weight: must be a finite number of at least 0; found"):
        scores.fisher_difference(drawn(0, 5), drawn(1, 40), weight)


def test_difference_refuses_weight_of_nothing() -> None:
    with pytest.raises(InputError, match="remain_weight: needs `remain`"):
        scores.fisher_difference(drawn(0, 5), remain_weight=1.0)


@pytest.mark.parametrize("other", [nn.Linear(2, 2), {"weight": torch.ones(2)}, None])
def test_what_are_no_sums_is_refused(other) -> None:
    with pytest.raises(InputError, match="forget: must be FisherSums, as fisher.diagonal gives; found"):
        scores.fisher_difference(other)


def test_sums_over_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="remain: must be sums over at least one sample; found 0"):
        scores.fisher_difference(drawn(0, 5), drawn(1, 0))
    with pytest.raises(InputError, match="forget: must be sums over at least one sample"):
        scores.fisher_ratio(drawn(0, 0), drawn(1, 1))


@pytest.mark.parametrize("score", [scores.fisher_difference, scores.fisher_ratio])
def test_other_weights_are_refused(score) -> None:
    with pytest.raises(MismatchError):
        score(drawn(0, 5), sums_of(drawn(1, 4).sums, 4, digest="other"))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    def spoilt(parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.clone().index_fill_(0, torch.tensor(1), bad) if name == "b.bias" else tensor for name, tensor in parts.items()}

    fine = drawn(0, 5)
    broken = sums_of(spoilt(fine.sums), 5)
    answers = Activations({"a": torch.ones(2, 3), "b.bias": torch.ones(2, 4)}, torch.tensor([1, 1]), 1)
    strange = replace(answers, sums=spoilt(answers.sums))
    calls = {
        "forget": [
            lambda: scores.fisher_difference(broken),
            lambda: scores.fisher_difference(broken, fine),
            lambda: scores.fisher_ratio(broken, fine),
            lambda: scores.activation_difference(strange),
            lambda: scores.tf_idf(strange, answers),
        ],
        "remain": [
            lambda: scores.fisher_difference(fine, broken),
            lambda: scores.fisher_difference(fine, broken, 1.0),
            lambda: scores.fisher_ratio(fine, broken),
            lambda: scores.activation_difference(answers, strange),
            lambda: scores.tf_idf(answers, strange),
        ],
        "gradient": [lambda: scores.saliency(broken.sums)],
    }
    for argument, call in [(argument, call) for argument, those in calls.items() for call in those]:
        with pytest.raises(InputError, match=f"^{argument}: must hold finite numbers; found others in b.bias"):
            call()


def test_tf_idf_by_hand() -> None:
    """Two channels, classes 0 (to forget), 1 and 2; a = 3, 1 / 1, 1 / 0, 4."""

    def of(*rows: list[float]) -> Activations:
        return Activations({"layer": torch.tensor(rows, dtype=torch.float64)}, torch.ones(len(rows), dtype=torch.int64), 1)

    forget, remain = of([3.0, 1.0]), of([1.0, 1.0], [0.0, 4.0])
    # TF over the channels: 3/4 and 1/4. The means over channels are 2, 1 and 2: two classes reach them in each channel.
    text = [3 / 4 * math.log(4 / 3), 1 / 4 * math.log(4 / 3)]
    assert_close(scores.tf_idf(forget, remain), {"layer": torch.tensor(text, dtype=torch.float64)})
    # The means over classes are 4/3 and 2: one class reaches each.
    released = [3 / 4 * math.log(3 / 2), 1 / 4 * math.log(3 / 2)]
    assert_close(scores.tf_idf(forget, remain, "released"), {"layer": torch.tensor(released, dtype=torch.float64)})


def test_tf_idf_of_a_layer_that_is_silent_for_the_class_is_zero() -> None:
    silent = Activations({"layer": torch.zeros(1, 2, dtype=torch.float64)}, torch.tensor([3]), 1)
    loud = Activations({"layer": torch.ones(2, 2, dtype=torch.float64)}, torch.tensor([3, 3]), 1)
    for reading in ("text", "released"):
        assert not scores.tf_idf(silent, loud, reading)["layer"].any()


def test_ratio_of_means() -> None:
    forget, remain = drawn(0, 5), drawn(1, 40)
    exact = {name: (forget.sums[name] / 5) / (remain.sums[name] / 40) for name in forget.sums}
    found = scores.fisher_ratio(forget, remain)
    for name in found:
        torch.testing.assert_close(found[name], exact[name], rtol=1e-4, atol=0)
    assert order(found) == order(exact)


@given(scale=st.floats(1e-30, 1e30), seed=st.integers(0, 99))
def test_ratio_does_not_depend_on_the_scale(scale: float, seed: int) -> None:
    found, scaled = (scores.fisher_ratio(drawn(seed, 5, by), drawn(seed + 1, 40, by)) for by in (1.0, scale))
    for name in found:
        torch.testing.assert_close(found[name], scaled[name], rtol=1e-9, atol=0)


def test_ratio_where_weights_are_dead() -> None:
    forget = sums_of({"w": torch.tensor([0.0, 1.0, 0.0, 2.0], dtype=torch.float64)}, 1)
    remain = sums_of({"w": torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64)}, 1)
    found = scores.fisher_ratio(forget, remain)["w"]
    assert found[0] == 0 and found[2] == 0
    assert found.isfinite().all() and found[1] > found[3] > 0


@pytest.mark.parametrize("forget_scale", [0.0, 1e-310, 1.0, 1e300])
@pytest.mark.parametrize("remain_scale", [0.0, 1e-310, 1.0, 1e300])
def test_ratio_is_always_finite(forget_scale: float, remain_scale: float) -> None:
    for tensor in scores.fisher_ratio(drawn(0, 5, forget_scale), drawn(1, 40, remain_scale)).values():
        assert tensor.isfinite().all() and (tensor >= 0).all()


def test_ratio_without_remain_information_ranks_by_forget() -> None:
    forget = drawn(0, 5)
    assert order(scores.fisher_ratio(forget, drawn(1, 40, 0.0))) == order(forget.sums)


def test_ratio_takes_no_sign_from_rounding() -> None:
    forget = sums_of({"w": torch.tensor([1.0, 1.0], dtype=torch.float64)}, 1)
    remain = sums_of({"w": torch.tensor([-1e-6, 1.0], dtype=torch.float64)}, 1)
    found = scores.fisher_ratio(forget, remain)["w"]
    assert found[0] > found[1] > 0


def test_random_is_uniform_and_seeded() -> None:
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 3))
    state = torch.get_rng_state()
    first, again, other = scores.random(model, 1), scores.random(model, 1), scores.random(model, 2)
    assert torch.equal(torch.get_rng_state(), state)
    assert list(first) == [name for name, _ in model.named_parameters()]
    for name, parameter in model.named_parameters():
        assert first[name].shape == parameter.shape and first[name].dtype == torch.float64
        assert torch.equal(first[name], again[name]) and not torch.equal(first[name], other[name])
    weights = first["0.weight"]
    assert 0 <= weights.min() and weights.max() < 1 and abs(weights.mean() - 0.5) < 0.02 and abs(weights.var() - 1 / 12) < 0.01


def test_random_of_a_parameter_depends_on_its_name_alone() -> None:
    both = scores.random({"a": (7, 2), "b": (7, 2)}, 0)
    assert torch.equal(scores.random({"b": (7, 2)}, 0)["b"], both["b"])
    assert not torch.equal(both["a"], both["b"])


def test_random_is_the_same_everywhere() -> None:
    # Pinned: a mask of last year must be found again from its seed.
    assert scores.random({"w": (2,)}, 0)["w"].tolist() == pytest.approx([0.5875874042788318, 0.8893407798171026], abs=1e-15)


@pytest.mark.parametrize("seed", [1.0, "1", None, True])
def test_random_refuses_seed(seed) -> None:
    with pytest.raises(InputError, match="seed: must be an integer"):
        scores.random({"w": (2,)}, seed)
