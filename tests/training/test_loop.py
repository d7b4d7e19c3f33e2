"""The training loop: schedules at exact times, determinism, what it leaves alone, and how it fails."""

import random

import numpy
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from expunge.data.batches import as_batches
from expunge.data.objective import Objective
from expunge.errors import DivergedError, InputError, ModelError
from expunge.training import holding
from expunge.training.loop import Phase, train, train_phases
from expunge.training.schedules import Constant, Steps, replay
from expunge.training.side_by_side import Training, train_together
from expunge.training.tuning import Tuning


def data(samples: int = 40) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randint(3, (samples,), generator=generator))


def network(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def rates_used(schedule, samples: int, batch_size: int) -> list[float]:
    """The learning rate at every optimizer step."""
    seen: list[float] = []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            seen.append(self.param_groups[0]["lr"])
            return super().step(closure)

    train(network(), data(samples), Tuning(schedule, batch_size, optimizer=lambda parameters: Spy(parameters, lr=1.0)))
    return seen


def equal(first: nn.Module, second: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True))


def test_steps_decay_at_their_epochs():
    schedule = Steps()
    assert [schedule.rate(time) for time in (0, 79.99, 80, 119.99, 120, 159)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


def test_warmup_rises_to_the_base():
    schedule = Steps(base=0.4, warmup=2)
    assert [schedule.rate(time) for time in (0, 1, 2)] == pytest.approx([0, 0.2, 0.4])


def test_replay_decays_at_the_same_fractions():
    schedule = replay(Steps(), epochs=5)
    assert schedule.epochs == 5
    assert [schedule.rate(time) for time in (0, 2.49, 2.5, 3.74, 3.75, 4.99)] == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])


@pytest.mark.parametrize("iterations", range(1, 60))
def test_replay_decays_on_the_very_iteration(iterations):
    schedule = replay(Steps(epochs=30, decays=(15, 22.5)), epochs=7)
    for step in range(7 * iterations):
        passed = (2 * step >= 7 * iterations) + (4 * step >= 3 * 7 * iterations)
        assert schedule.rate(step // iterations + step % iterations / iterations) == pytest.approx(0.1 * 0.1**passed)


def test_the_rate_is_set_at_every_iteration():
    assert rates_used(replay(Steps(), epochs=1), samples=40, batch_size=5) == pytest.approx([0.1] * 4 + [0.01] * 2 + [0.001] * 2)


def test_training_lowers_the_loss():
    model, samples = network(), data()
    losses = []
    for _ in range(2):
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(model.eval()(samples.tensors[0]), samples.tensors[1])))
        train(model, samples, Tuning(Constant(0.1, 20), batch_size=8))
    assert losses[1] < losses[0]


def test_the_same_seed_gives_the_same_weights_and_another_seed_does_not():
    first, second, other = network(), network(), network()
    train(first, data(), Tuning(Constant(0.1, 3), batch_size=7, seed=4))
    torch.rand(100)
    train(second, data(), Tuning(Constant(0.1, 3), batch_size=7, seed=4))
    train(other, data(), Tuning(Constant(0.1, 3), batch_size=7, seed=5))
    assert equal(first, second)
    assert not equal(first, other)


def test_a_shuffling_loader_is_seeded_too():
    first, second = network(), network()
    for model in (first, second):
        train(model, DataLoader(data(), batch_size=8, shuffle=True), Tuning(Constant(0.1, 2)))
    assert equal(first, second)


def test_random_states_modes_and_frozen_parameters_stay():
    model = network()
    model[1].eval()
    model[0].weight.requires_grad_(False)
    weight = model[0].weight.clone()
    modes = [module.training for module in model.modules()]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()
    train(model, data(), Tuning(Constant(0.1, 2)))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(model[0].weight, weight)


def test_train_works_where_gradients_are_switched_off():
    model, before = network(), network()
    with torch.no_grad():
        train(model, data(), Tuning(Constant(0.1, 1)))
    assert not equal(model, before)


@pytest.mark.parametrize("optimizer", [None, lambda parameters: torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.1)])
def test_a_mask_keeps_weights_at_zero(optimizer):
    """It is the only switch: `Tuning.freeze` is for methods that mask."""
    model = network()
    mask = {"0.weight": torch.zeros(8, 6, dtype=torch.bool)}
    mask["0.weight"][:, :3] = True
    with torch.no_grad():
        model[0].weight.masked_fill_(mask["0.weight"], 0)
    for masked, freeze in ((True, True), (True, False), (False, True)):
        tuning = Tuning(Constant(0.01, 3), weight_decay=0.1, freeze=freeze, optimizer=optimizer)
        train(model, data(), tuning, mask=mask if masked else None)
        assert (model[0].weight[:, :3] == 0).all() == masked
        assert (model[0].weight[:, 3:] != 0).all()


def test_after_epoch_is_called_with_the_number_of_epochs_done():
    seen: list[int] = []
    train(network(), data(), Tuning(Constant(0.1, 3)), after_epoch=seen.append)
    assert seen == [1, 2, 3]


def ones(logits, targets):
    return 1 + 0 * logits.sum(1)


def test_weights_that_the_last_step_destroys_are_noticed():
    with pytest.raises(DivergedError, match="0.weight, 0.bias.* no longer finite after epoch 1"):
        train(network(), data(), Tuning(Constant(1e38, 1), batch_size=40, momentum=0, weight_decay=1e3))


def test_an_optimizer_of_other_parameters_is_refused():
    model, other = network(), network()
    model[0].weight.grad = torch.ones(8, 6)
    for wrong in (lambda parameters: torch.optim.SGD(other.parameters(), lr=0.1), lambda parameters: None):
        before = [value.clone() for value in model.state_dict().values()]
        with pytest.raises(InputError, match="optimizer: must build a torch optimizer from the parameters it is given"):
            train(model, data(), Tuning(Constant(0.1, 1), optimizer=wrong))
        assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    some = Tuning(Constant(0.1, 1), optimizer=lambda parameters: torch.optim.SGD(list(parameters)[:2], lr=0.1))
    train(model, data(), some)


def test_divergence_names_epoch_and_iteration():
    samples = data(32)
    calls = []

    def losses(logits, targets):
        calls.append(1)
        return nn.functional.cross_entropy(logits, targets, reduction="none") * (float("nan") if len(calls) == 7 else 1)

    with pytest.raises(DivergedError, match="epoch 2, iteration 3 of 4"):
        train(network(), samples, Tuning(Constant(0.1, 5), batch_size=8), Objective(losses=losses))


@pytest.mark.parametrize("fault", ["label", "NaN", "rate", "counter"])
def test_an_error_leaves_the_model_as_it_was(fault):
    class Counting(nn.Module):
        """Its buffer is another tensor after every call."""

        def __init__(self):
            super().__init__()
            self.net = network()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.net(x)

    x, y = (tensor.clone() for tensor in data().tensors)
    model = Counting() if fault == "counter" else network()
    if fault in ("label", "counter"):
        y[33] = 9
    elif fault == "NaN":
        x[33] = torch.nan
    before, buffers = {name: value.clone() for name, value in model.state_dict().items()}, [id(each) for each in model.buffers()]
    with pytest.raises((InputError, DivergedError)):
        train(model, TensorDataset(x, y), Tuning(Constant(1e30 if fault == "rate" else 0.1, epochs=2), batch_size=8))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [id(each) for each in model.buffers()] == buffers


def test_a_model_of_inference_mode_is_refused():
    with torch.inference_mode():
        model = network()
    with pytest.raises(ModelError, match=r"model: 0.weight was made under torch.inference_mode\(\) and cannot be trained"):
        train(model, data(), Tuning(Constant(0.1, epochs=1)))


@pytest.mark.parametrize("keep", [5, True, "", "/"])
def test_where_a_state_is_kept_is_checked_before_the_training(keep):
    model = network()
    with pytest.raises(InputError, match="keep: must be"):
        train(model, data(), Tuning(Constant(0.1, epochs=1)), keep=keep)


def test_random_state_is_given_back_after_a_failure():
    model, state = network().eval(), torch.get_rng_state()
    with pytest.raises(DivergedError):
        train(model, data(), Tuning(Constant(1e30, 3)))
    assert torch.equal(torch.get_rng_state(), state)
    assert not model.training


BAD = {
    "epochs": lambda: replay(Steps(), epochs=0),
    "base": lambda: Constant(base=0.0, epochs=1),
    "factor": lambda: Steps(factor=float("nan")),
    "batch_size": lambda: Tuning(batch_size=0),
    "precision": lambda: Tuning(precision="float16"),
    "data": lambda: train(network(), [], Tuning()),
}


@pytest.mark.parametrize("argument", BAD)
def test_bad_settings_are_named(argument):
    with pytest.raises(InputError, match=f"^{argument}: "):
        BAD[argument]()


def test_nan_in_the_data_is_an_input_error():
    samples = data()
    samples.tensors[0][7, 2] = float("nan")
    with pytest.raises(InputError, match="data: .*finite; found nan"):
        train(network(), samples, Tuning())


def test_nothing_to_train_is_a_model_error():
    with pytest.raises(ModelError, match="requires a gradient"):
        train(network().requires_grad_(False), data(), Tuning())


def test_one_phase_without_a_loss_is_plain_training():
    plain, phased = network(), network()
    tuning = Tuning(Constant(0.1, 3), batch_size=7, seed=4)
    train(plain, data(), tuning)
    phase = Phase(as_batches(data(), batch_size=7), "remain")
    train_phases(phased, lambda epoch: [phase], tuning)
    assert equal(plain, phased)


def test_phases_come_in_turn_and_share_the_clock():
    seen, rates = [], []

    class Spy(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    def phase(name, samples):
        def loss(model, batch, losses):
            seen.append(name)
            return losses(model(batch[0]), batch[1]).mean()

        return Phase(as_batches(data(samples), batch_size=5), name, loss)

    up, down = phase("up", 10), phase("down", 15)
    tuning = Tuning(Steps(1.0, 2, decays=(0.4, 1.5), factor=0.5), optimizer=lambda parameters: Spy(parameters, lr=9.0))
    train_phases(network(), lambda epoch: [up, down] if epoch == 0 else [down], tuning)
    assert seen == ["up"] * 2 + ["down"] * 3 + ["down"] * 3
    # Five steps in the first epoch, so 0.4 epochs are over after two; three in the second, so 1.5 between its second and third.
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.25]


def test_phases_share_momentum():
    def step_on(samples):
        return Phase(as_batches(data(samples), batch_size=samples), "remain")

    def trained(epochs):
        model = nn.Sequential(nn.Linear(6, 3)).double()
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 18).reshape(3, 6))
            model[0].bias.zero_()
        doubled = Objective(outputs=lambda model, batch: model(batch[0].double()))
        train_phases(model, lambda epoch: [step_on(8)] * (3 // epochs), Tuning(Constant(0.1, epochs), momentum=0.9), doubled)
        return model

    # Three epochs of a step, or one epoch of three: the data are one whole batch, so only the state of the optimizer could differ.
    torch.testing.assert_close(trained(1)[0].weight, trained(3)[0].weight, rtol=1e-12, atol=0)


def test_errors_name_the_data_of_their_phase():
    bad = data()
    bad.tensors[0][0, 0] = float("inf")
    with pytest.raises(InputError, match="^forget: .*finite"):
        train_phases(network(), lambda epoch: [Phase(as_batches(data()), "remain"), Phase(as_batches(bad), "forget")], Tuning())


def test_a_bad_loss_is_found_by_its_place_in_the_epoch():
    good = Phase(as_batches(data(20), batch_size=10), "remain")
    bad = Phase(as_batches(data(20), batch_size=10), "forget", lambda model, batch, losses: model(batch[0]).sum() * float("nan"))
    with pytest.raises(DivergedError, match="epoch 2, iteration 3 of 4"):
        train_phases(network(), lambda epoch: [good, bad] if epoch else [good], Tuning(Constant(0.01, 3)))


@pytest.mark.parametrize("optimizer", [None, lambda parameters: torch.optim.AdamW(parameters, lr=1.0, weight_decay=0.1)])
def test_only_masked_weights_move(optimizer):
    model, before = network(), network()
    mask = {"0.weight": torch.zeros(8, 6, dtype=torch.bool)}
    mask["0.weight"][:, :3] = True
    phase = Phase(as_batches(data(), batch_size=8), "remain")
    tuning = Tuning(Constant(0.01, 3), weight_decay=0.1, optimizer=optimizer)
    train_phases(model, lambda epoch: [phase], tuning, hold=lambda optimizer: holding.only(model, mask, optimizer))
    assert torch.equal(model[0].weight[:, 3:], before[0].weight[:, 3:])
    assert (model[0].weight[:, :3] != before[0].weight[:, :3]).all()
    for name, value in before.named_parameters():
        assert name == "0.weight" or torch.equal(value, model.get_parameter(name)), name
    assert not model[0].weight._backward_hooks


def test_the_mean_loss_of_an_epoch_is_that_of_its_steps():
    noted, losses = [], []

    def counting(logits, targets):
        found = nn.functional.cross_entropy(logits, targets, reduction="none")
        losses.append(float(found.detach().mean()))
        return found

    # Of 21 samples the last batch of ten is a lone one, which BatchNorm cannot take.
    training = Training(network(), data(21), Tuning(Constant(0.1, 2), batch_size=10), note_loss=lambda *found: noted.append(found))
    train_together([training], Objective(losses=counting))
    assert noted == [(1, pytest.approx(sum(losses[:2]) / 2)), (2, pytest.approx(sum(losses[2:]) / 2))]


def test_bfloat16_computes_low_and_keeps_the_weights_as_they_are():
    model, noted, seen = network(), [], []
    model[3] = nn.Identity()
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    tuning = Tuning(Constant(0.1, 20), batch_size=8, precision="bfloat16")
    train_together([Training(model, data(), tuning, note_loss=lambda epoch, loss: noted.append(loss))])
    assert {*seen} == {torch.bfloat16} and {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert noted[-1] < 0.8 * noted[0]


def test_weight_decay_of_sparse_gradients_is_refused() -> None:
    """torch's own error comes from its optimizer, and names neither."""
    model = nn.Sequential(nn.EmbeddingBag(5, 3, sparse=True))
    words = TensorDataset(torch.arange(12).view(6, 2) % 5, torch.arange(6) % 3)
    with pytest.raises(InputError, match=r"tuning: weight_decay must be 0 .* of 0 .*; found 0.1"):
        train(model, words, Tuning(Constant(0.1, 1), weight_decay=0.1))
    before = model[0].weight.detach().clone()
    train(model, words, Tuning(Constant(0.1, 1), weight_decay=0.0))
    assert not torch.equal(before, model[0].weight)
