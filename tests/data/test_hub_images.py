"""Data sets of the `datasets` library with images: their files are passed on as they are stored."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from unittest import mock

import datasets
import PIL.Image

from tuner.data import sources


def test_the_images_of_a_data_set_of_the_hub_are_not_decoded_to_be_read(tmp_path: Path) -> None:
    file = BytesIO()
    PIL.Image.radial_gradient("L").save(file, "JPEG")
    stored = {"bytes": file.getvalue(), "path": None}
    features = datasets.Features({"image": datasets.Image(), "images": datasets.List(datasets.Image())})
    there = datasets.Dataset.from_dict({"image": [stored], "images": [[stored, stored]]}, features=features)

    with mock.patch("datasets.load_dataset", return_value=there):
        ((_, row),) = sources.find("someone/pictures").read(lambda error: None)

    assert [row["image"]["bytes"], *(image["bytes"] for image in row["images"])] == [file.getvalue()] * 3
