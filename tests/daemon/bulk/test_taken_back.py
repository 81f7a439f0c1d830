"""False versions that are taken back: the true update is kept, and whoever has it makes the same repair."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch
from audit_kit import AuditNode, AuditTown, memory_town
from msgspec.structs import replace

from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.bulk import merge_audits
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import codec

SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING


@pytest.fixture
async def town(tmp_path: Path) -> AsyncIterator[AuditTown]:
    async with await memory_town(tmp_path) as made:
        yield made


async def lie(town: AuditTown, *found_by: AuditNode) -> SignedVersion:
    """A version of noise, which these hold and find false."""
    run = town.syncer.run
    noise = torch.randn(run.layouts[0].numel, generator=torch.Generator().manual_seed(77)) * 0.01
    update = codec(run.manifest.codec.update).encode(noise)
    false = await town.version(update_digest=content_digest(update))
    for node in found_by:
        node.chain.updates[1] = false, update
        assert await node.audit(false) is DIFFERENT
    return false


async def test_who_finds_a_version_false_keeps_what_it_should_have_been(town: AuditTown) -> None:
    honest, false = await town.version(), await lie(town, town.auditor)
    kept = town.auditor.transfers.true_updates
    correction = await kept.correction(false)
    assert correction is not None
    assert content_digest(correction.true) == honest.header.update_digest
    assert content_digest(correction.false) == false.header.update_digest
    assert kept.held_bytes == len(correction.true)
    assert await kept.correction(honest) is None and await kept.correction(None) is None
    town.auditor.chain.updates[1] = honest, correction.true
    assert await kept.correction(false) is None, "another chain's"


async def test_the_next_version_has_the_difference_and_whoever_found_it_audits_that(town: AuditTown) -> None:
    syncer, other, late = town.syncer, town.auditor, town.learners[0]
    false = await lie(town, syncer, other)
    plain, mended = await town.version(), await town.version(mends=false)
    assert mended.header.repairs == false.header.digest()
    assert mended.header.update_digest != plain.header.update_digest
    assert await other.audit(mended, repairs=false) is SAME
    assert await late.audit(mended, repairs=false) is MISSING, "it never found that false"
    assert await other.audit(mended, repairs=None) is MISSING, "nor has it the version"
    claims = {"repairs": false.header.digest()}
    assert await other.audit(await town.version(**claims), repairs=false) is DIFFERENT, "no repair is in it"


async def test_where_something_is_gone_nothing_is_repaired(town: AuditTown) -> None:
    false = await lie(town, town.syncer)
    town.syncer.transfers.true_updates.give_up()
    plain, mended = await town.version(), await town.version(mends=false)
    assert mended.header.repairs is None and mended.header.update_digest == plain.header.update_digest


async def test_damaged_memory_of_ours_takes_nothing_back_and_accuses_nobody(town: AuditTown) -> None:
    syncer, other = town.syncer, town.auditor
    false = await lie(town, syncer, other)
    plain, mended = await town.version(), await town.version(mends=false)
    for node in (syncer, other):
        correction = await node.transfers.true_updates.correction(false)
        assert correction is not None and isinstance(correction.true, bytearray)
        correction.true[1000] ^= 0x40
    assert await other.audit(mended, repairs=false) is MISSING
    unmended = await town.version(mends=false)
    assert unmended.header.repairs is None and unmended.header.update_digest == plain.header.update_digest


async def test_what_states_falsely_but_merges_rightly_needs_no_repair(town: AuditTown) -> None:
    honest = await town.version()
    first, *rest = honest.header.contributors
    parts = {"contributors": (replace(first, length=7.0), *rest)}
    assert await town.auditor.audit(await town.version(**parts)) is DIFFERENT
    assert not town.auditor.transfers.true_updates.held_bytes


async def test_true_updates_are_bounded(town: AuditTown, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = town.auditor.transfers.true_updates
    monkeypatch.setattr(merge_audits, "MOST_BYTES", 25)
    for name in (b"a", b"b", b"c"):
        kept.keep(name, bytearray(10), bytes(32))
    assert [kept.has(name) for name in (b"a", b"b", b"c")] == [False, True, True]
    monkeypatch.setattr(merge_audits, "MOST_KEPT", 1)
    kept.keep(b"d", bytearray(1), bytes(32))
    assert kept.held_bytes == 1
