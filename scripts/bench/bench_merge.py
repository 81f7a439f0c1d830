"""Closeness of a merge to the memory's speed: accumulate (decode, add) and the outer step, on one core.

    python scripts/bench/bench_merge.py [--contributors 4] [--rounds 7] [--codec int8 ...] [--json FILE]

On a fragment of the preset `gpt2` (5 million parameters, one of 24), by rounds that alternate over all parts,
all codecs, and a plain copy. Rates are fp32 bytes touched per second of processor time; each part counts what
it cannot do without: decoding writes the pseudo-gradient (4 bytes an element); adding reads it and the sums,
and writes the sums (12); the outer step reads Theta, momentum and pseudo-gradient and writes Theta and
momentum (20); a copy reads and writes (8). Payloads, and the second look that lengths need, count nothing.
"accumulate + step" is all contributions and one outer step. `Vault.merge` and `Vault.apply` are whole, with
their checks, encoding and digests, in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from bench_codec import pseudo_gradient
from benchkit import arguments, finish, spread
from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.config.presets import PRESETS
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import CODECS, codec
from p2pdiloco.tensors.layout import FragmentLayout, Piece, plan_fragments
from p2pdiloco.tensors.merge import Accumulator
from p2pdiloco.tensors.outer_update import outer_step
from p2pdiloco.tensors.vault import Vault

COPY_BYTES, DECODE_BYTES, ADD_BYTES, STEP_BYTES = 8, 4, 12, 20
"""Bytes of fp32 touched per element."""
TOKENS, INNER_STEPS = 8192, 24
GOAL = 0.4
Job = Callable[[], object]


def fragment(preset: str) -> FragmentLayout:
    """The first fragment of this preset that has no embedding, with tensors of its own."""
    manifest = PRESETS[preset]
    layouts = plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)
    chosen = next((x for x in layouts if not any(p.plain_mean for p in x.pieces)), layouts[-1])
    pieces = tuple(
        Piece(f"piece-{i}", 0, p.fragment_offset, p.numel, p.plain_mean) for i, p in enumerate(chosen.pieces)
    )
    return FragmentLayout(0, chosen.numel, pieces)


def copy_job(numel: int) -> Job:
    """Copy as fast as the memory can."""
    source, target = torch.randn(numel), torch.zeros(numel)
    return lambda: target.copy_(source)


def jobs(layout: FragmentLayout, name: str, contributors: int) -> dict[str, Job]:
    """The parts of a merge with this codec both ways, each as work on buffers of its own."""
    chosen, numel = codec(name), layout.numel
    source = pseudo_gradient(numel)
    payload = chosen.encode(source)
    delta, theta, momentum = torch.zeros(numel), torch.randn(numel), torch.randn(numel)
    spare_theta, spare_momentum = torch.zeros(numel), torch.zeros(numel)
    chosen.decode(payload, delta)
    accumulator = Accumulator(layout, INNER_STEPS)
    vault = Vault([layout], OuterSection(), 24, name, name)
    vault.load_initial({piece.tensor: torch.randn(piece.numel) for piece in layout.pieces})
    inputs = [(payload, TOKENS, INNER_STEPS)] * contributors

    def merge() -> None:
        vault.merge(0, 1, inputs)
        vault.drop_spare(0)

    def apply() -> None:
        vault.apply(0, 1, payload, 24)
        vault.drop_spare(0)

    return {
        "decode": lambda: chosen.decode(payload, delta),
        "add": lambda: accumulator.add(delta, TOKENS, INNER_STEPS),
        "outer step": lambda: outer_step(theta, momentum, delta, 0.7, 0.9, spare_theta, spare_momentum),
        "merge": merge,
        "apply": apply,
    }


def measure(work: dict[str, Job], rounds: int) -> dict[str, list[float]]:
    """Seconds of processor time of every job, by rounds that alternate over all of them; the first is not
    counted."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for counted in [False, *[True] * rounds]:
        for name, job in work.items():
            start = time.process_time()
            job()
            taken_s = time.process_time() - start
            if counted:
                found[name].append(taken_s)
    return found


def shares(times_s: dict[str, list[float]], copy_s: list[float], contributors: int) -> dict[str, list[float]]:
    """Compute what each part, and all of a merge, reaches of the copy bandwidth of the same round."""
    rows = zip(times_s["decode"], times_s["add"], times_s["outer step"], copy_s, strict=True)
    found: dict[str, list[float]] = {"decode": [], "add": [], "outer step": [], "accumulate + step": []}
    for decode_s, add_s, step_s, one_copy_s in rows:
        second = one_copy_s / COPY_BYTES  # what copying one byte per element takes
        found["decode"].append(DECODE_BYTES * second / decode_s)
        found["add"].append(ADD_BYTES * second / add_s)
        found["outer step"].append(STEP_BYTES * second / step_s)
        whole = contributors * (DECODE_BYTES + ADD_BYTES) + STEP_BYTES
        found["accumulate + step"].append(whole * second / (contributors * (decode_s + add_s) + step_s))
    return found


def main() -> None:
    """Measure and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--contributors", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--codec", action="append", choices=list(CODECS), help="only these")
    args = parser.parse_args()
    torch.set_num_threads(1)
    layout, names = fragment(args.preset), args.codec or list(CODECS)
    work: dict[str, Job] = {"copy": copy_job(layout.numel)}
    for name in names:
        work |= {f"{name}/{part}": job for part, job in jobs(layout, name, args.contributors).items()}
    times_s = measure(work, args.rounds)
    copy = spread([layout.numel * COPY_BYTES / 1e9 / t for t in times_s["copy"]])
    millions, pieces = layout.numel / 1e6, len(layout.pieces)
    print(f"{millions:.1f} M parameters in {pieces} pieces, {args.contributors} contributors")
    print(f"copy: {copy['median']:.1f} GB/s, read and written ({copy['min']:.1f} to {copy['max']:.1f})")
    columns = ("decode", "add", "outer step", "accumulate + step")
    print(f"{'of copy':8}" + "".join(f"{c:>20}" for c in columns) + f"{'merge ms':>12}{'apply ms':>10}")
    figures: dict[str, object] = {"copy_gb_per_s": copy, "goal": GOAL}
    for name in names:
        of_codec = {
            part: times_s[f"{name}/{part}"] for part in ("decode", "add", "outer step", "merge", "apply")
        }
        found = {k: spread(v) for k, v in shares(of_codec, times_s["copy"], args.contributors).items()}
        cells = "".join(
            f"{found[c]['median']:>8.0%} {found[c]['min']:4.0%}-{found[c]['max']:4.0%}  " for c in columns
        )
        whole = {part: spread(of_codec[part]) for part in ("merge", "apply")}
        cells += f"{1e3 * whole['merge']['median']:12.1f}{1e3 * whole['apply']['median']:10.1f}"
        reached = found["accumulate + step"]["median"] >= GOAL
        print(f"{name:8}{cells}{'' if reached else '  below the goal'}")
        figures[name] = {"of_copy": found, "seconds": {k: spread(v) for k, v in of_codec.items()}}
    finish("merge", {"elements": layout.numel, "contributors": args.contributors, **figures}, args.json)


if __name__ == "__main__":
    main()
