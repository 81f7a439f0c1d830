"""Holdings of nodes: versions that they have, by their logs or on their disks, and where two differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from p2pdiloco.demo.chronicle import NodeTrace


class Holdings(Struct, frozen=True):
    """Versions that somebody holds: fragment -> number -> digest (of the version's header)."""

    name: str
    versions: dict[int, dict[int, str]]


def conflicts(holdings: Sequence[Holdings]) -> tuple[list[str], int]:
    """Versions that two of them hold with different digests, in words; and how many were compared."""
    found, compared = [], 0
    seen: dict[tuple[int, int], dict[str, list[str]]] = {}
    for held in holdings:
        for fragment, chain in held.versions.items():
            for number, digest in chain.items():
                seen.setdefault((fragment, number), {}).setdefault(digest, []).append(held.name)
    for (fragment, number), by_digest in sorted(seen.items()):
        compared += sum(map(len, by_digest.values())) > 1
        if len(by_digest) > 1:
            camps = " against ".join(", ".join(names) for names in by_digest.values())
            found.append(f"version {number} of fragment {fragment} differs: {camps}")
    return found, compared


def of_traces(traces: Iterable[NodeTrace]) -> list[Holdings]:
    """List what the nodes hold by their logs."""
    return [Holdings(trace.name, trace.chains) for trace in traces]
