"""Every source of text that a manifest can name, tokenizers, packing, and what is held out."""

import gzip
import json
import sys

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import parquet
from token_files import DOCUMENTS

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import UserError
from p2pdiloco.tasks import hub_streams as hub
from p2pdiloco.tasks.documents import is_heldout
from p2pdiloco.tasks.hub_streams import load_corpus
from p2pdiloco.tasks.tokens import (
    ByteTokenizer,
    FileTokenizer,
    end_of_document,
    load_tokenizer,
    read_tokenizer,
    tokenizer_digest,
)

CONTEXT = 16


def tokenized(path, **keys):
    keys |= {"tokenizer": "tokenizer.json", "tokenizer_digest": tokenizer_digest(path.read_bytes())}
    return DataSection(end_of_document="<|endoftext|>", **keys)


def write(folder, source):
    folder.mkdir(exist_ok=True)
    rows = [{"body": text, "n": index} for index, text in enumerate([*DOCUMENTS, "", None])]
    if source == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows[:100]), folder / "a.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(rows[100:]), folder / "b.parquet")
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
        load_corpus(DataSection(source=source), str(path), CONTEXT, ByteTokenizer())


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path):
    rows = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS)
    loaded = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / "a.jsonl").write_text(rows, encoding=encoding)
        loaded.append(load_corpus(DataSection(source="jsonl"), str(tmp_path), CONTEXT, ByteTokenizer()))
    assert [data.train.text.tobytes() for data in loaded] == [loaded[0].train.text.tobytes()] * 2


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path):
    loaded = []
    for mark in (b"", b"\xef\xbb\xbf"):
        (tmp_path / "a.txt").write_bytes(mark + b"line\r\n" * 999)
        loaded.append(load_corpus(DataSection(source="files"), str(tmp_path), CONTEXT, ByteTokenizer()))
    assert loaded[0].train.text.tobytes() == loaded[1].train.text.tobytes()


def test_endings_in_capitals_count_and_others_are_told(tmp_path):
    section = DataSection(source="jsonl", heldout_percent=30)
    row = json.dumps({"text": "line\n" * 99}) + "\n"
    (tmp_path / "c.json").write_text(row)
    words = "1 file is not called \\*.jsonl or \\*.jsonl.gz or \\*.ndjson and left out, such as .*c.json"
    with pytest.raises(UserError, match=f"there is no text in {tmp_path}: {words}"):
        load_corpus(section, str(tmp_path), CONTEXT, ByteTokenizer())
    (tmp_path / "a.jsonl").write_text(row)
    (tmp_path / "b.JSONL").write_text(row.replace("line", "LINE"))
    (tmp_path / "d.JSONL.GZ").write_bytes(gzip.compress(row.replace("line", "Line").encode()))
    data = load_corpus(section, str(tmp_path), CONTEXT, ByteTokenizer())
    text = data.train.text.tobytes() + data.heldout.text.tobytes()
    assert all(word in text for word in (b"line", b"LINE", b"Line"))
    assert data.note.startswith("data: 1 file is not called")


def test_no_folder_of_somebody_s_own_data_is_left_out_for_its_name(tmp_path):
    names = ("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3")
    for name in (*names, ".hidden"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name}\n" * 300)
        (tmp_path / name / "a.jsonl").write_text(json.dumps({"text": f"{name}\n" * 300}))
    for source in ("files", "jsonl"):
        section = DataSection(source=source, heldout_percent=30)
        data = load_corpus(section, str(tmp_path), CONTEXT, ByteTokenizer())
        text = data.train.text.tobytes() + data.heldout.text.tobytes()
        assert all(f"{name}\n".encode() in text for name in names)
        assert b"hidden" not in text


def test_files_that_are_no_utf_8_are_counted(tmp_path):
    section = DataSection(source="files", heldout_percent=30)
    (tmp_path / "a.txt").write_bytes("é\n".encode("latin-1") * 99)
    (tmp_path / "empty").touch()
    words = "1 file is not UTF-8 text and left out, such as .*a.txt$"
    with pytest.raises(UserError, match=f"there is no text in {tmp_path}: {words}"):
        load_corpus(section, str(tmp_path), CONTEXT, ByteTokenizer())
    (tmp_path / "b.bin").write_bytes(b"\0" * 99)
    (tmp_path / "c.txt").write_text("x" * 99)
    with pytest.raises(UserError, match="too little text") as caught:
        load_corpus(section, str(tmp_path), CONTEXT, ByteTokenizer())
    assert "; 2 files are not UTF-8 text and left out, such as" in caught.value.hint
    (tmp_path / "c.txt").write_text("text\n" * 999)
    note = load_corpus(section, str(tmp_path), CONTEXT, ByteTokenizer()).note
    assert note == f"data: 2 files are not UTF-8 text and left out, such as {tmp_path / 'a.txt'}"


@pytest.mark.parametrize("damage", ["cut", "changed", "none"])
def test_a_damaged_gzip_file_is_one_sentence_that_names_it(tmp_path, monkeypatch, damage):
    whole = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode())
    middle = len(whole) // 2
    content = {"cut": whole[:middle], "changed": whole[:99] + bytes(64) + whole[163:], "none": b"text" * 99}
    (tmp_path / "a.jsonl.gz").write_bytes(content[damage])
    with pytest.raises(UserError, match=r"a\.jsonl\.gz cannot be read as gzip: [^\n]+$"):
        load_corpus(DataSection(source="jsonl"), str(tmp_path), CONTEXT, ByteTokenizer())
    # Whoever streams it is told of the folder: `datasets` does not say where it is.
    monkeypatch.setattr(hub, "RETRIES_S", ())
    with pytest.raises(UserError, match=rf"the data set {tmp_path} cannot be (read|opened): [^\n]+$"):
        load_corpus(DataSection(**LOCAL), str(tmp_path), CONTEXT, ByteTokenizer())


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
    with pytest.raises(UserError, match="cannot read the tokenizer"):
        read_tokenizer(tmp_path / "none")
    with pytest.raises(UserError, match="cannot be read"):
        FileTokenizer(b'{"model": 3}', "x")
    with pytest.raises(UserError, match='no token "<eod>"'):
        FileTokenizer(trained.read_bytes(), "<eod>")


LOCAL = {"source": "hub", "heldout_percent": 20, "shuffle_samples": 8}


def test_a_missing_package_is_one_sentence_that_says_what_to_install(tmp_path, trained, monkeypatch):
    path = write(tmp_path / "data", "parquet")
    for name in ("datasets", "pyarrow", "tokenizers"):
        monkeypatch.setitem(sys.modules, name, None)
    for load, package in (
        (lambda: load_corpus(DataSection(**LOCAL), path, CONTEXT, ByteTokenizer()), "datasets"),
        (lambda: load_corpus(DataSection(source="parquet"), path, CONTEXT, ByteTokenizer()), "pyarrow"),
        (lambda: load_tokenizer(tokenized(trained), trained.read_bytes(), 400), "tokenizers"),
    ):
        with pytest.raises(UserError, match=f"package {package}") as caught:
            load()
        assert caught.value.hint.endswith("pip install -c constraints.txt '.[hub]'")
