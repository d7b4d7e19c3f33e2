"""Shadows in the audit: the attacks by plain loops, the verdict's rule, what is shown and saved, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import Subset, TensorDataset

import expunge
from expunge.audit.distances import klom
from expunge.audit.membership import confidence
from expunge.audit.policy import load_policy
from expunge.audit.shadow_attacks import ShadowSignals, epsilons, forgetting_quality, ruli, u_lira
from expunge.audit.shadow_measures import EFFICACY, KLOM, METHOD, QUALITY, RULI, ULIRA
from expunge.audit.shadows import Shadows, memberships
from expunge.audit.student import reach
from expunge.errors import InputError, MismatchError
from expunge.metrics import logits
from expunge.report.audit_page import audit_page

QUICK = expunge.audit.Settings(rounds=0, bits=(), batch_size=64)
TUNING = expunge.Tuning(expunge.Constant(0.2, epochs=6), batch_size=30, seed=100)
TRAIN, FORGET, UNSEEN, WIDE = 112, 32, 40, 100  # rows: the first are to be forgotten; samples beyond TRAIN the audited network never saw


@cache
def memorable():
    """Labels that can only be remembered."""
    numbers = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(TRAIN + UNSEEN, WIDE, generator=numbers), torch.randint(3, (TRAIN + UNSEEN,), generator=numbers))


def build(seed):
    return nn.Sequential(nn.Linear(WIDE, 16), nn.ReLU(), nn.Linear(16, 3))


def keep_all(model, forget, remain):
    return model


def retrain(model, forget, remain):
    again = build(0)
    expunge.train(again, remain, replace(TUNING, seed=7), progress=False)
    return again


@cache
def trained(seed, *rows):
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model = build(seed)
    expunge.train(model, Subset(memorable(), range(*rows)), replace(TUNING, seed=seed))
    return model.eval()


def sets():
    return tuple(Subset(memorable(), rows) for rows in (range(FORGET), range(FORGET, TRAIN), range(TRAIN, TRAIN + UNSEEN)))


def made(folder, number=16, **settings):
    candidates = [*range(FORGET), *range(TRAIN, TRAIN + FORGET)]
    given = {"build": build, "data": memorable(), "candidates": candidates, "tuning": TUNING, "folder": folder, "number": number}
    return Shadows(**given | settings)


@pytest.fixture(scope="module")
def evidence(tmp_path_factory):
    """By a method that keeps all, and by one that trains again; 8 shadows, which have no KLOM and no ε, or 16."""
    folder = tmp_path_factory.mktemp("shadows")
    eight, sixteen = (made(folder, number) for number in (8, 16))
    sixteen.train()
    sixteen.unlearn(keep_all)
    eight.unlearn(retrain)
    return {method: eight.evidence(method, range(FORGET)) for method in (keep_all, retrain)} | {
        "sixteen": sixteen.evidence(keep_all, range(FORGET))
    }


def run(after, shadows, retrained=None, **options):
    return expunge.audit(trained(0, TRAIN), after, *sets(), retrained, shadows=shadows, settings=QUICK, **options)


def test_what_was_kept_is_found_and_what_was_retrained_is_not(evidence):
    kept = run(trained(0, TRAIN), evidence[keep_all])
    assert kept.verdict.word == "partly" and {ULIRA, RULI} <= {reason.measure for reason in kept.verdict.reasons}
    again = run(trained(9, FORGET, TRAIN), evidence[retrain])
    assert again.verdict.word == "cannot tell" and not {ULIRA, RULI} & {reason.measure for reason in again.verdict.reasons}
    assert kept[METHOD].after.low > 0.8 and 0.4 < again[METHOD].after.value < 0.6


def test_beside_retrained_networks_they_are_weighed_and_without_power_clear_nobody(evidence):
    others = [trained(seed, FORGET, TRAIN) for seed in range(20, 25)]
    kept = run(trained(0, TRAIN), evidence[keep_all], others)
    tests = {test.measure: test for test in kept.verdict.tests}
    assert tests[ULIRA].found == "still there" and tests[ULIRA].side == "answers" and kept.verdict.word == "partly"
    assert len(kept[ULIRA].retrained) == 5 and EFFICACY not in tests and KLOM not in tests
    useless = run(trained(30, FORGET, TRAIN), evidence[retrain], others)
    found = {test.measure: test.found for test in useless.verdict.tests}
    assert found[ULIRA] == "no power" and useless.verdict.word != "partly"


def test_values_are_those_of_plain_loops(evidence):
    """On the same logits, by the functions whose formulas tests/audit/test_shadow_attacks.py has."""
    report, shadows = run(trained(0, TRAIN), evidence["sixteen"]), evidence["sixteen"]
    assert report[KLOM].after.low > report[KLOM].shadows.value and report[QUALITY].after.high < report[QUALITY].shadows.low
    asked = Subset(memorable(), [*range(FORGET), *range(TRAIN, TRAIN + FORGET)])
    answers = logits(trained(0, TRAIN), asked)
    forgotten = torch.arange(2 * FORGET) < FORGET
    for name, score, floor in ((ULIRA, u_lira, None), (RULI, ruli, 1e-6), (EFFICACY, partial(ruli, kind="efficacy"), 1e-6)):
        signals = shadows.signals if floor is None else shadows.bounded
        target = score(confidence(answers.logits, answers.targets, floor), signals)
        assert report[name].after.value == pytest.approx(roc_auc_score(forgotten, target), abs=1e-9)
        assert report[name].before == report[name].after
        nulls = []
        for shadow in range(16):
            row = (signals.trained if name == EFFICACY else signals.unlearned)[shadow]
            unseen = ~signals.members[shadow]
            nulls.append(roc_auc_score(forgotten[unseen], score(row, signals.without(shadow, shadow ^ 1))[unseen]))
        assert report[name].shadows.value == pytest.approx(sum(nulls) / 16, abs=1e-9)
        assert report[name].shadows.high - report[name].shadows.value == pytest.approx(min(reach(nulls, 0.05), 1 - sum(nulls) / 16))
    signals, distances = shadows.signals, {"before": [], "after": [], "shadows": []}
    worths = {name: [] for name in distances}
    for sample in range(FORGET):
        inside = signals.members[:, sample]
        never = signals.trained[~inside, sample]
        sides = {"before": signals.trained[inside, sample][:4], "after": signals.unlearned[inside, sample][:4], "shadows": never[:4]}
        for name, values in sides.items():
            distances[name].append(float(klom(values[:, None], never[4:, None])))
            worths[name].append(float(epsilons(values[:, None], never[4:, None])))
    for name, values in distances.items():
        assert getattr(report[KLOM], name).value == pytest.approx(sum(values) / FORGET, abs=1e-9)
        assert getattr(report[QUALITY], name).value == pytest.approx(forgetting_quality(worths[name], 4).score.value, abs=1e-9)


def test_they_are_shown_saved_and_read_back(evidence, tmp_path):
    report = run(trained(0, TRAIN), evidence["sixteen"], [trained(seed, FORGET, TRAIN) for seed in (20, 21)], progress=False)
    lines = str(report).splitlines()
    assert "by 16 shadows, on 32 forgotten and 32 never seen samples" in lines and max(map(len, lines)) <= 80
    for text in (str(report), report.markdown(), report._repr_html_()):
        assert all(name in text for name in (ULIRA, RULI, METHOD, KLOM, QUALITY, "never trained"))
    assert expunge.audit.load_audit(report.save(tmp_path / "out")) == report and report.schema == 2
    page = audit_page(report)
    assert "Attacks by shadow networks" in page and "keep_all" in page and '<th scope="col" data-sort>never trained</th>' in page


def test_an_audit_of_the_first_schema_is_read(evidence, tmp_path):
    report = run(trained(0, TRAIN), None)
    report.save(tmp_path)
    content = json.loads((tmp_path / "result.json").read_text())
    audit = content["audit"] | {"schema": 1}
    del audit["shadows"], audit["policy"]["shadow_area"], audit["policy"]["shadows"]
    for measure in audit["measures"]:
        del measure["shadows"]
    (tmp_path / "result.json").write_text(json.dumps(content | {"audit": audit}))
    assert expunge.audit.load_audit(tmp_path) == replace(report, schema=1)


def test_whole_classes_have_no_measure_against_networks_that_know_the_class(evidence):
    """Nor are those that are left judged."""
    labels = memorable().tensors[1]
    chosen, others = ((labels[:TRAIN] == 0) == same for same in (True, False))
    data = (Subset(memorable(), rows.nonzero().flatten().tolist()) for rows in (chosen, others))
    asked = (labels == 0).nonzero().flatten()
    members = memberships(16, len(asked))
    numbers = torch.randn(16, len(asked), generator=torch.Generator().manual_seed(0))
    signals, samples = ShadowSignals(numbers, numbers + 3 * members, members), Subset(memorable(), asked.tolist())
    shadows = replace(evidence[keep_all], signals=signals, bounded=signals, samples=samples, asked=samples)
    shadows = replace(shadows, forgotten=asked < TRAIN, labels=labels[asked])
    policy = replace(load_policy(), samples=5)
    report = expunge.audit(trained(0, TRAIN), trained(0, TRAIN), *data, sets()[2], shadows=shadows, settings=QUICK, policy=policy)
    assert report.kind == "classes" and [row.name for row in report.measures if row.side == "shadows"] == [ULIRA, RULI, METHOD]
    assert report[METHOD].after.low > 0.9 and not {ULIRA, RULI} & {reason.measure for reason in report.verdict.reasons}


def test_a_filter_of_infinities_is_attacked_too(evidence):
    class Filter(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = trained(0, TRAIN)

        def forward(self, x):
            rows = self.inner(x).clone()
            rows[:, 0] = -torch.inf
            return rows

    assert run(Filter(), evidence[keep_all])[ULIRA].after is not None


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda it: "shadows", InputError, "shadows: must be what Shadows.evidence"),
        (lambda it: replace(it, forms={"0.weight": (1, 2)}), MismatchError, "shadows: must be of networks like `before`; 0.weight is"),
        (lambda it: replace(it, forgotten=~it.forgotten), MismatchError, "32 of 32 forgotten candidates are no forget samples"),
        (lambda it: replace(it, labels=it.labels.flip(0)), MismatchError, "shadows: the candidates have other labels"),
        (
            lambda it: replace(it, forgotten=it.forgotten & (torch.arange(64) != 3)),
            InputError,
            "shadows: candidates that are not forgotten must be samples that the audited network never saw.*found 1",
        ),
        (lambda it: replace(it, forgotten=torch.arange(64) < 5), InputError, "must have 20 candidates or more .* forgotten; found 5"),
    ],
)
def test_shadows_of_another_audit_are_named(evidence, change, error, message):
    with pytest.raises(error, match=message):
        run(trained(0, TRAIN), change(evidence[keep_all]))


def test_too_few_shadows_and_odd_candidates_are_named(tmp_path, evidence):
    few = made(tmp_path, number=6, tuning=replace(TUNING, schedule=expunge.Constant(0.1, epochs=1)))
    few.train()
    few.unlearn(keep_all)
    with pytest.raises(InputError, match=r"shadows: must be 8 or more \(policy.shadows\), fewer have no interval; found 6"):
        run(trained(0, TRAIN), few.evidence(keep_all, range(FORGET)))
    with pytest.raises(InputError, match="forgotten: must be rows of data that are candidates; found 1 of 2 are not"):
        few.evidence(keep_all, [0, FORGET + 1])
    with pytest.raises(InputError, match="policy.shadow_area"):
        replace(load_policy(), shadow_area=0.7)
