"""JSON and plain files within limits: what goes beyond them is a ValueError, whatever it is."""

import json
import os
import re
from pathlib import Path

import pytest

import expunge
from expunge.storage.documents import DEPTH, LARGEST, excerpt, named_number, parse_json, read_json, read_plain
from tests.memory import MIB, within

GOOD = {"a": [1, -2.5, None, True, "ü😀"], "b": {"c": {}}, "seed": 2**63, "small": 5e-324}


def test_what_python_writes_is_read(tmp_path):
    assert parse_json(json.dumps(GOOD).encode()) == parse_json(json.dumps(GOOD, ensure_ascii=False).encode()) == GOOD
    (tmp_path / "file").write_text(json.dumps(GOOD))
    assert read_json(tmp_path / "file") == read_json(str(tmp_path / "file")) == GOOD
    deep = "[" * DEPTH + "]" * DEPTH
    assert json.dumps(parse_json(deep)) == deep


BAD = {
    "deep": ("[" * 100_000 + "]" * 100_000, "nested deeper than 32"),
    "deep, never closed": ("[" * 100_000, "nested deeper than 32"),
    "deeper than allowed": ("[" * (DEPTH + 1) + "]" * (DEPTH + 1), "nested deeper than 32"),
    "deep objects": ('{"a":' * 5000 + "1" + "}" * 5000, "nested deeper than 32"),
    "not a number": ("[NaN]", "must be finite; found NaN"),
    "infinity": ('{"a": -Infinity}', "must be finite; found -Infinity"),
    "beyond float64": ("1e400", "must be finite; found 1e400"),
    "many digits": ("1" + "0" * 400, "smaller than 2^64"),
    "very many digits": ("-" + "9" * 10_000, "smaller than 2^64"),
    "64 bits and one": (str(2**64), "smaller than 2^64"),
    "half a character": (r'"\ud800"', "surrogates not allowed"),
    "half a character in a name": (r'{"\udc00": 1}', "surrogates not allowed"),
    "not UTF-8": (b'"\xff"', "invalid start byte"),
    "UTF-16": ('"a"'.encode("utf-16"), "invalid start byte"),
    "a name twice": ('{"a": 1, "b": {"c": 1, "c": 2}}', "a name twice; found c"),
    "nothing": ("", "Expecting value"),
    "cut": ('{"a": [1, 2', "Expecting ',' delimiter"),
    "two": ("1 2", "Extra data"),
    "many values": ("[" + "[]," * 500_001 + "1]", "at most"),
    "long": ('"' + "x" * LARGEST + '"', "at most"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_goes_beyond_is_refused(name):
    content, message = BAD[name]
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        parse_json(content.encode() if isinstance(content, str) else content)
    assert len(str(caught.value)) < 300


def test_a_name_twice_among_many_is_found_at_once():
    with pytest.raises(ValueError, match="a name twice; found 149999"):
        parse_json("{" + ", ".join(f'"{number}": 0' for number in range(150_000)) + ', "149999": 1}')


def test_values_take_no_more_memory_than_allowed():
    assert within(150 * MIB, lambda: parse_json("[" + "{}," * 249_000 + "1]"))


def test_only_plain_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path, "/dev/zero"):
        with pytest.raises(ValueError, match="must be a plain file"):
            read_plain(path, 10)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert read_plain(tmp_path / "file", 10) == b"0123456789"
    with pytest.raises(ValueError, match="at most 9 bytes; .*file has 10"):
        read_plain(tmp_path / "file", 9)
    (tmp_path / "dangling").symlink_to("nowhere")
    for path in (tmp_path / "missing", tmp_path / "dangling"):
        with pytest.raises(FileNotFoundError):
            read_plain(path, 10)
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match="at most"):
        read_json(tmp_path / "sparse")


def test_texts_for_messages_are_short_and_printable():
    assert excerpt("plain") == "plain" and excerpt("\x1b[2J") == r"'\x1b[2J'" and excerpt("x" * 999, 10) == "xxxxxxxxxx…"
    missing, two_lines = FileNotFoundError(2, "No such file or directory", "x.json"), ValueError("two\nlines")
    assert [excerpt(error) for error in (missing, two_lines, KeyError("a"), KeyError())] == [
        "No such file or directory",
        "two lines",
        "KeyError: 'a'",
        "KeyError",
    ]
    assert excerpt(ValueError("\x1b[2J")) == r"'\x1b[2J'"
    assert named_number("12", 20) == 12
    for text in ("-1", "21", "1.0", "", " 1", "²", "٣", "9" * 5000):
        with pytest.raises(ValueError, match="must be a whole number from 0 to 20"):
            named_number(text, 20)


def test_nothing_reads_pickles_through_torch_or_json_without_limits():
    for path in Path(expunge.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert all("weights_only=True" in call for call in re.findall(r"torch\.load\(.*", text)), path  # a user's .pt, named by them
        assert "pickle.load" not in text and "Unpickler" not in text, path
        own = ("documents.py", "tensors.py", "files.py")  # the last two read bytes that they have just made
        assert "json.load" not in text or path.name in own, path
        assert "Image.open(" not in text or "formats=" in text, path
