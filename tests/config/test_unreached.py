"""Rows of a model that no token reaches are said, with what they cost."""

import json

import msgspec
import pytest

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import PRESETS, for_bytes, unreached_rows, warnings_about

GPT2 = PRESETS["gpt2"]


def with_model(manifest: Manifest, **keys: object) -> Manifest:
    return msgspec.structs.replace(manifest, model=manifest.model | keys)  # type: ignore[operator]


def test_a_vocabulary_beyond_raw_bytes_is_said_wherever_doubts_are() -> None:
    said = [doubt for doubt in warnings_about(GPT2, 124_000_000) if "never reached" in doubt]
    assert len(said) == 1
    assert "50304 token ids, and bytes has 256: 38.4 M parameters, 31% of the model" in said[0]
    assert "a vocabulary of 256 is enough" in said[0]
    untied = with_model(GPT2, tied_head=False)
    assert "76.9 M parameters, are never reached" in unreached_rows(untied)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_as_they_are_written_have_none(name: str) -> None:
    assert unreached_rows(for_bytes(PRESETS[name])) == ""


def test_of_another_tokenizer_its_ids_count_rounded_up() -> None:
    data = msgspec.structs.replace(GPT2.data, tokenizer="mine.json")
    mine = msgspec.structs.replace(GPT2, data=data)
    assert unreached_rows(mine) == "", "its file is not at hand"
    assert unreached_rows(mine, 50_257) == ""
    assert "mine.json has 301: 38.4 M parameters" in unreached_rows(mine, 301)
    assert "a vocabulary of 320 is enough" in unreached_rows(mine, 301)


def test_an_architecture_of_transformers_is_looked_at_by_its_config() -> None:
    config = {"vocab_size": 1256, "hidden_size": 100, "tie_word_embeddings": False}
    hub = msgspec.structs.replace(GPT2, model={"config": json.dumps(config)})
    assert "1256 token ids, and bytes has 256: 0.2 M parameters" in unreached_rows(hub)
    for text in ("[]", "{", json.dumps({"vocab_size": "many"}), "[" * 100_000):
        assert unreached_rows(msgspec.structs.replace(GPT2, model={"config": text})) == ""
