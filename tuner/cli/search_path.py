"""Keep the working directory off Python's search path unless the user named it; the command line's first import.

Where PYTHONPATH was not set, `export PYTHONPATH=$PYTHONPATH:/my/modules` gives it an empty entry, which stands for the
working directory: a folder `torch` in a stranger's files would be imported in place of the library.
"""

import os
import sys


def remove_unnamed() -> None:
    """Take empty entries out of PYTHONPATH, for this process and all that it starts."""
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)  # effect: Python has read it before
    named_entries = [entry for entry in entries if entry]
    if len(named_entries) == len(entries):
        return
    os.environ["PYTHONPATH"] = os.pathsep.join(named_entries)  # effect: for ranks and every other process
    try:
        current_folder = os.getcwd()  # noqa: PTH109  pathlib would be looked for in that folder
    except FileNotFoundError:
        return
    # A source checkout, in which the package itself lies there, is one's own.
    checkout = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # noqa: PTH100, PTH120
    if current_folder not in [checkout, *map(os.path.abspath, named_entries)]:
        sys.path[:] = [folder for folder in sys.path if os.path.abspath(folder) != current_folder]  # noqa: PTH100


remove_unnamed()
