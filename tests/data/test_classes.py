"""Which objectives are of classes: told by the targets, or else by what the losses do."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from expunge.data.classes import are_labels, check_classes
from expunge.data.objective import Objective
from expunge.errors import InputError

N, K, T = 6, 3, 4
GENERATOR = torch.Generator().manual_seed(0)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
SOFT = torch.rand(N, K, generator=GENERATOR).softmax(1)
MANY = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 1], [0, 0, 0], [0, 1, 0], [1, 1, 0]])
FLAT = torch.randn(N, K, generator=GENERATOR)
TOKENS = torch.randn(N, K, T, generator=GENERATOR)
WORDS = torch.randint(K, (N, T), generator=GENERATOR)


def soft_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * logits.log_softmax(1)).flatten(1).sum(1)


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    own = logits.log_softmax(1).gather(1, targets[:, None]).squeeze(1)
    return -((1 - own.exp()) ** 2 * own).flatten(1).sum(1)


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets.to(logits), reduction="none").flatten(1).sum(1)


def one_against_all(logits: Tensor, targets: Tensor) -> Tensor:
    return binary(logits, F.one_hot(targets, logits.shape[1]).movedim(-1, 1))


def squared(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits - targets).square().flatten(1).sum(1)


def classes_last(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.movedim(-1, 1), targets, reduction="none").sum(1)


def ignoring_255(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, reduction="none", ignore_index=255).sum(1)


def noisy(logits: Tensor, targets: Tensor) -> Tensor:
    return soft_cross_entropy(logits + torch.randn_like(logits), targets)


def in_place(logits: Tensor, targets: Tensor) -> Tensor:
    return soft_cross_entropy(logits.neg_(), targets)


def with_penalty(logits: Tensor, targets: Tensor) -> Tensor:
    losses = soft_cross_entropy(logits, targets)
    (slope,) = torch.autograd.grad(losses.sum(), logits, create_graph=True)
    return losses + slope.square().sum(1)


def half_weighted(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits, targets, torch.tensor([1.0, 9.0, 500.0]).bfloat16(), reduction="none").sum(1)


# name: (losses, logits, targets)
OF_CLASSES = {
    "focal loss": (focal, FLAT, LABELS),
    "small integers and a smooth loss": (
        lambda z, y: F.cross_entropy(z, y.long(), label_smoothing=0.1, reduction="none"),
        FLAT,
        LABELS.int(),
    ),
    "classes weighted": (lambda z, y: F.cross_entropy(z, y, torch.tensor([1.0, 9.0, 500.0]), reduction="none"), FLAT, LABELS),
    "one against all": (one_against_all, FLAT, LABELS),
    "squares of classes": (lambda z, y: squared(z, F.one_hot(y, K)), FLAT, LABELS),
    "a margin": (lambda z, y: F.multi_margin_loss(z, y, reduction="none"), FLAT, LABELS),
    "a column of labels": (lambda z, y: F.cross_entropy(z, y[:, 0], reduction="none"), FLAT, LABELS[:, None]),
    "soft labels": (soft_cross_entropy, FLAT, SOFT),
    "soft labels, weighted": (lambda z, p: 1e4 * soft_cross_entropy(z, p), FLAT, SOFT),
    "soft labels, sure logits": (soft_cross_entropy, 40 * F.one_hot(LABELS, K).float() + 5, F.one_hot(LABELS, K).float()),
    "soft labels, a class masked away": (soft_cross_entropy, FLAT - 1e9 * torch.tensor([0, 0, 1]), SOFT * torch.tensor([1.0, 1.0, 0.0])),
    "soft labels, half precision": (soft_cross_entropy, FLAT.bfloat16(), SOFT),
    "soft labels, log-probabilities": (lambda z, p: -(p * z).sum(1), FLAT.log_softmax(1), SOFT),
    "soft labels, float64": (soft_cross_entropy, FLAT.double(), SOFT.double()),
    "soft labels, noise on the logits": (noisy, FLAT, SOFT),
    "soft labels, logits changed in place": (in_place, FLAT, SOFT),
    "soft labels, a penalty on the gradient": (with_penalty, FLAT, SOFT),
    "soft labels, no tensor": (lambda z, held: soft_cross_entropy(z, held[0]), FLAT, (SOFT, LABELS)),
    "tokens": (focal, TOKENS, WORDS),
    "tokens, weights in half precision": (half_weighted, TOKENS.bfloat16(), WORDS),
    "tokens, some left out": (ignoring_255, TOKENS, torch.where(WORDS == 0, 255, WORDS)),
    "tokens, one against all": (one_against_all, TOKENS, WORDS),
    "soft tokens": (soft_cross_entropy, TOKENS, TOKENS.softmax(1)),
    "cross-entropy itself": (Objective().losses, FLAT, SOFT),
}


@pytest.mark.parametrize("name", OF_CLASSES)
def test_objectives_of_classes_are_taken(name):
    losses, logits, targets = OF_CLASSES[name]
    before, state = logits.clone(), torch.get_rng_state()
    with torch.no_grad():
        check_classes(Objective(losses=losses), logits, targets, "this needs")
    assert torch.equal(logits, before) and torch.equal(torch.get_rng_state(), state)


SURE = 30 * (2.0 * MANY - 1)
OTHERS = {
    "many labels": (binary, FLAT, MANY.float()),
    "many labels, integers": (binary, FLAT, MANY),
    "many labels, a model that is sure": (binary, SURE, MANY),
    "many labels, of which each has one": (binary, 5 * F.one_hot(LABELS, K).float() - 2, F.one_hot(LABELS, K).float()),
    "many labels, half precision": (binary, FLAT.bfloat16(), MANY.float()),
    "regression": (squared, FLAT, SOFT),
    "regression without an error": (squared, FLAT, FLAT),
    "regression of large numbers": (squared, 1e5 * FLAT, 1e5 * FLAT + 1),
    "a mean and a variance": (lambda z, y: (z[:, 0] - y).square() * (-z[:, 1]).exp() + z[:, 1], FLAT[:, :2], SOFT[:, 0]),
    "counts": (lambda z, y: z[:, 0].exp() - y * z[:, 0], FLAT, 2 * LABELS),
    "positive numbers": (lambda z, y: (y / z + z.log()).sum(1), FLAT.exp(), SOFT),
    "many labels at each position": (binary, TOKENS, (TOKENS > 0).float()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_objectives_are_refused(name):
    losses, logits, targets = OTHERS[name]
    with pytest.raises(InputError, match=r"^objective: this needs classes: integer labels .* and losses that take no softmax"):
        check_classes(Objective(losses=losses), logits, targets, "this needs")


def test_targets_that_are_no_tensor_are_refused_by_name():
    with pytest.raises(InputError, match="found tuple for logits"):
        check_classes(Objective(losses=lambda logits, held: squared(logits, held[0])), FLAT, (SOFT,), "this needs")


@pytest.mark.parametrize("positions", [K, T])
def test_classes_must_be_at_dimension_one(positions):
    logits = TOKENS[:, :, :positions].movedim(1, 2)  # (N, positions, K): labels may have the form all the same
    with pytest.raises(InputError, match="^objective: this needs the classes at dimension 1 of what `outputs` returns"):
        check_classes(Objective(losses=classes_last), logits, WORDS[:, :positions], "this needs")


@pytest.mark.parametrize("logits", [torch.zeros(N), torch.zeros(N, 1)])
def test_a_single_logit_is_none_of_classes(logits):
    with pytest.raises(InputError, match="^objective: this needs logits of shape .* two classes or more"):
        check_classes(Objective(losses=binary), logits, torch.zeros_like(logits), "this needs")


def test_labels_name_an_output_or_are_ignored():
    shape = torch.Size([3, K])
    assert are_labels(shape, torch.tensor([0, 2, -100])) and are_labels(shape, torch.tensor([True, False, True]))
    assert not any(are_labels(shape, torch.tensor(labels)) for labels in ([0, 1, 3], [0, 1, -1], [0.0, 1.0, 2.0], [[0], [1], [2]], [0, 1]))
