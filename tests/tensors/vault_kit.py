"""What tests of merges share: a small model, vaults at version 0, and pseudo-gradients."""

from __future__ import annotations

from typing import Any

import torch

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.vault import Vault

Specs = list[TensorSpec]


def vault_of(
    specs: Specs, contribution: str = "fp32", update: str = "fp32", fragments: int = 1, **more: Any
) -> Vault:
    """At version 0. `more`: `period`, `merge`, what all values are (`start`), and what a Vault takes."""
    outer, period = OuterSection(merge=more.pop("merge", "rda")), more.pop("period", 24)
    start: float | None = more.pop("start", None)
    vault = Vault(plan_fragments(specs, fragments), outer, period, contribution, update, **more)
    generator = torch.Generator().manual_seed(0)
    drawn = {spec.name: torch.randn(spec.shape, generator=generator) for spec in specs}
    vault.load_initial(drawn if start is None else {n: v.fill_(start) for n, v in drawn.items()})
    return vault


def advance(vault: Vault, number: int, update: bytes | bytearray, steps: int = 24) -> None:
    """Apply an update to fragment 0, and commit it."""
    vault.apply(0, number, update, steps)
    vault.commit(0, number)


def noise(seed: int, numel: int, size: float = 0.01) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * size
