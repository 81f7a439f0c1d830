"""Images that are drawn here: letters and digits in many typefaces, turned, shifted, covered, with noise.

A data set for the task image-classification without a download: a folder of folders, as anybody would bring
it with --data. Each image is drawn anew, also the held-out ones: typeface, stroke, size, shear, rotation,
place, a piece of another letter beside it, contrast and noise come from one seed. The typefaces are those
that matplotlib carries; another version of it or of Pillow may draw other pixels.
"""

from __future__ import annotations

import os
import string
import tempfile
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from p2pdiloco.errors import UserError

if TYPE_CHECKING:
    from PIL.Image import Image

CLASSES = string.digits + string.ascii_uppercase
SIDE = 16
"""Pixels of an image."""
IMAGES = 60_000
SEED = 1
_EDITION = 1
"""Edition of what is drawn; another one is kept beside it."""
_TYPEFACES = (
    *(f"DejaVu{name}" for name in ("Sans", "Sans-Bold", "Sans-Oblique", "Sans-BoldOblique")),
    *(f"DejaVu{name}" for name in ("SansMono", "SansMono-Bold", "Serif", "Serif-Bold", "Serif-Italic")),
    *(f"STIXGeneral{name}" for name in ("", "Bol", "BolIta", "Italic")),
    *("cmb10", "cmr10", "cmss10", "cmti10", "cmtt10"),
)
_SHEET = 64
"""Pixels of the square that a letter is drawn on before it is put in its place."""
_STROKES = 3
_FINE = 2
"""Images are drawn so many times larger, and then made small."""

Grey = NDArray[Any]


def glyphs() -> Path:
    """The folder of `IMAGES` images; drawn if it is not there, in half a minute of one core.

    Raises:
        UserError: Pillow is not installed, or the folder cannot be written.
    """
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "p2pdiloco"
    folder = root / f"glyphs-{_EDITION}-{IMAGES}"
    if folder.is_dir():
        return folder
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root) as made:
            draw(Path(made) / "new", IMAGES)
            try:
                (Path(made) / "new").rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except OSError as error:
        raise UserError(f"cannot write images to {root}: {error.strerror}", "set XDG_CACHE_HOME") from error
    return folder


def draw(folder: Path, images: int, seed: int = SEED) -> None:
    """Write that many images, of every class as many: `folder/A/17.png`, grey, `SIDE` pixels square."""
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    rng = np.random.default_rng(seed)
    for number in range(images):
        label = number % len(CLASSES)
        _drawn(rng, label).save(folder / CLASSES[label] / f"{number}.png")


def _drawn(rng: np.random.Generator, label: int) -> Image:
    scene = _placed(rng, label, centre=0.0)
    for _ in range(rng.integers(0, 2)):
        other = _placed(rng, int(rng.integers(len(CLASSES))), centre=SIDE * 0.55)
        scene = np.maximum(scene, other * rng.uniform(0.4, 0.9))
    dark, light = rng.uniform(0, 0.3), rng.uniform(0.6, 1.0)
    scene = dark + (light - dark) * scene
    scene = scene + rng.normal(0, rng.uniform(0.02, 0.15), scene.shape)
    image: Image = _pillow().fromarray((scene.clip(0, 1) * 255).round().astype(np.uint8))
    return image


def _placed(rng: np.random.Generator, label: int, centre: float) -> Grey:
    """A letter in its place, 0 to 1, (SIDE, SIDE). `centre`: how far from the middle, in pixels, to a side
    chosen at random."""
    pillow = _pillow()
    sheet = _letter(int(rng.integers(len(_TYPEFACES))), label, int(rng.integers(_STROKES)))
    angle, shear = rng.normal(0, 0.15), rng.normal(0, 0.15)
    scale = _SHEET / (SIDE * _FINE) / rng.uniform(0.75, 1.15, 2)
    away = rng.uniform(0, 2 * np.pi)
    middle = SIDE / 2 + rng.normal(0, 0.8, 2) + centre * np.array([np.cos(away), np.sin(away)])
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    back = np.array([[1, shear], [0, 1]]) @ turn * scale[:, None]
    start = _SHEET / 2 - back @ middle * _FINE
    affine = (*back[0], start[0], *back[1], start[1])
    fine = sheet.transform(
        (SIDE * _FINE,) * 2, pillow.Transform.AFFINE, affine, resample=pillow.Resampling.BILINEAR
    )
    small = fine.resize((SIDE, SIDE), pillow.Resampling.BOX)
    return np.asarray(small, dtype=np.float32) / 255


@cache
def _letter(typeface: int, label: int, stroke: int) -> Image:
    """White on black, in the middle of a square."""
    from matplotlib import get_data_path
    from PIL import ImageDraw, ImageFont

    path = Path(get_data_path()) / "fonts" / "ttf" / f"{_TYPEFACES[typeface]}.ttf"
    font = ImageFont.truetype(str(path), round(_SHEET * 0.8))
    sheet: Image = _pillow().new("L", (_SHEET, _SHEET))
    middle, text = (_SHEET / 2, _SHEET / 2), CLASSES[label]
    left, top, right, bottom = font.getbbox(text, stroke_width=stroke)
    corner = (middle[0] - (left + right) / 2, middle[1] - (top + bottom) / 2)
    ImageDraw.Draw(sheet).text(corner, text, fill=255, font=font, stroke_width=stroke)
    return sheet


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise UserError(
            "images need Pillow, and it is not installed", "pip install 'p2pdiloco[vision]'"
        ) from error
    return Image
