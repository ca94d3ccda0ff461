"""Runs a recipe on the hosts of a hostfile: ssh starts `tuner train` on each, as if started by hand on every node.

It checks all hosts before it starts anything, prints their output with their names, forwards signals, and ends all
hosts when one has failed. `supervise` on each host starts and watches its ranks.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

from tuner import __version__
from tuner.errors import MachineError, Stopped, TunerError, UsageError, together, words_of
from tuner.launch.meeting.part import port_of
from tuner.machine.hostfile import MEETING, NODE, RESTARTED_NODE, Host
from tuner.machine.kernel import INSISTING, heard
from tuner.machine.topology import DEFAULT_PORT
from tuner.progress import POLL_S, say
from tuner.recipes.catalog import VARIABLE

_SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=3")
_SSH = (*(word for option in _SSH_OPTIONS for word in ("-o", option)), "-T")
"""BatchMode: ssh never asks a question, since several hosts could ask at once. ServerAlive: without it ssh waits for
ever for a host that has gone without a word; with it, half a minute."""
_LOST = 255
"""Exit code of ssh if the connection failed."""
_NO_FOLDER = 90
_ANSWER_S, _LAST_WORDS_S = 60.0, 5.0
_AFTER_FAILURE_S = 10.0
"""After a failure, the other hosts have this time to end; then they get SIGTERM, and after the same time another one.

At the second SIGTERM a supervisor kills its ranks, which may wait forever for those of the failed host. A host that is
still there after the same time once more does not answer: its ssh is killed. So it is after a user's second signal.
"""
_GONE_S, _AGAIN_S = 10.0, 2.0
"""Seconds between two questions whether a lost node answers, and between two searches for a host for it."""
_FORWARDED = ("PYTHON", "NCCL_", "GLOO_", "UCX_", "MLFLOW", "MV2_", VARIABLE)
"""Beginnings of the variables that are sent to hosts, as by DeepSpeed's launcher; others go into .deepspeed_env."""
_SHELL = (
    'IFS= read -r line; exec 3<&0; eval "$line" </dev/null 3<&- & child=$!; '
    '(while IFS= read -r name; do kill -s "$name" "$child"; done; kill -s HUP "$child") <&3 >/dev/null 2>&1 & '
    'reader=$!; wait "$child"; code=$?; kill "$reader" 2>/dev/null; exit "$code"'
)
"""The script that ssh runs on a host. Its first line of input is the command, so that process lists do not show the
variables. Each further line is a signal for the command. At the end of input it gets SIGHUP, which ends it while no
ranks train there. Then the nodes stop if all of them got it: the launcher was killed. Else a connection was lost."""
_ON_HOST = {signal.SIGINT: "TERM", signal.SIGHUP: "USR2"}
"""Signals that reach the hosts as others: a background process of a shell ignores SIGINT, and SIGHUP means there that
the connection is lost."""


_ASKING_SHELL = 'IFS= read -r line; eval "$line" </dev/null'


@dataclass(frozen=True)
class Launch:
    """What to start on each host: `python -m tuner` with `argv`, in `folder`, with `variables`."""

    hosts: tuple[Host, ...]
    ssh: tuple[str, ...]
    argv: tuple[str, ...]
    folder: Path
    variables: Mapping[str, str]
    nproc_per_node: int
    master_addr: str | None
    master_port: int | None
    spare: tuple[Host, ...] = ()
    """Hosts that take the place of those that are lost."""
    min_nodes: int = 0
    """With `--nnodes MIN:MAX`, the fewest that go on; 0: all are needed."""
    replaces_lost: bool = False
    """The nodes restart (`--max-restarts`) and wait for a lost one, so it is started again."""
    secret: str = field(default_factory=secrets.token_hex, repr=False)

    def of(self, number: int, address: str, *, again: Host | None = None) -> str:
        """Return the shell line that starts one node.

        Args:
            again: Its host was lost: the one that it is started on again.

        Raises:
            UsageError: the line would have a line break.
        """
        host = again or self.hosts[number]
        hosts = [*self.hosts[:number], host, *self.hosts[number + 1 :]]
        variables = {**self.variables, NODE: host.name, "NPROC_PER_NODE": str(self.nproc_per_node)}
        if not host.is_whole:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, host.gpus))
        if len(self.hosts) > 1:
            port = str(self.master_port or DEFAULT_PORT)
            nodes = f"{self.min_nodes}:{len(self.hosts)}" if self.min_nodes else str(len(self.hosts))
            variables |= {"NNODES": nodes, "NODE_RANK": str(number), "ADDR": address, "PORT": port}
            variables[MEETING] = " ".join((self.secret, *(node_host.name for node_host in hosts)))
            variables |= {RESTARTED_NODE: "1"} if again else {}
        line = f"cd {shlex.quote(str(self.folder))} && {_exports(variables)} && exec {shlex.join(self.command)}"
        if "\n" in line:
            problem = "a line break in the command, the folder or a variable cannot be sent to a host"
            raise UsageError(problem, where="--hostfile", fix="Put it into a recipe file.")
        return line

    def asks(self, address: str, port: int) -> str:
        """Return the shell line that asks the meeting of the nodes which of them answer."""
        exports = _exports({**self.variables, MEETING: self.secret})
        command = [*self.command[:3], "tuner.lab.answering", address, str(port)]
        return f"cd {shlex.quote(str(self.folder))} && {exports} && exec {shlex.join(command)}\n"

    @property
    def command(self) -> tuple[str, ...]:
        """The command for each host, with the same Python path as here; -P as for the `tuner` command itself."""
        return sys.executable, "-P", "-m", "tuner", *self.argv

    def on(self, host: Host, shell: str = _SHELL) -> list[str]:
        """Return the ssh command that runs its input on a host."""
        return [*self.ssh, *_SSH, host.name, f"exec sh -c {shlex.quote(shell)}"]


def _exports(variables: Mapping[str, str]) -> str:
    return " ".join(("export", *(f"{name}={shlex.quote(value)}" for name, value in variables.items())))


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
    num_spare: int = 0,
    min_nodes: int = 0,
    replaces_lost: bool = False,
) -> Launch:
    """Return what to start.

    Args:
        variables: Variables of .deepspeed_env; they override those of this shell.

    Raises:
        UsageError: the hosts have different numbers of GPUs, or there are more processes than GPUs.
    """
    counts = {len(host.gpus) for host in hosts}
    if len(counts) > 1:
        slots_by_host = ", ".join(f"{host.name} {len(host.gpus)}" for host in hosts)
        fewest = ",".join(map(str, range(min(counts))))
        fix = f"Use the same number on each, such as --include NAME:{fewest}@..., or leave hosts out with --exclude."
        raise UsageError(f"the hosts have different numbers of slots: {slots_by_host}", where="--hostfile", fix=fix)
    (slots,) = counts
    if nproc_per_node is not None and not 1 <= nproc_per_node <= slots:
        fix = "Use fewer, or remove it: the default is one per slot."
        raise UsageError(f"{nproc_per_node} processes on {slots} slots", where="--nproc-per-node", fix=fix)
    forwarded = {name: value for name, value in environ.items() if name.startswith(_FORWARDED)}
    in_use = len(hosts) - num_spare
    return Launch(
        hosts=hosts[:in_use],
        spare=hosts[in_use:],
        min_nodes=min_nodes,
        replaces_lost=replaces_lost and in_use > 1,
        ssh=tuple(words_of(ssh, "--ssh")),
        argv=tuple(argv),
        folder=folder,
        variables={**forwarded, **variables},
        nproc_per_node=nproc_per_node or slots,
        master_addr=master_addr,
        master_port=master_port,
    )


def look(launch: Launch) -> tuple[Launch, str]:
    """Check all hosts in parallel; return the launch on those that are ready, and the address of the first for others.

    A host that is not ready is named and left out if enough others are: the first spare ones take the places.

    Raises:
        TunerError: hosts cannot be reached, lack the folder, or have another version of tuner; all in one error.
    """
    hosts, num_needed = (*launch.hosts, *launch.spare), len(launch.hosts)
    with ThreadPoolExecutor(min(64, len(hosts))) as pool:
        results = list(pool.map(lambda host: _look_at(launch, host), hosts))
    errors = [result for result in results if isinstance(result, TunerError)]
    addresses = {host: result for host, result in zip(hosts, results, strict=True) if isinstance(result, str)}
    has_first = hosts[0] in addresses or launch.master_addr is None  # which is the first one's
    if len(addresses) < num_needed or not has_first:
        raise together(errors)
    for error in errors:
        say(
            f"WARNING: {error.what}: it is left out, and {len(addresses)} hosts are ready, of which {num_needed} train."
        )
    ready = tuple(addresses)
    launch = replace(launch, hosts=ready[:num_needed], spare=ready[num_needed:])
    address = launch.master_addr or addresses[ready[0]]
    if not address:
        problem = f"{launch.hosts[0].name} does not report its address (hostname -I)"
        raise MachineError(
            problem, where="--hostfile", fix="Add --master-addr with an address that the other hosts can reach."
        )
    return launch, address


def _look_at(launch: Launch, host: Host) -> str | MachineError:
    """Return a host's first address ('' if it reports none), or its error."""
    folder, python = launch.folder, launch.command[0]
    exports = _exports({**launch.variables, NODE: host.name})
    line = (
        f"cd {shlex.quote(str(folder))} || exit {_NO_FOLDER}; {exports}; "
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
    its_version = (version.partition("\n")[0].split() or ["?"])[-1]  # the lines below it are the versions of libraries
    if its_version != __version__:
        fix = "Install the same version everywhere."
        return MachineError(
            f"{host.name} has tuner {its_version}, and this machine has {__version__}", where="--hostfile", fix=fix
        )
    return next(iter(addresses.split()[1:]), "")


def run(launch: Launch, address: str) -> int:
    """Start all hosts, print their output, and return the exit code of the first one that failed."""
    lines = [launch.of(number, address) for number in range(len(launch.hosts))]
    received: list[int] = []
    before = {number: signal.signal(number, lambda number, _: received.append(number)) for number in heard()}
    nodes: list[_Node] = []
    lost = _Lost(launch, address, nodes)
    try:
        for host, line in zip(launch.hosts, lines, strict=True):
            nodes.append(_Node(host, launch.on(host), line))
        return _watch(nodes, received, lost)
    finally:
        lost.is_over.set()
        for node in nodes:
            node.end()
        for number, handler in before.items():
            signal.signal(number, handler)


class _Lost:
    """The nodes that lost their connection: asks if their ranks still answer, and starts again those that do not.

    The others wait for a lost node. It is started again on a spare host, or where it was lost. Node 0 has the address
    that the others call, so it only comes back on its own host.
    """

    def __init__(self, launch: Launch, address: str, nodes: list[_Node]) -> None:
        self._launch, self._address, self._nodes = launch, address, nodes
        self._spare = list(launch.spare)
        self._free = threading.Lock()
        self._sought: set[_Node] = set()
        self._gone: set[_Node] = set()
        """Those that do not answer."""
        self._found: dict[_Node, Host] = {}
        self.is_over = threading.Event()

    def is_no_failure(self, node: _Node) -> bool:
        """Return whether a node that lost its connection may still train, or is started again."""
        return node.is_lost and (node not in self._gone or self._launch.replaces_lost)

    def look(self) -> None:
        """Look after each node that lost its connection, and start it again once there is a host for it."""
        for number, node in enumerate(self._nodes):
            if node.is_lost and node not in self._sought:
                self._sought.add(node)
                threading.Thread(target=self._seek, args=(number, node), daemon=True).start()
            elif host := self._found.pop(node, None):
                say(f"node {number} is started again on {host.name}.")
                node.end()
                line = self._launch.of(number, self._address, again=host)
                self._nodes[number] = _Node(host, self._launch.on(host), line)

    def _seek(self, number: int, node: _Node) -> None:
        self._await_silence(number, node)
        self._gone.add(node)
        if not self._launch.replaces_lost or self.is_over.is_set():
            return
        other_hosts = " or ".join(host.name for host in self._spare if number) or "no spare host"
        other_hosts = other_hosts if number else "no other host, for the others call its address"
        say(f"{node.name} is lost. Its node {number} is started again there or on {other_hosts}.")
        while not self.is_over.is_set():
            with self._free:  # two nodes do not get one host
                for host in (*(self._spare if number else ()), node.host):
                    if not isinstance(_look_at(self._launch, host), MachineError):
                        self._spare = [spare for spare in self._spare if spare != host]
                        self._found[node] = host
                        return
            self.is_over.wait(_AGAIN_S)

    def _await_silence(self, number: int, node: _Node) -> None:
        """Return when a node has not answered twice, so that the others have missed it too; say if it does."""
        num_silent, is_told = 0, False
        while not self.is_over.is_set():
            answering = self._answering()
            if answering and number in answering:
                num_silent = 0
                if not is_told:
                    say(f"The ssh connection to {node.name} is gone; its ranks still answer, and the run goes on.")
                is_told = True
            elif answering != [] or number == 0:  # while node 0 is silent, nobody knows of the others
                num_silent += 1
            if num_silent > 1:
                return
            self.is_over.wait(_GONE_S)

    def _answering(self) -> list[int] | None:
        """Ask node 0, over a host that is still connected, which nodes it hears from; [] if node 0 is silent.

        None: no host can be asked.
        """
        port = port_of(self._launch.master_port or DEFAULT_PORT)
        line = self._launch.asks(self._address, port)
        for node in list(self._nodes):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired, ValueError, LookupError):
                if node.is_running:
                    done = subprocess.run(
                        self._launch.on(node.host, _ASKING_SHELL), input=line, capture_output=True,
                        text=True, errors="replace", timeout=_ANSWER_S,
                    )  # fmt: skip
                    return [int(rank) for rank in json.loads(done.stdout.splitlines()[-1])["ranks"]]
        return None


def _watch(nodes: Sequence[_Node], received: Sequence[int], lost: _Lost) -> int:
    forwarded, num_terms, failed_s = 0, 0, math.inf
    ends_s = math.inf
    """When hosts that still run are given up."""
    failed: list[_Node] = []
    """Hosts that failed before they got a SIGTERM, in order."""
    while any(node.is_running for node in nodes):
        time.sleep(POLL_S)
        for number in received[forwarded:]:
            forwarded += 1
            for node in nodes:
                node.send(signal.Signals(number))
            if sum(earlier in INSISTING for earlier in received[:forwarded]) > 1:
                ends_s = min(ends_s, time.monotonic() + _AFTER_FAILURE_S)
        if not (received or failed):
            lost.look()
        ended = [node for node in nodes if node.code and node not in failed and not num_terms]
        failed += [node for node in ended if not lost.is_no_failure(node)]
        if failed and failed[0].code != Stopped.exit_code:  # else all hosts stop at the same step
            failed_s = min(failed_s, time.monotonic())
            ends_s = min(ends_s, failed_s + 3 * _AFTER_FAILURE_S)
        if num_terms < 2 and time.monotonic() - failed_s >= (num_terms + 1) * _AFTER_FAILURE_S:
            num_terms += 1
            for node in nodes:
                node.send(signal.SIGTERM)
        if time.monotonic() >= ends_s:
            for node in nodes:
                node.give_up()
    if not failed and any(node.process.poll() == 0 for node in nodes):  # perhaps without a host that was lost
        return 0
    codes = [node.code for node in failed] or [node.code for node in nodes if node.code]
    # A killed rank makes ranks on other hosts fail, and these may end first. Their exit code 1 does not tell the cause.
    return next((code for code in codes if code != TunerError.exit_code), max(codes, default=0))


class _Node:
    """`tuner train` on one host, seen through ssh."""

    def __init__(self, host: Host, ssh: Sequence[str], line: str) -> None:
        self.host, self.name = host, host.name
        pipe = subprocess.PIPE
        # A session of its own: Ctrl-C in the terminal must reach the hosts only through tuner, not through ssh.
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
    def is_lost(self) -> bool:
        """Whether the connection to its host was lost."""
        return self.process.poll() == _LOST

    @property
    def code(self) -> int:
        """The exit code; 0 while it runs. A lost connection, or one that was given up, counts as a failed run."""
        code = self.process.poll() or 0
        return TunerError.exit_code if code == _LOST or code < 0 else code

    def send(self, number: signal.Signals) -> None:
        """Forward a signal."""
        if self.is_running:
            self._write(_ON_HOST.get(number, number.name.removeprefix("SIG")))

    def give_up(self) -> None:
        """End ssh, and say so, if the host still runs."""
        if self.is_running:
            say(f"{self.name} does not end; its processes may be left there.")
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

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
        """Close its input, which ends its processes, and print its last output."""
        with contextlib.suppress(OSError):
            self.input.close()
        for thread in self.shown:  # what a user's ssh leaves behind to share its connection keeps them open
            thread.join(timeout=_LAST_WORDS_S)
        if self.is_lost:
            say(f"{self.name}: connection lost.")
