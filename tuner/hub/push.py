"""An export on the Hugging Face hub: whether it may go there, asked before anything is written, and the upload.

huggingface_hub finds the token (`HF_TOKEN`, or what `hf auth login` stored) and sends it; this module never holds it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import httpx, validate_repo_id  # type: ignore[attr-defined]

from tuner.errors import MachineError, Option, TunerError, UsageError
from tuner.files import JsonObject
from tuner.progress import shown

PUSH = Option("push")
BASE_IS_LOCAL = "the adapter's base is a local folder, which others cannot load"
_LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN, with a token that has write access."
_AGAIN = "Run the same command again."
# transformers and PEFT load a file of these names wherever they find one: `adapter_config.json` beside a whole model
# sends `from_pretrained` to the adapter's base.
_LOADED = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "adapter_model.*", "adapter_config.json")


@dataclass(frozen=True)
class Repository:
    """A model's repository that this user may write to, as the hub described it before the export."""

    name: str
    """`OWNER/NAME`."""
    private: bool
    """To be created private; one that exists stays as it is."""
    files: frozenset[str] | None
    """What it holds; None for one that does not exist yet."""

    def refuse_others(self, file_names: Collection[str]) -> None:
        """Check that no other weights are there, which transformers and PEFT would load too.

        Args:
            file_names: The names of the files to upload, which replace those of the same name.

        Raises:
            UsageError: there are some.
        """
        others = sorted(file for file in self.files or () if file not in file_names and _is_loaded(file))
        if others:
            problem = f"{self.name} holds other weights, which would be loaded beside or instead of these: "
            fix = f"Choose another name, or delete them first: hf repos delete-files {self.name} {' '.join(others)}"
            raise UsageError(problem + ", ".join(others), where=PUSH, fix=fix)


def check(name: str, layout: str, *, private: bool) -> Repository:
    """Ask the hub whether this user may publish an export of this layout under `name`; nothing is created.

    Raises:
        UsageError: the layout is GGUF, the name is malformed, its owner is someone else, or it is public and was to be
            private.
        MachineError: there is no token, or one that may only read; HF_HUB_OFFLINE is set; the hub refuses or is away.
    """
    if layout == "gguf":
        fix = f"Write it first, tuner export SOURCE DEST --as gguf, add a README.md, then: hf upload {name} DEST"
        raise UsageError(f"{Option('push')} does not support GGUF, which has no model card", where=PUSH, fix=fix)
    _check_name(name)
    if constants.is_offline_mode():
        raise MachineError("HF_HUB_OFFLINE is set, and an upload needs the hub", where=PUSH, fix="Unset it.")
    if get_token() is None:
        raise MachineError("there is no token for the Hugging Face hub", where=PUSH, fix=_LOG_IN)
    api = HfApi()
    with _explained(name):
        user = api.whoami()
        try:
            info = api.model_info(name)
        except RepositoryNotFoundError:  # or a private one of someone else, which the hub hides
            info = None
    _check_user(user, name.split("/")[0])
    if info and private and not info.private:
        fix = f"Make it private first: `hf repos settings {name} --private`. Or remove {Option('private', True)}."
        raise UsageError(f"{name} already exists and is public", where=Option("private", True), fix=fix)
    files = frozenset(file.rfilename for file in info.siblings or ()) if info else None
    return Repository(name, private, files)


def _check_name(name: str) -> None:
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise UsageError(str(error).rstrip("."), where=PUSH, fix="Use OWNER/NAME, such as my-org/my-model.") from None
    if "/" not in name:
        raise UsageError(f"{name!r} has no owner", where=PUSH, fix=f"Use OWNER/NAME, such as my-org/{name}.")


def _check_user(user: JsonObject, owner: str) -> None:
    role = user.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise MachineError("the token for the Hugging Face hub is read-only", where=PUSH, fix=_LOG_IN)
    owners = [user["name"], *(group["name"] for group in user.get("orgs", ()))]
    # A fine-grained token need not tell all organizations that it may write to: the hub's answer decides there.
    if role == "write" and owner.lower() not in map(str.lower, owners):
        problem = f"{owner!r} is neither the user of this token nor one of their organizations"
        raise UsageError(problem, where=PUSH, fix=f"Use one of: {', '.join(owners)}.")


def upload(folder: Path, private_base: str | None, repository: Repository, *, kept: bool) -> str:
    """Upload an export, all files of `folder`, and return the address of the repository, which is made if need be.

    In a repository that exists, files of the same name are replaced and the others stay.

    Args:
        private_base: The folder of an adapter's base, which others have not.
        kept: `folder` stays, so that a failed upload can be tried again without another export.

    Raises:
        UsageError: the export's base is a folder here, or weights in the repository would be loaded beside it.
        MachineError: the hub refuses or is away; part of the files may be there, and the next attempt goes on.
    """
    if private_base:
        fix = (
            f"Give its id on the hub, {Option('base', 'ORG/MODEL')}, or upload a whole model, {Option('merge', True)}."
        )
        raise UsageError(f"{BASE_IS_LOCAL}: {private_base}", where=PUSH, fix=fix)
    name, api = repository.name, HfApi()
    again = f"The export is kept: hf upload {name} {folder}" if kept else _AGAIN
    repository.refuse_others({file.name for file in folder.iterdir()})
    with _explained(name, again):
        if repository.files is None:
            # None, not False: an organization may have private as its default.
            api.create_repo(name, private=repository.private or None, exist_ok=True)
        with shown(f"uploading to {name}"):
            api.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload with tuner export")
    return f"{api.endpoint}/{name}"


def _is_loaded(file: str) -> bool:
    return any(fnmatchcase(file, pattern) for pattern in _LOADED) and "/" not in file


@contextmanager
def _explained(name: str, again: str = _AGAIN) -> Iterator[None]:
    """Turn the hub's errors into one message each. Addresses are left out: they can be signed."""
    try:
        yield
    except HfHubHTTPError as error:
        raise _refusal(name, error, again) from error
    except (LocalTokenNotFoundError, OfflineModeIsEnabled) as error:
        raise MachineError(str(error).splitlines()[0].rstrip("."), where=PUSH, fix=_LOG_IN) from error
    except httpx.TimeoutException as error:
        raise _lost(f"the Hugging Face hub did not answer in time for {name}", again) from error
    except httpx.HTTPError as error:
        raise _lost(f"the Hugging Face hub cannot be reached for {name}", again) from error
    except (OSError, RuntimeError) as error:  # hf_xet, which sends weights, raises these; Git LFS hides its own in them
        if isinstance(error.__cause__, HfHubHTTPError):
            raise _refusal(name, error.__cause__, again) from error
        reason = re.sub(r"https?://\S+", "...", str(error).partition("\n")[0])
        raise _lost(f"the upload to {name} failed: {reason.rstrip('.')}", again) from error


def _lost(problem: str, again: str) -> MachineError:
    return MachineError(problem, where=PUSH, fix=f"Check the network and its proxy. {again}")


def _refusal(name: str, error: HfHubHTTPError, again: str) -> TunerError:
    status = error.response.status_code
    reason = f": {error.server_message}" if error.server_message else ""
    if status == 401:
        return MachineError(f"the Hugging Face hub rejects this token (401){reason}", where=PUSH, fix=_LOG_IN)
    if status in (403, 404):
        return MachineError(f"this token has no write access to {name} ({status}){reason}", where=PUSH, fix=_LOG_IN)
    if status in (409, 412):
        problem = f"someone else changed {name} during the upload ({status}){reason}"
        return MachineError(problem, where=PUSH, fix=f"Check its files. {again}")
    if status == 429 or status >= 500:
        problem = f"the Hugging Face hub answers {status} for {name}{reason}"
        return MachineError(problem, where=PUSH, fix=f"Wait, or see status.huggingface.co. {again}")
    return MachineError(f"the Hugging Face hub rejects the upload to {name} ({status}){reason}", where=PUSH, fix=again)
