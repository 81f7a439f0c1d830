"""Data that are read otherwise than they are meant, or not at all, without a word. Most are known flaws."""

from __future__ import annotations

import gzip
import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pytest
import torch
from known_flaws import known_flaw
from PIL import Image
from pyarrow import parquet
from token_files import DOCUMENTS
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from p2pdiloco.config.manifest import DataSection, ImageSection, canonical_bytes, manifest_from_canonical
from p2pdiloco.config.presets import MICRO
from p2pdiloco.errors import ConfigError, DataError, RemoteError, UserError
from p2pdiloco.tasks import hub_streams as hub
from p2pdiloco.tasks.documents import REGION_BYTES, is_heldout, pieces
from p2pdiloco.tasks.hub_streams import load_corpus
from p2pdiloco.tasks.images import load_images
from p2pdiloco.tasks.registry import manifest_from_table, render_toml, task_of
from p2pdiloco.tasks.task import Data, Place
from p2pdiloco.tasks.tokens import (
    ByteTokenizer,
    FileTokenizer,
    end_of_document,
    load_tokenizer,
    prompt_ids,
    read_tokenizer,
    tokenizer_digest,
    tokens_in_front,
)

HALF = DataSection(source="files", heldout_percent=50)
GREY = ImageSection(classes=2, image_pixels=12, channels=1, layers=1, width=16)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 123456\n"
CONTEXT = 16
Pixels = np.ndarray[Any, Any]

CLIPPED = known_flaw("pictures of more than 8 bits are converted by a function that clips them")
ALPHA_LOST = known_flaw("the alpha channel is dropped: a picture drawn in it alone is of one colour")
TURNED = known_flaw("the orientation of EXIF is not looked at")
UNSAID = known_flaw("pictures of other endings and empty folders are left out without a note")


def drawn(label: str, index: int) -> Pixels:
    """A picture, bright on the left or at the top."""
    pixels = np.random.default_rng(index).integers(0, 80, (12, 12))
    pixels[(slice(None), slice(6)) if label == "left" else slice(6)] += 150
    return pixels.astype(np.uint8)


def pictures(root: Path, save: Callable[[Pixels, Path], None], count: int = 20) -> Data:
    """The product's reading of two folders of such pictures. `save`: to a path without an ending."""
    for label in ("left", "top"):
        (root / label).mkdir(parents=True)
        for index in range(count):
            save(drawn(label, index), root / label / str(index))
    return load_images(HALF, GREY, str(root))


def values(data: Data) -> set[bytes]:
    return {image.tobytes() for samples in (data.train, data.heldout) for image in samples.pixels}


def plain(pixels: Pixels, path: Path) -> None:
    Image.fromarray(pixels).save(path.with_suffix(".png"))


def deep(ending: str) -> Callable[[Pixels, Path], None]:
    return lambda pixels, path: Image.fromarray(pixels.astype(np.uint16) * 257).save(path.with_suffix(ending))


def floating(pixels: Pixels, path: Path) -> None:
    Image.fromarray(pixels.astype(np.float32) / 255).save(path.with_suffix(".tif"))


@pytest.mark.parametrize(
    "save",
    [
        pytest.param(plain, id="8-bit"),
        pytest.param(deep(".png"), id="16-bit-png", marks=CLIPPED),
        pytest.param(deep(".tif"), id="16-bit-tiff", marks=CLIPPED),
        pytest.param(floating, id="float-tiff", marks=CLIPPED),
    ],
)
def test_the_depth_of_a_picture_changes_nothing(save: Callable[[Pixels, Path], None], tmp_path: Path) -> None:
    assert values(pictures(tmp_path / "odd", save)) == values(pictures(tmp_path / "plain", plain))


@ALPHA_LOST
def test_a_picture_in_the_alpha_channel_is_seen(tmp_path: Path) -> None:
    def save(pixels: Pixels, path: Path) -> None:
        white = Image.fromarray(np.full_like(pixels, 255))
        Image.merge("RGBA", [white] * 3 + [Image.fromarray(pixels)]).save(path.with_suffix(".png"))

    assert len(values(pictures(tmp_path / "alpha", save))) > 2


@TURNED
def test_a_picture_that_a_camera_turned_is_turned_back(tmp_path: Path) -> None:
    def save(pixels: Pixels, path: Path) -> None:
        tags = Image.Exif()
        tags[0x112] = 6
        turned = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)
        turned.save(path.with_suffix(".png"), exif=tags)

    assert values(pictures(tmp_path / "turned", save)) == values(pictures(tmp_path / "plain", plain))


@UNSAID
@pytest.mark.parametrize("ending", [".heic", ".avif"])
def test_pictures_that_are_not_read_are_said(ending: str, tmp_path: Path) -> None:
    pictures(tmp_path / "p", plain)
    for path in (tmp_path / "p" / "left").iterdir():
        path.rename(path.with_suffix(ending))
    try:
        note = load_images(HALF, GREY, str(tmp_path / "p")).note
    except UserError as error:
        note = str(error)
    assert ending in note


@UNSAID
def test_a_folder_without_pictures_is_said(tmp_path: Path) -> None:
    pictures(tmp_path / "p", plain)
    for path in (tmp_path / "p" / "left").iterdir():
        path.unlink()
    assert "left" in load_images(HALF, GREY, str(tmp_path / "p")).note


def rows(folder: Path, count: int = 200) -> list[str]:
    folder.mkdir(exist_ok=True)
    return [f"document {index} of the river, the stone and the lamp in winter" for index in range(count)]


def lines(texts: list[str]) -> str:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


def read(source: str, folder: Path, **keys: Any) -> Data:
    section = DataSection(**{"source": source, "heldout_percent": 20} | keys)
    return load_corpus(section, str(folder), CONTEXT, ByteTokenizer())


def text_of(data: Data) -> bytes:
    """All of it."""
    return bytes(data.train.text.tobytes() + data.heldout.text.tobytes())


@known_flaw(
    "a byte order mark in the midst of a JSONL file, as joined files have it, is called malformed JSON"
)
def test_a_file_joined_of_two_with_byte_order_marks_is_read(tmp_path: Path) -> None:
    texts = rows(tmp_path / "d")
    half = len(texts) // 2
    (tmp_path / "d" / "a.jsonl").write_text("\ufeff" + lines(texts[:half]) + "\ufeff" + lines(texts[half:]))
    try:
        data = read("jsonl", tmp_path / "d")
    except UserError as error:
        raise AssertionError(str(error)) from error
    (tmp_path / "d" / "a.jsonl").write_text(lines(texts))
    assert len(data.train) == len(read("jsonl", tmp_path / "d").train)


@known_flaw("pyarrow is given a name that is not UTF-8, which it cannot encode")
def test_a_parquet_file_whose_name_is_not_utf8_is_read(tmp_path: Path) -> None:
    texts = rows(tmp_path / "d")
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "sound.parquet")
    name = os.fsdecode(b"f\xe9.parquet")
    try:
        (tmp_path / "sound.parquet").rename(tmp_path / "d" / name)
    except OSError:
        pytest.skip("no such name on this file system")
    try:
        data = read("parquet", tmp_path / "d")
    except UnicodeEncodeError as error:
        raise AssertionError("no words for a person") from error
    assert len(data.train) > 0


@pytest.mark.parametrize(
    ("source", "name"),
    [("jsonl", "a.jsonl"), ("parquet", "a.parquet"), ("files", "a.txt"), ("hub", "a.parquet")],
)
@known_flaw("a pointer of git-lfs among the data is called damaged, or read as text, and not what it is")
def test_a_pointer_of_git_lfs_is_called_what_it_is(source: str, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(POINTER)
    if source == "files":
        (tmp_path / "b.txt").write_text("\n".join(rows(tmp_path)))
    try:
        said = read(source, tmp_path).note
    except UserError as error:
        said = f"{error} {error.hint}"
    assert "git-lfs" in said


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.jsonl.xz"])
@known_flaw("the hint for compressed text names iconv and .gz, whatever the compression is")
def test_compressed_text_that_is_not_read_is_called_so(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"(\xb5/\xfd")
    with pytest.raises(UserError) as caught:
        read("jsonl", tmp_path)
    assert "iconv" not in caught.value.hint and name[-3:] in caught.value.hint


def streamed(folder: Path) -> str:
    """All that a stream of that folder trains on."""
    data = read("hub", folder)
    found = []
    for shard in range(data.train.count):
        reader = data.train.open(0, shard, Place(0, 0, b""))
        while (windows := reader.take(64)) is not None:
            found += [ByteTokenizer().decode(window[:-1]) for window in windows[0]]
        reader.close()
    return "".join(found)


@pytest.mark.parametrize("name", ["trip-by-train", "dev", "my-test"])
@known_flaw(
    "a file whose name is that of a split is taken for it: the others are not read, or there is no train"
)
def test_the_name_of_one_file_does_not_decide_that_others_are_not_read(name: str, tmp_path: Path) -> None:
    texts = rows(tmp_path)
    for file, part in (("books", texts[:150]), (name, texts[150:])):
        (tmp_path / f"{file}.jsonl").write_text(lines(part))
    try:
        assert "document 10 of" in streamed(tmp_path) or read("hub", tmp_path).note
    except UserError as error:
        raise AssertionError(str(error)) from error


@known_flaw("a column of text that is dictionary-encoded is refused in a stream, and read from a file")
def test_a_category_is_text_in_a_stream_too(tmp_path: Path) -> None:
    texts = rows(tmp_path)
    parquet.write_table(pyarrow.table({"text": texts[:100]}), tmp_path / "a.parquet")
    encoded = pyarrow.array(texts[100:]).dictionary_encode()
    parquet.write_table(pyarrow.table({"text": encoded}), tmp_path / "b.parquet")
    assert len(read("parquet", tmp_path).train) > 0
    try:
        assert "document 150 of" in streamed(tmp_path)
    except DataError as error:
        raise AssertionError(str(error)) from error


@known_flaw("a damaged first file of a stream is called a fault of settings or network, and is not named")
def test_a_damaged_first_file_of_a_stream_is_named(tmp_path: Path) -> None:
    texts = rows(tmp_path)
    parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "b.parquet")
    (tmp_path / "a.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:200])
    with pytest.raises(UserError) as caught:
        streamed(tmp_path)
    assert "a.parquet" in str(caught.value) and isinstance(caught.value, DataError)


@pytest.mark.parametrize("unknown", [None, "<unk>"], ids=["dropped", "unknown-token"])
@known_flaw("letters that the tokenizer does not have vanish, or become one unknown token, without a note")
def test_text_that_a_tokenizer_cannot_say_is_noted(unknown: str | None, tmp_path: Path) -> None:
    words = {word: n for n, word in enumerate(["<|endoftext|>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    backend = Tokenizer(models.BPE(words, [], unk_token=unknown))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    content = backend.to_str().encode()
    section = DataSection(
        source="files",
        tokenizer="t.json",
        tokenizer_digest=tokenizer_digest(content),
        end_of_document="<|endoftext|>",
        heldout_percent=20,
    )
    (tmp_path / "a.txt").write_text("река и камень зимой и летом the end\n\n" * 500)
    assert load_corpus(section, str(tmp_path), CONTEXT, load_tokenizer(section, content, 64)).note


# The token that begins documents and prompts, where the tokenizer begins a text with one.

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
        (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines(DOCUMENTS).encode()))
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
    if source == "jsonl":  # (in front of the first one, and of what is held out, there is no end)
        at = [place for place, token in enumerate(with_it) if token == first]
        end = FileTokenizer(file_of(), END).end
        assert at[0] == 0 and all(with_it[place - 1] == end for place in at[1:])


def test_a_document_in_pieces_begins_once() -> None:
    text = b"word\n" * (REGION_BYTES // 2)
    for percent in (1, 20, 50):
        found = list(pieces(text, percent))
        assert len(found) > 3 and [piece.begins for piece in found] == [True] + [False] * (len(found) - 1)
    small = [piece for count in (1, 2) for piece in pieces(b"word\n" * count, 50)]
    assert [(piece.heldout, piece.begins) for piece in small] == [(True, True), (False, True)]


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


# Every source of text that a manifest can name, tokenizers, packing, and what is held out.


def tokenized(path, **keys):
    keys |= {"tokenizer": "tokenizer.json", "tokenizer_digest": tokenizer_digest(path.read_bytes())}
    return DataSection(end_of_document="<|endoftext|>", **keys)


def write(folder, source):
    folder.mkdir(exist_ok=True)
    rows = [{"body": text, "n": index} for index, text in enumerate([*DOCUMENTS, "", None])]
    if source == "parquet":
        for name, part in (("a", rows[:100]), ("b", rows[100:])):
            parquet.write_table(pyarrow.Table.from_pylist(part), folder / f"{name}.parquet")
    else:
        (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    (folder / "readme.md").write_text("not a document")
    return str(folder)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
def test_rows_are_documents_joined_by_their_end_and_split_by_their_text(tmp_path, trained, source):
    section = tokenized(trained, source=source, field="body", heldout_percent=20)
    tokenizer = load_tokenizer(section, trained.read_bytes(), 400)
    data = load_corpus(section, write(tmp_path / "data", source), CONTEXT, tokenizer)
    held = [text for text in DOCUMENTS if is_heldout(text, 20)]
    assert 30 < len(held) < 90
    assert tokenizer.decode(data.heldout.text).split("<|endoftext|>") == [*held, ""]
    assert tokenizer.decode(data.train.text).split("<|endoftext|>") == [
        *(text for text in DOCUMENTS if text not in held),
        "",
    ]
    # Windows without padding, of which one begins with the last token of the one before: nothing is lost.
    (windows,) = data.train.batch(np.arange(len(data.train)))
    assert windows.shape[1] == CONTEXT + 1 and torch.equal(windows[:-1, -1], windows[1:, 0])
    left = data.train.text[len(data.train) * CONTEXT :]
    assert [*windows[:, :-1].flatten().tolist(), *left.tolist()] == data.train.text.tolist()


@pytest.mark.parametrize(
    ("source", "content", "sentence"),
    [
        ("jsonl", b'{"text": "x"}\n{"text": 3}\n', "is no text in row 2 of"),
        ("jsonl", b'{"body": "x"}\n', 'has no key "text"'),
        ("jsonl", b"{nonsense\n", "line 1 of .* is no JSON object"),
        (
            "jsonl",
            b'{"text": "x"}\n{"text": "\\ud800 x"}\n',
            "line 2 of .*: half a surrogate pair is no character",
        ),
        (
            "jsonl",
            b'{"text": "\\ud83d\\ude00", "n": NaN}\n',
            "line 1 of .* is no JSON object: NaN is not JSON; null is",
        ),
        ("parquet", b"nonsense", "cannot be read as parquet"),
        ("jsonl", b"", "no text in"),
    ],
)
def test_rows_that_cannot_be_read_are_one_sentence(tmp_path, source, content, sentence):
    path = tmp_path / f"x.{source}"
    path.write_bytes(content)
    with pytest.raises(UserError, match=sentence):
        read(source, path)


@pytest.mark.parametrize(
    ("source", "content"), [("jsonl", lines(DOCUMENTS).encode()), ("files", b"line\r\n" * 999)]
)
def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path, source, content):
    loaded = []
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.jsonl").write_bytes(mark + content)
        loaded.append(text_of(read(source, tmp_path)))
    assert loaded[0] == loaded[1]


def test_endings_in_capitals_count_and_others_are_told(tmp_path):
    row = lines(["line\n" * 99])
    (tmp_path / "c.json").write_text(row)
    words = "1 file is not called \\*.jsonl or \\*.jsonl.gz or \\*.ndjson and left out, such as .*c.json"
    with pytest.raises(UserError, match=f"there is no text in {tmp_path}: {words}"):
        read("jsonl", tmp_path)
    (tmp_path / "a.jsonl").write_text(row)
    (tmp_path / "b.JSONL").write_text(row.replace("line", "LINE"))
    (tmp_path / "d.JSONL.GZ").write_bytes(gzip.compress(row.replace("line", "Line").encode()))
    data = read("jsonl", tmp_path, heldout_percent=30)
    assert all(word in text_of(data) for word in (b"line", b"LINE", b"Line"))
    assert data.note.startswith("data: 1 file is not called")


def test_no_folder_of_somebody_s_own_data_is_left_out_for_its_name(tmp_path):
    names = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")
    for name in (*names, ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name}\n" * 300)
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": f"{name}\n" * 300}))
    for source in ("files", "jsonl"):
        text = text_of(read(source, tmp_path, heldout_percent=30))
        assert all(f"{name}\n".encode() in text for name in names)
        assert b"hidden" not in text


def test_files_that_are_no_utf_8_are_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes("é\n".encode("latin-1") * 99)
    (tmp_path / "empty").touch()
    words = "1 file is not UTF-8 text and left out, such as .*a.txt$"
    with pytest.raises(UserError, match=f"there is no text in {tmp_path}: {words}"):
        read("files", tmp_path)
    (tmp_path / "b.bin").write_bytes(b"\0" * 99)
    (tmp_path / "c.txt").write_text("x" * 99)
    with pytest.raises(UserError, match="too little text") as caught:
        read("files", tmp_path)
    assert "; 2 files are not UTF-8 text and left out, such as" in caught.value.hint
    (tmp_path / "c.txt").write_text("text\n" * 999)
    said = f"data: 2 files are not UTF-8 text and left out, such as {tmp_path / 'a.txt'}"
    assert read("files", tmp_path).note == said


@pytest.mark.parametrize("damage", ["cut", "changed", "none"])
def test_a_damaged_gzip_file_is_one_sentence_that_names_it(tmp_path, monkeypatch, damage):
    whole = gzip.compress(lines(DOCUMENTS).encode())
    middle = len(whole) // 2
    content = {"cut": whole[:middle], "changed": whole[:99] + bytes(64) + whole[163:], "none": b"text" * 99}
    (tmp_path / "a.jsonl.gz").write_bytes(content[damage])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read as gzip: [^\n]+$"):
        read("jsonl", tmp_path)
    # Whoever streams it is told of the folder: `datasets` does not say where it is.
    monkeypatch.setattr(hub, "RETRIES_S", ())
    with pytest.raises(UserError, match=rf"the data set {tmp_path} cannot be (read|opened): [^\n]+$"):
        read("hub", tmp_path, shuffle_samples=8)


def test_a_tokenizer_is_the_manifest_s_or_none(tmp_path, trained):
    section = tokenized(trained)
    found = load_tokenizer(section, trained.read_bytes(), 400)
    (ids,) = found.encode(["Ünder <|endoftext|>".encode()])
    assert ids.dtype == np.uint16 and found.decode(ids) == "Ünder <|endoftext|>"
    assert found.vocabulary == 400 and found.end == 0
    assert end_of_document(trained.read_bytes()) == "<|endoftext|>"
    content = trained.read_bytes()
    for given, vocabulary, sentence in (
        (None, 400, 'the tokenizer "tokenizer.json" of this run is not here'),
        (content + b"\n", 400, "this is not the tokenizer of the run: its SHA-256 is"),
        (content, 399, "model.vocabulary is 399, but the tokenizer tokenizer.json has 400 tokens"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_tokenizer(section, given, vocabulary)
    for wrong, sentence in (
        (lambda: read_tokenizer(tmp_path / "none"), "cannot read the tokenizer"),
        (lambda: FileTokenizer(b'{"model": 3}', "x"), "cannot be read"),
        (lambda: FileTokenizer(content, "<eod>"), 'no token "<eod>"'),
    ):
        with pytest.raises(UserError, match=sentence):
            wrong()


def test_a_missing_package_is_one_sentence_that_says_what_to_install(tmp_path, trained, monkeypatch):
    path = write(tmp_path / "data", "parquet")
    for name in ("datasets", "pyarrow", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    for load, package in (
        (lambda: read("hub", path), "datasets"),
        (lambda: read("parquet", path), "pyarrow"),
        (lambda: load_tokenizer(tokenized(trained), trained.read_bytes(), 400), "tokenizers"),
    ):
        with pytest.raises(UserError, match=f"package {package}") as caught:
            load()
        assert caught.value.hint.endswith("pip install -c constraints.txt '.[hub]'")
