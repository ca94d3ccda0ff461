"""A YAML or JSON file of another tool as a document."""

from __future__ import annotations

from pathlib import Path

from tuner.importers.document import Document
from tuner.recipes import yaml_text


def read(path: Path, name: str | None = None) -> Document:
    """Read a file that holds one mapping; raises as `yaml_text.read` does."""
    found = yaml_text.read(path, name)
    return Document(found.values, name or str(path), found.lines, path.parent)
