#!/usr/bin/env python3
"""Cost of a run's history on one core: bytes on the disk, labels counted a second, also with signatures.

    .venv/bin/python scripts/bench/disk/bench_credits.py [--labels 100000] [--json FILE]

Versions of one fragment as a keeper has them, every label signed with its learner's key. Rates are of
processor time, and of one reading from the disk.
"""

from __future__ import annotations

import secrets
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what benchmarks share

from msgspec.structs import replace

from benchkit import arguments, finish, processor_s
from p2pdiloco.core.api.types import NEVER, WHOLE_RUN, Contributor, Stamp, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.credits import HeadRef, HistoryRecord, HistoryStore, Signatures, count_line
from p2pdiloco.identity import Identity, verify

RUN = secrets.token_hex(32)
START = Stamp(1_800_000_000_000, 0)
BEGAN_S, VERSION_S = 1_800_000_000, 30
LEARNERS = 1, 10, 100, 1000
TOKENS, STEPS = 500_000, 500


def next_version(parent: VersionHeader, keys: list[Identity]) -> SignedVersion:
    """A version to which all contribute; its digests are noise, as real ones are."""
    number, parts = parent.number + 1, []
    for key in keys:
        after = replace(START, sequence=number - 1) if number > 1 else NEVER
        stamp = replace(START, sequence=number)
        tokens = TOKENS + secrets.randbelow(TOKENS)
        part = Contributor(key.peer_id, stamp, tokens, STEPS, after, secrets.token_bytes(32))
        work = signed_bytes("work", part.work(RUN, 0))
        parts.append(replace(part, signature=key.sign(work)))
    header = replace(
        parent,
        number=number,
        parent=parent.digest(),
        term=number // 64,
        syncer=keys[0].peer_id,
        tokens=parent.tokens + sum(part.tokens for part in parts),
        state_digest=secrets.token_bytes(32),
        update_digest=secrets.token_bytes(32),
        contributors=tuple(parts),
        table=secrets.token_bytes(32),
    )
    return SignedVersion(header, keys[0].sign(signed_bytes("version", header)))


def measure(learners: int, labels: int) -> dict[str, float]:
    """Figures of a history with so many learners in each version."""
    keys = [Identity.generate() for _ in range(learners)]
    header = VersionHeader(
        RUN, WHOLE_RUN, 0, 0, bytes(32), 0, RUN, 0, bytes(32), bytes(32), 1 << 24, "int8", ()
    )
    versions = max(1, labels // learners)
    with tempfile.TemporaryDirectory() as folder:
        history = HistoryStore(Path(folder))
        for _ in range(versions):
            version = next_version(header, keys)
            header = version.header
            history.append(HistoryRecord(BEGAN_S + VERSION_S * header.number, version))
        history.close()
        nbytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        tip, counted = HeadRef.of(header.head()), versions * learners
        plain_s = processor_s(lambda: count_line(history, RUN, 0, tip))
        signatures = Signatures(RUN, 0, verify)
        checked_s = processor_s(lambda: count_line(history, RUN, 0, tip, signatures=signatures))
    return {
        "labels": counted,
        "bytes_per_label": nbytes / counted,
        "bytes_per_version": nbytes / versions,
        "counted_per_s": counted / plain_s,
        "verified_per_s": counted / checked_s,
    }


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--labels", type=int, default=100_000)
    args = parser.parse_args()
    print("learners  bytes a label  bytes a version  counted/s  with signatures/s")
    figures: dict[str, object] = {}
    for learners in LEARNERS:
        found = measure(learners, args.labels)
        print(
            f"{learners:8d}{found['bytes_per_label']:15.0f}{found['bytes_per_version']:17.0f}"
            f"{found['counted_per_s']:11.0f}{found['verified_per_s']:19.0f}",
            flush=True,
        )
        figures[str(learners)] = found
    finish("credits", figures, args.json)


if __name__ == "__main__":
    main()
