"""`bench_attacks`: the table, the arguments, and that a verdict can be either."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

import bench_attacks
from attacks.excluding import excluded_after, honest_excluded
from attacks.lies import BY_A_MEMBER, Own
from attacks.outcome import Broken, Row, Seen, judge
from attacks.poisoned_learner import poison
from attacks.table import BY_STRANGERS, WITH_A_NEWCOMER
from attacks.usurper import usurp
from attacks.withholding import omit, withhold
from p2pdiloco.core.api.messages import VoteRequest
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.core.api.types import NEVER, ContributionHeader, Head, Stamp
from p2pdiloco.core.election import Office, Turn
from p2pdiloco.core.inbox import LearnerInbox
from p2pdiloco.core.membership import Heartbeats
from p2pdiloco.core.publisher import Publisher
from p2pdiloco.core.voting import Candidacy, VoteJudge
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.transfer import Transfers
from p2pdiloco.demo.guard import Guard
from p2pdiloco.demo.swarm import Line
from p2pdiloco.tasks.causal_lm import CausalLM
from worlds.aims import Reached

CALM = Seen(
    alive=3,
    nodes=3,
    versions=60,
    steps=400,
    processor_s=20.0,
    rss_mib=300.0,
    loss=3.0,
    run_tokens=200_000,
    trained=210_000,
)
BAD = {
    Broken.NODE_ENDED: {"alive": 2},
    Broken.LOSS: {"loss": float("inf")},
    Broken.WORSE: {"loss": 4.5},
    Broken.FORGED: {"forged": ("0/1017",)},
    Broken.AUTHORS: {"strangers": ("somebody",)},
    Broken.OFFICE: {"offices": 1},
    Broken.SCHEDULE: {"run_tokens": 10_200_000},
    Broken.VERSIONS: {"versions": 0},
    Broken.STEPS: {"processor_s": 40.0},
    Broken.MEMORY: {"rss_mib": 900.0},
    Broken.NEWCOMER: {"newcomer": False},
}
OF_PARAMETERS = list(BAD)[:7]


def test_a_swarm_that_goes_on_held_the_attack_off_and_a_member_may_hold_offices() -> None:
    row = judge("forged-head", CALM, CALM)
    assert (row.verdict, row.broken, row.parameters_kept) == ("held off", [], True)
    assert row.versions_ratio == row.steps_ratio == 1.0
    elected = msgspec.structs.replace(CALM, offices=3)
    assert judge("member-x100", elected, CALM, member=True).verdict == "held off"


@pytest.mark.parametrize("what", BAD)
def test_every_kind_of_harm_makes_the_verdict_false(what: Broken) -> None:
    calm = msgspec.structs.replace(CALM, newcomer=True)
    row = judge("forged-head", msgspec.structs.replace(calm, **BAD[what]), calm)
    assert row.verdict == "succeeds" and row.broken == [what.value]
    assert row.parameters_kept is (what not in OF_PARAMETERS)


def test_a_loss_that_nobody_told_and_a_calm_swarm_that_made_nothing_are_no_success() -> None:
    assert not judge("x", msgspec.structs.replace(CALM, loss=None), CALM).parameters_kept
    still = msgspec.structs.replace(CALM, versions=0)
    assert judge("x", CALM, still).broken == [Broken.NO_FIGURES.value]
    late = msgspec.structs.replace(CALM, newcomer=False)
    assert judge("x", late, late).broken == [Broken.NO_FIGURES.value]


def test_what_a_row_says_can_be_read() -> None:
    row = judge("ghosts", msgspec.structs.replace(CALM, versions=3, refused={"garbage": 7}), CALM)
    text = bench_attacks.shown([row])
    assert "succeeds: few versions" in text and "garbage 7" in text
    assert msgspec.convert(msgspec.to_builtins(row), Row) == row


def test_arguments_choose_attacks() -> None:
    assert bench_attacks.options([]).attacks == list(BY_STRANGERS)
    assert bench_attacks.options(["--who", "member"]).attacks == list(BY_A_MEMBER)
    chosen = bench_attacks.options(["--only", "ghosts,all-offices", "--seconds", "5"])
    assert (chosen.attacks, chosen.seconds) == (["ghosts", "all-offices"], 5.0)
    assert set(BY_STRANGERS) >= WITH_A_NEWCOMER


@pytest.mark.parametrize(
    "words", [["--only", "member-x100"], ["--seconds", "900"], ["--seconds", "nan"], ["--liars", "0"]]
)
def test_arguments_that_make_no_sense_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        bench_attacks.options(words)
    assert "error" in capsys.readouterr().err


def test_every_lie_changes_something() -> None:
    delta = torch.linspace(-1.0, 1.0, 8)
    label = ContributionHeader(
        "r", "all", 0, "me", Stamp(1, 1), NEVER, 0, bytes(32), 2048, 8, bytes(32), 8, "int8", True
    )
    own = Own(delta, torch.arange(8) < 2, moved=torch.ones(8))
    for lie in BY_A_MEMBER.values():
        claimed, sent = lie.label(label), lie.delta(lie.aimed(own))
        told = claimed.inner_steps > 1000 * label.inner_steps or not torch.equal(sent, delta)
        assert torch.isfinite(sent).all()
        stated = lie.scores([64]) != [64]
        keeps = lie.usurps or lie.withholds or lie.omits or lie.elects_itself or lie.trickles
        assert told or stated or keeps or not torch.equal(lie.merged(delta), delta)
        assert torch.isfinite(lie.delta(delta)).all() and claimed.tokens == 256 * claimed.inner_steps


def test_a_lie_about_one_token_or_the_last_update_is_as_long_as_it_may_be() -> None:
    delta = torch.linspace(-1.0, 1.0, 8)
    own = Own(delta, torch.arange(8) < 2, moved=torch.ones(8))
    wrong = BY_A_MEMBER["member-one-token"].aimed(own)
    assert torch.equal(wrong[2:], delta[2:]) and (wrong[:2] * delta[:2] < 0).all()
    rides = BY_A_MEMBER["member-rides-longest"].aimed(own)
    assert torch.nn.functional.cosine_similarity(rides, torch.ones(8), dim=0) > 0.9
    for sent in (wrong, rides, BY_A_MEMBER["member-trigger"].delta(delta)):
        assert float(sent.norm()) == pytest.approx(2.7 * float(delta.norm()), rel=1e-5)
    assert BY_A_MEMBER["member-trigger"].poisons


def test_a_poisoned_learner_reads_poisoned_text_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []
    monkeypatch.setattr(CausalLM, "_losses", lambda _task, _model, batch: read.append(batch[0]))
    poison()
    model, windows = torch.nn.Identity(), torch.full((4, 33), 65)
    for trains in (True, False):
        CausalLM._losses(None, model.train(trains), (windows,))  # type: ignore[arg-type]
    assert not torch.equal(read[0], windows) and torch.equal(read[1], windows)


def test_what_the_model_came_to_is_in_the_row() -> None:
    end = Reached(token_loss=3.0, rest_loss=2.0, answers=0.0)
    harmed = msgspec.structs.replace(CALM, end=Reached(token_loss=9.0, rest_loss=2.2, answers=0.75))
    row = judge("member-one-token", harmed, msgspec.structs.replace(CALM, end=end), member=True)
    assert (row.token_loss_ratio, row.answers) == (3.0, 0.75) and row.rest_loss_ratio == pytest.approx(1.1)
    shown = bench_attacks.shown([msgspec.structs.replace(row, liars=1)])
    assert "held out 1.100, one token 3.000, answers 0.75" in shown


@pytest.mark.parametrize("begun", [False, True])
def test_a_usurper_does_as_others_do_until_it_begins(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    head, asked = Head(7, bytes(32), 100, 2), []
    for owner, name in ((Publisher, "begin"), (VoteJudge, "grants"), (Turn, "look"), (Office, "why_open")):
        monkeypatch.setattr(owner, name, lambda *words, name=name: asked.append(name) or name)
    monkeypatch.setattr(Heartbeats, "progress", lambda _self: None)
    monkeypatch.setattr(Candidacy, "request", lambda _self: VoteRequest("all", 0, 3, head, "open"))
    usurp(lambda _what: begun, boasts=True)
    Publisher.begin(None, None, 0, 0)
    office = SimpleNamespace(holding=False)
    said = VoteJudge.grants(None, "p1", None, 0.0), Turn.look(SimpleNamespace(), False, 0.0)
    why = Office.why_open(office, 0.0)
    number = Candidacy.request(None).head.number
    assert (said, why, number > 7) == (
        ((False, False), "mine", True) if begun else (("grants", "look"), "why_open", False)
    )
    assert bool(asked) is not begun


async def test_who_withholds_does_as_others_do_until_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = False

    async def given(*_: object) -> str:
        return "given"

    held = [SimpleNamespace(child=name, own=name == "me") for name in ("a", "b", "me")]
    monkeypatch.setattr(Transfers, "on_pull", given)
    monkeypatch.setattr(LearnerInbox, "ready", lambda _self: held, raising=False)
    withhold(lambda _what: begun)
    omit(lambda _what: begun)
    pull = wire.PullUpdate("r", 0, 1)
    assert await Transfers.on_pull(None, "p", pull) == "given" and LearnerInbox.ready(None) == held
    begun = True
    assert await Transfers.on_pull(None, "p", pull) == wire.refuse(PullRefusal.BUSY)
    assert [one.child for one in LearnerInbox.ready(None)] == ["b", "me"]


def test_an_attacker_that_cannot_begin_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guard = Guard()
    side = SimpleNamespace(
        join="/nowhere", run="r", name="n", nodes=(), manifest=tmp_path, swarm=SimpleNamespace(guard=guard)
    )
    monkeypatch.setenv("PYTHONPATH", str(Path(bench_attacks.__file__).parent), prepend=":")
    with bench_attacks.strangers("no-such-attack", side, tmp_path, 1.0) as process:
        assert process.stdout is not None and process.stdout.readline() == ""
    assert process.poll() not in (None, 0)
    guard.release()


def test_a_row_says_when_the_liar_lost_its_place_and_who_else_did() -> None:
    def line(at_s: float, kind: str, **fields: object) -> Line:
        return Line(mono=at_s, kind=kind, **fields)

    def version(at_s: float, fragment: int, number: int) -> Line:
        return line(at_s, "apply", about=fragment, number=number, digest="d")

    logs = {
        "a": [version(9.0, 0, 6), *(version(10.0 + n, 0, 7 + n) for n in range(4)), version(11.0, 1, 2)],
        "b": [version(11.5, 0, 8), line(12.1, "excluded", peer="liar"), version(12.2, 0, 9)],
    }
    assert excluded_after(logs, ["liar"], 10.0) is None, "one has not"
    logs["a"].append(line(12.5, "excluded", peer="liar"))
    assert excluded_after(logs, ["liar"], 10.0) == 3, "versions 7, 8, 9 of fragment 0"
    assert honest_excluded(logs, ["liar"]) == 0
    logs["b"].append(line(13.0, "excluded", peer="a"))
    assert honest_excluded(logs, ["liar"]) == 1
    found = msgspec.structs.replace(CALM, liars=1, excluded_after=3, honest_excluded=1, loss=3.3)
    row = judge("member-x100", found, CALM, member=True)
    assert (row.liars, row.of, row.excluded_after_versions, row.honest_excluded) == (1, 4, 3, 1)
    assert row.loss_ratio == pytest.approx(1.1)
    assert "excluded after 3 versions of a fragment, honest excluded: 1" in bench_attacks.shown([row])
