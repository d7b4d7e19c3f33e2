"""Random labels: who gets which, how they are mixed in, and the training equal to a plain loop."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import InputError
from expunge.methods import RandomLabels
from expunge.methods.relabelling import random_labels
from expunge.methods.streams import mixed
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import CLASSES, FORGET, REMAIN, SIZE, TWO_EPOCHS


def drawn(targets, exclude_own=True, seed=3, classes=CLASSES):
    return random_labels(targets, classes, exclude_own, torch.Generator().manual_seed(seed))


def test_labels_are_uniform_over_the_other_classes():
    targets = torch.arange(4000) % CLASSES
    for label in range(CLASSES):
        counts = torch.bincount(drawn(targets)[targets == label], minlength=CLASSES)
        assert counts[label] == 0
        others = counts[torch.arange(CLASSES) != label]
        assert (others - 1000 / 3).abs().max() < 5 * (1000 * (1 / 3) * (2 / 3)) ** 0.5


def test_labels_may_be_the_own_where_asked_for():
    targets = torch.zeros(4000, dtype=torch.int64)
    counts = torch.bincount(drawn(targets, exclude_own=False), minlength=CLASSES)
    assert (counts - 1000).abs().max() < 5 * (4000 * (1 / 4) * (3 / 4)) ** 0.5


def test_labels_are_seeded_and_ignored_positions_stay():
    targets = torch.tensor([[0, -100, 2], [3, 1, -100]])
    assert torch.equal(drawn(targets), drawn(targets))
    assert torch.equal(drawn(targets) == -100, targets == -100)
    wide = torch.zeros(50, dtype=torch.int64)
    assert not torch.equal(drawn(wide, seed=3), drawn(wide, seed=4))


@pytest.mark.parametrize("targets, classes, rule", [(torch.zeros(2), 4, "integer labels"), (torch.zeros(2).long(), 1, "two classes")])
def test_labels_that_cannot_be_drawn(targets, classes, rule):
    with pytest.raises(InputError, match=f"^forget: .*{rule}"):
        drawn(targets, classes=classes)


@pytest.mark.parametrize("few, many", [(7, 20), (2, 30), (30, 9), (1, 4)])
def test_every_sample_comes_once_an_epoch_in_even_shares(few, many):
    forget, remain = (TensorDataset(torch.arange(start, start + size)[:, None]) for start, size in ((100, few), (0, many)))
    stream = mixed(as_batches(forget, batch_size=3), as_batches(remain, batch_size=4))
    epochs = [[batch[0].flatten() for batch in stream.shuffled(seed)] for seed in (0, 1)]
    for batches in epochs:
        assert len(batches) == len(stream)
        assert sorted(torch.cat(batches).tolist()) == [*range(many), *range(100, 100 + few)]
        taken = [int((batch >= 100).sum()) for batch in batches]
        assert max(taken) - min(taken) <= 1
    assert [batch.tolist() for batch in epochs[0]] != [batch.tolist() for batch in epochs[1]]


def test_samples_of_another_shape_are_refused():
    remain = TensorDataset(torch.randn(9, 1, 9, 9, dtype=torch.float64), torch.zeros(9, dtype=torch.int64))
    with pytest.raises(InputError, match="^forget: .*one form and shape"):
        unlearn(small.network("residual"), small.forget(), remain, RandomLabels(tuning=TWO_EPOCHS), watch={})


@pytest.mark.parametrize("name", small.NETWORKS)
def test_random_labels_is_the_plain_loop(name):
    model, forget, remain = small.network(name), small.forget(), small.remain()
    outcome = unlearn(model, forget, remain, RandomLabels(tuning=TWO_EPOCHS))
    labels = drawn(forget.tensors[1])  # in the order of the data, with the tuning's seed

    def loss(kept, lost):
        images = torch.cat([remain.tensors[0][kept], forget.tensors[0][lost]])
        return lambda model: cross_entropy(model(images), torch.cat([remain.tensors[1][kept], labels[lost]]))

    losses = []
    for epoch in range(2):
        steps = reference.cut(REMAIN, SIZE, seed=3 + epoch)
        parts = reference.shares(FORGET, len(steps), seed=3 + epoch)
        losses += [loss(kept, lost) for kept, lost in zip(steps, parts, strict=True)]
    small.assert_close(outcome.model, reference.descended(model, losses, rate=0.02, decay=0.01), model)
    assert outcome.edit is None


def test_batches_and_targets_may_have_any_form():
    parts = [list(DataLoader(data, batch_size=SIZE)) for data in (small.forget(), small.remain())]
    named = [[{"pixels": images, "digit": labels} for images, labels in part] for part in parts]
    objective = Objective(outputs=lambda model, batch: model(batch["pixels"]), targets=lambda batch: batch["digit"])
    method = RandomLabels(tuning=TWO_EPOCHS)
    plain = unlearn(small.network("residual"), *parts, method)
    other = unlearn(small.network("residual"), *named, method, objective=objective)
    properties.assert_same_weights(plain.model.state_dict(), other.model.state_dict())


def test_a_loader_with_fewer_batches_than_its_length_would_lose_forget_samples():
    class Fewer(DataLoader):
        def __len__(self) -> int:
            return 4

    loader = Fewer(cases.remain(), batch_size=16)
    with pytest.raises(InputError, match="^remain: must give 4 batches, its length, .*; found 2$"):
        unlearn(cases.model(), cases.forget(), loader, RandomLabels(tuning=cases.QUICK))
