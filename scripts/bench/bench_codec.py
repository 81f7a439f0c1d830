"""Speed of every codec on one core, and its cost: encode, check, decode; bytes; error.

    .venv/bin/python scripts/bench/bench_codec.py [--million 8] [--rounds 7] [--device cpu] [--json FILE]

Rates are GB of fp32 input per second; on the CPU of processor time, by rounds that alternate over the codecs
and a plain copy of the same tensor (whose rate is the memory's), after a first round that is not counted. The
error is that of one encoding, relative, for values like pseudo-gradients: normal with a spread that differs
from row to row.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchkit import arguments, finish, spread
from p2pdiloco.tensors.codecs import CODECS, Codec

ROW = 1000
Rates = dict[str, list[float]]


def pseudo_gradient(numel: int) -> torch.Tensor:
    """fp32 [numel]: normal, rows of different spread over two decades."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(-(-numel // ROW), ROW, generator=generator)
    spreads = 10 ** (2 * torch.rand(len(rows), 1, generator=generator) - 4)
    return (rows * spreads).flatten()[:numel].contiguous()


def seconds(work: Callable[[], object], device: str) -> float:
    """Processor time on the CPU, time until the device is done elsewhere."""
    if device == "cpu":
        start = time.process_time()
        work()
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(source: torch.Tensor, rounds: int) -> dict[str, Rates]:
    """GB/s of fp32 input by codec and kind of work."""
    device, gigabytes = source.device.type, source.numel() * 4 / 1e9
    out = torch.empty_like(source)
    payloads = {name: chosen.encode(source) for name, chosen in CODECS.items()}
    found: dict[str, Rates] = {name: {} for name in ("copy", *CODECS)}

    def jobs(name: str, chosen: Codec) -> dict[str, Callable[[], object]]:
        payload = payloads[name]
        return {
            "encode": lambda: chosen.encode(source, payload),
            "decode": lambda: chosen.decode(payload, out),
            "check": lambda: chosen.peak(payload, source.numel()),
        }

    for counted in [False, *[True] * rounds]:
        everything = [("copy", {"copy": lambda: out.copy_(source)})]
        everything += [(name, jobs(name, chosen)) for name, chosen in CODECS.items()]
        for name, work in everything:
            for kind, job in work.items():
                taken = seconds(job, device)
                if counted:
                    found[name].setdefault(kind, []).append(gigabytes / max(taken, 1e-9))
    return found


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--million", type=float, default=8.0, help="elements")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = pseudo_gradient(int(args.million * 1e6)).to(args.device)
    rates = measure(source, args.rounds)
    copy = spread(rates["copy"]["copy"])
    print(f"copy: {copy['median']:.1f} GB/s ({copy['min']:.1f} to {copy['max']:.1f})")
    half = f"{'spread':>14}{'of copy':>8}"
    print(f"{'':8}{'bytes/el':>9}{'encode':>8}{half}{'decode':>8}{half}{'check':>8}{'error':>8}")
    figures: dict[str, object] = {"copy": copy}
    for name, chosen in CODECS.items():
        payload, out = chosen.encode(source), torch.empty_like(source)
        chosen.decode(payload, out)
        error = float((out - source).norm() / source.norm())
        bytes_each = len(payload) / source.numel()
        by_kind = {kind: spread(values) for kind, values in rates[name].items()}
        cells = "".join(
            f"{v['median']:8.2f}{v['min']:7.2f}-{v['max']:6.2f}{v['median'] / copy['median']:8.1%}"
            for v in (by_kind["encode"], by_kind["decode"])
        )
        print(f"{name:8}{bytes_each:9.4f}{cells}{by_kind['check']['median']:8.1f}{error:8.4f}")
        figures[name] = {"bytes_per_element": bytes_each, "error": error, **by_kind}
    finish("codec", {"elements": source.numel(), "device": args.device, **figures}, args.json)


if __name__ == "__main__":
    main()
