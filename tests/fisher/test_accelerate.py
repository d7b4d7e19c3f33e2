"""Models that accelerate has prepared for several processes: the sums, measures and trainings of the plain model."""

from __future__ import annotations

import pytest
import torch

from expunge import fisher, metrics
from tests import processes
from tests.fisher import sharing
from tests.training import sharing as trainings

SCRIPT = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from expunge import fisher, metrics
from expunge.errors import InputError
from expunge.training import shared, train
from tests.fisher import sharing
from tests.training import sharing as trainings

accelerator = Accelerator(cpu=True)
model, data = sharing.case()
prepared, loader = accelerator.prepare(model, DataLoader(data, batch_size=16))
assert type(prepared).__name__ == "DistributedDataParallel"
fisher.by_chunks(prepared, data, **sharing.CUT).save(f"sums-{accelerator.process_index}.safetensors")
print(metrics.by_chunks(prepared, data, **sharing.CUT))
try:
    fisher.by_chunks(prepared, loader)
except InputError as error:
    print(error)
model, data = trainings.case(trainings.plain)
with shared():
    train(accelerator.prepare(model), data, trainings.tuning())
torch.save(trainings.weights(model), f"weights-{accelerator.process_index}.pt")
"""


@pytest.mark.slow
def test_prepared_models_are_taken_and_prepared_loaders_refused(tmp_path):
    pytest.importorskip("accelerate")
    outputs = processes.printed(processes.start(SCRIPT, tmp_path, 2))
    model, data = sharing.case()
    alone, measured = fisher.by_chunks(model, data, **sharing.CUT), metrics.by_chunks(model, data, **sharing.CUT)
    expected = trainings.weights(trainings.sgd())
    for rank, output in enumerate(outputs):
        sums = fisher.FisherSums.load(tmp_path / f"sums-{rank}.safetensors")
        assert sums.digest == alone.digest and all(torch.equal(sums.sums[name], total) for name, total in alone.sums.items())
        assert str(measured) in output and "data: a loader must read its dataset in order" in output
        weights = torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True)
        assert all(torch.allclose(weights[name], value, rtol=1e-11, atol=1e-13) for name, value in expected.items())
