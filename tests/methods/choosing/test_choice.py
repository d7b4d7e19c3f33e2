"""How a choice is shown: one line per finding, and a repr that fits on one."""

from dataclasses import replace

from expunge.methods.choosing.choice import Choice, Tried

TRIED = tuple(Tried(f"ResetAndDistil({number})", 10, 1.0, 0.9, 0.1, 0.5, "far " * 30) for number in range(9))
CHOICE = Choice("ResetAndDistil(" + "x" * 500 + ")", "ResetAndDistil(0.6), 10 epochs", ("the first", "the second, " * 20), True, (), TRIED)


def test_a_choice_is_a_line_per_finding():
    assert str(CHOICE).splitlines() == [
        "chose ResetAndDistil(0.6), 10 epochs because",
        "- the first",
        "- " + "the second, " * 20,
        "goal met",
    ]
    assert str(replace(CHOICE, goal_met=False, missing=("no accuracy", "no rest"))).endswith("\nGOAL NOT MET: no accuracy; no rest")


def test_its_repr_is_one_short_line():
    assert repr(CHOICE) == "Choice(ResetAndDistil(0.6), 10 epochs; goal met)"
    assert repr(replace(CHOICE, goal_met=None, missing=("no attack",))).endswith("; goal not measured in full: no attack)")


def test_for_a_terminal_lines_are_wrapped():
    assert all(len(line) <= 80 for line in CHOICE.lines()) and " ".join(" ".join(CHOICE.lines()).split()) == " ".join(str(CHOICE).split())
