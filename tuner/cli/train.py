"""`tuner train`: plan, print, start."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tuner import paths
from tuner.cli import guide
from tuner.cli.help import Command
from tuner.cli.options import Finite, OptionValue, overrides, recipe_options, taken_out
from tuner.cli.say import columns, say, say_json
from tuner.cli.text import announce, with_origins
from tuner.errors import UsageError
from tuner.launch.meeting.part import port_of
from tuner.machine import hardware, slurm
from tuner.machine import hostfile as hostfiles
from tuner.machine.topology import DEFAULT_PORT, LAUNCHERS, LaunchFlags
from tuner.machine.variables import LaunchSettings, count, node_counts, settings_of, text
from tuner.recipes import loading, trust
from tuner.recipes.names import Name

if TYPE_CHECKING:
    from tuner.lab.hosts import Launch
    from tuner.launch.resolved_run import Request, ResolvedRun


@click.command(
    cls=Command,
    examples=(
        "tuner train --model Qwen/Qwen3-0.6B --data my.jsonl",
        "tuner train qwen3_8b_qlora_alpaca_e1 --lr 1e-4 --deepspeed zero2",
        "tuner train work_dirs/NAME/TIME/recipe.py --resume auto",
    ),
    json_keys={
        "tuner train RECIPE --dry-run --json": (
            "`argv`, `env`, `deepspeed`, `batch`, `level`, `fit`, `precision`, `run_directory`, `warnings`"
        ),
    },
    uses={
        "train a model that has no name here": (
            "`tuner train --model PATH --data FILE`, with `--method qlora` for little memory"
        ),
        "go on after a stop or a failure": "`tuner train RECIPE --resume auto`, or `--resume RUN`",
    },
)
@recipe_options("recipe")
@click.option(
    "--work-dir",
    type=click.Path(path_type=Path),
    help="Folder of the run: checkpoints, metrics, result; --output-dir is the same. [default: work_dirs/RECIPE/TIME]",
)
@click.option(
    "--resume",
    metavar="PATH|auto",
    help="Continue from a checkpoint or a run directory; auto: from the newest checkpoint of this recipe.",
)
@click.option(
    "--resume-weights",
    is_flag=True,
    help="With --resume: load only the weights if the optimizer states cannot be loaded, as at another ZeRO stage.",
)
@click.option(
    "--launcher",
    type=click.Choice(LAUNCHERS),
    metavar="NAME",
    default="local",
    help="How worker processes are started. local: tuner starts those of this node. slurm, mpi: this process was "
    "already started as one worker by srun or mpirun. env: by the variables that the cluster sets. none: this process "
    "is the only one.",
)
@click.option(
    "--nproc-per-node", type=int, help="Worker processes per node. [default: one per GPU] [env: NPROC_PER_NODE]"
)
@click.option(
    "--nnodes",
    metavar="N|MIN:MAX",
    help="Number of nodes; start this command on each. 3:4: of 4 nodes the run goes on with 3 when one is missing. "
    "[default: 1] [env: NNODES]",
)
@click.option("--node-rank", type=int, help="Rank of this node (0 to nnodes-1). [env: NODE_RANK]")
@click.option("--master-addr", metavar="HOST", help="Host name or address of node 0. [env: MASTER_ADDR, ADDR]")
@click.option("--master-port", type=int, help="Free port on node 0. [env: MASTER_PORT, PORT]")
@click.option(
    "--hostfile",
    type=click.Path(path_type=Path),
    help="Start on these hosts over ssh; a file with lines such as `worker-1 slots=8`.",
)
@click.option(
    "--include",
    metavar="HOSTS",
    help="Use only these hosts (and GPUs) of the hostfile, such as worker-1@worker-2:0,1.",
)
@click.option("--exclude", metavar="HOSTS", help="Leave out these hosts (or GPUs) of the hostfile.")
@click.option(
    "--spare-nodes",
    type=click.IntRange(0),
    default=0,
    help="The last hosts of the hostfile, which take the place of those that are lost. Needs --max-restarts.",
)
@click.option("--ssh", metavar="COMMAND", help="Command that reaches the hosts, such as 'ssh -p 2222'. [default: ssh]")
@click.option(
    "--bind-cores-to-rank",
    "bind_cores",
    is_flag=True,
    help="Bind each worker process to its share of the node's CPU cores.",
)
@click.option("--ignore-fit", is_flag=True, help="Start even if the estimated memory does not fit.")
@click.option(
    "--on-oom",
    type=click.Choice(("stop", "retry")),
    default="stop",
    help="If a GPU runs out of memory: stop, or retry from the last checkpoint with a smaller micro-batch, then at a "
    "higher ZeRO level.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(0),
    default=0,
    help="How often to continue from the last checkpoint after a process crashes, is killed or hangs; each newer "
    "checkpoint starts the count anew.",
)
@click.option(
    "--start-timeout",
    "start_timeout_s",
    type=Finite(min=0, min_open=True),
    default=600,
    metavar="SECONDS",
    help="How long to wait for the other nodes, at the start and after a node was lost.",
)
@click.option(
    "--grace",
    "grace_s",
    type=Finite(min=0, min_open=True),
    default=300,
    metavar="SECONDS",
    help="Time to finish the step and save a checkpoint after Ctrl-C or SIGTERM; longer if earlier saves took longer.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print the plan, the command and the DeepSpeed config, and start nothing."
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print events as JSON lines during the run; with --dry-run, the plan as JSON.",
)
def command(
    recipe: Name | None,
    deepspeed: str | None,
    dry_run: bool,
    as_json: bool,
    hostfile: Path | None,
    include: str | None,
    exclude: str | None,
    spare_nodes: int,
    ssh: str | None,
    **changes: OptionValue,
) -> None:
    """Fine-tune a model: give --model and --data, or the name or file (.py, .yaml, .json) of a RECIPE.

    A recipe sets everything; every option below overrides it. `tuner list` shows the names that recipes are made of.
    Hugging Face's spellings work too, such as --learning_rate and --num_train_epochs.
    In a terminal, `tuner train` alone asks for model, data and method.
    """
    from datetime import datetime

    from tuner.launch import preflight
    from tuner.launch.resolve import resolve_run, resolve_start
    from tuner.launch.resolved_run import Request

    flags = LaunchFlags(**taken_out(LaunchFlags._fields, changes))
    settings = taken_out(Request._fields, changes)
    launcher = flags.launcher
    if launcher in ("slurm", "mpi") or (launcher == "env" and "LOCAL_RANK" in os.environ):  # this becomes a rank
        slurm.prepare_for_signals()
    if as_json and (hostfile or (not dry_run and launcher != "local")):
        where = "--hostfile" if hostfile else f"--launcher {launcher}"
        problem = f"--json does not work with {where}: this process does not watch the ranks"
        raise UsageError(problem, where="--json", fix="Add --dry-run, or read RUN/metrics.jsonl and RUN/status.json.")
    if settings["resume_weights"] and settings["resume"] is None:
        raise UsageError("--resume-weights without --resume", where="--resume-weights", fix="Add --resume auto.")
    names_nothing = recipe is None and changes["model"] is None and changes["adapter"] is None
    in_terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    is_guided = names_nothing and launcher == "local" and not (as_json or hostfile) and in_terminal
    typed = sys.argv[1:]
    if is_guided:
        changes = guide.ask(changes)
        typed = guide.command_of(typed, changes)
    settings |= {"command": ("tuner", *typed), "prints_events": as_json}
    request = Request(recipe, overrides(**changes), deepspeed, flags, **settings)
    if hostfile is None:
        host_flags = {"--include": include, "--exclude": exclude, "--spare-nodes": spare_nodes or None, "--ssh": ssh}
        if flag := next((flag for flag, value in host_flags.items() if value is not None), None):
            raise UsageError(f"{flag} without --hostfile", where=flag, fix="Add --hostfile FILE.")
    elif hostfiles.NODE not in os.environ:  # the command that was typed; each of the hosts trains below
        code = _start_on_hosts(request, hostfile, include, exclude, ssh, spare_nodes=spare_nodes, dry_run=dry_run)
        sys.exit(code)
    environ = dict(os.environ)
    this_machine = hardware.detect(environ)
    if dry_run:
        run = resolve_run(request, environ, this_machine, datetime.now().astimezone())
        print_plan(run, preflight.foresee(run), as_json=as_json)
        return
    from tuner.launch.execute import execute  # psutil, which a plan does not need
    from tuner.launch.meeting.joined import joined

    with joined(request, environ, this_machine) as others:
        run = resolve_start(request, environ, this_machine, datetime.now().astimezone())
        others.planned(run)
        if is_guided and not guide.agrees(run, preflight.foresee(run), request.command):
            return
        warnings = preflight.check(run)
        if run.topology.leads and not is_guided:  # the plan was shown
            announce(run, warnings)
        others.ready(run)
        code = execute(run, others.meeting)
    sys.exit(code)


def print_plan(run: ResolvedRun, warnings: tuple[str, ...], *, as_json: bool) -> None:
    """Print everything that would run on standard output."""
    from tuner.launch import memory, render

    argv, env, batch = render.argv(run), render.environment(run), render.batch_counts(run).to_json()
    ranks = render.of_ranks(run.topology)
    if as_json:
        value = {
            "argv": argv,
            "env": env,
            "ranks": ranks,
            "deepspeed": run.final.config,
            "batch": batch,
            "origins": {key: origin.to_json() for key, origin in run.final.origins.items()},
            "warnings": [*run.warnings, *warnings],
            "level": {"name": run.level, "reason": memory.why(run.level_and_split)},
            "fit": run.fit.to_json() if run.fit else None,
            "precision": {"dtype": run.precision.dtype, "reason": run.precision.reason},
            "run_directory": str(run.run_path),
            "resume": str(run.resume.path) if run.resume else None,
        }
        say_json(value)
        return
    announce(run, warnings)
    sections = {
        "command": [
            shlex.join([*(f"{key}={value}" for key, value in variables.items()), *argv]) for variables in ranks or [{}]
        ],
        "environment": [f"{key}={shlex.quote(value)}" for key, value in env.items()],
        "deepspeed.json": with_origins(run.final.config, run.final.origins, width=64, columns=columns()),
    }
    for title, lines in sections.items():
        say("\n".join((f"{title}:", *(f"  {line}" for line in lines), "")))
    click.echo("Nothing was started (--dry-run).")


# With --hostfile


def _start_on_hosts(
    request: Request,
    hostfile: Path,
    include: str | None,
    exclude: str | None,
    ssh: str | None,
    *,
    spare_nodes: int,
    dry_run: bool,
) -> int:
    """Start this command on the hosts of a hostfile, and return the run's exit code; a dry run prints the plan alone.

    Raises:
        TunerError: the hostfile, a flag beside it, or the recipe is wrong, or a host is not ready.
    """
    from tuner.lab import hosts as hosts_over_ssh

    settings = settings_of(request.flags._asdict(), os.environ)
    num_nodes, min_nodes = settings["--nnodes"], 0
    if any(":" in value for value in num_nodes.values()):  # MIN:MAX alone may stand beside a hostfile
        num_nodes, min_nodes = {}, _min_nodes(settings, hostfile, include, exclude, spare_nodes)
    _refuse_beside_hostfile({**num_nodes, **settings["--node-rank"]}, request.flags.launcher)
    # A mistake is told once, and here.
    loaded = loading.load(request.recipe, request.overrides, allow_code=request.allow_code)
    for warning in loaded.warnings if dry_run else ():  # a start warns of them itself
        say(f"WARNING: {warning}", err=True)
    variables = hostfiles.variables(
        paths.home(), Path.cwd(), os.environ.get("DS_ENV_FILE"), allow_code=request.allow_code
    )
    if "PYTHONPATH" not in variables:  # else the user's own modules are those that the hosts see
        trust.refuse(loaded, allow_code=request.allow_code, of_run=True)
    if variables:
        say(f"set on every host from .deepspeed_env: {', '.join(variables)}", err=True)
    hosts = hostfiles.read_hostfile(hostfile, include, exclude)
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
        min_nodes=min_nodes,
        replaces_lost=bool(request.max_restarts),
    )
    if dry_run:
        _print_hosts(launch)
        return 0
    return hosts_over_ssh.run(*hosts_over_ssh.look(launch))


def _min_nodes(
    settings: LaunchSettings, hostfile: Path, include: str | None, exclude: str | None, spare_nodes: int
) -> int:
    """Return MIN of `--nnodes MIN:MAX`; MAX must be the hosts that train."""
    min_nodes, max_nodes = node_counts(settings)
    in_use = len(hostfiles.read_hostfile(hostfile, include, exclude)) - spare_nodes
    if max_nodes != in_use:
        fix = f"Use --nnodes {min(min_nodes, in_use)}:{in_use}."
        raise UsageError(f"{max_nodes} nodes, and {in_use} hosts that train", where="--nnodes / NNODES", fix=fix)
    return min_nodes


def _refuse_beside_hostfile(settings: dict[str, str], launcher: str) -> None:
    """Refuse what says of one node who it is: with a hostfile this command starts all nodes, and tells each."""
    for name, value in {**settings, **({} if launcher == "local" else {"--launcher": launcher})}.items():
        fix = "Remove it: each host gets its own."
        raise UsageError(f"{name}={value} with --hostfile, which starts the nodes", where=name, fix=fix)


def _print_hosts(launch: Launch) -> None:
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
