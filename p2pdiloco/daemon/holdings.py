"""Holdings of a node in a run: its files, and what of them is in memory from the start."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor

from p2pdiloco.adapters.data_dir import EventsLog, Spool
from p2pdiloco.adapters.run_store import KeptFiles, RunStore
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import parse_size
from p2pdiloco.core.api.config import Timing
from p2pdiloco.daemon.payloads.compute import Compute
from p2pdiloco.daemon.payloads.durable import Durable
from p2pdiloco.daemon.payloads.memory import Memory
from p2pdiloco.daemon.payloads.tickets import Tickets
from p2pdiloco.daemon.payloads.update_log import UpdateLog
from p2pdiloco.daemon.run_files.footprint import UPDATES_IN_MEMORY
from p2pdiloco.daemon.run_files.restore import restore
from p2pdiloco.daemon.run_files.runs import Run, core_config, genesis_versions, save_run
from p2pdiloco.errors import StorageError
from p2pdiloco.tensors.layout import Exchange
from p2pdiloco.tensors.vault import Vault


class RunHoldings:
    """Holdings of one run: opens and restores all of them, and closes them."""

    def __init__(self, run: Run, vault: Vault, settings: NodeSettings, timing: Timing) -> None:
        codecs, data_dir = run.manifest.codec, settings.data_dir
        most_bytes = parse_size(settings.max_memory, "--max-memory")
        self.memory = Memory.of_run(
            most_bytes, run.layouts, codecs.contribution, codecs.update, UPDATES_IN_MEMORY
        )
        self.memory_is_bounded = bool(most_bytes)
        self.store = RunStore(data_dir, run.id)
        save_run(data_dir, run, vault)
        self.events = EventsLog(data_dir / "events.jsonl")
        self.config = core_config(run, genesis_versions(run, vault), timing)
        self.updates = UpdateLog(min(self.config.log_versions, UPDATES_IN_MEMORY))
        self.found = restore(self.config, self.store, vault, self.updates)
        self.exchange = Exchange.create(run.layouts)
        self.compute = Compute(vault, self.exchange)
        self.compute.load(self.found.versions)
        self.disk_io = ThreadPoolExecutor(1, thread_name_prefix="disk")
        self.results_io = ThreadPoolExecutor(1, "results")
        self.tickets = Tickets()
        self.kept = KeptFiles(self.store.folder / "kept")
        self.spool = Spool(self.store.folder)
        self.durable = Durable(self.store, self.tickets, self.disk_io, timing.durable_s)

    def close(self) -> None:
        """End the threads when their jobs are done, and let go of memory and files."""
        self.compute.close()
        self.disk_io.shutdown(wait=True)
        self.results_io.shutdown(wait=True, cancel_futures=True)
        self.spool.close()
        with contextlib.suppress(StorageError):  # what is left over goes at the next start
            self.kept.clear()
        self.exchange.close()
        self.events.close()
