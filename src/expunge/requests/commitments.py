"""Commit to ids without showing them, and prove that one is among them.

A commitment is c = HMAC-SHA256(salt, id) with a salt of its own for every id: without the salt nobody can tell, by trying, which id it
stands for. The salts are salt = HMAC-SHA256(key, "salt " ‖ id) with a random key of 32 bytes per request, which stays with the ids: one
salt tells nothing of the key or of other salts. The commitments of a request, sorted, are the leaves of a Merkle tree, as RFC 6962 has it:

    leaf = SHA-256(0x00 ‖ c),   node = SHA-256(0x01 ‖ left ‖ right),   left: the largest power of 2 below the number of leaves.

The receipt and the ledger show the root and the number of leaves. Who gets an id's salt and the nodes beside its path can compute the
root, and learns nothing of the other ids.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

KEY = 32  # bytes
Salts = dict[int, str]


@dataclass(frozen=True)
class Opening:
    """What opens the commitments of a request: its key, in hexadecimal, and the ids. It is not handed on."""

    key: str
    ids: tuple[int, ...]

    @classmethod
    def new(cls, ids: Iterable[int]) -> Opening:
        return cls(secrets.token_hex(KEY), tuple(ids))

    def salts(self) -> Salts:
        key = bytes.fromhex(self.key)
        return {number: hmac.new(key, f"salt {number}".encode(), hashlib.sha256).hexdigest() for number in self.ids}

    def root(self) -> str:
        return root(leaves_of(self.salts())).hex()


def commitment(number: int, salt: str) -> bytes:
    return hmac.new(bytes.fromhex(salt), str(number).encode(), hashlib.sha256).digest()


def leaves_of(salts: Mapping[int, str]) -> list[bytes]:
    """The commitments, sorted, so that their order does not tell the ids'."""
    return sorted(commitment(number, salt) for number, salt in salts.items())


def root(leaves: Sequence[bytes]) -> bytes:
    """The root of the Merkle tree; of nothing: SHA-256 of nothing."""
    if len(leaves) <= 1:
        return hashlib.sha256(b"\0" + leaves[0] if leaves else b"").digest()
    cut = _split(len(leaves))
    return _node(root(leaves[:cut]), root(leaves[cut:]))


@dataclass(frozen=True)
class Inclusion:
    """A proof that an id is among those that a request committed to: its salt, its place, and the nodes beside its path, leaf first."""

    id: int
    salt: str
    place: int
    leaves: int
    beside: tuple[str, ...]

    def root(self) -> str | None:
        """The root that this proof leads to; None where it leads to none."""
        if not 0 <= self.place < self.leaves:
            return None
        steps = _sides(self.place, self.leaves)
        if len(steps) != len(self.beside):
            return None
        node = hashlib.sha256(b"\0" + commitment(self.id, self.salt)).digest()
        for is_right, other in zip(steps, self.beside, strict=True):
            node = _node(bytes.fromhex(other), node) if is_right else _node(node, bytes.fromhex(other))
        return node.hex()


def inclusion(number: int, salts: Mapping[int, str]) -> Inclusion:
    """The proof for one of the ids."""
    leaves = leaves_of(salts)
    place = leaves.index(commitment(number, salts[number]))
    return Inclusion(number, salts[number], place, len(leaves), tuple(node.hex() for node in _beside(leaves, place)))


def _beside(leaves: Sequence[bytes], place: int) -> list[bytes]:
    if len(leaves) == 1:
        return []
    cut = _split(len(leaves))
    if place < cut:
        return [*_beside(leaves[:cut], place), root(leaves[cut:])]
    return [*_beside(leaves[cut:], place - cut), root(leaves[:cut])]


def _sides(place: int, leaves: int) -> list[bool]:
    """Whether the path's node is the right one of its pair, leaf first."""
    if leaves == 1:
        return []
    cut = _split(leaves)
    return [*_sides(place - cut, leaves - cut), True] if place >= cut else [*_sides(place, cut), False]


def _split(leaves: int) -> int:
    return 1 << (leaves - 1).bit_length() - 1


def _node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()
