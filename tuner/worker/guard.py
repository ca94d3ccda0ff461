"""How a rank ends: stop requests, reports of failures, and a teardown that does not abort.

It knows nothing of training; `train` asks it at each step's end whether to stop.
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
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, TextIO

from tuner.errors import DiskError, Hang, NotANumber, Stopped, TunerError
from tuner.machine import slurm
from tuner.machine.kernel import die_with_parent, heard, stopped
from tuner.machine.slurm import Job
from tuner.machine.topology import Rank
from tuner.runs import attempts, beats, lock
from tuner.runs.diagnose import diagnose
from tuner.runs.directory import RunDirectory, State
from tuner.runs.evidence import gather
from tuner.runs.follow import Follower
from tuner.runs.swapped import Swapped
from tuner.worker.heartbeat import Heartbeat
from tuner.worker.process import send_to

_INSISTING = (signal.SIGTERM, signal.SIGINT)
"""Asked twice by one of them, a rank ends at once. Slurm may send USR2 after SIGTERM, and SIGTERM after USR2."""
_STOPS = (*_INSISTING, signal.SIGHUP, signal.SIGUSR2)
_LET_RANK_0_REQUEUE_S = 3
_STACKS_S = 2.0
"""All ranks that wait in vain notice it within this time, and leave their stacks."""


class Guard:
    """Watches one rank's signals and decides its exit code."""

    def __init__(
        self,
        run: RunDirectory,
        rank: Rank,
        job: Job | None = None,
        tell_end: Callable[[RunDirectory, int], Callable[[], None]] | None = None,
    ) -> None:
        self.run, self.rank, self.job = run, rank, job
        self._tell_end = tell_end
        """What a run ends with where nobody supervises it; it returns what to wait for at the very end."""
        self._wait_at_the_end: Callable[[], None] = lambda: None
        self.stop_requested = False
        self._insisted = False
        self.can_stop_at_a_step = False
        """True while training: before it there is no step to finish, and a signal ends the rank at once."""
        self.before_leaving: Callable[[], None] = lambda: None
        """What a rank does first that ends because another one failed: a checkpoint that all have written is kept."""
        self.step: int | None = None
        """The optimizer step at work, from 1; None before the first."""
        self.terminal: TextIO | None = None
        """Rank 0's terminal, where it has one: a progress bar goes there and not into the log."""
        self.heart = Heartbeat(run, rank)
        self.swapped = Swapped()
        """The folders on disks that this rank claimed, where nobody supervises it."""
        self._shown, self._told = os.dup(1), os.dup(2)
        self._follower: Follower | None = None

    def install(self) -> None:
        """Listen for stop signals in a thread of their own: Python's handlers wait while a collective blocks."""
        if self.rank.supervised:
            die_with_parent()  # a launcher that was killed cannot end its ranks
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        for number in heard(_STOPS):
            signal.signal(number, lambda *_: None)
        os.register_at_fork(after_in_child=self._leave_signals_to_parent)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)  # `start` has held back what came before this
        self._sockets = (reader, writer)
        threading.Thread(target=self._listen, args=(reader,), daemon=True, name="stop-signals").start()

    def _leave_signals_to_parent(self) -> None:
        """Keep a process that the dataloader forks from telling this rank's signals again, and from ending by them.

        torchrun and Slurm send a signal to all of a rank's processes, and a rank that stops still needs its batches.
        """
        signal.set_wakeup_fd(-1)
        if self.can_stop_at_a_step:
            signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)

    def take_output(self) -> None:
        """Send all that this rank prints into its log; what rank 0 prints is shown too, here or by its supervisor."""
        log = self.run.ranks / f"{self.rank.rank}.log"
        terminal = send_to(log)
        self.heart.open()
        if self.rank.rank == 0:
            self.terminal = terminal
            if not self.rank.supervised:
                self._follower = Follower(log, self._shown, lambda: self.heart.has_failed or self._has_failed())
                self._follower.start()

    def watch(self, limit_s: float) -> None:
        """From now on, end this rank with its stacks in its log once no rank makes progress for so long."""
        self.heart.watch(limit_s, self._hang)

    def _hang(self, error: Hang) -> NoReturn:
        faulthandler.dump_traceback()
        if not self.rank.supervised:  # this rank may be the one that tells, and the others' stacks say who lagged
            time.sleep(_STACKS_S)
        self._fail(error)

    def _has_failed(self) -> bool:
        return bool(self.run.failures())

    def _listen(self, reader: socket.socket) -> None:
        while True:
            for number in reader.recv(64):
                if number in _STOPS:
                    self._request(number)

    def _request(self, number: int) -> None:
        self.heart.write()  # a rank that now waits for one that does not stop must not look like the one behind
        # After a failed rank torchrun sends SIGTERM to the others, which may wait for it in a collective for ever.
        peer_failed = self._has_failed()
        if peer_failed:
            faulthandler.dump_traceback()  # into the log: of ranks that waited in vain it tells who lagged
        if not (self.stop_requested or peer_failed or self.can_stop_at_a_step):
            self._requeue(None)
        # At a time limit Slurm sends SIGTERM twice, a second or so apart (seen in 22.05), and SIGKILL after KillWait.
        insists = number in _INSISTING and not (number == signal.SIGTERM and self.rank.of_srun)
        again, self._insisted = insists and self._insisted, insists or self._insisted
        if peer_failed and not again:
            with contextlib.suppress(Exception):  # the other's failure is the cause
                self.before_leaving()
        if again or peer_failed or not self.can_stop_at_a_step:
            # srun returns the highest code of all: 128 + 15 would hide that of the rank that failed.
            self._leave(TunerError.exit_code if peer_failed and not self.rank.supervised else 128 + number)
        self.stop_requested = True

    def _requeue(self, saved: int | None) -> None:
        """On rank 0 put the job back into the queue, where that was asked for; the others give it the time."""
        if self.job is None:
            return
        if self.rank.rank != 0:
            # Before training no barrier holds them, and srun kills the whole step when the first of them is gone.
            time.sleep(_LET_RANK_0_REQUEUE_S if saved is None else 0)
            return
        try:
            self._requeue_job(self.job, saved)
        except TunerError as error:
            self._say(f"Job {self.job.id} is not requeued: {error.what}.")

    def _requeue_job(self, job: Job, saved: int | None) -> None:
        # Slurm does it by itself for what it kills, but not for a job that ends in time after a signal.
        refusal = attempts.refusal(self.run, job.num_restarts, job.max_requeues, saved) or slurm.not_running(job.id)
        if refusal:
            self._say(f"Job {job.id} is not requeued: {refusal}.")
            return
        # Said before: Slurm ends this process for it.
        self._say(f"Job {job.id} is requeued: restart {job.num_restarts + 1} of at most {job.max_requeues}.")
        slurm.requeue(job.id)

    def _say(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        with contextlib.suppress(OSError):
            os.write(self._told, f"{line}\n".encode())

    def finish(self, work: Callable[[], None]) -> NoReturn:
        """Do the work and end this process with the right exit code, reporting what went wrong."""
        try:
            work()
        except BaseException as error:
            self._fail(error)
        self._teardown()
        self.heart.end()
        self._wait_at_the_end()
        self._leave(0)

    def _fail(self, error: BaseException) -> NoReturn:
        is_first = not self._has_failed()  # what ranks say after the first one is mostly that they lost it
        report = self._report(error)
        self.heart.fail()
        with contextlib.suppress(DiskError):  # a full disk must not hide what went wrong before
            self.run.report_failure(**report)
        print(report["message"], file=sys.stderr, flush=True)
        exit_code = int(report["exit_code"])
        if not self.rank.supervised and is_first and report.get("origin", self.rank.rank) == self.rank.rank:
            exit_code = self._tell(report)
        if exit_code == Stopped.exit_code:  # every rank stops at the same step, so all can leave together
            self._requeue(self.step)
            self._teardown()
        self._wait_at_the_end()
        self._leave(exit_code)

    def _report(self, error: BaseException) -> dict[str, Any]:
        report: dict[str, Any] = {"rank": self.rank.rank, "step": self.step}
        if isinstance(error, NotANumber):  # all ranks say the same of the one that it began on
            report["origin"] = error.rank
        if isinstance(error, TunerError):
            what = "\n".join((error.message, *map(str, error.others)))
            return {**report, "exit_code": error.exit_code, "cause": error.code, "what": what, "message": str(error)}
        text = "".join(traceback.format_exception(error))
        return {**report, "exit_code": TunerError.exit_code, "message": text}

    def _tell(self, report: dict[str, Any]) -> int:
        """Say why the run ends, where no supervisor does, and return its exit code."""
        exit_code, message = int(report["exit_code"]), str(report["message"])
        text, facts = f"rank {self.rank.rank}: {message}", {}
        state: State = "stopped"
        if exit_code != Stopped.exit_code:
            frozen = stopped({rank: beat.pid for rank, beat in beats.here(self.run).items()})
            evidence = gather(self.run, stopped=frozen)
            found = diagnose(evidence if evidence.reports else replace(evidence, reports=[report]))
            text, state, exit_code, message = found.text, "failed", found.exit_code, found.message
            facts = {"diagnosis": found.to_json()}
        with contextlib.suppress(OSError, DiskError):
            os.write(self._told, f"{text}\n".encode())
            self.run.write_status(state, exit_code=exit_code, message=message, **facts)
        self.ended(exit_code)
        return exit_code

    def ended(self, exit_code: int) -> None:
        """Write the report and start the user's command, where no supervisor does; status.json says how the run ended.

        The command is waited for when the job is back in its queue: between a time limit and SIGKILL there is no time.
        """
        if self._tell_end:
            self._wait_at_the_end = self._tell_end(self.run, exit_code)

    @staticmethod
    def _teardown() -> None:
        import torch.distributed as dist  # heavy; not needed by a rank that fails before it is loaded

        if dist.is_initialized():
            dist.barrier()

    def _leave(self, exit_code: int) -> NoReturn:
        # torch 2.13's gloo aborts in its destructors after success in up to half of the runs: skip them.
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.flush()
        if self._follower:
            self._follower.stop()
        if self.rank.rank == 0 and not self.rank.supervised:
            lock.release(self.run.path)  # taken by this process before it became a rank
        self.swapped.let_go()
        os._exit(exit_code)
