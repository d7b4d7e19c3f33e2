"""Proposition 1 of the paper in numbers: linear regression with diagonal Fisher matrices, float64.

KL(w_r*, ŵ_r) ≤ λ/(2|D|) · (c + 2c₁ Σ_{j∉M} (F_f,jj / (F_jj F_r,jj))²) with λ the largest eigenvalue of XXᵀ, c₁ = max_j b_r,j²,
c₂ = max_j b_f,j² and c = max{c₁, 2c₂} Σ_j 1/F_r,jj² (appendix, Proof).
"""

from dataclasses import dataclass

import numpy
import pytest
import torch

from expunge.editing import masks

DRAWS = 200


@dataclass(frozen=True)
class Regression:
    """Samples are columns; XXᵀ is diagonal on the remain and on the forget set, hence on both together."""

    remain_x: numpy.ndarray
    remain_y: numpy.ndarray
    forget_x: numpy.ndarray
    forget_y: numpy.ndarray

    @classmethod
    def draw(cls, seed: int, features: int = 30) -> "Regression":
        generator = numpy.random.default_rng(seed)

        def inputs(samples: int) -> numpy.ndarray:
            directions, _ = numpy.linalg.qr(generator.normal(size=(samples, features)))
            lengths = numpy.sqrt(samples) * numpy.exp(0.5 * generator.normal(size=features))  # so that Fisher sums grow with the samples
            return (lengths * directions).T  # rows orthogonal, of different lengths

        remain_x, forget_x = inputs(120), inputs(40)
        truth, other = generator.normal(size=(2, features))
        remain_y = truth @ remain_x + 0.3 * generator.normal(size=120)
        return cls(remain_x, remain_y, forget_x, other @ forget_x + 0.3 * generator.normal(size=40))

    @property
    def x(self) -> numpy.ndarray:
        return numpy.concatenate([self.remain_x, self.forget_x], axis=1)

    def divergence(self, mask: numpy.ndarray) -> float:
        """KL between N(w_r*ᵀx, 1) and N(ŵ_rᵀx, 1), averaged over D: ½(w_r* − ŵ_r)ᵀF(w_r* − ŵ_r), here without approximation."""
        weights = numpy.linalg.lstsq(self.x.T, numpy.concatenate([self.remain_y, self.forget_y]), rcond=None)[0]
        retrained = numpy.linalg.lstsq(self.remain_x.T, self.remain_y, rcond=None)[0]
        difference = (retrained - numpy.where(mask, 0, weights)) @ self.x
        return float(0.5 * numpy.mean(difference**2))

    def bound(self, mask: numpy.ndarray) -> float:
        remain, forget = (self.remain_x**2).sum(1), (self.forget_x**2).sum(1)
        c_1, c_2 = numpy.max((self.remain_x @ self.remain_y) ** 2), numpy.max((self.forget_x @ self.forget_y) ** 2)
        c = max(c_1, 2 * c_2) * numpy.sum(1 / remain**2)
        largest = numpy.linalg.eigvalsh(self.x @ self.x.T).max()
        kept = (forget / ((remain + forget) * remain))[~mask]
        return float(largest / (2 * self.x.shape[1]) * (c + 2 * c_1 * numpy.sum(kept**2)))

    def fisher_mask(self, ratio: float) -> numpy.ndarray:
        """The top of F_f − F_r, by the library's own choice."""
        score = (self.forget_x**2).sum(1) - (self.remain_x**2).sum(1)
        return masks.select({"w": torch.from_numpy(score)}, ratio)["w"].numpy()

    def random_masks(self, ratio: float, number: int) -> list[numpy.ndarray]:
        generator = numpy.random.default_rng(7)
        return [generator.permutation(self.fisher_mask(ratio)) for _ in range(number)]


def test_the_fisher_matrices_are_diagonal_and_positive():
    regression = Regression.draw(0)
    for inputs in (regression.remain_x, regression.forget_x, regression.x):
        matrix = inputs @ inputs.T
        assert numpy.allclose(matrix, numpy.diag(numpy.diag(matrix)), atol=1e-12) and (numpy.diag(matrix) > 0).all()


@pytest.mark.parametrize("ratio", [0.0, 0.1, 0.3, 0.9])
def test_the_bound_holds(ratio):
    for seed in range(DRAWS):
        regression = Regression.draw(seed)
        for mask in [regression.fisher_mask(ratio), *regression.random_masks(ratio, 5)]:
            assert regression.divergence(mask) <= regression.bound(mask)


@pytest.mark.parametrize("ratio", [0.1, 0.3])
def test_masking_the_top_of_the_difference_lowers_the_bound_against_random_masks(ratio):
    lower = []
    for seed in range(DRAWS):
        regression = Regression.draw(seed)
        chosen = regression.bound(regression.fisher_mask(ratio))
        at_random = numpy.array([regression.bound(mask) for mask in regression.random_masks(ratio, 20)])
        lower.append(numpy.mean(chosen < at_random))
        assert chosen < regression.bound(numpy.zeros(30, dtype=bool))
    assert numpy.mean(lower) > 0.85  # of all (regression, random mask) pairs
    assert numpy.mean(numpy.array(lower) > 0.5) > 0.95  # of the regressions, most of their random masks


def test_the_model_itself_comes_closer_to_the_retrained_one_than_under_random_masks():
    closer = []
    for seed in range(DRAWS):
        regression = Regression.draw(seed)
        chosen = regression.divergence(regression.fisher_mask(0.1))
        closer.append(chosen < numpy.mean([regression.divergence(mask) for mask in regression.random_masks(0.1, 20)]))
    assert numpy.mean(closer) > 0.5
