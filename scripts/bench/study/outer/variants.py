"""Outer steps and an encoding that production does not have, for studies: a swarm whose global state makes
them, and what successive merged updates have in common.

With delta the merged update (base - local) and m' = mu m + delta, all steps here are

    theta' = theta - eta s d,    d = delta + mu q m'

Production's has s = q = 1 and a mu that warms up. Along delta d is A times as long, A = <d, delta> / <delta,
delta> (1 + mu + mu^2 c for q = 1, with c = <m, delta> / <delta, delta>). Gain-normalised Nesterov limits it:
s = min(1, (1 + mu) / A). The correction q = 1 / (1 - mu^t) of version t takes the place of the warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.tensors.codecs import MIN_PEAK, Buffer, Floats, codec, tiles
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.outer_update import OwnContributions, UpdateMaker, momentum_at, without_lookahead
from p2pdiloco.tensors.vault import Vault
from study.computing import FP32
from study.setting import HELDOUT_TOKENS, Setting
from study.virtual import Circumstances, Virtual

CHUNK = 4096
"""Elements among which the largest are chosen, as of the codec topk."""


class Variant(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Differences from production. The defaults are production's outer step."""

    gain: bool = False
    """s = min(1, (1 + mu) / A); else 1."""
    corrected: bool = False
    """q = 1 / (1 - mu^t) and the whole mu from the first merge on; else q = 1 and the usual warm-up."""
    top: float = 0.0
    """Share of a contribution's elements that are sent, with two bits and error feedback; 0: the codec of
    the setting."""


class Seen(Struct, frozen=True):
    """Observations of one merge."""

    fragment: int
    number: int
    cosine: float
    """Cosine of this merged update and the fragment's last; NaN for the first."""
    gain: float
    """A."""
    factor: float
    """s."""


class TopTwoBits(Floats):
    """The largest elements of each chunk as the codec topk rounds them: their signs, and one magnitude for
    the larger half of them, one for the smaller. Payloads are plain fp32: only loss is studied, not bytes."""

    feedback = True

    def __init__(self, share: float) -> None:
        super().__init__("fp32", torch.float32)
        self._half = max(1, round(share * CHUNK / 2))

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        sent = torch.zeros_like(source)
        for rows, at, real in tiles(source, CHUNK):
            kept = min(2 * self._half, max(2, real))
            tops, index = rows.abs().topk(kept, dim=1)
            means = [half.mean(dim=1, keepdim=True).expand_as(half) for half in tops.chunk(2, dim=1)]
            values = torch.cat(means, dim=1) * rows.gather(1, index).sign()
            values.masked_fill_(values.abs() < MIN_PEAK, 0.0)
            rounded = torch.zeros_like(rows).scatter_(1, index, values).view(-1)[:real]
            sent[at * CHUNK : at * CHUNK + real] = rounded
        super()._encode(sent, peak, payload)


class VariantVault(Vault):
    """Global state that makes a variant's outer steps, and learners' state that sends its encoding."""

    def __init__(self, manifest: Manifest, layouts: Sequence[FragmentLayout], variant: Variant) -> None:
        outer, sync, codecs = manifest.outer, manifest.sync, manifest.codec
        names = codecs.contribution, codecs.update
        super().__init__(layouts, outer, sync.inner_steps, *names, sync.keep_in_flight)
        self._variant = variant
        self.seen: list[Seen] = []
        self._last: dict[int, Tensor] = {}
        self._ahead: dict[int, float] = {}
        """s q mu of the version that was made last, of each fragment: its look-ahead is that times eta m'."""
        if variant.top:
            chosen = self._contribution = TopTwoBits(variant.top)
            self.own = OwnContributions(self.layouts, chosen, self._delta, self._decoded)
            scratch = self._delta, self._decoded, self._sums
            self.maker = UpdateMaker(self.layouts, self._period, chosen, codec(codecs.update), *scratch)

    def result(self, fragment: int) -> Tensor:
        """Parameters without this variant's look-ahead: fp32 [numel], new memory."""
        state = self._committed(fragment)
        ahead = self._ahead.get(fragment, 0.0)
        return without_lookahead(state.theta, state.momentum, self._outer.learning_rate, ahead)

    def _step(
        self, fragment: int, number: int, update: Buffer, longest_steps: int, stated: float | None = None
    ) -> bytes:
        state, spare = self._committed(fragment), self._spares[fragment]
        delta = self._decoded[: self.layouts[fragment].numel]
        self._update.decode(update, delta)
        mu, q = self._momentum(number)
        lacking = 1 - self._share(longest_steps)
        torch.mul(state.momentum, mu + lacking * (1 - mu), out=spare.momentum).add_(delta)
        step = (spare.momentum - lacking * state.momentum) * (mu * q) + delta
        square = float(delta.dot(delta)) or 1.0
        gain = float(step.dot(delta)) / square
        factor = min(1.0, (1 + mu) / gain) if self._variant.gain and gain > 0 else 1.0
        torch.sub(state.theta, step.mul_(self._outer.learning_rate * factor), out=spare.theta)
        self._ahead[fragment] = factor * mu * q
        self.seen.append(Seen(fragment, number, self._cosine(fragment, delta), gain, factor))
        return spare.seal(number)

    def _momentum(self, number: int) -> tuple[float, float]:
        """Give mu and q of the merge that makes version `number`."""
        mu = self._outer.momentum
        if self._variant.corrected:
            return mu, 1 / (1 - mu**number)
        return momentum_at(number, mu, self._outer.momentum_warmup_merges), 1.0

    def _cosine(self, fragment: int, delta: Tensor) -> float:
        last = self._last.get(fragment)
        self._last[fragment] = delta.clone()
        if last is None:
            return math.nan
        return float(torch.nn.functional.cosine_similarity(last, delta, dim=0))


class VariantSwarm(Virtual):
    """Swarm in virtual time with a variant's outer steps."""

    def __init__(self, setting: Setting, variant: Variant, heldout_tokens: int = HELDOUT_TOKENS) -> None:
        self._variant = variant
        world = Circumstances(delay=setting.delay, grace=setting.grace, seed=setting.seed)
        super().__init__(setting.manifest(), setting.learners, world, heldout_tokens, FP32)

    def vault(self) -> VariantVault:
        """An empty one of this run."""
        return VariantVault(self.manifest, self.layouts, self._variant)

    @property
    def seen(self) -> list[Seen]:
        """Merges of all fragments, in their order."""
        state = self.global_state
        return state.seen if isinstance(state, VariantVault) else []
