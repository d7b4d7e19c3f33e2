"""Commitments and their tree: against a plain tree by the RFC, and proofs that hold for their id alone."""

import hashlib
import hmac
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.requests.commitments import Opening, commitment, inclusion, leaves_of, root
from expunge.requests.folder import _openings, write_openings


def plain_root(leaves):
    """Level by level: an odd node at the end goes up as it is, which is the tree of RFC 6962."""
    level = [hashlib.sha256(b"\0" + leaf).digest() for leaf in leaves]
    while len(level) > 1:
        pairs = [level[place : place + 2] for place in range(0, len(level), 2)]
        level = [hashlib.sha256(b"\1" + b"".join(pair)).digest() if len(pair) == 2 else pair[0] for pair in pairs]
    return level[0]


@pytest.mark.parametrize("number", [1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 33])
def test_the_root_is_that_of_the_rfc(number):
    leaves = [bytes([place]) * 32 for place in range(number)]
    assert root(leaves) == plain_root(leaves)


def test_known_answers_of_the_rfc():
    """From the test vectors of Certificate Transparency: the tree of nothing, and of one empty leaf."""
    assert root([]).hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert root([b""]).hex() == "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"


def test_a_commitment_is_an_hmac_of_the_id():
    salt = "ab" * 32
    assert commitment(17, salt) == hmac.digest(bytes.fromhex(salt), b"17", "sha256")


def test_salts_and_order_are_new_for_every_request():
    first, second = (Opening.new(range(20)) for _ in range(2))
    assert first.root() != second.root() and len(set(first.salts().values())) == 20
    assert leaves_of(first.salts()) == sorted(commitment(number, salt) for number, salt in first.salts().items())


@settings(max_examples=40, deadline=None)
@given(st.sets(st.integers(0, 10**6), min_size=1, max_size=40), st.data())
def test_a_proof_leads_to_the_root_for_its_id_alone(ids, data):
    opening = Opening.new(sorted(ids))
    proof = inclusion(data.draw(st.sampled_from(sorted(ids))), opening.salts())
    assert proof.root() == opening.root()
    assert replace(proof, id=proof.id + 1).root() != opening.root()
    assert replace(proof, salt="00" * 32).root() != opening.root()
    for place in range(proof.leaves):
        assert place == proof.place or replace(proof, place=place).root() != opening.root()


def test_openings_of_millions_of_ids_are_read_back(tmp_path):
    opening = Opening.new(range(10**7, 10**7 + 2_000_000))
    (tmp_path / "openings.json").write_bytes(write_openings((opening,)))
    (read,) = _openings(tmp_path / "openings.json")
    assert (read.key, len(read.ids), read.ids[-1]) == (opening.key, 2_000_000, 10**7 + 1_999_999)


def test_a_proof_shows_no_other_id_or_key():
    opening = Opening.new([3, 1_234_567])
    shown = repr(inclusion(3, opening.salts()))
    assert "1234567" not in shown and opening.key not in shown and opening.salts()[1_234_567] not in shown


def test_proofs_of_impossible_form_lead_nowhere():
    proof = inclusion(3, Opening.new([3, 4, 5]).salts())
    assert replace(proof, beside=()).root() is None and replace(proof, place=7).root() is None and replace(proof, place=-1).root() is None
