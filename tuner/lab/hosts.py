"""One run on the hosts of a hostfile: ssh starts `tuner train` on each, which meet as nodes started by hand do.

It looks at all hosts before it starts anything, shows what they print with their names, passes signals on, and ends all
of them when one has failed. What a host does with its ranks is `supervise`'s work there.
"""

from __future__ import annotations

import contextlib
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tuner import __version__
from tuner.errors import MachineError, Stopped, TunerError, UsageError, together
from tuner.machine.hostfile import NODE, Host
from tuner.machine.kernel import heard
from tuner.machine.topology import DEFAULT_PORT
from tuner.recipes.catalog import VARIABLE

_SSH = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-T")
"""Nobody could answer the questions of several hosts at once."""
_LOST = 255
"""ssh's own code, where the connection is to blame."""
_NO_FOLDER = 90
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
_ANSWER_S = 60.0
_POLL_S = 0.1
_AFTER_FAILURE_S = 10.0
"""What the other hosts get once one has failed, to end by themselves; and then once more, told to, before a kill.

Told twice, a supervisor kills its ranks: they may wait for ever for those of the host that failed.
"""
_FORWARDED = ("PYTHON", "NCCL_", "GLOO_", "UCX_", "MLFLOW", "MV2_", VARIABLE)
"""The variables of this shell that hosts get too, as with DeepSpeed's launcher; others are for .deepspeed_env."""
_SHELL = (
    'IFS= read -r line; exec 3<&0; eval "$line" </dev/null 3<&- & child=$!; '
    '(while IFS= read -r name; do kill -s "$name" "$child"; done; kill -s TERM "$child") <&3 >/dev/null 2>&1 & '
    'reader=$!; wait "$child"; code=$?; kill "$reader" 2>/dev/null; exit "$code"'
)
"""What ssh runs on a host. Its first line of input is the command, so that no list of processes shows the variables;
each further line is a signal for it, and the end of input ends it: a launcher that was killed leaves nothing behind."""


_ASKING_SHELL = 'IFS= read -r line; eval "$line" </dev/null'


@dataclass(frozen=True)
class Launch:
    """What is started on each host: `argv` behind `python -m tuner`, in `folder`, with `variables`."""

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    argv: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str]
    nproc_per_node: int
    master_addr: str | None
    master_port: int | None

    def of(self, number: int, address: str) -> str:
        """Return the shell line that starts one host.

        Raises:
            UsageError: it would be several lines.
        """
        host = self.hosts[number]
        variables = {**self.variables, NODE: host.name, "NPROC_PER_NODE": str(self.nproc_per_node)}
        if not host.is_whole:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.gpus))
        if len(self.hosts) > 1:
            port = str(self.master_port or DEFAULT_PORT)
            variables |= {"NNODES": str(len(self.hosts)), "NODE_RANK": str(number), "ADDR": address, "PORT": port}
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in variables.items())
        line = f"cd {shlex.quote(str(self.folder))} && export {exports} && exec {shlex.join(self.command)}"
        if "\n" in line:
            problem = "a line break in the command, the folder or a variable cannot be sent to a host"
            raise UsageError(problem, where="--hostfile", fix="Put it into a recipe file.")
        return line

    @property
    def command(self) -> tuple[str, ...]:
        """What is run on each host, by the same Python as here; -P as for the `tuner` command itself."""
        return sys.executable, "-P", "-m", "tuner", *self.argv

    def on(self, host: Host, shell: str = _SHELL) -> list[str]:
        """Return the ssh command that runs the lines of its input on a host."""
        return [*self.ssh, *_SSH, host.name, f"exec sh -c {shlex.quote(shell)}"]


def plan(
    hosts: tuple[Host, ...],
    ssh: str,
    argv: Sequence[str],
    folder: Path,
    environ: Mapping[str, str],
    variables: Mapping[str, str],
    *,
    nproc_per_node: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Launch:
    """Return what would be started.

    Args:
        variables: What .deepspeed_env sets; it wins over this shell's.

    Raises:
        UsageError: hosts with different numbers of GPUs, or more processes than GPUs.
    """
    counts = {len(host.gpus) for host in hosts}
    if len(counts) > 1:
        each = ", ".join(f"{host.name} {len(host.gpus)}" for host in hosts)
        fewest = ",".join(map(str, range(min(counts))))
        fix = f"Use the same number on each, such as --include NAME:{fewest}@..., or leave hosts out with --exclude."
        raise UsageError(f"the hosts have different numbers of slots: {each}", where="--hostfile", fix=fix)
    (slots,) = counts
    if nproc_per_node is not None and not 1 <= nproc_per_node <= slots:
        fix = "Use fewer, or remove it: the default is one per slot."
        raise UsageError(f"{nproc_per_node} processes on {slots} slots", where="--nproc-per-node", fix=fix)
    forwarded = {name: value for name, value in environ.items() if name.startswith(_FORWARDED)}
    return Launch(
        hosts,
        tuple(shlex.split(ssh)),
        tuple(argv),
        folder,
        {**forwarded, **variables},
        nproc_per_node or slots,
        master_addr,
        master_port,
    )


def look(launch: Launch) -> str:
    """Look at all hosts at once, and return the address of the first as the others reach it.

    Raises:
        TunerError: every host that cannot be reached, or lacks the folder, or has another tuner, together.
    """
    with ThreadPoolExecutor(min(64, len(launch.hosts))) as pool:
        results = list(pool.map(lambda host: _look_at(launch, host), launch.hosts))
    errors = [one for one in results if isinstance(one, TunerError)]
    if errors:
        raise together(errors)
    address = launch.master_addr or str(results[0])
    if not address:
        problem = f"{launch.hosts[0].name} does not report its address (hostname -I)"
        raise MachineError(
            problem, where="--hostfile", fix="Add --master-addr with an address that the other hosts can reach."
        )
    return address


def _look_at(launch: Launch, host: Host) -> str | MachineError:
    """Return a host's first address ('' where it knows none), or what is wrong there."""
    folder, python = launch.folder, launch.command[0]
    exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in {**launch.variables, NODE: host.name}.items())
    line = (
        f"cd {shlex.quote(str(folder))} || exit {_NO_FOLDER}; export {exports}; "
        f"echo address $(hostname -I 2>/dev/null); exec {shlex.join((*launch.command[:4], '--version'))}"
    )
    try:
        done = subprocess.run(
            launch.on(host, _ASKING_SHELL),
            input=f"{line}\n",
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ANSWER_S,
        )
    except OSError as error:
        return MachineError(f"{launch.ssh[0]} cannot be run: {error.strerror}", where="--ssh", fix="Install OpenSSH.")
    except subprocess.TimeoutExpired:
        return MachineError(f"{host.name} does not answer within {_ANSWER_S:.0f} s", where="--hostfile")
    addresses, _, version = done.stdout.partition("\n")
    last_error = " ".join((done.stderr.strip().splitlines() or [""])[-1].split())
    if done.returncode == _LOST:
        fix = f"Try: {shlex.join((*launch.ssh, host.name, 'true'))}. It must work without a password or a question."
        return MachineError(f"{host.name} cannot be reached: {last_error}", where="--hostfile", fix=fix)
    if done.returncode == _NO_FOLDER:
        fix = "All hosts must share this folder under the same path."
        return MachineError(f"{host.name} has no folder {folder}", where="the working directory", fix=fix)
    if done.returncode:
        fix = "Install tuner on every host under the same path."
        return MachineError(f"{host.name} cannot run {python} -m tuner: {last_error}", where="--hostfile", fix=fix)
    there = (version.partition("\n")[0].split() or ["?"])[-1]  # below it, the versions of the libraries
    if there != __version__:
        fix = "Install the same version everywhere."
        return MachineError(
            f"{host.name} has tuner {there}, and this machine has {__version__}", where="--hostfile", fix=fix
        )
    return next(iter(addresses.split()[1:]), "")


def run(launch: Launch, address: str) -> int:
    """Start all hosts, show what they print, and return the exit code of the first that failed."""
    lines = [launch.of(number, address) for number in range(len(launch.hosts))]
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in heard(_STOPS)}
    nodes: list[_Node] = []
    try:
        for host, line in zip(launch.hosts, lines, strict=True):
            nodes.append(_Node(host.name, launch.on(host), line))
        return _watch(nodes, received)
    finally:
        for node in nodes:
            node.end()
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(nodes: Sequence[_Node], received: Sequence[int]) -> int:
    forwarded, num_terms, failed_s = 0, 0, 0.0
    failed: list[_Node] = []
    """Those that ended badly before they were told to, in that order."""
    while any(node.is_running for node in nodes):
        time.sleep(_POLL_S)
        for number in received[forwarded:]:
            forwarded += 1
            for node in nodes:
                node.send(signal.Signals(number))
        failed += [node for node in nodes if node.code and node not in failed and not num_terms]
        failed_s = failed_s or (time.monotonic() if failed else 0.0)
        if not failed or failed[0].code == Stopped.exit_code:  # all hosts stop at the same step
            continue
        if num_terms < 2 and time.monotonic() - failed_s >= (num_terms + 1) * _AFTER_FAILURE_S:
            num_terms += 1
            for node in nodes:
                node.send(signal.SIGTERM)
    codes = [node.code for node in failed] or [node.code for node in nodes if node.code]
    # A rank that was killed makes those of other hosts fail, whose supervisors may be faster: they know no cause.
    return next((code for code in codes if code != TunerError.exit_code), max(codes, default=0))


class _Node:
    """`tuner train` on one host, as ssh shows it."""

    def __init__(self, name: str, ssh: Sequence[str], line: str) -> None:
        self.name = name
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C of the terminal reaches the hosts once, through us, and not ssh.
        self.process = subprocess.Popen(ssh, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
        assert self.process.stdin and self.process.stdout and self.process.stderr
        self.input = self.process.stdin
        self.shown = [
            threading.Thread(target=self._show, args=streams, daemon=True)
            for streams in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        ]
        for thread in self.shown:
            thread.start()
        self._write(line)

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    @property
    def code(self) -> int:
        """How it ended; 0 too while it runs. A connection that was lost is a failure like others."""
        code = self.process.poll() or 0
        return TunerError.exit_code if code == _LOST else code

    def send(self, number: signal.Signals) -> None:
        """Pass a signal on. A shell's background process ignores SIGINT until it listens, so SIGTERM is sent for it."""
        if self.is_running:
            self._write("TERM" if number == signal.SIGINT else number.name.removeprefix("SIG"))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            self.input.write(f"{line}\n".encode())
            self.input.flush()

    def _show(self, source: IO[bytes], stream: IO[str]) -> None:
        with source:
            for line in source:
                with contextlib.suppress(OSError):  # the terminal may be gone
                    stream.write(f"{self.name}: {line.decode(errors='replace').rstrip()}\n")
                    stream.flush()

    def end(self) -> None:
        """Close its input, which ends what still runs there, and show what it printed last."""
        with contextlib.suppress(OSError):
            self.input.close()
        for thread in self.shown:
            thread.join(timeout=_ANSWER_S)
        if self.process.poll() == _LOST:
            with contextlib.suppress(OSError):
                print(f"{self.name}: connection lost.", file=sys.stderr)
