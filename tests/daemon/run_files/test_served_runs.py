"""Runs that a bootstrap is told to serve are signed once, by a process that ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from daemon_kit import served_runs, write_given
from deadlines import within_s

from p2pdiloco.config.manifest import load_signed
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon.run_files import run
from p2pdiloco.daemon.run_files import served_runs as signing
from p2pdiloco.daemon.run_files.served_runs import kept_run_toml
from p2pdiloco.daemon.run_files.shared_files import kept_initial
from p2pdiloco.errors import ConfigError, InvariantViolation, StorageError, UserError
from p2pdiloco.identity import Identity, verify
from p2pdiloco.tasks.registry import render_toml


@pytest.fixture
def file(tmp_path: Path) -> Path:
    toml_of("test", tmp_path / "run.toml")
    return tmp_path / "run.toml"


def toml_of(name: str, file: Path, comment: str = "", seed: int = 0) -> str:
    """Write a micro run's."""
    text = comment + render_toml(for_run("micro", name, seed))
    file.write_text(text)
    return text


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of runs, as often as their version 0 is computed."""
    names: list[str] = []
    real = run.fresh_vault

    def fresh_vault(manifest, given=None):  # type: ignore[no-untyped-def]
        names.append(manifest.run.name)
        return real(manifest, given)

    monkeypatch.setattr(run, "fresh_vault", fresh_vault)
    return names


def manifests(data_dir: Path) -> list[Path]:
    return sorted((data_dir / "runs").glob("*/manifest.signed"))


async def test_what_was_signed_is_not_computed_again(
    tmp_path: Path,
    file: Path,
    computed: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (run,) = await served_runs(tmp_path, file)
    assert computed == ["test"] and any("the schedule is" in line for line in caplog.messages)
    with monkeypatch.context() as patch:
        patch.setattr(signing, "sign_all", None)  # nothing is to be signed
        assert await served_runs(tmp_path, file) == await served_runs(tmp_path) == [run]
    other = toml_of("test", file, "# mine\n")
    assert await served_runs(tmp_path, file) == [run] and computed == ["test"]
    assert kept_run_toml(tmp_path, run.id).read_text() == other


async def test_another_owner_s_or_another_manifest_is_another_run_and_what_is_asked_for_comes_first(
    tmp_path: Path, file: Path, computed: list[str]
) -> None:
    runs = await served_runs(tmp_path, file)
    (tmp_path / "owner.key").unlink()
    Identity.load_or_create(tmp_path / "owner.key")
    runs = await served_runs(tmp_path, file)
    assert len(runs) == 2 and len(computed) == 2
    for seed in range(1, 5):
        toml_of("test", file, seed=seed)
        before, runs = runs, await served_runs(tmp_path, file)
        assert len(computed) == len(runs) == seed + 2 and runs[0] not in before


async def test_what_was_signed_is_served_without_the_key_and_nothing_else_is_signed_then(
    tmp_path: Path, file: Path, computed: list[str]
) -> None:
    runs = await served_runs(tmp_path, file)
    (tmp_path / "owner.key").rename(tmp_path / "elsewhere.key")
    assert await served_runs(tmp_path, file) == await served_runs(tmp_path) == runs
    for name in ("test", "other"):
        toml_of(name, file, seed=7)
        with pytest.raises(UserError, match=f"{runs[0].signed.owner}, is not in .*owner.key") as caught:
            await served_runs(tmp_path, file)
        assert "--data-dir" in caught.value.hint
    assert computed == ["test"] and not (tmp_path / "owner.key").exists()
    (tmp_path / "elsewhere.key").rename(tmp_path / "owner.key")
    assert len(await served_runs(tmp_path, file)) == 2


async def test_beside_fetched_runs_a_new_owner_signs_one_of_another_name(tmp_path: Path, file: Path) -> None:
    (run,) = await served_runs(tmp_path, file)
    (tmp_path / "owner.key").unlink()
    kept_run_toml(tmp_path, run.id).unlink()  # as what is fetched has none
    assert await served_runs(tmp_path) == [run] and not (tmp_path / "owner.key").exists()
    with pytest.raises(UserError, match="cannot be signed"):
        await served_runs(tmp_path, file)
    toml_of("mine", file)
    assert [run.name for run in await served_runs(tmp_path, file)] == ["mine", "test"]


async def test_a_given_version_0_is_taken_from_beside_run_toml_again(
    tmp_path: Path, file: Path, computed: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    write_given(file, "given")
    (run,) = await served_runs(tmp_path, file)
    here = kept_initial(tmp_path, run.id)
    content = here.read_bytes()
    for times, damaged in ((2, b""), (3, content[:-1] + b"x"), (4, content[:30]), (5, None)):
        here.unlink() if damaged is None else here.write_bytes(damaged)
        assert await served_runs(tmp_path) == [] and "is not here any more" in caplog.text
        assert await served_runs(tmp_path, file) == [run] == await served_runs(tmp_path, file)
        assert here.read_bytes() == content and computed == ["given"] * times
        caplog.clear()


async def test_a_damaged_manifest_is_made_again_by_its_run_toml_only(tmp_path: Path, file: Path) -> None:
    (run,) = await served_runs(tmp_path, file)
    manifests(tmp_path)[0].write_bytes(b"\xff")
    with pytest.raises(StorageError, match="is damaged") as caught:
        await served_runs(tmp_path)
    assert "run.toml" in caught.value.hint
    assert await served_runs(tmp_path, file) == [run]


async def test_an_edit_while_version_0_is_computed_is_signed_next_time(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = run.fresh_vault

    def fresh_vault(manifest, given=None):  # type: ignore[no-untyped-def]
        toml_of("second", file)
        return real(manifest, given)

    with monkeypatch.context() as patch:
        patch.setattr(run, "fresh_vault", fresh_vault)
        assert [run.name for run in await served_runs(tmp_path, file)] == ["test"]
    assert [run.name for run in await served_runs(tmp_path, file)] == ["second", "test"]


async def test_a_given_version_0_that_cannot_be_read_is_moved_away(tmp_path: Path, file: Path) -> None:
    write_given(file, "given")
    (run,) = await served_runs(tmp_path, file)
    here = kept_initial(tmp_path, run.id)
    here.unlink()
    here.mkdir()
    assert await served_runs(tmp_path) == [] and here.is_dir()
    assert await served_runs(tmp_path, file) == [run] and here.is_file()


async def test_a_folder_that_cannot_be_made_is_a_sentence(tmp_path: Path, file: Path) -> None:
    (tmp_path / "runs").write_text("no folder")
    with pytest.raises(StorageError, match="cannot create"):
        await served_runs(tmp_path, file)


async def test_what_an_ended_signing_left_is_removed(tmp_path: Path, file: Path) -> None:
    (run,) = await served_runs(tmp_path, file)
    left = kept_initial(tmp_path, run.id).with_suffix(".safetensors.tmp")
    left.write_bytes(b"half of it")
    assert await served_runs(tmp_path) == [run] and not left.exists()


PROBE = """
import asyncio, json, sys, uvloop
from pathlib import Path
import psutil
from p2pdiloco.daemon.run_files.served_runs import sign_apart
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
    # One that was just begun when we let go ends by itself.
    left = [child.pid for child in psutil.wait_procs(psutil.Process().children(), 100)[1]]
    said = [type(error).__name__, str(error), error.hint] if error else []
    print(json.dumps([signing.cancelled(), said, left, "torch" in sys.modules]))

uvloop.run(main(*sys.argv[1:]))
"""


def apart(ends: str, data_dir: Path, *files: Path) -> tuple[list[object], str]:
    """Sign in a process of its own that ends so; return what came of it, and what was logged."""
    command = [sys.executable, "-P", "-c", PROBE, ends, str(data_dir), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s(100), check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.process
def test_a_process_of_its_own_signs_and_says_what_is_wrong(tmp_path: Path, file: Path) -> None:
    result, said = apart("itself", tmp_path / "b", file)
    assert result == [False, [], [], False] and "the schedule is" in said
    signed, manifest = load_signed(manifests(tmp_path / "b")[0], verify)
    assert manifest == for_run("micro", "test") and signed.genesis_digest
    strange = tmp_path / os.fsdecode(b"r\xff.toml")
    strange.write_text("no = 1")
    (cancelled, error, left, _), said = apart("itself", tmp_path / "b", strange)
    assert (cancelled, left, said) == (False, [], "")
    assert isinstance(error, list) and error[0] == "ConfigError" and ".toml" in error[1]


@pytest.mark.process
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
    signing._heed(b'["", "", ""]', 0)
    for name, kind in (
        ("ConfigError", ConfigError),
        ("StorageError", StorageError),
        ("TheirError", UserError),
    ):
        with pytest.raises(kind, match="wrong") as caught:
            signing._heed(json.dumps([name, "wrong", "mend it"]).encode(), 0)
        assert caught.value.hint == "mend it" and type(caught.value) is kind
    for code, words in ((-9, "killed, probably for lack of memory"), (-11, "ended by signal 11$")):
        with pytest.raises(UserError, match=words):
            signing._heed(b"", code)
    with pytest.raises(InvariantViolation, match="status 1"):
        signing._heed(b"", 1)
