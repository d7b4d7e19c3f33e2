"""Dataset files made to do harm: nothing is run, nothing grows beyond what the files can hold, nothing waits for ever."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import os
import pickle
import socket
import stat
import struct
import sys
import zipfile

import numpy
import pytest
import torch
from PIL import Image

from expunge.errors import InputError
from expunge.vision.datasets import cifar, idx, load, pickles, tiny_imagenet
from tests.memory import MIB, within
from tests.vision.datasets import files

# --- pickles


def refused(content: bytes) -> None:
    with pytest.raises(pickle.UnpicklingError):
        pickles.read(content)


GREEDY = {
    "a memo of four gigabytes": b"\x80\x02}r\xff\xff\xff\x1f.",
    "a string of four gigabytes": b"\x80\x02X\xff\xff\xff\xff.",
    "bytes of 2^63": b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.",
    "text of 2^63": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f.",
    "a frame of 2^63": b"\x80\x04\x95" + b"\xff" * 8 + b"}.",
    "a long of a gigabyte": b"\x80\x02\x8b\x00\x00\x00\x40.",
    "a length below zero": b"\x80\x02T\xff\xff\xff\xff.",
    "a bytearray of a gigabyte": b"\x80\x05\x96" + struct.pack("<Q", 2**30) + b".",
    "lists without end": b"\x80\x02" + b"]" * 3_000_000 + b".",
    "marks without end": b"\x80\x02" + b"(" * 3_000_000 + b".",
    "one text made bytes again and again": (
        b"\x80\x02X" + struct.pack("<I", 2**20) + b"a" * 2**20 + b"q\x000c_codecs\nencode\nq\x010" + b"h\x01h\x00U\x06latin1\x86R" * 2_000
    ),
    "tuples that double": b"\x80\x02)" + b"q\x00h\x00\x86" * 60 + b"X\x01\x00\x00\x00a\x93.",
    "a type named by tuples that double": b"\x80\x02cnumpy\ndtype\n)" + b"q\x00h\x00\x86" * 60 + b"\x85R.",
}


@pytest.mark.parametrize("name", GREEDY)
def test_a_pickle_takes_no_more_than_it_holds(name):
    assert within(300 * MIB, lambda: refused(GREEDY[name]))


def state(shape: bytes, content: bytes = b"U\x04abcd") -> bytes:
    made = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01" + shape
    return b"\x80\x02}U\x04data" + made + b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR\x89" + content + b"tbs."


ARRAYS = {
    "too large": b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ft",
    "too small": b"(K\x01t",
    "below zero": b"(J\xff\xff\xff\xffJ\xfc\xff\xff\xfft",
    "no sizes": b"(N t".replace(b" ", b""),
    "sizes of text": b"(U\x014t",
    "a bool": b"(\x88K\x04t",
    "of too many dimensions": b"(" + b"K\x01" * 40 + b"K\x04t",
    "not a tuple": b"](K\x04e",
}


@pytest.mark.parametrize("name", ARRAYS)
def test_an_array_has_as_many_bytes_as_its_shape_says(name):
    assert pickles.read(state(b"(K\x02K\x02t"))["data"].tolist() == [[97, 98], [99, 100]]
    refused(state(ARRAYS[name]))


UNNEEDED = {
    "instances": b"\x80\x02(inumpy\nndarray\n.",
    "objects": b"\x80\x02(cnumpy\nndarray\no.",
    "new objects": b"\x80\x02cnumpy\nndarray\n)\x81.",
    "duplicates": b"\x80\x02}2.",
    "text of numbers": b"\x80\x02I1\n.",
    "lists from marks": b"\x80\x02(l.",
    "protocol 0": b"(dp0\n.",
    "protocol 9": b"\x80\x09}.",
    "a state for a dict": b"\x80\x02}}b.",
    "a list as a key": b"\x80\x02}]K\x01s.",
    "tuples within tuples as a key": b"\x80\x02})" + b"\x85" * 500_000 + b"K\x01s.",  # whose hash is beyond the stack
    "lists within lists": b"\x80\x02" + b"](" * 300_000 + b"e" * 300_000 + b".",
    "an odd number of entries": b"\x80\x02}(K\x01u.",
    "pop from nothing": b"\x80\x02\x85.",
    "below a mark": b"\x80\x02}(s.",
    "two values": b"\x80\x02}}.",
    "nothing": b"\x80\x02.",
    "a memo that is not there": b"\x80\x02h\x01.",
    "a long line": b"\x80\x02c" + b"a" * 1000,
    "an end in a number": b"\x80\x02J\x00",
}


@pytest.mark.parametrize("name", UNNEEDED)
def test_instructions_that_no_dataset_needs_are_refused(name):
    refused(UNNEEDED[name])


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_what_python_writes_is_read(protocol):
    data = numpy.arange(24, dtype=numpy.uint8).reshape(2, 12)
    value = {
        "data": data,
        b"other": numpy.asfortranarray(data),
        "labels": [0, -1, 300, 70_000, -(2**31), 2**40],
        b"text": "ü",
        b"none": None,
    }
    found = pickles.read(pickle.dumps(value, protocol=protocol))
    assert (found["data"] == data).all() and (found["other"] == data).all() and found["labels"] == value["labels"]
    assert found["text"] == "ü" and found["none"] is None


@pytest.mark.parametrize("label", [2**70, 2**63 - 1, -(2**63), 10, -1])
def test_labels_of_any_size_are_refused_by_a_message(tmp_path, label):
    files.cifar10(tmp_path, rows=2)
    path = tmp_path / "cifar-10-batches-py/data_batch_2"
    path.write_bytes(pickle.dumps({b"data": numpy.zeros((2, 3072), numpy.uint8), b"labels": [0, label]}, protocol=2))
    with pytest.raises(InputError, match=r"data_batch_2: .*(labels must be in \[0, 10\)|whole numbers must have at most 8 bytes)"):
        load("cifar10", tmp_path, verify=False)


def test_the_checksum_comes_before_the_reader(tmp_path, monkeypatch):
    files.cifar100(tmp_path)
    files.mnist(tmp_path / "MNIST/raw")
    monkeypatch.setattr(cifar.pickles, "read", lambda content: pytest.fail("it was parsed"))
    with pytest.raises(InputError, match="train: must be the published file"):
        load("cifar100", tmp_path)
    files.cifar10(tmp_path)
    published = dataclasses.replace(cifar.CIFAR10, content={})
    with pytest.raises(InputError, match="data_batch_1: must be the published file"):
        cifar.read(tmp_path, published)


def test_files_and_names_are_bounded(tmp_path):
    files.cifar10(tmp_path)
    folder = tmp_path / "cifar-10-batches-py"
    with (folder / "data_batch_1").open("r+b") as file:
        file.truncate(2**33)
    with pytest.raises(InputError, match="data_batch_1: must have at most 268435456 bytes"):
        load("cifar10", tmp_path)
    (folder / "data_batch_1").unlink()
    os.mkfifo(folder / "data_batch_1")
    with pytest.raises(InputError, match="data_batch_1: must be a plain file"):
        load("cifar10", tmp_path)


# --- idx and gzip


def header(*sizes: int) -> bytes:
    return struct.pack(f">HBB{len(sizes)}I", 0, 8, len(sizes), *sizes)


ZEROS = gzip.compress(bytes(2**24), 9)
PACKED = {
    "a bomb": (gzip.compress(header(30, 28, 28)) + ZEROS * 400, "more than 23536 bytes"),
    "a bomb that owns up": (gzip.compress(header(600_000, 100, 100)) + ZEROS * 400, "at most 268435456 bytes.*found 600000 × 100 × 100"),
    "a bomb of one member": (ZEROS, "must begin as an idx file"),
    "sizes that overflow": (gzip.compress(header(2**32 - 1, 2**32 - 1, 2**32 - 1)), "at most 268435456 bytes"),
    "garbage behind it": (gzip.compress(header(1, 2, 2) + b"abcd") + b"garbage", "incorrect header check"),
    "garbage after zeros": (gzip.compress(header(1, 2, 2) + b"abcd") + b"\0\0x", "incorrect header check"),
    "a wrong checksum": (gzip.compress(header(1, 2, 2) + b"abcd")[:-8] + bytes(8), "incorrect data check"),
    "members without end": (gzip.compress(header(1, 2, 2) + b"abcd") + gzip.compress(b"") * 5000, "more than 4096 members"),
    "a name without end": (b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 2**20, "must begin as an idx file"),
    "fewer than it says": (gzip.compress(header(2, 2, 2) + b"abcd"), "must hold 2 × 2 × 2 bytes, as it says.*found 4"),
}


@pytest.mark.parametrize("name", PACKED)
def test_no_more_is_unpacked_than_a_file_says_it_holds(tmp_path, name):
    files.mnist(tmp_path / "MNIST/raw", packed=True)
    content, message = PACKED[name]
    (tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz").write_bytes(content)

    def read() -> None:
        with pytest.raises(InputError, match=message):
            load("mnist", tmp_path, verify=False)

    assert within(100 * MIB, read)


def test_several_members_and_padding_are_read(tmp_path):
    files.mnist(tmp_path / "MNIST/raw", packed=True)
    path = tmp_path / "MNIST/raw/train-images-idx3-ubyte.gz"
    whole = gzip.decompress(path.read_bytes())
    path.write_bytes(b"".join(gzip.compress(whole[start : start + 5_000]) for start in range(0, len(whole), 5_000)) + bytes(1000))
    assert len(load("mnist", tmp_path, verify=False).train) == 30


def test_an_idx_file_that_lies_about_its_sizes(tmp_path):
    files.mnist(tmp_path / "MNIST/raw")
    path = tmp_path / "MNIST/raw/t10k-images-idx3-ubyte"
    for sizes in ((2**31, 28, 28), (2**32 - 1,) * 3, (10, 28, 29), (0, 28, 28)):
        path.write_bytes(header(*sizes) + bytes(7840))
        with pytest.raises(InputError, match="t10k-images-idx3-ubyte: must hold"):
            load("mnist", tmp_path, verify=False)


def test_the_checksum_of_a_packed_file_is_of_what_is_in_it(tmp_path):
    files.mnist(tmp_path / "MNIST/raw", packed=True)
    published = {path.stem: hashlib.md5(gzip.decompress(path.read_bytes())).hexdigest() for path in (tmp_path / "MNIST/raw").iterdir()}
    which = dataclasses.replace(idx.MNIST, published=published)
    assert len(idx.read(tmp_path, which).train) == 30
    (tmp_path / "MNIST/raw/t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header(10) + bytes(10)))
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte.gz: must be the published file"):
        idx.read(tmp_path, which)


# --- Tiny-ImageNet


def zipped(root, held: dict[str, bytes], change=lambda info: None) -> bytes:
    path = root / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in held.items():
            info = zipfile.ZipInfo(f"tiny-imagenet-200/{name}")
            info.compress_type = zipfile.ZIP_DEFLATED
            change(info)
            archive.writestr(info, content)
    return path.read_bytes()


def directory_changed(content: bytes, name: str, field: int, value: bytes) -> bytes:
    """A field of a member's entry, and of its own header."""
    changed = bytearray(content)
    for signature, shift in ((b"PK\x01\x02", 46), (b"PK\x03\x04", 30)):
        entry = content.rindex(name.encode(), 0, None if shift == 46 else content.index(b"PK\x01\x02")) - shift
        assert content[entry : entry + 4] == signature
        at = entry + field - (2 if shift == 30 else 0)
        changed[at : at + len(value)] = value
    return bytes(changed)


PICTURE = "tiny-imagenet-200/train/n01/images/n01_2.JPEG"
FLAGS, METHOD, SIZE = 8, 10, 24
ZIPS = {
    "encrypted": (FLAGS, b"\x01\x00", "not encrypted, and packed by deflate"),
    "packed in a way nobody knows": (METHOD, b"\x63\x00", "packed by deflate or not at all"),
    "packed by bzip2, as it says": (METHOD, b"\x0c\x00", "packed by deflate or not at all"),
    "of a size that is not its own": (SIZE, struct.pack("<I", 7), "n01_2.JPEG is not"),
    "larger than it is": (SIZE, struct.pack("<I", 2**20), "n01_2.JPEG is not"),
    "huge, as it says": (SIZE, struct.pack("<I", 2**31), "files of at most 16777216 bytes"),
}


@pytest.mark.parametrize("name", ZIPS)
def test_members_that_are_not_what_they_should_be(tmp_path, name):
    field, value, message = ZIPS[name]
    content = zipped(tmp_path, files.tiny_imagenet())
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(directory_changed(content, PICTURE, field, value))
    with pytest.raises(InputError, match=f"tiny-imagenet-200.zip: .*{message}"):
        load("tiny-imagenet", tmp_path, verify=False)


def test_a_member_without_a_name_is_none_of_ours(tmp_path):
    content = bytearray(zipped(tmp_path, files.tiny_imagenet()))
    name = f"tiny-imagenet-200/{ANNOTATIONS}".encode()
    lengths = content.rindex(name) - 46 + 28  # of the name, of something else, and of a comment, which the name becomes
    content[lengths : lengths + 6] = struct.pack("<3H", 0, 0, len(name))
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(bytes(content))
    with pytest.raises(InputError, match="val_annotations.txt must be there"):
        load("tiny-imagenet", tmp_path, verify=False)


def test_a_member_with_far_more_behind_a_small_size(tmp_path):
    held = files.tiny_imagenet() | {"wnids.txt": b"n01\nn02\nn03\n" + bytes(2**27)}
    content = zipped(tmp_path, held)
    changed = directory_changed(content, "tiny-imagenet-200/wnids.txt", SIZE, struct.pack("<I", 12))
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(changed)

    def read() -> None:
        with pytest.raises(InputError, match="wnids.txt is not"):
            load("tiny-imagenet", tmp_path, verify=False)

    assert within(60 * MIB, read)


def test_links_corrupt_data_and_too_many_members(tmp_path, monkeypatch):
    def link(info: zipfile.ZipInfo) -> None:
        if info.filename == PICTURE:
            info.external_attr = (stat.S_IFLNK | 0o777) << 16

    zipped(tmp_path, files.tiny_imagenet(), link)
    with pytest.raises(InputError, match="and no links.*n01_2.JPEG"):
        load("tiny-imagenet", tmp_path, verify=False)
    content = zipped(tmp_path, files.tiny_imagenet())
    start = content.index(PICTURE.encode()) + len(PICTURE) + 5
    (tmp_path / "tiny-imagenet-200.zip").write_bytes(content[:start] + b"\xff\x00\xff" * 9 + content[start + 27 :])
    with pytest.raises(InputError, match="must be a whole zip file; .*n01_2.JPEG is not"):
        load("tiny-imagenet", tmp_path, verify=False)
    zipped(tmp_path, files.tiny_imagenet())
    monkeypatch.setattr(tiny_imagenet, "MEMBERS", 10)
    with pytest.raises(InputError, match="must be a whole zip file.*more than 10 members"):
        load("tiny-imagenet", tmp_path, verify=False)


ANNOTATIONS = "val/val_annotations.txt"


def as_folder(root, held: dict[str, bytes]) -> None:
    for name, content in held.items():
        path = root / "tiny-imagenet-200" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_annotations_with_odd_lines(tmp_path):
    held = files.tiny_imagenet()
    lines = held[ANNOTATIONS].split(b"\n")
    as_folder(tmp_path, held | {ANNOTATIONS: b"\r\n".join([*lines, b"", b"  ", lines[0]])})
    assert len(load("tiny-imagenet", tmp_path, verify=False).test) == 6
    for line, message in (
        (b"val_0.JPEG\tn02\t0", "a picture must have one class"),
        (b"\t\tx\t", "every class must be in wnids.txt"),
        (b"../../etc/passwd\tn01", "must be there"),
        (b"val_0.JPEG\x00\tn01", "must be there"),
        (b"\xff\xfe" * 50_000, "every class must be in wnids.txt"),
    ):
        as_folder(tmp_path, {ANNOTATIONS: b"\n".join([*lines, line])})
        with pytest.raises(InputError, match=message) as caught:
            load("tiny-imagenet", tmp_path, verify=False)
        assert len(str(caught.value)) < 800
    for content, message in (
        (b"", "every class once"),
        (b"n01 n02 n03 n01", "4 names of 3 classes"),
        (b"n " * 2**16, "at most 65536 bytes"),
    ):
        as_folder(tmp_path, held | {"wnids.txt": content})
        with pytest.raises(InputError, match=message):
            load("tiny-imagenet", tmp_path, verify=False)


# --- pictures


def encoded(picture: Image.Image, form: str, **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, form, **options)
    return out.getvalue()


def folder_with(root, content: bytes | None, name: str = "3.png"):
    """Two classes of five pictures; one of them is this."""
    for label in ("a", "b"):
        (root / label).mkdir()
        for number in range(5):
            (root / label / f"{number}.png").write_bytes(files.picture((number, 0, 0), 12, "PNG"))
    (root / "a" / name).unlink(missing_ok=True)
    if content is not None:
        (root / "a" / name).write_bytes(content)
    return root / "a" / name


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 12 12\n%%EndComments\n(x) (w) file closefile\nshowpage\n%%EOF\n"


def test_a_program_is_no_picture(tmp_path, monkeypatch):
    """Whatever it is called. Pillow would start Ghostscript for it."""
    import subprocess

    monkeypatch.setattr(subprocess, "Popen", lambda *arguments, **options: pytest.fail(f"started {arguments}"))
    folder_with(tmp_path, EPS)
    with pytest.raises(InputError, match=r"3.png: must be a whole picture file \(JPEG, PNG, .*\); found none of these$"):
        load(str(tmp_path))
    assert "PIL.EpsImagePlugin" not in sys.modules or Image.open(io.BytesIO(EPS)).format == "EPS"  # the test can fail


OTHERS = {"ICO": "ICO", "PCX": "PCX", "TGA": "TGA", "PDF": "PDF", "JPEG 2000": "JPEG2000", "DDS": "DDS"}


@pytest.mark.parametrize("form", OTHERS.values(), ids=OTHERS)
def test_kinds_that_are_not_meant_are_refused(tmp_path, form):
    Image.init()
    folder_with(tmp_path, encoded(Image.new("RGB", (12, 12)), form) if form in Image.SAVE else b"")
    with pytest.raises(InputError, match="3.png: must be a whole picture file"):
        load(str(tmp_path))


def test_pipes_sockets_folders_and_dangling_links_are_no_pictures(tmp_path):
    path = folder_with(tmp_path, None)
    os.mkfifo(path)
    with pytest.raises(InputError, match="3.png: must be a picture; .*plain file"):
        load(str(tmp_path))
    path.unlink()
    path.mkdir()
    with pytest.raises(InputError, match="3.png: must be a picture; .*plain file"):
        load(str(tmp_path))
    path.rmdir()
    path.symlink_to("/dev/zero")
    with pytest.raises(InputError, match="3.png: must be a picture; .*plain file"):
        load(str(tmp_path))
    path.unlink()
    path.symlink_to("nowhere")
    with pytest.raises(InputError, match="3.png must be there and readable"):
        load(str(tmp_path))
    path.unlink()
    path.symlink_to("3.png")
    with pytest.raises(InputError, match="3.png must be there and readable"):
        load(str(tmp_path))
    path.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        before = os.getcwd()
        os.chdir(path.parent)  # a socket's name is short
        try:
            listener.bind(path.name)
        finally:
            os.chdir(before)
        with pytest.raises(InputError, match="3.png: must be a picture; .*plain file"):
            load(str(tmp_path))
    path.unlink()
    path.symlink_to("2.png")  # a link to a picture is one
    assert len(load(str(tmp_path)).train) == 8


def test_pixels_are_bounded_before_they_are_decoded(tmp_path):
    path = folder_with(tmp_path, encoded(Image.new("1", (9000, 9000)), "PNG"))
    assert path.stat().st_size < 20_000

    def read() -> None:
        with pytest.raises(InputError, match="3.png: a picture must have at most 67108864 pixels; found 9000×9000"):
            load(str(tmp_path), size=12)

    assert within(100 * MIB, read)
    header = bytearray(encoded(Image.new("L", (12, 12)), "PNG"))
    header[16:24] = struct.pack(">II", 2**31 - 1, 2**31 - 1)
    path.write_bytes(bytes(header))
    with pytest.raises(InputError, match="3.png: "):
        load(str(tmp_path), size=12)


def test_large_pictures_are_decoded_one_at_a_time(tmp_path):
    folder_with(tmp_path, None)
    large = encoded(Image.new("RGB", (3000, 3000), (7, 8, 9)), "PNG", compress_level=1)
    for label in ("a", "b"):
        for number in range(5):
            (tmp_path / label / f"{number}.png").write_bytes(large)
    seen = []
    assert within(150 * MIB, lambda: seen.append(load(str(tmp_path), size=4)))  # one has 27 MB, 36 as Pillow keeps it
    assert seen[0].train.pixels[0, :, 0, 0].tolist() == [7, 8, 9]


def test_one_huge_picture_among_many_asks_for_no_room_that_is_not_there(tmp_path, monkeypatch):
    folder_with(tmp_path, None)
    (tmp_path / "a/0.png").write_bytes(encoded(Image.new("L", (1000, 1000)), "PNG"))
    with pytest.raises(InputError, match="pictures must be of one size, the first being 1000×1000"):
        load(str(tmp_path))

    def full(*arguments: object) -> None:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(torch.Tensor, "new_empty", full)
    with pytest.raises(InputError, match="9 pictures of 1000×1000 must fit into memory; give size= .*found 27000000 bytes"):
        load(str(tmp_path))


def first_red(root, content: bytes) -> list[int]:
    folder_with(root, content, "0.png")
    data = load(str(root))
    pixels = torch.cat([data.train.pixels, data.test.pixels]).flatten(1)
    return pixels[pixels[:, 0] > 90][0].view(3, 12, 12)[:, 0, 0].tolist()


GREY_16 = Image.fromarray(numpy.full((12, 12), 257 * 100, numpy.uint16))
PALETTE = Image.new("P", (12, 12), 1)
PALETTE.putpalette([0, 0, 0, 100, 110, 120])
FRAMES = [Image.new("RGB", (12, 12), colour) for colour in ((100, 110, 120), (0, 0, 0))]
KINDS = {
    "16 bits of grey": (lambda: encoded(GREY_16, "PNG"), [100, 100, 100]),
    "16 bits of grey, TIFF": (lambda: encoded(GREY_16, "TIFF"), [100, 100, 100]),
    "palette": (lambda: encoded(PALETTE, "PNG"), [100, 110, 120]),
    "palette, transparent": (lambda: encoded(PALETTE, "PNG", transparency=b"\x00\x80"), [100, 110, 120]),
    "transparent": (lambda: encoded(Image.new("RGBA", (12, 12), (100, 110, 120, 9)), "PNG"), [100, 110, 120]),
    "grey and transparent": (lambda: encoded(Image.new("LA", (12, 12), (100, 9)), "PNG"), [100, 100, 100]),
    "CMYK": (lambda: encoded(Image.new("CMYK", (12, 12), (155, 145, 135, 0)), "TIFF"), [100, 110, 120]),
    "black and white": (lambda: encoded(Image.new("1", (12, 12), 1), "PNG"), [255, 255, 255]),
    "animated": (lambda: encoded(FRAMES[0], "GIF", save_all=True, append_images=FRAMES[1:]), [100, 110, 120]),
    "animated PNG": (lambda: encoded(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), [100, 110, 120]),
    "WebP": (lambda: encoded(FRAMES[0], "WEBP", lossless=True), [100, 110, 120]),
    "BMP": (lambda: encoded(FRAMES[0], "BMP"), [100, 110, 120]),
    "PPM": (lambda: encoded(FRAMES[0], "PPM"), [100, 110, 120]),
}


@pytest.mark.parametrize("name", KINDS)
def test_pictures_of_all_kinds_keep_their_colours(tmp_path, name):
    content, colour = KINDS[name]
    assert first_red(tmp_path, content()) == colour


@pytest.mark.parametrize("mode", ["F", "I"])
def test_values_of_no_known_range_are_refused(tmp_path, mode):
    folder_with(tmp_path, encoded(Image.new(mode, (12, 12), 5), "TIFF"))
    with pytest.raises(InputError, match="3.png: must be a whole picture .*32 bits"):
        load(str(tmp_path))


@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "PPM"])
def test_pictures_cut_anywhere_are_refused(tmp_path, form):
    path = folder_with(tmp_path, None)
    content = encoded(Image.effect_noise((12, 12), 90).convert("RGB"), form)
    for length in (0, 1, 10, len(content) // 2, len(content) - 30):
        path.write_bytes(content[:length])
        with pytest.raises(InputError, match="3.png: must be a whole picture file"):
            load(str(tmp_path))
