"""Picture files as bytes of one shape, decoded by Pillow."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from expunge.errors import InputError

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
THREADS = 8  # decoding runs outside Python's lock


def decoded(names: Sequence[str], content: Callable[[str], bytes], size: int | None = None) -> Tensor:
    """The pictures (N, 3, H, W) as uint8; grey ones get three equal channels. `size` resizes all to a square, bilinearly; without it
    they must be of one size. `content` gives the bytes of a file by its name."""
    with ThreadPoolExecutor(THREADS) as pool:
        first = _pixels(names[0], content, size)
        pixels = first.new_empty(len(names), *first.shape)

        def place(row: int) -> None:
            picture = _pixels(names[row], content, size)
            if picture.shape != first.shape:
                rule = f"pictures must be of one size, the first being {_extent(first)}; give size= to resize them"
                raise InputError("data", f"{names[row]}: {rule}", _extent(picture))
            pixels[row] = picture

        try:
            list(pool.map(place, range(len(names))))
        except InputError:
            pool.shutdown(cancel_futures=True)  # the first broken picture is told at once, not after the last
            raise
    return pixels


def _pixels(name: str, content: Callable[[str], bytes], size: int | None) -> Tensor:
    try:
        from PIL import Image
    except ImportError as error:
        raise InputError("data", "pictures need Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(content(name))) as file:
            picture = file.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InputError("data", f"{name}: must be a whole picture file", error) from error
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Image.Resampling.BILINEAR)
    width, height = picture.size
    return torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1)


def _extent(picture: Tensor) -> str:
    return f"{picture.shape[2]}×{picture.shape[1]}"
