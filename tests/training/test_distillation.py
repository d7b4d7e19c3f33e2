"""Students: the plain loop, which answers are kept, which classes are left out, which teachers are refused."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from expunge.data.objective import Objective, model_outputs
from expunge.errors import InputError, ModelError
from expunge.methods import SCRUB, FisherMask, GradientAscent, Run
from expunge.training import Distillation
from expunge.training.distillation import divergence
from expunge.training.loop import train, train_phases
from expunge.training.teaching import distilled as distilled_phase
from expunge.training.teaching import teach
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import small
from tests.methods.small import CLASSES, REMAIN, SIZE, TWO_EPOCHS

every_network = pytest.mark.parametrize("name", small.NETWORKS)


def student(name):
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return small.NETWORKS[name]().double()


USUAL = Distillation(3.0, 0.8)


def distilled(name, data, distillation=USUAL, without=(), teacher=None):
    model, objective = student(name), Objective()
    taught = teach(data, teacher or small.network(name), objective, SIZE, without)
    train_phases(model, lambda epoch: [distilled_phase(taught, distillation, "data", objective)], TWO_EPOCHS)
    return model


def expected(name, temperature=3.0, weight=0.8, without=()):
    (images, labels), teacher = small.remain().tensors, small.network(name)
    kept = [label for label in range(CLASSES) if label not in without]

    def loss(rows):
        def value(model):
            logits = model(images[rows])
            apart = reference.divergence(teacher(images[rows]).detach()[:, kept], logits[:, kept], temperature)
            return (1 - weight) * cross_entropy(logits, labels[rows]) + weight * temperature**2 * apart

        return value

    losses = [loss(rows) for epoch in range(2) for rows in reference.cut(REMAIN, SIZE, seed=3 + epoch)]
    return reference.descended(student(name), losses, rate=0.02, decay=0.01)


@every_network
@pytest.mark.parametrize("without", [(), (2,), (0, 3)])
def test_distilling_is_the_plain_loop(name, without):
    small.assert_close(distilled(name, small.remain(), without=without), expected(name, without=without), student(name))


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_labels_or_teacher_alone(weight):
    found = distilled("residual", small.remain(), Distillation(2.0, weight))
    small.assert_close(found, expected("residual", 2.0, weight), student("residual"))


def test_the_label_alone_decides_about_a_class_that_is_left_out():
    """The teacher's softmax says nothing of it, so at weight 1 its row of the classifier moves by weight decay alone."""
    before = student("no BatchNorm")
    found = distilled("no BatchNorm", small.remain(), Distillation(4.0, 1.0), without=(1,))
    shrunk = reference.descended(before, [lambda model: 0.0 * sum(value.sum() for value in model.parameters())] * 6, rate=0.02, decay=0.01)
    torch.testing.assert_close(found[3].weight[1], shrunk[3].weight[1])
    assert not torch.allclose(found[3].weight[0], shrunk[3].weight[0])


@every_network
def test_fine_tuning_of_any_method_may_be_distilled(name):
    """FisherMask, then the plain loop of the distillation from the network before it, the class that is forgotten left out."""
    model, data = small.network(name), small.pictures(30, seed=9)
    rows = data.tensors[1] == 2
    forget, remain = (Subset(data, part.nonzero().flatten().tolist()) for part in (rows, ~rows))
    tuning = replace(TWO_EPOCHS, distillation=USUAL)
    outcome = unlearn(model, forget, remain, FisherMask(0.1, tuning=tuning), watch={})
    masked = unlearn(model, forget, remain, FisherMask(0.1, tuning=None), watch={}).model
    images, labels, kept = data.tensors[0][~rows], data.tensors[1][~rows], [label for label in range(CLASSES) if label != 2]

    def loss(chosen):
        def value(student):
            logits = student(images[chosen])
            apart = reference.divergence(model(images[chosen]).detach()[:, kept], logits[:, kept], 3.0)
            return 0.2 * cross_entropy(logits, labels[chosen]) + 0.8 * 9 * apart

        return value

    losses = [loss(chosen) for epoch in range(2) for chosen in reference.cut(len(remain), SIZE, seed=3 + epoch)]
    small.assert_close(outcome.model, reference.descended(masked, losses, rate=0.02, decay=0.01), model)


def test_only_fine_tuning_in_unlearn_has_a_teacher():
    tuning = replace(TWO_EPOCHS, distillation=USUAL)
    with pytest.raises(InputError, match="^tuning: distillation is for methods that fine-tune"):
        train(small.network("residual"), small.remain(), tuning)
    for method in (GradientAscent(tuning), SCRUB(tuning=tuning)):
        with pytest.raises(InputError, match="^tuning: "):
            unlearn(small.network("residual"), small.forget(), small.remain(), method, watch={})
    with pytest.raises(InputError, match="^original: distillation needs the original"):
        Run().train(small.network("residual"), small.remain(), tuning)


class Counting(nn.Module):
    calls = 0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, images):
        Counting.calls += not self.training
        return self.inner(images)


class Noisy(Dataset):
    """Rows that are read at once, and differ at every reading."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, row):
        return tuple(part[0] for part in self.batch_of(torch.tensor([row])))

    def batch_of(self, rows):
        images, labels = self.data[rows]
        return images + 1e-3 * torch.randn_like(images), labels


READINGS = {  # how often the teacher is asked: once about all of three batches, else again in both epochs; and once for the shape
    "rows": (lambda data: data, 1 + 3),
    "rows that chance changes": (Noisy, 1 + 1 + 6),
    "rows the last of which chance changes": (
        lambda data: ConcatDataset([Subset(data, range(REMAIN - 4)), Noisy(TensorDataset(*data[REMAIN - 4 :]))]),
        1 + 1 + 6,
    ),
    "a loader": (lambda data: DataLoader(data, SIZE), 1 + 1 + 6),
    "a list of batches": (lambda data: list(DataLoader(data, SIZE)), 1 + 1 + 6),
}


@pytest.mark.parametrize("reading", READINGS)
def test_steady_rows_are_answered_once(reading):
    make, asked = READINGS[reading]
    Counting.calls = 0
    distilled("no BatchNorm", make(small.remain()), teacher=Counting(small.network("no BatchNorm")))
    assert Counting.calls == asked


def test_a_loader_teaches_what_rows_teach():
    class InOrder(DataLoader):
        """The batches of a dataset's epochs: its own order is the loop's."""

        epoch = 0

        def __iter__(self):
            rows = reference.cut(REMAIN, SIZE, seed=3 + max(self.epoch - 2, 0))  # two readings come before the first epoch
            self.epoch += 1
            return iter([self.dataset[part] for part in rows])

    small.assert_close(distilled("residual", InOrder(small.remain(), SIZE)), expected("residual"), student("residual"))


def test_the_teacher_is_a_copy_in_eval_mode():
    teacher = small.network("residual").train()
    before = copy.deepcopy(teacher.state_dict())
    found = distilled("residual", small.remain(), teacher=teacher)
    small.assert_close(found, expected("residual"), student("residual"))
    assert teacher.training and all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_positions_are_taught_too():
    """Logits (N, K, L), as of a segmentation or of words."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        data = TensorDataset(torch.randn(6, 2, 5, dtype=torch.float64), torch.randint(0, 3, (6, 5)))
        teacher, model = (nn.Conv1d(2, 3, 1).double() for _ in range(2))
    phase = distilled_phase(teach(data, teacher, without=(2,)), Distillation(1.0, 1.0), "data", Objective())
    (samples, answers), *_ = phase.batches
    loss = phase.loss(model, (samples, answers), Objective().losses)
    goal, found = teacher(data.tensors[0])[:, :2], model(data.tensors[0])[:, :2]
    torch.testing.assert_close(loss, kl_div(found.log_softmax(1), goal.softmax(1), reduction="sum") / 6)


def test_positions_without_a_label_are_not_taught():
    """What a teacher says about padding, or about words that were left out so that they be forgotten, is none of the student's business."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        inputs, labels = torch.randn(6, 2, 5, dtype=torch.float64), torch.randint(0, 3, (6, 5))
        teacher, model = (nn.Conv1d(2, 3, 1).double() for _ in range(2))
    labels[:, 3:] = -100
    phase = distilled_phase(teach(TensorDataset(inputs, labels), teacher), Distillation(1.0, 1.0), "data", Objective())
    loss = phase.loss(model, next(iter(phase.batches)), Objective().losses)
    goal, found = teacher(inputs)[:, :, :3], model(inputs)[:, :, :3]
    torch.testing.assert_close(loss, kl_div(found.log_softmax(1), goal.softmax(1), reduction="sum") / 6)


def test_divergence_is_that_of_the_softmaxes():
    generator = torch.Generator().manual_seed(0)
    teacher, answer = torch.randn(2, 6, 5, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(divergence(teacher, answer, 2.0).mean(), reference.divergence(teacher, answer, 2.0))


def constant(logits):
    return Objective(outputs=lambda model, batch: model_outputs(model, batch) * 0 + torch.tensor(logits, dtype=torch.float64))


BAD = {
    "a class beyond the head": (
        InputError,
        "^without: .*in \\[0, 4\\); found \\[4\\]",
        lambda data, model: teach(data, model, without=(4,)),
    ),
    "every class": (InputError, "^without: must leave a class", lambda data, model: teach(data, model, without=range(4))),
    "NaN": (
        ModelError,
        "teacher's answers on data must be finite",
        lambda data, model: teach(data, model, constant([0, 0, 0, float("nan")])),
    ),
    "worse than chance": (
        ModelError,
        "better than chance, 0.25, on data; found an accuracy of 0$",
        lambda data, model: teach(
            TensorDataset(data.tensors[0].repeat(4, 1, 1, 1), data.tensors[1].repeat(4) * 0), model, constant([0, 1, 0, 0])
        ),
    ),
    "a regression": (
        InputError,
        "^objective: distillation needs",
        lambda data, model: teach(
            TensorDataset(data.tensors[0], torch.randn(REMAIN, 4)), model, Objective(losses=lambda z, y: (z - y).square().sum(1))
        ),
    ),
    "labels beyond the head": (
        InputError,
        "^data: labels must be in",
        lambda data, model: teach(TensorDataset(data.tensors[0], data.tensors[1] + 3), model),
    ),
    "no temperature": (InputError, "^temperature: ", lambda data, model: Distillation(0.0)),
    "a temperature whose square no float32 holds": (InputError, "^temperature: must be in ", lambda data, model: Distillation(1e30)),
    "a temperature that no logit can be divided by": (InputError, "^temperature: must be in ", lambda data, model: Distillation(1e-40)),
    "a class that is no number": (InputError, "^without: ", lambda data, model: Distillation(without=("cat",))),
    "one class without a tuple": (InputError, "^without: must be a tuple", lambda data, model: Distillation(without=3)),
    "a weight above 1": (InputError, "^weight: ", lambda data, model: Distillation(weight=1.1)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_taught_is_refused(case):
    error, message, call = BAD[case]
    with pytest.raises(error, match=message):
        call(small.remain(), small.network("no BatchNorm"))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_replayed_steps_are_the_eager_ones_cuda():
    """Rows on the device are replayed as graphs; batches in a list are not."""
    images, labels = (tensor.cuda() for tensor in small.pictures(64, seed=2).tensors)
    found = []
    for data in (TensorDataset(images, labels), None):
        model, teacher, objective = student("residual").cuda(), small.network("residual").cuda(), Objective()
        taught = teach(data or TensorDataset(images, labels), teacher, objective, SIZE, (1,))
        phase = distilled_phase(taught, Distillation(), "data", objective)
        if data is None:
            phase = type(phase)(phase.batches, "data", phase.loss, phase.samples)
        train_phases(model, lambda epoch, phase=phase: [phase], TWO_EPOCHS)
        found.append(model.cpu())
    small.assert_close(found[0], found[1], student("residual"))
