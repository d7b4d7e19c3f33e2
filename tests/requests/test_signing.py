"""Signatures of receipts; where the package cryptography is missing, one line says so."""

import shutil
import sys

import pytest

from expunge.errors import InputError
from expunge.requests.request import fulfil
from expunge.requests.verifying import verify
from tests.requests.small import request


def test_without_the_package_one_line_names_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(InputError, match=r"sign: needs the package cryptography: pip install 'expunge\[sign\]'"):
        fulfil(request(tmp_path, sign=tmp_path / "key.pem"))
    assert not (tmp_path / "out").exists()


def write_keys(folder, kind):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    key = ed25519.Ed25519PrivateKey.generate() if kind == "ed25519" else ec.generate_private_key(ec.SECP256R1())
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    public = (serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    (folder / "key.pem").write_bytes(key.private_bytes(*private))
    (folder / "key.pub").write_bytes(key.public_key().public_bytes(*public))


def test_a_signature_holds_for_its_receipt_and_key_alone(tmp_path):
    pytest.importorskip("cryptography")
    write_keys(tmp_path, "ed25519")
    fulfil(request(tmp_path, sign=tmp_path / "key.pem"))
    out = tmp_path / "out"

    def wrong(folder=out):
        return [finding.line for finding in verify(folder / "receipt.json", key=tmp_path / "key.pub") if not finding.fits]

    assert wrong() == [] and (out / "receipt.sig").stat().st_size == 64
    fulfil(request(tmp_path, "50", out="unsigned"))
    assert wrong(tmp_path / "unsigned") == ["receipt.sig: is missing"]
    shutil.copy(out / "receipt.sig", tmp_path / "unsigned")
    assert wrong(tmp_path / "unsigned") == ["receipt.sig: is no signature of receipt.json by this key"]
    write_keys(tmp_path, "ed25519")
    assert wrong() == ["receipt.sig: is no signature of receipt.json by this key"]


def test_signatures_of_earlier_receipts_are_kept(tmp_path):
    pytest.importorskip("cryptography")
    write_keys(tmp_path, "ed25519")
    out = tmp_path / "out"
    fulfil(request(tmp_path, sign=tmp_path / "key.pem"))
    signature = (out / "receipt.sig").read_bytes()
    for forget in ("50", "51"):
        fulfil(request(tmp_path, forget))
    assert (out / "receipt-1.sig").read_bytes() == signature and not (out / "receipt.sig").exists()
    assert all(finding.fits for finding in verify(out / "receipt.json"))
    (out / "receipt-1.sig").write_bytes(bytes(64))
    assert [finding.line for finding in verify(out / "receipt.json")] == ["receipt-1.sig: was changed since the receipt was written"]


def test_a_request_that_was_made_before_is_signed(tmp_path):
    """The same command with --sign: it said that all was done, and there was no signature."""
    pytest.importorskip("cryptography")
    out, key = tmp_path / "out", tmp_path / "key.pem"
    write_keys(tmp_path, "ed25519")
    fulfil(request(tmp_path))
    before = (out / "receipt.json").read_bytes()
    for _ in range(2):
        fulfil(request(tmp_path, sign=key))
        assert all(finding.fits for finding in verify(out / "receipt.json", key=tmp_path / "key.pub"))
    write_keys(tmp_path, "ed25519")
    with pytest.raises(InputError, match="sign: must be the key that receipt.json is signed by already"):
        fulfil(request(tmp_path, sign=key))
    assert (out / "receipt.json").read_bytes() == before
    fulfil(request(tmp_path, "50"))
    assert (out / "receipt-1.sig").exists() and all(finding.fits for finding in verify(out / "receipt.json"))


@pytest.mark.parametrize("kind", ["ec", "nonsense"])
def test_other_keys_are_refused_before_the_work(kind, tmp_path):
    pytest.importorskip("cryptography")
    write_keys(tmp_path, "ec")
    if kind == "nonsense":
        (tmp_path / "key.pem").write_text("nonsense")
    with pytest.raises(InputError, match="sign: must be a file with an Ed25519 private key in PEM"):
        fulfil(request(tmp_path, sign=tmp_path / "key.pem"))
    assert not (tmp_path / "out").exists()
