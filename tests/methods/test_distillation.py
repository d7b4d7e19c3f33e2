"""Students and teachers: both methods equal plain loops, teachers stay as they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

from expunge.errors import InputError
from expunge.methods import SCRUB, BadTeacher
from expunge.methods.distillation import divergence
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import FORGET, REMAIN, SIZE, TWO_EPOCHS

every_network = pytest.mark.parametrize("name", small.NETWORKS)


def another(name):
    """A network with other weights and fresh statistics."""
    with torch.random.fork_rng([]):
        torch.manual_seed(5)
        return small.NETWORKS[name]().double()


@every_network
def test_bad_teacher_is_the_plain_loop(name):
    model, forget, remain = small.network(name), small.forget(), small.remain()
    outcome = unlearn(model, forget, remain, BadTeacher(2.0, TWO_EPOCHS, fresh=lambda: another(name)))
    good, bad = copy.deepcopy(model).eval(), another(name).eval()

    def loss(kept, lost):
        first, second = remain.tensors[0][kept], forget.tensors[0][lost]
        teacher = torch.cat([good(first), bad(second)]).detach()
        return lambda model: reference.divergence(teacher, model(torch.cat([first, second])), 2.0)

    losses = []
    for epoch in range(2):
        steps = reference.cut(REMAIN, SIZE, seed=3 + epoch)
        losses += [loss(*rows) for rows in zip(steps, reference.shares(FORGET, len(steps), seed=3 + epoch), strict=True)]
    small.assert_close(outcome.model, reference.descended(model, losses, rate=0.02, decay=0.01), model)
    assert outcome.edit is None


def test_without_a_builder_the_bad_teacher_is_the_network_reset():
    def rebuilt():
        torch.manual_seed(TWO_EPOCHS.seed)
        model = small.network("no BatchNorm")
        for module in (model[3], model[0]):
            module.reset_parameters()
        return model

    model = small.network("no BatchNorm")
    found, expected = (
        unlearn(model, small.forget(), small.remain(), BadTeacher(tuning=TWO_EPOCHS, fresh=fresh)).model for fresh in (None, rebuilt)
    )
    properties.assert_same_weights(found.state_dict(), expected.state_dict())


@every_network
@pytest.mark.parametrize("max_epochs", [0, 1, 2])
def test_scrub_is_the_plain_loop(name, max_epochs):
    model, forget, remain = small.network(name), small.forget(), small.remain()
    method = SCRUB(obey_weight=0.5, task_weight=0.9, temperature=3.0, max_epochs=max_epochs, forget_batch_size=4, tuning=TWO_EPOCHS)
    outcome = unlearn(model, forget, remain, method)
    teacher = copy.deepcopy(model).eval()

    def apart(images):
        goal = teacher(images).detach()
        return lambda model: 9.0 * reference.divergence(goal, model(images), 3.0)

    def away(rows):
        return lambda model: -apart(forget.tensors[0][rows])(model)

    def towards(rows):
        images, labels = remain[rows]

        def loss(model):
            # One pass of the student, for BatchNorm counts passes.
            logits = model(images)
            return 4.5 * reference.divergence(teacher(images).detach(), logits, 3.0) + 0.9 * cross_entropy(logits, labels)

        return loss

    losses = []
    for epoch in range(2):
        if epoch < max_epochs:
            losses += [away(rows) for rows in reference.cut(FORGET, 4, seed=3 + epoch)]
        losses += [towards(rows) for rows in reference.cut(REMAIN, SIZE, seed=3 + epoch)]
    small.assert_close(outcome.model, reference.descended(model, losses, rate=0.02, decay=0.01), model)


def test_max_steps_take_the_student_away_from_its_teacher():
    model, (images, _) = small.network("residual"), small.forget().tensors
    found = []
    for max_epochs in (0, 2):
        student = unlearn(model, small.forget(), small.remain(), SCRUB(max_epochs=max_epochs, tuning=TWO_EPOCHS)).model
        with torch.no_grad():
            found.append(float(divergence(model(images), student(images), 1.0).mean()))
    assert found[1] > found[0]


def test_divergence_is_the_kl_divergence():
    generator = torch.Generator().manual_seed(0)
    teacher, student = torch.randn(2, 6, 5, dtype=torch.float64, generator=generator)
    expected = kl_div((student / 2).log_softmax(1), (teacher / 2).softmax(1), reduction="none").sum(1)
    torch.testing.assert_close(divergence(teacher, student, 2.0), expected)
    assert torch.equal(divergence(teacher, teacher, 2.0), torch.zeros(6, dtype=torch.float64))
    positions = [wide.unsqueeze(2).expand(-1, -1, 3) for wide in (teacher, student)]
    torch.testing.assert_close(divergence(*positions, 2.0), 3 * expected)
    assert divergence(teacher.half(), student.half(), 2.0).dtype == torch.float32


@pytest.mark.parametrize("method", [BadTeacher(tuning=cases.QUICK), SCRUB(tuning=cases.QUICK)], ids=["bad teacher", "scrub"])
def test_teachers_are_in_eval_mode_and_never_move(method):
    seen = {}

    class Spy(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = cases.model()

        def forward(self, x):
            seen.setdefault(id(self), (self, []))[1].append((self.training, self.inner[7].weight.detach().clone()))
            return self.inner(x)

    unlearn(Spy(), cases.forget(), cases.remain(), method, watch={})
    # The student is the only one ever in train mode.
    teachers = [calls for _, calls in seen.values() if not any(training for training, _ in calls)]
    assert len(teachers) >= (2 if isinstance(method, BadTeacher) else 1)
    assert all(torch.equal(weight, calls[0][1]) for calls in teachers for _, weight in calls)


BAD = {
    "temperature": [lambda: BadTeacher(0.0), lambda: SCRUB(temperature=float("inf"))],
    "max_epochs": [lambda: SCRUB(max_epochs=-1)],
    "forget_batch_size": [lambda: SCRUB(forget_batch_size=0)],
}


@pytest.mark.parametrize("argument, make", [(argument, make) for argument, makes in BAD.items() for make in makes])
def test_bad_settings_are_named(argument, make):
    with pytest.raises(InputError, match=f"^{argument}: "):
        make()
