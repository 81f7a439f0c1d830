"""The history on the disk: what was appended is found, whatever a crash, a fork or a damaged file did."""

from __future__ import annotations

from pathlib import Path

import pytest
from credits_kit import chain, history_of, record, tip
from kit import child

from p2pdiloco import credits
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.credits import HistoryStore, decode_page, frame_record, read_frames
from p2pdiloco.errors import RemoteError


def numbers(history: HistoryStore, head: SignedVersion) -> list[int]:
    where = tip(head)
    return [r.version.header.number for r in history.down(0, where.number, where.digest)]


def test_a_line_is_found_over_many_segments(tmp_path: Path) -> None:
    versions = chain(60)
    history = history_of(tmp_path, versions)
    assert len(list(tmp_path.rglob("*.z"))) > 3 and len(list(tmp_path.rglob("*.log"))) <= 1
    for again in (history, HistoryStore(tmp_path)):
        where = tip(versions[-1])
        line = again.line(0, where.number, where.digest)
        assert line.is_whole and line.wanted == versions[0].header.parent
        assert [r.version for r in again.along(0, line)] == versions
    assert HistoryStore(tmp_path).find(0, 7, versions[6].header.digest()) == record(versions[6])
    assert HistoryStore(tmp_path).find(0, 7, versions[7].header.digest()) is None


def test_a_torn_end_is_cut_off_and_what_comes_then_is_sound(tmp_path: Path) -> None:
    versions = chain(6)
    history_of(tmp_path, versions[:5], 1 << 20)
    (log,) = tmp_path.rglob("*.log")
    whole = log.read_bytes()
    log.write_bytes(whole + (frame_record(record(versions[5])) + bytes(5000))[9:])
    history = HistoryStore(tmp_path)
    assert numbers(history, versions[4]) == [5, 4, 3, 2, 1]
    history.append(record(versions[5]))
    assert log.read_bytes() == whole + frame_record(record(versions[5]))
    assert numbers(HistoryStore(tmp_path), versions[5]) == [6, 5, 4, 3, 2, 1]


def test_a_crash_while_a_segment_is_compressed_costs_nothing(tmp_path: Path) -> None:
    versions = chain(4)
    history_of(tmp_path, versions, 1 << 20)
    (log,) = tmp_path.rglob("*.log")
    before = log.read_bytes()
    history = HistoryStore(tmp_path, segment_bytes=1)
    history.append(record(child(versions[-1].header)))
    log.write_bytes(before)  # as if it had not been deleted any more
    half = log.with_name("00000001-5-9.z.tmp")
    half.write_bytes(b"half of it")
    again = HistoryStore(tmp_path)
    assert numbers(again, versions[-1]) == [4, 3, 2, 1] and not log.exists() and not half.exists()
    again.append(record(versions[0]))
    assert len(list(tmp_path.rglob("*.log"))) == 1


def test_of_branches_the_line_of_the_head_counts(tmp_path: Path) -> None:
    versions = chain(10)
    other = [child(versions[4].header, syncer="p2", learners=("p2",))]
    for _ in range(7):
        other.append(child(other[-1].header, syncer="p2", learners=("p2",)))
    history = history_of(tmp_path, [*versions, *other])
    where = tip(other[-1])
    line = history.line(0, where.number, where.digest)
    assert [r.version for r in history.along(0, line)] == [*versions[:5], *other]


def test_what_is_missing_is_said_and_can_come_later(tmp_path: Path) -> None:
    versions = chain(30)
    history = history_of(tmp_path, versions[20:])
    where = tip(versions[-1])
    line = history.line(0, where.number, where.digest)
    assert (line.first, line.wanted) == (21, versions[19].header.digest()) and not line.is_whole
    for version in reversed(versions[:20]):
        history.append(record(version))
    assert history.line(0, where.number, where.digest).is_whole


def test_a_damaged_segment_is_as_if_it_were_not_there(tmp_path: Path) -> None:
    versions = chain(60)
    history_of(tmp_path, versions)
    damaged = sorted(tmp_path.rglob("*.z"))[1]
    damaged.write_bytes(damaged.read_bytes()[:40])
    history, where = HistoryStore(tmp_path), tip(versions[-1])
    first = history.line(0, where.number, where.digest).first
    assert 1 < first < 60
    for version in versions[:first]:
        history.append(record(version))
    assert history.line(0, where.number, where.digest).is_whole


def test_a_page_ends_when_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = [record(version) for version in chain(3)]
    monkeypatch.setattr(credits, "PAGE_BYTES", len(frame_record(kept[0])) + 1)
    assert credits.page_of(kept) == frame_record(kept[0]) + frame_record(kept[1])


@pytest.mark.parametrize("cut", [1, 5, 100])
def test_a_page_of_a_peer_is_whole_or_refused(cut: int) -> None:
    page = b"".join(frame_record(record(version)) for version in chain(3))
    assert len(decode_page(page)) == 3 and decode_page(b"") == []
    with pytest.raises(RemoteError, match="garbage"):
        decode_page(page[:-cut])
    changed = bytearray(page)
    changed[-cut] ^= 1
    with pytest.raises(RemoteError, match="garbage"):
        decode_page(bytes(changed))
    assert len(list(read_frames(page[:-cut]))) == 2
