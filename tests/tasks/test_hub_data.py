"""Data sets that are streamed."""

from __future__ import annotations

import gzip
import json
import zlib
from types import SimpleNamespace

import msgspec
import numpy as np
import pyarrow as arrow
import pytest
import torch
from pyarrow import parquet
from token_files import DOCUMENTS

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import UserError
from p2pdiloco.learner.samples import SampleStream
from p2pdiloco.tasks import hub_streams as hub
from p2pdiloco.tasks import text as packing
from p2pdiloco.tasks.documents import hub_file, is_heldout
from p2pdiloco.tasks.hub_streams import load_corpus
from p2pdiloco.tasks.task import Place, Shards
from p2pdiloco.tasks.tokens import ByteTokenizer, FileTokenizer

CONTEXT = 16


LOCAL = {"source": "hub", "heldout_percent": 20, "shuffle_samples": 8}


def local(tmp_path):
    """A local data set of three files, which `datasets` can load."""
    folder = tmp_path / "set"
    folder.mkdir()
    for file in range(3):
        rows = (json.dumps({"text": text}) for text in DOCUMENTS[file::3])
        (folder / f"train-{file}.jsonl").write_text("\n".join(rows))
    return str(folder)


class Source:
    """One file of documents, as `datasets` gives it. `breaks`: an error in place of the document of this
    number, counted from where reading began."""

    num_shards = 1

    def __init__(self, texts, breaks=None, at=0):
        self._texts, self._breaks, self._at = texts, breaks, at

    def shard(self, num_shards, index, contiguous):
        assert (num_shards, index) == (1, 0)
        return self

    def skip(self, count):
        return Source(self._texts[count:], self._breaks, self._at)

    def __iter__(self):
        for index, text in enumerate(self._texts):
            if self._breaks is not None and index == self._at:
                raise self._breaks
            yield {"text": text}


def stream_of(source, words="the data set", **keys):
    return hub.HubStream(source, DataSection(**LOCAL | keys), CONTEXT, ByteTokenizer(), "x", words)


def read(reader, most=10**6):
    out = []
    while len(out) < most and (batch := reader.take(min(3, most - len(out)))) is not None:
        out += [tuple(row) for row in batch[0].tolist()]
    return out


def test_a_local_data_set_is_streamed_in_shards_that_lose_nothing_and_go_on_anywhere(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "LEAST_SHARDS", 6)
    path = local(tmp_path)
    data = load_corpus(DataSection(**LOCAL), path, CONTEXT, ByteTokenizer())
    train = data.train
    assert isinstance(train, Shards) and train.count == 6
    held = {text for text in DOCUMENTS if is_heldout(text, 20)}
    assert set(data.heldout.text.tobytes().decode().splitlines()) == held
    texts = b""
    for shard in range(train.count):
        reader = train.open(0, shard, Place())
        windows = read(reader)
        assert len(windows) == len(set(windows)) and len(windows) > 40
        texts += b"".join(bytes(window[:-1]) for window in windows)
        # From any place on the rest comes in the same order, whatever was read ahead.
        cut = train.open(0, shard, Place())
        first = read(cut, 19)
        assert first + read(train.open(0, shard, cut.place)) == windows
        assert read(train.open(1, shard, Place())) != windows
        assert len(reader.place.carry) // 4 <= CONTEXT
    expected = sum(len(text.encode()) + 1 for text in DOCUMENTS if text not in held)
    assert 0 <= expected - len(texts) <= 6 * (CONTEXT + 1)
    # With blocks larger than a shard nothing is read twice either.
    large = load_corpus(
        DataSection(**LOCAL | {"shuffle_samples": 1024}), path, CONTEXT, ByteTokenizer()
    ).train
    whole = [window for shard in range(6) for window in read(large.open(0, shard, Place()))]
    assert 0.98 * expected < CONTEXT * len(set(whole)) == CONTEXT * len(whole) <= expected
    # A learner walks through all of it, what is left over of one shard goes on in the next.
    stream = SampleStream(train, 0, "a", 4, tmp_path / "place")
    steps = (expected - 1) // CONTEXT // 4
    windows = set()
    for _ in range(steps):
        windows |= {tuple(row) for row in stream.take(4)[0].tolist()}
        stream.used()
    assert len(windows) == 4 * steps and stream.shared.epoch == 0
    stream.take(4)
    stream.used()
    assert stream.shared.epoch == 1
    stream.save_place()
    again = SampleStream(train, 0, "a", 4, tmp_path / "place")
    assert torch.equal(again.take(4)[0], stream.take(4)[0])


def test_the_last_block_of_a_shard_is_taken_once_whatever_is_asked_for(monkeypatch):
    monkeypatch.setattr(hub, "LEAST_SHARDS", 1)
    source = Source(["".join(f"{number:016}" for number in range(14)) + "x"])
    reader = stream_of(source, heldout_split="test", shuffle_samples=100).open(0, 0, Place())
    taken = [reader.take(4) for _ in range(7)]
    assert [None if batch is None else len(batch[0]) for batch in taken] == [4, 4, 4, 2, None, None, None]
    assert len({tuple(row) for batch in taken[:4] for row in batch[0].tolist()}) == 14
    assert reader.place == Place(1, 0, np.frombuffer(b"x\n", np.uint8).astype(np.uint32).tobytes())


def test_streams_that_cannot_be_opened_are_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = local(tmp_path)
    (tmp_path / "a" / "set").mkdir(parents=True)
    (tmp_path / "diary.txt").write_text("nobody's business\n" * 100)
    with pytest.raises(msgspec.ValidationError, match="dataset"):
        msgspec.convert({"dataset": "text"}, DataSection)
    for keys, data, sentence in (
        ({"field": "body"}, path, 'has no column "body"'),
        ({"split": "dev"}, path, "cannot be opened: Bad split: dev"),
        ({}, None, "none is given"),
        ({}, str(tmp_path / "nowhere"), "does not exist"),
        ({"dataset": "a/set"}, None, 'there is a file or folder "a/set" here'),
        # To `datasets` that is its reader of text, and every text of the current folder the data.
        ({"dataset": "text"}, None, 'the data set "text" has no owner'),
        ({"dataset": "nobody/nothing"}, None, "nobody/nothing cannot be opened"),
        ({"heldout_split": "test"}, path, "Bad split: test"),
    ):
        with pytest.raises(UserError, match=sentence):
            load_corpus(DataSection(**LOCAL | keys), data, CONTEXT, ByteTokenizer())


def test_a_data_set_whose_card_lists_files_of_this_machine_is_refused(monkeypatch):
    files = {"train": ["hf://datasets/a/b@0/x.txt", "/home/me/diary.txt"]}
    builder = SimpleNamespace(config=SimpleNamespace(data_files=files))
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: builder)
    for file in ("/home/me/diary.txt", "http://router/x.txt", "zip://x::file:///home/me.zip"):
        files["train"][1] = file
        with pytest.raises(UserError, match=f"not on the hub: {file}"):
            load_corpus(DataSection(**LOCAL | {"dataset": "a/b"}), None, CONTEXT, ByteTokenizer())


@pytest.mark.parametrize(("text", "line"), [("", "ConnectionError"), ("\n  said\nmore", "said")])
def test_an_error_of_the_hub_without_a_first_line_is_a_sentence(monkeypatch, text, line):
    def fails(*_, **__):
        raise ConnectionError(text)

    monkeypatch.setattr("datasets.load_dataset_builder", fails)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    with pytest.raises(UserError, match=f"a/b cannot be opened: {line}$"):
        load_corpus(DataSection(**LOCAL | {"dataset": "a/b"}), None, CONTEXT, ByteTokenizer())
    with pytest.raises(UserError, match=f"cannot be had from the hub: {line}$"):
        hub_file("a/b", "tokenizer.json")


def test_a_long_document_is_encoded_in_pieces_and_ends_once(monkeypatch, trained):
    monkeypatch.setattr(packing, "ENCODED_TOGETHER_BYTES", 40)
    sizes = []
    tokenizer = FileTokenizer(trained.read_bytes(), "<|endoftext|>")
    encode = tokenizer.encode
    tokenizer.encode = lambda pieces: sizes.append(sum(map(len, pieces))) or encode(pieces)
    lines = "".join(f"{text}\n" for text in DOCUMENTS[:3]) + "ü" * 50
    packer = packing.Packer(tokenizer)
    for text in ("", lines, "x"):
        packer.add(text.encode())
    assert tokenizer.decode(packer.take()).split("<|endoftext|>") == ["", lines, "x", ""]
    assert max(sizes) < 80 and len(sizes) > 5


def test_a_stream_that_breaks_is_opened_again_where_it_was(monkeypatch):
    monkeypatch.setattr(hub, "LEAST_SHARDS", 1)
    monkeypatch.setattr(hub, "RETRIES_S", (0.0, 0.0))
    stream = stream_of(Source(DOCUMENTS, ConnectionError("cut"), 100))
    kept = sum(len(text.encode()) + 1 for text in DOCUMENTS if not is_heldout(text, 20))
    assert len(read(stream.open(0, 0, Place()))) == (kept - 1) // CONTEXT
    monkeypatch.setattr(hub, "RETRIES_S", ())
    with pytest.raises(UserError, match="the data set cannot be read any more: cut"):
        read(stream.open(0, 0, Place()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Place(3, 1, b"x")), type=Place) == Place(3, 1, b"x")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (EOFError("cut"), "the data set x cannot be read any more: cut"),
        (zlib.error("invalid"), "the data set x cannot be read any more: invalid"),
        (ValueError("no text"), "the data set x cannot be read: no text"),
    ],
)
def test_what_becomes_damaged_while_it_is_streamed_is_one_sentence(monkeypatch, error, words):
    monkeypatch.setattr(hub, "RETRIES_S", (0.0,))
    with pytest.raises(UserError, match=words):
        read(stream_of(Source([""], error), "the data set x").open(0, 0, Place()))


# Streamed data sets whose files differ in all but the column that is read.

CARD = "---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n  - {name: k, dtype: int64}\n---\n"
STALE = "---\ndataset_info:\n  features:\n  - {name: k, dtype: int64}\n---\n"


def opened(folder):
    section = DataSection(source="hub", heldout_split="other")
    source = hub._opened(section, str(folder), "train")
    return hub.HubStream(source, section, 8, ByteTokenizer(), "x", "the data set x")


def texts(tmp_path, files):
    """Texts that all files give, through the reader of shards."""
    for name, content in files.items():
        if isinstance(content, arrow.Table):
            parquet.write_table(content, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    stream = opened(tmp_path)
    files = (stream._source.shard(stream._files, index, contiguous=False) for index in range(stream._files))
    found = [text for file in files for text in hub._texts(file, "text")]
    assert sorted(text for shard in range(stream.count) for text in stream.documents(shard, 0) if text) == (
        sorted(text for text in found if text)
    )
    return found


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a.jsonl": '{"text":"a","k":null}', "b.jsonl": '{"text":"b","k":{"z":1}}'}, "ab"),
        ({"a.jsonl": '{"text":"a","k":1}\n{"text":"b","k":"x"}\n{"text":"c","k":[{"k":1},2]}'}, "abc"),
        ({"a.jsonl": '{"text":"a","k":[[1],"x"]}', "b.jsonl": '{"l":{},"text":"b"}\n\n'}, "ab"),
        ({"README.md": CARD, "a.jsonl": '{"text":"a","k":{}}', "b.jsonl": '{"text":"b"}'}, "ab"),
        ({"a.jsonl": '{"text":"a\\ud800"}'}, ["a?"]),
        ({"README.md": STALE, "a.jsonl": '{"text":"a","k":1}'}, "a"),
        ({"a.jsonl": '{"text":"a","k":NaN}\n{"text":"b","k":"\\ud800"}'}, "ab"),
        ({"a.jsonl": '{"text":null}', "b.jsonl": '\ufeff{"text":"b"}\r\n{}\r\n'}, ["", "b", ""]),
        ({"a.jsonl.gz": gzip.compress(b'{"text":"a"}\n'), "b.jsonl": '{"text":"b","k":1}'}, "ab"),
        ({"a.json": '\ufeff [{"text":"a","k":1},\n{"text":"b","k":"x"}]', "b.json": '["c"]'}, "abc"),
        ({"a.csv": "text,k\na,1\n", "b.csv": "k,text,l\nx,07,y\n"}, ["a", "07"]),
        ({"README.md": CARD, "a.csv": "text,k\na,x\n", "b.csv": "text\n7\n"}, "a7"),
        (
            {
                "a.parquet": arrow.table({"text": ["a"], "k": [None]}),
                "b.parquet": arrow.table({"l": [1], "text": arrow.array(["b"], arrow.large_string())}),
                "c.parquet": arrow.table({"k": [{"z": 1}], "text": ["c"]}),
            },
            "abc",
        ),
        (
            {
                "README.md": CARD,
                "a.parquet": arrow.table({"text": ["a"], "k": ["x"]}),
                "b.parquet": arrow.table({"text": [None], "k": [{"z": 1}]}),
            },
            ["a", ""],
        ),
        ({"a.parquet": arrow.table({"text": [None]}), "b.parquet": arrow.table({"text": ["b"]})}, ["", "b"]),
    ],
)
def test_what_else_the_files_hold_does_not_matter(tmp_path, files, expected):
    assert texts(tmp_path, files) == list(expected)


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.jsonl": '{"text":"a"}', "b.jsonl": '{"tex":"a"}'}, 'b.jsonl has no column "text"'),
        ({"a.jsonl": '{"text":"a"}', "b.jsonl": '{"text":3}'}, '"text" is no text in row 1 of .*b.jsonl'),
        ({"a.jsonl": '{"text":"a"}', "b.jsonl": '\n{"text"'}, "line 2 of .*b.jsonl is no JSON object"),
        ({"a.jsonl": '{"text":"a"}', "b.jsonl": "7"}, "line 1 of .*b.jsonl is no JSON object: it is int"),
        ({"a.json": '["a"]', "b.json": "[7]"}, '"text" is no text in row 1 of .*b.json'),
        ({"a.jsonl": '{"text":"a"}', "b.jsonl": b'{"text":"\xff"}'}, "line 1 of .*b.jsonl is no JSON object"),
        ({"a.csv": "text\na\n", "b.csv": "tex\na\n"}, 'b.csv cannot be read: it has no column "text"'),
        ({"a.csv": "text\na\n", "b.csv": 'text,k\na,1\n,,,"'}, "b.csv cannot be read: "),
        (
            {"a.parquet": arrow.table({"text": ["a"]}), "b.parquet": arrow.table({"text": [7]})},
            'b.parquet cannot be read: its column "text" is no text, but int64',
        ),
        ({"a.parquet": arrow.table({"text": ["a"]}), "b.parquet": b"PAR1"}, "b.parquet cannot be read: "),
    ],
)
def test_what_cannot_be_read_is_a_sentence_that_names_the_file(tmp_path, files, sentence):
    with pytest.raises(UserError, match=sentence):
        texts(tmp_path, files)


def test_a_column_is_missed_before_the_file_is_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_ROWS_TOGETHER", 1)
    with pytest.raises(UserError, match=r'b\.jsonl has no column "text"'):
        texts(tmp_path, {"a.jsonl": '{"text":"a"}', "b.jsonl": '{"tex":"a"}\n{"tex":"b"}'})


def test_a_file_that_was_cut_is_opened_again_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "RETRIES_S", (0.0,))
    (tmp_path / "a.jsonl").write_text('{"text":"a"}')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text":"b"}\n' * 1000)[:-20])
    stream = opened(tmp_path)
    with pytest.raises(UserError, match=r"x cannot be read any more: .*b\.jsonl\.gz: Compressed file ended"):
        stream.open(0, stream.parts, Place()).take(1)


def test_files_that_are_left_out_for_their_ending_are_named(tmp_path):
    lines = "".join(f'{{"text":"line {number} of some text"}}\n' for number in range(200))
    for name in ("a.jsonl", "b.JSONL", "c.Parquet", "d.JPG"):
        (tmp_path / name).write_text(lines)
    section = DataSection(source="hub", heldout_percent=20)
    found = hub.load_stream(section, str(tmp_path), 8, ByteTokenizer())
    assert found.note == (
        f"data: 2 files are left out, since the ending is in capitals, such as {tmp_path / 'b.JSONL'}"
    )
    for name in ("b.JSONL", "c.Parquet"):
        (tmp_path / name).unlink()
    assert not hub.load_stream(section, str(tmp_path), 8, ByteTokenizer()).note


def test_lines_and_lists_are_bounded(monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "MAX_LINE_BYTES", 40)
    monkeypatch.setattr(hub, "MAX_LIST_BYTES", 40)
    monkeypatch.setattr(hub, "_READ_BYTES", 16)
    assert texts(tmp_path, {"a.jsonl": '{"text":"a"}\n{"text":"bbbbbbbbbbbbb"}'}) == ["a", "b" * 13]
    for text in ('{"text":"%s"}', '["%s"]'):
        with pytest.raises(UserError, match=r"a\.jsonl.* (has|is one list of) more than "):
            texts(tmp_path, {"a.jsonl": text % ("a" * 70)})
