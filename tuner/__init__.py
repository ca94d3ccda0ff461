"""From a fine-tuning recipe's name to a correctly configured DeepSpeed run.

The Python API is `tuner.api`, imported at the first use of one of its names; `__init__.pyi` says so to type checkers.
"""

from importlib import import_module

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if not name.startswith("_") and name in (api := import_module("tuner.api")).__all__:
        return getattr(api, name)
    raise AttributeError(f"module 'tuner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return ["__version__", *import_module("tuner.api").__all__]
