"""Changes of good files: of single bytes, and of what the bytes mean, with all checksums made right again."""

from __future__ import annotations

import copy
import gzip
import json
import pickletools
import struct
import zipfile
from collections.abc import Callable, Sequence
from io import BytesIO
from random import Random
from typing import Any

import torch
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors

from expunge.storage.tensors import content_digest

Mutation = Callable[[Random, bytes], bytes]

NUMBERS = [0, 1, 2, 127, 128, 255, 256, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


# --- bytes


def flip(random: Random, content: bytes) -> bytes:
    changed = bytearray(content or b"\0")
    for _ in range(random.choice([1, 1, 2, 8])):
        changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def number(random: Random, content: bytes) -> bytes:
    """A length field, perhaps."""
    form = random.choice(["<B", "<H", "<I", "<Q", ">H", ">I", ">Q"])
    size = struct.calcsize(form)
    value = struct.pack(form, random.choice(NUMBERS) % 2 ** (8 * size))
    start = random.randrange(min(len(content), random.choice([16, 64, 10**9])) or 1)
    return content[:start] + value + content[start + size :]


def cut(random: Random, content: bytes) -> bytes:
    return content[: random.randrange(len(content) + 1)]


def without(random: Random, content: bytes) -> bytes:
    start = random.randrange(len(content) + 1)
    return content[:start] + content[start + random.choice([1, 4, 64, 1024]) :]


def splice(random: Random, content: bytes) -> bytes:
    start, source = random.randrange(len(content) + 1), random.randrange(len(content) + 1)
    return content[:start] + content[source : source + random.choice([1, 8, 256, 10**9])] + content[start + random.choice([0, 8]) :]


def noise(random: Random, content: bytes) -> bytes:
    start = random.randrange(len(content) + 1)
    return content[:start] + random.randbytes(random.choice([1, 4, 100])) + content[start + random.choice([0, 4]) :]


def appended(random: Random, content: bytes) -> bytes:
    return content + random.choice([b"\0" * 100, b"garbage", content])


BYTES: list[Mutation] = [flip, number, cut, without, splice, noise, appended]


# --- JSON

DEEP = "in place of this comes something deep"
ODD: list[Any] = [None, True, -1, 0, 1, 5.0, -0.5, 1e308, -1e308, 5e-324, 2**31, 2**53, 2**63, 10**400, float("nan"), float("inf")]
ODD += ["", "x" * 3000, "\ud800", "\0", "../../x", "<b>&", DEEP, [], {}, [[]], [1], {"a": 1}, [0.5] * 2000, {"": {}}]


def nodes(value: Any) -> list[tuple[Any, Any]]:
    """Where something stands: a list or an object, and the place in it."""
    places: list[tuple[Any, Any]] = []
    parts = [value]
    while parts:
        part = parts.pop()
        keys: Sequence[Any] = list(part) if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()
        places += [(part, key) for key in keys]
        parts += [part[key] for key in keys]
    return places


def edited(random: Random, tree: Any) -> Any:
    """A copy with one to three places changed."""
    tree = copy.deepcopy(tree)
    for _ in range(random.choice([1, 1, 1, 2, 3])):
        places = nodes(tree)
        if not places:
            return copy.deepcopy(random.choice(ODD))
        top = [place for place in places if place[0] is tree]  # few beside the entries of long lists
        parent, key = random.choice(random.choice([places, top]))
        match random.randrange(6):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, dict):
                parent[random.choice(["", "unknown", "\ud800", "epoch", f"{key}x"])] = parent.pop(key)
            case 2:
                other, where = random.choice(places)
                if where in other if isinstance(other, dict) else where < len(other):
                    parent[key] = copy.deepcopy(other[where])
            case 3 if type(parent[key]) in (int, float) and abs(parent[key]) < 2**64:
                number = parent[key]
                parent[key] = random.choice([-number, number + 1, number * 1e6, 1e308, number / 1e300, str(number)])
            case _:
                parent[key] = copy.deepcopy(random.choice(ODD))  # a list that two places share could come to hold itself
    return tree


def written(random: Random, tree: Any) -> str:
    """As text, where a name may come twice and something may be very deep."""
    text = json.dumps(tree)
    if DEEP in text:
        depth = random.choice([10, 40, 900, 100_000])
        text = text.replace(json.dumps(DEEP), "[" * depth + "]" * depth)
    if random.random() < 0.02:
        text = text.replace("{", '{"seed": 1, "seed": 2, ', 1)
    return text


def json_edited(random: Random, content: bytes) -> bytes:
    return written(random, edited(random, json.loads(content))).encode()


# --- safetensors


def odd_tensor(random: Random, tensor: torch.Tensor) -> torch.Tensor:
    match random.randrange(7):
        case 0:
            return tensor[:-1].clone() if tensor.dim() and len(tensor) else torch.zeros(3)
        case 1:
            return tensor.to(random.choice([torch.float64, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float32]))
        case 2:
            return torch.zeros(random.choice([(), (0,), (1,), (2, 0, 3), (7,)]), dtype=tensor.dtype)
        case 3:
            return tensor.reshape(-1, 1)
        case 4 if tensor.is_floating_point():
            return torch.full_like(tensor, random.choice([float("nan"), float("inf"), -1.0, 1e38]))
        case 5 if tensor.dtype == torch.int64:
            return torch.full_like(tensor, random.choice([-1, 2**62, 624, 700, -(2**63)]))
        case _:
            changed = tensor.clone().reshape(-1)
            if changed.numel():
                place = random.randrange(changed.numel())
                changed[place] = random.choice([0, 1]) if changed.dtype == torch.bool else random.choice([0, 1, 100])
            return changed.reshape(tensor.shape)


def tensors_edited(random: Random, content: bytes) -> bytes:
    """Tensors and metadata changed, the digest over them made anew."""
    tensors, metadata = dict(load_safetensors(content)), _metadata(content)
    metadata.pop("content")
    for _ in range(random.choice([1, 1, 2])):
        name, key = random.choice(sorted(tensors) or ["x"]), random.choice(sorted(metadata) or ["kind"])
        match random.randrange(8):
            case 0:
                tensors.pop(name, None)
            case 1:
                tensors[random.choice(["", "model/x", "optimizer/9/x", "optimizer/-1/a", "optimizer//", f"{name}x"])] = torch.zeros(2)
            case 2 | 3 if name in tensors:
                tensors[name] = odd_tensor(random, tensors[name]).contiguous()
            case 4:
                metadata.pop(key, None)
            case 5:
                metadata[key] = random.choice(
                    ["", "-1", "0", "3", "20000000", "9" * 5000, "²", "NaN", "x" * 5000, "null", "[]", "{}", "\0"]
                )
            case _ if metadata.get(key, "").startswith(("{", "[")):
                metadata[key] = written(random, edited(random, json.loads(metadata[key])))
    return save_safetensors(tensors, metadata | {"content": content_digest(tensors, metadata)})


def _metadata(content: bytes) -> dict[str, str]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length])["__metadata__"]


def header_edited(random: Random, content: bytes) -> bytes:
    """The header lies about types, shapes and places."""
    length = struct.unpack("<Q", content[:8])[0]
    tree = json.loads(content[8 : 8 + length])
    names = [name for name in tree if name != "__metadata__"]
    entry = tree[random.choice(names)]
    match random.randrange(4):
        case 0:
            entry["dtype"] = random.choice(["F64", "F16", "I8", "F8_E4M3", "F8_E8M0", "F4", "BOOL", "C64", "U64", "x"])
        case 1:
            entry["shape"] = random.choice([[], [0], [0, 2**62], [2**63], [1] * 70, [2**32, 2**32], entry["shape"][::-1], [-1]])
        case 2:
            entry["data_offsets"] = [random.choice([0, 8, 2**40, 2**64 - 1]), random.choice([0, 8, 16, 2**63])]
        case _:
            tree = edited(random, tree)
    header = written(random, tree).encode()
    return struct.pack("<Q", len(header)) + header + content[8 + length :]


# --- pickles, gzip, zip

OPERATIONS = [
    b"r\xff\xff\xff\x7f",
    b"r\xff\xff\xff\x1f",
    b"j\x00\x00\x00\x7f",
    b"q\xff",
    b"h\x07",
    b"\x8d" + b"\xff" * 8,
    b"X\xff\xff\xff\xff",
]
OPERATIONS += [
    b"T\xff\xff\xff\xff",
    b"B\xff\xff\xff\x7f",
    b"\x8e" + b"\xff" * 8,
    b"\x95" + b"\xff" * 8,
    b"\x8b\xff\xff\xff\x7f1",
    b"\x8a\xff",
]
OPERATIONS += [b"\x8a\x09" + b"\x7f" * 9, b"\x8a\x08" + b"\x7f" * 8, b"2", b"0", b"1", b"R", b"b", b"(", b"t", b"\x85", b"\x87", b"]" * 300]
OPERATIONS += [b"}", b"a", b"e", b"s", b"u", b"N", b"\x88", b"J\xff\xff\xff\x7f", b".", b"\x82\x01", b"P1\n", b"I2\n", b"L99L\n", b"F1.0\n"]
OPERATIONS += [
    b"cos\nsystem\n",
    b"cnumpy\nndarray\n",
    b"cnumpy\ndtype\n",
    b"c_codecs\nencode\n",
    b"i__builtin__\neval\n",
    b"o",
    b"\x81",
    b"\x93",
]
OPERATIONS += [b"cnumpy.core.multiarray\n_reconstruct\n", b"\x97", b"\x96" + b"\xff" * 8, b"d", b"l", b"\x80\x09", b"(" * 300, b"\x86" * 30]


def pickle_edited(random: Random, content: bytes) -> bytes:
    """Instructions put in, taken out and exchanged, at the places where instructions begin."""
    starts = [place for _, _, place in pickletools.genops(content) if place is not None]
    for _ in range(random.choice([1, 1, 2, 4])):
        index = random.randrange(len(starts))
        start, end = starts[index], starts[index + random.choice([0, 0, 1])] if index + 1 < len(starts) else len(content)
        content = content[:start] + random.choice([*OPERATIONS, b""]) * random.choice([1, 1, 1, 3]) + content[end:]
    return content


def packed_edited(random: Random, content: bytes) -> bytes:
    """What is in a gzip file changed, and packed again; sometimes with far more behind it."""
    unpacked = random.choice(BYTES)(random, gzip.decompress(content))
    if random.random() < 0.2:
        unpacked = unpacked[:4] + struct.pack(">3I", *random.choices([0, 1, 28, 60_000, 2**31, 2**32 - 1], k=3)) + unpacked[16:]
    packed = gzip.compress(unpacked, 1)
    return packed + BOMB * 60 if random.random() < 0.1 else packed


BOMB = gzip.compress(bytes(2**25), 9)  # 32 MB of zeros in 32 kB


def zip_edited(random: Random, content: bytes) -> bytes:
    """A field of an entry of the directory, or of a file's own header, or the directory's end."""
    signature = random.choice([b"PK\x01\x02", b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"])
    places = [place for place in range(len(content)) if content.startswith(signature, place)]
    changed = bytearray(content)
    start = random.choice(places) + random.randrange(4, 46)
    value = struct.pack("<I", random.choice(NUMBERS) % 2**32)[: random.choice([1, 2, 4])]
    changed[start : start + len(value)] = value
    return bytes(changed)


def zip_member(random: Random, content: bytes) -> bytes:
    """Another member: one that climbs out, one that is a link, one that is huge when it is unpacked."""
    out = BytesIO(content)
    with zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive:
        info = zipfile.ZipInfo(random.choice(["../x", "/x", "tiny-imagenet-200/train/n01/images/x.JPEG", "tiny-imagenet-200/words.txt2"]))
        info.external_attr = random.choice([0, 0o120777 << 16, 0o100644 << 16])
        info.compress_type = random.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED, zipfile.ZIP_BZIP2])
        archive.writestr(info, bytes(random.choice([0, 10, 2**22])))
    return out.getvalue()


def text_edited(random: Random, content: bytes) -> bytes:
    lines = content.split(b"\n")
    place = random.randrange(len(lines))
    odd = [b"", b"\t", b"\t" * 50, b"\xff\xfe", b"x\ty\tz", b"n01", b"../../etc/passwd\tn01", lines[place] * 2, b"n01 " * 5000, b"\0"]
    lines[place : place + random.choice([0, 1])] = [random.choice(odd)]
    return b"\n".join(lines)
