"""Multiply vectors by the curvature of the loss, and solve for steps with such products."""

from expunge.curvature.products import Vector, gauss_newton_product, gradient, hessian_product
from expunge.curvature.solvers import ConjugateGradients, LiSSA, Solver, check_solver

__all__ = [
    "ConjugateGradients",
    "LiSSA",
    "Solver",
    "Vector",
    "check_solver",
    "gauss_newton_product",
    "gradient",
    "hessian_product",
]
