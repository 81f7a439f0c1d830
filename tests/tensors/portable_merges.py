"""Program that prints digests of merges, for each number of threads: `test_codec` compares those of
processes with different vector instructions."""

import json

import numpy as np
import torch

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.core.api.types import MergeLimits
from p2pdiloco.hashing import content_digest
from p2pdiloco.tensors.codecs import CODECS, codec
from p2pdiloco.tensors.layout import FragmentLayout, Piece
from p2pdiloco.tensors.merge import Input
from p2pdiloco.tensors.vault import Vault

MANY = (1, 3, 63, 64, 65, 1000, 4097, 33_001, 70_003)
LARGE = (1_000_000, 7)
WORK = ((8000, 24), (5000, 24, 17), (9000, 11), (7000, 30, 1))
"""Tokens, inner steps, trust weight where it is not all."""
LIMITS = MergeLimits(40_000, 0.3)
"""The third contribution is longer: it is cut."""


def layout_of(sizes: tuple[int, ...]) -> FragmentLayout:
    """Pieces of these sizes; every fourth is of an embedding."""
    ends = np.cumsum(sizes).tolist()
    pieces = [
        Piece(f"p{i}", 0, end - size, size, i % 4 == 2)
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return FragmentLayout(0, ends[-1], tuple(pieces))


def contributions(name: str, numel: int) -> list[bytearray]:
    """Payloads; torch's own normal numbers are not the same everywhere."""
    drawn = np.random.default_rng(7).standard_normal((len(WORK), numel), dtype=np.float32)
    for n in range(1, len(WORK)):
        drawn[n] += np.float32(n) * drawn[0]  # so that they agree, each as far as it does
    sizes = (3e-4, 7e-4, 5e-3, 1e-4)
    return [codec(name).encode(torch.from_numpy(d).mul_(size)) for d, size in zip(drawn, sizes, strict=True)]


def digests(name: str, sizes: tuple[int, ...], merge: str) -> list[str]:
    """Of the contributions, of a merge of all, and of one of which two groups make partials."""
    layout = layout_of(sizes)
    vault = Vault([layout], OuterSection(merge=merge), 24, name, name)
    generator = np.random.default_rng(1)
    vault.load_initial(
        {p.tensor: torch.from_numpy(generator.random(p.numel, np.float32)) for p in layout.pieces}
    )
    payloads = contributions(name, layout.numel)
    inputs = [Input(payload, *work, votes=True) for payload, work in zip(payloads, WORK, strict=True)]
    found = [content_digest(payload) for payload in payloads]
    made = vault.merge(0, 1, inputs, limits=LIMITS)
    assert 2 in made.found.cut, "too long"
    assert len(set(made.found.scores)) > 2, "they are measured"
    found.append(repr((made.found.lengths, made.found.scores)).encode())
    found += [made.update_digest, made.state_digest]
    parts = [vault.merge_partial(0, group, (), LIMITS) for group in (inputs[:2], inputs[2:])]
    found += [part.digest for part in parts]
    both = vault.merge(0, 1, inputs[:1], [part.payload for part in parts], 30, LIMITS)
    found += [both.update_digest, both.state_digest, repr(both.norm).encode()]
    return [digest.hex() for digest in found]


def main() -> None:
    """Print the processor's level in this process, and what it makes with one thread and with two."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        cases = {f"{name}, many": digests(name, MANY, "rda") for name in sorted(CODECS)}
        cases["int8, large"] = digests("int8", LARGE, "rda")
        cases["int8, mean"] = digests("int8", MANY, "mean")
        found.append(cases)
    print(json.dumps([torch.backends.cpu.get_cpu_capability(), *found]))


if __name__ == "__main__":
    main()
