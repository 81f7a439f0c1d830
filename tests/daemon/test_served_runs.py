"""What a bootstrap is told to serve is signed once, by a process that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_kit import write_given

from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.config.signing import load_signed
from p2pdiloco.daemon import runs, signing
from p2pdiloco.daemon.bootstrap import _served_runs
from p2pdiloco.daemon.initial_file import kept
from p2pdiloco.errors import ConfigError, InvariantViolation, StorageError, UserError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.tasks.manifests import render_toml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    written = tmp_path / "run.toml"
    written.write_text(render_toml(for_run("micro", "test")))
    return written


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of runs, as often as their version 0 is computed."""
    names: list[str] = []
    real = runs.fresh_vault

    def fresh_vault(manifest, given=None):  # type: ignore[no-untyped-def]
        names.append(manifest.run.name)
        return real(manifest, given)

    monkeypatch.setattr(runs, "fresh_vault", fresh_vault)
    return names


def manifests(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "runs").glob("*/manifest.signed"))


def test_what_was_signed_is_not_computed_again(
    tmp_path: Path, file: Path, computed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    said = []
    for _ in range(2):
        signing.sign_all(tmp_path / "b", [file])
        said.append(caplog.messages.copy())
        caplog.clear()
    assert computed == ["test"] and len(manifests(tmp_path / "b")) == 1
    assert said[0] == said[1] and any("the schedule is" in line for line in said[0])

    (tmp_path / "b" / "owner.key").unlink()  # another owner's is another run
    signing.sign_all(tmp_path / "b", [file])
    file.write_text(render_toml(for_run("micro", "test", seed=1)))
    signing.sign_all(tmp_path / "b", [file])
    assert len(computed) == 3 and len(manifests(tmp_path / "b")) == 3


def test_a_given_version_0_that_is_gone_is_taken_from_beside_run_toml_again(
    tmp_path: Path, file: Path, computed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_given(file, "given")
    settings, identity = BootstrapSettings(data_dir=tmp_path / "b"), Identity.generate()
    for times in (1, 2):
        signing.sign_all(tmp_path / "b", [file])
        assert computed == ["given"] * times
        (served,) = _served_runs(settings, identity)
        assert served.name == "given"
        kept(tmp_path / "b", served.id).unlink()
        assert _served_runs(settings, identity) == [] and "is not here any more" in caplog.text
        caplog.clear()


def test_a_damaged_manifest_is_no_reason_to_sign_another(tmp_path: Path, file: Path) -> None:
    signing.sign_all(tmp_path, [file])
    manifests(tmp_path)[0].write_bytes(b"\xff")
    with pytest.raises(StorageError, match="is damaged"):
        signing.sign_all(tmp_path, [file])


PROBE = """
import asyncio, json, sys
from pathlib import Path
import psutil
from p2pdiloco.daemon.signing import sign_apart
from p2pdiloco.errors import UserError

async def main(ends, data_dir, *files):
    signing = asyncio.create_task(sign_apart(Path(data_dir), [Path(f) for f in files], "text"))
    while ends != "itself" and not (children := psutil.Process().children()):
        await asyncio.sleep(0)
    if ends == "cancelled":
        signing.cancel()
    elif ends == "killed":
        children[0].kill()
    await asyncio.wait({signing})
    error = None if signing.cancelled() else signing.exception()
    if error is not None and not isinstance(error, UserError):
        raise error
    left = [child.pid for child in psutil.Process().children()]
    said = [type(error).__name__, str(error), error.hint] if error else []
    print(json.dumps([signing.cancelled(), said, left, "torch" in sys.modules]))

asyncio.run(main(*sys.argv[1:]))
"""


def apart(ends: str, data_dir: Path, *files: Path) -> tuple[list[object], str]:
    """What came of signing in a process of its own that ended so, and what was logged."""
    command = [sys.executable, "-P", "-c", PROBE, ends, str(data_dir), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


def test_a_process_of_its_own_signs_and_says_what_is_wrong(tmp_path: Path, file: Path) -> None:
    result, said = apart("itself", tmp_path / "b", file)
    assert result == [False, [], [], False] and "the schedule is" in said
    signed, manifest = load_signed(manifests(tmp_path / "b")[0], verify)
    assert manifest == for_run("micro", "test") and signed.genesis_digest
    (cancelled, error, left, _), said = apart("itself", tmp_path / "b", tmp_path / "nowhere.toml")
    assert (cancelled, left, said) == (False, [], "")
    assert isinstance(error, list) and error[0] == "ConfigError" and "nowhere.toml" in error[1]


@pytest.mark.parametrize("ends", ["cancelled", "killed"])
def test_it_ends_with_who_waits_for_it_and_its_end_is_a_sentence(
    ends: str, tmp_path: Path, file: Path
) -> None:
    (cancelled, error, left, torch_here), _ = apart(ends, tmp_path / "b", file)
    assert left == [] and not torch_here and cancelled is (ends == "cancelled")
    assert not manifests(tmp_path / "b")
    if ends == "killed":
        assert isinstance(error, list) and error[0] == "UserError" and "lack of memory" in error[1]


def test_the_last_word_is_heeded() -> None:
    signing._heed(b'{"error":"","message":"","hint":""}', 0)
    with pytest.raises(ConfigError, match="wrong") as caught:
        signing._heed(b'{"error":"ConfigError","message":"wrong","hint":"mend it"}', 0)
    assert caught.value.hint == "mend it" and type(caught.value) is ConfigError
    with pytest.raises(UserError, match="signal 9"):
        signing._heed(b"", -9)
    with pytest.raises(InvariantViolation, match="status 1"):
        signing._heed(b"", 1)
