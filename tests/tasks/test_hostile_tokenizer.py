"""A stranger's tokenizer file that panics, or backtracks for ever, is a refusal in one sentence."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from p2pdiloco.errors import InvariantViolation, UserError
from p2pdiloco.tasks import tokens
from p2pdiloco.tasks.tokens import FileTokenizer, end_of_document

pytest.importorskip("tokenizers")
EVIL = "(x+x+)+y"


def file_of(**parts: Any) -> bytes:
    model = {"type": "WordLevel", "vocab": {"x": 0, "</s>": 1}, "unk_token": "x"}
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **empty, **parts}).encode()


PLACES = {
    "normalizer": {"type": "Replace", "pattern": {"Regex": EVIL}, "content": ""},
    "pre_tokenizer": {
        "type": "Split",
        "pattern": {"Regex": EVIL},
        "behavior": "Isolated",
        "invert": False,
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_a_regex_that_backtracks_is_refused(place: str) -> None:
    tokenizer = FileTokenizer(file_of(**{place: PLACES[place]}), "</s>")
    with pytest.raises(UserError, match="the tokenizer cannot encode this text") as refused:
        tokenizer.encode([b"x" * 200])
    assert "\n" not in str(refused.value) and "regular expression" in refused.value.hint


def test_a_decoder_that_backtracks_is_refused() -> None:
    decoder = {"type": "Replace", "pattern": {"Regex": EVIL}, "content": ""}
    tokenizer = FileTokenizer(
        file_of(
            decoder=decoder,
            model={"type": "WordLevel", "vocab": {"x" * 200: 0, "</s>": 1}, "unk_token": "</s>"},
        ),
        "</s>",
    )
    with pytest.raises(UserError, match="the tokenizer cannot decode these tokens"):
        tokenizer.decode([0])


def test_what_takes_too_long_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    with pytest.raises(UserError, match="it takes more than 0 s"):
        tokens._asked("the tokenizer cannot encode this text", over.wait, 0.01)
    over.set()
    monkeypatch.setattr(tokens, "PATIENCE_S", 0.0)
    monkeypatch.setattr(tokens, "LEAST_BYTES_PER_S", 1e-3)
    found = FileTokenizer(file_of(), "</s>").encode([b"x", b"x" * 3])
    assert [ids.tolist() for ids in found] == [[0], [0]], "longer texts have longer"


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[" * 100_000, file_of(model={"type": "no"})])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(UserError, match="the tokenizer file cannot be read") as refused:
        end_of_document(content)
    assert "\n" not in str(refused.value)


def test_our_own_mistakes_are_no_refusals() -> None:
    def broken() -> None:
        raise InvariantViolation("ours")

    with pytest.raises(InvariantViolation):
        tokens._asked("", broken)
