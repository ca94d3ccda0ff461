"""How a rank ends: stop requests, reports of failures, and a teardown that does not abort.

It knows nothing of training. At a step's last loss, and at a save, `consensus` asks it whether to stop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn, TextIO

from tuner.errors import DiskError, Hang, NotANumber, Stopped, TunerError, exit_code_of
from tuner.files import is_disk_error, remedy
from tuner.machine import slurm
from tuner.machine.kernel import INSISTING, STOPS, die_with_parent, heard, stopped
from tuner.machine.slurm import Job
from tuner.machine.topology import Rank
from tuner.runs import beats, ending, lock, restarts, shared_folder
from tuner.runs.beats import Phase
from tuner.runs.causes import without_greeting
from tuner.runs.diagnose import Watched
from tuner.runs.directory import RunDirectory
from tuner.runs.follow import Follower
from tuner.runs.records import EndedAttempt, RankReport
from tuner.runs.swapped import Swapped
from tuner.runs.time_limits import TimeLimits
from tuner.worker.heartbeat import Heartbeat
from tuner.worker.process import end_mpirun, send_to, some

_LET_RANK_0_REQUEUE_S = 3
_MPIRUN_S = 60.0
"""How long mpirun has to end after a rank has failed: with its keep-alive set it takes about 20 s."""
_SAYS = {restarts.PREEMPTED: "a preemption", restarts.TIME_LIMIT: "a time limit"}
_STACKS_S = 2.0
"""Within this time all waiting ranks notice the hang and write their stacks."""


class Guard:
    """Watches one rank's signals and decides its exit code.

    `worker.__main__` makes it, lets it `install` its handlers and `take_output`, and trains inside of `finish`.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        rank: Rank,
        job: Job | None = None,
        run_has_ended: Callable[[RunDirectory, int], Callable[[], None]] | None = None,
    ) -> None:
        self.run_dir, self.rank, self.job = run_dir, rank, job
        self._run_has_ended = run_has_ended
        """`hooks.run_has_ended`, for a run without a supervisor: it returns a function that waits for the command."""
        self._wait_at_the_end: Callable[[], None] = lambda: None
        self.stop_requested = False
        self._stopped_by: int | None = None
        self._insisted = False
        self._fails = False
        """True from this rank's own error on: srun then sends SIGTERM, before the rank has told what happened."""
        self.can_stop_at_a_step = False
        """True during training. Before it a signal ends the rank at once, and nothing is saved."""
        self.before_leaving: Callable[[], None] = lambda: None
        """Called if this rank ends because another one failed: it finishes a checkpoint that all have written."""
        self.step: int | None = None
        """The current optimizer step, from 1; None before the first."""
        self.terminal: TextIO | None = None
        """The terminal of rank 0, if it has one: the progress bar is drawn there, not in the log."""
        self.heart = Heartbeat(run_dir, rank)
        self.swapped = Swapped()
        """The folders on disks that this rank claimed; only a rank without a supervisor claims any."""
        self._stdout, self._stderr = os.dup(1), os.dup(2)
        self._follower: Follower | None = None
        self._folder = contextlib.ExitStack()
        """What watches the run directory of a rank without a supervisor, to the end of its process."""

    def install(self) -> None:
        """Listen for stop signals in a thread: Python's handlers do not run while a collective blocks."""
        if self.rank.supervised:
            # A launcher that was killed cannot end its ranks. The kernel tells them once for each of its threads that
            # outlives another: a second SIGTERM would end them before they have saved, a second SIGUSR2 does nothing.
            die_with_parent(signal.SIGUSR2)
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        for number in heard():
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=self._leave_signals_to_parent)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)  # the launcher blocked signals until now
        self._sockets = (reader, writer)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="stop-signals").start()

    def _leave_signals_to_parent(self) -> None:
        """Make a process that the dataloader forks ignore stop signals.

        torchrun and Slurm send a signal to all processes of a rank, and a rank that stops still needs its batches.
        """
        signal.set_wakeup_fd(-1)
        if self.can_stop_at_a_step:
            signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)

    def take_output(self) -> None:
        """Send the output of this rank to its log; the output of rank 0 is also shown, here or by the supervisor."""
        log = self.run_dir.log_of(self.rank.rank)
        # Open MPI gives rank 0 a terminal of its own, for standard output alone, and copies it wherever mpirun's goes.
        is_drawn = self.rank.supervised or os.isatty(2)
        terminal = send_to(log, is_drawn=is_drawn)
        self.heart.open()
        if self.rank.rank == 0:
            self.terminal = terminal
            if not self.rank.supervised:
                self._follower = Follower(log, self._stdout, self._log_before_failure, is_drawn=is_drawn)
                self._follower.start()

    def watch(self, limits: TimeLimits) -> None:
        """From now on end this rank, with its stacks in its log, if no rank makes progress within the limits."""
        self.heart.watch(limits, self.hang)
        if not self.rank.supervised:  # else the supervisor does it for the ranks of its node
            tell = self._show if self.rank.local_rank == 0 else lambda _: None
            folder_limit_s = limits.of(Phase.SAVES)
            self._folder.enter_context(
                shared_folder.watched(self.run_dir.path, folder_limit_s, lambda: None, tell=tell)
            )

    def hang(self, error: Hang) -> NoReturn:
        """End this rank, with its stacks in its log."""
        self.heart.fail()
        faulthandler.dump_traceback()
        if not self.rank.supervised:  # this rank may write the diagnosis, which reads the others' stacks
            time.sleep(_STACKS_S)
        self._fail(error)

    @contextlib.contextmanager
    def limited(self, limit_s: float, work: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that notes which part of some work this rank begins; it ends as hung after the limit.

        The message names the work and the ranks that are behind.
        """
        timer = threading.Timer(limit_s, self._end_as_hung, [limit_s, work])
        timer.daemon = True
        timer.start()
        try:
            yield self.heart.beat
        finally:
            timer.cancel()

    def _end_as_hung(self, limit_s: float, work: str) -> None:
        self.heart.write()
        time.sleep(_STACKS_S)  # until the others have written too: those that cannot are behind
        last_beats = beats.read_beats(self.run_dir)
        max_count = max((beat.count for beat in last_beats.values()), default=0)
        behind = [beat for _, beat in sorted(last_beats.items()) if beat.count < max_count]
        ranks_behind = some(f"rank {beat.rank} on {beat.host} in {beat.doing}" for beat in behind)
        who = f"{ranks_behind} did not answer" if behind else f"all ranks are in {self.heart.doing}"
        fix = "See the stacks at the end of each rank's log; tuner doctor --nodes measures the same alone."
        self.hang(Hang(f"{work} took longer than {limit_s:g} s: {who}", fix=fix))

    def _log_before_failure(self) -> int | None:
        # A beat needs a file, which a full disk may not have.
        return self.heart.log_bytes if self.heart.log_bytes is not None else beats.log_before_failure(self.run_dir)

    def _listen(self, reader: socket.socket) -> None:
        while True:
            for number in reader.recv(64):
                if number in STOPS:
                    self._request(number)

    def _request(self, number: int) -> None:
        if self._fails and number == signal.SIGTERM and not self.rank.supervised:
            return
        self.heart.write()  # while it waits for a rank that does not stop, it must not look like the slow one
        # At a time limit Slurm sends SIGTERM twice, a second or so apart (seen in 22.05), and SIGKILL after KillWait.
        insists = number in INSISTING and not (number == signal.SIGTERM and self.rank.of_srun)
        insists_again, self._insisted = insists and self._insisted, insists or self._insisted
        # After a failure the process that started the ranks sends SIGTERM to the others: a collective may wait forever.
        if self.run_dir.failures():
            self.heart.fail()
            faulthandler.dump_traceback()  # into the log: the stacks of waiting ranks show which rank was behind
            if not insists_again:
                with contextlib.suppress(Exception):  # the failure of the other rank is the cause
                    self.before_leaving()
            # srun returns the highest exit code: 128 + 15 would hide the code of the rank that failed.
            self._leave(exit_code_of(number) if self.rank.supervised else TunerError.exit_code)
        if not (self.stop_requested or self.can_stop_at_a_step):
            self._requeue(None, number)
        if insists_again or not self.can_stop_at_a_step:
            self._leave(exit_code_of(number))
        self.stop_requested, self._stopped_by = True, number

    def _requeue(self, saved: int | None, number: int | None) -> None:
        """Put the job back into the queue if that is requested; rank 0 does it, and the other ranks wait for it.

        Args:
            saved: The step of the checkpoint that this rank has just saved; None: it ends before training.
            number: The signal that it ends at, if this rank got one.
        """
        if self.job is None:
            return
        if self.rank.rank != 0:
            # Before training no barrier holds the ranks, and srun kills the whole step when the first rank is gone.
            time.sleep(_LET_RANK_0_REQUEUE_S if saved is None else 0)
            return
        try:
            self._requeue_job(self.job, saved, number)
        except TunerError as error:
            self._say(f"Job {self.job.id} is not requeued: {error.what}.")

    def _requeue_job(self, job: Job, saved: int | None, number: int | None) -> None:
        began = self.run_dir.read_run().resume_step or 0
        # Slurm warns of a time limit by the signal of `--signal`, and of a preemption by SIGTERM, while the job runs.
        cause = restarts.PREEMPTED if number == signal.SIGTERM else restarts.TIME_LIMIT
        ended = EndedAttempt(cause=cause, step=self.step, began=began, saved=began if saved is None else saved)
        # Slurm requeues jobs that it kills, but not a job that ends in time after a signal.
        refusal = restarts.requeue_refusal(self.run_dir, job.id, ended, job.max_requeues, job.num_restarts)
        if refusal := refusal or slurm.not_running(job.id):
            self._say(f"Job {job.id} is not requeued: {refusal}.")
            return
        # Printed and written first, because Slurm ends this process when it requeues the job.
        self._say(f"Job {job.id} is requeued after {_SAYS[cause]}: restart {job.num_restarts + 1}.")
        restarts.note_requeue(self.run_dir, job.id, ended)
        slurm.requeue(job.id)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            self._show(line)

    def finish(self, work: Callable[[], None]) -> NoReturn:
        """Do the work, report an error if there is one, and end this process with the right exit code."""
        try:
            work()
        except BaseException as error:
            self._fail(error)
        self._teardown()
        self.heart.end()
        self._wait_at_the_end()
        self._leave(0)

    def _fail(self, error: BaseException) -> NoReturn:
        self._fails = True
        is_first = not self.run_dir.failures()  # later ranks mostly report that they lost the first one
        report = self._report(error)
        self.heart.fail()
        with contextlib.suppress(DiskError):  # a full disk must not hide the first error
            self.run_dir.report_failure(report)
        print(report.message, file=sys.stderr, flush=True)
        exit_code = report.exit_code
        if not self.rank.supervised and is_first and report.origin in (None, self.rank.rank):
            exit_code = self._end_run(report)
        if exit_code == Stopped.exit_code:  # every rank stops at the same step, so all can leave together
            self._requeue(self.step, self._stopped_by)
            self._teardown()
        else:
            self._end_mpirun(report.message if not is_first else "")
        self._wait_at_the_end()
        self._leave(exit_code)

    def _end_mpirun(self, message: str) -> None:
        """Let no mpirun wait for a host that was cut off; show it what the rank that spoke may have said there."""
        rank = self.rank
        has_other_hosts = rank.ranks_here < rank.world_size and not rank.supervised
        if has_other_hosts and rank.local_rank == 0 and (name := end_mpirun(_MPIRUN_S)):
            self._say(f"{message} If {name} still waits for another host in {_MPIRUN_S:.0f} s, it is ended.".lstrip())

    def _report(self, error: BaseException) -> RankReport:
        if isinstance(error, FileNotFoundError | DiskError) and not self.run_dir.run_json.exists():
            fix = "If it has another name now, resume from there."
            error = DiskError(f"{self.run_dir.path} was removed or renamed during the run", fix=fix)
        elif isinstance(error, OSError) and error.filename and is_disk_error(error):
            fix = remedy(error, Path(os.fsdecode(error.filename))) or "Free space there, or name another path."
            error = DiskError(f"cannot use {error.filename}: {error.strerror}", fix=fix)
        if not isinstance(error, TunerError):
            text = without_greeting("".join(traceback.format_exception(error)))
            return RankReport(rank=self.rank.rank, exit_code=TunerError.exit_code, message=text, step=self.step)
        return RankReport(
            rank=self.rank.rank,
            exit_code=error.exit_code,
            message=str(error),
            step=self.step,
            cause=error.code,
            what="\n".join((error.message, *map(str, error.others))),
            origin=error.rank if isinstance(error, NotANumber) else None,  # all ranks name the rank where it began
        )

    def _end_run(self, report: RankReport) -> int:
        """Do what a supervisor would do at the end of a run that is not done; return its exit code."""
        if report.exit_code == Stopped.exit_code:
            exit_code = Stopped.exit_code
            ending.end(self.run_dir, self._show, "stopped", exit_code, report.message)
        else:
            frozen = stopped({rank: beat.pid for rank, beat in beats.here(self.run_dir).items()})
            status = ending.fail(self.run_dir, self._show, Watched(frozen=frozen), own_report=report)
            exit_code = status.exit_code or TunerError.exit_code
            if self.job and self.job.max_restarts:  # the job's script decides whether the run ends here, and tells it
                return exit_code
        self.tell_end(exit_code)
        return exit_code

    def _show(self, text: str) -> None:
        os.write(self._stderr, f"{text}\n".encode())

    def tell_end(self, exit_code: int) -> None:
        """Write the report and start the user's command if there is no supervisor; status.json is written already.

        This rank waits for the command after the job is requeued: between a time limit and SIGKILL there is no time.
        """
        if self._run_has_ended:
            self._wait_at_the_end = self._run_has_ended(self.run_dir, exit_code)

    @staticmethod
    def _teardown() -> None:
        import torch.distributed as dist  # heavy, and a rank may fail before it is loaded

        if dist.is_initialized():
            dist.barrier()

    def _leave(self, exit_code: int) -> NoReturn:
        # After a success torch 2.13's gloo aborts in its destructors in up to half of the runs: skip them.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.flush()
        if self._follower:
            self._follower.stop()
        if self.rank.rank == 0 and not self.rank.supervised:
            lock.release(self.run_dir.path)  # this process took the lock before it became a rank
        self.swapped.let_go()
        os._exit(exit_code)
