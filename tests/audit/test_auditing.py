"""The whole audit of small networks: verdicts, what is shown and saved, and what is refused."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

import expunge
from expunge.audit.intervals import auc_interval
from expunge.audit.keeping import Folder
from expunge.audit.threads import fitting_threads
from expunge.errors import DivergedError, InputError, UncheckedWarning
from expunge.runtime.modes import threads as running_on
from tests.audit.small import FORGOTTEN, Filter, clouds, fresh, parts, trained

QUICK = expunge.audit.Settings(rounds=2, steps=4, rate=0.002, batch_size=64)


@pytest.fixture(scope="module")
def parts_kept(tmp_path_factory):
    return Folder(tmp_path_factory.mktemp("parts"))


def run(after, retrained=None, before=None, **options):
    return expunge.audit(before or trained(0), after, *parts(), retrained, settings=QUICK, **options)


def clean(*seeds):
    return [trained(seed, without=True) for seed in seeds]


def masked() -> nn.Module:
    return expunge.unlearn(trained(0), *parts()[:2], expunge.MaskClassifier(), watch={}).model


@pytest.mark.parametrize(
    ("after", "word", "alone"),
    [
        (lambda: clean(20)[0], "not distinguished", "cannot tell"),
        (masked, "cosmetic", "cosmetic"),
        (lambda: Filter(trained(0)), "cosmetic", "cosmetic"),
        (lambda: Filter(trained(0), -torch.inf), "cosmetic", "cosmetic"),
        (lambda: trained(0), "partly", "partly"),
        (lambda: fresh(5), "damaged", "damaged"),
    ],
)
def test_verdicts(after, word, alone, parts_kept):
    network, references = after(), clean(21, 22, 23, 24, 25)
    assert run(network, references, keep=parts_kept).verdict.word == word
    assert run(network, references[:1], keep=parts_kept).verdict.word == word
    assert run(network, keep=parts_kept).verdict.word == alone


def test_it_is_shown_within_a_terminal_and_saved(tmp_path):
    report = run(masked(), clean(21, 22, 23))
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 80 and "cosmetic" in str(report) and str(report.asked()) == "class 2 (100 samples)"
    assert "<table>" in report._repr_html_() and "cosmetic" in repr(report)
    assert expunge.audit.load_audit(report.save(tmp_path / "out")) == report
    card = (tmp_path / "out" / "model-card.md").read_text()
    assert "**cosmetic**" in card and "What was done" not in card
    assert "\n\nWhat was done: by hand.\n\n" in replace(report, done="by hand").markdown()
    names = [measure.name for measure in report.measures]
    assert len(names) == len({*names}) and all(measure.words and measure.n for measure in report.measures)
    for text in (str(report), report.markdown()):
        assert "erased" not in text and "compliant" not in text
    with pytest.raises(InputError, match="name: must be one of"):
        report["nonsense"]
    (tmp_path / "out" / "result.json").write_text('{"audit": {"schema": 2}}')
    with pytest.raises(InputError, match="folder: must hold the result.json of an audit"):
        expunge.audit.load_audit(tmp_path / "out")


def test_samples_of_classes_that_stay():
    data = clouds()
    rows = torch.randperm(400, generator=torch.Generator().manual_seed(0))
    forget, remain = Subset(data, rows[:60].tolist()), Subset(data, rows[60:].tolist())
    report = expunge.audit(trained(0), trained(1), forget, remain, parts()[2], settings=QUICK)
    assert report.kind == "samples" and report.verdict.word == "cannot tell" and report.asked() == "60 samples"
    assert not any(measure.name.startswith("probe") for measure in report.measures)


def test_the_mix_of_labels_does_not_tell_forget_samples():
    """A network that never saw them, bad at one label; the forget set has most of that label, the test set as much of each."""
    data, test = clouds(), clouds(240, seed=1)
    chosen = torch.zeros(400, dtype=torch.bool)
    for label, count in ((0, 60), (1, 8), (3, 8)):
        chosen[torch.where(data.tensors[1] == label)[0][:count]] = True
    forget, remain = (Subset(data, torch.where(rows)[0].tolist()) for rows in (chosen, ~chosen))

    class Harder(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) - torch.tensor([6.0, 0, 0, 0])

    clean = fresh(33)
    expunge.train(clean, remain, expunge.Tuning(expunge.Constant(0.05, 12), batch_size=32))
    after = Harder(clean).eval()
    report = expunge.audit(trained(0), after, forget, remain, test, settings=expunge.audit.Settings(rounds=0, bits=()))
    losses = [
        torch.nn.functional.cross_entropy(after(rows), labels, reduction="none").detach()
        for rows, labels in ((data.tensors[0][chosen], data.tensors[1][chosen]), test.tensors)
    ]
    like = test.tensors[1] != 2
    assert auc_interval(-losses[0], -losses[1][like]).high < 0.47  # pooled, it would be convicted: policy.known_area is 0.03
    assert 0.5 in report["loss attack on forget"].after and report.verdict.word == "cannot tell"
    assert 0.5 in report["loss attack on remain"].after


def test_samples_and_a_whole_class_together():
    """What is lost with the class is no damage; a network that still knows the class is not cleared by the few samples."""
    data = clouds()
    chosen = (data.tensors[1] == FORGOTTEN) | (torch.arange(400) < 30)
    forget, remain = (Subset(data, torch.where(rows)[0].tolist()) for rows in (chosen, ~chosen))
    retrained = fresh(31)
    expunge.train(retrained, remain, expunge.Tuning(expunge.Constant(0.05, 12), batch_size=32))

    def found(after, *references):
        return expunge.audit(trained(0), after, forget, remain, parts()[2], references, settings=QUICK)

    report, test = found(retrained), parts()[2].tensors
    stays = test[1] != FORGOTTEN
    assert report.kind == "samples" and report.verdict.word == "cannot tell"
    right = retrained(test[0][stays]).argmax(1) == test[1][stays]
    assert report["remain accuracy (unseen)"].after.value == pytest.approx(float(right.double().mean()))
    assert report["loss attack on forget"].n == report["remain accuracy (unseen)"].n == int(stays.sum())
    original = found(trained(0)).verdict
    assert original.word == "partly" and f"of unseen samples of class {FORGOTTEN} their label" in original.sentence
    assert found(fresh(5)).verdict.word == "damaged"
    with pytest.warns(UncheckedWarning, match="accuracy on unseen samples of the forgotten class"):
        assert found(retrained, trained(1)).retrained == 0


def test_all_networks_and_random_states_stay_as_they_are():
    networks = [trained(0), masked().train(), *clean(21)]
    weights, state = [copy.deepcopy(network.state_dict()) for network in networks], torch.get_rng_state()
    run(networks[1], networks[2])
    for network, before in zip(networks, weights, strict=True):
        assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
        assert all(parameter.grad is None or name for name, parameter in network.named_parameters())
    assert networks[1].training and torch.equal(state, torch.get_rng_state())


def test_a_reference_that_saw_the_forget_data_is_left_out():
    with pytest.warns(UncheckedWarning, match="retrained: network 1 seems to have been trained on the forget data"):
        report = run(masked(), [trained(1), *clean(21)])
    assert report.retrained == 1 and len(report["re-learning"].retrained) == 1


def test_a_network_beside_itself_is_not_cleared():
    """The classifier masked and called retrained too; and one retrained network, which twice is not two seeds."""
    cheat = masked()
    with pytest.warns(UncheckedWarning, match="retrained: network 1 has the answers of after"):
        report = run(cheat, [copy.deepcopy(cheat)])
    assert report.retrained == 0 and report.verdict.word == "cosmetic"
    with pytest.warns(UncheckedWarning, match="network 2 has the answers of retrained 1, to the bit"):
        report = run(clean(20)[0], clean(21) * 2)
    assert report.retrained == 1 and report.verdict.missing


def test_an_original_that_does_not_know_the_class_is_named():
    """As where before and after are given the wrong way round."""
    with pytest.warns(UncheckedWarning, match=r"before: does not know the forgotten class \(accuracy on unseen samples 0 \["):
        assert run(trained(0), before=clean(20)[0]).verdict.word == "partly"


def test_where_one_class_stays_the_classifier_is_not_asked():
    """Its answers are one yes or no there, which a network that never saw the other class has right by chance."""
    forget, remain, test = parts()
    one, two = (Subset(part, [row for row in range(len(part)) if part[row][1] in (0, FORGOTTEN)]) for part in (remain, test))
    names = [measure.name for measure in expunge.audit(trained(0), *clean(20), forget, one, two, settings=QUICK).measures]
    assert "read by the original's classifier" not in names and "re-learning" in names


def test_networks_called_never_trained_on_the_samples_are_looked_at():
    for stranger in (trained(0), trained(1)):
        with pytest.warns(UncheckedWarning, match="out: network 1 seems to have been trained on the forget data"):
            report = run(masked(), clean(21), out=[stranger])
        assert all(not measure.name.startswith("RMIA") for measure in report.measures)
    with pytest.warns(UncheckedWarning, match="out: network 2 has the answers of after"):
        run(clean(20)[0], clean(21), out=[*clean(21), *clean(20)])


def test_frozen_networks_re_learn_too():
    """Networks that only answer are often frozen; without re-learning a filter has one witness less."""
    frozen = [copy.deepcopy(network).requires_grad_(False) for network in (trained(0), masked(), *clean(21))]
    before, after, reference = frozen
    report, free = run(after, [reference], before), run(masked(), clean(21))
    assert report["re-learning"] == free["re-learning"] and report.verdict == free.verdict
    assert not any(parameter.requires_grad for network in frozen for parameter in network.parameters())


def test_a_test_set_of_forgotten_labels_alone_is_named():
    forget, remain, test = parts()
    alone = Subset(test, torch.where(test.tensors[1] == FORGOTTEN)[0].tolist())
    with pytest.raises(InputError, match="^test: must hold samples of labels that stay"):
        expunge.audit(trained(0), masked(), forget, remain, alone, settings=QUICK)


def test_parts_are_kept_and_not_computed_again(tmp_path, monkeypatch):
    first = run(masked(), clean(21), keep=Folder(tmp_path))
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) >= 12
    monkeypatch.setattr("expunge.audit.auditing.relearn", lambda *_: pytest.fail("computed again"))
    assert run(masked(), clean(21), keep=Folder(tmp_path)) == first
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == files
    # A wrapper has the weights of what it wraps, and is another network all the same.
    monkeypatch.undo()
    assert run(Filter(trained(0)), clean(21), keep=Folder(tmp_path))["forget accuracy"].after.value == 0
    next(iter(files)).write_text("{ cut")
    assert run(masked(), clean(21), keep=Folder(tmp_path)) == first


def test_bad_input_is_named():
    forget, remain, test = parts()
    model = trained(0)
    broken = fresh(0)
    with torch.no_grad():
        broken[0].weight[0, 0] = torch.nan
    cases = {
        "remain: must not hold samples of the forget set": lambda: expunge.audit(model, model, forget, clouds(), test),
        "test: must not hold samples of the forget set": lambda: expunge.audit(model, model, forget, remain, ConcatDataset([test, forget])),
        "test: must not hold samples of the remain set": lambda: expunge.audit(model, model, forget, remain, ConcatDataset([test, remain])),
        "after: must have as many classes": lambda: run(nn.Linear(12, 6)),
        "retrained 2: must have as many classes": lambda: run(model, [trained(1, without=True), nn.Linear(12, 6)]),
        "retrained 1: must have as many classes as the original network, 4; its labels must be": lambda: run(model, nn.Linear(12, 3)),
        "after: must have as many classes as the original network, 4; its labels must be": lambda: run(nn.Linear(12, 3)),
        "^test: must not be empty": lambda: expunge.audit(model, model, forget, remain, Subset(test, [])),
        "must not be the forget set|must not hold samples of the forget set": lambda: expunge.audit(model, model, forget, remain, forget),
        "^test: inputs and targets must be finite": lambda: expunge.audit(
            model, model, forget, remain, TensorDataset(torch.full_like(test.tensors[0], torch.nan), test.tensors[1])
        ),
        "found 1 sample$": lambda: expunge.audit(model, model, Subset(forget, [0]), remain, test),
        "retrained: must be a network, or a list": lambda: run(model, 3),
        "forget: must hold 20 samples or more": lambda: expunge.audit(model, model, Subset(forget, range(5)), remain, test),
        "test: must hold 20 samples or more": lambda: expunge.audit(
            model, model, forget, remain, Subset(test, (test.tensors[1] != FORGOTTEN).nonzero().flatten().tolist())
        ),
        "settings: must be Settings": lambda: expunge.audit(model, model, *parts(), settings=3),
        "policy: must be a Policy": lambda: run(model, policy="mine.json"),
        "^forget: must be what the model": lambda: expunge.audit(
            model, model, TensorDataset(torch.zeros(60, 12).double(), torch.full((60,), FORGOTTEN)), remain, test
        ),
        "^after: must be a network like the original; .*13": lambda: run(nn.Linear(13, 4)),
        "^forget: must have one whole-number label .* of torch.bool": lambda: expunge.audit(
            model, model, TensorDataset(torch.zeros(60, 12), torch.ones(60).bool()), remain, test
        ),
        "^done: must be words": lambda: run(model, done=3),
        "^keep: must be callable": lambda: run(model, keep="parts"),
    }
    for words, call in cases.items():
        with pytest.raises(InputError, match=words):
            call()
    with pytest.raises(DivergedError, match="after: its"):
        run(broken)
    with pytest.raises(DivergedError, match="^retrained 2: its"):
        run(model, [trained(1, without=True), broken])


class Untrainable(nn.Module):
    """Answers without gradients; `inner` may stand in it without being called."""

    def __init__(self, inner: nn.Module, called: bool) -> None:
        super().__init__()
        self.inner, self.called = inner, called

    def forward(self, x):
        return self.inner(x).detach() if self.called else x[:, :4]


@pytest.mark.parametrize("called", [True, False])
def test_networks_without_gradients_or_whose_classifier_is_never_called(called):
    report = run(Untrainable(trained(3, without=True), called))
    assert all(measure.after is None for measure in report.measures if measure.name == "re-learning")
    assert report["forget accuracy"].after is not None


def test_iterators_are_read_once_and_kept():
    forget, remain, test = parts()
    after = trained(3, without=True)
    reports = [
        expunge.audit(trained(0), after, data, remain, test, settings=expunge.audit.Settings(rounds=0, bits=()))
        for data in (forget, iter(DataLoader(forget, 50)))
    ]
    assert reports[0].measures == reports[1].measures


def test_small_networks_run_on_one_thread():
    threads = []
    noted = nn.Sequential(trained(3, without=True))
    noted.register_forward_hook(lambda *_: threads.append(torch.get_num_threads()))
    with running_on(2):
        run(noted)
        assert {*threads} == {1} and torch.get_num_threads() == 2
    assert fitting_threads(nn.Linear(10**4, 1000), TensorDataset(torch.zeros(2, 10**4), torch.zeros(2))) is nullcontext


def test_a_few_twins_are_left_in_with_a_warning():
    forget, remain, test = parts()
    x, y = remain[0]
    twin = torch.utils.data.TensorDataset(torch.cat([test.tensors[0], x[None]]), torch.cat([test.tensors[1], y[None]]))
    with pytest.warns(UncheckedWarning, match="test: 1 sample equal to one of remain"):
        expunge.audit(trained(0), trained(0), forget, remain, twin, settings=expunge.audit.Settings(rounds=0, bits=()))


def test_parts_can_be_switched_off():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = expunge.audit(trained(0), masked(), *parts(), settings=expunge.audit.Settings(rounds=0, bits=()))
    names = {measure.name for measure in report.measures}
    assert not names & {"re-learning", "forget accuracy (unseen), 4 bits"} and report.verdict.word == "cosmetic"
    for wrong in ({"rounds": -1}, {"bits": (1,)}, {"bits": 8}, {"sample": 3}, {"rate": 0}):
        with pytest.raises(InputError, match="settings"):
            expunge.audit.Settings(**wrong)


def overfitted(rows, seed: int) -> nn.Module:
    model = fresh(seed)
    expunge.train(model, Subset(noisy(), rows), expunge.Tuning(expunge.Constant(0.05, 60), batch_size=16, seed=seed, weight_decay=0))
    return model.eval()


def noisy(seed: int = 0):
    """Labels that nobody can guess: what is known of them was learnt by heart."""
    numbers = torch.Generator().manual_seed(seed)
    return torch.utils.data.TensorDataset(torch.randn(200, 12, generator=numbers), torch.randint(0, 4, (200,), generator=numbers))


def test_networks_never_trained_on_the_samples_give_an_attack_on_each():
    rows = [*range(200)]
    before, clean, *outside = overfitted(rows, 0), *(overfitted(rows[60:], seed) for seed in (1, 2, 3))
    sets = Subset(noisy(), rows[:60]), Subset(noisy(), rows[60:]), noisy(1)
    settings = expunge.audit.Settings(rounds=0, bits=())
    known = expunge.audit(before, before, *sets, None, outside, settings=settings)
    assert known.kind == "samples" and known["RMIA on forget"].after.low > 0.7 and known["IAM on forget"].after.value > 0.6
    assert known.verdict.word == "partly" and {reason.measure for reason in known.verdict.reasons} >= {"RMIA on forget"}
    report = expunge.audit(before, clean, *sets, None, outside, settings=settings)
    assert 0.5 in report["RMIA on forget"].after and report.verdict.word == "cannot tell"
    assert report["RMIA on forget, found at 1 % false alarms"].after.value < 0.2  # 100 unseen samples
    assert "RMIA on forget, found at 0.1 % false alarms" not in {measure.name for measure in report.measures}
    assert {"out 1", "out 2"} <= report.weights.keys()
