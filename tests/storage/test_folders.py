"""A folder of results is replaced whole or stays as it was, and what is not ours is never touched."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from expunge.errors import InputError
from expunge.storage.folders import listed, remove, reserved, signature

HOLDING = """
import sys, time
from expunge.storage.folders import reserved
with reserved("out", sys.argv[1], "demo"):
    print("held", flush=True)
    time.sleep(60)
"""


def write(names, content, folder):
    for name in names:
        (folder / name).write_bytes(content)
    (folder / "result.json").write_text(json.dumps(signature("demo", names)))


def save(out, *names, content=b"new", command="demo"):
    with reserved("out", out, command) as place:
        return place.save(partial(write, names, content))


def tree(folder):
    """The files below a folder, hidden ones too, and what is in them but in result.json."""
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {name: None if path.suffix == ".json" else path.read_bytes() for name, path in files.items()}


@pytest.fixture(params=["renamed", "written into"])
def out(request, tmp_path, monkeypatch):
    """A folder that can be renamed, and one that cannot: the working directory."""
    folder = tmp_path / "runs" / "out"
    if request.param == "written into":
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
    return folder


def test_an_earlier_result_is_replaced_whole(out):
    assert save(out, "one", "two", content=b"old") == out
    save(out, "two", "three")
    assert tree(out.parent) == {"out/two": b"new", "out/three": b"new", "out/result.json": None}


@pytest.mark.parametrize("name", ["", "/", "..", "../", ".", "./", "../other", "../other/", "/tmp/", "a/b", "one\0"])
def test_what_a_changed_result_lists_outside_its_folder_is_not_listed(name, tmp_path):
    (tmp_path / "result.json").write_text(json.dumps({"command": "demo", "files": ["result.json", "one", "two/", name]}))
    assert listed(tmp_path, "demo") == {"result.json", "one", "two/"}


def test_a_changed_result_does_not_make_us_remove_what_is_outside(out):
    save(out, "one")
    (out.parent / "mine").write_text("mine")
    (out / "result.json").write_text(json.dumps({"command": "demo", "files": ["result.json", "one", "../"]}))
    save(out, "two")
    assert tree(out.parent) == {"mine": b"mine", "out/two": b"new", "out/result.json": None}


@pytest.mark.parametrize(
    "name, content",
    [
        ("notes.txt", "mine"),
        ("result.json", "{"),
        ("result.json", "[" * 100_000),
        ("result.json", json.dumps({"rows": []})),
        ("result.json", json.dumps(signature("compare", []))),
        ("folder/file", "mine"),
    ],
)
def test_what_is_not_of_the_command_is_refused_before_the_work(out, name, content):
    (out / name).parent.mkdir(parents=True, exist_ok=True)
    (out / name).write_text(content)
    before = tree(out.parent)
    rule = "out: must be a folder that is new, empty, or holds an earlier result of the same kind [(]demo[)] and nothing else"
    with pytest.raises(InputError, match=rule) as raised, reserved("out", out, "demo"):
        pytest.fail("must not begin")
    assert raised.value.found.startswith(str(out)) and tree(out.parent) == before


def test_a_manifest_gives_no_right_to_folders_or_to_what_is_elsewhere(out):
    for name in ("folder", "../outside"):
        (out / name).mkdir(parents=True)
    (out / "result.json").write_text(json.dumps(signature("demo", ["folder", "../outside"])))
    with pytest.raises(InputError, match="found .*folder"), reserved("out", out, "demo"):
        pytest.fail("must not begin")
    (out / "folder").rmdir()
    save(out, "one")
    assert (out / "../outside").is_dir() and tree(out) == {"one": b"new", "result.json": None}


def test_what_came_meanwhile_is_not_removed(out):
    save(out, "one", content=b"old")
    with pytest.raises(InputError, match="found .*notes.txt"), reserved("out", out, "demo") as place:
        (out / "notes.txt").write_bytes(b"mine")
        place.save(partial(write, ["two"], b"new"))
    assert tree(out.parent) == {"out/one": b"old", "out/notes.txt": b"mine", "out/result.json": None}


def test_what_file_managers_leave_is_no_reason_to_refuse(out):
    save(out, "one")
    (out / ".DS_Store").touch()
    save(out, "two")
    assert (out / "two").exists() and not (out / "one").exists()


def test_links_stay(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to("elsewhere")
    for content in (b"old", b"new"):
        assert save(tmp_path / "link", "one", content=content) == tmp_path / "link"
    assert (tmp_path / "link").is_symlink() and (tmp_path / "elsewhere" / "one").read_bytes() == b"new"


def test_permissions_stay(tmp_path):
    save(tmp_path / "out", "one")
    (tmp_path / "out").chmod(0o750)
    save(tmp_path / "out", "one")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(28, "No space left on device", "file"), ZeroDivisionError])
def test_a_failure_while_saving_leaves_what_was_there(out, error):
    save(out, "one", content=b"old")
    before = tree(out.parent)

    def failing(folder):
        (folder / "one").write_bytes(b"new")
        raise error

    with pytest.raises(error if isinstance(error, type) else type(error)), reserved("out", out, "demo") as place:
        place.save(failing)
    assert tree(out.parent) == before


@pytest.mark.parametrize("call", range(3))
def test_a_rename_that_fails_leaves_what_was_there(tmp_path, monkeypatch, call):
    out, calls, rename = tmp_path / "out", [], os.replace
    save(out, "one", content=b"old")
    before = tree(tmp_path)

    def failing(source, target):
        calls.append((source, target))
        if len(calls) == call + 1:
            raise PermissionError(13, "Permission denied", str(source))
        rename(source, target)

    monkeypatch.setattr(os, "replace", failing)
    if call < 2:  # the earlier folder away, the new one in its place
        with pytest.raises(PermissionError):
            save(out, "one")
        assert tree(tmp_path) == before
    else:
        save(out, "one")
        assert len(calls) == 2


def test_an_error_names_the_file_by_its_final_name(out):
    def failing(folder):
        raise OSError(28, "No space left on device", str(folder / "one"))

    with pytest.raises(OSError) as raised, reserved("out", out, "demo") as place:
        place.save(failing)
    assert raised.value.filename == str(out / "one")


@pytest.mark.slow
def test_one_process_at_a_time_and_none_after_a_kill(out):
    save(out, "one", content=b"old")
    before = tree(out.parent)
    child = subprocess.Popen([sys.executable, "-c", HOLDING, str(out)], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout.readline() == "held\n"
        with pytest.raises(InputError, match="out: must not be in use: another command is writing there"), reserved("out", out, "demo"):
            pytest.fail("must not begin")
        child.kill()
    assert child.returncode == -signal.SIGKILL and tree(out.parent) != before  # its empty lock is left
    with reserved("out", out, "demo"):
        pass
    assert tree(out.parent) == before


DYING = """
import os, signal, sys
from functools import partial
import tests.storage.test_folders as these
left, rename, unlink = int(sys.argv[2]), os.replace, os.unlink
def counted(call, *arguments, **options):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*arguments, **options)
os.chdir(sys.argv[3])
os.replace = partial(counted, rename)
os.unlink = partial(counted, unlink)
these.save(sys.argv[1], "two", "three")
"""


@pytest.mark.parametrize("step", range(0, 12))
@pytest.mark.slow
def test_killed_between_any_two_steps_the_next_one_ends_it(out, step):
    """Before every rename and every removal: the folder is the earlier one, or the new one, or the next command makes it one of them."""
    save(out, "one", "two", content=b"old")
    here = os.getcwd() if os.getcwd() == str(out) else str(out.parent)
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    code = subprocess.run([sys.executable, "-c", DYING, str(out), str(step), here], env=environment).returncode
    assert code == -signal.SIGKILL if step < 6 else code in (0, -signal.SIGKILL)
    with reserved("out", out, "demo"):
        pass
    old = {"out/one": b"old", "out/two": b"old", "out/result.json": None}
    new = {"out/two": b"new", "out/three": b"new", "out/result.json": None}
    assert tree(out.parent) in (old, new)
    save(out, "three")
    assert tree(out.parent) == {"out/three": b"new", "out/result.json": None}


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["a pipe", "a device"])
def test_a_manifest_that_never_ends_is_not_read(out, make):
    out.mkdir(parents=True, exist_ok=True)
    make(out / "result.json")
    with pytest.raises(InputError, match="result.json"), reserved("out", out, "demo"):
        pytest.fail("must not begin")


@pytest.mark.parametrize("name", ["new", "earlier", "finished"])
def test_a_name_of_ours_that_is_taken_is_told_before_the_work(tmp_path, name):
    (tmp_path / f".out.expunge-{name}").write_text("mine")
    with pytest.raises(InputError, match=f"expunge-{name} for a folder of its own"), reserved("out", tmp_path / "out", "demo"):
        pytest.fail("must not begin")
    assert tree(tmp_path) == {f".out.expunge-{name}": b"mine"}


def test_a_lock_that_is_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / ".out.expunge-lock")
    with pytest.raises(OSError, match="expunge-lock"), reserved("out", tmp_path / "out", "demo"):
        pytest.fail("must not begin")


def test_who_works_in_the_folder_and_who_does_not_hold_one_lock(tmp_path, monkeypatch):
    save(tmp_path / "out", "one", content=b"old")
    with reserved("out", tmp_path / "out", "demo"):
        monkeypatch.chdir(tmp_path / "out")
        with pytest.raises(InputError, match="must not be in use"), reserved("out", ".", "demo"):
            pytest.fail("must not begin")


@pytest.mark.parametrize("killed_in", ["out", "."])
def test_what_a_kill_leaves_is_removed_from_any_working_directory(tmp_path, monkeypatch, killed_in):
    save(tmp_path / "out", "one", content=b"old")
    left = tmp_path / ("out/.expunge-new" if killed_in == "out" else ".out.expunge-new")
    left.mkdir()
    (left / "half").touch()
    monkeypatch.chdir(tmp_path / ("." if killed_in == "out" else "out"))
    save(tmp_path / "out", "two")
    assert tree(tmp_path) == {"out/two": b"new", "out/result.json": None} and not left.exists()


def write_parts(names, content, folder):
    for name in names:
        (folder / name).mkdir()
        (folder / name / "file").write_bytes(content)
        (folder / name / "result.json").write_text(json.dumps(signature("part", ["file"])))
    (folder / "result.json").write_text(json.dumps(signature("demo", [f"{name}/" for name in names])))


def save_parts(out, *names, content=b"new"):
    with reserved("out", out, "demo") as place:
        place.save(partial(write_parts, names, content))


def test_folders_in_a_result_are_replaced_whole(out):
    save_parts(out, "one", "two", content=b"old")
    save_parts(out, "two", "three")
    files = {f"out/{name}/file": b"new" for name in ("two", "three")}
    assert tree(out.parent) == files | {f"out/{name}result.json": None for name in ("", "two/", "three/")}
    save(out, "plain")
    assert tree(out.parent) == {"out/plain": b"new", "out/result.json": None} and not (out / "two").exists()


@pytest.mark.parametrize("stranger", ["two/mine", "two/folder/mine"])
def test_what_is_not_of_a_folder_in_a_result_is_refused(out, stranger):
    save_parts(out, "one", "two")
    (out / stranger).parent.mkdir(exist_ok=True)
    (out / stranger).write_text("mine")
    before = tree(out.parent)
    with pytest.raises(InputError, match=f"found .*{stranger.rpartition('/')[0]}"), reserved("out", out, "demo"):
        pytest.fail("must not begin")
    assert tree(out.parent) == before


def test_a_link_is_no_folder_of_a_result(out):
    save_parts(out, "one")
    (out / "one" / "file").unlink()
    (out / "one" / "result.json").unlink()
    (out / "one").rmdir()
    (out.parent / "mine").mkdir()
    (out / "one").symlink_to(out.parent / "mine")
    with pytest.raises(InputError, match="found .*one"), reserved("out", out, "demo"):
        pytest.fail("must not begin")


def test_a_folder_that_several_remove_at_once_is_gone_without_an_error(tmp_path):
    for number in range(5):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in range(200):
            (folder / str(name)).touch()
        with ThreadPoolExecutor(4) as removing:
            list(removing.map(remove, [folder] * 4))
        assert not folder.exists()
