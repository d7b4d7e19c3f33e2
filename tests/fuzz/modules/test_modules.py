"""The grammar is sound, endings are told apart, and some of the random models run with every test."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from random import Random

import pytest
import torch

import expunge
from expunge.errors import ModelError
from tests.fuzz.modules import __main__ as command
from tests.fuzz.modules import faint, grammar, leaves, queued, trial
from tests.fuzz.modules.inputs import OPENINGS, SAMPLE_LOSSES, TOKEN_LOSSES, random_inputs
from tests.fuzz.run import ROOT

# Numbers of models of seed 0 that end as none should, each with its cause: strict, so one that is mended leaves this table.
KNOWN: dict[int, str] = {}


@pytest.mark.slow
def test_some_random_models_are_equal_or_refused(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(expunge.__file__))}
    arguments = ["--count", "50", "--jobs", "1", "--keep", str(tmp_path / "kept")]
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz.modules", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "50 models" in done.stdout, done.stdout + done.stderr
    failed = {int(path.stem.rpartition("-")[2]) for path in (tmp_path / "kept").glob("*.py")}
    assert failed == KNOWN.keys(), done.stdout


def single(form: str, name: str, made: str, used: str, number: int) -> grammar.Program:
    """A model of this operation alone, on ordinary data."""
    composer = grammar.Composer(Random(f"{name} {number}"))
    inputs = random_inputs(composer.random, composer.width)
    while inputs.form != form:
        inputs = random_inputs(composer.random, composer.width)
    inputs = replace(
        *(inputs,),
        **{"opening": ("any", ""), "loss": "squares", "per_token": False, "channels_last": False, "frozen": False},
        batches=((0, 1), (3,)),
        single=number == 1,
    )
    node = grammar.Node(name, composer.text(made, "m1"), composer.text(used, "m1"))
    return grammar.Program(name, inputs, (node,), composer.tail(form, True, inputs))


OPERATIONS = {
    f"{form}: {name}": (form, name, *leaf)
    for form, groups in grammar.FORMS.items()
    for group in groups
    for name, leaf in (group | grammar.COUPLED).items()
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_runs_in_a_plain_model(name, monkeypatch):
    monkeypatch.setattr(trial.fisher, "diagonal", refusing)
    for number in range(3):
        outcome = trial.run(single(*OPERATIONS[name], number).source())
        assert outcome.word == trial.REFUSED, outcome.text


@pytest.mark.parametrize("form", grammar.FORMS)
@pytest.mark.parametrize("name", grammar.WRAPPERS)
def test_every_wrapper_runs_in_a_plain_model(name, form, monkeypatch):
    monkeypatch.setattr(trial.fisher, "diagonal", refusing)
    program = single(form, name, "", grammar.WRAPPERS[name], 0)
    made = faint.MADE.get(name, "").replace("$m", "m1").replace("$D", str(program.inputs.width))
    inner = grammar.Node("scale", f"{made}\nself.scale = nn.Parameter(torch.randn(()))", "x = x * self.scale")
    outcome = trial.run(replace(program, nodes=(replace(program.nodes[0], inner=(inner,), label="m1"),)).source())
    assert outcome.word == trial.REFUSED, outcome.text


@pytest.mark.parametrize("name", faint.FOLDS)
def test_every_fold_runs_in_a_plain_model(name, monkeypatch):
    monkeypatch.setattr(trial.fisher, "diagonal", refusing)
    program = single("sequence", name, "", faint.FOLDS[name], 0)
    width = program.inputs.width
    inner = grammar.Node("linear", f"self.inner = nn.Linear({width}, {width})", "x = self.inner(x)")
    outcome = trial.run(replace(program, nodes=(replace(program.nodes[0], inner=(inner,), label="m1"),)).source())
    assert outcome.word == trial.REFUSED, outcome.text


def test_every_loss_and_opening_is_drawn():
    inputs = [random_inputs(Random(number), 4) for number in range(2000)]
    assert {each.loss for each in inputs} == {*SAMPLE_LOSSES, *TOKEN_LOSSES}
    assert {each.opening[0] for each in inputs} >= {*OPENINGS}


def test_a_model_is_the_same_for_its_seed():
    assert grammar.compose(3, 5).source() == grammar.compose(3, 5).source() != grammar.compose(4, 5).source()


def programs(count, chosen):
    return [program for program in (grammar.compose(0, number) for number in range(count)) if chosen(program)]


def test_an_unlikely_class_has_a_branch_that_becomes_small():
    program, *_ = programs(200, lambda program: len(program.tail.inner) == 2)
    smaller = [one for one in program.smaller() if one.tail != program.tail]
    assert smaller and all(one.tail.inner and one.tail.label == "branch" for one in smaller)


def test_of_float32_what_the_plain_loop_is_off_by_counts_as_rounding():
    true, off, more = ({"w": torch.tensor([1.0, value])} for value in (0.0, 1e-4, 0.05))
    assert not trial.definition.differences(off, true, true) and trial.definition.differences(off, true)
    assert trial.definition.differences(more, true, true) and not trial.definition.differences(more, true, off | {"w": off["w"] * 10})


def test_float32_has_the_same_weights_and_data_as_its_reference():
    space = {"__name__": "program"}
    exec(programs(200, lambda program: program.inputs.single and program.inputs.form == "image")[0].source(), space)
    one, two = ([*space["prepared"](real).state_dict().values()] for real in (torch.float32, torch.float64))
    assert space["REAL"] == torch.float32 and all(torch.equal(a.double(), b.double()) for a, b in zip(one, two, strict=True))


def test_confirmed_as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(queued.adders, "_confirmation", queued.as_on_cuda)
    assert trial.run(single(*LINEAR, 0).source()).word == trial.EQUAL


def refusing(*args, **kwargs):
    raise ModelError("no")


def doubled(model, batches, **settings):
    totals = DIAGONAL(model, batches, **settings)
    return replace(totals, sums={name: 2 * value for name, value in totals.sums.items()})


def spoiling(model, batches, **settings):
    totals = DIAGONAL(model, batches, **settings)
    next(model.parameters()).data += 1
    return totals


def warning(model, batches, **settings):
    warnings.warn("careful", stacklevel=1)


def telling_twice(*args, **kwargs):
    raise ModelError("no\nno")


def blaming(*args, **kwargs):
    raise ModelError("batches: must be what the model takes; raised IndexError: tuple index out of range")


def raw(*args, **kwargs):
    raise KeyError("weight")


DIAGONAL = trial.fisher.diagonal
ENDINGS = {
    trial.EQUAL: DIAGONAL,
    trial.REFUSED: refusing,
    trial.WRONG: doubled,
    "the model was changed": spoiling,
    "UserWarning": warning,
    "an error of several lines": telling_twice,
    "blames what works": blaming,
    "KeyError": raw,
}
LINEAR = "vector", "linear", *leaves.LAST_DIMENSION["linear"]


@pytest.mark.parametrize("ending", ENDINGS)
def test_endings_are_told_apart(ending, monkeypatch):
    monkeypatch.setattr(trial.fisher, "diagonal", ENDINGS[ending])
    outcome = trial.run(single(*LINEAR, 0).source())
    assert outcome.word == ending and outcome.failed == (ending not in (trial.EQUAL, trial.REFUSED))


def test_gradients_of_torch_that_are_wrong_are_no_failure(monkeypatch):
    """Differences of outputs decide: a backward pass of batch norm was wrong for one sample and right for two."""
    true = trial.definition.defined
    monkeypatch.setattr(trial.definition, "defined", lambda *given: {name: 2 * value for name, value in true(*given).items()})
    outcome = trial.run(single(*LINEAR, 0).source())
    assert outcome.word == trial.TORCH and not outcome.failed


def test_a_model_that_torch_cannot_run_is_no_failure():
    outcome = trial.run(single("vector", "bad", "", "x = x.no_such_method()", 0).source())
    assert outcome.word == trial.INVALID and not outcome.failed


@pytest.mark.slow
def test_a_failure_becomes_small_and_its_file_runs_alone(monkeypatch, tmp_path):
    def wrong_for_embeddings(model, batches, **settings):
        totals = DIAGONAL(model, batches, **settings)
        return replace(totals, sums={name: value * (1 + name.startswith("table")) for name, value in totals.sums.items()})

    monkeypatch.setattr(trial.fisher, "diagonal", wrong_for_embeddings)
    programs = (grammar.compose(0, number) for number in range(100))
    program = next(program for program in programs if program.inputs.form == "tokens" and trial.run(program.source()).word == trial.WRONG)
    program, outcome = trial.minimised(program, trial.run(program.source()))
    assert [node.name for node in program.nodes] == ["table"] and sum(map(len, program.inputs.batches)) <= 2
    file = tmp_path / "kept.py"
    file.write_text(trial.kept(program, outcome))
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(os.path.dirname(expunge.__file__))}
    done = subprocess.run([sys.executable, str(file)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "empirical equal" in done.stdout, done.stdout + done.stderr


def test_crashes_of_torch_alone_are_counted_apart(tmp_path):
    report = command.Report(tmp_path / "kept", 0)
    for number, target in enumerate((None, command.ENGINE)):
        (tmp_path / "file").write_text("source")
        report.note({"end": number, "target": target, "outcome": "the process ended with -11", "text": ""}, tmp_path / "file")
    assert len(report.failures) == 1 and [path.name for path in (tmp_path / "kept").iterdir()] == ["model-0-1.py"]
