"""Sign a receipt with Ed25519, by the package `cryptography` (the extra [sign]).

Not by the OpenSSF package model-signing: 1.1.1 fails to import as pip installs it, since it needs OpenSSL without asking for it.
A signature over the receipt is one over the folder: the receipt holds the digests of its files, and the ledger follows from it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.requests.folder import SIGNATURE
from expunge.requests.receipt import RECEIPT
from expunge.storage.documents import excerpt, read_plain
from expunge.storage.files import write_bytes

LARGEST = 2**16  # bytes of a key


def sign(folder: Path, key: str | os.PathLike[str]) -> Path:
    """Write receipt.sig, the 64 bytes of the signature; `key` is a private Ed25519 key in PEM, without a password."""
    return write_bytes(folder / SIGNATURE, private_key(key).sign((folder / RECEIPT).read_bytes()))


def sign_later(folder: Path, new: Path, key: str | os.PathLike[str]) -> None:
    """Sign the receipt of a request that was made before; written in the folder `new` first, so that a kill leaves nothing half-written."""
    known, signature = folder / SIGNATURE, private_key(key).sign((folder / RECEIPT).read_bytes())
    if known.exists() and known.read_bytes() != signature:
        raise InputError("sign", f"must be the key that {RECEIPT} is signed by already", os.fspath(key))
    if not known.exists():
        new.mkdir()
        os.replace(write_bytes(new / SIGNATURE, signature), known)


def check_signature(folder: Path, key: str | os.PathLike[str]) -> str | None:
    """None where receipt.sig is a signature of the receipt by the owner of this public key (PEM); else what does not fit."""
    from cryptography.exceptions import InvalidSignature

    public = _key("key", key, private=False)
    if not (folder / SIGNATURE).is_file():
        return f"{SIGNATURE}: is missing"
    try:
        public.verify((folder / SIGNATURE).read_bytes(), (folder / RECEIPT).read_bytes())
    except InvalidSignature:
        return f"{SIGNATURE}: is no signature of {RECEIPT} by this key"
    return None


def private_key(path: str | os.PathLike[str]) -> Any:
    return _key("sign", path, private=True)


def _key(argument: str, path: str | os.PathLike[str], private: bool) -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError(argument, "needs the package cryptography: pip install 'expunge[sign]'") from error
    kind, whose = (ed25519.Ed25519PrivateKey, "private") if private else (ed25519.Ed25519PublicKey, "public")
    rule = f"must be a file with an Ed25519 {whose} key in PEM" + (", without a password" if private else "")
    if not Path(path).is_file():
        raise InputError(argument, rule, os.fspath(path))
    try:
        content = read_plain(path, LARGEST)
        key = serialization.load_pem_private_key(content, None) if private else serialization.load_pem_public_key(content)
    except (ValueError, TypeError) as error:
        raise InputError(argument, f"{rule} ({excerpt(error, 60)})", os.fspath(path)) from error
    if not isinstance(key, kind):
        raise InputError(argument, rule, type(key).__name__)
    return key
