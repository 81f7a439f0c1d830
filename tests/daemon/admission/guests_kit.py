"""A run that takes members by invite or list, its owner, and its members on an in-memory network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from daemon_kit import QUICK, Neighbourhood, QuickMember, Rogue, peer_of_folder

from p2pdiloco.config.manifest import AdmissionSection
from p2pdiloco.config.presets import for_run
from p2pdiloco.core.api.papers import Admission
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.notice import Invite, Notice, grant, signed
from p2pdiloco.daemon.run_files.known_runs import RunLink, WaysIn, change_ways, encode_link
from p2pdiloco.daemon.run_files.run import sign_run
from p2pdiloco.daemon.wire import AdmissionQuery, AdmissionShown, GiveNotice, NoticeAnswer, ShowAdmission
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import render_toml

NEVER_S = 0


class ClosedNeighbourhood(Neighbourhood):
    """Members come with an invite, unless they are told not to."""

    def __init__(
        self, folder: Path, mode: str = "invite", uses: int = 9, seats: Sequence[str] = ("a",)
    ) -> None:
        super().__init__(folder, QUICK)
        self.owner = Identity.generate()
        peers = [peer_of_folder(folder / seat) for seat in seats]
        section = msgspec.convert({"mode": mode, "seats": peers}, AdmissionSection)
        manifest = msgspec.structs.replace(for_run("micro", "closed"), admission=section)
        path = folder / "closed.toml"
        path.write_text(render_toml(manifest))
        self.run = sign_run(path, self.owner)[0]
        self.invite = self.make_invite(uses=uses)

    def make_invite(self, uses: int = 9, expires: int = NEVER_S) -> Invite:
        key = Identity.generate()
        return Invite(grant(self.run.id, key.peer_id, expires, uses, self.owner), key, ())

    def notice(self, sequence: int, **lists: tuple[object, ...]) -> Notice:
        return signed(Notice(self.run.id, sequence, **lists), self.owner)  # type: ignore[arg-type]

    async def member(
        self, name: str, genesis: bool = False, trained: bool = True, **more: Any
    ) -> QuickMember:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        invite = more.pop("invite", self.invite)
        if invite is not None:
            word = encode_link(RunLink(self.run.id, (), self.owner.peer_id, "", invite))
            change_ways(folder, WaysIn.given, word)
        return await super().member(name, genesis, trained, **more)


async def ask(rogue: Rogue, member: QuickMember, query: AdmissionQuery) -> bytes:
    return await rogue.transport.send(member.transport.peer_id, wire.QUERY + wire.encode(query), 2.0)


async def show(rogue: Rogue, member: QuickMember, shown: Admission | None) -> AdmissionShown:
    return wire.decode(await ask(rogue, member, ShowAdmission(rogue.run.id, shown, 0)), AdmissionShown)


async def give(rogue: Rogue, member: QuickMember, notice: Notice) -> NoticeAnswer:
    return wire.decode(await ask(rogue, member, GiveNotice(notice)), NoticeAnswer)
