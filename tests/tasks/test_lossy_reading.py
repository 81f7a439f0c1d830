"""Data that are read otherwise than they are meant, or not at all, without a word. Most are known flaws."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from known_flaws import known_flaw
from PIL import Image
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from p2pdiloco.config.manifest import DataSection, ImageSection
from p2pdiloco.errors import DataError, UserError
from p2pdiloco.tasks.hub_streams import load_corpus
from p2pdiloco.tasks.images import load_images
from p2pdiloco.tasks.task import Data, Place
from p2pdiloco.tasks.tokens import ByteTokenizer, load_tokenizer, tokenizer_digest

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


def read(source: str, folder: Path) -> Data:
    section = DataSection(source=source, heldout_percent=20)
    return load_corpus(section, str(folder), CONTEXT, ByteTokenizer())


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
