"""Ways into a swarm as commands take them: `--join` is an address, a DNS name, a run link or an invite."""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.adapters.dns import peers_behind


def joined_through(join: Sequence[str], run: str = "") -> tuple[tuple[str, ...], str]:
    """Read `--join` and `--run`: the peers to join through, names looked up, and the run that is meant.

    Raises:
        ConfigError: an address or a word is malformed, or a word is to another run than `run`.
        UserError: nothing is found behind names.
    """
    from p2pdiloco.daemon.run_files.known_runs import way_of  # --help needs none of it

    way = way_of(join, run)
    return peers_behind(way.join), way.run
