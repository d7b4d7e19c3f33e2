"""Models that accelerate has prepared for several processes: the sums, measures, trainings and patches of the plain model."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import expunge
from expunge import fisher, masks, metrics, scores
from expunge.editing.patches import Patch
from expunge.methods import FisherMask
from tests import processes, reference
from tests.fisher import sharing
from tests.fisher.test_sharded import case as sharded_case
from tests.training import sharing as trainings

SCRIPT = """
import os
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # with fewer GPUs than processes FSDP2 would ask for one that is not there
import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from torch.utils.data import DataLoader, TensorDataset
import expunge
from expunge import fisher, masks, metrics, scores
from expunge.editing.sharded_patches import ShardedPatch
from expunge.errors import InputError, ModelError
from expunge.methods import FisherMask
from expunge.storage.sharded import whole
from expunge.training import shared, train
from tests.fisher import sharing
from tests.fisher.test_sharded import case
from tests.training import sharing as trainings

accelerator = Accelerator(cpu=True)
model, data = sharing.case()
prepared, loader = accelerator.prepare(model, DataLoader(data, batch_size=16))
assert type(prepared).__name__ == "DistributedDataParallel"
fisher.by_chunks(prepared, data, **sharing.CUT).save(f"sums-{accelerator.process_index}.safetensors")
print(metrics.by_chunks(prepared, data, **sharing.CUT))
compiled = torch.compile(prepared, backend="eager")  # of which rank 0 waited for rank 1 without an end
print(fisher.by_chunks(compiled, data, **sharing.CUT).digest == fisher.by_chunks(model, data, **sharing.CUT).digest)
try:
    fisher.by_chunks(torch.nn.Sequential(prepared), data, **sharing.CUT)
except ModelError as error:
    print(error)
try:
    fisher.by_chunks(prepared, loader)
except InputError as error:
    print(error)
model, data = trainings.case(trainings.plain)
with shared():
    train(accelerator.prepare(model), data, trainings.tuning())
torch.save(trainings.weights(model), f"weights-{accelerator.process_index}.pt")

# Unlearning takes the module inside, returns one, and its patch fits the prepared model.
forget, remain = (TensorDataset(*(column[rows] for column in data.tensors)) for rows in (slice(0, 10), slice(10, None)))
before = trainings.weights(model)
prepared = accelerator.prepare(model)
outcome = expunge.unlearn(prepared, forget, remain, FisherMask(ratio=0.05, tuning=None))
assert type(outcome.model) is type(accelerator.unwrap_model(prepared)) and outcome.model.state_dict().keys() == before.keys()
torch.save(trainings.weights(outcome.model), f"unlearned-{accelerator.process_index}.pt")
outcome.patch.apply(prepared)
assert all(torch.equal(value, outcome.model.state_dict()[name]) for name, value in model.state_dict().items())
outcome.patch.revert(prepared)
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

# Its FSDP2 plugin is not used on a CPU: the model is in DistributedDataParallel. What it does on a GPU is done here by saying so.
AcceleratorState._reset_state(reset_partial_state=True)
settings = {"auto_wrap_policy": "size_based_wrap", "min_num_params": 30, "cpu_ram_efficient_loading": False}
plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **settings)
accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
model, forget, remain = case()
print(type(accelerator.prepare(model)).__name__, accelerator.is_fsdp2)
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
print(type(model).__name__)
sums = fisher.sharded_diagonal(model, remain)
mask = masks.select(scores.fisher_difference(fisher.sharded_diagonal(model, forget), sums), 0.1)
patch = ShardedPatch.zeroing(model, mask)
patch.apply(model)
found = {name: whole(value).clone() for name, value in model.named_parameters()}
patch.revert(model)
reverted = {name: whole(value).clone() for name, value in model.named_parameters()}
sums_of_all = {name: whole(value) for name, value in sums.sums.items()}
torch.save({"sums": sums_of_all, "digest": sums.digest, "after": found, "reverted": reverted}, f"sharded-{accelerator.process_index}.pt")
for function in (lambda: fisher.by_chunks(model, remain), lambda: fisher.diagonal(model, remain), lambda: metrics.by_chunks(model, remain),
                 lambda: expunge.unlearn(model, forget, remain)):
    try:
        function()
    except ModelError as error:
        print(error)
"""


@pytest.mark.slow
def test_prepared_models_are_taken_and_prepared_loaders_refused(tmp_path):
    pytest.importorskip("accelerate")
    outputs = processes.printed(processes.start(SCRIPT, tmp_path, 2))
    model, data = sharing.case()
    alone, measured = fisher.by_chunks(model, data, **sharing.CUT), metrics.by_chunks(model, data, **sharing.CUT)
    trained = trainings.sgd()
    expected = trainings.weights(trained)
    plain, forget, remain = sharded_case()
    whole = fisher.diagonal(plain, remain)
    patch = Patch.zeroing(plain, masks.select(scores.fisher_difference(fisher.diagonal(plain, forget), whole), 0.1))
    edited, *_ = sharded_case()
    patch.apply(edited)
    for rank, output in enumerate(outputs):
        sums = fisher.FisherSums.load(tmp_path / f"sums-{rank}.safetensors")
        assert sums.digest == alone.digest and all(torch.equal(sums.sums[name], total) for name, total in alone.sums.items())
        assert "True\nmodel: must not hold a DistributedDataParallel, whose passes wait for other processes, and 0 is one" in output
        assert str(measured) in output and "data: a loader must read its dataset in order" in output
        weights = torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True)
        assert all(torch.allclose(weights[name], value, rtol=1e-11, atol=1e-13) for name, value in expected.items())
        trained.load_state_dict(weights)  # the same bits, for the same mask
        parts = (
            TensorDataset(*(column[rows] for column in trainings.case(trainings.plain)[1].tensors)) for rows in (slice(10), slice(10, 50))
        )
        unlearned = expunge.unlearn(trained, *parts, FisherMask(ratio=0.05, tuning=None)).model.state_dict()
        found = torch.load(tmp_path / f"unlearned-{rank}.pt", weights_only=True)
        assert all(torch.equal(found[name], value) for name, value in unlearned.items())
        assert "DistributedDataParallel False" in output and "FSDPSequential" in output
        assert output.count("must not be sharded") == 4 and output.count("use fisher.sharded_diagonal") == 3
        found = torch.load(tmp_path / f"sharded-{rank}.pt", weights_only=True)
        assert reference.worst_error(found["sums"], whole.sums) <= 1e-12 and found["digest"] == whole.digest
        assert all(torch.equal(found["after"][name], value) for name, value in edited.named_parameters())
        assert all(torch.equal(found["reverted"][name], value) for name, value in plain.named_parameters())
