"""Scratch for payloads: what lies where, what goes back, and a disk that is full."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2pdiloco.adapters.spool import Spool
from p2pdiloco.errors import InvariantViolation, StorageError


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path, most_bytes=3000, spare_bytes=0)
    yield made
    made.close()


def content(scratch: object, size: int) -> bytes:
    out = bytearray(size)
    scratch.read(0, memoryview(out))  # type: ignore[attr-defined]
    return bytes(out)


def file_bytes(spool: Spool) -> int:
    assert spool.fits(0)  # what nobody refers to any more is given back
    spool._writer.submit(int).result()  # what was asked for before is done
    return os.fstat(spool._file.fileno()).st_size


async def test_payloads_lie_beside_each_other_and_give_their_place_back(spool: Spool) -> None:
    payloads = [bytes([i]) * 1000 for i in range(3)]
    held = [spool.take(1000) for _ in payloads]
    for scratch, payload in zip(held, payloads, strict=True):
        await scratch.write(500, memoryview(payload)[500:])
        await scratch.write(0, memoryview(payload)[:500])
    assert [content(scratch, 1000) for scratch in held] == payloads
    assert spool.held_bytes == 3000 and not spool.fits(1)
    del held[1]
    assert spool.held_bytes == 2000 and spool.fits(1000) and not spool.fits(1001)
    between = spool.take(1000)
    await between.write(0, memoryview(b"x" * 1000))
    assert content(held[0], 1000) == payloads[0] and content(held[1], 1000) == payloads[2]
    assert content(between, 1000) == b"x" * 1000
    del between, scratch
    held.clear()
    assert spool.held_bytes == 0 and file_bytes(spool) == 0


async def test_the_end_of_the_file_goes_back_to_the_disk(spool: Spool) -> None:
    first, second = spool.take(1000), spool.take(2000)
    await first.write(0, memoryview(b"a" * 1000))
    await second.write(0, memoryview(b"b" * 2000))
    assert file_bytes(spool) == 3000
    del second
    assert file_bytes(spool) == 1000 and content(first, 1000) == b"a" * 1000


async def test_nobody_writes_into_another_payload(spool: Spool) -> None:
    first, _second = spool.take(1000), spool.take(1000)
    with pytest.raises(InvariantViolation):
        await first.write(999, memoryview(b"xx"))
    with pytest.raises(InvariantViolation):
        first.read(999, memoryview(bytearray(2)))


async def test_a_full_disk_is_told_and_a_nearly_full_one_takes_nothing(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    scratch = spool.take(1000)
    monkeypatch.setattr(Spool, "_put", full)
    with pytest.raises(StorageError, match="the disk is full"):
        await scratch.write(0, memoryview(b"x"))
    careful = Spool(tmp_path, spare_bytes=1 << 60)
    assert not careful.fits(1)
    careful.close()


async def test_what_was_promised_to_others_is_not_promised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, size = Spool(tmp_path, spare_bytes=0), 1 << 20
    written = lambda: 512 * os.fstat(spool._file.fileno()).st_blocks  # noqa: E731
    free = lambda _: SimpleNamespace(f_bavail=3 * size - written(), f_frsize=1)  # noqa: E731
    monkeypatch.setattr(os, "fstatvfs", free)
    assert spool.fits(3 * size) and not spool.fits(3 * size + 1)
    first, second = spool.take(size), spool.take(size)
    assert spool.fits(size) and not spool.fits(size + 1), "nothing is written, two thirds are promised"
    await first.write(0, memoryview(bytearray(size)))
    assert spool.fits(size) and not spool.fits(size + 1)
    del first
    assert spool.fits(2 * size) is False and spool.fits(size), "its place is used again, and takes no more"
    spool.close()
    del second


async def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    scratch = spool.take(10)
    await scratch.write(0, memoryview(b"0123456789"))
    assert not await asyncio.to_thread(os.listdir, tmp_path), "the file has no name: it goes with the process"
    spool.close()
    del scratch  # later than the spool: nothing happens


async def test_what_was_cut_off_is_told(spool: Spool) -> None:
    scratch = spool.take(1000)
    await scratch.write(0, memoryview(b"x" * 10))
    with pytest.raises(StorageError, match="shorter"):
        scratch.read(0, memoryview(bytearray(11)))


async def test_a_payload_that_the_collector_finds_waits_for_no_executor(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors hold locks in `submit` that are not reentrant: a finalizer that submits there hangs."""
    submit, depths = spool._writer.submit, [0]

    def collecting(*arguments: object) -> object:
        depths.append(depths[-1] + 1)
        gc.collect()
        depths.append(depths[-1] - 1)
        return submit(*arguments)  # type: ignore[arg-type]

    kept = spool.take(500)
    cycle: list[object] = [spool.take(1000)]
    cycle.append(cycle)
    monkeypatch.setattr(spool._writer, "submit", collecting)
    gc.disable()
    try:
        del cycle
        await kept.write(0, memoryview(bytes(500)))
    finally:
        gc.enable()
    assert depths == [0, 1, 0], "the collector ran inside of a submit, and nothing was submitted there"
    monkeypatch.undo()
    assert spool.held_bytes == 500 and file_bytes(spool) == 500
