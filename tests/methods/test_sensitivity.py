"""MuMis: equal to a plain loop over single samples, stopped by its rule, lost networks noticed, layers and inputs of every kind."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError, ModelError, UncheckedWarning
from expunge.methods import MuMis
from expunge.training.schedules import Constant
from expunge.training.tuning import Tuning
from expunge.unlearning import unlearn
from tests import reference
from tests.methods import cases, properties, small
from tests.methods.small import CLASSES, FORGET

every_network = pytest.mark.parametrize("name", small.NETWORKS)
GENTLE = Tuning(Constant(1e-3, 3), batch_size=3, momentum=0.9, weight_decay=0.01, seed=3, eval_mode=True)


def square(model, image, label):
    """‖∂z_label/∂x‖² of one sample."""
    image = image[None].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(image)[0, label], image, create_graph=True)
    return (gradient**2).sum()


def squares(model, data, labels):
    """mean ‖∂z_label/∂x‖², one sample at a time."""
    return torch.stack([square(model, image, label) for image, label in zip(data.tensors[0], labels, strict=True)]).mean()


def gap(model, data):
    """The mean over all classes c but the own of ‖∂z_y/∂x‖² − ‖∂z_c/∂x‖²."""
    own, *others = (float(squares(model, data, (data.tensors[1] + shift) % CLASSES).detach()) for shift in range(CLASSES))
    return own - sum(others) / len(others)


def drawn(labels, generator):
    return (labels + torch.randint(1, CLASSES, labels.shape, generator=generator)) % CLASSES


def plain_loop(model, data, tuning):
    """The new model, and √(s/s_first) of the other logits after every epoch."""
    model = copy.deepcopy(model).eval()
    measured = drawn(data.tensors[1], torch.Generator().manual_seed(tuning.seed))
    size, first = float(squares(model, data, data.tensors[1]).detach()), float(squares(model, data, measured).detach())
    generator, ratios = torch.Generator().manual_seed(tuning.seed), []
    optimizer = torch.optim.SGD(model.parameters(), lr=tuning.schedule.rate(0), momentum=tuning.momentum, weight_decay=tuning.weight_decay)
    for epoch in range(tuning.schedule.epochs):
        for rows in reference.cut(FORGET, tuning.batch_size, seed=tuning.seed + epoch):
            part = TensorDataset(data.tensors[0][rows], data.tensors[1][rows])
            other = drawn(part.tensors[1], generator)
            optimizer.zero_grad()
            ((squares(model, part, part.tensors[1]) - squares(model, part, other)) / size).backward()
            optimizer.step()
        ratios.append(math.sqrt(float(squares(model, data, measured).detach()) / first))
    return model, ratios


@every_network
def test_it_is_the_plain_loop(name):
    model, forget = small.network(name), small.forget()
    outcome = unlearn(model, forget, method=MuMis(None, GENTLE))
    small.assert_close(outcome.model, plain_loop(model, forget, GENTLE)[0], model)
    assert outcome.edit is None
    assert gap(outcome.model, forget) < gap(model, forget)


def test_two_linear_logits_have_a_closed_form():
    """∂z_k/∂x = w_k, so w_y ← (1 − 2η/S)·w_y and w_c ← (1 + 2η/S)·w_c, S = ‖w_y‖²; biases stay."""
    model = nn.Linear(2, 2).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[3.0, 4.0], [6.0, 8.0]]))
    bias = model.bias.detach().clone()
    tuning = Tuning(Constant(0.05, 1), batch_size=4, momentum=0.0, weight_decay=0.0, eval_mode=True)
    changed = unlearn(model, (torch.randn(4, 2).double(), torch.zeros(4, dtype=torch.int64)), method=MuMis(None, tuning)).model
    factors = torch.tensor([[1 - 2 * 0.05 / 25], [1 + 2 * 0.05 / 25]], dtype=torch.float64)
    torch.testing.assert_close(changed.weight.detach(), factors * torch.tensor([[3.0, 4.0], [6.0, 8.0]], dtype=torch.float64))
    assert torch.equal(changed.bias, bias)


class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x / 255)


def test_one_rate_suits_inputs_of_any_scale():
    inner, (images, labels) = small.network("no BatchNorm"), small.forget().tensors
    expected = unlearn(inner, (images, labels), method=MuMis(None, GENTLE)).model
    found = unlearn(Scaled(inner), (images * 255, labels), method=MuMis(None, GENTLE)).model
    small.assert_close(found.inner, expected, inner)


@pytest.mark.parametrize("recovery", [0.5, 1.02, 1.06, 2.9])
def test_it_stops_where_the_rule_says_and_not_before(recovery):
    model, forget = small.network("residual"), small.forget()
    tuning = Tuning(Constant(2e-3, 6), batch_size=4, momentum=0.9, weight_decay=0.0, seed=3, eval_mode=True)
    _, ratios = plain_loop(model, forget, tuning)
    ended = [ratio > recovery and ratio > min([1.0, *ratios[:done]]) for done, ratio in enumerate(ratios)]
    epoch = ended.index(True) + 1 if any(ended) else 6
    outcome = unlearn(model, forget, method=MuMis(recovery, tuning))
    assert outcome.history[-1].epoch == epoch
    assert (epoch == 6) == (recovery == 2.9)


def test_the_rules_epochs_differ():
    """Or the test above would prove nothing."""
    tuning = Tuning(Constant(2e-3, 6), batch_size=4, momentum=0.9, weight_decay=0.0, seed=3, eval_mode=True)
    ends = {r: unlearn(small.network("residual"), small.forget(), method=MuMis(r, tuning)).history[-1].epoch for r in (0.5, 1.02, 1.06)}
    assert len({*ends.values()}) >= 2 and max(ends.values()) < 6


def test_a_network_that_explodes_is_not_returned():
    model = small.network("residual")
    tuning = Tuning(Constant(0.03, 200), batch_size=8, momentum=0.9, weight_decay=0.0, eval_mode=True)
    message = r"^the input sensitivity of the other logits is .* outside \[0, 3\]: the network is lost; give a lower rate|no longer finite"
    with properties.assert_untouched(model), pytest.raises(DivergedError, match=message):
        unlearn(model, small.forget(), method=MuMis(None, tuning))


def test_a_network_that_dies_is_not_returned():
    """Weight decay shrinks every logit's sensitivity."""
    tuning = Tuning(Constant(0.1, 3), batch_size=8, momentum=0.0, weight_decay=5.0, eval_mode=True)
    with pytest.raises(DivergedError, match=r"is 0\.\d+ times what it was, outside \[0.25, 3\]: the network is lost"):
        unlearn(small.network("no BatchNorm"), small.forget(), method=MuMis(None, tuning))


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_a_network_on_the_way_there_is_doubted(decay):
    """Weight decay of 0: s ends above twice its first value; of 3: below half."""
    rate, epochs = (0.1, 3) if decay else (5e-3, 30)
    tuning = Tuning(Constant(rate, epochs), batch_size=8, momentum=0.0, weight_decay=decay, eval_mode=True)
    size = r"0\.[34]" if decay else r"2\."
    with pytest.warns(UncheckedWarning, match=rf"^the input .* is {size}\d* times what it was, so the rest .* may be lost; look at"):
        unlearn(small.network("no BatchNorm"), small.forget(), method=MuMis(None, tuning))


def test_a_dead_network_is_refused():
    model = small.network("no BatchNorm")
    with torch.no_grad():
        model[-1].weight.zero_()
    with pytest.raises(ModelError, match="needs logits that depend on the inputs"):
        unlearn(model, small.forget(), method=MuMis())


class Attending(nn.Module):
    """Rows of an image attend to each other, by torch's layer and by its function."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, x):
        rows = self.layer(x[:, 0])
        return self.head(F.scaled_dot_product_attention(rows, rows, rows).flatten(1))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x):
        return self.head(self.layer(x[:, 0])[0][:, -1])


LAYERS = {
    "max pooling, in place": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, CLASSES)
    ),
    "group norm, SiLU": lambda: nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES)
    ),
    "attention": Attending,
    "recurrent": Recurrent,
}


@pytest.mark.parametrize("eval_mode", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind_have_gradients_of_gradients(name, eval_mode):
    with torch.random.fork_rng([]):
        torch.manual_seed(4)
        model = LAYERS[name]().double()
    tuning = Tuning(Constant(1e-3, 2), batch_size=4, momentum=0.0, weight_decay=0.0, eval_mode=eval_mode)
    changed = unlearn(model, small.forget(), method=MuMis(None, tuning)).model
    properties.assert_finite(changed)
    if eval_mode:  # of which the plain loop is one
        tuning = Tuning(Constant(1e-3, 2), batch_size=4, momentum=0.0, weight_decay=0.0, eval_mode=True)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            small.assert_close(changed, plain_loop(model, small.forget(), tuning)[0], model)


def test_batch_norm_keeps_its_statistics_by_default():
    model = small.network("residual")
    changed = unlearn(model, small.forget(), method=MuMis()).model
    assert all(torch.equal(value, dict(changed.named_buffers())[name]) for name, value in model.named_buffers())


class Once(torch.autograd.Function):
    """A function without a second derivative."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, gradient):
        raise NotImplementedError("the derivative for 'once_backward' is not implemented")


def test_a_layer_without_second_derivatives_is_named():
    class Layer(nn.Module):
        def forward(self, x):
            return Once.apply(x)

    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3), Layer())
    with pytest.raises(
        ModelError, match="^model: MuMis needs gradients of gradients, which one of its layers does not have; found: the der"
    ):
        unlearn(model, cases.forget(), method=MuMis())


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(6, 5), nn.Linear(5, 3)

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None):
        embedded = self.table(input_ids) if inputs_embeds is None else inputs_embeds
        return self.head((embedded * attention_mask[..., None]).sum(1).tanh())


def sentences(**entries):
    mask = torch.ones(16, 4)
    mask[:, 3] = 0
    return [{**entries, "attention_mask": mask, "labels": torch.arange(16) % 3}]


def test_token_ids_are_refused_and_embedded_ones_are_not():
    model = Words()
    message = (
        r"^forget: MuMis needs inputs of floating-point numbers; token ids .* give embedded tokens \(inputs_embeds\) .*; found \{input_ids"
    )
    with pytest.raises(InputError, match=message):
        unlearn(model, sentences(input_ids=torch.randint(6, (16, 4))), method=MuMis())
    embedded = sentences(inputs_embeds=torch.randn(16, 4, 5))
    by_rule, by_name = (unlearn(model, embedded, method=MuMis(inputs=names)).model for names in (None, "inputs_embeds"))
    properties.assert_same_weights(by_rule.state_dict(), by_name.state_dict())
    assert not torch.equal(by_rule.head.weight, model.head.weight)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(2, 3)

    def forward(self, a, b):
        return self.first(a).tanh() + self.second(b).tanh()


def test_several_inputs_must_be_named():
    forget = TensorDataset(torch.randn(8, 4), torch.randn(8, 2), torch.arange(8) % 3)
    with pytest.raises(InputError, match=r"^forget: MuMis needs to know which .* name them, as in inputs=\(0,\) or \(0, 1\); found"):
        unlearn(Two(), forget, method=MuMis())
    model = Two()
    changed = unlearn(model, forget, method=MuMis(inputs=(0,), tuning=GENTLE)).model
    both = unlearn(model, forget, method=MuMis(inputs=(0, 1), tuning=GENTLE)).model
    assert not torch.equal(changed.first.weight, model.first.weight)
    assert not torch.equal(changed.second.weight, both.second.weight)
    with pytest.raises(InputError, match=r"^inputs: must name entries of the forget data's batches; found 'pixels' for"):
        unlearn(model, forget, method=MuMis(inputs="pixels"))


def test_logits_that_were_cut_off_the_inputs_are_refused():
    objective = Objective(outputs=lambda model, batch: model(batch[0].detach()))
    with pytest.raises(InputError, match="needs logits that depend on all of the inputs"):
        unlearn(cases.model(), cases.forget(), method=MuMis(), objective=objective, watch={})


def test_labels_that_the_loss_skips_are_refused():
    data = TensorDataset(cases.dataset().tensors[0], torch.where(torch.arange(48) % 3 == 0, 255, 1))
    objective = Objective(losses=nn.CrossEntropyLoss(ignore_index=255, reduction="none"), classes=True)
    with pytest.raises(InputError, match=r"^forget: MuMis needs labels in \[0, 3\); found 255"):
        unlearn(cases.model(), Subset(data, range(6)), method=MuMis(), objective=objective, watch={})


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"recovery": 0}, r"^recovery: must be in \(0, 3.0\); found 0"),
        ({"recovery": 3.0}, r"^recovery: must be in \(0, 3.0\); found 3"),
        ({"tuning": None}, "^tuning: MuMis trains, and needs a Tuning"),
        ({"inputs": ()}, "^inputs: must name the inputs in a batch"),
        ({"inputs": 1.5}, "^inputs: must name the inputs in a batch"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(InputError, match=message):
        MuMis(**settings)


def test_the_work_is_bounded_by_default():
    method = MuMis()
    assert method.tuning.schedule.epochs == 40 and method.tuning.eval_mode and method.recovery == 1.5
    assert MuMis(inputs=["a", 1]).inputs == ("a", 1) and hash(MuMis(inputs=0)) == hash(MuMis(inputs=(0,)))
