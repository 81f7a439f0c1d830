"""The token that begins documents and prompts, where the tokenizer begins a text with one."""

from __future__ import annotations

import gzip
import json
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from token_files import DOCUMENTS
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from p2pdiloco.config.manifest import DataSection, canonical_bytes, manifest_from_canonical
from p2pdiloco.config.presets import MICRO
from p2pdiloco.errors import ConfigError, RemoteError, UserError
from p2pdiloco.tasks.documents import REGION_BYTES, pieces
from p2pdiloco.tasks.hub_streams import load_corpus
from p2pdiloco.tasks.registry import manifest_from_table, render_toml, task_of
from p2pdiloco.tasks.task import Place
from p2pdiloco.tasks.tokens import (
    ByteTokenizer,
    FileTokenizer,
    load_tokenizer,
    prompt_ids,
    tokenizer_digest,
    tokens_in_front,
)

CONTEXT = 16
BEGIN, END = "<s>", "</s>"


def file_of(template: str = "") -> bytes:
    """A tokenizer of bytes that begins and ends a text as the template says."""
    words = {character: n for n, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(words, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.add_special_tokens([BEGIN, END, "<x>"])
    if template:
        known = [(token, backend.token_to_id(token)) for token in (BEGIN, END, "<x>") if token in template]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    return backend.to_str().encode()


@pytest.mark.parametrize(
    ("template", "about", "found"),
    [
        ("", {}, []),
        ("", {"bos_token": BEGIN}, []),
        (f"{BEGIN} $A", {}, [BEGIN]),
        (f"{BEGIN} $A {END}", {}, [BEGIN]),
        (f"$A {END}", {}, []),
        (f"<x> {BEGIN} $A", {}, ["<x>", BEGIN]),
        # tokenizer_config.json goes before the file.
        (f"{BEGIN} $A", {"add_bos_token": False, "bos_token": BEGIN}, []),
        ("", {"add_bos_token": True, "bos_token": BEGIN}, [BEGIN]),
        ("", {"add_bos_token": True, "bos_token": {"content": BEGIN}}, [BEGIN]),
        ("", {"add_bos_token": True, "bos_token": "<elsewhere>"}, []),
        ("", {"add_bos_token": True, "bos_token": None}, []),
        (f"{BEGIN} $A", {"add_bos_token": None}, [BEGIN]),
    ],
)
def test_it_is_what_the_tokenizer_begins_a_text_with(
    template: str, about: dict[str, Any], found: list[str]
) -> None:
    assert tokens_in_front(file_of(template), about) == found


def written(folder: Path, source: str) -> str:
    folder.mkdir()
    if source == "files":
        for number in range(4):  # of each, a part is held out
            (folder / f"{number}.txt").write_text("\n".join(DOCUMENTS[number:]) * 20)
    else:
        rows = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    return str(folder)


def all_tokens(data: Any, source: str) -> list[int]:
    if source != "hub":
        return [*data.train.text.tolist(), *data.heldout.text.tolist()]
    found = [data.heldout.text]
    for shard in range(data.train.count):
        reader, carry = data.train.open(0, shard, Place()), b""
        while (batch := reader.take(1000)) is not None:
            found.append(batch[0][:, :-1].numpy().ravel())
            carry = reader.place.carry
        reader.close()
        found.append(np.frombuffer(carry, dtype=np.uint32))
    return [int(token) for part in found for token in part]


@pytest.mark.parametrize("source", ["files", "jsonl", "hub"])
def test_every_document_begins_with_it_and_nothing_else_changes(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdiloco.tasks.hub_streams.LEAST_SHARDS", 2)
    path = written(tmp_path / "data", source)
    section = DataSection(source=source, heldout_percent=20, shuffle_samples=8)  # type: ignore[arg-type]
    found = {}
    for begin in ("", BEGIN, END):
        tokenizer = FileTokenizer(file_of(), END, begin)
        found[begin] = all_tokens(load_corpus(section, path, CONTEXT, tokenizer), source)
    first = FileTokenizer(file_of(), END, BEGIN).begin
    documents = 4 if source == "files" else len(DOCUMENTS)
    with_it = found[BEGIN]
    assert with_it.count(first) == documents and found[""].count(first) == 0
    assert found[END] == found[""], "the end of a document is the begin of the next one"
    if source != "hub":  # (a stream's windows come in another order)
        assert [token for token in with_it if token != first] == found[""]
        end = FileTokenizer(file_of(), END).end
        if source == "jsonl":
            # (in front of the first one, and of what is held out, there is no end)
            at = [place for place, token in enumerate(with_it) if token == first]
            assert at[0] == 0 and all(with_it[place - 1] == end for place in at[1:])


def test_a_document_in_pieces_begins_once() -> None:
    text = b"word\n" * (REGION_BYTES // 2)
    for percent in (1, 20, 50):
        found = list(pieces(text, percent))
        assert len(found) > 3
        begin, at = [], 0
        for piece in found:
            begin += [piece.begins] if at == 0 else []
            assert piece.begins == (at == 0)
            at += len(piece.text)
        assert begin == [True]


def test_prompts_begin_with_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    content = file_of()
    plain, begun = FileTokenizer(content, END), FileTokenizer(content, END, BEGIN)
    (ids,) = plain.encode([b"hi"])
    assert prompt_ids(plain, "hi") == ids.tolist() and prompt_ids(plain, "") == [plain.end]
    assert prompt_ids(begun, "hi") == [begun.begin, *ids.tolist()] and prompt_ids(begun, "") == [begun.begin]
    assert prompt_ids(ByteTokenizer(), "a") == [97]
    asked: list[list[int]] = []
    monkeypatch.setattr(
        "p2pdiloco.tasks.transformer.generate", lambda model, start, *_: asked.append(start) or []
    )
    data = msgspec.structs.replace(
        MICRO.data,
        tokenizer="t",
        tokenizer_digest=tokenizer_digest(content),
        end_of_document=END,
        begin_of_document=BEGIN,
    )
    manifest = msgspec.structs.replace(MICRO, data=data, model=MICRO.model | {"vocabulary": 320})
    task = task_of(manifest, content)
    task.written(task.model(), "hi", 1, 0.0, 0)
    assert asked == [[begun.begin, *ids.tolist()]]
    assert load_tokenizer(data, content, 320).begin == begun.begin
    with pytest.raises(UserError, match=r'no token "<y>" \(data\.begin_of_document\)'):
        FileTokenizer(content, END, "<y>")


def test_a_manifest_that_says_nothing_of_it_is_what_it_was() -> None:
    quiet = canonical_bytes(MICRO)
    assert b"begin_of_document" not in quiet and manifest_from_canonical(quiet) == MICRO
    data = msgspec.structs.replace(
        MICRO.data, tokenizer="t", tokenizer_digest="0" * 64, end_of_document=END, begin_of_document=BEGIN
    )
    told = msgspec.structs.replace(MICRO, data=data)
    assert manifest_from_canonical(canonical_bytes(told)) == told
    # A second encoding of the same run is none.
    raw = msgspec.msgpack.decode(quiet)
    again = msgspec.msgpack.encode(raw | {"data": raw["data"] | {"begin_of_document": ""}})
    with pytest.raises(RemoteError) as caught:
        manifest_from_canonical(again)
    assert caught.value.reason == "manifest-garbage"
    text = render_toml(MICRO).replace('begin_of_document = ""', f'begin_of_document = "{BEGIN}"')
    with pytest.raises(ConfigError, match=r"data\.begin_of_document is a token of a tokenizer file"):
        manifest_from_table(tomllib.loads(text), "run.toml")
