"""`python -m tuner.worker.compile_ops OP...` compiles DeepSpeed's ops into torch's folder of extensions.

`launch.builds` starts it, shows its progress and ends it; this module does not judge failures.
"""

from __future__ import annotations

import os
import signal
import sys

from tuner.worker.quiet import quiet_libraries


def main() -> None:
    # The parent sends SIGTERM, or the kernel if the parent has died: ninja and the compilers must end too.
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
    quiet_libraries()
    from deepspeed.ops.op_builder.all_ops import ALL_OPS  # seconds, with torch

    for name in sys.argv[1:]:
        print(f"\nop {name}", flush=True)
        ALL_OPS[name].load(verbose=True)


if __name__ == "__main__":
    main()
