"""`python -m tuner`."""

import os
import sys

# `-m` looks for modules in the working directory first: a json.py or torch.py there would be run in place of the real
# one. A source checkout, in which the package itself lies there, is one's own.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(os.path.abspath(__file__))):  # noqa: PTH100, PTH120
    del sys.path[0]

from tuner.cli import main

main()
