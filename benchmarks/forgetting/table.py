"""The trials as tables in Markdown: python -m benchmarks.forgetting.table results/trials/trials.jsonl"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

STAGES = ("stage1", "stage2", "stage3")
HEADER = (
    "variant",
    "weights",
    "remain",
    "forget",
    "loss",
    "re-learned, % after 1 to 4",
    "probes, %",
    "agree, %",
    "JS",
    "worst: remain",
    "re-learn",
    "probes",
    "holds",
)

SAMPLES = ("variant", "validation", "forget samples", "loss attack, AUC")


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def worst(rows: list[dict[str, Any]], retrained: dict[int, dict[str, Any]]) -> tuple[float, float, list[float]]:
    """Over the seeds, against the network retrained from the same seed: remain accuracy, re-learned accuracy, probe of each stage."""
    pairs = [(row, retrained[row["seed"]]) for row in rows]
    remain = min(row["remain"] - other["remain"] for row, other in pairs)
    faster = max(
        after - reference
        for row, other in pairs
        for after, reference in zip(row["relearn"]["unseen"][1:5], other["relearn"]["unseen"][1:5], strict=False)
    )
    return remain, faster, [max(row["probe"][stage][0] - other["probe"][stage][0] for row, other in pairs) for stage in STAGES]


def class_row(name: str, rows: list[dict[str, Any]], retrained: dict[int, dict[str, Any]]) -> list[str]:
    curve = rows[0].get("relearn")
    learned = [mean([row["relearn"]["unseen"][epoch] for row in rows]) for epoch in range(1, 5)] if isinstance(curve, dict) else []
    probes = [mean([row["probe"][stage][0] for row in rows]) for stage in STAGES]
    cells = [name, f"{mean([row.get('weights', 0) for row in rows]) / 1000:.0f}k", f"{mean([row['remain'] for row in rows]):.1f}"]
    cells += [f"{mean([row['forget'] for row in rows]):.1f}", f"{mean([row['loss']['forget'] for row in rows]):.1f}"]
    cells += [" ".join(f"{value:.0f}" for value in learned), " ".join(f"{value:.0f}" for value in probes)]
    cells += [f"{mean([row['to_retrained']['forget'][key] for row in rows]):{form}}" for key, form in (("agreement", ".0f"), ("js", ".3f"))]
    if not learned or name == "retrained":
        return [*cells, "", "", "", ""]
    remain, faster, stages = worst(rows, retrained)
    holds = ["remain"] * (remain >= 0) + ["re-learn"] * (faster <= 0) + ["probes"] * (max(stages) <= 1)
    told = "**all**" if len(holds) == 3 else ", ".join(holds)
    return [*cells, f"{remain:+.1f}", f"{faster:+.1f}", " ".join(f"{value:+.0f}" for value in stages), told]


def table(header: tuple[str, ...], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [[*header], ["---"] * len(header), *rows])


def main() -> None:
    results = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    trials = [row for row in results if row["job"] == "trial"]
    retrained = {row["seed"]: row for row in trials if row["variant"] == "retrained"}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in trials:
        groups[row["group"], row["variant"]].append(row)
    for group in ("reference", "reset", "epochs", "distil", "exclude", "rate", "values"):
        rows = [class_row(name, rows, retrained) for (of, name), rows in groups.items() if of == group]
        print(f"### {group}\n\n{table(HEADER, sorted(rows, key=lambda row: row[-1] != '**all**'))}\n")
    print(f"### subset\n\n{table(SAMPLES, [sample_row(name, rows) for (of, name), rows in groups.items() if of == 'subset'])}\n")
    shares: dict[tuple[float, str], list[dict[str, Any]]] = defaultdict(list)
    for row in (row for (of, _), rows in groups.items() if of == "mislabelled" for row in rows):
        shares[row["scenario"]["fraction"], row["variant"]].append(row)
    wrong = [sample_row(f"{100 * share:.0f} %: {name}", rows) for (share, name), rows in shares.items()]
    print(f"### wrong labels\n\n{table(SAMPLES, sorted(wrong, key=lambda row: (row[0][:2], -float(row[1]))))}")


def sample_row(name: str, rows: list[dict[str, Any]]) -> list[str]:
    forms = (("remain", ".1f"), ("forget_trained", ".1f"), ("auc", ".3f"))
    return [name, *(f"{mean([row[key] for row in rows]):{form}}" for key, form in forms)]


if __name__ == "__main__":
    main()
