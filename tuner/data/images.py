"""Images of rows: their size, and their pixels as every model here reads them.

It does not know where a row has its images, nor what a processor makes of the pixels.
"""

from __future__ import annotations

import os
import warnings
from base64 import b64encode
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.data.sample import Image
from tuner.errors import DataError
from tuner.files import require_regular

if TYPE_CHECKING:
    from collections.abc import Iterator

    import PIL.Image

MAX_PIXELS = 89_478_485
"""Pillow's own first limit (PIL.Image.MAX_IMAGE_PIXELS): 256 MiB as RGB."""
MAX_FILE_BYTES = 1 << 30
"""More than that many pixels with four channels of 16 bits take uncompressed."""
THUMBNAIL_SIDE = 96
MIN_SIDE = 2
"""Pixels. Pictures of one pixel stand in web pages to count visits; they show nothing."""
_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "TIFF", "WEBP")
"""Pillow's other formats run programs (EPS) or hold no photographs."""
_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""What undoes each orientation, in Pillow's words. Source: Exif 2.32, tag 0x0112."""
_ON_ITS_SIDE = (5, 6, 7, 8)
_TO_8_BITS = 1 / 257
_MAX_16_BITS = 65_535


def size_of(image: Image, place: str | None = None) -> tuple[int, int]:
    """Return width and height in pixels, after the rotation that the file asks for; the pixels are not decoded.

    Raises:
        DataError: as for `load`, except for damage behind the file's header.
    """
    with _opened(image, place) as opened:
        width, height = opened.size
        return (height, width) if _orientation(opened) in _ON_ITS_SIDE else (width, height)


def load(image: Image, place: str | None = None) -> PIL.Image.Image:
    """Return the pixels in RGB, turned as the file asks. What is transparent becomes white, 16 bits become 8.

    Raises:
        DataError: the image is missing, damaged or cut short, is smaller than `MIN_SIDE` or larger than `MAX_PIXELS`,
            or its pixels have no fixed range.
    """
    import PIL.Image

    with _opened(image, place) as opened:
        turn = _TURNS.get(_orientation(opened))
        pixels = _rgb(opened)
        return pixels.transpose(PIL.Image.Transpose[turn]) if turn is not None else pixels


def within(size: tuple[int, int], max_pixels: int | None, min_pixels: int | None) -> tuple[int, int]:
    """Return the size that an image of this size, (width, height), has within limits of pixels; None: no limit."""
    width, height = size
    pixels = width * height
    if max_pixels and pixels > max_pixels:
        scale = (max_pixels / pixels) ** 0.5
    elif min_pixels and pixels < min_pixels:
        scale = (min_pixels / pixels) ** 0.5
    else:
        return size
    return max(1, round(width * scale)), max(1, round(height * scale))


def thumbnail(image: Image) -> str:
    """Return a small JPEG of the image as a data URI, at most `THUMBNAIL_SIDE` pixels a side. Errors as `load`."""
    small = load(image)
    small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
    file = BytesIO()
    small.save(file, "JPEG", quality=80)
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"


def for_text_alone(holder: str, place: str) -> DataError:
    """Return the error of rows with an image for a model that reads text alone; `holder` has the image."""
    fix = "Train a vision-language model on it with objective sft, or remove the images from the rows."
    return DataError(f"{holder} holds an image, and the model reads text alone", where=place, fix=fix)


@contextmanager
def _opened(image: Image, place: str | None) -> Iterator[PIL.Image.Image]:
    import PIL.Image  # 10 ms, and a plan opens no image

    where = place or image.path
    PIL.Image.init()  # `open` looks only for formats that are registered
    warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # such an image is refused here, with its row
    try:
        with PIL.Image.open(_file_of(image, where), formats=_FORMATS) as opened:
            if min(opened.size) < MIN_SIDE:
                fix = f"Remove the row, or use an image of {MIN_SIDE} x {MIN_SIDE} pixels or more."
                raise _refused(image, f"has {opened.width} x {opened.height} pixels and shows nothing", where, fix)
            if opened.width * opened.height > MAX_PIXELS:
                raise _too_large(image, f"{opened.width:,} x {opened.height:,}", where)
            yield opened
    except DataError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _too_large(image, "too many", where) from error
    except PIL.UnidentifiedImageError as error:
        fix = f"Use {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]}."
        problem = "is not an image of a known format, or its beginning is damaged"
        if image.path is not None and Path(image.path).stat().st_size == 0:
            problem, fix = "is an empty file", "Replace the file, or remove the row."
        raise _refused(image, problem, where, fix) from error
    except Exception as error:  # a damaged file can make a decoder raise any error
        reason = str(error).rstrip(".") or type(error).__name__
        raise _refused(image, f"cannot be decoded: {reason}", where, "Replace the file, or remove the row.") from error


def _file_of(image: Image, where: str | None) -> Path | BytesIO:
    if image.path is None:
        return BytesIO(image.data or b"")
    if not os.path.isfile(image.path):  # noqa: PTH113 (a NUL in a path is no file, and no error)
        fix = "Correct the path, or set dataset.image_folder to the folder that paths begin in."
        raise DataError(f"there is no image file {image.path}", where=where, fix=fix, of_row=True)
    file = Path(image.path)
    require_regular(file)
    if file.stat().st_size > MAX_FILE_BYTES:  # several decoders first read all of it
        raise _refused(image, f"has more than {MAX_FILE_BYTES:,} bytes", where, "Save it again, or remove the row.")
    return file


def _refused(image: Image, problem: str, where: str | None, fix: str) -> DataError:
    return DataError(f"{image} {problem}", where=where, fix=fix, of_row=True)


def _too_large(image: Image, pixels: str, where: str | None) -> DataError:
    fix = f"Make it smaller than {MAX_PIXELS // 10**6} million pixels, or remove the row."
    return _refused(image, f"has {pixels} pixels", where, fix)


def _orientation(opened: PIL.Image.Image) -> int:
    if opened.format == "TIFF":  # Pillow turns it by itself
        return 1
    import PIL.Image

    # The base class's: PNG's own would decode the pixels to look behind them.
    return int(PIL.Image.Image.getexif(opened).get(_ORIENTATION, 1))


def _rgb(opened: PIL.Image.Image) -> PIL.Image.Image:
    if opened.mode.startswith("I"):
        low, high = opened.getextrema()
        if not 0 <= low <= high <= _MAX_16_BITS:  # type: ignore[operator]
            raise ValueError("its pixels have 32 bits, and their range is unknown")
        return opened.convert("I").point(lambda value: value * _TO_8_BITS).convert("L").convert("RGB")
    if opened.mode == "F":
        raise ValueError("its pixels are floating-point numbers, and their range is unknown")
    if opened.has_transparency_data:
        import PIL.Image

        over = opened.convert("RGBA")
        return PIL.Image.alpha_composite(PIL.Image.new("RGBA", over.size, "white"), over).convert("RGB")
    return opened.convert("RGB")
