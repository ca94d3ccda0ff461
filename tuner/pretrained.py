"""What libraries raise while they read a model's folder or repository, as errors for the user.

Every call of `from_pretrained` on files that this process has not written stands inside `explained`.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, StrictDataclassError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]
from safetensors import SafetensorError, safe_open

from tuner import model_folder, remote_code
from tuner.errors import DiskError, MachineError, ModelError, Option
from tuner.files import require_regular

_OF_ITS_FILES = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, AssertionError),
    *(SafetensorError, StrictDataclassError),
)
"""The errors that transformers raises for damaged files.

A RuntimeError is not among them: a GPU out of memory raises one too. Wrong shapes are recognized by their text.
"""


@contextmanager
def tensors_of(file: Path, where: str | None = None) -> Iterator[Any]:
    """Give a file of safetensors, opened, as the library's `safe_open`; `where` names the setting of it.

    Raises:
        ModelError: it is missing, not a regular file, or damaged.
    """
    try:
        require_regular(file)  # the library would wait for a pipe's writer
        with safe_open(file, framework="pt") as opened:
            yield opened
    except FileNotFoundError:
        problem = f"{file} is missing"
        raise ModelError(problem, where=where or file.parent, fix="Download or copy the model again.") from None
    except (SafetensorError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        problem = f"{file} is damaged: {reason}"
        raise ModelError(problem, where=where or file.parent, fix="Download or copy it again.") from error


class explained:
    """Turn the many exceptions of from_pretrained into errors for the user.

    Raises:
        MachineError: the hub cannot be reached, or a package is missing.
        ModelError: there is no such model, it is incomplete, or it needs remote code.
        DiskError: there is no room to download it.
    """

    def __init__(self, path: str, where: str = "model.path", option: str = Option("model")) -> None:
        self.path, self.where, self.option = path, where, option

    def __enter__(self) -> None:
        if problem := model_folder.problem_of(Path(self.path)) if os.path.isdir(self.path) else None:  # noqa: PTH112
            raise ModelError(problem, where=self.where, fix="Use a folder written by save_pretrained.")

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "Free space, or set HF_HOME to a folder on another disk."
            raise DiskError(f"not enough space to download {self.path!r}: {error.strerror}", fix=fix) from error
        offline = OfflineModeIsEnabled | LocalEntryNotFoundError | ConnectionError
        if isinstance(error, offline) or _is_network(error):
            fix = f"Check the network and HF_TOKEN, or give a local folder with {self.option}."
            raise MachineError(f"cannot reach the hub for {self.path!r}", where=self.where, fix=fix) from error
        if isinstance(error, ImportError):
            fix = "Install it, or choose another model.attn_implementation or method."
            raise MachineError(
                f"{self.path!r} needs a package: {_first_line(error)}", where="model", fix=fix
            ) from error
        if isinstance(error, HfHubHTTPError | OSError):
            fix = "Give a folder written by save_pretrained, or an id on the hub that you have access to (HF_TOKEN)."
            raise ModelError(f"cannot load {self.path!r}: {_first_line(error)}", where=self.where, fix=fix) from error
        if isinstance(error, ValueError) and "trust_remote_code" in str(error):
            fix = remote_code.advice(self.path)
            raise ModelError(f"{self.path!r} needs remote code", where=self.where, fix=fix) from error
        if isinstance(error, _OF_ITS_FILES) or _is_of_tokenizers(error) or "mismatched_sizes" in str(error):
            fix = "Its files do not match or are damaged: download or copy it again."
            reason = " ".join(str(error).split()).rstrip(".")
            raise ModelError(f"cannot load {self.path!r}: {reason}", where=self.where, fix=fix) from error


def _is_of_tokenizers(error: BaseException | None) -> bool:
    """Return whether the library of tokenizers raises it: a bare Exception, or a panic of Rust (a BaseException)."""
    return type(error) is Exception or type(error).__module__ == "pyo3_runtime"


def _is_network(error: BaseException | None) -> bool:
    text, inner = str(error), error
    while inner is not None:  # transformers reports a broken download like a folder without a file
        if isinstance(inner, httpx.TransportError):
            return True
        inner = inner.__cause__ or inner.__context__
    return isinstance(error, OSError) and (
        "couldn't connect" in text or "Max retries" in text or "offline mode" in text
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")
