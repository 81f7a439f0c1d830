"""Types the commands of a document, in their order, on machines of its own over loopback.

Who reads it has one or several machines, each with a home; here these are folders. Commands run as they stand
there, but for what `document_words` says. What stays (a node, `top`) goes on until the document is done, or
the next needs its data folder. Waiting is for what is to be seen, with a deadline.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from document_reader import Block, Command, Snippet
from document_words import (
    PLACEHOLDER,
    PRINTED,
    PROGRAMS,
    elsewhere,
    missing_line,
    programs,
    substituted,
    unknown_flag,
)
from launcher import Launched, Launcher

from p2pdiloco.demo.swarm import Tail

ROOT = Path(__file__).parents[3]
POLL_S = 0.02
COMMAND_S = 90.0
READY_S = 90.0
EXIT_S = 30.0
OFFERED = ("docs/examples", "node", "bootstrap", "constraints.txt")
"""What of a clone a command finds in the folder where it is typed."""
BEFORE = """
import torch
import p2pdiloco

class Times:
    def __init__(self, left):
        self.left = left
    def __bool__(self):
        self.left -= 1
        return self.left >= 0

def train(inputs, targets):
    loss = (model(inputs) - targets).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()

training, join, loss = Times(20), [], torch.tensor(1.0)
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(8)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
batches = [(torch.randn(64, 8), torch.randn(64, 8))] * 20
run = p2pdiloco.new_run(model, "given.toml", "given", tokens_per_step=64, inner_steps=16, fragments=2)
"""
"""What the programs of documents suppose: a model, an optimizer, data, a run."""

SETTINGS = {
    "P2PDILOCO_LISTEN": "/ip4/127.0.0.1/tcp/0",
    "P2PDILOCO_THREADS": "1",
    "P2PDILOCO_MIN_STEP_S": "0.1",
    "P2PDILOCO_PRESET": "micro",
    "P2PDILOCO_YES": "1",
    "OMP_NUM_THREADS": "1",
    "TERM": "dumb",
    "COLUMNS": "200",
}
FOR_SHELLS = frozenset("|&;<>$`*?~{}")


class Wrong(AssertionError):
    """A command did not do what its document says."""


@dataclass
class Machine:
    """A home, the folder where somebody types, and variables that were exported."""

    name: str
    home: Path
    folder: Path
    variables: dict[str, str]


@dataclass
class Staying:
    """A command that goes on."""

    command: Command
    output: Path
    process: Launched | subprocess.Popen[bytes]
    machine: str = "here"
    data_dir: Path | None = None
    log: Tail | None = None
    merged: bool = False

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def is_at_work(self) -> bool:
        """Work of it was merged."""
        assert self.log is not None
        self.merged = self.merged or any(line.is_merged() for line in self.log.lines())
        return self.merged


class Reader:
    """Somebody who types what one document says."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        launcher: Launcher,
        given: Callable[[str], str],
        say: Callable[[str], object] = print,
    ) -> None:
        """`given`: what stands for a placeholder that nothing has printed yet."""
        self.values: dict[str, str] = {}
        self._folder, self._environment, self._launcher = folder, environment, launcher
        self._given, self._say = given, say
        self._machines: dict[str, Machine] = {}
        self._ports: dict[str, str] = {}
        self._staying: list[Staying] = []
        self._typed = 0

    def read(self, block: Block) -> None:
        """Type one block. Raises: Wrong."""
        if block.not_run:
            for command in block.commands:
                self._check_flags(command)
            self._say(f"{block.where}: not run: {block.not_run}")
            return
        machine = self._machine(block.machine)
        for command in block.commands:
            if where := elsewhere(command.text):
                self._check_flags(command)
                self._say(f"{command.where}: elsewhere: {where}")
                continue
            self._all_live()
            began = time.monotonic()
            self._type(machine, command)
            self._say(f"{command.where}: {time.monotonic() - began:.1f} s: {command.text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Ctrl-C to all that stays. Raises: Wrong (it does not end in order; not after another failure)."""
        wrong = []
        try:
            if kind is None:
                self._all_live()
        except Wrong as error:
            wrong.append(error)
        for staying in self._staying:
            staying.process.send_signal(signal.SIGINT)
        for staying in self._staying:
            try:
                self._ended(staying)
            except AssertionError as error:  # of Wrong, or of a launcher that has ended
                wrong.append(error)
                end(staying.process)
        self._staying.clear()
        if wrong and kind is None:
            raise wrong[0]

    def run_program(self, snippet: Snippet) -> None:
        """Run a Python program. Raises: Wrong."""
        if snippet.not_run:
            self._say(f"{snippet.where}: not run: {snippet.not_run}")
            return
        machine = self._machine("programs")
        folder = machine.folder / f"of-line-{snippet.where.rpartition(':')[2]}"
        folder.mkdir()
        (folder / "program.py").write_text(BEFORE + snippet.text)
        machine.folder, text = folder, "python program.py"
        self._run(machine, Command(snippet.where, text), text, folder / "output")

    def _machine(self, name: str) -> Machine:
        if name not in self._machines:
            folder = self._folder / name
            work = folder / "p2pdiloco"
            programs = work / ".venv" / "bin"
            programs.mkdir(parents=True)
            (folder / "home").mkdir()
            for offered in OFFERED:
                copy = shutil.copytree if (ROOT / offered).is_dir() else shutil.copyfile
                copy(ROOT / offered, work / offered)
            # As the installed one begins: the folder where it is typed is no place for modules.
            started = f'#!/bin/sh\nexec {sys.executable} -P -m p2pdiloco "$@"\n'
            (programs / "p2pdiloco").write_text(started)
            (programs / "p2pdiloco").chmod(0o755)
            path = [str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]
            variables = {
                **self._environment,
                **SETTINGS,
                "HOME": str(folder / "home"),
                "PATH": ":".join(path),
                "PYTHONPATH": f"{ROOT}:{ROOT / 'lab'}",
            }
            self._machines[name] = Machine(name, folder / "home", work, variables)
        return self._machines[name]

    def _type(self, machine: Machine, command: Command) -> None:
        self._check(command)
        text = PLACEHOLDER.sub(lambda found: self._value(found[1]), command.text)
        text = substituted(text, self._port)
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        self._typed += 1
        output = self._folder / f"{self._typed}.output"
        if words[0] == "cd" and len(words) == 2:
            machine.folder = (machine.folder / Path(words[1].replace("~", str(machine.home), 1))).resolve()
            if not machine.folder.is_dir():
                raise Wrong(f"{command.where}: there is no folder {words[1]}")
        elif words[0] == "export":
            machine.variables |= dict(word.split("=", 1) for word in words[1:])
        elif stays(command, words):
            self._stay(machine, command, words, text, output)
        else:
            self._run(machine, command, text, output)

    def _check(self, command: Command) -> None:
        unknown = [word for word in programs(command.text) if word not in PROGRAMS]
        if unknown:
            raise Wrong(
                f"{command.where}: {unknown[0]} is not known here: `<!-- not run: why -->` before the block"
                " says that it cannot be run"
            )
        outside = [w for w in shlex.split(command.text, comments=True)[1:] if w.startswith(("/", ".."))]
        if programs(command.text)[0] in ("rm", "mv", "cp", "mkdir") and outside:
            raise Wrong(f"{command.where}: {outside[0]} is of the machine that this runs on")
        if "curl" in programs(command.text) and "http://127.0.0.1:" not in command.text:
            raise Wrong(f"{command.where}: curl reaches for another machine")
        self._check_flags(command)

    def _check_flags(self, command: Command) -> None:
        if programs(command.text)[0].endswith("p2pdiloco") and not set(command.text) & set("|&;<>"):
            missing = unknown_flag(command.text)
            if missing and command.status == 0:
                raise Wrong(f"{command.where}: {missing}: {command.text}")

    def _port(self, said: str) -> str:
        if said not in self._ports:
            with socket.create_server(("127.0.0.1", 0)) as free:
                self._ports[said] = str(free.getsockname()[1])
        return self._ports[said]

    def _value(self, placeholder: str) -> str:
        others = [s for s in self._staying if s.machine != "here" and s.log is not None]
        if placeholder == "PEER" and others:
            return re.search(r"/p2p/(\w+)", others[-1].printed())[1]
        if placeholder not in self.values:
            self.values[placeholder] = self._given(placeholder)
        return self.values[placeholder]

    def _run(self, machine: Machine, command: Command, text: str, output: Path) -> None:
        process = self._start(machine, text, output)
        try:
            status = process.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            raise Wrong(self._said(command, f"did not end within {COMMAND_S:g} s", output)) from None
        finally:
            if process.poll() is None:
                end(process)
        self._learn(output)
        if status != command.status:
            raise Wrong(self._said(command, f"ended with {status}, not {command.status}", output))
        if line := missing_line(output.read_text(errors="replace"), command.printed):
            raise Wrong(self._said(command, f"did not print: {line}", output))

    def _start(self, machine: Machine, text: str, output: Path) -> Launched | subprocess.Popen[bytes]:
        """A command of ours that needs no shell is forked from what has imported everything."""
        words = shlex.split(text.replace("\\\n", " "), comments=True)
        if words[0].endswith("p2pdiloco") and not set(" ".join(words[1:])) & FOR_SHELLS:
            return self._launcher.start(words[1:], output, output, machine.folder, machine.variables)
        simple = not set(text) & set("|&;\n")
        with output.open("wb") as file:
            return subprocess.Popen(
                ["bash", "-o", "pipefail", "-c", f"exec {text}" if simple else text],
                cwd=machine.folder,
                env=machine.variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def _stay(self, machine: Machine, command: Command, words: list[str], text: str, output: Path) -> None:
        data_dir = folder_of(machine, words)
        for other in [s for s in self._staying if data_dir is not None and s.data_dir == data_dir]:
            other.process.send_signal(signal.SIGINT)
            self._ended(other)
            self._staying.remove(other)
        log = None
        if data_dir is not None:
            events = data_dir / "events.jsonl"
            log = Tail(events)
            log.lines()  # what an earlier process wrote
        process = self._start(machine, text, output)
        staying = Staying(command, output, process, machine.name, data_dir, log)
        self._staying.append(staying)
        ready = ready_of(machine, words)
        deadline = time.monotonic() + READY_S
        while missing_line(staying.printed(), command.printed) or not ready(staying):
            if staying.process.poll() is not None:
                raise Wrong(self._said(command, f"ended with {staying.process.poll()}", output))
            if time.monotonic() > deadline:
                line = missing_line(staying.printed(), command.printed)
                why = f"did not print within {READY_S:g} s: {line}" if line else "is not at work"
                raise Wrong(self._said(command, why, output))
            time.sleep(POLL_S)
        self._learn(output)

    def _learn(self, output: Path) -> None:
        text = output.read_text(errors="replace")
        for name, pattern in PRINTED.items():
            if found := pattern.search(text):
                self.values[name] = found[found.re.groups]

    def _all_live(self) -> None:
        """Who left in order, as `finish` lets a node do, is forgotten."""
        for staying in list(self._staying):
            status = staying.process.poll()
            if status is not None:
                self._staying.remove(staying)
            if status:
                raise Wrong(self._said(staying.command, f"ended with {status}", staying.output))

    def _ended(self, staying: Staying) -> None:
        try:
            status = staying.process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            raise Wrong(self._said(staying.command, "does not end after Ctrl-C", staying.output)) from None
        if status not in (0, 130):
            raise Wrong(self._said(staying.command, f"ended with {status} after Ctrl-C", staying.output))

    def _said(self, command: Command, what: str, output: Path) -> str:
        others = [f"--- {s.command.text}\n{s.printed()[-1500:]}" for s in self._staying if s.output != output]
        return "\n".join(
            [f"{command.where}: {what}", f"$ {command.text}", output.read_text(errors="replace"), *others]
        )


def stays(command: Command, words: list[str]) -> bool:
    """Whether it goes on until somebody ends it."""
    if not words[0].endswith("p2pdiloco"):
        return words[0] in ("tail", "tensorboard")
    if command.status or "--help" in words:
        return False
    return words[1] in ("node", "join", "bootstrap", "top") or bool({"--follow", "--every"} & set(words))


def folder_of(machine: Machine, words: list[str]) -> Path | None:
    """The data folder of a node or bootstrap; None: it is neither."""
    if not words[0].endswith("p2pdiloco") or words[1] not in ("node", "join", "bootstrap"):
        return None
    default = f"~/.p2pdiloco/{'bootstrap' if words[1] == 'bootstrap' else 'node'}"
    said = words[words.index("--data-dir") + 1] if "--data-dir" in words else ""
    named = said or machine.variables.get("P2PDILOCO_DATA_DIR", default)
    return machine.folder / named.replace("~", str(machine.home), 1)


def ready_of(machine: Machine, words: list[str]) -> Callable[[Staying], bool]:
    """What is to be seen of a command that stays before the next one is typed."""
    if words[1] in ("node", "join"):
        return Staying.is_at_work
    if words[1] == "bootstrap":
        return lambda staying: "\np2pdiloco node " in staying.printed()
    if "--out" in words:  # a board that is written again and again, and says nothing
        written = machine.folder / words[words.index("--out") + 1] / "index.html"
        return lambda _: written.exists()
    return lambda staying: bool(staying.printed().strip())


def end(process: Launched | subprocess.Popen[bytes]) -> None:
    """End a process, and what it started: of a node that ends with it, of a shell it would stay."""
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    if isinstance(process, subprocess.Popen):
        for one in started:
            with suppress(psutil.NoSuchProcess):
                one.terminate()
    try:
        process.wait(EXIT_S)
    except (subprocess.TimeoutExpired, AssertionError):
        process.kill()
    _, left = psutil.wait_procs(started, EXIT_S)
    for one in left:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    if isinstance(process, subprocess.Popen):
        process.wait()
