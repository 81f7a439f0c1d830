"""Kinds of files that people take for a model's weights, and that hold none or cannot be read safely."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.errors import UserError

POINTER = b"version https://git-lfs"
_PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")
_ADAPTER = "adapter_config.json"


def refuse_other_kinds(source: Path) -> None:
    """Refuse a file that is only a pointer to another or a pickle, and a folder with nothing but such.

    Raises:
        UserError: it is one.
    """
    if source.is_file():
        refuse_pointer(source)
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    if any(file.suffix == ".safetensors" for file in files) and (source / _ADAPTER).exists():
        if not (source / "config.json").exists():
            raise UserError(
                f"{source} is an adapter, not a model: {_ADAPTER} says of which",
                "merge it into its model first: peft's merge_and_unload(), then save_pretrained",
            )
        return
    if source.is_dir() and any(file.suffix in (".safetensors", ".gguf") for file in files):
        return
    pickled = next((file for file in files if file.suffix.lower() in _PICKLES and file.exists()), None)
    if pickled is not None:
        raise UserError(
            f"{pickled} is a pickle, which may execute code when it is read, so it is not read here",
            "if you trust it, convert its folder: transformers' from_pretrained(FOLDER)"
            ".save_pretrained(OTHER) writes safetensors",
        )


def refuse_pointer(file: Path) -> None:
    """Refuse what git has instead of a large file. Raises: UserError."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(POINTER)) == POINTER
    except OSError:
        return  # who reads it says why not
    if is_pointer:
        raise UserError(
            f"{file} is a pointer of git-lfs, and the file itself was not fetched",
            "git lfs pull, in its folder",
        )
