"""The rows of drawn samples of several passes, joined."""

import pytest
import torch

from expunge.fisher.closed_forms.drawn import Part, _pattern, gradients_of, in_packs, joined


def gradients(inputs, slopes):
    return (inputs.double().flatten(1).sum(1).mean() * slopes.double()).sum(0), None


def passes(rows: int) -> list[list[Part]]:
    """Three passes of three parts: of two types, one with its slopes for inputs."""
    torch.manual_seed(rows)
    found = []
    for _ in range(3):
        shared = torch.randn(rows, 5, dtype=torch.bfloat16)
        found.append(
            [
                Part("a", None, gradients, torch.randn(rows, 2, 3), torch.randn(rows, 4)),
                Part("b", None, gradients, shared, shared),
                Part("c", None, gradients, torch.randint(9, (rows, 0, 7)), torch.randn(rows, 1, 2)),
            ]
        )
    return found


@pytest.mark.parametrize("rows", [1, 2])
def test_in_packs_they_are_joined_as_one_by_one(rows):
    for part, other in zip(in_packs(passes(rows)), joined(passes(rows)), strict=True):
        assert part[:2] == other[:2]
        for own, expected in ((part.inputs, other.inputs), (part.slopes, other.slopes)):
            assert own.dtype == expected.dtype and torch.equal(own, expected)


def test_a_tensor_that_is_shared_makes_another_pattern():
    parts = passes(2)[0]
    apart = [parts[0], parts[1]._replace(inputs=parts[1].inputs.clone()), parts[2]]
    assert _pattern(parts) == _pattern(passes(2)[1]) != _pattern(apart)


def test_those_of_one_pass_are_not_copied():
    (parts, *_) = passes(2)
    assert all(part is own for part, own in zip(joined([parts]), parts, strict=True)) and joined([]) == []


def test_a_parameter_used_twice_has_the_sum_of_both():
    one = [part._replace(weight="a") for part in passes(1)[0][:1] * 2]
    twice, once = gradients_of([one, one], torch.ones(2))["a"], gradients_of([one[:1]] * 2, torch.ones(2))["a"]
    assert torch.allclose(twice, 2 * once)
