"""From a fine-tuning recipe's name to a correctly configured DeepSpeed run.

The Python API is `tuner.api`, imported at the first use of one of its names; `__init__.pyi` says so to type checkers.
"""

from importlib import import_module
from importlib.util import find_spec

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # `from tuner import paths` asks here first: a module's name must not import the API.
    is_public = not name.startswith("_") and find_spec(f"tuner.{name}") is None
    if is_public and name in (api := import_module("tuner.api")).__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'tuner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *import_module("tuner.api").__all__]
