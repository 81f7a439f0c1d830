"""Words of a model's folder besides weights, config and vocabulary: special tokens, template, generation.

It goes into the manifest (`[export]`), so that whoever exports the result has it, wherever the folder is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import msgspec

from p2pdiloco.cli.given.files import CONFIG
from p2pdiloco.config.manifest import MAX_EXPORT_TEXT, MAX_MANIFEST_BYTES, Dtype, Manifest, canonical_bytes
from p2pdiloco.tasks.hub_export import LONG_NAMES
from p2pdiloco.tasks.hub_models import harmless, read_json

_READ_BYTES = 4 << 20
_DTYPES: dict[str, Dtype] = {long: short for short, long in LONG_NAMES.items()}
_ELSEWHERE = ("added_tokens_decoder", "model_max_length", "chat_template", "backend", "name_or_path")
"""Keys of tokenizer_config.json that tokenizer.json, the run, or a file of its own says."""


def with_besides(manifest: Manifest, folder: Path) -> Manifest:
    """Add what these files say to the manifest. What is no JSON, or too large to travel, is left out with a
    word."""
    about = object_in(folder / "special_tokens_map.json") | object_in(folder / "tokenizer_config.json")
    template = _text(folder / "chat_template.jinja") or about.get("chat_template")
    if isinstance(template, list):  # several by name: the default one
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if "auto_map" in about:  # a class of its own, which nobody else can load
        about.pop("tokenizer_class", None)
    config = object_in(folder / CONFIG)
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    texts = {
        "token_ids": _json(ids),
        "tokenizer_config": _json({name: about[name] for name in about if name not in _ELSEWHERE}),
        "generation_config": _json(object_in(folder / "generation_config.json")),
        "chat_template": template if isinstance(template, str) else "",
    }
    for name in sorted(texts, key=lambda name: len(texts[name]), reverse=True):
        export = msgspec.structs.replace(manifest.export, **texts)
        found = msgspec.structs.replace(manifest, export=export)
        if len(texts[name]) <= MAX_EXPORT_TEXT and len(canonical_bytes(found)) <= MAX_MANIFEST_BYTES:
            break
        click.echo(f"the {name.replace('_', ' ')} in {folder} is too large to travel with the run", err=True)
        texts[name] = ""
    return msgspec.structs.replace(manifest, export=msgspec.structs.replace(manifest.export, **texts))


def dtype_in(config: Mapping[str, Any]) -> Dtype:
    """Type of the parameters that a config.json states, by its older or newer name, or for its text part;
    fp32 where it is none in which parameters are exported."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        stated = table.get("dtype", table.get("torch_dtype"))
        if stated is not None:
            return _DTYPES.get(str(stated).removeprefix("torch."), "fp32")
    return "fp32"


def _json(found: dict[str, Any]) -> str:
    kept = harmless(found)
    return json.dumps(kept, sort_keys=True, ensure_ascii=False) if kept else ""


def object_in(path: Path) -> dict[str, Any]:
    """Read a JSON object. What is no such file is empty, with a word."""
    text = _text(path)
    try:
        found = read_json(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        click.echo(f"{path} is no JSON object, and left out", err=True)
        return {}
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""
