"""Coverage-guided fuzzing of what decodes foreign bytes; in an environment of its own.

    python3.11 -m venv .fuzz
    .fuzz/bin/pip install -c constraints.txt -r scripts/fuzz/requirements.txt .
    .fuzz/bin/python scripts/fuzz/fuzz.py [TARGET ...] [--seconds 120] [--list]

Every target (`targets.py`) runs in a process of its own, for so long or until the first finding: an error
that it may not raise, an input that takes 5 s, or 1 GiB. What is found is in `.fuzz-corpus/TARGET/`, as
`crash-…`, and becomes a test.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

CORPUS = Path(".fuzz-corpus")
SLOW_S, MOST_MIB, LONGEST_BYTES = 5, 1024, 8192


def fuzz(name: str, arguments: Sequence[str]) -> None:
    """Fuzz one target in this process, which ends with it."""
    import atheris

    with atheris.instrument_imports(include=["p2pdiloco"]):
        from targets import targets
    target = targets()[name]

    def once(data: bytes) -> None:
        try:
            target.decode(data)
        except target.allowed:
            return

    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (folder / f"seed-{number}").write_bytes(seed)
    atheris.Setup([sys.argv[0], *arguments, str(folder)], once)
    atheris.Fuzz()


def main(words: Sequence[str] | None = None) -> int:
    """Fuzz one target after the other. Returns the number of those with a finding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("targets", nargs="*", metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=120, help="time for each")
    parser.add_argument("--list", action="store_true", help="name the targets")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    chosen = parser.parse_args(words)
    if chosen.here:
        folder = CORPUS / chosen.here
        limits = [f"-max_total_time={chosen.seconds}", f"-timeout={SLOW_S}", f"-rss_limit_mb={MOST_MIB}"]
        limits += [f"-max_len={LONGEST_BYTES}", f"-artifact_prefix={folder}/", "-print_final_stats=1"]
        fuzz(chosen.here, limits)
    from targets import targets

    names = list(targets())
    if chosen.list:
        print("\n".join(names))
        return 0
    unknown = sorted(set(chosen.targets) - set(names))
    if unknown:
        parser.error(f"no target {', '.join(unknown)} (there are: {', '.join(names)})")
    found = 0
    for name in chosen.targets or names:
        command = [sys.executable, __file__, "--here", name, "--seconds", str(chosen.seconds)]
        ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
        lines = ended.stderr.splitlines()
        count = [line.split()[-1] for line in lines if "number_of_executed_units" in line]
        print(
            f"{name:12} {count[-1] if count else '?':>10} inputs",
            "nothing" if not ended.returncode else "FOUND",
        )
        if ended.returncode:
            found += 1
            print("\n".join(lines[-40:]))
    return found


if __name__ == "__main__":
    sys.exit(main())
