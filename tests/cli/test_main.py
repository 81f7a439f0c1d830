"""The command line: precedence, exit statuses, what goes to which stream."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from deadlines import within_s
from msgspec import structs

from p2pdiloco import __version__
from p2pdiloco.adapters.data_dir import own_peer
from p2pdiloco.cli import commands, group
from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.status_command import visit
from p2pdiloco.config.manifest import AdmissionSection, Manifest
from p2pdiloco.config.presets import TRIED_INNER_STEPS, TRIED_LEARNERS, TRIED_NUMEL, for_run, with_seats
from p2pdiloco.config.settings import (
    ANY_ADDRESS,
    BootstrapSettings,
    DemoSettings,
    NodeSettings,
    StatusSettings,
)
from p2pdiloco.daemon.notice import Invite, grant
from p2pdiloco.daemon.owner.wishes import FILE, change_kept
from p2pdiloco.daemon.run_files.known_runs import RunLink, WaysIn, change_ways, encode_link
from p2pdiloco.errors import UserError
from p2pdiloco.identity import Identity
from p2pdiloco.tasks.registry import load_manifest

PEER = "12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q"
ONE, TWO, THREE = (f"/ip4/203.0.113.{i}/tcp/31337/p2p/{PEER}" for i in (1, 2, 3))


@pytest.mark.parametrize("command", [[], ["run"]])
def test_a_group_alone_prints_its_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(command) == 0
    shown = capsys.readouterr().out
    assert ("Commands:" if command else "Take part:") in shown
    assert "..." not in shown.partition("Usage:")[2].partition("\n")[2], "sentences are whole"


def test_the_help_of_a_node_leaves_out_what_is_for_experts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["node", "--help"]) == 0
    short = capsys.readouterr().out
    assert cli_main.run(["node", "--help-all"]) == 0
    whole = capsys.readouterr().out
    assert "--learner-nice" not in short and "--learner-nice" in whole and "Limits:" in short
    assert "--initial_peers" not in whole, "hivemind's spelling is taken, and goes without saying"
    assert len(re.findall(r"^  --", short, re.M)) <= 28


@pytest.fixture(autouse=True)
def signals_as_in_a_terminal() -> Iterator[None]:
    """Whoever starts the tests may have them, and what they start, ignore some (nohup, a job in a script)."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The settings that the commands hand on; nothing of the daemon runs."""
    seen: list[Any] = []
    for name in list(os.environ):
        if name.startswith("P2PDILOCO_"):
            monkeypatch.delenv(name)
    for room, name in (("start", "node"), ("bootstrap", "bootstrap")):
        module = types.ModuleType(f"p2pdiloco.daemon.{room}")
        setattr(module, f"run_{name}", seen.append)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("cli.status_command", "demo.demo"):
        monkeypatch.setattr(f"p2pdiloco.{name}.run", seen.append)
    return seen


def test_flag_beats_variable_beats_file_beats_default(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = tmp_path / "node.toml"
    config.write_text(f'[node]\nname = "file"\nthreads = 1\ndata_dir = "state"\njoin = ["{ONE}", "{TWO}"]\n')
    arguments = ["node", "--config", str(config)]

    assert cli_main.run(arguments) == 0
    monkeypatch.setenv("P2PDILOCO_NAME", "variable")
    monkeypatch.setenv("P2PDILOCO_JOIN", f"{TWO}, {THREE}")
    assert cli_main.run(arguments) == 0
    assert cli_main.run([*arguments, "--name", "flag", "--join", ONE]) == 0

    assert [s.name for s in called] == ["file", "variable", "flag"]
    assert [s.join for s in called] == [(ONE, TWO), (TWO, THREE), (ONE,)]
    assert {(s.threads, s.data_dir, s.device) for s in called} == {(1, tmp_path / "state", "auto")}


def test_the_settings_file_may_come_from_a_variable(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "b.toml").write_text('[bootstrap]\nlog = "json"\n')
    monkeypatch.setenv("P2PDILOCO_CONFIG", str(tmp_path / "b.toml"))
    assert cli_main.run(["bootstrap", "--data-dir", "/state"]) == 0
    assert called == [BootstrapSettings(log="json", data_dir=Path("/state"))]


def test_defaults_are_the_structs_own(called: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    for arguments in (["node", "--join", ONE], ["bootstrap"], ["status", "--join", ONE], ["demo"]):
        assert cli_main.run(arguments) == 0
    assert called == [
        NodeSettings(join=(ONE,), data_dir=Path("/home/ada/.p2pdiloco/node")),
        BootstrapSettings(data_dir=Path("/home/ada/.p2pdiloco/bootstrap")),
        StatusSettings(join=(ONE,)),
        DemoSettings(),
    ]


@pytest.mark.process
def test_every_flag_arrives(called: list[Any], tmp_path: Path) -> None:
    line = (
        f"node --join {ONE} --run r --data-dir /d --device cpu --threads 3 --listen /ip4/127.0.0.1/tcp/5 "
        "--max-disk 1GiB --yes --nproc 2 --shard always --precision fp32 --compile always "
        "--announce /ip4/203.0.113.9/tcp/5 --max-upload 20Mbit --max-download 1Gbit --max-memory 2GiB "
        "--genesis --run-file run.toml --name n --data /t --log text --checkpoint-every-s 5 --eval-every-s 6 "
        "--micro-batch-tokens 7 --learner-nice 8 --daemon-nice 9 --min-step-s 0.5 "
        "--reachability private --no-relay --no-port-map --learner-socket /s --learner-wait-s 9 "
        "--evaluate each "
        "--result-dir /r --result-every 3merges --result-keep 2 --keep-history --max-transfer 2GB/month "
        "--hours 22-7 --when-idle 10min --not-on-battery --max-temperature 80 --max-power 250 --web 8080 "
        "--lan"
    )
    assert cli_main.run(line.split()) == 0
    (settings,) = called
    untouched = [
        f for f in NodeSettings.__struct_fields__ if getattr(settings, f) == getattr(NodeSettings(), f)
    ]
    assert untouched == ["invite"], "that comes as an argument"
    line = "demo --nodes 2 --seconds 9 --no-kill --preset micro --report r --plot p --keep k"
    assert cli_main.run(line.split()) == 0
    assert called[1] == DemoSettings(
        nodes=2, seconds=9, kill=False, preset="micro", report=Path("r"), plot=Path("p"), keep=Path("k")
    )


def test_an_invite_says_run_and_peers(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    key, run, data = Identity.generate(), "ab" * 32, ["--data-dir", str(tmp_path)]
    invite = Invite(grant(run, key.peer_id, 0, 1, key), key, (ONE,))
    text = encode_link(RunLink(run, (ONE,), key.peer_id, "", invite))
    assert cli_main.run(["node", "--join", TWO, *data, text]) == 0
    monkeypatch.setenv("P2PDILOCO_INVITE", text)
    assert cli_main.run(["node", *data]) == 0
    assert [(s.run, s.join) for s in called] == [(run, (TWO, ONE)), (run, (ONE,))]
    assert cli_main.run(["node", *data, text[:-3]]) == 2 and len(called) == 2


def test_a_start_with_nothing_goes_on_with_what_the_last_one_had(
    called: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    data, run = ["--data-dir", str(tmp_path)], "ab" * 32
    first = ["--join", ONE, "--name", "anna", "--threads", "2", "--data", "texts", "--no-relay", "--yes"]
    assert cli_main.run(["node", *data, *first, "--max-upload", "5Mbit", "--hours", "22-7"]) == 0
    assert cli_main.run(["node", *data]) == 2, "it joined nothing yet"
    change_ways(tmp_path, WaysIn.joined, called[0], run)
    change_kept(tmp_path, {"max-upload": "1Mbit"})
    monkeypatch.setenv("P2PDILOCO_THREADS", "3")
    for more in (
        [],
        ["--name", "ben"],
        ["--forget"],
        ["--join", TWO],
        ["--run", "cd" * 32],
        ["--learner-socket", "/s"],
    ):
        assert cli_main.run(["node", *data, *more]) == 0
    _, again, other, *anew = called
    assert again.data == Path("texts").absolute() and not again.relay and not again.yes
    assert (again.run, again.name, again.threads, again.hours) == (run, "anna", 3, "22-7")
    assert not again.max_upload, "that was changed since, and holds by itself"
    assert (other.name, other.hours) == ("ben", "22-7")
    assert {(s.name, s.hours, s.data) for s in anew} == {("", "", None)}


def test_a_start_with_nothing_takes_what_the_guide_saved(
    called: list[Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "node.toml").write_text(f'[node]\njoin = ["{ONE}"]\nthreads = 2\n')
    assert cli_main.run(["node", "--data-dir", str(tmp_path)]) == 0
    assert (called[0].join, called[0].threads) == ((ONE,), 2)
    assert f"as before: join ('{ONE}',), threads 2" in capfd.readouterr().err


@pytest.mark.parametrize("flag", ["--initial_peers", "--initial-peers", "--join"])
def test_hivemind_spellings_with_lists(called: list[Any], flag: str) -> None:
    line = ["node", flag, ONE, TWO, "--host_maddrs", *ANY_ADDRESS, f"{flag}={THREE}"]
    assert cli_main.run([*line, "--announce_maddrs", "/ip4/203.0.113.9/tcp/5"]) == 0
    assert called[0].join == (ONE, TWO, THREE)
    assert called[0].announce == ("/ip4/203.0.113.9/tcp/5",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("node", "there is no peer to join"),
        ("node --join nonsense", "--join must look like"),
        (f"node --join {ONE} --threads 5000", "must be an integer from 0 to 1024"),
        (f"node --join {ONE} --threads x", "'x' is not a valid integer"),
        (f"node --join {ONE} --eval-every-s nan", "must be a number above 0"),
        ("demo --seconds nan", "nan is not a number in the range"),
        ("chaos --minutes nan", "nan is not a number in the range"),
        (f"status --join {ONE} --timeout-s nan", "nan is not a number in the range"),
        (f"node --join {ONE} --thread 3", "No such option '--thread'"),
        ("node --config none.toml", "none.toml: there is no such file"),
        ("nodee", "No such command 'nodee'"),
        (
            "run new Bad",
            'run.name must be 1 to 63 of a-z 0-9 . _ - and begin with a letter or digit, it is "Bad"',
        ),
        ("run new x --preset y", 'there is no preset "y"'),
        ("run new x --out no-folder/run.toml", "--out no-folder/run.toml cannot be written"),
        ("run new x --from nothing --out no-folder/run.toml", "--out no-folder/run.toml cannot be written"),
        ("checkpoint --checkpoint nothing --out no-folder/x", "--out no-folder/x cannot be written"),
        ("export --checkpoint nothing --out /proc/self/x", "--out /proc/self/x cannot be written"),
        ("eval --checkpoint nothing --data no-data", "the data path no-data does not exist"),
        ("chaos --out /proc/self/x", "--out /proc/self/x cannot be written"),
        ("run check none.toml", "none.toml: there is no such file"),
    ],
)
def test_mistakes_end_with_status_2_one_sentence_and_no_traceback(
    line: str,
    words: str,
    called: list[Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # a node of this machine's has met peers
    assert cli_main.run(line.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    first, *rest = err.splitlines()
    assert first.startswith("error: ") and words in first
    assert all(hint.startswith("hint: ") for hint in rest) and len(rest) <= 1
    assert called == []


def test_an_unknown_variable_stops_every_command(
    called: list[Any], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PDILOCO_DATADIR", "/x")
    assert cli_main.run(["bootstrap"]) == 2
    assert (
        'P2PDILOCO_DATADIR is not known\nhint: did you mean "P2PDILOCO_DATA_DIR"?' in capfd.readouterr().err
    )
    assert called == []


def test_run_new_then_check(
    called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli_main.run(["run", "new", "shakespeare", "--preset", "small"]) == 0
    assert capfd.readouterr().out == "run.toml\n"
    me = own_peer(NodeSettings().data_dir.expanduser())
    key = Path("run.recovery.key")
    recovery = Identity.load_or_create(key).peer_id
    assert key.stat().st_mode & 0o777 == 0o600

    def seated(manifest: Manifest) -> Manifest:
        section = AdmissionSection(mode="invite", recovery=recovery)
        return with_seats(structs.replace(manifest, admission=section), [me])

    assert load_manifest(Path("run.toml")) == seated(for_run("small", "shakespeare"))
    assert cli_main.run(["run", "check", "run.toml"]) == 0
    said = capfd.readouterr()
    assert 'run "shakespeare", causal-lm, 10.7 M parameters' in said.out
    # 16 bytes a parameter of state, 12 of shared memory; parameters, gradients, Muon's moment, and the
    # second instance of the model; what a pass of 8192 tokens keeps.
    # On top of these are payloads, and the programs themselves: 360 MB and 285 MB.
    assert "memory of a node: at least 686 MiB for daemon and network, of which 343 MiB for this" in said.out
    assert "memory of its learner: at least 954 MiB, of which 683 MiB on its device, or" in said.out
    assert "devices together, with 519 MiB for a pass\n" in said.out
    assert "when the schedule is over, learners stop\n" in said.out
    assert "disk of a node: about 573 MiB, and up to 130 MiB of logs" in said.out
    assert f"10.7 M parameters ({TRIED_NUMEL / 1e6:g} M)" in said.err
    assert cli_main.run(["run", "new", "large", "--preset", "gpt2", "--out", "large.toml"]) == 0
    assert load_manifest(Path("large.toml")).model["vocabulary"] == 256, "raw bytes have no other ids"
    capfd.readouterr()
    assert cli_main.run(["run", "new", "other"]) == 2
    assert "run.toml: exists already" in capfd.readouterr().err
    assert load_manifest(Path("run.toml")).run.name == "shakespeare"
    assert cli_main.run(["run", "new", "other", "--force", "--seed", "9"]) == 0
    assert load_manifest(Path("run.toml")) == seated(for_run("tiny", "other", seed=9))
    assert (
        cli_main.run(["run", "new", "other", "--force", "--length", "demo", "--expected-members", "16"]) == 0
    )
    assert load_manifest(Path("run.toml")).inner.schedule_tokens == 700 * 16 * 1024
    Path("run.toml").write_text(
        Path("run.toml").read_text().replace("\ninner_steps = 24", "\ninner_steps = 300")
    )
    assert cli_main.run(["run", "check", "run.toml"]) == 0
    said = capfd.readouterr()
    assert "outer steps: about 2 of each fragment" in said.out
    assert f"16 members ({TRIED_LEARNERS} at most), sync.inner_steps 300 ({TRIED_INNER_STEPS})" in said.err
    assert "warning: the schedule is about 2 outer steps" in said.err
    assert cli_main.run(["plan", "run.toml", "--upload", "1Gbit", "--step-s", "1"]) == 0
    assert "; 16 members\n" in capfd.readouterr().out, "as many as the run expects"
    for mode, shown in (("open", False), ("invite", False), ("list", True)):
        assert cli_main.run(["run", "new", "other", "--force", "--admission", mode]) == 0
        said = capfd.readouterr().err
        assert ("the first one, too; " in said and "p2pdiloco admit other PEER" in said) == shown
        assert ("all of them together have 25% of each merge" in said) == (mode == "open")
    assert cli_main.run(["run", "new", "other", "--force", "--open"]) == 0
    assert load_manifest(Path("run.toml")).admission.mode == "open"


PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(3)]
SEATS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((), ""),
    (("--seat", PEERS[0], "--seat", PEERS[1]), ""),
    (("--seat", PEERS[0][:-1]), "is not the id of a peer"),
    (("--seat", PEERS[0], "--seat", PEERS[0]), ""),
)
"""Flags of `run new`, and what it says of a mistake."""


@pytest.mark.parametrize(("flags", "words"), SEATS)
def test_the_node_of_the_folder_has_the_first_seat_and_named_peers_the_next_ones(
    flags: tuple[str, ...], words: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, node = tmp_path / "run.toml", tmp_path / "node"
    new = ["run", "new", "x", "--preset", "micro", "--data-dir", str(node), "--out", str(out), *flags]
    assert cli_main.run(new) == (2 if words else 0)
    assert words in capfd.readouterr().err
    if words:
        assert not out.exists() and not node.exists()
        return
    me = Identity.load_or_create(node / "identity.key").peer_id
    assert load_manifest(out).admission.seats == (me, *dict.fromkeys(flags[1::2]))
    assert cli_main.run(["run", "check", str(out)]) == 0
    assert f"seats at the start: {me}" in capfd.readouterr().out


def test_a_commands_status_is_the_exit_status(called: list[Any]) -> None:
    sys.modules["p2pdiloco.demo.demo"].run = lambda _settings: 1  # type: ignore[attr-defined]
    assert cli_main.run(["demo"]) == 1


def test_a_bug_is_not_dressed_up_as_a_users_mistake(called: list[Any]) -> None:
    def crash(_settings: object) -> None:
        raise RuntimeError("bug")

    sys.modules["p2pdiloco.demo.demo"].run = crash  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="bug"):
        cli_main.run(["demo"])


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("P2PDILOCO_")} | environment
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=clean,
        timeout=within_s(60),
        check=False,
    )


@pytest.mark.process
@pytest.mark.parametrize("module", ["click", "torch"])
def test_ctrl_c_during_an_import_ends_the_process_there(module: str, tmp_path: Path) -> None:
    """One of the command line itself, and one of a command's body."""
    pressed = """
import os, signal
try:
    signal.raise_signal(signal.SIGINT)
except BaseException:  # as C++ that lets no exception out
    os._exit(70)
"""
    (tmp_path / f"{module}.py").write_text(pressed)
    arguments = ("node", "--join", ONE, "--data-dir", str(tmp_path / "data"))
    done = _python("-m", "p2pdiloco", *arguments, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (130, "")


@pytest.mark.process
def test_ctrl_c_elsewhere_may_be_cleared_up_after() -> None:
    probe = """
import signal, sys
from types import ModuleType
from p2pdiloco.cli import main

def run(settings):
    try:
        signal.raise_signal(signal.SIGINT)
    finally:
        print("cleared up")

sys.modules["p2pdiloco.demo.demo"] = demo = ModuleType("demo")
demo.run = run
sys.argv[1:] = ["demo"]
main.main()
"""
    done = _python("-c", probe)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "cleared up\n", "")


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, None)]
)
def test_a_visit_that_is_told_to_stop_clears_up(
    number: signal.Signals, status: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    cleared: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def reads() -> None:
        """hivemind's reader of p2pd, whose answer comes when nobody waits for it any more."""
        try:
            await asyncio.Event().wait()
        finally:
            raise asyncio.InvalidStateError

    async def body() -> None:
        tasks.append(asyncio.create_task(reads()))
        await asyncio.sleep(0)
        try:
            signal.raise_signal(number)
            if status:  # shells send it twice, now and then; a second Ctrl-C means "at once"
                signal.raise_signal(number)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleared.append("up")

    signal.signal(signal.SIGINT, cli_main.interrupt)
    with pytest.raises(SystemExit if status else KeyboardInterrupt) as ended:
        visit(body())
    assert signal.getsignal(signal.SIGINT) is cli_main.interrupt
    assert cleared == ["up"]
    assert not isinstance(ended.value, SystemExit) or ended.value.code == status
    assert not caplog.records, "a traceback after the end"


def test_a_visit_goes_on_where_a_closed_terminal_is_ignored() -> None:
    async def body() -> str:
        signal.raise_signal(signal.SIGHUP)
        await asyncio.sleep(0)
        return "done"

    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert visit(body()) == "done"


@pytest.mark.process
def test_version_as_a_module_and_refusal_of_python_O() -> None:
    assert _python("-m", "p2pdiloco", "--version").stdout == f"p2pdiloco, version {__version__}\n"
    refused = _python("-O", "-m", "p2pdiloco", "--version")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: p2pdiloco does not run under python -O")


# Mistakes in flags, where the log is for machines.


def test_mistakes_in_flags_are_lines_of_the_log_that_a_settings_file_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[node]\nlog = "json"\n')
    for arguments in (["--config", str(config), "--nonsense"], [f"--config={config}", "--threads", "x"]):
        assert cli_main.run(["node", *arguments]) == 2
        line = json.loads(capsys.readouterr().err)
        assert line["event"] == "error" and line["level"] == "error"
    assert cli_main.run(["bootstrap", "--config", str(config), "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: "), "that table says nothing of it"
    assert cli_main.run(["node", "--config", str(config), "--log", "text", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setenv("P2PDILOCO_CONFIG", str(config))
    assert cli_main.run(["node", "--nonsense"]) == 2
    assert json.loads(capsys.readouterr().err)["event"] == "error"
    config.write_text("[node\n")
    assert cli_main.run(["node", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("where", ["a command", "what comes before it"])
def test_details_of_an_error_are_in_its_line_too(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise UserError("nobody gives it", "ask again", ["anna: refused", "ben: silent"])

    place = (commands, "check_node") if where == "a command" else (group, "check_environment")
    monkeypatch.setattr(*place, wrong)
    assert cli_main.run(["node", "--log", "json", "--data-dir", str(tmp_path / "node")]) == 2
    line = json.loads(capsys.readouterr().err)
    assert line["fields"] == {"hint": "ask again", "details": ["anna: refused", "ben: silent"]}


# Limits where no node runs: what is kept for the next start is changed, and shown.


def test_what_is_kept_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["limits", "--data-dir", str(tmp_path)]
    assert cli_main.run(line) == 4
    assert "kept for the next start" in (said := capsys.readouterr().out) and said.endswith("nothing\n")
    assert cli_main.run([*line, "--max-upload", "10Mbit", "--hours", "22-7"]) == 0
    capsys.readouterr()
    assert cli_main.run(line) == 4
    said = capsys.readouterr().out
    assert "max-upload 10Mbit" in said and "hours 22-7" in said
    (tmp_path / FILE).write_text('{"changed": ["colour"]}')  # another version's
    assert cli_main.run(line) == 4 and capsys.readouterr().out.endswith("nothing\n")
    assert cli_main.run(["limits", "--data-dir", str(tmp_path / "nowhere")]) == 4
    assert "no node runs here" in capsys.readouterr().err
