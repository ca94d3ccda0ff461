"""A model's config.json from the hub: fetched into the hub's cache before a start is planned, which reads it there."""

from __future__ import annotations

import threading
from contextlib import suppress

from tuner.progress import tqdm_class

DEADLINE_S = 5.0
"""Seconds that a start waits for it."""


def fetch(hub_id: str, revision: str | None) -> None:
    """Bring config.json into the hub's cache; where that fails it stays away, and the checks of the start say why."""
    # A server that sends one byte a second never reaches the client's time-out; a thread can be abandoned.
    thread = threading.Thread(target=_fetch, args=(hub_id, revision), daemon=True)
    thread.start()
    thread.join(DEADLINE_S)


def _fetch(hub_id: str, revision: str | None) -> None:
    from huggingface_hub import hf_hub_download  # 0.3 s with its client

    with suppress(Exception):  # no network, no access, no such model
        hf_hub_download(hub_id, "config.json", revision=revision, etag_timeout=DEADLINE_S, tqdm_class=tqdm_class())
