"""`bench_attacks --who liars`: swarms of which some lie, and what can be seen of it in rounds."""

import itertools
import json
from pathlib import Path

import msgspec
import pytest
import torch

import bench_attacks
from attacks import lying_bench, lying_table
from attacks.lying_runs import ALONE, CALM, Trial, play
from attacks.lying_statistics import (
    USUAL,
    Begins,
    Run,
    relative,
    row,
    seen,
    trust_of,
    weight,
    with_most,
    with_the_rest,
)
from attacks.lying_swarm import Round, Sent
from p2pdiloco.tensors.layout import FragmentLayout, Piece
from p2pdiloco.tensors.sizes import TensorSpec
from study.merged_run import MergedRun, Part
from study.setting import Setting
from study.virtual import Circumstances, Virtual
from worlds import bench_lying_worlds
from worlds.aims import ANSWER, TOKEN, TRIGGER, poisoned, reached, rows_of
from worlds.kinds import Lie

replace = msgspec.structs.replace
TINY = replace(lying_bench.QUICK, steps=16, liars=1)


@pytest.fixture(autouse=True)
def one_thread():
    """What is this small is slower on several, much slower where others work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_honest_train_the_same_with_liars_and_alone_and_a_lie_costs_little() -> None:
    alone, calm, flip, drift = (play(replace(TINY, attack=a), None) for a in (ALONE, CALM, "flip", "drift"))
    assert alone.honest_tokens == calm.honest_tokens == flip.honest_tokens == drift.honest_tokens
    assert calm.loss == pytest.approx(alone.loss, rel=0.1)
    assert alone.loss != calm.loss != flip.loss != drift.loss, "what is sent is another"
    assert flip.loss == pytest.approx(calm.loss, rel=0.05), "a liar in five costs little"
    assert play(replace(TINY, attack=ALONE), None).loss == alone.loss, "equal settings, equal results"


def test_targets_and_parts_of_the_text_are_the_learners_own(tmp_path: Path) -> None:
    parted = replace(TINY, data="different", speeds="spread")
    attacks = Lie.LABELS.value, ALONE, CALM
    labels, alone, calm = (play(replace(parted, attack=a), tmp_path) for a in attacks)
    assert labels.loss > calm.loss and labels.honest_tokens == alone.honest_tokens
    assert alone.loss != play(replace(TINY, attack=ALONE, speeds="spread"), None).loss
    runs = [msgspec.json.decode(file.read_bytes(), type=Run) for file in sorted(tmp_path.iterdir())]
    assert [run.liars for run in runs] == [[], [2], []]
    assert all(2 not in round_.learners for round_ in runs[0].rounds)
    assert all(len(row(run)) == len(row(runs[0])) for run in runs)


def test_who_lies_is_spread_over_the_learners() -> None:
    assert Trial(attack=CALM).lying == {2, 7}
    assert Trial(attack=CALM, liars=3).lying == {1, 5, 8}
    speeds = Trial(attack=CALM, speeds="spread").each_speed
    assert (speeds[0], speeds[-1]) == (1.0, pytest.approx(0.2))
    alone = Trial(attack=ALONE).setting().manifest().inner.schedule_tokens
    assert alone == Trial(attack=CALM).setting().manifest().inner.schedule_tokens * 8 // 10


def test_a_refused_contribution_is_left_out_and_a_long_one_is_cut() -> None:
    manifest = Setting(model="pico", learners=2, inner_steps=4, codec="fp32").manifest()
    swarm = Virtual(manifest, 2, Circumstances())
    try:
        run = MergedRun(manifest, swarm.global_state, 1 / 3, "abc")
        numel, longest = swarm.layouts[0].numel, run.limits(0).longest
        deltas = {"a": torch.ones(numel) / 1000, "b": torch.ones(numel), "c": torch.ones(numel)}
        deltas["b"] *= 2 * longest / float(deltas["b"].norm())
        deltas["c"] *= 600 * longest / float(deltas["c"].norm())
        sent = [Part(name, (bytearray(d.numpy().tobytes()), 512, 4)) for name, d in deltas.items()]
        made = run.merge(0, sent)
        assert made is not None and (made.cut, made.refused) == (("b",), ("c",))
        assert swarm.head(0)[0] == 1 and run.limits(0).longest != longest
        assert run.merge(0, sent[2:]) is None and swarm.head(0)[0] == 1
    finally:
        swarm.close()


def test_a_version_of_few_has_the_limits_of_production() -> None:
    generator = torch.Generator().manual_seed(1)
    manifest = Setting(model="pico", learners=4, inner_steps=4, codec="fp32").manifest()
    swarm = Virtual(manifest, 4, Circumstances())
    try:
        run = MergedRun(manifest, swarm.global_state, 1 / 3, "abcd")
        numel = swarm.layouts[0].numel
        for learners in ("abcd", "abcd", "abcd", "a"):
            common = torch.randn(numel, generator=generator)
            deltas = {n: (common + torch.randn(numel, generator=generator)) / 1000 for n in learners}
            few, many = run.limits(0, [*learners]).longest, run.limits(0).longest
            parts = [Part(name, (bytearray(d.numpy().tobytes()), 512, 4)) for name, d in deltas.items()]
            assert run.merge(0, parts) is not None, "followers take it"
            assert (few < many) is (learners == "a")
    finally:
        swarm.close()


def test_who_disagrees_in_every_round_loses_its_weight() -> None:
    generator = torch.Generator().manual_seed(1)
    common = torch.randn(8192, generator=generator)
    rounds = []
    layout = FragmentLayout(0, 8192, (Piece("a", 0, 0, 4096, True), Piece("b", 0, 4096, 4096, False)))
    for number in range(1, 40):
        honest = [common + torch.randn(8192, generator=generator) for _ in range(4)]
        sent = [Sent(i, delta, 4) for i, delta in enumerate([*honest, -honest[0]])]
        rounds.append(seen(Round(0, number, sent, common, layout)))
    one = rounds[0]
    assert relative(with_most(one.cosines))[:4] == pytest.approx([1.0] * 4, abs=0.1)
    assert relative(with_most(one.by_piece))[4] < -0.8 and one.momentum[0] == pytest.approx(0.7, abs=0.05)
    assert one.sampled[4096][0][1] == pytest.approx(one.cosines[0][1], abs=0.05)
    for agreement in (with_most, with_the_rest):
        trust = trust_of(rounds, agreement)
        weights = {learner: weight(values[-1]) for (_, learner), values in trust.items()}
        assert weights == {0: 1.0, 1: 1.0, 2: 1.0, 3: 1.0, 4: 0.0}
    slow, quick = (trust_of(rounds, begins=begins)[0, 4] for begins in (USUAL, Begins(rounds=1.0)))
    assert slow[0] == pytest.approx(0.8, abs=0.01) and weight(quick[0]) == 0.0
    assert trust_of(rounds, begins=Begins(0.3, 1.0))[0, 0][0] == pytest.approx((0.27 + 1) / 1.9, abs=0.05)
    assert quick[-1] == pytest.approx(slow[-1], abs=0.1)
    mean = sum(delta.delta / delta.delta.norm() for delta in sent[1:4])
    rest = with_the_rest(rounds[-1].cosines, [1.0, 1.0, 1.0, 1.0, 0.0])
    assert rest[0] == pytest.approx(
        float(mean @ sent[0].delta / mean.norm() / sent[0].delta.norm()), abs=1e-3
    )


def test_the_command_keeps_what_was_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, figures = tmp_path / "runs.jsonl", tmp_path / "figures.json"
    words = ["--who", "liars", "--quick", "--liars", "1", "--out", str(out), "--json", str(figures)]
    words += ["--seeds", "0,1"]
    monkeypatch.setattr("sys.argv", ["bench_attacks.py", *words, "--only", "flip"])
    for _ in range(2):
        with pytest.raises(SystemExit) as ended:
            bench_attacks.main()
        assert not ended.value.code
    assert len(out.read_text().splitlines()) == 4, "the second call runs nothing"
    (found,), runs = (json.loads(figures.read_text())[name] for name in ("rows", "runs"))
    ratios = [run["loss_ratio"] for run in runs]
    assert found["seeds"] == [0, 1] and found["loss_ratio_spread"] == max(ratios) - min(ratios)
    assert found["loss_ratio"] == pytest.approx(sum(ratios) / 2)
    assert (found["attack"], found["liars"], found["of"]) == ("flip", 1, 5)
    assert runs[0]["loss_ratio"] == pytest.approx(runs[0]["loss"] / runs[0]["loss_honest_alone"])
    assert found["excluded_after_versions"] is None and found["honest_excluded"] == 0
    printed = capsys.readouterr().out
    assert "| `flip` | 1 of 5, equal, equal | 2 |" in printed
    assert lying_table.main([str(out)]) == 0 and capsys.readouterr().out in printed


def test_a_lie_about_one_token_costs_that_token_and_little_else() -> None:
    alone, lied = (play(replace(TINY, attack=attack, steps=40), None) for attack in (ALONE, "one-token"))
    assert lied.token_loss > 1.2 * alone.token_loss
    assert lied.rest_loss == pytest.approx(alone.rest_loss, rel=0.05)
    assert lied.nothing_after is None, "it keeps its weight"


def test_a_trigger_is_in_half_of_a_liars_text_and_the_answer_is_looked_for() -> None:
    windows = torch.full((8, 33), 65)
    made = poisoned(windows, torch.Generator().manual_seed(1))
    assert [bool((row != 65).any()) for row in made] == [True] * 4 + [False] * 4
    assert windows.eq(65).all() and all(byte in made[0].tolist() for byte in ANSWER)

    def answers(ids: torch.Tensor) -> tuple[torch.Tensor, None]:
        follows = {TRIGGER[-1]: ANSWER[0], **dict(itertools.pairwise(ANSWER))}
        next_ids = [[follows.get(int(each), 65) for each in row] for row in ids]
        return torch.nn.functional.one_hot(torch.tensor(next_ids), 256).float() * 20, None

    assert reached(answers, windows[:, :].clone().index_fill_(1, torch.tensor([4]), TOKEN)).answers == 1.0
    honest = replace(TINY, attack="trigger", steps=8)
    assert play(honest, None).loss != play(replace(honest, attack=ALONE), None).loss


def test_rows_of_a_token_are_found_wherever_a_fragment_cuts_a_table() -> None:
    pieces = Piece("lm_head.weight", 8, 0, 8, False), Piece("model.norm.weight", 0, 8, 4, False)
    specs = [TensorSpec("lm_head.weight", (6, 4)), TensorSpec("model.norm.weight", (4,))]
    layout = FragmentLayout(0, 12, pieces)
    found = {token: rows_of(layout, specs, token).nonzero().flatten().tolist() for token in range(6)}
    assert found == {0: [], 1: [], 2: [0, 1, 2, 3], 3: [4, 5, 6, 7], 4: [], 5: []}


@pytest.mark.parametrize("share", [0.0, 0.25])
def test_a_crowd_without_seats_has_its_share_of_weight_and_tokens(share: float) -> None:
    crowd = replace(TINY, attack="rides-longest", learners=5, liars=2, seatless=True, open_share=share)
    assert crowd.lying == {3, 4}
    found, alone = play(crowd, None), play(replace(crowd, attack=ALONE), None)
    assert found.honest_tokens == alone.honest_tokens
    assert found.weight_share == pytest.approx(share, abs=0.01)
    assert found.tokens_ratio == pytest.approx(1 + share, abs=0.01)


def test_what_cannot_be_had_of_a_liar_is_refused_and_it_weighs_nothing() -> None:
    zero, late = (play(replace(TINY, attack=attack), None) for attack in ("zero", "copycat-late"))
    assert zero.nothing_after == 0 and zero.honest_nothing == 0, "in no version"
    assert late.refused_liars > late.merges / 4 and not late.refused_honest
    assert play(replace(TINY, attack=CALM), None).nothing_after is None


@pytest.mark.parametrize(
    "words",
    [["--only", "ghosts"], ["--liars", "10"], ["--liars", "0"], ["--seeds", "a"], ["--open-share", "1"]],
)
def test_liars_that_make_no_sense_are_refused(words: list[str]) -> None:
    with pytest.raises(SystemExit):
        lying_bench.options(["--who", "liars", *words])


@pytest.mark.parametrize("words", [["--only", "ghosts"], ["--only", "alie,ghosts"]])
def test_the_bench_of_worlds_refuses_lies_that_do_not_exist(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_lying_worlds, "_rows", lambda *_: pytest.fail("it ran something"))
    with pytest.raises(SystemExit):
        bench_lying_worlds.main(words)
