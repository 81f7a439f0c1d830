"""What a learner's process says, where it cannot be written."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

import pytest

from p2pdiloco.learner.lifeline import speak


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full is Linux's")
def test_a_full_disk_takes_no_word_and_ends_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("stdout", "stderr"):  # so that they are put back
        monkeypatch.setattr(sys, name, getattr(sys, name))
    fd = os.open("/dev/full", os.O_WRONLY)
    try:
        with pytest.raises(OSError, match="No space left"):
            os.write(fd, b"x")
        with speak(fd) as log:
            print("a word")
            print("another", file=sys.stderr, flush=True)
            try:
                raise ValueError("of ours")
            except ValueError:
                traceback.print_exc()
            log.flush()
    finally:
        os.close(fd)


def test_words_are_there_at_once_and_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    path = tmp_path / "learner.log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        speak(fd)
        print("one")
        assert path.read_text() == "one\n"
        print("two \udc80", file=sys.stderr)
        assert path.read_text() == "one\ntwo \\udc80\n"
    finally:
        os.close(fd)
