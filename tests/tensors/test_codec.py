"""Codecs: bounded error at any size and magnitude, exact decoding, refusal of what is not sound."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from deadlines import within_s
from hypothesis import given, settings
from hypothesis import strategies as st
from vault_kit import advance, noise, vault_of

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.config.presets import for_run
from p2pdiloco.core.api.types import NO_LIMITS, MergeLimits
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.hashing import content_digest
from p2pdiloco.learner.ranks import accelerators
from p2pdiloco.tensors.codecs import (
    CODECS,
    FOUR_BIT_TILE,
    INT8_BLOCK,
    PORTABLE_TILE,
    TOPK_CHUNK,
    TOPK_KEPT,
    Unsound,
    UnusableInputs,
    add_scaled,
    codec,
    norm,
    scratch,
    state_digest,
)
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import MAX_MAGNITUDE, Input
from p2pdiloco.tensors.outer_update import Correction, longest_encoded
from p2pdiloco.tensors.vault import Vault

FP32_MAX = float(torch.finfo(torch.float32).max)
ALL = sorted(CODECS)
AROUND = [width + n for width in (64, INT8_BLOCK) for n in (-1, 0, 1)]
MANY = [3 * INT8_BLOCK + 5, TOPK_CHUNK, TOPK_CHUNK + 9, 65 * INT8_BLOCK + 3]
sizes = st.sampled_from([0, 1, 2, 7, *AROUND, *MANY])
exponents = st.integers(-149, 127)


def values(numel: int, exponent: int, seed: int) -> torch.Tensor:
    made = torch.randn(numel, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (made * 2.0**exponent).clamp(-FP32_MAX, FP32_MAX).float()


def error_bound(name: str, source: torch.Tensor) -> torch.Tensor:
    x = source.double().abs()
    if name == "fp32":
        return torch.zeros_like(x)
    if name == "bf16":  # half an ulp of 8 bits; denormals; saturation at the largest bf16
        return torch.maximum(x * 2.0**-8, torch.tensor(2.0**-126))
    width = {"int8": INT8_BLOCK, "topk": TOPK_CHUNK}.get(name, 64)
    bound = torch.empty_like(x)
    for at in range(0, len(x), width):
        block = x[at : at + width]
        bound[at : at + width] = BOUNDS[name](block, block.max()).clamp(min=2.0**-100)
    return bound


def int8_bound(block: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    # a full step only where 127 steps would overflow fp32
    step = top / 127 if top < FP32_MAX / 2 else 2 * top / 127
    return (step / 2 * (1 + 1e-4)).expand(len(block))


BOUNDS = {
    "int8": int8_bound,
    # half a step, and the scale's rounding to bf16 at the largest level
    "int4": lambda block, top: ((0.5 / 7 + 2.0**-8) * top).expand(len(block)),
    # a third between two powers of two; half of the smallest one and a half below it
    "e3m0": lambda block, top: torch.maximum(block * 0.34, 1.51 * 2.0**-7 * top),
    # what is left out is at most as large as what is sent, which is at most the mean of the larger half
    "topk": lambda block, top: top.expand(len(block)) * (1 + 2.0**-8),
}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(ALL), sizes, exponents, st.integers(0, 1000))
def test_round_trip_is_within_the_codec_s_bound(name, numel, exponent, seed):
    source, chosen = values(numel, exponent, seed), codec(name)
    payload = chosen.encode(source)
    assert len(payload) == chosen.encoded_bytes(numel)
    decoded = torch.full((numel,), math.nan)
    chosen.decode(payload, decoded)
    assert bool(((decoded.double() - source.double()).abs() <= error_bound(name, source)).all())
    top = float(decoded.abs().max()) if numel else 0.0
    assert top <= chosen.peak(payload, numel) <= max(1.01 * top, 2.0**-90)


ACCELERATORS = accelerators()


@pytest.mark.skipif(not ACCELERATORS, reason="needs a device that is not the CPU")
@pytest.mark.parametrize("numel", [65, INT8_BLOCK + 1, TOPK_CHUNK + 9, 5 * TOPK_CHUNK])
@pytest.mark.parametrize("name", ALL)
def test_a_learner_s_device_decodes_to_the_cpu_s_bits_and_encodes_within_the_bound(name, numel):
    source, chosen = values(numel, 3, numel), codec(name)
    payload = chosen.encode(source.to(ACCELERATORS[0]))
    here, there = torch.empty(numel), torch.empty(numel, device=ACCELERATORS[0])
    chosen.decode(payload, here)
    chosen.decode(payload, there)
    assert torch.equal(here, there.cpu())
    assert bool(((here.double() - source.double()).abs() <= error_bound(name, source)).all())


@pytest.mark.parametrize("name", ALL)
def test_largest_and_mixed_magnitudes_stay_finite(name):
    source = torch.tensor([FP32_MAX, -FP32_MAX, 1e-45, -0.0, 1.0, 3.39e38])
    decoded = torch.empty(len(source))
    codec(name).decode(codec(name).encode(source), decoded)
    assert decoded.isfinite().all()
    # topk's two magnitudes are means over 32 places, which these six do not fill
    assert (decoded[:2] / FP32_MAX).abs().min() > (0.01 if name == "topk" else 0.99)


def test_int8_bytes_and_products_are_exactly_those_of_the_format():
    source = values(2 * INT8_BLOCK + 9, -7, 3)
    payload = codec("int8").encode(source)
    scales = np.frombuffer(payload, "<f4", count=3)
    quants = np.frombuffer(payload, np.int8, offset=12)
    blocks = [source.numpy()[at : at + INT8_BLOCK] for at in range(0, len(source), INT8_BLOCK)]
    assert [float(s) for s in scales] == [float(np.abs(b).max() / np.float32(127)) for b in blocks]
    assert np.array_equal(
        quants, np.concatenate([np.rint(b / s) for b, s in zip(blocks, scales, strict=True)])
    )
    decoded = torch.empty(len(source))
    codec("int8").decode(payload, decoded)
    reference = quants.astype(np.float32) * np.repeat(scales, INT8_BLOCK)[: len(quants)]
    assert decoded.numpy().tobytes() == reference.tobytes()


def test_int8_rounds_ties_to_even():
    source = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5])
    assert list(np.frombuffer(codec("int8").encode(source), np.int8, offset=4)) == [127, 0, 2, 2, 0, -2]


def test_int8_never_sends_scales_whose_products_are_denormal():
    source = torch.cat([torch.full((INT8_BLOCK,), 1e-36), torch.full((INT8_BLOCK,), 2.0**-99)])
    payload = codec("int8").encode(source)
    smallest_normal = float(torch.finfo(torch.float32).tiny)
    scales = np.frombuffer(payload, "<f4", count=2)
    assert scales[0] == 0.0 and scales[1] > smallest_normal
    assert payload[8 : 8 + INT8_BLOCK] == bytes(INT8_BLOCK)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_source_is_our_own_error(name, bad):
    source = torch.zeros(INT8_BLOCK + 2)
    source[-1] = bad
    with pytest.raises(ValueError, match="non-finite"):
        codec(name).encode(source)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("change", [-1, 1])
def test_wrong_size_is_refused_and_leaves_the_output_alone(name, change):
    payload = bytes(codec(name).encoded_bytes(10) + change)
    out = torch.full((10,), 5.0)
    with pytest.raises(RemoteError) as refused:
        codec(name).decode(payload, out)
    assert refused.value.reason == "wrong-size"
    assert bool((out == 5.0).all())


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("fp32", struct.pack("<ff", 1.0, math.nan)),
        ("fp32", struct.pack("<ff", -math.inf, 0.0)),
        ("bf16", struct.pack("<HH", 0, 0x7F80)),
        ("bf16", struct.pack("<HH", 0xFFC1, 0)),
        ("int8", struct.pack("<fbb", math.nan, 0, 0)),
        ("int8", struct.pack("<fbb", math.inf, 1, 0)),
        ("int8", struct.pack("<fbb", 2.0**122, 127, 0)),
        ("int8", struct.pack("<fbb", -(2.0**122), -128, 0)),
        ("int4", struct.pack("<H", 0x7FC0) + bytes(32)),
        ("int4", struct.pack("<H", 0x7F00) + bytes(32)),
        ("e3m0", struct.pack("<H", 0xFF80) + bytes(32)),
        (
            "topk",
            struct.pack("<HH", 0, 0x7F80) + bytes(8) + codec("topk").encode(values(TOPK_CHUNK, 0, 1))[12:],
        ),
    ],
)
def test_non_finite_payloads_are_refused(name, payload):
    with pytest.raises(RemoteError) as refused:
        codec(name).decode(payload, torch.empty(2))
    assert refused.value.reason == "non-finite"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ALL), st.data())
def test_any_bytes_decode_to_finite_values_or_are_refused(name, data):
    numel = data.draw(st.integers(0, 40))
    size = codec(name).encoded_bytes(numel)
    payload = data.draw(st.binary(min_size=size, max_size=size))
    out = torch.zeros(numel)
    try:
        codec(name).decode(payload, out)
    except RemoteError as error:
        assert error.reason == "non-finite" or (name == "topk" and error.reason == "out-of-range")
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("name", ALL)
def test_encode_fills_the_buffer_that_it_is_given(name):
    source = values(INT8_BLOCK + 1, 0, 1)
    out = bytearray(codec(name).encoded_bytes(len(source)))
    assert codec(name).encode(source, out) is out
    assert out == codec(name).encode(source)
    with pytest.raises(InvariantViolation):
        codec(name).encode(source, bytearray(3))


def test_int4_levels_and_scales_are_those_of_the_format():
    source = values(2 * 64 + 5, -7, 4)
    payload = codec("int4").encode(source)
    assert len(payload) == 3 * 34
    padded = np.zeros(3 * 64, np.float32)
    padded[: len(source)] = source.numpy()
    decoded = torch.empty(len(source))
    codec("int4").decode(payload, decoded)
    for block in range(3):
        x, raw = padded[block * 64 :][:64], payload[6 + 32 * block :][:32]
        scale = torch.tensor(np.abs(x).max() / np.float32(7)).bfloat16().float().numpy()
        assert struct.unpack_from("<H", payload, 2 * block)[0] == int(scale.view(np.uint32) >> 16)
        quants = [(b & 15) - 8 for b in raw] + [(b >> 4) - 8 for b in raw]
        assert quants == list(np.clip(np.rint(x / scale), -7, 7))
        part = decoded[block * 64 :][:64].numpy()
        assert np.array_equal(part, (np.array(quants, np.float32) * scale)[: len(part)])


def test_e3m0_takes_the_nearest_power_of_two():
    source = torch.tensor([1.0, -0.76, 0.74, 0.26, -0.12, 2.0**-6, 1.6 * 2.0**-7, 1.4 * 2.0**-7, -1e-9, 0.0])
    decoded = torch.empty(len(source))
    codec("e3m0").decode(codec("e3m0").encode(source), decoded)
    assert decoded.tolist() == [1.0, -1.0, 0.5, 0.25, -0.125, 2.0**-6, 2.0**-6, 0.0, 0.0, 0.0]


def _levels(name: str) -> list[float]:
    """What codes 0 to 15 stand for, as the format says."""
    if name == "int4":
        return [float(max(code - 8, -7)) for code in range(16)]
    return [(-1.0 if c & 8 else 1.0) * (2.0 ** ((c & 7) - 7) if c & 7 else 0.0) for c in range(16)]


@pytest.mark.parametrize("name", ["int4", "e3m0"])
@pytest.mark.parametrize("scale", [2.0**-133, 2.0**-126, 0.3, 2.0**100, 2.0**125])
def test_every_pair_of_4_bit_codes_decodes_to_the_bits_of_level_times_scale(name, scale):
    """Signs of zero, denormal products and large scales included: peers must reach the same bits."""
    scales = torch.full((8,), scale).bfloat16()
    payload = bytearray(scales.view(torch.uint8).numpy().tobytes() + bytes(range(256)))
    got = torch.empty(512)
    codec(name).decode(payload, got)
    codes = torch.arange(256).view(8, 32)
    expected = torch.tensor(_levels(name))[torch.cat((codes & 15, codes >> 4), dim=1)] * scales[0].float()
    assert torch.equal(got.view(torch.int32), expected.flatten().view(torch.int32))


@pytest.mark.parametrize("name", ["int4", "e3m0"])
def test_4_bit_payloads_of_more_than_one_tile_decode_as_their_parts(name):
    chosen, numel = codec(name), FOUR_BIT_TILE + 100
    source = torch.randn(numel, generator=torch.Generator().manual_seed(4))
    whole, part = torch.empty(numel), torch.empty(100)
    chosen.decode(chosen.encode(source), whole)
    chosen.decode(chosen.encode(source[FOUR_BIT_TILE:].clone()), part)
    assert torch.equal(whole[FOUR_BIT_TILE:], part)


def test_topk_sends_the_largest_of_every_chunk_with_two_magnitudes():
    source = values(TOPK_CHUNK + 200, -3, 5)
    decoded = torch.empty(len(source))
    payload = codec("topk").encode(source)
    codec("topk").decode(payload, decoded)
    assert len(payload) == 2 * 108
    for part, sent in (
        (source[:TOPK_CHUNK], decoded[:TOPK_CHUNK]),
        (source[TOPK_CHUNK:], decoded[TOPK_CHUNK:]),
    ):
        order = part.abs().argsort(descending=True)
        assert set(sent.nonzero().flatten().tolist()) == set(order[:TOPK_KEPT].tolist())
        assert torch.equal(sent.sign()[order[:TOPK_KEPT]], part.sign()[order[:TOPK_KEPT]])
        for half in (order[: TOPK_KEPT // 2], order[TOPK_KEPT // 2 : TOPK_KEPT]):
            mean = part[half].abs().mean()
            assert bool(((sent[half].abs() - mean).abs() < 2.0**-8 * mean).all())


@pytest.mark.parametrize("most", [1, 5, 200])
def test_topk_decides_by_place_between_equal_elements(most):
    """Modulo 512 first: how the search goes, and fixed."""
    drawn = np.random.default_rng(most).integers(-most, most, TOPK_CHUNK, endpoint=True).astype(np.float32)
    decoded = torch.empty(TOPK_CHUNK)
    codec("topk").decode(codec("topk").encode(torch.from_numpy(drawn)), decoded)
    order = sorted(range(TOPK_CHUNK), key=lambda place: (-abs(drawn[place]), place % 512, place))
    assert set(decoded.nonzero().flatten().tolist()) == set(order[:TOPK_KEPT])


def test_topk_refuses_an_element_that_is_named_twice():
    payload = codec("topk").encode(torch.randn(TOPK_CHUNK))
    payload[12:15] = payload[15:18]
    with pytest.raises(RemoteError) as refused:
        codec("topk").decode(payload, torch.empty(TOPK_CHUNK))
    assert refused.value.reason == "out-of-range"


# Arithmetic that is the same everywhere: merges in processes with other vector instructions and threads.

PROGRAM = Path(__file__).with_name("portable_merges.py")
HERE = torch.backends.cpu.get_cpu_capability()


def levels() -> list[str]:
    """Vector instructions that torch can be told to use here; it takes more than there is without a
    question."""
    known = ["default", "avx2", "avx512"]
    return known[: known.index(HERE.lower()) + 1] if HERE.lower() in known else ["default", HERE.lower()]


def made_with(level: str) -> tuple[str, list[dict[str, list[str]]]]:
    """What a process with these vector instructions says that it used, and made with 1, 2 threads."""
    # Threads that wait sleep: they have no processors of their own here.
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": level, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, timeout=within_s(120))
    used, *by_threads = json.loads(done.stdout)
    return used, by_threads


@pytest.mark.process
def test_a_merge_has_the_same_bits_with_all_vector_instructions_and_numbers_of_threads() -> None:
    found = [made_with(level) for level in levels()]
    used = {level for level, _ in found}
    assert len(used) == len(found) or HERE.lower() not in ("avx2", "avx512"), used
    expected = found[0][1][0]
    for level, by_threads in found:
        for threads, cases in enumerate(by_threads, 1):
            wrong = [name for name in expected if cases[name] != expected[name]]
            assert not wrong, f"{wrong} differ with {level} and {threads} threads"


@pytest.mark.parametrize("numel", [0, 1, 63, 64, 65, 127, 1000, 65_536, 65_537, 200_003])
@pytest.mark.parametrize("exponent", [-149, -70, -30, -10, 0, 40, 63, 64, 127])
def test_the_norm_is_right_at_any_size_and_magnitude(numel: int, exponent: int) -> None:
    drawn = np.random.default_rng(numel).uniform(-1, 1, numel)
    values = torch.from_numpy((drawn * 2.0**exponent).astype(np.float32))
    exact = math.sqrt(math.fsum(value * value for value in values.tolist()))
    assert norm(values) == pytest.approx(exact, rel=2e-6)
    assert norm(torch.cat([values, torch.zeros(70_000)])) == pytest.approx(exact, rel=2e-6)


def test_the_norm_follows_its_rule_to_the_bit() -> None:
    values = torch.from_numpy(np.random.default_rng(3).standard_normal(2 * 65_536 + 777, np.float32))
    squares = values.numpy() * values.numpy()
    sums = squares[:65_536] + np.float32(2.0**-100)
    sums = sums + squares[65_536 : 2 * 65_536]
    sums[:777] += squares[2 * 65_536 :]
    while len(sums) > 64:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    assert norm(values) == math.sqrt(math.fsum(sums.tolist()))


def test_the_norm_is_the_same_where_small_numbers_are_made_zero() -> None:
    values = torch.from_numpy(np.random.default_rng(4).standard_normal(5000, np.float32))
    values[1000:] *= 1e-20  # squares below fp32's normal numbers
    values[2000:] *= 1e-20
    kept = norm(values), norm(values[500:])
    assert torch.set_flush_denormal(True)
    try:
        assert (norm(values), norm(values[500:])) == kept
    finally:
        torch.set_flush_denormal(False)


def test_nothing_not_a_number_and_infinity_have_no_length() -> None:
    assert [norm(torch.zeros(numel)) for numel in (0, 10, 1000, 70_000)] == [0.0] * 4
    for wrong in (math.nan, math.inf):
        assert not norm(torch.full((1000,), wrong)) < math.inf
        assert not norm(torch.full((10,), wrong)) < math.inf


def test_products_are_rounded_before_they_are_added() -> None:
    drawn = np.random.default_rng(5).standard_normal((2, PORTABLE_TILE + 77), np.float32)
    total = torch.from_numpy(drawn[0].copy())
    add_scaled(total, torch.from_numpy(drawn[1]), 1 / 3, scratch(len(total)))
    assert np.array_equal(total.numpy(), drawn[0] + drawn[1] * np.float32(1 / 3))


# An update made again from the contributions that it names: the same bytes, or it is not their merge.

SPECS = [TensorSpec("emb", (40, 16), True), TensorSpec("w", (64, 32)), TensorSpec("b", (64,))]
NUMEL = sum(spec.numel for spec in SPECS)
DENSE = sorted(name for name, each in CODECS.items() if not each.sparse)
LIMITS = MergeLimits(most_tokens=250, longest=1.2 * 0.01 * math.sqrt(NUMEL))


def make(contribution: str, update: str, merge: str = "rda") -> Vault:
    return vault_of(SPECS, contribution, update, start=1.0, merge=merge)


def work(name: str) -> list[Input]:
    """Four contributions: one is too long, one says too many tokens, one is trusted little."""
    generator = torch.Generator().manual_seed(1)
    deltas = [torch.randn(NUMEL, generator=generator) * 0.01 * (1 + 2 * (n == 2)) for n in range(4)]
    labels = [(100, 24, 64), (300, 24, 64), (120, 12, 64), (90, 20, 5)]
    return [Input(codec(name).encode(d), *label) for d, label in zip(deltas, labels, strict=True)]


@pytest.mark.parametrize("merge", ["rda", "mean"])
@pytest.mark.parametrize("name", DENSE)
def test_whoever_has_the_contributions_makes_the_same_update(name: str, merge: str) -> None:
    syncer, auditor = make("int8", name, merge), make("int8", name, merge)
    inputs = work("int8")
    made = syncer.merge(0, 1, inputs, limits=LIMITS, seed=b"draws the sample")
    assert made.found.cut == (2,), "the limits have a part in it"
    before = auditor.state_digest_of(0, 0)
    remade = auditor.maker.remake(0, inputs, LIMITS, b"draws the sample")
    assert (remade.update_digest, remade.found) == (made.update_digest, made.found)
    assert auditor.state_digest_of(0, 0) == before and auditor.version(0) == 0
    with pytest.raises(InvariantViolation, match="spare is empty"):
        auditor.commit(0, 1)


def test_nothing_of_an_audit_is_in_the_next_merge() -> None:
    vault, other = make("int8", "int8"), make("int8", "int8")
    vault.maker.remake(0, work("int8")[:2])
    assert vault.merge(0, 1, work("int8")).update_digest == other.merge(0, 1, work("int8")).update_digest


def goes_on(vault: Vault, updates: list[bytearray]) -> torch.Tensor:
    """Parameters after these updates, and many that all have in common."""
    nothing = codec("fp32").encode(torch.zeros(NUMEL))
    for number, update in enumerate([*updates, *[nothing] * 120], 1):
        advance(vault, number, update)
    return vault.theta(0).clone()


def correction(true: bytearray, false: bytearray) -> Correction:
    return Correction(true, false, (content_digest(true), content_digest(false)))


def test_a_correction_says_whether_it_is_what_came() -> None:
    true, false = bytearray(b"as it should have been"), bytearray(b"as it was")
    found = correction(true, false)
    assert found.is_whole() and not Correction(true, false, found.digests[::-1]).is_whole()
    for damaged in (true, false):
        damaged[3] ^= 1
        assert not found.is_whole()
        damaged[3] ^= 1


def test_a_false_update_is_taken_back_in_the_end_momentum_included() -> None:
    maker, inputs = make("int8", "fp32").maker, work("int8")
    true = maker.remake(0, inputs, LIMITS).update
    false = codec("fp32").encode(torch.randn(NUMEL, generator=torch.Generator().manual_seed(5)) * 0.01)
    later = maker.remake(0, inputs[::-1], LIMITS)
    repaired = maker.remake(0, inputs[::-1], LIMITS, b"", correction(true, false))
    assert repaired.update_digest != later.update_digest
    honest = goes_on(make("int8", "fp32"), [true, later.update, later.update])
    lied = goes_on(make("int8", "fp32"), [false, later.update, later.update])
    healed = goes_on(make("int8", "fp32"), [false, later.update, repaired.update])
    harm, rest = float((lied - honest).norm()), float((healed - honest).norm())
    assert rest < 0.1 * harm, (rest, harm)


def test_a_repair_is_no_longer_than_any_update() -> None:
    maker, inputs = make("int8", "fp32").maker, work("int8")
    true = maker.remake(0, inputs, LIMITS).update
    false = codec("fp32").encode(torch.full((NUMEL,), 3.0))
    made = make("int8", "fp32").merge(0, 1, inputs, limits=LIMITS, correction=correction(true, false))
    assert made.norm == pytest.approx(longest_encoded(LIMITS))
    assert maker.remake(0, inputs, LIMITS, b"", correction(true, false)).update_digest == made.update_digest


def test_whoever_has_both_updates_makes_the_same_repair() -> None:
    syncer, auditor, inputs = make("int8", "int8"), make("int8", "int8"), work("int8")
    true, false = syncer.maker.remake(0, inputs[:3]).update, syncer.maker.remake(0, inputs[1:]).update
    repair = correction(true, false)
    made = syncer.merge(0, 1, inputs, limits=LIMITS, seed=b"s", correction=repair)
    assert auditor.maker.remake(0, inputs, LIMITS, b"s", repair).update_digest == made.update_digest
    for other in (None, correction(false, true)):
        assert auditor.maker.remake(0, inputs, LIMITS, b"s", other).update_digest != made.update_digest


def test_every_other_input_makes_another_update() -> None:
    maker, inputs = make("int8", "int8").maker, work("int8")
    honest = maker.remake(0, inputs, LIMITS).update_digest
    first = inputs[0]
    others = {
        "one left out": (inputs[1:], LIMITS),
        "one's bytes": ([first._replace(payload=inputs[1].payload), *inputs[1:]], LIMITS),
        "a weight": ([first._replace(tokens=first.tokens + 10), *inputs[1:]], LIMITS),
        "steps": ([first._replace(inner_steps=12), *inputs[1:]], LIMITS),
        "trust": ([first._replace(trust=63), *inputs[1:]], LIMITS),
        "no limits": (inputs, NO_LIMITS),
        "another length": (inputs, MergeLimits(LIMITS.most_tokens, 0.9 * LIMITS.longest)),
    }
    found = {what: maker.remake(0, *changed).update_digest for what, changed in others.items()}
    assert honest not in found.values() and len(set(found.values())) == len(found)
    exact = make("fp32", "fp32").maker
    there, back = (exact.remake(0, work("fp32")[::way]).update_digest for way in (1, -1))
    assert there != back, "sums depend on the order"


def test_what_cannot_be_merged_is_named_and_a_sparse_update_cannot_be_made_again() -> None:
    maker, inputs = make("int8", "int8").maker, work("int8")
    with pytest.raises(UnusableInputs) as caught:
        maker.remake(0, [inputs[0], inputs[1]._replace(payload=b"short")])
    assert list(caught.value.faults) == [1]
    with pytest.raises(InvariantViolation, match="only its syncer knows"):
        make("int8", "topk").maker.remake(0, inputs)


def test_the_cosine_of_a_contribution_with_an_update() -> None:
    maker = make("int8", "fp32").maker
    inputs, exact = work("int8"), codec("fp32")
    delta = torch.empty(NUMEL)
    codec("int8").decode(inputs[0].payload, delta)  # type: ignore[arg-type]
    payload, other = inputs[0].payload, noise(9, NUMEL)
    wanted = float(torch.nn.functional.cosine_similarity(delta, other, dim=0))
    for update, cosine in ((2 * delta, 1.0), (-delta, -1.0), (other, wanted)):
        assert maker.cosine(0, payload, exact.encode(update), b"seed") == pytest.approx(cosine, abs=1e-5)
    zero = torch.zeros(NUMEL)
    assert maker.cosine(0, payload, exact.encode(zero), b"") is None
    assert maker.cosine(0, codec("int8").encode(zero), exact.encode(delta), b"") is None
    with pytest.raises(Unsound):
        maker.cosine(0, b"damaged", exact.encode(delta), b"")


# The vault: two of them fed the same bytes hold the same bits; nothing a peer sends can hurt it.

VAULT_LAYOUTS = plan_fragments(SPECS, 2)
FIRST, SECOND = (layout.numel for layout in VAULT_LAYOUTS)
"""Sizes of the fragments; the second has more than embeddings."""


def make_update(contribution="int8", update="int8", **more) -> Vault:
    return vault_of(SPECS, contribution, update, fragments=2, **more)


def without_version() -> Vault:
    return Vault(VAULT_LAYOUTS, OuterSection(), 24, "int8", "int8")


def contribute(vault: Vault, fragment: int, seed: int) -> bytearray:
    base = vault.theta(fragment)
    return vault.own.encode(fragment, base, base + noise(seed, len(base))).payload


@pytest.mark.parametrize("name", sorted(CODECS))
def test_merger_and_follower_hold_equal_bits(name):
    syncer, follower = make_update(name, name), make_update(name, name)
    assert syncer.state_digest_of(0, 0) == follower.state_digest_of(0, 0)
    for number in range(1, 5):
        for fragment in range(len(VAULT_LAYOUTS)):
            inputs = [
                (contribute(v, fragment, 7 * number + i), 100 * (i + 1), 4)
                for i, v in enumerate((syncer, follower))
            ]
            before = syncer.theta(fragment).clone()
            made = syncer.merge(fragment, number, inputs)
            assert follower.apply(fragment, number, made.update, 4) == made.state_digest
            assert torch.equal(syncer.theta(fragment), before)
            for vault in (syncer, follower):
                vault.commit(fragment, number, made.state_digest)
                assert vault.version(fragment) == number
                digest = state_digest(number, vault.theta(fragment), vault.momentum(fragment))
                assert vault.state_digest_of(fragment, number) == digest == made.state_digest
            assert not torch.equal(syncer.theta(fragment), before)


def test_a_result_is_the_version_before_and_eta_of_what_was_merged():
    vault = make_update("fp32", "fp32")
    assert torch.equal(vault.result(0), vault.theta(0))
    for number in range(1, 5):  # while momentum warms up
        before, delta = vault.theta(0).clone(), noise(number, FIRST)
        advance(vault, number, codec("fp32").encode(delta))
        digest = vault.state_digest_of(0, number)
        torch.testing.assert_close(vault.result(0), before - OuterSection().learning_rate * delta)
        assert torch.equal(vault.result(0), vault.theta(0)) == (number == 1), "there is no momentum at first"
        assert state_digest(number, vault.theta(0), vault.momentum(0)) == digest


def test_work_of_less_than_an_interval_moves_by_less_momentum():
    syncer, follower = make_update(), make_update()
    inputs = [(contribute(syncer, 0, 1), 10, 24), (contribute(syncer, 0, 2), 10, 4)]
    update = syncer.merge(0, 1, inputs).update
    syncer.commit(0, 1)
    assert follower.apply(0, 1, update, 24) == syncer.state_digest_of(0, 1)
    follower.commit(0, 1)
    made = syncer.merge(0, 2, [(contribute(syncer, 0, 3), 10, 4), (contribute(syncer, 0, 4), 10, 3)])
    assert made.state_digest == follower.apply(0, 2, made.update, 4), "of the longest of them"
    assert made.state_digest != follower.apply(0, 2, made.update, 24)
    assert follower.apply(0, 2, made.update, 60) == follower.apply(0, 2, made.update, 24), (
        "at most a whole step"
    )
    with pytest.raises(InvariantViolation, match="how long"):
        syncer.merge(0, 2, inputs, [b"of a group"])


def test_where_steps_in_flight_are_dropped_every_version_makes_a_whole_step():
    kept, dropped = make_update(keep_in_flight=0.5), make_update(keep_in_flight=0.0)
    for number, steps in ((1, 24), (2, 20)):
        update = kept.merge(0, number, [(contribute(kept, 0, number), 10, steps)]).update
        whole = dropped.apply(0, number, update, 24)
        assert dropped.apply(0, number, update, steps) == whole
        assert (kept.apply(0, number, update, steps) == whole) == (steps == 24)
        for vault in (kept, dropped):
            advance(vault, number, update)


def of_run(merge: str) -> Vault:
    run = for_run("micro", "test")
    codecs, outer = msgspec.structs.replace(run.codec, contribution="fp32", update="fp32"), run.outer
    outer = msgspec.structs.replace(outer, merge=merge, learning_rate=1.0)
    vault = Vault.of(msgspec.structs.replace(run, codec=codecs, outer=outer), VAULT_LAYOUTS)
    vault.load_initial({s.name: torch.zeros(s.shape) for s in SPECS})
    return vault


@pytest.mark.parametrize("grouped", [False, True])
def test_a_run_may_merge_all_by_plain_mean(grouped: bool):
    plain, radial = of_run("mean"), of_run("rda")
    # The weight of the second is twice that of the first.
    deltas = [noise(seed, SECOND) for seed in (1, 2)]
    inputs = [(codec("fp32").encode(d), 24 * n, 24 * n) for n, d in enumerate(deltas, 1)]
    moved = []
    for vault in (plain, radial):
        partials = [vault.merge_partial(1, inputs[1:], ()).payload] if grouped else []
        vault.merge(1, 1, inputs[:1] if grouped else inputs, partials, 48)
        vault.commit(1, 1)
        moved.append(-vault.theta(1))
    mean = (deltas[0] + 2 * deltas[1]) / 3
    torch.testing.assert_close(moved[0], mean)
    assert float(moved[1].norm()) > 1.2 * float(mean.norm())


def test_a_newcomer_takes_the_whole_state():
    old, new = make_update(), without_version()
    made = old.merge(0, 1, [(contribute(old, 0, 1), 10, 1)])
    old.commit(0, 1)
    assert new.version(0) is None
    assert new.load_spare(0, 1, *old.state_buffers(0)) == made.state_digest
    new.commit(0, 1, made.state_digest)
    assert torch.equal(new.theta(0), old.theta(0))
    assert torch.equal(new.momentum(0), old.momentum(0))


@pytest.mark.parametrize(
    ("name", "most", "part"),
    [("int4", 0.51 * 1.1 / 7, 0.003), ("e3m0", 1.51 * 2.0**-7, 0.003), ("topk", math.inf, 0.5)],
)
def test_error_feedback_loses_nothing_over_many_rounds(name, most, part):
    vault = make_update(name)
    base, decoded, sent, delivered = (torch.zeros(FIRST) for _ in range(4))
    worst = 0.0
    for round_ in range(240):
        source = noise(round_ % 5, FIRST)
        source[0] = 1.0  # makes the other elements of the block coarse
        payload = vault.own.encode(0, base, -source).payload
        if round_ % 3 == 2:  # lost: neither it nor what it left out may count
            vault.own.discard_residual(0)
            continue
        vault.own.commit_residual(0)
        codec(name).decode(payload, decoded)
        sent += source
        delivered += decoded
        worst = max(worst, float((sent - delivered).abs().max()))
    assert worst <= most, "without feedback the errors of all rounds add up to several steps"
    assert float((sent - delivered).norm() / sent.norm()) < part


def test_what_sparse_updates_leave_out_goes_into_later_ones():
    vault = make_update("fp32", "topk")
    merged, applied, decoded = (torch.zeros(FIRST) for _ in range(3))
    for number in range(1, 121):
        source = noise(number % 4, FIRST)
        made = vault.merge(0, vault.version(0) + 1, [(codec("fp32").encode(source), 10, 1)])
        if number % 3 == 0:  # a merge that came to nothing: what it left out is not in the next one twice
            vault.drop_spare(0)
            continue
        vault.commit(0, vault.version(0) + 1, made.state_digest)
        codec("topk").decode(made.update, decoded)
        merged += source
        applied += decoded
    assert float((merged - applied).norm() / merged.norm()) < 0.5


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8"])
def test_residuals_are_committed_once_and_dense_codecs_have_none(name):
    vault = make_update("e3m0")
    contribute(vault, 0, 1)
    vault.own.commit_residual(0)
    with pytest.raises(InvariantViolation):
        vault.own.commit_residual(0)
    dense = make_update(name, "fp32")
    contribute(dense, 0, 1)
    dense.own.commit_residual(0)
    base = dense.theta(0)
    payload = dense.own.encode(0, base, base - 1.0).payload
    assert payload == codec(name).encode(base - (base - 1.0))
    with pytest.raises(ValueError, match="non-finite"):  # of a learner that diverged
        dense.own.encode(0, base, base * math.inf)


def test_wrong_order_of_calls_is_our_own_mistake():
    vault, fresh = make_update(), without_version()
    payload = contribute(vault, 0, 1)
    for wrong in (
        lambda: vault.commit(0, 1),
        lambda: vault.merge(0, 2, [(payload, 1, 1)]),
        lambda: vault.merge(0, 0, [(payload, 1, 1)]),
        lambda: vault.merge(0, 1, []),
        lambda: vault.apply(0, 2, payload, 24),
        lambda: vault.state_digest_of(0, 1),
        lambda: vault.load_initial({}),
        lambda: fresh.theta(0),
        lambda: fresh.apply(0, 1, payload, 24),
    ):
        with pytest.raises(InvariantViolation):
            wrong()
    vault.apply(0, 1, payload, 24)
    with pytest.raises(InvariantViolation):
        vault.commit(0, 1, b"\0" * 32)
    vault.drop_spare(0)
    with pytest.raises(InvariantViolation):
        vault.commit(0, 1)
    assert vault.version(0) == 0


def test_what_peers_send_is_judged_and_costs_nothing():
    vault = make_update("int8", "bf16")
    before = vault.state_digest_of(0, 0)
    good = contribute(vault, 0, 1)
    vault.check_payload(0, good, "int8")
    poisoned = bytearray(good)
    struct.pack_into("<f", poisoned, 0, float("inf"))
    huge = codec("int8").encode(torch.full((FIRST,), 4 * MAX_MAGNITUDE))
    for payload, name, reason in (
        (good, "fp32", "wrong-codec"),
        (good, "bf16", "wrong-size"),
        (good[:-1], "int8", "wrong-size"),
        (poisoned, "int8", "non-finite"),
        (huge, "int8", "out-of-range"),
    ):
        with pytest.raises(RemoteError) as refused:
            vault.check_payload(0, payload, name)
        assert refused.value.reason == reason
    for attempt in (
        lambda: vault.merge(0, 1, [(good, 1, 1), (poisoned, 1, 1)]),
        lambda: vault.merge(0, 1, [(good, 0, 1)]),
        lambda: vault.apply(0, 1, b"\xff" * (2 * FIRST), 24),
        lambda: vault.load_spare(0, 5, bytes(4 * FIRST), b"\xff" * (4 * FIRST)),
        lambda: vault.load_spare(0, 5, b"", b""),
    ):
        vault.apply(0, 1, codec("bf16").encode(noise(1, FIRST)), 24)
        with pytest.raises(RemoteError):
            attempt()
        with pytest.raises(InvariantViolation):
            vault.commit(0, 1)
    assert state_digest(0, vault.theta(0), vault.momentum(0)) == before


def test_the_worst_accepted_contributions_make_an_update_that_everyone_accepts():
    vault = make_update(start=0.0)
    spread = codec("int8").encode(torch.full((SECOND,), MAX_MAGNITUDE))
    spike = torch.zeros(SECOND)
    for piece in VAULT_LAYOUTS[1].pieces:
        spike[piece.fragment_offset] = 1.0
    made = vault.merge(1, 1, [(spread, 10, 1), (codec("int8").encode(spike), 10, 1)])
    assert codec("int8").peak(made.update, SECOND) >= MAX_MAGNITUDE
    assert make_update(start=0.0).apply(1, 1, made.update, 1) == made.state_digest


def test_a_pinned_state_keeps_its_bytes_while_the_fragment_moves_on():
    vault = make_update()
    pin = vault.pin(0)
    before = [bytes(buffer) for buffer in pin.buffers]
    for number in range(1, 4):
        advance(vault, number, codec("int8").encode(noise(number, FIRST)))
    assert [bytes(buffer) for buffer in pin.buffers] == before
    assert pin.number == 0 and pin.state_digest == make_update().state_digest_of(0, 0)
    pin.release()
    pin.release()
    after = vault.pin(0)
    after.release()
    reused = vault.theta(0).data_ptr()
    for number in range(4, 6):
        advance(vault, number, codec("int8").encode(noise(number, FIRST)))
    assert vault.theta(0).data_ptr() == reused
