"""`python -m tuner.worker.compile_ops OP...`: DeepSpeed's ops, compiled into torch's folder of extensions.

It runs as a child of `launch.builds`, which shows how far it is and ends it; it judges no failure.
"""

from __future__ import annotations

import os
import signal
import sys

from tuner.worker.quiet import quiet_libraries


def main() -> None:
    # Asked by its parent, or by the kernel in its place: ninja and the compilers have to end too.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    quiet_libraries()
    from deepspeed.ops.op_builder.all_ops import ALL_OPS  # seconds, with torch

    for name in sys.argv[1:]:
        print(f"\nop {name}", flush=True)
        ALL_OPS[name].load(verbose=True)


if __name__ == "__main__":
    main()
