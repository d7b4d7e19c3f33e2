"""Decode picture files to bytes of one shape by Pillow: only the formats below, and within bounds."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy
import torch
from torch import Tensor

from expunge.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".jpeg", ".jpg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "WEBP", "TIFF", "PPM")  # whatever a file is called; others may start other programs
LARGEST = 2**27  # bytes of a file
PIXELS = 2**26  # of a picture: what large cameras make
LARGE = 2**22  # pictures of more pixels are decoded one at a time
THREADS = 8  # decoding runs outside Python's lock
WIDE = "I;16"  # Pillow's modes of 16 bits begin so; it would cut off what is brighter than 255 of 65,535


def is_picture(name: str) -> bool:
    """By a file's name; hidden ones are none, such as the `._x.png` that macOS leaves beside `x.png`."""
    return not name.startswith(".") and name.lower().endswith(SUFFIXES)


def decoded(names: Sequence[str], content: Callable[[str], bytes], size: int | None = None, max_pixels: int = PIXELS) -> Tensor:
    """The pictures (N, 3, H, W) as uint8; grey ones get three equal channels. `size` resizes all to a square, bilinearly; without it
    they must be of one size. `content` gives the bytes of a file by its name; none may have more than `max_pixels` pixels."""
    # Large ones in one thread, one after the other: threads keep the memory they had.
    with ThreadPoolExecutor(THREADS) as pool, ThreadPoolExecutor(1) as large:

        def read(name: str) -> Tensor:
            return _pixels(name, content(name), size, max_pixels, large)

        first = read(names[0])
        pixels = _room(len(names), first)

        def place(row: int) -> None:
            picture = read(names[row])
            if picture.shape != first.shape:
                rule = f"pictures must be of one size, the first being {_extent(first)}; give size= (`expunge train --size`) to resize them"
                raise InputError("data", f"{names[row]}: {rule}", _extent(picture))
            pixels[row] = picture

        try:
            list(pool.map(place, range(len(names))))
        except BaseException:
            pool.shutdown(cancel_futures=True)  # the first broken picture raises at once, not after the last
            raise
    return pixels


def _room(count: int, picture: Tensor) -> Tensor:
    try:
        return picture.new_empty(count, *picture.shape)
    except RuntimeError as error:
        rule = f"{count} pictures of {_extent(picture)} must fit into memory; give size= (`expunge train --size`) to make them smaller"
        raise InputError("data", rule, f"{count * picture.numel()} bytes") from error


def _pixels(name: str, content: bytes, size: int | None, limit: int, large: Executor) -> Tensor:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError as error:
        raise InputError("data", "pictures need Pillow: pip install pillow") from error
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as file:
            width, height = file.size
            if width * height <= limit:
                return _resized(file, size) if width * height <= LARGE else large.submit(_resized, file, size).result()
    except Exception as error:  # of a broken picture Pillow may say anything, of other files an address in memory
        reason = "none of these" if isinstance(error, UnidentifiedImageError) else error
        raise InputError("data", f"{name}: must be a whole picture file ({', '.join(FORMATS)})", reason) from error
    raise InputError("data", f"{name}: a picture must have at most {limit} pixels", f"{width}×{height}")


def _resized(file: Image, size: int | None) -> Tensor:
    from PIL.Image import Resampling

    picture = _colours(file)
    if size is not None and picture.size != (size, size):
        picture = picture.resize((size, size), Resampling.BILINEAR)
    flat = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return flat.view(picture.height, picture.width, 3).permute(2, 0, 1)


def _colours(file: Image) -> Image:
    """Red, green and blue of eight bits, of an animation those of its first picture. What is transparent gets its colour."""
    from PIL import Image

    if file.mode.startswith(WIDE):
        return Image.frombytes("L", file.size, _high_bytes(file)).convert("RGB")
    if file.mode in ("I", "F"):
        raise ValueError(f"its values are of 32 bits, and it is not known from where to where they go (mode {file.mode})")
    if file.mode == "P" and "transparency" in file.info:
        return file.convert("RGBA").convert("RGB")
    if file.mode == "RGB":
        file.load()
        return file  # not a copy
    return file.convert("RGB")


def _high_bytes(file: Image) -> bytes:
    """Of every value of 16 bits the upper eight, as Pillow takes those of coloured pictures."""
    order = ">" if file.mode.endswith("B") else "<"
    return (numpy.frombuffer(file.tobytes(), f"{order}u2") >> 8).astype(numpy.uint8).tobytes()


def _extent(picture: Tensor) -> str:
    return f"{picture.shape[2]}×{picture.shape[1]}"
