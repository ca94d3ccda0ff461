"""`tuner train --hostfile`: the hosts that it means, what would start on them, and the start."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner import paths
from tuner.cli.say import say
from tuner.errors import UsageError
from tuner.launch.meeting.part import port_of
from tuner.machine import hostfile as hostfiles
from tuner.machine.topology import DEFAULT_PORT
from tuner.machine.variables import LaunchSettings, count, node_counts, settings_of, text
from tuner.recipes import loading

if TYPE_CHECKING:
    from tuner.lab.hosts import Launch
    from tuner.launch.resolved_run import Request


def start(
    request: Request,
    hostfile: Path,
    include: str | None,
    exclude: str | None,
    ssh: str | None,
    *,
    spare_nodes: int,
    dry_run: bool,
) -> None:
    """Start a run on the hosts of a hostfile and end this process with its exit code; on one of them, do nothing.

    Raises:
        TunerError: the hostfile, a flag beside it, or the recipe is wrong, or a host is not ready.
    """
    from tuner.lab import hosts as hosts_over_ssh
    from tuner.launch import admit

    if hostfiles.NODE in os.environ:  # one of the hosts, and the command that was typed
        return
    settings = settings_of(request.flags._asdict(), os.environ)
    nodes, fewest = settings["--nnodes"], 0
    if any(":" in value for value in nodes.values()):
        fewest, nodes = _fewest(settings, hostfile, include, exclude, spare_nodes), {}
    _refuse_beside({**nodes, **settings["--node-rank"]}, request.flags.launcher)
    # A mistake is told once, and here.
    loaded = loading.load(request.recipe, request.overrides, allow_code=request.allow_code)
    for warning in loaded.warnings if dry_run else ():  # a start warns of them itself
        say(f"WARNING: {warning}", err=True)
    variables = hostfiles.variables(
        paths.home(), Path.cwd(), os.environ.get("DS_ENV_FILE"), allow_code=request.allow_code
    )
    if "PYTHONPATH" not in variables:  # else the user's own modules are those that the hosts see
        admit.require(loaded, admit.Grant(code=request.allow_code, of_run=True), admit.OF_CODE)
    if variables:
        say(f"set on every host from .deepspeed_env: {', '.join(variables)}", err=True)
    hosts = hostfiles.read(hostfile, include, exclude)
    if spare_nodes and not request.max_restarts:
        raise UsageError("spare nodes without restarts", where="--spare-nodes", fix="Add --max-restarts, such as 3.")
    if spare_nodes >= len(hosts):
        problem = f"{spare_nodes} of {len(hosts)} hosts are spare, so none is left to train"
        raise UsageError(problem, where="--spare-nodes", fix=f"Use {len(hosts) - 1} or fewer, or add hosts.")
    launch = hosts_over_ssh.plan(
        hosts,
        ssh or "ssh",
        sys.argv[1:],
        Path.cwd(),
        os.environ,
        variables,
        nproc_per_node=count(settings, "--nproc-per-node"),
        master_addr=text(settings, "--master-addr"),
        master_port=count(settings, "--master-port", maximum=65535),
        num_spare=spare_nodes,
        min_nodes=fewest,
        replaces_lost=bool(request.max_restarts),
    )
    if dry_run:
        _print(launch)
        sys.exit(0)
    sys.exit(hosts_over_ssh.run(*hosts_over_ssh.look(launch)))


def _fewest(
    settings: LaunchSettings, hostfile: Path, include: str | None, exclude: str | None, spare_nodes: int
) -> int:
    """Return MIN of `--nnodes MIN:MAX`; MAX must be the hosts that train."""
    least, most = node_counts(settings)
    in_use = len(hostfiles.read(hostfile, include, exclude)) - spare_nodes
    if most != in_use:
        fix = f"Use --nnodes {min(least, in_use)}:{in_use}."
        raise UsageError(f"{most} nodes, and {in_use} hosts that train", where="--nnodes / NNODES", fix=fix)
    return least


def _refuse_beside(settings: dict[str, str], launcher: str) -> None:
    for name, value in {**settings, **({} if launcher == "local" else {"--launcher": launcher})}.items():
        fix = "Remove it: each host gets its own."
        raise UsageError(f"{name}={value} with --hostfile, which starts the nodes", where=name, fix=fix)


def _print(launch: Launch) -> None:
    for number, host in enumerate(launch.hosts):
        ranks = [f"CUDA_VISIBLE_DEVICES={','.join(map(str, host.gpus))}"] if not host.is_whole else []
        say(" ".join((f"{host.name}: node {number} of {len(launch.hosts)}, {launch.nproc_per_node} processes", *ranks)))
    for host in launch.spare:
        say(f"{host.name}: takes the place of a host that is lost")
    if len(launch.hosts) > 1:
        address = launch.master_addr or f"the first of `hostname -I` on {launch.hosts[0].name}"
        port = launch.master_port or DEFAULT_PORT
        say(f"the other hosts call: {address}, port {port_of(port)} (nodes) and {port} (ranks)")
    say(f"ssh command: {shlex.join(launch.ssh)}")
    say(f"folder: {launch.folder}")
    say(f"command on each host: {shlex.join(launch.command)}")
    say(f"variables passed on: {', '.join(sorted(launch.variables)) or 'none'}")
    say("To see what one host does, run the same command there without --hostfile.")
    click.echo("Nothing was started (--dry-run).")
