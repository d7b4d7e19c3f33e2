"""What is logged to a real store of MLflow's, read back by its client."""

import json
from dataclasses import replace

import mlflow
import pytest
import torch

import expunge
from expunge.errors import InputError
from expunge.integrations.mlflow import LogEpochs, check_run, log_audit, log_outcome, log_request
from expunge.report.request_audit import auditing
from expunge.requests.request import fulfil
from expunge.requests.settings import Settings
from tests.requests.small import MASK, TASK, request, write_task

LARGER = TASK.replace("points(120, 1)", "points(400, 1)").replace("points(40, 2)", "points(200, 2)")


@pytest.fixture(autouse=True)
def client(tmp_path, monkeypatch):
    """A store in files: the one that mlflow-skinny has without a database."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    return mlflow.MlflowClient()


def artifacts(client, run, place):
    return {part.path.removeprefix(f"{place}/") for part in client.list_artifacts(run, place)}


@pytest.mark.slow
def test_a_request_with_its_audit_is_logged(client, tmp_path):
    write_task(tmp_path, LARGER)
    receipt = fulfil(request(tmp_path, "label=2"), examine=auditing())
    run = log_request(tmp_path / "out")
    data = client.get_run(run).data
    assert client.get_run(run).info.status == "FINISHED" and mlflow.active_run() is None
    assert data.params["request_1.asked"] == "fisher-mask ratio=0.1 tuning=None" and data.params["request_1.forget"] == "100"
    assert data.params["request_1.method"].startswith("FisherMask(") and data.params["request_1.samples"] == "400"
    before, after = (part["accuracies"] for part in receipt.measured["accuracies"])
    for name in ("forget", "test"):
        assert data.metrics[f"request.{name}_accuracy_before"] == before[name]
        assert data.metrics[f"request.{name}_accuracy_after"] == after[name]
    measures = {part["name"]: part for part in json.loads((tmp_path / "out" / "audit.json").read_bytes())["measures"]}
    assert data.metrics["audit.loss_attack_on_forget.after"] == measures["loss attack on forget"]["after"]["value"]
    assert data.metrics["audit.forget_accuracy_unseen.before"] == measures["forget accuracy (unseen)"]["before"]["value"]
    assert sum(name.startswith("audit.") and name.endswith(".after") for name in data.metrics) == sum(
        part["after"] is not None for part in measures.values()
    )
    assert data.tags["expunge.verdict"] == receipt.measured["audit"]["verdict"]["word"]
    assert data.tags["expunge.weights_after"] == receipt.weights_after
    everything = {path.name for path in (tmp_path / "out").iterdir()}
    assert artifacts(client, run, "request-1") == everything - {"openings.json"} and "openings.json" in everything


def test_requests_go_to_the_run_that_is_given_or_active_and_add_up(client, tmp_path):
    with mlflow.start_run() as run:
        mlflow.log_param("method", "of the training, which must not be in the way")
        fulfil(request(tmp_path, "0-9"))
        assert log_request(tmp_path / "out", leave_out=("patch.safetensors",)) == run.info.run_id
        assert mlflow.active_run().info.run_id == run.info.run_id
    fulfil(request(tmp_path, "20-24"))
    assert log_request(tmp_path / "out", run.info.run_id) == run.info.run_id
    assert log_request(tmp_path / "out", run.info.run_id) == run.info.run_id  # again, after a failure
    data = client.get_run(run.info.run_id).data
    assert (data.params["request_1.forgotten"], data.params["request_2.forgotten"]) == ("10", "15")
    assert {point.step: point.value for point in client.get_metric_history(run.info.run_id, "request.forgotten")} == {1: 10, 2: 15}
    assert data.tags["expunge.request"] == "2" and data.tags["expunge.verdict"] == "no audit"
    assert "patch.safetensors" not in artifacts(client, run.info.run_id, "request-1")
    assert {"patch.safetensors", "receipt-1.json"} <= artifacts(client, run.info.run_id, "request-2")


def test_a_folder_that_was_changed_is_not_logged(client, tmp_path):
    fulfil(request(tmp_path))
    (tmp_path / "out" / "log.txt").write_text("all is well")
    with pytest.raises(InputError, match="folder: must be as `expunge unlearn` left it; found log.txt: was changed"):
        log_request(tmp_path / "out")
    with pytest.raises(InputError, match="folder: must be as `expunge unlearn` left it; found no receipt.json"):
        log_request(tmp_path)
    assert client.search_runs(["0"]) == []


@pytest.mark.parametrize("leave_out", ["patch.safetensors", ("patch.safetensor",)])
def test_a_file_to_leave_out_that_is_none_is_refused(leave_out, client, tmp_path):
    """A comma that is missing, or a slip: the patch, which leads back to the original weights, would be logged."""
    fulfil(request(tmp_path))
    with pytest.raises(InputError, match="leave_out: must be names of files of the folder"):
        log_request(tmp_path / "out", leave_out=leave_out)
    assert client.search_runs(["0"]) == []
    log_request(tmp_path / "out", leave_out=("patch.safetensors", "edit.safetensors"))


def test_a_run_is_looked_up_before_the_work(client, tmp_path, monkeypatch):
    with mlflow.start_run() as run:
        pass
    client.delete_run(run.info.run_id)
    with pytest.raises(InputError, match=f"mlflow: must be a run that can be written; found {run.info.run_id}, which is deleted"):
        check_run(run.info.run_id)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'new'}")
    check_run(None)
    assert not (tmp_path / "new").exists()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(InputError, match="mlflow: must take what is logged; found .*127.0.0.1"):
        check_run(None)


def test_a_run_that_is_not_there_is_one_line(tmp_path):
    fulfil(request(tmp_path))
    with pytest.raises(InputError, match="mlflow: must take what is logged; found .*nowhere") as caught:
        log_request(tmp_path / "out", "nowhere")
    assert "\n" not in str(caught.value)


def test_an_outcome_is_logged_epoch_by_epoch(client, tmp_path):
    generator = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(60, 6, generator=generator), torch.arange(60) % 4)
    model = torch.nn.Linear(6, 4)
    forget, remain = (torch.utils.data.Subset(data, rows) for rows in (range(10), range(10, 60)))
    tuning = expunge.Tuning(expunge.Constant(0.05, epochs=2), batch_size=16)
    outcome = expunge.unlearn(model, forget, remain, expunge.Finetune(tuning), watch={"the rest": remain})
    run = log_outcome(outcome)
    history = client.get_metric_history(run, "the_rest_accuracy")
    assert [(point.step, point.value) for point in history] == [(part.epoch, part.accuracies["the rest"]) for part in outcome.epochs]
    found = client.get_run(run).data
    assert found.metrics["the_rest_accuracy_before"] == outcome.history[0].accuracies["the rest"]
    assert found.params["unlearning.method"].startswith("Finetune(") and "expunge.goal" not in found.tags
    choice = expunge.Choice("m", "label", (), False, ("accuracy",), ())
    assert client.get_run(log_outcome(replace(outcome, choice=choice))).data.tags["expunge.goal"] == "GOAL NOT MET: accuracy"


def test_a_training_is_logged_after_every_epoch(client):
    data = torch.utils.data.TensorDataset(torch.randn(32, 6, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4)
    model, norms = torch.nn.Linear(6, 4), []

    def measure():
        norms.append(float(model.weight.detach().norm()))
        return {"norm of (W)": norms[-1]}

    after_epoch = LogEpochs(measure)
    expunge.train(model, data, expunge.Tuning(expunge.Constant(0.05, epochs=3), batch_size=16), after_epoch=after_epoch)
    history = client.get_metric_history(after_epoch.run_id, "norm_of_W")
    assert [(point.step, point.value) for point in history] == [*enumerate(norms, start=1)] and len(client.search_runs(["0"])) == 1


def test_an_audit_is_logged_with_its_folder(client, tmp_path, monkeypatch):
    from expunge.audit.report import load_audit
    from expunge.cli import commands

    write_task(tmp_path, LARGER)
    fulfil(request(tmp_path, "label=2", settings=replace(MASK, given=("ratio=0.3", "tuning=None"))))
    monkeypatch.chdir(tmp_path)
    asked = ["--task", "mytask.py", "--before", "model.safetensors", "--after", "out/weights.safetensors", "--forget", "label=2"]
    assert commands.main(["audit", *asked, "--no-relearn", "--quiet", "--out", "audit"]) == 0
    audit = load_audit("audit")
    for given in (audit, "audit"):
        run = log_audit(given)
        data = client.get_run(run).data
        assert data.tags["expunge.verdict"] == audit.verdict.word and data.params["audit.forget_samples"] == "100"
        assert data.metrics["audit.loss_attack_on_forget.after"] == audit["loss attack on forget"].after.value
    assert artifacts(client, run, "audit") == {"audit.html", "model-card.md", "result.json"}


def test_without_mlflow_it_says_what_to_install(tmp_path, monkeypatch):
    import sys

    fulfil(request(tmp_path, settings=Settings("fisher-mask", ("tuning=None",), threads=1)))
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(InputError, match=r"mlflow: needs the package mlflow: pip install 'expunge\[mlflow\]'"):
        log_request(tmp_path / "out")


def test_the_command_logs_to_a_run_that_it_checks_before(client, tmp_path, monkeypatch, capsys):
    from expunge.cli import commands

    request(tmp_path)
    monkeypatch.chdir(tmp_path)
    asked = [
        "unlearn",
        "--task",
        "mytask.py",
        "--weights",
        "model.safetensors",
        "--forget",
        "0-3",
        "--out",
        "out",
        "--method",
        "fisher-mask",
    ]
    assert commands.main([*asked, "--set", "tuning=None", "--mlflow", "nowhere"]) == 2
    told = capsys.readouterr().err
    assert (
        told.startswith("expunge: mlflow: must take what is logged; found ") and told.count("\n") == 1 and not (tmp_path / "out").exists()
    )
    assert commands.main([*asked, "--set", "tuning=None", "--mlflow", "new", "--quiet"]) == 0
    run = capsys.readouterr().out.splitlines()[-1].removeprefix("MLflow: run ")
    assert client.get_run(run).data.params["request_1.forget"] == "4"
