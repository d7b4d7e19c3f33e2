"""The rules of the verdict, on measures that are made up."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from expunge.audit.findings import Measure, Reason
from expunge.audit.intervals import Interval, clopper_pearson
from expunge.audit.judging import BEGUN, RETRAINED, judge, saw_forget
from expunge.audit.measures import ATTACK, DIVERGENCE, FORGET, NEIGHBOURS, READ_BACK, RELEARNED, REMAIN, RMIA, UNSEEN
from expunge.audit.policy import FILE, load_policy
from expunge.audit.shadow_measures import ULIRA
from expunge.errors import InputError

POLICY = load_policy()
N = 100


def share(value: float) -> Interval:
    return clopper_pearson(round(N * value), N)


def row(name, before, after, *retrained):
    return Measure(name, "answers", "", N, share(before), share(after), tuple(map(share, retrained)))


def of_class(unseen: float, inside: float, retrained=(0, 0, 0, 0, 0), learned=(0, 0.02, 0.01, 0, 0.01)):
    """A network's forget accuracy and what re-learning gives, beside networks that never saw the class."""
    return [row(UNSEEN, 0.97, unseen, *retrained), row(RELEARNED, 0.97, inside, *learned[: len(retrained)])]


@pytest.mark.parametrize(
    ("unseen", "inside", "word"),
    [(0, 0.01, "not distinguished"), (0, 0.9, "cosmetic"), (0.97, 0.97, "partly"), (0.4, 0.45, "partly"), (0, 0.3, "partly")],
)
@pytest.mark.parametrize("references", [1, 5])
def test_beside_retrained_networks(unseen, inside, word, references):
    measures = of_class(unseen, inside, (0, 0, 0, 0, 0)[:references])
    if references == 1 and word == "partly" and unseen < 0.5:
        word = "not distinguished"  # with one, only half of what the original knew counts
    judgement = judge(measures, "classes", POLICY)
    assert judgement.word == word, judgement.sentence
    assert judgement.reasons and all(reason.low <= reason.value <= reason.high for reason in judgement.reasons)
    assert bool(judgement.missing) == (references == 1)
    assert "erased" not in judgement.sentence and "compliant" not in judgement.sentence


def test_rounded_weights_alone_are_named_as_the_only_test_of_the_inside():
    rounded = row(f"{UNSEEN}, 4 bits", 0.97, 0, 0, 0, 0, 0, 0)
    spread = (0, 0.3, 0.5, 0.7, 0.9)  # of re-learning, which has no power then
    judgement = judge([*of_class(0, 0.2, learned=spread), rounded], "classes", POLICY)
    assert judgement.word == "not distinguished" and "beside rounded weights" in judgement.missing[0]
    assert not judge([*of_class(0, 0.01), rounded], "classes", POLICY).missing


@pytest.mark.parametrize("unseen", [0, 0.97])
def test_retrained_networks_that_are_worse_than_the_original_are_named(unseen):
    """As after a training by another recipe. One that is as good is enough."""
    worse, good = (row(REMAIN, 0.9, 0.9, *values) for values in ((0.5, 0.6, 0.55, 0.6, 0.5), (0.5, 0.6, 0.55, 0.88, 0.5)))
    (told,) = judge([*of_class(unseen, 0.01), worse], "classes", POLICY).missing
    assert "the best is right of 60.0 %, the original of 90.0 %" in told
    assert not judge([*of_class(unseen, 0.01), good], "classes", POLICY).missing


def test_damage_comes_first():
    lost = Reason("it lost 20 %", "remain accuracy (unseen)", 0.2, 0.1, 0.3)
    assert judge(of_class(0, 0.9), "classes", POLICY, lost).word == "damaged"


def test_a_network_that_answers_unlike_retrained_ones_is_told():
    floor = tuple(Interval(value, value - 0.01, value + 0.01) for value in (0.07, 0.08, 0.075, 0.07, 0.08, 0.07, 0.075, 0.08, 0.07, 0.075))
    unlike = Measure(DIVERGENCE, "likeness", "", N, Interval(0.6, 0.58, 0.62), Interval(0.3, 0.28, 0.32), (), floor)
    assert judge([*of_class(0, 0), unlike], "classes", POLICY).word == "partly"
    alike = replace(unlike, after=Interval(0.08, 0.07, 0.09))
    assert judge([*of_class(0, 0), alike], "classes", POLICY).word == "not distinguished"
    closer = replace(unlike, after=Interval(0.0, 0.0, 0.0))  # as a copy of one of them
    assert judge([*of_class(0, 0), closer], "classes", POLICY).word == "not distinguished"


def test_few_retrained_networks_do_not_show_how_much_networks_diverge():
    """Samples of classes that stay, 8,000 of them: the original is no farther from retrained networks than they are from each other."""
    floor = tuple(Interval(value, value - 0.002, value + 0.002) for value in (0.0114, 0.019, 0.015))
    mine = Measure(DIVERGENCE, "likeness", "", N, Interval(0.0095, 0.009, 0.01), Interval(0.024, 0.0207, 0.0273), (), floor)
    assert judge([mine], "samples", POLICY).word == "cannot tell"
    assert judge([replace(mine, after=Interval(0.1, 0.09, 0.11))], "samples", POLICY).word == "partly"


def neighbouring(after: float, *retrained: float):
    return [*of_class(0, 0, (0,) * len(retrained), (0,) * len(retrained)), row(NEIGHBOURS, 1, after, *retrained)]


@pytest.mark.parametrize("retrained", [(0.4,), (0.3, 0.5, 0.4, 0.45, 0.35)])
def test_forgotten_samples_that_go_where_the_original_had_them_next_are_told(retrained):
    """0.65 of the way from 0.4 to 1 is 0.79, whatever the number of retrained networks."""
    told = judge(neighbouring(0.85, *retrained), "classes", POLICY)
    assert told.word == "partly" and told.reasons[0].measure == NEIGHBOURS
    assert judge(neighbouring(0.75, *retrained), "classes", POLICY).word == "not distinguished"
    assert judge(neighbouring(0, *retrained), "classes", POLICY).word == "not distinguished"  # elsewhere is no trace
    hidden = [measure for measure in neighbouring(1, *retrained) if measure.name != RELEARNED]
    hidden.append(row(RELEARNED, 0.97, 0.9, *(0 for _ in retrained)))
    assert judge(hidden, "classes", POLICY).word == "cosmetic"  # a filter leaves all that is beneath the first answer


def test_one_retrained_network_that_goes_there_too_clears_the_others():
    assert judge(neighbouring(0.9, 0.4, 0.3, 0.9, 0.3, 0.35), "classes", POLICY).word == "not distinguished"
    assert judge(neighbouring(0.9, 0.4, 0.3, 0.5, 0.3, 0.35), "classes", POLICY).word == "partly"


def test_driven_away_is_told():
    """Below what networks have that never saw the samples."""
    measures = [
        row(ATTACK, 0.7, 0.2, 0.5, 0.51, 0.49, 0.5, 0.5),
        row(FORGET, 1.0, 0.9, 0.9, 0.91, 0.9, 0.89, 0.9),
        row(RELEARNED, 1.0, 0.9, 0.9, 0.91, 0.9, 0.89, 0.9),
    ]
    judgement = judge(measures, "samples", POLICY)
    assert judgement.word == "partly" and judgement.reasons[0].measure == ATTACK and "driven away" in judgement.reasons[0].words


@pytest.mark.parametrize(("original", "beside_one", "beside_five"), [(0.62, "not distinguished", "partly"), (1.0, "cosmetic", "cosmetic")])
def test_a_probe_that_reads_the_original_no_better_convicts_nobody_beside_one_reference(original, beside_one, beside_five):
    """Networks of other seeds separate a class by more or less, which one of them does not show; beside five it is shown."""
    read = row("probe, stage 1", original, 0.95, 0.6)
    assert judge([*of_class(0, 0, (0,)), read], "classes", POLICY).word == beside_one
    several = row("probe, stage 1", original, 0.95, 0.6, 0.61, 0.59, 0.6, 0.62)
    assert judge([*of_class(0, 0), several], "classes", POLICY).word == beside_five


@pytest.mark.parametrize("original", [1.0, 0.97])
def test_networks_from_the_same_weights_that_read_each_other_accuse_nobody_beside_one_reference(original):
    """Fine-tuned from one pretrained network, the original's classifier reads 93 % of one and 60 % of another that never saw the class."""
    read = row(READ_BACK, original, 0.6, 0.93)
    assert judge([*of_class(0, 0, (0,)), read], "classes", POLICY).word == "not distinguished"
    hidden = row(READ_BACK, original, 0.95, 0.03)
    assert judge([*of_class(0, 0, (0,)), hidden], "classes", POLICY).word == "cosmetic"


@pytest.mark.parametrize(("after", "words"), [(0.97, "unlike"), (0.0, "driven away")])
def test_what_lies_above_retrained_networks_was_not_driven_away(after, words):
    """As where before and after are given the wrong way round."""
    measures = [row(UNSEEN, 0.5, after, 0.5), row(RELEARNED, 0.5, after, 0.5)]
    judgement = judge(measures, "classes", POLICY)
    assert judgement.word == "partly" and all(test.found == words for test in judgement.tests)


def test_without_power_it_cannot_tell():
    weak = [row(UNSEEN, 0.97, 0, 0, 0, 0, 0, 0), row(RELEARNED, 0.5, 0.48, 0.47, 0.5, 0.44, 0.52, 0.46)]
    judgement = judge(weak, "classes", POLICY)
    assert judgement.word == "cannot tell" and "inside" in judgement.sentence and judgement.missing


def test_without_retrained_networks_nothing_clears():
    def alone(unseen, bits, back):
        rows = [row(UNSEEN, 0.97, unseen), row(f"{UNSEEN}, 8 bits", 0.97, unseen), row(f"{UNSEEN}, 4 bits", 0.97, bits)]
        return judge([*rows, row(READ_BACK, 0.97, back), row("probe, stage 1", 0.97, 0.97)], "classes", POLICY)

    assert alone(0, 0, 0.02).word == "cannot tell" and alone(0, 0, 0.02).missing == (RETRAINED,)
    assert alone(0.3, 0, 0).word == "partly" and alone(0.3, 0.3, 0.4).word == "partly"
    # Some of it in the answers, nearly all of it beneath them: hidden, and not done.
    assert alone(0.3, 0, 0.95).word == "cosmetic" and alone(0.3, 0.9, 0).word == "cosmetic"
    assert len(alone(0.3, 0, 0.95).reasons) == 2
    assert alone(0.97, 0.97, 0.97).word == "partly" and alone(0.6, 0.9, 0.95).word == "partly"
    assert alone(0, 0.8, 0).word == "cosmetic" and "4 bits" in alone(0, 0.8, 0).sentence
    assert alone(0, 0, 0.9).word == "cosmetic" and BEGUN in alone(0, 0, 0.9).missing and BEGUN not in alone(0, 0.8, 0.9).missing
    assert judge([row(ATTACK, 0.8, 0.75)], "samples", POLICY).word == "partly"
    assert judge([row(ATTACK, 0.8, 0.2)], "samples", POLICY).word == "partly"
    assert judge([row(ATTACK, 0.8, 0.5)], "samples", POLICY).word == "cannot tell"
    for attacks, missing in (([], 2), ([RMIA], 1), ([ULIRA], 1)):  # a sanity check needs no more beside attacks on single samples
        rows = [row(name, 0.8, 0.5) for name in (ATTACK, *attacks)]
        assert len(judge(rows, "samples", POLICY).missing) == missing


def test_a_reference_that_knows_is_seen():
    assert saw_forget({UNSEEN: share(0.5)}, "classes", POLICY) and not saw_forget({UNSEEN: share(0.01)}, "classes", POLICY)
    assert saw_forget({ATTACK: share(0.8)}, "samples", POLICY) and not saw_forget({ATTACK: share(0.5)}, "samples", POLICY)


def test_a_policy_of_ones_own(tmp_path):
    content = json.loads(FILE.read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(content | {"cosmetic_share": 0.95}))
    strict = load_policy(path)
    assert judge(of_class(0, 0.9), "classes", strict).word == "partly"
    for wrong, named in (
        ({"level": 0}, "policy.level"),
        ({"seeds": 2}, "policy.seeds"),
        ({"stranger": 1}, "stranger"),
        ({"power": "x"}, "power"),
    ):
        path.write_text(json.dumps(content | wrong))
        with pytest.raises(InputError, match=named):
            load_policy(path)
    path.write_text(json.dumps({"level": 0.05}))
    with pytest.raises(InputError, match="missing"):
        load_policy(path)
    with pytest.raises(InputError, match=r"policy: must be a file of JSON with the numbers of a Policy \(No such file or directory\)"):
        load_policy(tmp_path / "absent.json")
    with pytest.raises(InputError, match="policy: must be the path of a file; found 5"):
        load_policy(5)
