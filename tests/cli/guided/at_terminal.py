"""`p2pdiloco` without a network and without a daemon: the run that is looked at is one of its own, and a node
that starts says with which settings.
"""

from __future__ import annotations

import sys
import tomllib
import types

from p2pdiloco.adapters.multiaddrs import Nearby
from p2pdiloco.cli import guide
from p2pdiloco.cli.main import main
from p2pdiloco.config.manifest import run_id, sign_manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.run_files.known_runs import PublishedRun
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import manifest_from_table, render_toml

OWNER = Identity.from_seed(bytes(32))

NEARBY = Nearby(OWNER.peer_id, (f"/ip4/192.0.2.9/tcp/1/p2p/{OWNER.peer_id}",), ("ab" * 6,))


def run_called(name: str) -> PublishedRun:
    """A run of this name; `own-…`: on each node's own data, `closed-…`: by invite, `listed-…`: by list."""
    text = render_toml(for_run("micro", name))
    if name.startswith("own-"):
        text = text.replace('source = "embedded"', 'source = "files"')
    for beginning, mode in (("closed-", "invite"), ("listed-", "list")):
        if name.startswith(beginning):
            text = text.replace('mode = "open"', f'mode = "{mode}"')
    manifest = manifest_from_table(tomllib.loads(text), name)
    signed = sign_manifest(manifest, bytes(32), OWNER, OWNER.peer_id)
    return PublishedRun(id=run_id(signed), signed=signed, manifest=manifest)


def look_at(settings: NodeSettings) -> PublishedRun:
    if settings.run == "nowhere":
        raise UserError("these peers know no run nowhere")
    return run_called(settings.run if len(settings.run) < 64 else "ours")


def run_node(settings: NodeSettings) -> int:
    print(f"STARTED {settings.name} {settings.max_upload} {settings.yes} {settings.run} {settings.data_dir}")
    return 0


if __name__ == "__main__":
    guide.manifest_to_join = look_at  # type: ignore[assignment]
    guide.look_nearby = lambda: [NEARBY]  # type: ignore[assignment]
    module = types.ModuleType("p2pdiloco.daemon.start")
    module.run_node = run_node  # type: ignore[attr-defined]
    sys.modules["p2pdiloco.daemon.start"] = module
    main()
