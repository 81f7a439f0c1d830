from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity, verify


def test_created_once_and_private(tmp_path: Path) -> None:
    path = tmp_path / "new" / "identity.key"
    first = Identity.load_or_create(path)
    again = Identity.load_or_create(path)
    assert first.peer_id == again.peer_id and first.peer_id.startswith("12D3Koo")
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]  # no temporary file stays


def test_signature_is_bound_to_peer_and_message() -> None:
    ours, other = Identity.generate(), Identity.generate()
    signature = ours.sign(b"message")
    assert other.verify(ours.peer_id, b"message", signature)
    assert not other.verify(other.peer_id, b"message", signature)
    assert not other.verify(ours.peer_id, b"massage", signature)
    assert not other.verify(ours.peer_id, b"message", signature[:-1])
    assert not other.verify(ours.peer_id + " ", b"message", signature)  # one name per peer


@given(st.text(max_size=100), st.binary(max_size=80))
def test_malformed_is_false_never_an_exception(peer: str, signature: bytes) -> None:
    assert not verify(peer, b"message", signature)


def test_loose_permissions_are_refused_with_the_cure(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    Identity.load_or_create(path)
    path.chmod(0o644)
    with pytest.raises(UserError, match="0644") as refused:
        Identity.load_or_create(path)
    assert f"chmod 600 {path}" in refused.value.hint


@pytest.mark.parametrize("damage", ["short", "other key", "empty", "folder"])
def test_corrupt_file_is_refused_and_kept(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "identity.key"
    whole = Identity.generate().encoded()
    if damage == "folder":
        path.mkdir(mode=0o700)
    else:
        broken = {"short": whole[:-1], "other key": whole[:-1] + bytes([whole[-1] ^ 1]), "empty": b""}[damage]
        path.write_bytes(broken)
        path.chmod(0o600)
    with pytest.raises(UserError) as refused:
        Identity.load_or_create(path)
    assert str(path) in str(refused.value) and refused.value.hint
    assert path.exists()


def test_a_parent_that_is_a_file_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError):
        Identity.load_or_create(tmp_path / "file" / "identity.key")
