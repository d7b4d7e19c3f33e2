"""Recipes: an optimizer read off and built again does the same steps, and a file that was forged is refused."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from expunge.errors import InputError
from expunge.requests.recipes import RECIPE, Recipe, read_optimizer, recorded_recipe
from expunge.requests.settings import Settings, build_method
from expunge.storage.codec import encode
from expunge.training.optimizers import build_optimizer


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model[1].bias.requires_grad_(False)
    return model


def grouped(model):
    """Two groups, as the Trainer has them, and a parameter that is in neither."""
    first, second = [model[0].weight], [model[0].bias]
    return [{"params": first, "weight_decay": 0.1}, {"params": second, "weight_decay": 0.0}]


OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(grouped(model), lr=0.01, betas=(0.8, 0.95), amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(grouped(model), lr=0.01, momentum=0.7, nesterov=True),
    "RMSprop": lambda model: torch.optim.RMSprop(grouped(model), lr=0.01, centered=True),
}


def written(folder, recipe):
    (folder / RECIPE).write_text(json.dumps(encode(recipe)))
    return folder


def stepped(model, optimizer, clip=None):
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(5):
        optimizer.zero_grad()
        model(inputs).square().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_built_again_as_it_was(name, clip, tmp_path):
    ours, theirs = network(), network()
    optimizer = OPTIMIZERS[name](theirs)
    recipe = Recipe(*read_optimizer(optimizer, theirs), (0.01,), epochs=3, batch_size=7, seed=5, clip=clip)
    assert recipe.optimizer == name and recipe.groups == (0, 1, -1)
    tuning = recorded_recipe(written(tmp_path, recipe))
    assert (tuning.batch_size, tuning.seed, tuning.schedule.epochs, tuning.schedule.rate(2)) == (7, 5, 3, 0.01)
    theirs[1].weight.requires_grad_(False)  # in no group: neither trains it, and only then the norms of both are of the same gradients
    built = build_optimizer([parameter for parameter in ours.parameters() if parameter.requires_grad], tuning)
    assert all(torch.equal(*pair) for pair in zip(stepped(ours, built), stepped(theirs, optimizer, clip), strict=True))


def test_where_other_parameters_are_trained_the_first_group_is_for_all(tmp_path):
    model = network()
    recipe = Recipe(*read_optimizer(OPTIMIZERS["AdamW"](model), model), (0.01,), epochs=3, batch_size=7)
    built = recorded_recipe(written(tmp_path, recipe)).optimizer([model[0].weight, model[0].bias])
    assert [(len(group["params"]), group["weight_decay"]) for group in built.param_groups] == [(2, 0.1)]


def test_plain_gradient_descent_has_no_builder_so_that_choose_takes_its_rate(tmp_path):
    model = nn.Linear(3, 2)
    recipe = Recipe(*read_optimizer(torch.optim.SGD(model.parameters(), 0.3, 0.8, weight_decay=1e-3), model), (0.3, 0.1), 2, 16)
    tuning = recorded_recipe(written(tmp_path, recipe))
    assert tuning.optimizer is None and (tuning.momentum, tuning.weight_decay) == (0.8, 1e-3)
    assert build_method(Settings(), tuning).rate == 0.3
    assert recorded_recipe(written(tmp_path, replace(recipe, clip=1.0))).optimizer is not None


GOOD = Recipe("AdamW", ({"weight_decay": 0.1},), (0, 0), (0.1, 0.0), 2, 16)


@pytest.mark.parametrize(
    "change, told",
    [
        ({"optimizer": "Optimizer"}, "optimizer: must be one of torch.optim"),
        ({"optimizer": "os.system"}, "optimizer: must be one of torch.optim"),
        ({"optimizer": "lr_scheduler"}, "optimizer: must be one of torch.optim"),
        ({"rates": ()}, "rates: must be a tuple"),
        ({"rates": (-1.0,)}, "folder: must hold a recipe.json as it was written"),
        ({"groups": (0, 3)}, "folder: must hold a recipe.json as it was written"),
        ({"settings": ()}, "folder: must hold a recipe.json as it was written"),
        ({"epochs": 0}, "epochs: must be"),
        ({"kind": "expunge receipt 1"}, "folder: must hold a recipe.json as it was written"),
    ],
)
def test_a_forged_recipe_is_refused(change, told, tmp_path):
    with pytest.raises(InputError, match=told):
        recorded_recipe(written(tmp_path, replace(GOOD, **change)))


def test_a_folder_without_a_recipe_is_refused(tmp_path):
    with pytest.raises(InputError, match="folder: must be one that KeepForRequests wrote, with a recipe.json"):
        recorded_recipe(tmp_path)
    (tmp_path / RECIPE).write_text("{")
    with pytest.raises(InputError, match="folder: must hold a recipe.json as it was written"):
        recorded_recipe(tmp_path / RECIPE)
