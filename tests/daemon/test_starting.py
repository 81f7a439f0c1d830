"""Start of a peer's transport: what it looks at before, and what it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.daemon.network import discovery
from p2pdiloco.daemon.program import begin
from p2pdiloco.daemon.run_files.known_runs import save_own_addresses
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity

ME = Identity.from_seed(bytes(32)).peer_id
TWIN = f"/ip4/192.0.2.7/tcp/7/p2p/{ME}"


class Starting:
    """As much of a transport as a start takes. Beside a twin its identity answers everywhere."""

    peer_id = ME
    listening = ("/ip4/0.0.0.0/tcp/31000",)

    def __init__(self, has_twin: bool) -> None:
        self._has_twin = has_twin
        self.started = False

    async def answers_at(self, *_: object) -> bool:
        return self._has_twin

    async def start(self, *_: object) -> None:
        self.started = True


@pytest.mark.parametrize("is_kept", [True, False])
async def test_nothing_is_started_beside_a_twin_at_the_last_or_at_a_joined_address(
    is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(discovery, "TWINS_PAUSE_S", 0.0)
    if is_kept:
        save_own_addresses(tmp_path, [TWIN])
    settings = BootstrapSettings(data_dir=tmp_path, join=() if is_kept else (TWIN,))
    transport: Any = Starting(has_twin=True)
    with pytest.raises(UserError, match=r"at 192\.0\.2\.7 port 7"):
        await begin(transport, transport, settings)
    assert not transport.started


async def test_who_starts_keeps_its_port(tmp_path: Path) -> None:
    save_own_addresses(tmp_path, [TWIN])
    transport: Any = Starting(has_twin=False)
    await begin(transport, transport, BootstrapSettings(data_dir=tmp_path))
    assert transport.started and (tmp_path / discovery.FILE).read_text() == "31000\n"
