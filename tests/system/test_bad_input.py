"""What a person can get wrong at the keyboard, with the real programs: one clear sentence, status 2."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest
from system_kit import LOOPBACK, Swarm

from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.manifest import run_id, save_signed, sign_manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.identity import Identity

pytestmark = [pytest.mark.system, pytest.mark.timeout(240)]


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one sentence (and hint) of a command that must have ended with status 2 and no traceback."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith(("error: ", "hint: "))]
    assert len([line for line in lines if line.startswith("error: ")]) == 1, done.stderr
    return "\n".join(lines)


def test_addresses_that_lead_nowhere(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        bootstrap = swarm.bootstrap()
        here = bootstrap.address() or ""
        stranger = Identity.generate().peer_id
        node = ("node", "--data-dir", str(tmp_path / "n"), "--listen", LOOPBACK, "--log", "text", "--join")
        nobody = f"/ip4/127.0.0.1/tcp/9/p2p/{stranger}"
        said = complaint(swarm.command(*node, nobody))
        assert nobody in said and "connection refused" in said
        mistaken = here.replace(bootstrap.peer_id, stranger)
        assert "another peer id answers there" in complaint(swarm.command(*node, mistaken))
        assert "is not a peer id" in complaint(swarm.command(*node, here[:-12]))
        assert not (tmp_path / "n" / "run").exists()

        port = here.split("/")[4]
        taken = f"/ip4/127.0.0.1/tcp/{port}"
        said = complaint(
            swarm.command("bootstrap", "--data-dir", str(tmp_path / "second"), "--listen", taken)
        )
        assert f"Port {port} of 127.0.0.1 is in use" in said
        said = complaint(
            swarm.command("bootstrap", "--data-dir", str(bootstrap.data_dir), "--listen", LOOPBACK)
        )
        assert "in use by another running node" in said and str(bootstrap.pid) in said

        own = ("--run", str(swarm.manifest("test", "--seed", "5")), "--data-dir", str(tmp_path / "second"))
        said = complaint(swarm.command("bootstrap", "--join", here, "--listen", LOOPBACK, *own))
        assert "serve another owner's run called test" in said
        assert not (tmp_path / "second" / "runs").exists()  # nothing was signed


def test_data_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with Swarm(tmp_path) as swarm:
        address = f"/ip4/127.0.0.1/tcp/9/p2p/{Identity.generate().peer_id}"
        missing, file = tmp_path / "no" / "such" / "folder", tmp_path / "file"
        file.write_text("not a folder")
        for folder, words in ((missing, "does not exist"), (file, "is a file, not a folder")):
            said = complaint(swarm.command("node", "--join", address, "--data-dir", str(folder)))
            assert words in said and str(folder) in said
        # Said before anybody is dialled: nobody answers at that address.
        said = complaint(
            swarm.command("node", "--join", address, "--data-dir", str(tmp_path / "d"), "--device", "rocm")
        )
        assert "--device rocm: torch" in said and "none of ROCm here" in said
        damaged = tmp_path / "damaged"
        damaged.mkdir()
        (damaged / "identity.key").write_bytes(b"not a key")
        said = complaint(swarm.command("node", "--join", address, "--data-dir", str(damaged)))
        assert "identity.key" in said
        assert (damaged / "identity.key").read_bytes() == b"not a key"  # nobody's identity is overwritten


def test_a_run_beyond_this_machine_is_refused_before_anything_is_made_of_it(tmp_path: Path) -> None:
    """A bootstrap serves what its owner signed, whatever that is: 2 kB that describe terabytes."""
    base = for_run("micro", "large")
    model = base.model | {"layers": 256, "width": 4096, "hidden_width": 1 << 17}
    owner = Identity.generate()
    signed = sign_manifest(msgspec.structs.replace(base, model=model), bytes(32), owner, owner.peer_id)
    with Swarm(tmp_path) as swarm:
        folder = run_folder(tmp_path / "bootstrap", run_id(signed))
        folder.mkdir(parents=True)
        save_signed(folder / "manifest.signed", signed)
        bootstrap = swarm.bootstrap("--log", "text")
        words = ("node", "--listen", LOOPBACK, "--log", "text", "--data-dir", str(tmp_path / "n"), "--join")
        done = swarm.command(*words, bootstrap.address() or "")
        said = complaint(done)
        assert "run large takes more than this machine has: at least" in said and "are free" in said
        for line in (
            f"run large ({run_id(signed)[:12]}) of owner {owner.peer_id}",
            "memory: at least",
            "disk: about",
        ):
            assert line in done.stderr
        assert f"--join {bootstrap.address()} --run {run_id(signed)}\n" in bootstrap._out.read_text()
        assert not (tmp_path / "n" / "runs").exists()
