"""From any picture of a digit to the image that MNIST would have made of it."""

import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from mnist_trainer.config import TrainConfig
from mnist_trainer.data import Mnist
from mnist_trainer.drawing import CANVAS_SIZE, MAX_POINTS, check_strokes, open_image, render, to_mnist
from mnist_trainer.errors import BlankDrawingError, ImageError
from mnist_trainer.model import MnistModel
from mnist_trainer.prediction import model_of
from mnist_trainer.runs import RunManager

Bytes = NDArray[np.uint8]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, mnist_root: Path) -> MnistModel:
    """A network of 97 %."""
    home = tmp_path_factory.mktemp("drawing")
    (home / "data").symlink_to(mnist_root, target_is_directory=True)
    run = RunManager(home).start(TrainConfig(device="cpu", epochs=3, hidden_size=64))
    assert run.ended.wait(timeout=240)
    checkpoint = run.checkpoint()
    assert checkpoint is not None
    return model_of(checkpoint)


def digit(mnist: Mnist, index: int) -> Image.Image:
    """White on black, 28 × 28."""
    return Image.fromarray(mnist.test_images[index, 0].numpy())


def on_canvas(mnist: Mnist, index: int) -> Image.Image:
    """White on black, 280 × 280: at another size and place for each index."""
    side = 80 + 40 * (index % 4)
    canvas = Image.new("L", (CANVAS_SIZE, CANVAS_SIZE))
    free = CANVAS_SIZE - side
    canvas.paste(
        digit(mnist, index).resize((side, side), Image.Resampling.BICUBIC), (free * (index % 3) // 2, free // 4)
    )
    return canvas


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def readings(model: MnistModel, images: list[Tensor]) -> Tensor:
    with torch.no_grad():
        digits: Tensor = model(torch.stack(images)).argmax(dim=1)
    return digits


def test_a_test_image_comes_back_bit_for_bit(mnist: Mnist) -> None:
    prepared = torch.stack([to_mnist(digit(mnist, index)) for index in range(0, 10_000, 4)])
    assert torch.equal(prepared, mnist.test_images[::4].float() / 255)


@pytest.mark.parametrize("is_inverted", [False, True], ids=["light on dark", "dark on light"])
def test_a_digit_is_read_wherever_and_however_large_it_is_drawn(
    mnist: Mnist, model: MnistModel, is_inverted: bool
) -> None:
    right = (model(mnist.test_images[:400].float() / 255).argmax(dim=1) == mnist.test_labels[:400]).nonzero()[:200, 0]
    canvases = [on_canvas(mnist, int(index)) for index in right]
    if is_inverted:
        canvases = [ImageOps.invert(canvas) for canvas in canvases]
    read = readings(model, [to_mnist(canvas) for canvas in canvases])
    assert len(right) == 200
    assert (read == mnist.test_labels[right]).float().mean() >= 0.9


def test_light_on_dark_and_dark_on_light_are_the_same_drawing(mnist: Mnist) -> None:
    for index in range(50):
        for drawing in (digit(mnist, index), on_canvas(mnist, index)):
            torch.testing.assert_close(to_mnist(ImageOps.invert(drawing)), to_mnist(drawing), rtol=0, atol=1e-5)


def test_the_ink_fills_a_box_of_20_with_its_mass_in_the_middle(mnist: Mnist) -> None:
    for index in range(100):
        image = to_mnist(on_canvas(mnist, index))[0]
        assert image.shape == (28, 28)
        assert image.dtype == torch.float32
        assert image.min() == 0
        assert image.max() == 1
        for axis in (0, 1):
            mass = image.sum(dim=1 - axis)
            inked = mass.nonzero()
            assert inked[-1] - inked[0] < 20
            centre = float(mass @ torch.arange(28.0) / mass.sum())
            assert abs(centre - 14) <= 0.51 or inked[0] == 0 or inked[-1] == 27


def test_ink_far_off_its_middle_is_not_cut_off() -> None:
    drawing = Image.new("L", (200, 200))
    drawing.paste(255, (20, 20, 180, 40))
    drawing.paste(255, (20, 40, 22, 180))
    rows = to_mnist(drawing)[0].sum(dim=1).nonzero()
    assert rows[-1] - rows[0] == 19


def test_a_pen_of_one_pixel_does_not_vanish() -> None:
    pixels = np.zeros((1000, 1000), np.uint8)
    pixels[100:900, 500] = pixels[100, 300:500] = 255
    image = to_mnist(Image.fromarray(pixels))[0]
    assert image.max() == 1
    assert (image.max(dim=1).values > 0.5).sum() == 20


@pytest.mark.parametrize(
    "image",
    [Image.new("L", size, shade) for size in ((280, 280), (28, 28), (1, 1)) for shade in (0, 255, 128)]
    + [Image.fromarray(np.random.default_rng(0).integers(120, 130, (50, 50)).astype(np.uint8))],
)
def test_a_picture_without_ink_is_refused(image: Image.Image) -> None:
    with pytest.raises(BlankDrawingError, match="There is no ink"):
        to_mnist(image)


def png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be so large, without any of its pixels."""
    head = b"IHDR" + struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + head + struct.pack(">I", zlib.crc32(head)) + b"\0\0\0\0IDAT"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "There is no file"),
        (b"", "is empty"),
        (b"seven", "is not a picture"),
        (saved(Image.effect_noise((200, 200), 50), "PNG")[:9000], "damaged or cut short"),
        (saved(Image.effect_noise((200, 200), 50), "JPEG")[:5000], "damaged or cut short"),
        (saved(Image.effect_noise((200, 200), 50), "GIF")[:5000], "damaged or cut short"),
        (png_header(20_000, 20_000), "too many pixels"),
        (png_header(5_000, 5_000), "more than 20 megapixels"),
    ],
)
def test_a_file_that_is_no_picture_is_a_sentence_with_its_name(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "my seven.png"
    if content is not None:
        path.write_bytes(content)
    for source in (path, str(path)):
        with pytest.raises(ImageError, match=message) as caught:
            open_image(source)
        assert str(caught.value).startswith(f"'{path}' ") or f"file '{path}'" in str(caught.value)
        assert "\n" not in str(caught.value)
        assert str(caught.value).endswith(".")


def test_a_folder_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(ImageError, match=f"'{tmp_path}'"):
        open_image(tmp_path)


@pytest.mark.filterwarnings("always")
def test_a_picture_of_144_megapixels_is_refused_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    with pytest.raises(ImageError, match="12,000 × 12,000 pixels"):
        open_image(png_header(12_000, 12_000))
    assert len(recwarn) == 0


def rgba(grey: Image.Image, shade: int) -> Image.Image:
    """The ink of one shade on nothing."""
    image = Image.new("RGBA", grey.size, (shade, shade, shade, 0))
    image.putalpha(grey)
    return image


ENCODINGS: dict[str, Callable[[Image.Image], bytes]] = {
    "PNG": lambda grey: saved(grey, "PNG"),
    "dark on light": lambda grey: saved(ImageOps.invert(grey), "PNG"),
    "colour": lambda grey: saved(ImageOps.colorize(grey, "white", "navy"), "PNG"),
    "16 bits": lambda grey: saved(Image.fromarray(np.asarray(grey, np.uint16) * 257), "PNG"),
    "black ink on nothing": lambda grey: saved(rgba(grey, 0), "PNG"),
    "white ink on nothing": lambda grey: saved(rgba(grey, 255), "PNG"),
    "grey with alpha": lambda grey: saved(rgba(grey, 0).convert("LA"), "PNG"),
    "palette": lambda grey: saved(grey.convert("RGB").quantize(256), "PNG"),
    "JPEG of dark on light": lambda grey: saved(ImageOps.invert(grey), "JPEG", quality=75),
    "JPEG": lambda grey: saved(grey, "JPEG", quality=90),
    "CMYK": lambda grey: saved(ImageOps.invert(grey).convert("RGB").convert("CMYK"), "JPEG", quality=90),
    "animated GIF": lambda grey: saved(grey, "GIF", save_all=True, append_images=[ImageOps.invert(grey.rotate(90))]),
    "turned by EXIF": lambda grey: saved(grey.transpose(Image.Transpose.ROTATE_90), "JPEG", exif=exif_turned()),
    "WebP": lambda grey: saved(grey.convert("RGB"), "WEBP", quality=90),
    "TIFF of floats": lambda grey: saved(Image.fromarray(np.asarray(grey, np.float32) / 255), "TIFF"),
}


def exif_turned() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a right angle
    return exif


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_picture_is_read_right_whatever_its_format(
    mnist: Mnist, model: MnistModel, tmp_path: Path, encoding: str
) -> None:
    pictures, originals = list[Tensor](), list[Tensor]()
    for index in range(30):
        drawing, path = on_canvas(mnist, index), tmp_path / f"{index}"
        path.write_bytes(ENCODINGS[encoding](drawing))
        opened = open_image(path)
        assert (opened.mode, opened.size) == ("L", drawing.size)
        pictures.append(to_mnist(opened))
        originals.append(to_mnist(drawing))
    assert torch.stack(pictures).sub(torch.stack(originals)).abs().mean() < 0.02
    assert (readings(model, pictures) == readings(model, originals)).sum() >= 29


def test_strokes_are_drawn_where_the_pen_was() -> None:
    assert render([]).getbbox() is None
    assert render([[]]).getbbox() is None
    dot = np.asarray(render([[(140.0, 100.0, 20.0)]]))
    assert dot.shape == (CANVAS_SIZE, CANVAS_SIZE)
    assert (dot[100, 140], dot[100, 152], dot[112, 140]) == (255, 0, 0)
    assert dot.astype(float).sum() / 255 == pytest.approx(np.pi * 10**2, rel=0.05)
    line = np.asarray(render([[(40.0, 60.0, 16.0), (240.0, 60.0, 16.0)], [(140.0, 200.0, 16.0)]]))
    assert (line[60, 40:240] == 255).all()
    assert (line[60 - 10, :].max(), line[60 + 10, :].max(), line[200, 140]) == (0, 0, 255)


def test_what_the_canvas_sends_is_checked_and_cut_to_size() -> None:
    assert check_strokes([]) == []
    assert check_strokes([[[10, 20.5, 16]], []]) == [[(10, 20.5, 16)], []]
    assert check_strokes([[[-1e9, 1e9, 0], [5, 5, 1e9]]]) == [[(-280, 560, 1), (5, 5, 140)]]
    assert render(check_strokes([[[-1e300, 10**400, 1e300]] * 3])).size == (CANVAS_SIZE, CANVAS_SIZE)


@pytest.mark.parametrize(
    "value",
    [
        *(None, "strokes", {"strokes": []}, 7, [None], ["ab"], [[1, 2, 3]], [[[1, 2]]], [[[1, 2, 3, 4]]]),
        *([[["1", "2", "3"]]], [[[1, 2, None]]], [[[float("nan"), 1, 1]]], [[[1, float("inf"), 1]]], [[[[1], 2, 3]]]),
        [[[1, 2, 3]] * (MAX_POINTS + 1)],
    ],
    ids=lambda value: repr(value)[:30],
)
def test_what_is_not_strokes_is_refused(value: object) -> None:
    with pytest.raises(ImageError, match="Clear it and draw again"):
        check_strokes(value)


@pytest.mark.parametrize("content", [b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"%PDF-1.7\n", b"<svg/>"])
def test_a_format_that_may_run_programs_is_refused(content: bytes) -> None:
    with pytest.raises(ImageError, match="Use a PNG or JPEG file"):
        open_image(content)
