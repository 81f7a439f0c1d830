"""Codecs: bounded error at any size and magnitude, exact decoding, refusal of what is not sound."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.learner.ranks import accelerators
from p2pdiloco.tensors.codecs import CODECS, FOUR_BIT_TILE, INT8_BLOCK, TOPK_CHUNK, TOPK_KEPT, codec
from p2pdiloco.tensors.outer_update import Residual

FP32_MAX = float(torch.finfo(torch.float32).max)
ALL = sorted(CODECS)
ODD = [
    0,
    1,
    2,
    7,
    63,
    64,
    65,
    INT8_BLOCK - 1,
    INT8_BLOCK,
    INT8_BLOCK + 1,
    3 * INT8_BLOCK + 5,
    TOPK_CHUNK,
    TOPK_CHUNK + 9,
    65 * INT8_BLOCK + 3,
]
sizes = st.sampled_from(ODD)
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


@pytest.mark.parametrize("name", ["int8", "int4", "e3m0", "topk"])
def test_with_error_feedback_everything_arrives_in_the_end(name):
    chosen, residual = codec(name), Residual(3 * TOPK_CHUNK)
    truth, sent = torch.zeros(3 * TOPK_CHUNK), torch.zeros(3 * TOPK_CHUNK)
    for step in range(200):
        delta = values(3 * TOPK_CHUNK, 0, step % 5)
        truth += delta
        residual.add_to(delta)
        decoded = torch.empty_like(delta)
        chosen.decode(chosen.encode(delta), decoded)
        residual.pend(delta, decoded)
        residual.commit()
        sent += decoded
    worst = float((truth - sent).norm() / truth.norm())
    assert worst < (0.5 if name == "topk" else 0.005), worst
