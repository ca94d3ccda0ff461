"""Images of rows: every kind becomes the same RGB pixels, and what cannot be read is refused with its place."""

from __future__ import annotations

import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from tests.refused import refused
from tuner.data import images
from tuner.data.sample import Image
from tuner.errors import DataError

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def half_red(width: int = 6, height: int = 4) -> PIL.Image.Image:
    """Return a blue picture that is red in its upper left quarter."""
    picture = PIL.Image.new("RGB", (width, height), BLUE)
    picture.paste(RED, (0, 0, width // 2, height // 2))
    return picture


def saved(picture: PIL.Image.Image, kind: str = "PNG", **options: Any) -> Image:
    """Return a picture as the bytes of a file."""
    file = BytesIO()
    picture.save(file, kind, **options)
    return Image(data=file.getvalue())


def refusal(image: Image) -> DataError:
    """Return the error of an image that cannot be read."""
    with refused(DataError, "rows.jsonl:7") as caught:
        images.load(image, "rows.jsonl:7")
    assert caught.value.of_row
    return caught.value


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "YCbCr", "RGBA", "LA"])
def test_each_mode_becomes_rgb(mode: str) -> None:
    kind = "TIFF" if mode in ("CMYK", "YCbCr") else "PNG"

    pixels = images.load(saved(PIL.Image.new("RGB", (4, 4), WHITE).convert(mode), kind))

    assert pixels.mode == "RGB"
    assert all(value >= 254 for value in pixels.getpixel((1, 1)))  # type: ignore[union-attr]


def test_a_cmyk_jpeg_keeps_its_colors() -> None:
    red, _, blue = images.load(saved(PIL.Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG")).getpixel((1, 1))  # type: ignore[misc]

    assert (red > 230, blue < 30) == (True, True)


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_are_scaled_and_not_cut_off(kind: str) -> None:
    gray = PIL.Image.new("I;16", (4, 4), 32_896)

    assert images.load(saved(gray, kind)).getpixel((0, 0)) == (128, 128, 128)


def test_pixels_without_a_fixed_range_are_refused() -> None:
    assert "range is unknown" in str(refusal(saved(PIL.Image.new("F", (4, 4), 0.5), "TIFF")))
    assert "range is unknown" in str(refusal(saved(PIL.Image.new("I", (4, 4), 70_000), "TIFF")))


def test_transparent_pixels_become_white() -> None:
    clear = PIL.Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    palette = PIL.Image.new("P", (4, 4), 0)

    assert images.load(saved(clear)).getpixel((0, 0)) == WHITE
    assert images.load(saved(palette, transparency=0)).getpixel((0, 0)) == WHITE


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_as_its_exif_says_and_its_size_too(kind: str, orientation: int) -> None:
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {"quality": 95} if kind == "JPEG" else {}
    image = saved(half_red(48, 32), kind, exif=exif, **options)

    pixels = images.load(image)

    corners = {1: (4, 4), 2: (-4, 4), 3: (-4, -4), 4: (4, -4), 5: (4, 4), 6: (-4, 4), 7: (-4, -4), 8: (4, -4)}
    left, top = corners[orientation]
    assert pixels.size == images.size_of(image) == ((48, 32) if orientation < 5 else (32, 48))
    red, _, blue = pixels.getpixel((left % pixels.width, top % pixels.height))  # type: ignore[misc]
    assert red > 200 > 50 > blue


def test_a_missing_image_is_refused_with_its_path(tmp_path: Path) -> None:
    assert str(tmp_path / "no.png") in str(refusal(Image(path=str(tmp_path / "no.png"))))
    assert "no image file" in str(refusal(Image(path=str(tmp_path))))
    (tmp_path / "empty.png").touch()
    assert "is an empty file" in str(refusal(Image(path=str(tmp_path / "empty.png"))))


@pytest.mark.parametrize("data", [b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert "not an image" in str(refusal(Image(data=data)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_truncated_image_is_refused_although_its_header_is_whole(kind: str) -> None:
    whole = saved(PIL.Image.effect_noise((64, 64), 50).convert("RGB"), kind).data or b""

    refusal(Image(data=whole[: len(whole) // 2]))


def test_an_image_of_one_pixel_is_refused() -> None:
    assert "1 x 1 pixels" in str(refusal(saved(PIL.Image.new("RGB", (1, 1)))))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 30_000])
def test_a_decompression_bomb_is_refused_by_its_header(side: int) -> None:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0))
    bomb = Image(data=b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", b"") + chunk(b"IEND", b""))

    assert "million pixels" in str(refusal(bomb))
    with pytest.raises(DataError):
        images.size_of(bomb)


def test_the_refusal_of_a_decompression_bomb_comes_without_a_warning_of_pillow(tmp_path: Path) -> None:
    PIL.Image.new("1", (12_000, 8_000)).save(tmp_path / "huge.png")
    program = "import sys; from tuner.data.images import size_of, Image; size_of(Image(path=sys.argv[1]))"
    command = [sys.executable, "-c", program, str(tmp_path / "huge.png")]

    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert "has 12,000 x 8,000 pixels" in done.stderr
    assert "DecompressionBombWarning" not in done.stderr
