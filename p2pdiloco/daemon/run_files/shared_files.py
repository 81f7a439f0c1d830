"""Files of a run that nodes give each other: a given version 0 and a tokenizer (without torch).

`Giving` gives one kind of file to a few peers at a time, in one stream a peer: a slow one keeps nobody else
from it. `first_that_gives` asks one peer after the other.

The manifest has a file's checksum (`run.initial`, `data.tokenizer_digest`). The signer of the run has the
file beside run.toml. Every node keeps it in the run's folder and gives it to whoever asks. Size and digest
are checked before a file is kept; a tokenizer is parsed as data. It lies beside result files, too.
"""

from __future__ import annotations

import asyncio
import logging
import mmap
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from p2pdiloco import util
from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.result_file import MAX_HEADER_BYTES, Arrays, checksum, checksum_of, load_tensors
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.config.manifest import BYTES, Manifest
from p2pdiloco.core.api.reasons import PullRefusal
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.budgets import COPIES, COPIES_S, SMALL_BYTES, Budget, Enough
from p2pdiloco.daemon.wire import refuse, refused
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, TransportError, UserError
from p2pdiloco.ports import Buffer, PullSource, Refusal, Transport
from p2pdiloco.tasks.registry import BUILT_IN, task_of
from p2pdiloco.tasks.task import Constant, constants_of, text_of
from p2pdiloco.tasks.tokens import MAX_TOKENIZER_BYTES, TOKENIZER_FILE, read_tokenizer, tokenizer_digest
from p2pdiloco.tensors.sizes import MAX_NUMEL
from p2pdiloco.util import T, clear_folder_at

logger = logging.getLogger(__name__)

PAUSE_S = 15.0
MAX_ASKED = 8
MAX_GIVEN = 4
"""Number of streams of files that go out at one time, of one kind."""


async def first_that_gives(what: str, peers: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> T:
    """Ask these peers in any order, and take what the first one gives.

    `ask` raises RemoteError or TransportError where a peer gives nothing.

    Raises:
        TransportError: nobody gives it; why the last one did not.
    """
    why = "nobody lists it"
    for peer in random.sample(list(peers), min(MAX_ASKED, len(peers))):
        try:
            return await ask(peer)
        except (TransportError, RemoteError) as error:
            why = f"…{peer[-6:]}: {error}"
    raise TransportError(f"{what}: {why}"[:200])


def check_given(answer: T | Refusal) -> T:
    """Check the answer to a pull. Raises: PullRefused."""
    if isinstance(answer, Refusal):
        raise refused(answer)
    return answer


class Giving:
    """Giver of one kind of file."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._to: set[str] = set()
        self._budget = Budget(Enough.FILES, COPIES, COPIES * COPIES_S, now)
        self._longest_bytes = SMALL_BYTES

    def serve(
        self,
        peer: str,
        read: Callable[[], tuple[bytes, Buffer] | PullRefusal],
        limited: bool = True,
    ) -> PullSource | Refusal:
        """Serve a peer what `read` finds, header and payload, or the reason why it is refused.

        `limited`: it is no member of our run. Raises: PutOff (and had enough).
        """
        if limited:
            self._budget.check(peer)
        if peer in self._to or len(self._to) >= MAX_GIVEN:
            return refuse(PullRefusal.BUSY)
        found = read()
        if isinstance(found, PullRefusal):
            return refuse(found)
        self._to.add(peer)
        header, payload = found
        if limited:
            size = memoryview(payload).nbytes
            self._longest_bytes = max(self._longest_bytes, size)
            self._budget.take(peer, size / self._longest_bytes)
        return PullSource(header, (payload,), partial(self._to.discard, peer))


def mapped(file: Path) -> memoryview | None:
    """Map a file, whose bytes are read as they are sent; None: it is not there, or empty."""
    try:
        with file.open("rb") as opened:
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError):
        return None


HEADER_BYTES, HEADER_BYTES_A_TENSOR = 4096, 512
"""Most that the header of such a file takes, beside the names: in JSON a letter is up to six bytes."""


def initial_beside(path: Path) -> Path:
    """Path of the given parameters of a run.toml: run.initial.safetensors."""
    return path.with_suffix(".initial.safetensors")


def kept_initial(data_dir: Path, run: str) -> Path:
    """Path at which a node keeps the given parameters of a run."""
    return run_folder(data_dir, run) / "initial.safetensors"


def size_bounds(manifest: Manifest) -> tuple[int, int]:
    """Work out how small and how large the file can be, in bytes, by the shapes of the manifest: exactly, but
    for its header.

    Of a task that is not built in only its package knows the shapes, and that may need torch: then the most
    is what any model has.

    Raises:
        RemoteError: no model is as the manifest says.
    """
    if manifest.run.task not in BUILT_IN:
        return 0, 4 * MAX_NUMEL + MAX_HEADER_BYTES
    try:
        specs = task_of(manifest).specs()
    except ConfigError as error:
        raise RemoteError("wrong-model", str(error)) from error
    constants = constants_of(manifest.model)
    content = 4 * sum(spec.numel for spec in specs) + sum(constant.nbytes for constant in constants)
    names = [spec.name for spec in specs] + [constant.name for constant in constants]
    header = HEADER_BYTES + sum(HEADER_BYTES_A_TENSOR + 6 * len(name) for name in names)
    return content, content + header


def given_arrays(file: Path, manifest: Manifest) -> Arrays:
    """Load parameters and constants of a file. Raises: StorageError (unreadable), ConfigError (others than
    the manifest names)."""
    arrays, _ = load_tensors(file, exact=True)
    _compare(file, checksum(arrays), manifest)
    return arrays


def kept_arrays(data_dir: Path, run: str, manifest: Manifest, set_aside: bool = True) -> Arrays | None:
    """Load what was kept; None: nothing that is sound, or the run draws its version 0 from the seed.

    `set_aside`: what is damaged becomes `*.corrupt`. What merely cannot be read now stays: it may be the last
    copy.
    """
    file = kept_initial(data_dir, run)
    if not manifest.run.initial or not file.exists():
        return None
    return _if_sound(file, lambda: given_arrays(file, manifest), set_aside)


def is_kept(data_dir: Path, run: str, manifest: Manifest) -> bool:
    """Tell whether all that was given is here and sound; what is damaged is set aside.

    One tensor at a time is in memory.
    """
    file = kept_initial(data_dir, run)
    if not manifest.run.initial:
        return True
    if not file.exists():
        return False

    def sound() -> bool:
        _compare(file, checksum_of(file), manifest)
        return True

    return _if_sound(file, sound, set_aside=True) is not None


def _compare(file: Path, found: str, manifest: Manifest) -> None:
    if found != manifest.run.initial:
        raise ConfigError(f"{file} has other parameters than run.initial names")


def _if_sound(file: Path, look: Callable[[], T], set_aside: bool) -> T | None:
    try:
        return look()
    except (StorageError, ConfigError) as error:
        logger.warning("the kept version 0 is of no use: %s", error)
        if set_aside and not isinstance(error.__cause__, OSError):
            logger.warning("%s: %s", file, util.set_aside(file))
        return None


def constants_table(constants: Arrays) -> dict[str, list[str] | str]:
    """Write the keys of a `[model]` table that list these constants, with the checksum of their values."""
    if not constants:
        return {}
    listed = [text_of(Constant(name, array.shape, array.dtype.name)) for name, array in constants.items()]
    return {"constants": listed, "constants_sum": checksum(constants)}


def version_0_from(file: Path, offset: int, whole: bool = False) -> tuple[bytes, memoryview] | PullRefusal:
    """Give out the parameters in the file, or the `whole` file: a header, and all from that byte on.

    Or why nothing is given.
    """
    memory = mapped(file)
    if memory is None:
        return PullRefusal.NOT_HERE
    start = offset if whole else 8 + int.from_bytes(memory[:8], "little") + offset
    if start > len(memory):
        return PullRefusal.BEYOND_THE_END
    return wire.encode(wire.InitialHeader(offset)), memory[start:]


def first_not_finite(arrays: Mapping[str, np.ndarray]) -> str:
    """Find the first parameter that is not finite; return its name. Empty: all are finite."""
    return next((name for name, array in arrays.items() if not np.isfinite(array).all()), "")


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
    if tokenizer_digest(content) != manifest.data.tokenizer_digest:
        raise ConfigError(
            f"{file.name}: this is not the tokenizer of the run: its SHA-256 is "
            f"{tokenizer_digest(content)[:16]}..., not {manifest.data.tokenizer_digest[:16]}..."
        )
    task = task_of(manifest, content)
    if task.vocabulary:
        task.tokenizer()
    return content


def tokenizers_of_result(path: Path, manifest: Manifest) -> tuple[Path, Path]:
    """Places beside a result file where the run's tokenizer may be. The first has its digest in its name:
    results of several runs may lie in one folder. The second is the name in a model's folder."""
    return path.with_name(f"tokenizer-{manifest.data.tokenizer_digest[:12]}.json"), path.with_name(
        TOKENIZER_FILE
    )


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
    return content if tokenizer_digest(content) == manifest.data.tokenizer_digest else None


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
        if tokenizer_digest(content) != manifest.data.tokenizer_digest:
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
