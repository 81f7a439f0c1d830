"""Options of the learner process: what it is told of its node."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.config.manifest import BYTES
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon.run_files.initial_file import kept_initial
from p2pdiloco.daemon.run_files.runs import Run
from p2pdiloco.daemon.run_files.tokenizers import kept_tokenizer
from p2pdiloco.learner.channel import LearnerOptions

COMPILED_CODE = "compiled"
"""Folder in the data folder for what the learner's compiler made: for all runs, and for its next start."""


def learner_options(settings: NodeSettings, run: Run, peer: str, place: Path) -> LearnerOptions:
    """Make the learner's options. `place`: file that keeps the place in the data."""
    plain = run.manifest.data.tokenizer == BYTES
    return LearnerOptions(
        peer=peer,
        data_path=settings.data,
        tokenizer_path=None if plain else kept_tokenizer(settings.data_dir, run.id),
        initial_path=kept_initial(settings.data_dir, run.id) if run.constants else None,
        place_path=place,
        device=settings.device,
        threads=settings.threads,
        nproc=0 if settings.nproc == "auto" else int(settings.nproc),
        shard=settings.shard,
        precision=settings.precision,
        compile=settings.compile,
        compile_cache=settings.data_dir / COMPILED_CODE,
        micro_batch_tokens=settings.micro_batch_tokens,
        niceness=settings.learner_nice,
    )
