"""The group of the processes that torchrun started: what does not fit, or does not come, is one line, and soon."""

import socket
import threading
import time

import pytest
import torch
import torch.distributed as distributed
from torch.utils.data import TensorDataset

from expunge import fisher
from expunge.errors import InputError
from expunge.runtime import processes


@pytest.fixture
def started(monkeypatch):
    """As torchrun sets the environment of a process."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        port = place.getsockname()[1]
    processes._warn_of_others.cache_clear()

    def start(rank, size):
        for name, value in {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, str(value))

    return start


def test_without_torchrun_there_is_no_group(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with processes.of_torchrun():
        assert not distributed.is_initialized() and processes.world_size() == 1


def test_the_group_is_left_at_the_end(started):
    started(0, 1)
    with processes.of_torchrun(), processes.of_torchrun():  # the inner one changes nothing
        assert distributed.is_initialized() and (processes.rank(), processes.world_size()) == (0, 1)
    assert not distributed.is_initialized()


def test_processes_that_form_no_group_are_warned_once(started):
    data = TensorDataset(torch.randn(6, 4), torch.tensor([0, 1, 2] * 2))
    calls = [lambda: fisher.by_chunks(torch.nn.Linear(4, 3), data), lambda: fisher.diagonal(torch.nn.Linear(4, 3), data).all_reduce()]
    for number, call in enumerate(calls, start=2):
        started(0, number)
        with pytest.warns(UserWarning, match=f"torchrun started {number} processes, but they form no process group") as caught:
            assert call().count == call().count == 6
        assert [warning.filename for warning in caught] == [__file__]


def test_one_process_of_torchrun_and_a_folder_that_all_see_need_no_group(started, tmp_path):
    data = TensorDataset(torch.randn(6, 4), torch.tensor([0, 1, 2] * 2))
    started(0, 1)
    fisher.by_chunks(torch.nn.Linear(4, 3), data)
    started(0, 4)
    fisher.by_chunks(torch.nn.Linear(4, 3), data, keep=tmp_path / "pass")


@pytest.mark.parametrize("rank, size", [(2, 2), ("a", 2), (0, "x"), (-1, 2)])
def test_a_world_size_that_does_not_fit_is_told(rank, size, started):
    started(rank, size)
    with pytest.raises(InputError, match=f"RANK: must be a whole number below WORLD_SIZE, as torchrun sets them; found {rank} of {size}"):
        with processes.of_torchrun():
            pass


@pytest.mark.slow
def test_a_process_that_does_not_come_is_told(started):
    started(0, 2)
    began = time.monotonic()
    with pytest.raises(processes.MissingProcessError, match="the 2 processes of torchrun did not meet within 2 seconds"):
        with processes.of_torchrun(patience=2):
            pass
    assert time.monotonic() - began < 30 and not distributed.is_initialized()


class Stopped:
    """A store that is served by a process that is stopped: torch waits for its answer without a limit."""

    def __init__(self):
        self.goes_on = threading.Event()

    def add(self, *arguments):
        self.goes_on.wait(60)

    check = get = set = add


@pytest.mark.parametrize(
    "error, told",
    [
        (RuntimeError("Application timeout caused pair closure"), "another process does not answer"),
        (distributed.DistNetworkError("Failed to recv, got 0 bytes. Connection was likely closed."), "another process has ended"),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "another process has ended"),
    ],
)
def test_what_torch_raises_without_another_process_is_told(error, told):
    with pytest.raises(processes.MissingProcessError, match=told), processes.named_failures():
        raise error


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="^shapes differ$") as raised, processes.named_failures():
        raise RuntimeError("shapes differ")
    assert type(raised.value) is RuntimeError


def test_a_store_that_never_answers_is_told_in_time(monkeypatch):
    store = Stopped()
    monkeypatch.setattr(processes, "_store", lambda: store)
    monkeypatch.setattr(processes, "world_size", lambda: 2)
    began = time.monotonic()
    with pytest.raises(processes.MissingProcessError, match="did not answer within 0.2 seconds: rank 0, which serves it, is stopped"):
        processes.agree(dict, 0.2)
    monkeypatch.setattr(processes, "LINGER", 0.2)
    with pytest.raises(processes.MissingProcessError, match="another process does not answer in step 3"):
        with processes.named_failures(" in step 3", "place"):
            raise RuntimeError("gloo: Timed out waiting")
    assert time.monotonic() - began < 30
    store.goes_on.set()
