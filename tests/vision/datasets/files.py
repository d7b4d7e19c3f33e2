"""Small datasets written byte by byte in the published formats."""

from __future__ import annotations

import gzip
import io
import pickle
import struct
from pathlib import Path

import numpy
from PIL import Image


def old_pickle(value: object) -> bytes:
    """As Python 2's cPickle wrote the CIFAR files, protocol 2: text as SHORT_BINSTRING or BINSTRING, arrays through numpy.core."""
    return b"\x80\x02" + _old(value) + b"."


def _old(value: object) -> bytes:
    if isinstance(value, dict):
        return b"}(" + b"".join(_old(key) + _old(held) for key, held in value.items()) + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_old, value)) + b"e"
    if isinstance(value, int):
        return b"J" + struct.pack("<i", value)
    if isinstance(value, bytes):
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
    assert isinstance(value, numpy.ndarray)
    column_major = not value.flags.c_contiguous
    sizes = b"(" + b"".join(_old(size) for size in value.shape) + b"t"
    kind = (
        b"cnumpy\ndtype\n("
        + _old(b"u1")
        + _old(0)
        + _old(1)
        + b"tR("
        + _old(3)
        + _old(b"|")
        + b"NNN"
        + _old(-1)
        + _old(-1)
        + _old(0)
        + b"tb"
    )
    empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(" + _old(0) + b"t" + _old(b"b") + b"tR"
    raw = value.tobytes(order="F" if column_major else "C")
    return empty + b"(" + _old(1) + sizes + kind + (b"\x88" if column_major else b"\x89") + _old(raw) + b"tb"


def new_pickle(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


def cifar10(root: Path, rows: int = 20, dump=old_pickle) -> dict[str, numpy.ndarray]:
    """Five train files and a test file; the first pixel of an image is its label."""
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    generator = numpy.random.default_rng(0)
    held = {}
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        held[name] = generator.integers(0, 256, (rows, 3072), dtype=numpy.uint8)
        labels = [row % 10 for row in range(rows)]
        held[name][:, 0] = labels
        content = {b"batch_label": b"a batch", b"labels": labels, b"data": held[name], b"filenames": [b"x.png"] * rows}
        (folder / name).write_bytes(dump(content))
    names = [b"name%d" % label for label in range(10)]
    (folder / "batches.meta").write_bytes(dump({b"num_cases_per_batch": rows, b"label_names": names, b"num_vis": 3072}))
    return held


def cifar100(root: Path) -> None:
    """Two images a class; in column-major order, to see that it is heeded."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    labels = [row % 100 for row in range(200)]
    data = numpy.zeros((200, 3072), numpy.uint8)
    data[:, 0], data[:, 1:] = labels, numpy.random.default_rng(0).integers(0, 256, 3071)
    for name in ("train", "test"):
        content = {b"fine_labels": labels, b"coarse_labels": [0] * 200, b"data": numpy.asfortranarray(data)}
        (folder / name).write_bytes(old_pickle(content))
    names = {b"fine_label_names": [b"fine%d" % label for label in range(100)], b"coarse_label_names": [b"coarse"] * 20}
    (folder / "meta").write_bytes(old_pickle(names))


def idx(values: numpy.ndarray) -> bytes:
    return struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape) + values.astype(numpy.uint8).tobytes()


def mnist(folder: Path, packed: bool = False) -> None:
    folder.mkdir(parents=True)
    for part, rows in (("train", 30), ("t10k", 10)):
        labels = numpy.arange(rows) % 10
        images = numpy.random.default_rng(rows).integers(0, 256, (rows, 28, 28))
        images[:, 0, 0] = labels
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            content = idx(values)
            (folder / f"{name}{'.gz' * packed}").write_bytes(gzip.compress(content) if packed else content)


def picture(colour: int | tuple[int, int, int], size: int = 64, form: str = "JPEG") -> bytes:
    """One colour; a single number makes a grey picture of one channel."""
    out = io.BytesIO()
    Image.new("L" if isinstance(colour, int) else "RGB", (size, size), colour).save(out, form)
    return out.getvalue()


def tiny_imagenet(size: int = 64) -> dict[str, bytes]:
    """Files by name: three classes of four pictures to train and two to validate; every class has its own colour, one is grey."""
    colours = {"n03": (200, 10, 10), "n01": (10, 200, 10), "n02": 77}
    held = {"wnids.txt": b"n03\nn01\nn02\n", "words.txt": b"n01\tgoldfish, fish\nn02\tbear\nn09\tnot here\n"}
    lines = []
    for identifier, colour in colours.items():
        held |= {f"train/{identifier}/images/{identifier}_{number}.JPEG": picture(colour, size) for number in range(4)}
        held[f"train/{identifier}/{identifier}_boxes.txt"] = b""
        for _ in range(2):
            name = f"val_{len(lines)}.JPEG"
            held[f"val/images/{name}"] = picture(colour, size)
            lines.append(f"{name}\t{identifier}\t0\t0\t9\t9")
    held["val/val_annotations.txt"] = ("\n".join(lines) + "\n").encode()
    held["test/images/test_0.JPEG"] = picture(0, size)
    return held
