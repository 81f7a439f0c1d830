"""Targets of the fuzzer: what it begins from is accepted, and damage is refused with what is allowed."""

from __future__ import annotations

import random

import pytest

from fuzz.targets import Target, targets

TABLE = targets()


@pytest.mark.parametrize("name", [name for name in TABLE if name not in ("framing", "record", "update")])
def test_seeds_are_accepted(name: str) -> None:
    assert TABLE[name].seeds
    for seed in TABLE[name].seeds:
        TABLE[name].decode(seed)


@pytest.mark.parametrize("name", TABLE)
def test_damage_is_refused_with_what_is_allowed(name: str) -> None:
    target, rng, refused = TABLE[name], random.Random(name), 0
    for _ in range(40):
        data = bytearray(rng.choice(list(target.seeds)))
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        refused += not _accepted(target, bytes(data[: rng.randint(0, len(data))]))
    assert refused or not target.allowed


def _accepted(target: Target, data: bytes) -> bool:
    try:
        target.decode(data)
    except target.allowed:
        return False
    return True
