"""Compare rankings of methods: by U-LiRA with 64 shadows, and by measures that need no, one or four further networks.

audit_rank_table.py FOLDER      FOLDER has ranking.safetensors and ranking-audits.json, as audit_ranking.py --stage collect writes them

Every shadow is a target in turn. A method's value is the mean over targets. Intervals: 2,000 draws of targets, in pairs that share the
candidates out, the same for both rankings. p: the share of all orders of the methods that agree as well, or of 20,000 drawn ones.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import torch
from torch import Tensor

from expunge.audit.intervals import attack_rates, tpr_at
from expunge.audit.membership import Probabilities, incompleteness, rmia
from expunge.audit.shadow_attacks import ShadowSignals, left_out_scores, u_lira
from expunge.audit.strata import stratified_auc
from expunge.metrics.membership import area_under_curve
from expunge.storage.tensors import load_tensors

RESULT = Path(__file__).parent / "results" / "audit_ranking.json"
NOTHING = "nothing done"
BEST, BEST_TPR = "U-LiRA, area", "U-LiRA, found at 1 % false alarms"
DRAWS = 2000
OF_AUDITS = {  # measures of the few targets whose whole audit was made: how far the target is from the retrained networks' mean
    "re-learning": "re-learning",
    "forget accuracy": "forget accuracy",
    "forget accuracy, 4 bits": "forget accuracy, 4 bits",
    "loss attack on forget, 4 bits": "loss attack on forget, 4 bits",
    "RF-JSD": "RF-JSD",
    "divergence from retrained": "divergence from retrained",
}


def by_shadows(signals: ShadowSignals) -> dict[str, Tensor]:
    """Of each target: the area, and the share found at 1 % false alarms."""
    scores = left_out_scores(signals, u_lira, signals.unlearned)
    pairs = [(row[members], row[~members]) for row, members in zip(scores, signals.members, strict=True)]
    rates = [tpr_at(0.01, *pair) for pair in pairs]
    found = [math.nan if rate is None else rate.true_positives.value for rate in rates]
    return {BEST: torch.tensor([area_under_curve(*pair) for pair in pairs]), BEST_TPR: torch.tensor(found)}


def pooled(signals: ShadowSignals) -> dict[str, dict[str, float]]:
    """U-LiRA's rates with the scores of all targets together, as `method_rates` has them."""
    scores = left_out_scores(signals, u_lira, signals.unlearned)
    rates = attack_rates(scores[signals.members], scores[~signals.members])
    values = {"area": rates.area}
    for name, point in (("at 1 %", rates.at_percent), ("at 0.1 %", rates.at_permille)):
        if point is not None:
            values[name] = point.true_positives
    return {name: {"value": part.value, "low": part.low, "high": part.high} for name, part in values.items()}


def cheap(signals: ShadowSignals, never: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Of each target: the loss attack, and RMIA and IAM as an audit makes them, with one and with four networks never trained on it."""
    values: dict[str, list[float]] = {}
    for after, before, members in zip(signals.unlearned, signals.trained, signals.members, strict=True):
        row = {"loss attack": stratified_auc(after[members], after[~members], labels[members], labels[~members]).value}
        asked = ~members & ((~members).cumsum(0) % 2 == 0)
        for number in (1, 4):
            forget, unseen, population = (
                Probabilities(after[rows].sigmoid(), never[-number:, rows].sigmoid()) for rows in (members, asked, ~members & ~asked)
            )
            sides = labels[members], labels[asked]
            row[f"RMIA, {number} out"] = stratified_auc(rmia(forget, population), rmia(unseen, population), *sides).value
            start = before[members].sigmoid(), before[asked].sigmoid()
            row[f"IAM, {number} out"] = stratified_auc(incompleteness(forget, start[0]), incompleteness(unseen, start[1]), *sides).value
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: torch.tensor(part) for name, part in values.items()}


def of_audits(audits: list[dict], method: str) -> dict[str, Tensor]:
    """Of the targets audited: |value − mean of the retrained networks'|; a divergence is a distance already."""
    rows = sorted((row for row in audits if row["method"] == method), key=lambda row: row["target"])
    values = {}
    for name, measure in OF_AUDITS.items():
        part = [row["values"].get(measure) for row in rows]
        if rows and all(part):
            far = [abs(v["after"] - (sum(v["retrained"]) / len(v["retrained"]) if v["retrained"] else 0.0)) for v in part]
            values[name] = torch.tensor(far)
    return values


def ranks(values: numpy.ndarray) -> numpy.ndarray:
    """Ranks along the last axis, ties shared."""
    below = (values[..., None, :] < values[..., :, None]).sum(-1)
    return below + ((values[..., None, :] == values[..., :, None]).sum(-1) - 1) / 2


def spearman(first: numpy.ndarray, second: numpy.ndarray) -> numpy.ndarray:
    a, b = (part - part.mean(-1, keepdims=True) for part in (ranks(first), ranks(second)))
    norms = numpy.sqrt((a**2).sum(-1) * (b**2).sum(-1))
    return numpy.where(norms > 0, (a * b).sum(-1) / numpy.where(norms > 0, norms, 1), 0.0)


def kendall(first: numpy.ndarray, second: numpy.ndarray) -> float:
    """τ_b."""
    pairs = [(i, j) for i, j in itertools.combinations(range(len(first)), 2)]
    signs = numpy.array([(numpy.sign(first[i] - first[j]), numpy.sign(second[i] - second[j])) for i, j in pairs])
    norm = math.sqrt((signs[:, 0] ** 2).sum() * (signs[:, 1] ** 2).sum())
    return float((signs[:, 0] * signs[:, 1]).sum() / norm) if norm else 0.0


def agreement(best: dict[str, Tensor], other: dict[str, Tensor], names: list[str]) -> dict[str, float]:
    """Spearman's and Kendall's coefficients of the methods' means, with the interval over targets and the share of orders as good."""
    first, second = (numpy.array([values[name].double().mean() for name in names]) for values in (best, other))
    value = float(spearman(first, second))
    numbers, drawn = numpy.random.default_rng(0), []
    count = len(other[names[0]])
    targets = numpy.stack([best[name].double().numpy() for name in names]), numpy.stack([other[name].double().numpy() for name in names])
    for _ in range(DRAWS):
        pairs = numbers.integers(0, count // 2, count // 2)
        rows = numpy.stack([2 * pairs, 2 * pairs + 1], 1).ravel()
        own = rows if count == targets[0].shape[1] else numpy.arange(targets[0].shape[1])
        drawn.append(float(spearman(targets[0][:, own].mean(1), targets[1][:, rows].mean(1))))
    orders = _orders(len(names), numbers)
    chance = float((spearman(first[None], second[orders]) >= value - 1e-12).mean())
    low, high = numpy.quantile(drawn, [0.025, 0.975])
    return {"spearman": value, "low": float(low), "high": float(high), "kendall": kendall(first, second), "p": chance, "targets": count}


def _orders(count: int, numbers: numpy.random.Generator) -> numpy.ndarray:
    if count <= 8:
        return numpy.array([*itertools.permutations(range(count))])
    return numpy.stack([numbers.permutation(count) for _ in range(20_000)])


def report(folder: Path) -> dict[str, object]:
    tensors, about = load_tensors(folder / "ranking.safetensors", "ranking")
    audits = json.loads((folder / "ranking-audits.json").read_text())
    members, labels, never, trained = (tensors[name] for name in ("members", "labels", "never", "trained"))
    found = {NOTHING: trained} | {name.removeprefix("method "): part for name, part in tensors.items() if name.startswith("method ")}
    values: dict[str, dict[str, Tensor]] = {}
    headline = {}
    for method, unlearned in found.items():
        signals = ShadowSignals(trained, unlearned, members.bool())
        headline[method] = pooled(signals)
        for name, part in (by_shadows(signals) | cheap(signals, never, labels) | of_audits(audits, method)).items():
            values.setdefault(name, {})[method] = part
    names = [*found]
    # What networks never trained on any candidate have, in place of each target: not ranked, U-LiRA's area of them is 0.5 by definition.
    ideal = cheap(ShadowSignals(trained, never[: len(never) // 2].repeat(len(trained), 1)[: len(trained)], members.bool()), never, labels)
    whole = {name: part for name, part in values.items() if set(part) == set(names)}
    others = [name for name in whole if name not in (BEST, BEST_TPR)]
    verdicts = {method: [row["verdict"] for row in audits if row["method"] == method] for method in names}
    return {
        "about": about,
        "methods": names,
        "U-LiRA": headline,
        "values": {name: {method: float(part[method].double().mean()) for method in names} for name, part in whole.items()},
        "agreement": {best: {name: agreement(whole[best], whole[name], names) for name in others} for best in (BEST, BEST_TPR)},
        "retrained": {name: float(part.double().mean()) for name, part in ideal.items()},
        "verdicts": verdicts,
    }


def lines(content: dict) -> Iterator[str]:
    """Both tables of docs/audit.md."""
    measures = [name for name in content["values"] if name not in (BEST, BEST_TPR)]
    shown: list[tuple[str, Callable[[str], str]]] = [
        ("U-LiRA", lambda method: _interval(content["U-LiRA"][method]["area"])),
        ("at 1 %", lambda method: _interval(content["U-LiRA"][method]["at 1 %"])),
        *((name, lambda method, name=name: f"{content['values'][name][method]:.3f}") for name in measures),
    ]
    yield "| method | " + " | ".join(name for name, _ in shown) + " |"
    yield "|---" * (len(shown) + 1) + "|"
    for method in sorted(content["methods"], key=lambda method: -content["U-LiRA"][method]["area"]["value"]):
        yield f"| {method} | " + " | ".join(cell(method) for _, cell in shown) + " |"
    cells = [f"{content['retrained'][name]:.3f}" if name in content["retrained"] else "" for name in measures]
    yield "| never trained on them | 0.5 | 0.01 | " + " | ".join(cells) + " |"
    yield ""
    yield "| measure | targets | Spearman with U-LiRA's area | p | Kendall | Spearman with U-LiRA at 1 % |"
    yield "|---|---|---|---|---|---|"
    for name in measures:
        area, found = (content["agreement"][best][name] for best in (BEST, BEST_TPR))
        rank = f"{area['spearman']:.2f} ({area['low']:.2f} to {area['high']:.2f})"
        yield (
            f"| {name} | {area['targets']} | {rank} | {area['p']:.3f} | {area['kendall']:.2f} | "
            f"{found['spearman']:.2f} ({found['low']:.2f} to {found['high']:.2f}) |"
        )


def _interval(part: dict[str, float]) -> str:
    return f"{part['value']:.3f} ({part['low']:.3f}–{part['high']:.3f})"


def main() -> None:
    content = report(Path(sys.argv[1]))
    out = Path(sys.argv[2]) if len(sys.argv) > 2 else RESULT
    out.write_text(json.dumps(content, indent=1) + "\n")
    print("\n".join(lines(content)))


if __name__ == "__main__":
    main()
