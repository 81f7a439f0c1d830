"""Streamed data sets whose files differ in all but the column that is read."""

import gzip

import pyarrow as arrow
import pytest
from pyarrow import parquet

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import UserError
from p2pdiloco.tasks import hub_streams
from p2pdiloco.tasks import hub_streams as hub
from p2pdiloco.tasks.task import Place
from p2pdiloco.tasks.tokens import ByteTokenizer

CARD = "---\ndataset_info:\n  features:\n  - {name: text, dtype: string}\n  - {name: k, dtype: int64}\n---\n"
STALE = "---\ndataset_info:\n  features:\n  - {name: k, dtype: int64}\n---\n"


def texts(tmp_path, files):
    """Texts that all files give, through the reader of shards."""
    for name, content in files.items():
        if isinstance(content, arrow.Table):
            parquet.write_table(content, tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    section = DataSection(source="hub", heldout_split="other")
    source = hub._opened(section, str(tmp_path), "train")
    stream = hub.HubStream(source, section, 8, ByteTokenizer(), "x", "the data set x")
    parts = range(0, stream.count, stream.parts)
    found = [text for file in parts for text in hub._texts(_file(stream, file), "text")]
    assert sorted(text for shard in range(stream.count) for text in stream.documents(shard, 0) if text) == (
        sorted(text for text in found if text)
    )
    return found


def _file(stream, shard):
    return stream._source.shard(num_shards=stream._files, index=shard // stream.parts, contiguous=False)


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
    monkeypatch.setattr(hub_streams, "_ROWS_TOGETHER", 1)
    with pytest.raises(UserError, match=r'b\.jsonl has no column "text"'):
        texts(tmp_path, {"a.jsonl": '{"text":"a"}', "b.jsonl": '{"tex":"a"}\n{"tex":"b"}'})


def test_a_file_that_was_cut_is_opened_again_and_then_named(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "RETRIES_S", (0.0,))
    (tmp_path / "a.jsonl").write_text('{"text":"a"}')
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text":"b"}\n' * 1000)[:-20])
    section = DataSection(source="hub", heldout_split="other")
    source = hub._opened(section, str(tmp_path), "train")
    stream = hub.HubStream(source, section, 8, ByteTokenizer(), "x", "the data set x")
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
    monkeypatch.setattr(hub_streams, "MAX_LINE_BYTES", 40)
    monkeypatch.setattr(hub_streams, "MAX_LIST_BYTES", 40)
    monkeypatch.setattr(hub_streams, "_READ_BYTES", 16)
    assert texts(tmp_path, {"a.jsonl": '{"text":"a"}\n{"text":"bbbbbbbbbbbbb"}'}) == ["a", "b" * 13]
    for text in ('{"text":"%s"}', '["%s"]'):
        with pytest.raises(UserError, match=r"a\.jsonl.* (has|is one list of) more than "):
            texts(tmp_path, {"a.jsonl": text % ("a" * 70)})
