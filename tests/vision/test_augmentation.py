"""Flips and crops of whole batches equal a plain loop over images, and are decided by the seed."""

from __future__ import annotations

import pytest
import torch

from expunge.errors import InputError
from expunge.vision.augmentation import Augmentation, Draws


def one_at_a_time(images, draws, padding):
    results = []
    for image, down, right, mirrored in zip(images, *(column.tolist() for column in draws), strict=True):
        channels, height, width = image.shape
        padded = torch.zeros(channels, height + 2 * padding, width + 2 * padding, dtype=image.dtype)
        padded[:, padding : padding + height, padding : padding + width] = image
        crop = padded[:, down : down + height, right : right + width]
        results.append(crop.flip(2) if mirrored else crop)
    return torch.stack(results)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("augmentation", [Augmentation(), Augmentation(2, flip=False), Augmentation(0)], ids=repr)
def test_a_batch_equals_a_loop(augmentation, dtype):
    images = torch.randint(0, 256, (50, 3, 9, 7), generator=torch.Generator().manual_seed(1)).to(dtype)
    draws = augmentation.draw(50, torch.device("cpu"), torch.Generator().manual_seed(2))
    expected = one_at_a_time(images, draws, augmentation.padding)
    result = augmentation(images, torch.Generator().manual_seed(2))
    assert result.dtype == dtype and result.is_contiguous() and torch.equal(result, expected)
    assert not torch.equal(result, images) or augmentation == Augmentation(0, flip=False)


def test_every_place_is_drawn_equally_and_half_are_mirrored():
    draws = Augmentation(1).draw(90_000, torch.device("cpu"), torch.Generator().manual_seed(0))
    places = torch.bincount(3 * draws.down + draws.right, minlength=9)
    assert len(places) == 9 and (places - 10_000).abs().max() < 500
    assert abs(draws.mirrored.double().mean() - 0.5) < 0.01
    assert not Augmentation(1, flip=False).draw(1000, torch.device("cpu"), torch.Generator().manual_seed(0)).mirrored.any()


def test_nothing_drawn_is_the_identity():
    images = torch.rand(4, 1, 8, 8)
    none = torch.zeros(4, dtype=torch.int64)
    assert torch.equal(Augmentation(3).apply(images, Draws(none + 3, none + 3, none.bool())), images)


def test_the_seed_decides_and_the_global_state_is_left_alone():
    images = torch.rand(20, 1, 8, 8)
    state = torch.random.get_rng_state()
    first, second, other = (Augmentation()(images, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(first, second) and not torch.equal(first, other)
    assert torch.equal(state, torch.random.get_rng_state())


def test_padding_is_checked():
    with pytest.raises(InputError, match="padding: must be at least 0; found -1"):
        Augmentation(-1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_can_be_captured_in_a_graph():
    augmentation, generator = Augmentation(), torch.Generator("cuda").manual_seed(0)
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8, device="cuda")
    draws = augmentation.draw(64, generator.device, generator)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        augmentation.apply(images, draws)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = augmentation.apply(images, draws)
    for _ in range(2):
        for held, drawn in zip(draws, augmentation.draw(64, generator.device, generator), strict=True):
            held.copy_(drawn)
        graph.replay()
        assert torch.equal(result.cpu(), one_at_a_time(images.cpu(), draws, 4))
