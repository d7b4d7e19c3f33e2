"""Attack single samples with networks that were never trained on them: RMIA and IAM, with what sample sizes allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from expunge.audit.intervals import AttackRates, attack_rates
from expunge.audit.measures import IAM, RMIA, Subject, Values
from expunge.audit.membership import Probabilities, incompleteness, rmia
from expunge.audit.reading import Reading
from expunge.audit.strata import stratified_auc

FEWEST = 10  # unseen samples on each side


def per_sample_attacks(reading: Reading, original: Reading, references: Sequence[Reading], subject: Subject) -> Values:
    """Areas, and the true positives at 1 % and 0.1 % false positives where there are samples enough for such a rate.

    Forgotten samples are told from every other unseen one of their labels, label by label, so that each is on both sides also where labels
    alternate; the rest of the test set is RMIA's population, so that no sample is both. Areas are within labels, as the loss attack's: p̄
    does not take all of a label's difficulty out of RMIA, so another mix of labels would tell by itself. The rates at a share of false
    alarms have one threshold for all labels.
    """
    like = subject.like(original["test"])
    rows = like.nonzero().flatten()
    asked = torch.zeros_like(like)
    asked[rows[original["test"].labels[rows].argsort(stable=True)][1::2]] = True
    if min(int(asked.sum()), int((~asked).sum())) < FEWEST:
        return {}

    def probabilities(name: str, rows: torch.Tensor, network: Reading) -> Probabilities:
        return Probabilities(
            network[name].signals[rows].sigmoid(), torch.stack([other[name].signals[rows].sigmoid() for other in references])
        )

    every = torch.ones(len(reading["forget"].labels), dtype=torch.bool)
    forget, unseen, population = (
        probabilities(name, rows, reading) for name, rows in (("forget", every), ("test", asked), ("test", ~asked))
    )
    before = [original[name].signals[rows].sigmoid() for name, rows in (("forget", every), ("test", asked))]
    labels = original["forget"].labels, original["test"].labels[asked]
    scores = {
        RMIA: (rmia(forget, population), rmia(unseen, population)),
        IAM: (incompleteness(forget, before[0]), incompleteness(unseen, before[1])),
    }
    rates = {attack: replace(attack_rates(*pair), area=stratified_auc(*pair, *labels)) for attack, pair in scores.items()}
    return {name: value for attack, found in rates.items() for name, value in values_of(attack, found).items()}


def values_of(attack: str, rates: AttackRates) -> Values:
    """The area, and the rates that there are samples enough for, by the names of measures."""
    values = {attack: rates.area}
    for share, point in (("1 %", rates.at_percent), ("0.1 %", rates.at_permille)):
        if point is not None:  # else a headline would rest on a single sample
            values[f"{attack}, found at {share} false alarms"] = point.true_positives
    return values
