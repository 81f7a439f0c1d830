"""Payloads that are not in memory: read in tiles, and merged to the same bits as from memory."""

from __future__ import annotations

import math

import pytest
import torch
from vault_kit import advance, noise, vault_of

from p2pdiloco.errors import RemoteError
from p2pdiloco.tensors import merge as payload_module
from p2pdiloco.tensors.codecs import CODECS, codec
from p2pdiloco.tensors.layout import TensorSpec
from p2pdiloco.tensors.merge import digest_of, parts_of

SPECS = [TensorSpec("emb", (300, 16), True), TensorSpec("w", (128, 65)), TensorSpec("b", (37,))]
NUMEL = sum(spec.numel for spec in SPECS)
TILE = 4096


class Elsewhere:
    """A payload that counts how much of it is read at a time."""

    def __init__(self, content: bytes | bytearray) -> None:
        self._content = bytes(content)
        self.nbytes = len(content)
        self.most = 0

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._content[offset : offset + len(into)]
        self.most = max(self.most, len(into))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "READ_TILE", TILE)


@pytest.mark.parametrize("numel", [1, 63, 4096, 4097, 8192 + 1024, 3 * 4096 + 1])
@pytest.mark.parametrize("name", sorted(CODECS))
def test_the_tiles_decode_to_what_the_whole_does(name: str, numel: int) -> None:
    chosen = codec(name)
    content = chosen.encode(noise(1, numel))
    whole, tiled = torch.empty(numel), torch.empty(numel)
    chosen.decode(content, whole)
    stops = []
    for part, start, stop in parts_of(chosen, Elsewhere(content), numel):
        chosen.decode(part, tiled[start:stop])
        stops.append(stop)
    assert torch.equal(whole, tiled)
    assert len(stops) == math.ceil(numel / TILE) and stops[-1] == numel


@pytest.mark.parametrize("name", sorted(CODECS))
def test_a_merge_of_them_has_the_same_bits(name: str) -> None:
    contents = [codec(name).encode(noise(seed, NUMEL)) for seed in range(3)]
    here, there = vault_of(SPECS, name), vault_of(SPECS, name)
    for one in (here, there):  # with a momentum, so that the number of inner steps counts
        advance(one, 1, codec("fp32").encode(noise(7, NUMEL)))
    partial = here.merge_partial(0, [(contents[0], 200, 4)], ())
    stored = [Elsewhere(content) for content in contents[1:]]
    part = Elsewhere(partial.payload)
    inputs = [(c, 100 + i, 4) for i, c in enumerate(contents[1:])]
    made = here.merge(0, 2, inputs, [partial.payload], 4)
    assert made == there.merge(0, 2, [(c, 100 + i, 4) for i, c in enumerate(stored)], [part], 4)  # type: ignore[misc]
    assert made.state_digest != there.merge(0, 2, inputs, [partial.payload], 24).state_digest
    tile = codec(name).encoded_bytes(TILE)
    assert all(s.most <= tile for s in stored), "no more than a tile at a time"


@pytest.mark.parametrize("name", sorted(CODECS))
def test_they_are_judged_as_in_memory(name: str) -> None:
    judge, chosen = vault_of(SPECS, name), codec(name)
    content = chosen.encode(noise(1, NUMEL))
    judge.check_payload(0, Elsewhere(content), name)
    with pytest.raises(RemoteError, match="wrong-size"):
        judge.check_payload(0, Elsewhere(content + b"\0"), name)
    wild = noise(1, NUMEL)
    wild[-1] = 1e30  # in the last tile
    with pytest.raises(RemoteError, match="out-of-range"):
        judge.check_payload(0, Elsewhere(chosen.encode(wild)), name)


def test_a_stored_partial_is_judged_by_its_label() -> None:
    judge = vault_of(SPECS, "int8")
    content = judge.merge_partial(0, [(codec("int8").encode(noise(1, NUMEL)), 200, 4)], ()).payload
    judge.check_partial(0, Elsewhere(content), [(200, 4)])
    with pytest.raises(RemoteError, match="wrong-weight"):
        judge.check_partial(0, Elsewhere(content), [(201, 4)])
    content[-4:] = b"\0\0\xc0\x7f"
    with pytest.raises(RemoteError, match="non-finite"):
        judge.check_partial(0, Elsewhere(content), [(200, 4)])


def test_digests_are_the_same_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(payload_module, "_READ_BYTES", 1000)
    content = bytes(range(256)) * 10
    assert digest_of(Elsewhere(content)) == digest_of(content)
