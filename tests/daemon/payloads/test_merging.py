"""Outer steps that the core asks for: what it hears of our own contribution."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from daemon_kit import signed_run

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Contributor, Stamp
from p2pdiloco.daemon import driver
from p2pdiloco.daemon.driver import Merging
from p2pdiloco.daemon.payloads import Compute, Tickets
from p2pdiloco.daemon.run_files.run import open_run
from p2pdiloco.identity import Identity
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import digest_of
from p2pdiloco.tensors.vault import Vault


class Merger:
    """The worker, and what it told the core."""

    def __init__(self, folder: Path) -> None:
        run, vault = open_run(signed_run(folder).signed, Identity.generate())
        self.compute, self.tickets = Compute(vault, None), Tickets()
        self.heard: list[Any] = []
        self.damages = False
        """True: an update is damaged here before it is applied."""
        self._merging = Merging(self.compute, self.tickets, self.heard.append)
        self._numel = run.layouts[0].numel

    def put(self, value: float) -> int:
        """Ticket of an update, or a contribution, that is this everywhere."""
        return self.tickets.put(codec("int8").encode(torch.full((self._numel,), value)))

    def input(self, value: float) -> ef.MergeInput:
        """A contribution, as its learner labelled it."""
        ticket = self.put(value)
        digest = digest_of(self.tickets.payload(ticket))
        return ef.MergeInput(Contributor("p1", Stamp(1, 1), 40, 4, payload_digest=digest), ticket)

    async def merge(self, *inputs: ef.MergeInput) -> ev.Merged | ev.MergeFailed:
        await self._merging.merge(ef.Merge(0, 1, 1, inputs, (), 24))
        return self.heard.pop()  # type: ignore[no-any-return]

    async def merge_partial(self, *inputs: ef.MergeInput) -> ev.PartialMerged | ev.PartialFailed:
        await self._merging.merge_partial(ef.MergePartial(0, "g", 1, inputs, ()))
        return self.heard.pop()  # type: ignore[no-any-return]

    async def apply(self, update: int, own: int | None, stated: bytes = b"") -> ev.UpdateApplied:
        digest = digest_of(self.tickets.payload(update))
        if self.damages:
            self.tickets.get(update)[-1] ^= 1  # type: ignore[index]
        await self._merging.apply(ef.ApplyUpdate(0, 1, update, 24, None, own, stated, digest))
        applied: ev.UpdateApplied = self.heard.pop()
        return applied


@pytest.fixture
def merger(tmp_path: Path) -> Any:
    made = Merger(tmp_path)
    yield made
    made.compute.close()


async def test_the_core_hears_how_our_own_contribution_goes_with_the_update(merger: Merger) -> None:
    update = merger.put(0.5)
    alone = await merger.apply(update, None)
    assert alone.cosine is None and not alone.unsound
    for value, wanted in ((0.1, 1.0), (-0.3, -1.0)):
        applied = await merger.apply(update, merger.put(value))
        assert applied.cosine == pytest.approx(wanted) and applied.state_digest == alone.state_digest


async def test_what_cannot_be_compared_does_not_stop_the_step(merger: Merger) -> None:
    update = merger.put(0.5)
    spilled, damaged = merger.put(0.5), merger.tickets.put(bytearray(b"damaged"))
    merger.tickets.spilled(spilled, lambda _ticket: None)
    for own in (merger.put(0.0), spilled, damaged):
        applied = await merger.apply(update, own)
        assert applied.cosine is None and applied.state_digest and not applied.unsound


async def test_nothing_is_merged_that_was_damaged_here_since_it_came(merger: Merger) -> None:
    """Under our signature it would be a false merge, and cost us our place for good."""
    whole, damaged = merger.input(0.5), merger.input(0.25)
    merger.tickets.get(damaged.ticket)[-1] ^= 1  # type: ignore[index]
    for failed in (await merger.merge(whole, damaged), await merger.merge_partial(whole, damaged)):
        assert isinstance(failed, ev.MergeFailed | ev.PartialFailed)
        assert failed.unusable == ((damaged.ticket, Verdict.DAMAGED),)
    await merger._merging.drop_spare(ef.DropSpare(0))
    assert isinstance(await merger.merge(whole), ev.Merged)
    assert isinstance(await merger.merge_partial(whole), ev.PartialMerged)


# --- a state other than its header says -------------------------------------------------------------------


async def test_a_step_with_another_result_is_made_once_more_and_then_certain(merger: Merger) -> None:
    update = merger.put(0.5)
    right = (await merger.apply(update, None)).state_digest
    assert not (await merger.apply(update, None, right)).certain, "nothing is to be told"
    false = await merger.apply(update, None, bytes(32))
    assert false.certain and false.state_digest == right


async def test_a_step_that_goes_wrong_once_is_made_again(
    merger: Merger, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, apply, made = merger.put(0.5), Vault.apply, []
    right = (await merger.apply(update, None)).state_digest

    def first_wrong(self: Vault, *job: Any) -> bytes:
        made.append(apply(self, *job))
        return bytes(32) if len(made) == 1 else made[-1]

    monkeypatch.setattr(Vault, "apply", first_wrong)
    applied = await merger.apply(update, None, right)
    assert len(made) == 2 and applied.state_digest == right and not applied.certain


@pytest.mark.parametrize("fault", ["state", "update", "arithmetic"])
async def test_a_fault_of_ours_makes_nothing_certain(
    merger: Merger, monkeypatch: pytest.MonkeyPatch, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Else whose memory was damaged would accuse every honest syncer."""
    if fault == "state":
        merger.compute.vault.theta(0)[0] += 1
    merger.damages = fault == "update"
    if fault == "arithmetic":
        monkeypatch.setattr(driver, "steps_as_everywhere", lambda: False)
    assert not (await merger.apply(merger.put(0.5), None, bytes(32))).certain
    words = "calculates otherwise" if fault == "arithmetic" else "was damaged"
    assert words in caplog.text


async def test_nothing_is_published_over_a_state_that_was_damaged_here(merger: Merger) -> None:
    """Under our signature it would be a false state, and cost us our place for good."""
    theta = merger.compute.vault.theta(0)
    whole = theta[0].clone()
    theta[0] += 1
    failed = await merger.merge(merger.input(0.5))
    assert isinstance(failed, ev.MergeFailed) and not failed.unusable
    assert "damaged in memory" in failed.reason
    await merger._merging.drop_spare(ef.DropSpare(0))
    theta[0] = whole
    assert isinstance(await merger.merge(merger.input(0.5)), ev.Merged)


@pytest.mark.parametrize("exact", [True, False])
async def test_a_machine_that_calculates_otherwise_stands_for_no_office(
    merger: Merger, monkeypatch: pytest.MonkeyPatch, exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its versions would be false for all others, and cost it its place though it is honest."""
    monkeypatch.setattr(driver, "steps_as_everywhere", lambda: exact)
    await merger._merging.examine()
    assert merger.heard == ([] if exact else [ev.Miscalculates()])
    assert ("it trains, and stands for no office" in caplog.text) is not exact
