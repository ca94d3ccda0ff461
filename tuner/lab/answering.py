"""`python -m tuner.lab.answering ADDRESS PORT`: which nodes of a run answer, by its meeting, as the last line of JSON.

`lab.hosts` runs it on a host of the run: where it runs itself, the port of the meeting may not be within reach.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

from tuner.launch.meeting import messages
from tuner.launch.meeting.part import CALL, call_key, connected
from tuner.launch.meeting.secret_lines import GREETING_S, Broken, present
from tuner.machine.hostfile import MEETING


def main() -> None:
    """Print the node ranks that answer, node 0 among them; none if node 0 does not."""
    address, port = sys.argv[1:]
    print("\n" + json.dumps({"ranks": asyncio.run(asked(address, int(port), os.environ[MEETING].split(" ")[0]))}))


async def asked(address: str, port: int, sent: str) -> list[int]:
    """Return the node ranks of which node 0 hears, and its own; none if it does not answer.

    Args:
        address: Of node 0.
        port: Of the meeting.
        sent: The secret that `--hostfile` has sent to the nodes.
    """
    try:
        reader, writer = await connected(address, port)
        try:
            lines = await present(reader, writer, {CALL: call_key(sent)})
            messages.send(lines, messages.Who())
            answer = await messages.read(lines, GREETING_S)
            return answer.ranks if isinstance(answer, messages.Answering) else []
        finally:
            writer.close()
    except (OSError, TimeoutError, Broken):
        return []


if __name__ == "__main__":
    main()
