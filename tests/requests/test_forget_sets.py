"""Forget sets in all their forms, and one clear line for those that name nothing, too much, or what is not there."""

import numpy
import pytest

from expunge.errors import InputError
from expunge.requests.forget_sets import forget_rows
from expunge.requests.task import load_task
from tests.requests.small import TASK, write_task


@pytest.fixture
def task(tmp_path):
    return load_task(write_task(tmp_path))


def test_ranges_labels_and_predicates(task):
    assert forget_rows("3,0-2,7", task) == (0, 1, 2, 3, 7)
    assert forget_rows("label=3", task) == tuple(range(3, 120, 4))
    assert forget_rows("label=3,1", task) == tuple(range(1, 120, 2))
    expected = [row for row in range(120) if float(task.dataset[row][0].sum()) > 8]
    assert 0 < len(expected) < 120 and forget_rows("predicate=bright", task) == tuple(expected)


KEYED = TASK + "\ndef keys():\n    return [f'customer {row % 30}' if row else 'Müller, # 1' for row in range(120)]\n"


@pytest.mark.parametrize(
    "spec, content, column, expected",
    [
        ("key=customer 7", "", None, [7, 37, 67, 97]),
        ("key=customer 7, customer 9", "", None, [7, 9, 37, 39, 67, 69, 97, 99]),
        ("keys=keys.txt", "\ufeffcustomer 7\r\n\n Müller, # 1 \n", None, [0, 7, 37, 67, 97]),
        ("keys=keys.csv", 'when,who\n1,customer 7\n2,"Müller, # 1"\n', "who", [0, 7, 37, 67, 97]),
        ("keys=keys.csv", "id\ncustomer 7\n", None, [7, 37, 67, 97]),
    ],
)
def test_all_samples_of_a_key(spec, content, column, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / spec.partition("=")[2]).write_text(content)
    assert list(forget_rows(spec, load_task(write_task(tmp_path, KEYED)), column)) == expected


@pytest.mark.parametrize(
    "text, spec, told",
    [
        (KEYED, "key=mallory,customer 7,eve", "forget: must be keys that the task's keys() returns; found eve and 1 more"),
        (KEYED, "key=", "forget: key= must be followed by keys"),
        (KEYED, "key=customer 7,customer 7", "forget: must name every key once; found customer 7 more than once"),
        (KEYED, "keys=nowhere.txt", "forget: keys= must be a file of keys; there is no such file; found nowhere.txt"),
        (KEYED, "keys=empty.txt", "forget: must name at least one sample"),
        (KEYED.replace("range(120)", "range(119)"), "key=customer 7", "task: keys() of "),
        (KEYED.replace("return [f", "return 3  # [f"), "key=customer 7", "task: keys() of "),
        (TASK, "key=customer 7", "forget: key= needs a function keys() in "),
    ],
)
def test_keys_that_nobody_has(text, spec, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(InputError) as caught:
        forget_rows(spec, load_task(write_task(tmp_path, text)))
    assert str(caught.value).startswith(told) and "\n" not in str(caught.value)


def test_spellings_of_a_key_that_look_the_same_are_one(tmp_path):
    """Else some samples of a person are forgotten, and nobody hears of the others."""
    spelled = ["4711", "4711 ", "M\u00fcller", "Mu\u0308ller\t"]
    task = load_task(write_task(tmp_path, TASK + f"\ndef keys():\n    return {spelled} + ['other'] * 116\n"))
    assert forget_rows("key=4711", task) == (0, 1)
    assert forget_rows("key=M\u00fcller", task) == forget_rows("key=Mu\u0308ller", task) == (2, 3)


def test_keys_of_arrays_are_taken(tmp_path):
    task = load_task(write_task(tmp_path, TASK + "\ndef keys():\n    return torch.arange(120) // 4\n"))
    assert forget_rows("key=2,0", task) == (0, 1, 2, 3, 8, 9, 10, 11)


@pytest.mark.parametrize(
    "name, content, column",
    [
        ("ids.txt", "7\n# a comment\n\n 0-2  # three\n3\n", None),
        ("ids.csv", "id,who\n7,a\n0,b\n1,c\n2,d\n3,e\n", None),
        ("ids.csv", "who,row\na,7\nb,0\nc,1\nd,2\ne,3\n", "row"),
        ("ids.csv", "row\n7\n0-2\n3\n", None),
        ("ids.csv", "7\n0\n1\n2\n3\n", None),
        ("ids.txt", " 7 , 0 - 3 \r\n", None),
        ("ids.txt", "﻿7,0-3", None),
    ],
)
def test_files_of_ids(name, content, column, task, tmp_path):
    (tmp_path / name).write_text(content)
    assert forget_rows(str(tmp_path / name), task, column) == (0, 1, 2, 3, 7)


def test_arrays_of_ids_and_masks(task, tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.array([7, 0, 3]))
    mask = numpy.zeros(120, dtype=bool)
    mask[[7, 0, 3]] = True
    numpy.save(tmp_path / "mask.npy", mask)  # as cleanlab.filter.find_label_issues returns it
    assert forget_rows(str(tmp_path / "ids.npy"), task) == forget_rows(str(tmp_path / "mask.npy"), task) == (0, 3, 7)


@pytest.mark.parametrize(
    "spec, told",
    [
        ("", "an empty text"),
        ("120", "ids must be rows of the training data, 0 to 119; found 120"),
        ("0-9999999999999999999999", "0 to 119"),
        ("5-2", "a range must rise"),
        ("1,2,1", "must name every sample once; found 1 more than once"),
        ("0-5,3-8", "found 3, 4, 5 more than once"),
        ("0-119", "must leave samples to keep"),
        ("label=9", "label= must be a label of the training data (0, 1, 2, 3); found 9"),
        ("label=", "label= must be followed by whole numbers"),
        ("label=cat", "label= must be followed by whole numbers"),
        ("predicate=nothing", "must have a function of this name"),
        ("predicate=raising", "predicate=raising must not raise; found KeyError: 'x', at sample 0"),
        ("predicate=never", "must name at least one sample"),
        ("predicate=always", "must leave samples to keep"),
        ("no-such-file.txt", "there is no such file"),
        ("user-17", "there is no such file"),
        ("5 6", "there is no such file; found 5 6"),  # two samples, not sample 56
    ],
)
def test_what_cannot_be_forgotten_is_told_on_one_line(spec, told, tmp_path):
    more = "\ndef raising(sample):\n    raise KeyError('x')\ndef never(sample):\n    return 0\ndef always(sample):\n    return 1\n"
    task = load_task(write_task(tmp_path, TASK + more))
    with pytest.raises(InputError) as caught:
        forget_rows(spec, task)
    assert str(caught.value).startswith("forget: ") and told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name, content, column, told",
    [
        ("ids.txt", "3\nuser-17\n", None, "entry 2: must be the id of a sample"),
        ("ids.txt", "", None, "must name at least one sample"),
        ("ids.txt", "-3", None, "must be the id of a sample"),
        ("ids.txt", "1.5", None, "must be the id of a sample"),
        ("ids.txt", "5 6\n", None, "entry 1: must be the id of a sample, a row of the training data; found 5 6"),
        ("ids.txt", "5\n12,345\n", None, "entry 2: must be a number without commas, or several on a line each; found 12,345"),
        ("ids.txt", "5  6\n", None, "must be the id of a sample"),
        ("ids.txt", "1 - 3, 5 7", None, "must be the id of a sample"),
        ("ids.csv", 'id,who\n"1,000",a\n', None, "entry 1: must be the id of a sample"),
        ("ids.csv", "id,who\n5,a\n,b\n", None, "entry 2: must be the id of a sample"),
        ("ids.csv", "id\n1\n3,4\n", None, "line 3: must have no more cells than the first line, 1; found 3, 4"),
        ("ids.csv", "a,b\n1,2\n", None, "column: must name the column of"),
        ("ids.csv", "a,b\n1,2\n", "c", "column: must be one column of"),
        ("ids.csv", "a,id\n1\n", None, "line 2: must have a column id"),
        ("ids.txt", "1\n", "id", "column: is for a .csv file"),
        ("ids.npy", "not numpy", None, "must be a .npy file of numbers"),
    ],
)
def test_files_that_do_not_hold_ids(name, content, column, told, task, tmp_path):
    (tmp_path / name).write_text(content)
    with pytest.raises(InputError) as caught:
        forget_rows(str(tmp_path / name), task, column)
    assert told in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "array, told",
    [
        (numpy.zeros(40, dtype=bool), "a mask must have an entry per training sample, 120; found a mask of 40"),
        (numpy.zeros(120, dtype=bool), "must name at least one sample"),
        (numpy.ones(120, dtype=bool), "must leave samples to keep"),
        (numpy.array([0.5]), "whole numbers or a boolean mask"),
        (numpy.array([[1]]), "in one dimension"),
        (numpy.array([-1]), "0 to 119; found -1"),
        (numpy.array([3, 3]), "every sample once"),
    ],
)
def test_arrays_that_do_not_fit(array, told, task, tmp_path):
    numpy.save(tmp_path / "ids.npy", array)
    with pytest.raises(InputError) as caught:
        forget_rows(str(tmp_path / "ids.npy"), task)
    assert told in str(caught.value)


def test_a_pickle_in_an_array_is_not_run(task, tmp_path):
    numpy.save(tmp_path / "ids.npy", numpy.array([{1: 2}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="no pickle"):
        forget_rows(str(tmp_path / "ids.npy"), task)


@pytest.mark.parametrize(
    "before, after",
    [(b"(3,)", b"(3,("), (b"(3,), }         ", b"(" + b"9" * 13 + b",), }")],
    ids=["open", "huge"],
)
def test_a_numpy_file_whose_header_lies_is_refused(before, after, task, tmp_path):
    """numpy raises a TokenError, a MemoryError."""
    numpy.save(tmp_path / "ids.npy", numpy.array([7, 0, 3]))
    content = (tmp_path / "ids.npy").read_bytes()
    assert before in content
    (tmp_path / "ids.npy").write_bytes(content.replace(before, after))
    with pytest.raises(InputError, match="must be a .npy file of numbers, no pickle"):
        forget_rows(str(tmp_path / "ids.npy"), task)
