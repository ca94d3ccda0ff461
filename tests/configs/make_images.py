"""Owns how the sample of images and the tiny vision-language model are made: `python -m tests.configs.make_images`.

It draws only from one seeded generator, so that the same bytes come out everywhere.
"""

from __future__ import annotations

import base64
import json
import random
import shutil
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer

CONFIGS = Path(__file__).parents[2] / "tuner" / "configs"
SIDE = 32
"""Pixels."""
NUM_TRAIN, NUM_VALIDATION = 1_200, 48
COLORS = {"red": (220, 30, 30), "green": (30, 170, 60), "blue": (40, 70, 220), "yellow": (235, 210, 40)}
SIDES = {"left": (0, 8), "right": (16, 8), "top": (8, 0), "bottom": (8, 16)}
"""Where a square is -> the pixel of its left upper corner, which may be up to 4 pixels further."""
BACKGROUNDS = ((250, 250, 250), (20, 20, 20), (128, 128, 128))
IMAGE_TOKEN = "<image>"
SEED = 31


def picture(draw: random.Random, color: str, side: str) -> bytes:
    """Return a PNG file of one square on a plain background."""
    image = Image.new("RGB", (SIDE, SIDE), draw.choice(BACKGROUNDS))
    size = draw.randint(10, 12)
    left, top = (at + draw.randint(0, 4) for at in SIDES[side])
    ImageDraw.Draw(image).rectangle((left, top, left + size, top + size), fill=COLORS[color])
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    return file.getvalue()


def row(draw: random.Random) -> dict[str, Any]:
    """Return a conversation about one picture."""
    color, side = draw.choice([*COLORS]), draw.choice([*SIDES])
    question, answer = draw.choice(
        [
            ("What is in the picture?", f"A {color} square on the {side}."),
            ("Which color is the square?", f"It is {color}."),
            ("Where is the square?", f"It is on the {side}."),
        ]
    )
    url = "data:image/png;base64," + base64.b64encode(picture(draw, color, side)).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question}]
    return {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Return rows that depend on the seed alone."""
    draw = random.Random(seed)  # noqa: S311
    return [row(draw) for _ in range(count)]


def write(folder: Path) -> None:
    """Write the rows, and the tokenizer of the vision-language model."""
    samples = folder / "assets/sample_images"
    samples.mkdir(parents=True, exist_ok=True)
    for name, count, seed in (("train", NUM_TRAIN, SEED), ("validation", NUM_VALIDATION, SEED + 1)):
        lines = [json.dumps(made) + "\n" for made in rows(count, seed)]
        (samples / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    text, vision = folder / "assets/tiny", folder / "assets/tiny_vision"
    vision.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_file(str(CONFIGS / "assets/tiny/tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(IMAGE_TOKEN, special=True)])
    (vision / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    for name in ("chat_template.jinja", "generation_config.json"):
        shutil.copyfile(text / name, vision / name)


if __name__ == "__main__":
    write(CONFIGS)
