"""Result of a run, its global parameters: out of a vault, a data folder, a result file.

Out of a live run: `cli.result_live`. All of them end in a `RunResult`, which export, generation, evaluation
and result files read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.adapters.data_dir import DataDir, DataDirInUse
from p2pdiloco.adapters.result_file import Label, ResultFile, load_result_file, save_result_file
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.config.manifest import Dtype, Manifest, SignedManifest, manifest_from_canonical, run_id, verify
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.daemon.run_files.initial import given_on_disk
from p2pdiloco.daemon.run_files.joined import joined_runs
from p2pdiloco.daemon.run_files.listing import choose_run, run_names, saved_runs
from p2pdiloco.daemon.run_files.restore import restore
from p2pdiloco.daemon.run_files.runs import Run, core_config, genesis_versions, open_run
from p2pdiloco.daemon.run_files.tokenizers import (
    kept_tokenizer,
    save_with_result,
    tokenizer_on_disk,
    tokenizers_of_result,
)
from p2pdiloco.errors import ConfigError, RemoteError, StorageError, UserError
from p2pdiloco.identity import Identity
from p2pdiloco.identity import verify as verify_signature
from p2pdiloco.tasks.description import instance_of, listed
from p2pdiloco.tasks.initial import named_parameters, rounded
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Task, constants_of
from p2pdiloco.tensors.layout import scatter
from p2pdiloco.tensors.vault import Vault


class RunResult(Struct, frozen=True):
    """Result of a run: its global parameters, of every fragment some version."""

    signed: SignedManifest
    manifest: Manifest
    labels: tuple[Label, ...]
    """Labels of the versions, by fragment."""
    parameters: dict[str, Tensor]
    """Parameters by name, fp32, as of `Vault.result`."""
    tokenizer: bytes | None = None
    """Content of the tokenizer file that the run names, if it names one and it is here."""
    constants: Mapping[str, Tensor] = {}
    """Constants of the model (`tasks.constants`)."""

    @property
    def run(self) -> str:
        """Run id."""
        return run_id(self.signed)

    @property
    def merges(self) -> int:
        """Number of versions that were made of all fragments together."""
        return sum(label.number for label in self.labels)

    @property
    def tokens(self) -> int:
        """Tokens merged into the fragment that has most."""
        return max(label.tokens for label in self.labels)

    def task(self) -> Task:
        """Make the run's task. Raises: UserError (not installed)."""
        return task_of(self.manifest, self.tokenizer)

    def model(self, device: torch.device) -> nn.Module:
        """Make the task's model with these parameters."""
        model = instance_of(self.task(), self.constants)
        found = named_parameters(model)
        with torch.no_grad():
            for name, value in self.parameters.items():
                found[name].copy_(value)
        return model.to(device)

    def save(self, path: Path, dtype: Dtype = "fp32") -> Path | None:
        """Save as a result file, its numbers rounded to this type; and the tokenizer beside it, whose path is
        returned if it was not there.

        Raises:
            StorageError: it cannot be written.
            UserError: a number is too large for the type.
        """
        arrays = {name: rounded(name, value, dtype).numpy() for name, value in self.parameters.items()}
        tokenizer = save_with_result(path, self.manifest, self.tokenizer)
        dtypes = dict.fromkeys(arrays, dtype)
        arrays |= {name: value.numpy() for name, value in self.constants.items()}
        save_result_file(path, ResultFile(self.signed, self.labels, arrays), dtypes)
        return tokenizer

    def words(self) -> str:
        """Word which result it is, for people."""
        numbers = [label.number for label in self.labels]
        versions = f"{min(numbers)} to {max(numbers)}" if min(numbers) < max(numbers) else f"{numbers[0]}"
        return f"run {self.manifest.run.name} ({self.run[:12]}), versions {versions}, {self.tokens} tokens"


_ASK_IT = "ask the running node instead: --join ADDRESS"
_STOP_IT = (
    "the parameters are for the run's members, so it gives them to no stranger: take the newest file of its "
    "--result-dir, --checkpoint FILE; or stop the node, which goes on where it was when it starts again"
)


def label_of(version: SignedVersion) -> Label:
    """Make the label by which a result file names a version."""
    return Label(version.header.number, version.header.digest().hex(), version.header.tokens)


def result_of(run: Run, vault: Vault, versions: Sequence[SignedVersion]) -> RunResult:
    """Copy the result that the vault has committed; `versions`: which ones, by fragment."""
    specs = task_of(run.manifest).specs()
    parameters = {spec.name: torch.zeros(spec.shape) for spec in specs}
    for layout in run.layouts:
        scatter(vault.result(layout.index), layout, parameters)
    labels = tuple(map(label_of, versions))
    return RunResult(run.signed, run.manifest, labels, parameters, constants=run.constants)


def load_result(path: Path) -> RunResult:
    """Load a result from a file; checksum, signature and the model's shape are compared.

    Raises:
        StorageError: there is none, or it is damaged.
        UserError: the run's task is not installed.
    """
    found = load_result_file(path)
    try:
        manifest = verify(found.signed, verify_signature)
    except RemoteError as error:
        raise StorageError(f"{path} is damaged: its manifest is not valid ({error})") from error
    tensors = {name: torch.from_numpy(array.copy()) for name, array in found.parameters.items()}
    constants = {name: tensors.pop(name) for c in constants_of(manifest.model) if (name := c.name) in tensors}
    expected = {spec.name: (spec.shape, torch.float32) for spec in task_of(manifest).specs()}
    if {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()} != expected or listed(
        constants
    ) != constants_of(manifest.model):
        raise StorageError(f"{path} is damaged: it has other parameters than its manifest describes")
    if len(found.labels) != manifest.sync.fragments:
        raise StorageError(f"{path} is damaged: it has other fragments than its manifest describes")
    places = tokenizers_of_result(path, manifest)
    tokenizer = next((content for place in places if (content := tokenizer_on_disk(place, manifest))), None)
    return RunResult(found.signed, manifest, found.labels, tensors, tokenizer, constants)


def result_on_disk(data_dir: Path, wanted: str) -> RunResult:
    """Load the result from the folder of a node that does not run now: checkpoints and the updates after
    them.

    Raises:
        StorageError: no such folder, a node runs in it, or it cannot be read.
        UserError: it has no such run, or several; or the run's task is not installed.
    """
    with _locked(data_dir):
        saved = saved_runs(data_dir)
        runs = {run: listed for run, (listed, _) in saved.items()}
        chosen = choose_run(runs, wanted, joined_runs(data_dir))
        if chosen is None:
            if not saved:
                raise UserError(f"{data_dir} has no run", "give the --data-dir of a node that was in one")
            raise UserError(f'{data_dir} has no run "{wanted}"', f"it has {run_names(runs.values())}")
        signed = saved[chosen.run][1]
        try:
            manifest = verify(signed, verify_signature)
            given = given_on_disk(data_dir, chosen.run, manifest, set_aside=False)
            if manifest.run.initial and given is None:
                raise StorageError(f"version 0 of {chosen.name} is not in {data_dir}", "start its node once")
            run, vault = open_run(signed, Identity.generate(), given=given)
        except (RemoteError, ConfigError) as error:
            raise StorageError(
                f"the manifest of {chosen.name} in {data_dir} is not valid: {error}"
            ) from error
        config = core_config(run, genesis_versions(run, vault), Timing())
        found = restore(config, RunStore(data_dir, run.id), vault, UpdateLog(1))
        result = result_of(run, vault, [found.versions[layout.index][0] for layout in run.layouts])
        tokenizer = tokenizer_on_disk(kept_tokenizer(data_dir, run.id), manifest)
        return msgspec.structs.replace(result, tokenizer=tokenizer)


@contextlib.contextmanager
def _locked(data_dir: Path) -> Iterator[None]:
    folder = DataDir(data_dir, create=False)
    try:
        folder.lock()
    except DataDirInUse as error:
        modes = {
            manifest_from_canonical(signed.manifest).admission.mode
            for _, signed in saved_runs(data_dir).values()
        }
        raise StorageError(str(error), _ASK_IT if modes <= {"open"} else _STOP_IT) from error
    try:
        yield
    finally:
        folder.unlock()
