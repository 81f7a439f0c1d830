"""Tokenizer file that a run names: where it is, and how other nodes get it.

The manifest has its digest (`data.tokenizer_digest`). Whoever signs the run has the file beside run.toml.
Every node keeps it in the run's folder and gives it to whoever asks. Size and digest are checked before it is
kept; it is parsed as data. It lies beside result files, too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.manifest import BYTES, Manifest
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.run_files.giving import PAUSE_S, check_given, first_that_gives, mapped
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, UserError
from p2pdiloco.ports import Transport
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.tokens import FILE, MAX_TOKENIZER_BYTES, digest_of, read_tokenizer
from p2pdiloco.util import clear_folder_at

logger = logging.getLogger(__name__)


def tokenizer_beside(path: Path) -> Path:
    """Path of the tokenizer of a run.toml: run.tokenizer.json."""
    return path.with_suffix(".tokenizer.json")


def kept_tokenizer(data_dir: Path, run: str) -> Path:
    """Path at which a node keeps the tokenizer of a run."""
    return run_folder(data_dir, run) / "tokenizer.json"


def checked_tokenizer(path: Path, manifest: Manifest) -> bytes | None:
    """Load the file beside a run.toml, checked; None: the run has no such file.

    Raises:
        ConfigError: it is not there, or is another one than the manifest names.
        UserError: it is no tokenizer, or one whose tokens the model does not have.
    """
    if manifest.data.tokenizer == BYTES:
        return None
    file = tokenizer_beside(path)
    if not file.exists():
        raise ConfigError(
            f"{path}: data.tokenizer names a file, but there is no {file.name} beside it",
            "p2pdiloco run new NAME --tokenizer FILE writes both",
        )
    content = read_tokenizer(file)
    if digest_of(content) != manifest.data.tokenizer_digest:
        raise ConfigError(
            f"{file.name}: this is not the tokenizer of the run: its SHA-256 is "
            f"{digest_of(content)[:16]}..., not {manifest.data.tokenizer_digest[:16]}..."
        )
    task = task_of(manifest, content)
    if task.vocabulary:
        task.tokenizer()
    return content


def tokenizers_of_result(path: Path, manifest: Manifest) -> tuple[Path, Path]:
    """Places beside a result file where the run's tokenizer may be. The first has its digest in its name:
    results of several runs may lie in one folder. The second is the name in a model's folder."""
    return path.with_name(f"tokenizer-{manifest.data.tokenizer_digest[:12]}.json"), path.with_name(FILE)


def save_with_result(path: Path, manifest: Manifest, content: bytes | None) -> Path | None:
    """Save the run's tokenizer beside a result file; None: it is there already, or the run has none.

    Raises:
        StorageError: something else has its name, which is left as it is; or it cannot be written.
    """
    places = tokenizers_of_result(path, manifest)
    if content is None or any(tokenizer_on_disk(place, manifest) for place in places):
        return None
    if places[0].exists():
        raise StorageError(f"{places[0]} is not the tokenizer that its name says", "move it away")
    Files().save(places[0], [content], durable=True)
    return places[0]


def keep_tokenizer(data_dir: Path, run: str, content: bytes) -> None:
    """Keep the file for the learner, for the next start and for others. Raises: StorageError."""
    file = kept_tokenizer(data_dir, run)
    Files().make_folder(file.parent)
    clear_folder_at(file)
    Files().save(file, [content], durable=True)


def tokenizer_on_disk(file: Path, manifest: Manifest) -> bytes | None:
    """Load what was kept in this file; None: nothing that is sound, or the run has no such file."""
    if manifest.data.tokenizer == BYTES or not file.exists():
        return None
    try:
        content = read_tokenizer(file)
    except UserError as error:
        logger.warning("%s", error)
        return None
    return content if digest_of(content) == manifest.data.tokenizer_digest else None


async def fetched_tokenizer(
    transport: Transport,
    data_dir: Path | None,
    run: str,
    manifest: Manifest,
    peers: Sequence[str],
    wrong: Callable[[str], None] = lambda _peer: None,
) -> bytes | None:
    """Get the file's content from our folder, else from one of these peers, and then keep it there.

    None: the run has no such file. `wrong` is told who gave another one.

    Raises:
        TransportError: nobody gives it.
        StorageError: it cannot be kept.
    """
    if manifest.data.tokenizer == BYTES:
        return None
    here = tokenizer_on_disk(kept_tokenizer(data_dir, run), manifest) if data_dir is not None else None
    if here is not None:
        return here

    async def ask(peer: str) -> bytes:
        request = wire.encode(wire.PullTokenizer(run))
        answer = check_given(await transport.pull(peer, request, MAX_TOKENIZER_BYTES, PAUSE_S))
        content = bytes(answer[1])
        if digest_of(content) != manifest.data.tokenizer_digest:
            wrong(peer)
            raise RemoteError("wrong-digest")
        return content

    content = await first_that_gives("the tokenizer", peers, ask)
    if data_dir is not None:
        await asyncio.to_thread(keep_tokenizer, data_dir, run, content)
    return content


def tokenizer_from(file: Path) -> tuple[bytes, memoryview] | PullRefusal:
    """Give out the kept file: no header, and all of it; or why nothing is given."""
    memory = mapped(file)
    return PullRefusal.NOT_HERE if memory is None else (b"", memory)
