"""The signed manifest: any changed field, byte or owner is refused, and is another run."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco import identity
from p2pdiloco.config import manifest, presets
from p2pdiloco.config.manifest import SignedManifest
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.identity import Identity

GENESIS = hashlib.sha256(b"version 0").digest()


class Key:
    """A stand-in for Ed25519 with the same contract: only who knows the name's secret can sign."""

    def __init__(self, peer: str) -> None:
        self.peer = peer

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha256(b"secret of " + self.peer.encode() + message).digest()


def verify_signature(peer: str, message: bytes, signature: bytes) -> bool:
    return Key(peer).sign(message) == signature


def signed() -> SignedManifest:
    return manifest.sign_manifest(presets.TINY, GENESIS, Key("alice"), "alice")


def test_a_signed_manifest_survives_the_wire_and_names_one_run() -> None:
    again = manifest.decode_signed(manifest.encode_signed(signed()))
    assert again == signed()
    assert manifest.verify(again, verify_signature) == presets.TINY
    assert manifest.run_id(again) == manifest.run_id(signed())
    assert len(manifest.run_id(again)) == 64


CHANGES = {
    "another owner": {"owner": "mallory"},
    "another version 0": {"genesis_digest": bytes(32)},
    "another manifest": {"manifest": manifest.canonical_bytes(presets.SMALL)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_each_covered_field_changes_run_and_breaks_signature(change: str) -> None:
    forged = msgspec.structs.replace(signed(), **CHANGES[change])
    assert manifest.run_id(forged) != manifest.run_id(signed())
    with pytest.raises(RemoteError) as caught:
        manifest.verify(forged, verify_signature)
    assert caught.value.reason == "manifest-signature"


def test_a_wrong_key_cannot_sign_in_the_owners_name() -> None:
    forged = manifest.sign_manifest(presets.TINY, GENESIS, Key("mallory"), "alice")
    with pytest.raises(RemoteError, match="manifest-signature"):
        manifest.verify(forged, verify_signature)


def test_the_signature_is_not_the_run_id_preimage() -> None:
    # Domain separation: what is signed cannot be replayed as anything else that this key signs.
    messages: list[bytes] = []

    class Spy(Key):
        def sign(self, message: bytes) -> bytes:
            messages.append(message)
            return super().sign(message)

    manifest.sign_manifest(presets.TINY, GENESIS, Spy("alice"), "alice")
    assert messages[0].startswith(b"p2pdiloco/1/manifest\0")
    assert hashlib.sha256(messages[0]).hexdigest() != manifest.run_id(signed())


def test_a_signed_but_invalid_manifest_is_still_refused() -> None:
    unsigned = msgspec.structs.replace(signed(), manifest=b"\x80", signature=b"")
    forged = msgspec.structs.replace(
        unsigned, signature=Key("alice").sign(manifest._covered("manifest", unsigned))
    )
    with pytest.raises(RemoteError) as caught:
        manifest.verify(forged, verify_signature)
    assert caught.value.reason == "manifest-garbage"


@given(st.data())
def test_any_flipped_byte_or_truncation_is_refused(data: st.DataObject) -> None:
    wire = bytearray(manifest.encode_signed(signed()))
    at = data.draw(st.integers(0, len(wire) - 1))
    if data.draw(st.booleans()):
        wire[at] ^= data.draw(st.integers(1, 255))
    else:
        del wire[at:]
    with pytest.raises(RemoteError):
        manifest.verify(manifest.decode_signed(bytes(wire)), verify_signature)


def test_oversized_and_nested_garbage() -> None:
    owner = signed().owner.encode()
    for wire, reason in (
        (bytes(manifest.MAX_SIGNED_BYTES + 1), "manifest-oversized"),
        (b"\x91" * 5000, "manifest-garbage"),
        (manifest.encode_signed(signed()).replace(owner, b"\xe1" + owner[1:]), "manifest-garbage"),
        (b"", "manifest-garbage"),
    ):
        with pytest.raises(RemoteError) as caught:
            manifest.decode_signed(wire)
        assert caught.value.reason == reason


def test_saved_and_loaded_and_damage_is_said(tmp_path: Path) -> None:
    path = tmp_path / "manifest.signed"
    manifest.save_signed(path, signed())
    manifest.save_signed(path, signed())
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.signed"]
    assert manifest.load_signed(path, verify_signature) == (signed(), presets.TINY)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(StorageError, match="is damaged"):
        manifest.load_signed(path, verify_signature)
    with pytest.raises(StorageError, match="cannot be read"):
        manifest.load_signed(tmp_path / "none", verify_signature)
    with pytest.raises(StorageError, match="cannot be written"):
        manifest.save_signed(tmp_path / "no-folder" / "manifest.signed", signed())


def test_genesis_digest_depends_on_order() -> None:
    a, b = bytes(32), b"\x01" * 32
    assert manifest.genesis_digest_of((a, b)) != manifest.genesis_digest_of((b, a))


def test_with_real_keys() -> None:
    owner, other = Identity.generate(), Identity.generate()
    good = manifest.sign_manifest(presets.TINY, GENESIS, owner, owner.peer_id)
    assert manifest.verify(good, identity.verify) == presets.TINY
    with pytest.raises(RemoteError, match="manifest-signature"):
        manifest.verify(msgspec.structs.replace(good, owner=other.peer_id), identity.verify)
