"""From a drawing to a digit image: one preparation for the canvas, files and the command line.

MNIST's digits were scaled, with their aspect kept, into a box of 20 × 20, and put into a field of
28 × 28 with their centre of mass in the middle. A network that has seen nothing else needs the same.
"""

import io
import itertools
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageOps, UnidentifiedImageError
from torch import Tensor

from .errors import BlankDrawingError, ImageError

Pixels = NDArray[np.float32]
Point = tuple[float, float, float]  # x, y and pen width, in canvas units

CANVAS_SIZE = 280  # units along a side of the canvas, whatever its size on a screen
FIELD, BOX = 28, 20
MAX_PIXELS = 20_000_000
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # Pillow knows others, some of which run programs
MAX_POINTS = 20_000  # a hand draws some hundred points a digit
SUPERSAMPLING = 2
FAINT = 0.1  # ink lighter than this, as a fraction of the darkest, is paper: grain, shadow, a JPEG's ringing
FULL_INK = 254 / 255 - 1e-6  # the darkest pixel of each of MNIST's digits has 254 or 255: not to be stretched


def render(strokes: Sequence[Sequence[Point]]) -> Image.Image:
    """Draw strokes as the canvas shows them.

    Args:
        strokes: each a list of points (x, y, width), in units of a canvas `CANVAS_SIZE` wide.

    Returns:
        Mode "L", 280 × 280, ink 255 on 0, smooth edges.
    """
    scale = SUPERSAMPLING
    image = Image.new("L", (CANVAS_SIZE * scale, CANVAS_SIZE * scale))
    pen = ImageDraw.Draw(image)
    for stroke in strokes:
        for (x0, y0, _), (x1, y1, width) in itertools.pairwise(stroke):
            pen.line((x0 * scale, y0 * scale, x1 * scale, y1 * scale), 255, round(width * scale))
        for x, y, width in stroke:
            pen.circle((x * scale, y * scale), width / 2 * scale, 255)
    return image.reduce(scale)


def check_strokes(value: object) -> list[list[Point]]:
    """Return `value`, from a browser, if it is strokes: lists of points (x, y, width).

    Raises:
        ImageError: it is anything else, or too long.
    """
    if not isinstance(value, list) or not all(isinstance(stroke, list) for stroke in value):
        raise ImageError("The canvas sent something that is not a drawing. Clear it and draw again.")
    if sum(map(len, value)) > MAX_POINTS:
        raise ImageError(f"The drawing has more than {MAX_POINTS:,} points. Clear it and draw again.")
    return [[_point(point) for point in stroke] for stroke in value]


def open_image(source: str | Path | bytes) -> Image.Image:
    """Read a picture file, its first frame, as grey.

    Args:
        source: a file's path, or its content.

    Returns:
        Mode "L", upright by its EXIF data; what was transparent has become paper.

    Raises:
        ImageError: missing, empty, not a picture, damaged, or above 20 megapixels.
    """
    name = "The picture" if isinstance(source, bytes) else f"'{source}'"
    try:
        content = source if isinstance(source, bytes) else Path(source).read_bytes()
        if not content:
            raise ImageError(f"{name} is empty. Choose a picture of a digit.")
        with _no_warnings(), Image.open(io.BytesIO(content), formats=FORMATS) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise ImageError(
                    f"{name} has {width:,} × {height:,} pixels, more than {MAX_PIXELS / 1e6:.0f} megapixels. "
                    "Make it smaller, or cut the digit out."
                )
            return _grey(ImageOps.exif_transpose(image))
    except FileNotFoundError as error:
        raise ImageError(f"There is no file {name}. Check its name and folder.") from error
    except IsADirectoryError as error:
        raise ImageError(f"{name} is a folder. Name the pictures in it.") from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} is not a picture that can be read. Use a PNG or JPEG file.") from error
    except PermissionError as error:
        raise ImageError(f"{name} may not be opened. Change its permissions, or copy it.") from error
    except Image.DecompressionBombError as error:
        raise ImageError(f"{name} has too many pixels. Make it smaller, or cut the digit out.") from error
    except (OSError, SyntaxError, ValueError, EOFError, RuntimeError, MemoryError) as error:
        # What Pillow's decoders raise for files that begin well and are cut short or broken further on.
        raise ImageError(f"{name} cannot be read: it is damaged or cut short. Save it anew as PNG.") from error


def to_mnist(image: Image.Image) -> Tensor:
    """Prepare a drawing the way MNIST's digits were prepared.

    Ink and paper are told apart by the border, which is paper: dark ink on light paper is inverted.
    A picture that is prepared already, such as one of MNIST's own, comes back as it is.

    Args:
        image: mode "L", any size.

    Returns:
        float32, shape (1, 28, 28), ink 1 on 0.

    Raises:
        BlankDrawingError: no ink.

    Source: LeCun, Cortes and Burges, http://yann.lecun.com/exdb/mnist/ (20 × 20 box, centre of mass
        in the middle of 28 × 28).
    """
    ink = _ink(np.asarray(image, np.float32) / np.float32(255))
    if ink.shape == (FIELD, FIELD) and _is_prepared(ink):
        return torch.from_numpy(ink)[None]
    ink[ink < FAINT] = 0
    top, bottom, left, right = _extent(ink)
    box = _fit_box(ink[top:bottom, left:right])
    return torch.from_numpy(_centred(box / box.max()))[None]


@contextmanager
def _no_warnings() -> Iterator[None]:
    # Pillow warns of large pictures, which are refused with a sentence, and of damaged metadata.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _point(value: object) -> Point:
    if isinstance(value, list) and len(value) == 3 and all(_is_number(each) for each in value):
        x, y, width = value
        # The pen may leave the canvas while it is down: what is far outside is cut off.
        low, high = -float(CANVAS_SIZE), 2.0 * CANVAS_SIZE
        return min(max(x, low), high), min(max(y, low), high), min(max(width, 1.0), CANVAS_SIZE / 2)
    raise ImageError("The canvas sent a point that is not three numbers. Clear it and draw again.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and -math.inf < value < math.inf


def _grey(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I") or image.mode == "F":  # 16 or 32 bits a pixel: Pillow would clip, not scale
        values = np.nan_to_num(np.asarray(image, np.float32))
        top = 65535.0 if image.mode.startswith("I") and values.max() <= 65535 else max(float(values.max()), 1e-6)
        return Image.fromarray((np.clip(values / top, 0, 1) * 255).round().astype(np.uint8))
    if not image.has_transparency_data:
        return image.convert("L")
    image = image.convert("RGBA")
    grey, alpha = image.convert("L"), image.getchannel("A")
    # Paper of the other shade: white ink on nothing is no white on white.
    opaque = np.asarray(grey)[np.asarray(alpha) > 127]
    paper = 0 if opaque.size and opaque.mean() > 127 else 255
    return Image.composite(grey, Image.new("L", image.size, paper), alpha)


def _ink(grey: Pixels) -> Pixels:
    """Ink in [0, 1] on 0, from light and dark."""
    border = np.concatenate([grey[0], grey[-1], grey[1:-1, 0], grey[1:-1, -1]])
    paper = float(np.median(border))
    ink: Pixels = np.clip(grey - paper if paper < 0.5 else paper - grey, 0, None)
    darkest = float(ink.max())
    if darkest < FAINT:
        raise BlankDrawingError("There is no ink in the picture. Draw a digit, light on dark or dark on light.")
    return ink / darkest if darkest < FULL_INK else ink


def _extent(ink: Pixels) -> tuple[int, int, int, int]:
    """Top, bottom, left and right of the ink; bottom and right are one beyond it."""
    rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
    return int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1


def _centre(ink: Pixels) -> tuple[float, float]:
    """Row and column of the centre of mass."""
    total = float(ink.sum())
    rows, columns = ink.sum(axis=1), ink.sum(axis=0)
    return float(rows @ np.arange(len(rows))) / total, float(columns @ np.arange(len(columns))) / total


def _is_prepared(ink: Pixels) -> bool:
    # So it is for each of MNIST's 70,000: the centre of mass within half a pixel of pixel 14, the box
    # 20 long, or 19 where the outermost pixels were rounded away.
    top, bottom, left, right = _extent(ink)
    side = max(bottom - top, right - left)
    return BOX - 1 <= side <= BOX and all(abs(at - FIELD // 2) <= 0.5 for at in _centre(ink))


def _fit_box(ink: Pixels) -> Pixels:
    """Scale to 20 pixels along the longer side, by area, so that a thin pen does not vanish."""
    height, width = ink.shape
    scale = BOX / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    resampling = Image.Resampling.BOX if scale < 1 else Image.Resampling.BICUBIC
    box: Pixels = np.clip(np.asarray(Image.fromarray(ink).resize(size, resampling)), 0, 1)
    return box


def _centred(box: Pixels) -> Pixels:
    """Put into 28 × 28 with the centre of mass at pixel 14; cut off nothing."""
    field = np.zeros((FIELD, FIELD), np.float32)
    height, width = box.shape
    top, left = (
        min(max(round(FIELD / 2 - at), 0), FIELD - side) for at, side in zip(_centre(box), (height, width), strict=True)
    )
    field[top : top + height, left : left + width] = box
    return field
