"""A small part of `make kills`: killed at moments drawn by a seed, commands end with what an undisturbed run leaves."""

import random

import pytest

from tests.kills.run import Victim, differences, finish, tormented, values


@pytest.mark.parametrize("name", ["demo", "train", "bench run"])
@pytest.mark.slow
def test_killed_and_started_again_a_command_leaves_the_same(name, tmp_path):
    whole = Victim(name, tmp_path / "whole" / "0")
    whole.prepare()
    seconds = finish(whole)
    victim, found = tormented(name, 2, random.Random(0), tmp_path / "killed" / "0", seconds)
    assert victim.kills == 2 and all(differences(values(whole.folder), ending) == [] for ending in (*victim.endings, found))


def test_what_is_left_over_lost_or_other_is_told(tmp_path):
    for folder, content in (("one", '{"a": 1, "seconds": 1}'), ("two", '{"a": 2, "seconds": 2}'), ("three", '{"a": 1, "seconds": 3}')):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "result.json").write_text(content)
    (tmp_path / "two" / ".left").touch()
    assert differences(values(tmp_path / "one"), values(tmp_path / "two")) == ["left over: .left", "other values: result.json"]
    assert differences(values(tmp_path / "two"), values(tmp_path / "one")) == ["lost: .left", "other values: result.json"]
    assert differences(values(tmp_path / "one"), values(tmp_path / "three")) == []
