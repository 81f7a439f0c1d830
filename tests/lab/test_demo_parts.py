"""The demo's arithmetic: what it reads from logs, what it compares, when it fails."""

from __future__ import annotations

import signal
from io import StringIO
from pathlib import Path
from threading import Event
from typing import Any

import msgspec
import pytest
from matplotlib import pyplot
from rich.console import Console

from p2pdiloco.config.presets import PRESETS, for_run
from p2pdiloco.config.settings import DemoSettings
from p2pdiloco.daemon.display.terminal import Keys
from p2pdiloco.demo import demo, verdict
from p2pdiloco.demo import swarm as demo_swarm
from p2pdiloco.demo.demo import EXPLAINED, Demo, Interrupted, Screen, _headline, event_text, render_summary
from p2pdiloco.demo.judge import loss_unit
from p2pdiloco.demo.swarm import (
    Chronicle,
    HeldVersions,
    Line,
    Swarm,
    Tail,
    conflicts,
    held_by_traces,
    read_log,
)
from p2pdiloco.demo.verdict import DemoSummary, Kill, Pauses, choose_victim, failures, pauses
from p2pdiloco.errors import UserError
from p2pdiloco_lab.chaos import chaos_verdict
from p2pdiloco_lab.chaos.chaos_verdict import Facts

PEERS = {"one": "12D3KooWone", "two": "12D3KooWtwo", "three": "12D3KooWthree"}


def line(node: str, kind: str, mono: float = 1.0, fragment: int | None = None, **fields: Any) -> Line:
    return Line(node=node, mono=mono, kind=kind, about=fragment, **fields)


def version(node: str, kind: str, number: int, digest: str, fragment: int = 0, mono: float = 1.0) -> Line:
    return line(node, kind, mono, fragment, number=number, digest=digest, term=1)


def progress(
    node: str, mono: float, step_time_s: float = 0.1, longest_gap_s: float = 0.1, longest_aside_s: float = 0.0
) -> Line:
    figures = {
        "step_time_s": step_time_s, "longest_gap_s": longest_gap_s, "longest_aside_s": longest_aside_s,
    }  # fmt: skip
    return line(node, "progress", mono, **figures, loss=2.0)


@pytest.fixture
def chronicle() -> Chronicle:
    return Chronicle(fragments=2, names={peer: name for name, peer in PEERS.items()})


@pytest.mark.parametrize(
    ("preset", "words", "unit"),
    [
        ("tiny", "language model together, peer to peer, on Python's own source", "nats per byte"),
        ("digits", "image model together, peer to peer, on scikit-learn's digits", "nats per image"),
    ],
)
def test_words_and_units_are_those_of_what_is_trained(
    preset: str, words: str, unit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chronicle: Chronicle
) -> None:
    task = PRESETS[preset].run.task
    assert words in _headline(DemoSettings(preset=preset), task, kills=True)
    assert loss_unit(task) == unit
    numbers = dict.fromkeys(
        ("seconds", "loss_before", "loss_after", "longest_pause_s", "longest_aside_s"), 1.0
    )
    counts = dict.fromkeys(
        ("outer_updates", "inner_steps", "tokens", "kills", "versions_compared", "forks"), 0
    )
    unknown = dict.fromkeys(("participation", "median_inner_step_s", "t_resume_s", "t_back_s"))
    summary = DemoSummary(
        preset=preset, nodes=3, **numbers, **counts, **unknown,  # type: ignore[arg-type]
        t_resume_by_fragment_s={}, digests_agree=True, refusals={}, failures=[], sample="",
    )  # fmt: skip
    console = Console(width=200, record=True, file=StringIO())
    console.print(render_summary(summary, None, [], unit))
    assert f"1.000 → 1.000 {unit}" in console.export_text()
    drawn: list[Any] = []
    monkeypatch.setattr(verdict, "save_figure", lambda figure, path: drawn.append(figure))
    verdict.draw(tmp_path / "x.png", chronicle, 0.0, None, (1.0, 1.0), "demo", unit)
    monkeypatch.setattr(chaos_verdict, "save_figure", lambda figure, path: drawn.append(figure))
    chaos_verdict.draw_run(tmp_path / "x.png", Facts(Chronicle(fragments=2)), None, "chaos", unit)
    assert drawn[0].axes[0].get_ylabel() == f"loss, {unit}" and unit in drawn[0].axes[0].get_title()
    assert drawn[1].axes[1].get_ylabel().endswith(unit)
    pyplot.close("all")


def test_every_shared_version_is_compared_and_an_injected_disagreement_is_named(chronicle: Chronicle) -> None:
    one = HeldVersions("one", {0: {1: "a", 2: "b"}, 1: {1: "x"}})
    two = HeldVersions("two", {0: {2: "b", 3: "c"}})
    assert conflicts([one, two]) == ([], 1)
    chronicle.feed(version("one", "publish", 1, "aaaa", fragment=1))
    chronicle.feed(version("two", "apply", 1, "aaaa", fragment=1))
    assert conflicts(held_by_traces(chronicle.nodes.values()))[0] == []
    chronicle.feed(version("three", "apply", 1, "bbbb", fragment=1))
    found, compared = conflicts(held_by_traces(chronicle.nodes.values()))
    assert found == ["version 1 of fragment 1 differs: one, two against three"] and compared == 1


def test_a_branch_that_a_node_has_left_is_no_disagreement(chronicle: Chronicle) -> None:
    for number, digest in enumerate(["a1", "a2", "a3"], 1):
        chronicle.feed(version("one", "publish", number, digest))
    chronicle.feed(version("two", "apply", 1, "a1"))
    chronicle.feed(version("two", "publish", 2, "lost branch"))
    assert conflicts(held_by_traces(chronicle.nodes.values()))[0] != []
    chronicle.feed(version("two", "catchup", 3, "a3"))
    assert conflicts(held_by_traces(chronicle.nodes.values())) == ([], 1)


@pytest.mark.parametrize("reason", ["digest-differs", "false-state"])
def test_a_state_that_its_node_computes_differently_is_counted(chronicle: Chronicle, reason: str) -> None:
    refused = line("two", "refusal", fragment=1, reason=reason, number=4)
    chronicle.feed(refused)
    assert "another state" in event_text(refused, chronicle.nodes["two"])
    assert chronicle.wrong_digests() == ["1 times a node computed another state than the syncer"]


def test_participation_is_over_all_merges_of_all_nodes(chronicle: Chronicle) -> None:
    assert chronicle.participation() is None
    chronicle.feed(line("one", "merge", fragment=0, contributors=3, live=3))
    chronicle.feed(line("two", "merge", fragment=1, contributors=1, live=2))
    chronicle.feed(line("two", "merge", fragment=1, reason="stale: the world moved on", number=3))
    assert chronicle.participation() == 4 / 5


def test_the_victim_is_the_node_with_most_offices_and_never_the_last_one(chronicle: Chronicle) -> None:
    assert choose_victim(chronicle, list(PEERS)) == ""
    chronicle.feed(line("two", "office", fragment=0, syncer=PEERS["two"], term=1))
    chronicle.feed(line("one", "office", fragment=1, syncer=PEERS["two"], term=1))
    assert choose_victim(chronicle, list(PEERS)) == "two" and chronicle.offices_of("two") == [0, 1]
    assert choose_victim(chronicle, ["two"]) == ""
    chronicle.feed(line("one", "office", fragment=0, syncer=PEERS["three"], term=3))
    chronicle.feed(line("one", "office", fragment=1, syncer=PEERS["three"], term=2))
    chronicle.feed(line("two", "office", fragment=0, syncer=PEERS["two"], term=2))  # an old term, read late
    assert choose_victim(chronicle, list(PEERS)) == "three"


def test_the_victims_offices_are_those_of_the_moment_of_the_kill(chronicle: Chronicle) -> None:
    chronicle.feed(line("two", "office", 8.0, 0, syncer=PEERS["two"], term=1))
    chronicle.feed(line("two", "office", 9.9, 1, syncer=PEERS["two"], term=1))  # written before, read after
    chronicle.feed(line("one", "office", 10.1, 0, syncer=PEERS["one"], term=2))
    assert chronicle.offices_of("two", 10.0) == [0, 1] and chronicle.offices_of("two") == [1]


def test_recovery_is_the_first_version_published_after_the_kill(chronicle: Chronicle) -> None:
    chronicle.feed(version("one", "publish", 1, "a", mono=9.0))
    chronicle.feed(version("one", "publish", 2, "b", mono=9.9))  # read late, published before
    assert chronicle.published_after(0, 10.0) is None
    chronicle.feed(version("two", "publish", 3, "c", mono=11.5))
    chronicle.feed(version("two", "publish", 4, "d", mono=12.0))
    assert chronicle.published_after(0, 10.0) == 11.5 and chronicle.updates() == 4


def test_pauses_leave_start_up_and_what_is_outside_the_time_out(chronicle: Chronicle) -> None:
    node = chronicle.nodes["one"]
    assert pauses([node], 0, 100) == Pauses()
    for at_s, gap_s in ((1, 9.0), (2, 8.0), (3, 7.0), (4, 0.2), (5, 0.3), (200, 5.0)):
        chronicle.feed(progress("one", at_s, 0.1, gap_s, gap_s / 2))
    assert pauses([node], 0, 100) == Pauses(0.3, 0.15, 0.1)
    node.started("starting again")
    chronicle.feed(progress("one", 50, 0.1, 6.0, 6.0))
    assert pauses([node], 0, 100) == Pauses(0.3, 0.15, 0.1)


def test_exit_rule_names_every_failure() -> None:
    good = Kill("two", 10.0, (0, 3), {0: 1.0, 3: 2.0}, 5.0)
    assert failures(5.4, 2.4, [], good, True) == ()
    assert failures(5.4, 2.4, [], None, False) == ()
    cases = [
        (failures(5.4, 2.4, ["version 1 differs"], good, True), "do not agree: version 1 differs"),
        (failures(5.4, 5.4, [], good, True), "did not fall: 5.400 before, 5.400 after"),
        (failures(5.4, float("nan"), [], good, True), "did not fall"),
        (failures(5.4, 2.4, [], None, True), "nobody could be killed"),
        (
            failures(5.4, 2.4, [], Kill("two", 1.0, (0, 3), {0: 1.0}, 5.0), True),
            "no new version of fragment 3",
        ),
        (failures(5.4, 2.4, [], Kill("two", 1.0, (0,), {0: 1.0}, None), True), "two did not train again"),
    ]
    for found, words in cases:
        assert len(found) == 1 and words in found[0]


def test_the_report_has_the_keys_that_scripts_rely_on() -> None:
    promised = {
        "loss_before", "loss_after", "outer_updates", "kills", "participation", "longest_pause_s",
        "median_inner_step_s", "t_resume_s", "digests_agree", "nodes", "t_back_s", "seconds", "preset",
    }  # fmt: skip
    assert promised <= set(DemoSummary.__struct_fields__)


def test_a_tail_gives_whole_lines_only_and_skips_torn_ones(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path, "one")
    assert tail.lines() == []
    encoded = b'{"t":1,"mono":2.5,"kind":"join","fragment":null,"reason":"full member","new":[]}'
    path.write_bytes(encoded + b'\n{"t":1,"mo\n' + encoded[:20])
    assert tail.lines() == [line("one", "join", 2.5, reason="full member")]
    with path.open("ab") as file:
        file.write(encoded[20:] + b"\n")
    assert [found.kind for found in tail.lines()] == ["join"]
    assert tail.lines() == []


def test_a_log_that_is_rotated_is_read_on(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = Tail(path)
    encoded = [b'{"mono":%d,"kind":"closing","fragment":%d,"reason":""}\n' % (n, n) for n in range(5)]
    path.write_bytes(b"".join(encoded[:3]))
    assert [found.fragment for found in tail.lines()] == [0, 1, 2]
    path.write_bytes(b"".join(encoded[:4]))
    path.rename(tmp_path / "events.jsonl.1")
    path.write_bytes(encoded[4])
    assert [found.fragment for found in tail.lines()] == [3, 4]
    assert [found.fragment for found in read_log(path)] == [0, 1, 2, 3, 4]


def test_a_line_of_another_format_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"mono":1,"kind":"publish","number":"seven"}\n')
    with pytest.raises(msgspec.ValidationError, match="number"):
        read_log(path)


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (120, 40)])
def test_the_demos_names_and_figures_are_not_cut_on_small_terminals(size: tuple[int, int]) -> None:
    chronicle = Chronicle(4, {peer: f"node-{number}" for number, peer in enumerate(PEERS.values(), 1)})
    for number in (1, 2, 3):
        name = f"node-{number}"
        figures = {"inner_step": 12000 + number, "tokens_per_s": 15200.0, "loss": 2.5}
        for mono in range(30):
            chronicle.feed(line(name, "progress", float(mono), **figures))
        chronicle.feed(line(name, "evaluation", loss=2.25))
    chronicle.nodes["node-3"].started("starting again")
    for fragment in range(4):
        office = {"syncer": PEERS["one"], "term": 1}
        chronicle.feed(line("node-1", "office", fragment=fragment, **office))
    out = StringIO()
    width, height = size
    console = Console(file=out, width=width, height=height)
    console.print(Screen(console, "demo")._picture(chronicle, "training, 100 s to go"))
    text = out.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    for word in ("node-1", "node-2", "node-3", "starting again", "12003", "2.50", "0-3"):
        assert word in text, word
    assert ("2.25" in text and "15.2k" in text) or width < 80


def test_a_question_mark_explains_the_demo_and_q_leaves_it(
    chronicle: Chronicle, monkeypatch: pytest.MonkeyPatch
) -> None:
    presses = iter(["", "?", "", "??", "q"])
    monkeypatch.setattr(Keys, "pressed", lambda _: next(presses))
    demo = object.__new__(Demo)
    demo._screen, demo._stop = screen, _ = Screen(Console(file=StringIO(), width=200), "demo"), Event()

    def explained() -> bool:
        screen.show(chronicle, "training", lines=False)
        demo._pause(0.0)
        out = StringIO()
        Console(file=out, width=200).print(screen._picture(chronicle, "training"))
        return EXPLAINED[0] in out.getvalue()

    assert [explained() for _ in range(4)] == [False, True, True, True]
    with pytest.raises(Interrupted):
        explained()


def test_without_matplotlib_the_demo_goes_on_without_its_plot(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None)
    monkeypatch.setattr(Demo, "run", lambda self: 0 if self._plot is None else 1)
    assert demo.run(DemoSettings()) == 0
    assert "the plot needs matplotlib: in the clone" in " ".join(capsys.readouterr().err.split())
    with pytest.raises(UserError, match="--plot needs matplotlib"):
        demo.run(DemoSettings(plot=tmp_path / "x.png"))
    assert not list(tmp_path.iterdir())


# How the demo's nodes are ended.

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Slow:
    """A node that has so much to write before it ends."""

    name, exit_status = "slow", 0

    def __init__(self, seconds: float) -> None:
        self.left_s = seconds

    @property
    def alive(self) -> bool:
        return self.left_s > 0

    def remember_family(self) -> None:
        pass

    def signal(self, number: int) -> None:
        pass


@pytest.mark.process
@pytest.mark.parametrize(("preset", "late"), [("micro", ["slow"]), ("gpt2", [])])
def test_a_node_with_a_large_state_is_given_the_time_to_write_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, preset: str, late: list[str]
) -> None:
    manifest = for_run(preset, "demo")
    swarm, node, now_s = Swarm(tmp_path, tmp_path / "run.toml", manifest, nodes=0), Slow(30.0), 0.0
    swarm.nodes = [node]  # type: ignore[list-item]

    def pause(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        node.left_s -= seconds

    try:
        with monkeypatch.context() as patch:
            patch.setattr(demo_swarm.time, "monotonic", lambda: now_s)
            assert swarm.leave(pause) == late
    finally:
        swarm.guard.release()


@pytest.mark.process
def test_ctrl_z_stops_the_nodes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And `fg` lets them go on."""
    swarm = Swarm(tmp_path, tmp_path / "run.toml", for_run("micro", "demo"), nodes=0)
    sent: list[tuple[str, int]] = []

    class Told(Slow):
        def signal(self, number: int) -> None:
            sent.append((self.name, number))

        def start(self) -> None:
            raise ZeroDivisionError("no bootstrap here")

    swarm.bootstrap = Told(1.0)  # type: ignore[assignment]
    swarm.bootstrap.name = "bootstrap"
    swarm.nodes = [Told(1.0)]  # type: ignore[list-item]
    terminal = StringIO()
    screen = Screen(Console(file=terminal, force_terminal=True), "demo")
    cursors: list[tuple[int, int]] = []

    def kill(_pid: int, number: int) -> None:
        sent.append(("itself", number))
        cursors.append((terminal.getvalue().count(HIDE_CURSOR), terminal.getvalue().count(SHOW_CURSOR)))

    monkeypatch.setattr(demo_swarm.os, "kill", kill)
    screen.start()
    try:
        with pytest.raises(ZeroDivisionError):
            swarm.start_bootstrap(lambda seconds: None, screen.suspend)
        signal.raise_signal(signal.SIGTSTP)
        stop, go_on = signal.SIGSTOP, signal.SIGCONT
        nodes = ("bootstrap", "slow")
        assert sent == [*((n, stop) for n in nodes), ("itself", stop), *((n, go_on) for n in nodes)]
        assert cursors == [(1, 1)], "the shell has one meanwhile"
        assert terminal.getvalue().count(HIDE_CURSOR) == 2
    finally:
        screen.stop()
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        swarm.guard.release()
