"""The commands for one's own model: what they print, how they end."""

import json
import os

import pytest

from expunge.cli import commands as cli
from tests.requests.small import TASK, request, write_task, write_weights


@pytest.fixture
def here(tmp_path, monkeypatch):
    request(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


ASKED = ["--task", "mytask.py", "--weights", "model.safetensors", "--out", "out"]
MASKED = [*ASKED, "--method", "fisher-mask", "--set", "ratio=0.1", "tuning=None"]


def test_a_request_is_made_verified_proved_and_undone(here, capsys):
    (here / "ids.txt").write_text("3\n5\n8-10\n")
    assert cli.main(["unlearn", *MASKED, "--forget", "ids.txt"]) == 0
    told = capsys.readouterr()
    assert told.out.startswith("request 1: 5 of 120 samples forgotten, weights ") and "forget 5 of 120 samples" in told.err
    assert cli.main(["verify", "out/receipt.json", "--weights", "out/weights.safetensors", "--task", "mytask.py"]) == 0
    assert capsys.readouterr().out.endswith("all fits; the receipt says what it does not prove\n")
    assert cli.main(["prove", "out", "--id", "8", "--out", "proof.json"]) == 0
    assert cli.main(["verify", "out/receipt.json", "--proof", "proof.json"]) == 0
    assert "fits: proof.json: sample 8 is among those of request 1" in capsys.readouterr().out
    assert cli.main(["undo", "out", "--out", "back.safetensors"]) == 0
    assert cli.main(["verify", "out/receipt.json", "--weights", "back.safetensors"]) == 1
    told = capsys.readouterr().out
    assert "DOES NOT FIT: back.safetensors: the weights before" in told and told.endswith("1 of these do not fit\n")


def test_what_cannot_be_compared_is_not_said_to_fit(here, capsys):
    """A dataset of one's own shows no tensors: its training samples are compared by some, its test samples not at all."""
    own = "class Own(torch.utils.data.Dataset):\n    def __init__(self, data):\n        self.data = data\n"
    own += "    def __len__(self):\n        return len(self.data)\n    def __getitem__(self, row):\n        return self.data[row]\n"
    own += "plain_train, plain_test = train, test\ndef train():\n    return Own(plain_train())\ndef test():\n    return Own(plain_test())\n"
    (here / "mytask.py").write_text(f"{TASK}\nimport torch\n{own}")
    assert cli.main(["unlearn", *MASKED, "--forget", "0-3", "--quiet"]) == 0
    capsys.readouterr()
    assert cli.main(["verify", "out/receipt.json", "--task", "mytask.py"]) == 0
    told = capsys.readouterr().out
    assert "fits: train(): the data of the receipt, by 64 samples spread over them\nnot compared: test(): data without a digest\n" in told
    assert told.endswith("all that was compared fits; the receipt says what it does not prove\n")


def test_an_audit_of_a_task_names_weights_as_the_receipt_does(here, capsys):
    assert cli.main(["unlearn", *MASKED, "--forget", "0-39", "--quiet"]) == 0
    asked = ["--task", "mytask.py", "--before", "model.safetensors", "--after", "out/weights.safetensors", "--forget", "0-39"]
    assert cli.main(["audit", *asked, "--out", "audit", "--no-relearn", "--quiet"]) == 0
    audited, receipt = (json.loads((here / name).read_text()) for name in ("audit/result.json", "out/receipt.json"))
    weights = audited["audit"]["weights"]
    assert (weights["before"], weights["after"]) == (receipt["weights_before"], receipt["weights_after"])


def test_a_dry_run_says_that_few_samples_get_no_audit(here, capsys):
    assert cli.main(["unlearn", *MASKED, "--forget", "0-3", "--dry-run"]) == 0
    assert "audit: none can be made, it needs at least 20 forget samples\n" in capsys.readouterr().out


def test_quiet_prints_the_result_alone(here, capsys):
    assert cli.main(["unlearn", *MASKED, "--forget", "0-3", "--quiet"]) == 0
    told = capsys.readouterr()
    assert told.err == "" and len(told.out.splitlines()) == 2


@pytest.mark.parametrize("option", ["sums", "sign", "retrained"])
def test_a_dry_run_checks_all_that_a_run_would(option, here, capsys):
    asked = ["unlearn", *ASKED, "--forget", "label=2", "--method", "fisher-mask", f"--{option}", "nowhere"]
    told = []
    for more in ([], ["--dry-run"]):
        assert cli.main([*asked, *more]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and told[0].startswith(f"expunge: {option}: ")


@pytest.mark.parametrize("name", ["thesis.txt", "result.json"])
def test_a_dry_run_refuses_a_folder_that_holds_something_else(name, here, capsys):
    (here / "out").mkdir()
    (here / "out" / name).write_text('{"command": "audit", "files": []}')
    told = []
    for more in ([], ["--dry-run"]):
        assert cli.main(["unlearn", *ASKED, "--forget", "label=2", *more]) == 2
        told.append(capsys.readouterr().err)
    assert told[0] == told[1] and told[0].startswith("expunge: out: must be a folder that is new, empty, or holds an earlier result")
    assert os.listdir(here / "out") == [name]


def test_a_dry_run_writes_nothing(here, capsys):
    before = sorted(os.listdir(here))
    assert cli.main(["unlearn", *ASKED, "--forget", "label=2", "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "forget: 30 of 120 samples" in told and "method: Choose(" in told and told.endswith("the result is in out/\n")
    assert cli.main(["unlearn", *ASKED, "--forget", "label=2", "--dry-run", "--out", "out//"]) == 0
    assert capsys.readouterr().out.endswith("the result is in out/\n")
    assert sorted(os.listdir(here)) == before


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["unlearn", *MASKED, "--forget", "500"], "expunge: forget: ids must be rows of the training data, 0 to 119; found 500\n"),
        (["unlearn", *MASKED, "--forget", "ids.txt"], "expunge: forget: must be 0-99,200 or label=3 or "),
        (["verify", "nothing.json"], "expunge: receipt: must be the receipt.json of a folder of requests; found nothing.json\n"),
        (
            ["undo", "nothing", "--out", "back.safetensors"],
            "expunge: folder: must be a folder of requests, with a receipt.json; found nothing\n",
        ),
        (["prove", "nothing", "--id", "3", "--out", "proof.json"], "expunge: folder: must be a folder of requests; found nothing\n"),
    ],
)
def test_mistakes_are_one_line_and_change_nothing(arguments, line, here, capsys):
    before = sorted(os.listdir(here))
    assert cli.main(arguments) == 2
    told = capsys.readouterr()
    assert told.err.startswith(line) and told.err.count("\n") == 1 and told.out == ""
    assert sorted(os.listdir(here)) == before


def test_a_task_that_fails_is_one_line(here, capsys):
    write_task(here, TASK + "\nraise RuntimeError('of two\\nlines')")
    assert cli.main(["unlearn", *MASKED, "--forget", "0"]) == 2
    assert "importing mytask.py must not raise; found RuntimeError: of two lines (" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused(here, capsys):
    (here / "file").write_text("x")
    assert cli.main(["unlearn", "--task", "mytask.py", "--weights", "model.safetensors", "--forget", "0", "--out", "file/out"]) == 2
    assert capsys.readouterr().err.startswith("expunge: out: must be a folder, and ")


BUILD = ["fisher", "build", "--task", "mytask.py", "--weights", "model.safetensors", "--threads", "1", "--quiet"]


def test_sums_are_stored_in_shards_merged_and_used(here, capsys):
    for number in (1, 2):
        assert cli.main([*BUILD, "--shard", f"{number}/2", "--out", f"shard{number}"]) == 0
    assert capsys.readouterr().out.endswith("shard2: 2 of 4 groups, 120 samples, the other shards are to be merged with it\n")
    assert cli.main(["fisher", "merge", "shard1", "shard2", "--out", "sums"]) == 0
    assert capsys.readouterr().out == "sums: 4 of 4 groups, 120 samples, complete\n"
    assert cli.main(["unlearn", *MASKED, "--forget", "label=3", "--sums", "sums", "--quiet"]) == 0
    assert cli.main(["verify", "out/receipt.json", "--task", "mytask.py"]) == 0
    assert cli.main([*BUILD, "--out", "sums"]) == 0
    assert capsys.readouterr().out.endswith("sums: 3 of 4 groups, 120 samples, complete, without the samples of 1 request\n")
    assert cli.main(["unlearn", *MASKED, "--forget", "0-5", "--sums", "shard1"]) == 2
    assert "sums: must be complete" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, line",
    [
        (["fisher", "merge", "--out", "sums"], "expunge: stores: must be the folders of shards"),
        (
            ["fisher", "merge", "nothing", "--out", "sums"],
            "expunge: stores: must be a folder that `expunge fisher build` wrote; found nothing",
        ),
        (["fisher", "build", "--out", "sums"], "expunge: task: must be given to build a store"),
        (["fisher", "build", "--task", "mytask.py", "--out", "sums"], "expunge: weights: must be given to build a store"),
        ([*BUILD, "--shard", "3/2", "--out", "sums"], "expunge: shard: must be NUMBER/OF, such as 2/4; found 3/2"),
        ([*BUILD, "--batch-size", "0", "--out", "sums"], "expunge: batch_size: must be a whole number of at least 1; found 0"),
        ([*BUILD, "--out", "."], "expunge: out: must be a folder that is new, empty, or holds a store of sums"),
    ],
)
def test_mistakes_about_stores_are_one_line_and_change_nothing(arguments, line, here, capsys):
    before = sorted(os.listdir(here))
    assert cli.main(arguments) == 2
    assert capsys.readouterr().err.startswith(line) and sorted(os.listdir(here)) == before


def test_a_dry_run_checks_the_store(here, capsys):
    asked = ["unlearn", *MASKED, "--forget", "0-3", "--no-audit", "--quiet", "--sums"]
    assert cli.main([*asked, "nothing", "--dry-run"]) == 2
    assert capsys.readouterr().err.startswith("expunge: sums: must be a folder that `expunge fisher build` wrote")
    assert cli.main([*BUILD, "--out", "sums", "--quiet"]) == 0
    before = {path.name: path.read_bytes() for path in (here / "sums").iterdir()}
    assert cli.main([*asked, "sums", "--dry-run"]) == 0
    assert "stored sums: passes over 4 samples alone, no training; time: about 0.0 s" in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in (here / "sums").iterdir()} and not (here / "out").exists()
    assert cli.main([*asked, "sums"]) == 0
    assert cli.main([*asked, "sums", "--out", "elsewhere", "--dry-run"]) == 2
    assert "lacks samples of other requests" in capsys.readouterr().err


def test_a_dry_run_counts_the_passes_that_a_store_leaves(here, capsys):
    """Of a whole class none; later also over the samples that the store lacks."""
    assert cli.main([*BUILD, "--out", "sums"]) == 0
    asked = ["unlearn", *ASKED, "--method", "fisher-mask", "--no-audit", "--quiet", "--sums", "sums"]
    for forget, more, told in (
        ("label=2", ["--set", "tuning=None"], "stored sums: passes over 0 samples alone, no training; time: "),
        ("0-9", [], "stored sums: passes over 10 samples alone, and 5 passes of training; time: "),
    ):
        assert cli.main([*asked, "--forget", forget, *more, "--dry-run"]) == 0
        assert told in capsys.readouterr().out
    assert cli.main([*asked, "--forget", "label=2", "--set", "tuning=None"]) == 0
    assert cli.main([*asked, "--forget", "0-9", "--dry-run"]) == 0  # 30 that the store lacks, and of 0-9 those that are not among them
    assert "stored sums: passes over 38 samples alone" in capsys.readouterr().out


LARGER = TASK.replace("points(120, 1)", "points(400, 1)").replace("points(40, 2)", "points(200, 2)")


@pytest.fixture
def larger(tmp_path, monkeypatch):
    """With enough samples for an audit."""
    write_task(tmp_path, LARGER)
    write_weights(tmp_path, LARGER)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_request_is_audited_and_its_receipt_covers_the_audit(larger, capsys):
    asked = ["unlearn", *MASKED, "--forget", "label=2", "--threads", "1"]
    assert cli.main([*asked, "--quiet"]) == 0
    receipt = json.loads((larger / "out/receipt.json").read_bytes())
    assert receipt["measured"]["audit"]["verdict"]["word"] in ("cannot tell", "partly", "cosmetic", "damaged")  # none was retrained
    assert {"audit.json", "audit.html", "model-card.md"} <= {*receipt["files"]}
    log = (larger / "out/log.txt").read_text()
    assert "audit: class 2 (100 samples), no retrained network" in log and log.index("FisherMask: ") < log.index("audit: ")
    assert all(f"missing: {line}"[:60] in " ".join(log.split()) for line in receipt["measured"]["audit"]["verdict"]["missing"])
    assert {*json.loads((larger / "out/audit.json").read_bytes())["data"]} == {"test"}  # no digest by which a guess could be confirmed
    assert receipt["weights_after"] in (larger / "out/model-card.md").read_text()
    capsys.readouterr()
    assert cli.main(["verify", "out/receipt.json", "--task", "mytask.py"]) == 0
    page = larger / "out/audit.html"
    page.write_text(page.read_text() + " ")
    assert cli.main(["verify", "out/receipt.json"]) == 1
    assert "DOES NOT FIT: audit.html" in capsys.readouterr().out
    found = ["audit", "--task", "mytask.py", "--before", "model.safetensors", "--after", "out/weights.safetensors", "--forget", "label=2"]
    assert cli.main([*found, "--retrained", "model.safetensors", "--out", "audit", "--quiet"]) == 0
    told = capsys.readouterr()
    assert "seems to have been trained on the forget data" in told.err  # w* is no retrained network
    own = json.loads((larger / "out/audit.json").read_bytes())["measures"]
    assert [part["after"] for part in json.loads((larger / "audit/result.json").read_bytes())["audit"]["measures"]] == [
        part["after"] for part in own
    ]


def test_a_request_too_small_for_an_audit_says_so(here, capsys):
    assert cli.main(["unlearn", *MASKED, "--forget", "0-3"]) == 0
    told = capsys.readouterr()
    assert "no audit was made: forget: must hold 20 samples or more" in told.err and "Weights, patch, receipt and ledger" in told.out
    receipt = json.loads((here / "out/receipt.json").read_bytes())
    assert receipt["measured"]["audit"]["verdict"] is None and "20 samples" in receipt["measured"]["audit"]["why"]
    assert "no audit was made: forget: must hold 20 samples or more" in (here / "out/log.txt").read_text()


def test_what_the_audit_needs_is_checked_before_anything_is_done(here, capsys):
    for more, line in (
        (["--retrained", "nothing.safetensors"], "expunge: retrained: "),
        (["--no-audit", "--retrained", "model.safetensors"], "expunge: retrained: is for the audit"),
    ):
        for dry in ([], ["--dry-run"]):
            assert cli.main(["unlearn", *MASKED, "--forget", "0-3", *more, *dry]) == 2
            assert capsys.readouterr().err.startswith(line)
            assert not (here / "out").exists()


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_a_method_that_changes_nothing_is_told(quiet, here, capsys):
    assert cli.main(["unlearn", *ASKED, "--forget", "0-3", "--method", "ssd", "--set", "threshold=1e30", "--no-audit", *quiet]) == 0
    assert "warning: no weight was changed, the new weights are the original ones" in capsys.readouterr().err
    assert "warning: no weight was changed" in (here / "out/log.txt").read_text()
