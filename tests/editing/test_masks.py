"""Masks against a full stable sort in Python."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from expunge.editing import masks
from expunge.errors import InputError, ModelError
from expunge.fisher import FisherSums

GRANULARITIES, SCOPES = ("element", "kernel", "channel"), ("global", "layer")
SHAPES = {"conv": (3, 2, 2, 3), "linear": (4, 3), "bias": (5,), "scale": (), "empty": (0, 2)}


def unit_of(index: tuple[int, ...], granularity: str) -> tuple[int, ...]:
    return index if granularity == "element" else index[:2] if granularity == "kernel" else index[:1]


def reference(score: dict[str, Tensor], ratio: float, granularity: str, scope: str, names: list[str]) -> dict[str, Tensor]:
    """Slow and obvious: gather every unit, sort them all, take the first."""
    groups = [names] if scope == "global" else [[name] for name in names]
    found = {name: torch.zeros(score[name].shape, dtype=torch.bool) for name in names}
    for group in groups:
        units: dict[tuple[str, tuple[int, ...]], list[float]] = {}
        for name in group:
            for index in itertools.product(*map(range, score[name].shape)):
                units.setdefault((name, unit_of(index, granularity)), []).append(score[name][index].item())
        wanted = math.floor(ratio * len(units) + 0.5)
        chosen = sorted(units, key=lambda unit: -sum(units[unit]) / len(units[unit]))[:wanted]
        for name, unit in chosen:
            found[name][unit] = True
    return found


def whole(numbers: list[int], shapes: dict[str, tuple[int, ...]] = SHAPES) -> dict[str, Tensor]:
    """Scores of few values, so that ties abound and sums are exact in any order."""
    sizes = [math.prod(shape) for shape in shapes.values()]
    flat = torch.tensor(numbers, dtype=torch.float64).split(sizes)
    return {name: part.reshape(shape) for (name, shape), part in zip(shapes.items(), flat, strict=True)}


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


total = sum(math.prod(shape) for shape in SHAPES.values())


def test_what_is_no_score_or_mask_is_refused() -> None:
    sums = FisherSums({"weight": torch.ones(2, 2)}, 1, "empirical", "")
    with pytest.raises(
        InputError, match="score: must be a tensor for each parameter by name, as scores.fisher_difference.*found FisherSums"
    ):
        masks.select(sums, 0.1)
    with pytest.raises(InputError, match="mask: must be a boolean tensor for each parameter by name, .*; found FisherSums"):
        masks.masked_parameters(nn.Linear(2, 2), sums)


tied_scores = st.lists(st.integers(-2, 2), min_size=total, max_size=total).map(whole)
ratios = st.floats(0, 1, exclude_max=True)
some_names = st.permutations(list(SHAPES)).flatmap(lambda names: st.integers(1, len(names)).map(lambda length: names[:length]))
ways = st.tuples(st.sampled_from(GRANULARITIES), st.sampled_from(SCOPES))


@settings(max_examples=60, deadline=None)
@given(score=tied_scores, ratio=ratios, way=ways, names=some_names)
def test_select_is_a_stable_sort(score: dict[str, Tensor], ratio: float, way: tuple[str, str], names: list[str]) -> None:
    found = masks.select(score, ratio, *way, candidates=names)
    assert list(found) == names and all(mask.dtype == torch.bool and mask.is_contiguous() for mask in found.values())
    assert same(found, reference(score, ratio, *way, names))


@settings(max_examples=60, deadline=None)
@given(score=tied_scores, two=st.tuples(ratios, ratios), way=ways)
def test_masks_are_nested(score: dict[str, Tensor], two: tuple[float, float], way: tuple[str, str]) -> None:
    small, large = (masks.select(score, ratio, *way) for ratio in sorted(two))
    assert all((large[name] | ~small[name]).all() for name in small)


@settings(max_examples=30, deadline=None)
@given(score=tied_scores, ratio=ratios, way=ways, order=st.permutations(list(SHAPES)))
def test_order_of_the_score_does_not_matter(score: dict[str, Tensor], ratio: float, way: tuple[str, str], order: list[str]) -> None:
    names = list(SHAPES)
    turned = {name: score[name] for name in order}
    assert same(masks.select(score, ratio, *way, candidates=names), masks.select(turned, ratio, *way, candidates=names))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), ratio=ratios, granularity=st.sampled_from(GRANULARITIES))
def test_means_of_real_scores(seed: int, ratio: float, granularity: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    score = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    assert same(masks.select(score, ratio, granularity), reference(score, ratio, granularity, "global", list(SHAPES)))


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_ratio_zero_masks_nothing(granularity: str, scope: str) -> None:
    assert masks.count(masks.select(whole(list(range(total))), 0, granularity, scope)) == 0


def test_count_is_exact_among_equals() -> None:
    score = {"a": torch.zeros(1000), "b": torch.zeros(7, 143)}
    for ratio in (0.0004, 0.02, 0.5, 0.9999):
        mask = masks.select(score, ratio)
        wanted = math.floor(ratio * 2001 + 0.5)
        assert masks.count(mask) == wanted
        assert mask["a"].nonzero().flatten().tolist() == list(range(min(wanted, 1000)))


def test_infinities() -> None:
    score = {"w": torch.tensor([-math.inf, 1.0, -math.inf, math.inf, 0.0])}
    assert masks.select(score, 0.6)["w"].tolist() == [False, True, False, True, True]
    assert masks.select(score, 0.8)["w"].tolist() == [True, True, False, True, True]


def test_score_is_not_touched_and_layout_does_not_matter() -> None:
    score = torch.randn(4, 3, 3, 3, dtype=torch.float64)
    turned, kept = score.to(memory_format=torch.channels_last), score.clone()
    for granularity in GRANULARITIES:
        assert same(masks.select({"w": score}, 0.3, granularity), masks.select({"w": turned}, 0.3, granularity))
    assert torch.equal(score, kept)


@pytest.mark.parametrize("ratio", [-0.1, 1, 1.5, math.nan, "0.1", None, True])
def test_select_refuses_ratio(ratio) -> None:
    with pytest.raises(InputError, match=r"ratio: must be in \[0, 1\)"):
        masks.select({"w": torch.ones(3)}, ratio)


def test_select_refuses() -> None:
    score = {"v": torch.ones(3), "w": torch.tensor([[1.0, math.nan]])}
    with pytest.raises(InputError, match="score: must not be NaN.*found w"):
        masks.select(score, 0.1)
    with pytest.raises(InputError, match="score: must not be NaN"):
        masks.select({"w": torch.tensor([[math.inf, -math.inf]])}, 0.1, "channel")
    assert masks.count(masks.select(score, 0.4, candidates=["v"])) == 1
    with pytest.raises(InputError, match=r"candidates: must be names in the score.*found \['x'\]"):
        masks.select(score, 0.1, candidates=["v", "x"])
    for names in ([], ["v", "v"]):
        with pytest.raises(InputError, match="candidates"):
            masks.select(score, 0.1, candidates=names)
    with pytest.raises(InputError, match="granularity: must be one of 'element', 'kernel', 'channel'; found 'filter'"):
        masks.select(score, 0.1, granularity="filter")
    with pytest.raises(InputError, match="scope: must be one of 'global', 'layer'; found 'local'"):
        masks.select(score, 0.1, scope="local")


def test_share_and_count() -> None:
    mask = {"a": torch.tensor([[True, False], [True, True]]), "b": torch.zeros(3, dtype=torch.bool), "c": torch.zeros(0, dtype=torch.bool)}
    assert masks.masked_share(mask) == {"a": 0.75, "b": 0.0, "c": 0.0}
    assert masks.count(mask) == 3


def small_net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))


def test_candidates() -> None:
    model = small_net()
    head = ("4.weight", "4.bias")
    assert masks.candidates(model) == ("0.weight", "4.weight")
    assert masks.candidates(model, head) == ("0.weight",)
    assert masks.candidates(model, head, include_head=True) == ("0.weight", "4.weight")
    assert masks.candidates(model, head, which="all") == ("0.weight", "0.bias", "1.weight", "1.bias")
    model[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"0.weight \(frozen\), 0.bias \(1-D\).*4.weight \(head\)"):
        masks.candidates(model, head)
    with pytest.raises(ModelError, match="the model has no parameters"):
        masks.candidates(nn.ReLU())
    with pytest.raises(InputError, match=r"head: must name parameters of the model; found \['5.weight'\]"):
        masks.candidates(model, ("5.weight",))
    with pytest.raises(InputError, match="which: must be one of 'weights', 'all'"):
        masks.candidates(model, which="biases")


def test_candidates_of_shared_parameters() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(5, 4), "inner": nn.Linear(4, 4), "head": nn.Linear(4, 5)})
    model["head"].weight = model["table"].weight
    assert masks.candidates(model) == ("table.weight", "inner.weight")
    for name in ("table.weight", "head.weight"):
        assert masks.candidates(model, (name, "head.bias")) == ("inner.weight",)


@pytest.mark.parametrize(("rounding", "chosen"), [("nearest", 14), ("down", 13)])
def test_a_share_of_a_unit_is_rounded(rounding: str, chosen: int) -> None:
    score = {"a": torch.arange(688.0)}  # 0.02 of them are 13.76
    assert masks.count(masks.select(score, 0.02, rounding=rounding)) == chosen
    assert masks.count(masks.select(score, 0.02, scope="layer", rounding=rounding)) == chosen
    with pytest.raises(InputError, match="^rounding: must be one of 'nearest', 'down'"):
        masks.select(score, 0.02, rounding="up")


@pytest.mark.parametrize(("ratio", "chosen"), [(0.0, 0), (0.02, 15), (0.25, 173), (0.999, 688)])
def test_below_threshold_takes_one_more_than_the_ratio(ratio: float, chosen: int) -> None:
    """As the programs of TF-IDF, which keep what is above the ⌊n·(1 − ratio)⌋-th largest score."""
    values = torch.randperm(688, generator=torch.Generator().manual_seed(0)).double()
    found = masks.below_threshold({"a": values[:16], "b": values[16:]}, ratio)
    assert torch.equal(torch.cat([found["a"], found["b"]]), values < chosen)


def test_below_threshold_takes_all_that_equal_it() -> None:
    score = {"a": torch.tensor([0.0, 0.0, 0.0, 5.0]), "b": torch.tensor([0.0, 1.0, 2.0, 3.0])}
    found = masks.below_threshold(score, 0.1)
    assert found["a"].tolist() == [True, True, True, False] and found["b"].tolist() == [True, False, False, False]
    by_layer = masks.below_threshold(score, 0.3, "layer")
    assert by_layer["a"].tolist() == [True, True, True, False] and by_layer["b"].tolist() == [True, True, True, False]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_cuda_selects_what_the_cpu_selects(granularity: str) -> None:
    score = {"conv": torch.randn(64, 67, 3, 3, dtype=torch.float64), "ties": torch.randint(3, (500, 70)).double()}
    there = {name: tensor.cuda() for name, tensor in score.items()}
    for ratio in (0.001, 0.02, 0.5):
        found = masks.select(there, ratio, granularity)
        assert all(mask.is_cuda for mask in found.values())
        assert same({name: mask.cpu() for name, mask in found.items()}, masks.select(score, ratio, granularity))
