"""The nodes' launchers meet: real sockets, the nodes in one process, and clocks that run fast."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.place import FAST, PLAN, UNSHARED, Place, at_once, kill, met, ready, silent
from tests.launch.place import place as place
from tests.launch.processes import wait_until
from tests.runs.made_records import run_json
from tuner import __version__
from tuner.errors import Hang, MachineError, RecipeError, Stopped, TunerError, UsageError
from tuner.lab.answering import asked
from tuner.launch.meeting import caller, leader, messages
from tuner.launch.meeting.leader import Leader
from tuner.launch.meeting.messages import Plan
from tuner.launch.meeting.part import Meeting, NodeError, call_key, port_of
from tuner.launch.meeting.secret_lines import Lines, present
from tuner.runs import lock
from tuner.runs.diagnose import OtherNode
from tuner.runs.directory import resume_command

pytestmark = pytest.mark.timeout(30)

HELLO = {
    "kind": "Hello",
    **{"rank": 1, "nodes": 2, "lost": None, "process": {"host": "worker-1", "pid": 1, "instance": "1"}},
}
NO_MESSAGES: tuple[dict[str, Any], ...] = (
    {},
    {"kind": ["Hello"]},
    {"kind": "Message"},
    {"kind": "Hello", "rank": 1, "nodes": 2},
    {**HELLO, "rank": "1"},
    {**HELLO, "process": {"host": "\ud800", "pid": 1, "instance": "1"}},
    {**HELLO, "process": None},
    {"kind": "Beat", "is_adrift": False, "more": 1},
    {"kind": "Planned", "plan": {"command": "", "digest": "", "values": {"a": 1}}, "launch": None},
    {"kind": "Ended", "launch": "first", "code": "1"},
    {"kind": "Ended", "launch": "first", "code": 1, "cause": "a\x1b[2J"},
    {"kind": "Error", "who": "", "texts": ["wrong"], "code": "a", "exit_code": 0},
)


@contextlib.contextmanager
def meanwhile(waits: Callable[..., object], *arguments: object) -> Iterator[None]:
    """Let a node wait in a thread during the block; it waits no longer after it."""
    waiting = threading.Thread(target=waits, args=arguments)
    waiting.start()
    yield
    waiting.join(10)
    assert not waiting.is_alive()


def gone(node: Any, *others: Any, name: str = "node 1") -> None:
    """Kill a node, and end the ranks of the others as soon as they have heard of it."""
    kill(node)
    for each in others:
        wait_until(lambda each=each: each.interruption() is not None)
        each.ended(1, f"{name} is gone", "lost-peer", None)


def go_on(first: Any, *others: Any) -> None:
    """Let node 0 begin the next launch once all are ready; the others hear of it."""
    assert first.await_ends() is None and first.wait() is None
    first.go("second")
    assert at_once(*(each.await_next for each in others)) == [("second", None)] * len(others)


# Before the ranks start


def test_nodes_that_are_ready_get_the_launch_of_node_0(place: Place, tmp_path: Path) -> None:
    met(place, tmp_path / "run", num_nodes=3)

    assert (tmp_path / "run" / "meeting").stat().st_mode & 0o777 == 0o600


def test_a_node_that_starts_first_waits_for_node_0_and_says_what_the_address_answers(
    place: Place, tmp_path: Path
) -> None:
    second = ready(place.node(1), tmp_path)
    with meanwhile(second.wait):
        wait_until(lambda: any("connection refused" in line for line in place.said))

        first = ready(place.node(0), tmp_path)
        first.wait()
        first.go("first")


def test_a_missing_node_is_named_again_and_again_with_growing_pauses_until_the_time_is_over(
    place: Place, tmp_path: Path
) -> None:
    first = ready(place.node(0, start_timeout_s=0.9), tmp_path)

    with pytest.raises(Hang) as caught:
        first.wait()

    assert caught.value.exit_code == 124
    assert 3 <= len(place.said) <= 5, "after 0.05, 0.15, 0.35 and 0.75 s"
    assert all("node 1 of 2" in line and "never seen" in line for line in place.said)


def test_every_node_names_the_one_that_is_missing(place: Place, tmp_path: Path) -> None:
    for rank in (0, 1):
        node = ready(place.node(rank, nodes=3), tmp_path)
    threading.Thread(target=lambda: at_once(node.wait), daemon=True).start()

    wait_until(lambda: any("node 2 of 3" in line and "never seen" in line for line in place.said))
    node.close()


def test_hosts_that_the_hostfile_names_are_named_before_they_were_seen(place: Place, tmp_path: Path) -> None:
    first = ready(place.node(0, start_timeout_s=0.2, names=("here", "worker-2")), tmp_path)

    with pytest.raises(Hang, match="worker-2, never seen"):
        first.wait()


def test_an_address_that_does_not_resolve_is_told(place: Place, tmp_path: Path) -> None:
    second = ready(place.node(1, address="nowhere.invalid"), tmp_path)
    threading.Thread(target=lambda: at_once(second.wait), daemon=True).start()

    wait_until(lambda: any("nowhere.invalid" in line and "does not resolve" in line for line in place.said))
    second.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_the_error_of_one_node_ends_all_with_its_text_code_and_exit_code(
    place: Place, tmp_path: Path, failing: int
) -> None:
    nodes = [place.node(rank, nodes=3) for rank in range(3)]
    for node in nodes:
        if node is not nodes[failing]:
            ready(node, tmp_path)
    others = [node.wait for node in nodes if node is not nodes[failing]]
    error = RecipeError("'nan' is no number", where="--lr", fix="Write 2e-4.")

    _, *ended = at_once(lambda: nodes[failing].fail(error), *others)

    for caught in ended:
        assert isinstance(caught, NodeError)
        assert (caught.code, caught.exit_code) == ("bad-recipe", 2)
        assert str(caught.where).startswith(f"node {failing} (") and "--lr: 'nan' is no number" in caught.message


def test_a_node_that_comes_after_the_error_of_node_0_is_told(place: Place, tmp_path: Path) -> None:
    first = place.node(0, times=FAST._replace(linger=10))
    with meanwhile(first.fail, RecipeError("wrong")):
        second = ready(place.node(1), tmp_path)

        with pytest.raises(NodeError, match="wrong"):
            second.wait()


def test_an_error_of_several_parts_is_told_whole_and_in_bounds(place: Place, tmp_path: Path) -> None:
    first, second = ready(place.node(0), tmp_path), place.node(1)
    error = RecipeError("é" * 100_000)
    error.others = tuple(RecipeError(f"part {number}\x1b[2J" + "é" * 3_000) for number in range(20))

    _, caught = at_once(lambda: second.fail(error), first.wait)

    assert isinstance(caught, NodeError)
    assert 2 <= len([*caught.each()]) <= 8
    assert len(str(caught)) < 20_000 and "\x1b" not in str(caught)


def test_nodes_that_would_run_something_else_are_refused_and_the_difference_is_named(
    place: Place, tmp_path: Path
) -> None:
    first = ready(place.node(0, words=("train", "x")), tmp_path)
    second = ready(place.node(1, words=("train", "x", "--lr", "2e-4")), tmp_path, Plan.of("other", {"lr": 2e-4}))

    for caught in at_once(first.wait, second.wait):
        assert isinstance(caught, TunerError)
        assert caught.exit_code == 2
        assert "lr = 0.0001" in caught.message and "0.0002" in caught.message


def test_a_plan_of_any_size_is_compared(place: Place, tmp_path: Path) -> None:
    values: dict[str, object] = {f"key.{number}": "é" * 200 for number in range(2_000)}
    first = ready(place.node(0), tmp_path, Plan.of("é" * 5_000, values))
    second = ready(place.node(1), tmp_path, Plan.of("é" * 5_000, {**values, "key.999": "other"}))

    for caught in at_once(first.wait, second.wait):
        assert isinstance(caught, TunerError) and "would run something else" in caught.message


def test_two_nodes_of_one_rank_are_named(place: Place, tmp_path: Path) -> None:
    nodes = [ready(place.node(rank, nodes=3), tmp_path) for rank in (0, 1, 1)]

    for caught in at_once(*(node.wait for node in nodes)):
        assert isinstance(caught, TunerError)
        assert (caught.exit_code, "node rank 1" in caught.message) == (2, True)
        assert caught.message.count(", process ") == 2


def test_two_nodes_that_are_both_node_0_are_named_where_one_has_the_address(place: Place, tmp_path: Path) -> None:
    """On a machine of its own the other one listens too, and nobody calls it."""
    first = ready(place.node(0), tmp_path)
    other = Leader(first.topology, first.key, start_timeout_s=30.0, say=place.said.append, times=FAST)
    other._listener = socket.create_server(("127.0.0.1", 0))
    Meeting.listen(other)
    place.nodes.append(other)
    ready(other, tmp_path)

    for caught in at_once(first.wait, other.wait):
        assert isinstance(caught, TunerError)
        assert (caught.exit_code, "two nodes claim node rank 0" in caught.message) == (2, True)


def test_a_node_that_was_started_for_another_number_of_nodes_is_refused(place: Place, tmp_path: Path) -> None:
    first, second = ready(place.node(0), tmp_path), ready(place.node(1, nodes=3), tmp_path)

    for caught in at_once(first.wait, second.wait):
        assert isinstance(caught, TunerError) and caught.exit_code == 2
        assert "one of 3 nodes" in caught.message


def test_a_node_that_ends_before_the_start_may_come_again(place: Place, tmp_path: Path) -> None:
    first, second = ready(place.node(0), tmp_path), place.node(1)
    with meanwhile(first.wait):
        wait_until(lambda: any("not seen the run directory" in line for line in place.said))
        second.close()
        wait_until(lambda: any("gone since" in line for line in place.said))

        ready(place.node(1), tmp_path)


def test_a_port_that_is_taken_is_told(place: Place) -> None:
    with socket.socket() as taken:
        taken.bind(("", place.port + 1))
        taken.listen()

        with pytest.raises(MachineError, match=str(place.port + 1)):
            place.node(0)
    place.nodes.clear()


def test_the_port_is_beside_the_master_port() -> None:
    assert (port_of(29_500), port_of(65_535)) == (29_501, 65_534)


# The shared folder


def test_a_node_that_does_not_see_the_folder_ends_all_in_seconds(place: Place, tmp_path: Path) -> None:
    first, second = (
        ready(place.node(0, times=UNSHARED), tmp_path / "a"),
        ready(place.node(1, times=UNSHARED), tmp_path / "b"),
    )

    for caught in at_once(first.wait, second.wait):
        assert isinstance(caught, TunerError) and caught.exit_code == 2
        assert str(tmp_path / "a") in caught.message and str(tmp_path / "b") in caught.message


def test_another_file_at_the_same_path_is_not_the_shared_folder(place: Place, tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "meeting").write_text(json.dumps({"secret": "ab" * 32}))
    first, second = (
        ready(place.node(0, times=UNSHARED), tmp_path / "a"),
        ready(place.node(1, times=UNSHARED), tmp_path / "b"),
    )

    for caught in at_once(first.wait, second.wait):
        assert isinstance(caught, TunerError) and "another file" in caught.message


def test_a_folder_that_shows_the_file_late_is_waited_for(place: Place, tmp_path: Path) -> None:
    first, _ = ready(place.node(0), tmp_path / "a"), ready(place.node(1), tmp_path / "b")
    with meanwhile(first.wait):
        wait_until(lambda: any("has not seen" in line for line in place.said))

        (tmp_path / "b").symlink_to(tmp_path / "a")


def test_a_start_that_fails_leaves_no_folder(place: Place, tmp_path: Path) -> None:
    first = ready(place.node(0, start_timeout_s=0.1), tmp_path / "run")
    with pytest.raises(Hang):
        first.wait()

    first.close()

    assert not (tmp_path / "run").exists()


# Strangers


def test_a_stranger_reads_a_random_number_and_nothing_else(place: Place, tmp_path: Path) -> None:
    ready(place.node(0), tmp_path)
    proofs = {"folder": "0" * 64, "call": "0" * 64}
    with socket.create_connection(("127.0.0.1", place.port + 1), timeout=10) as stranger:
        stranger.sendall(json.dumps({"random": "1", "proofs": proofs}).encode() + b"\n")
        read = b""
        while data := stranger.recv(4096):
            read += data

    assert json.loads(read).keys() == {"random"}


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"[" * 100_000 + b"\n", b"a" * 1_000_000, b"\xff\n"])
def test_strangers_do_not_keep_the_nodes_from_meeting(place: Place, tmp_path: Path, sent: bytes) -> None:
    first = ready(place.node(0), tmp_path)
    with contextlib.ExitStack() as strangers:
        for _ in range(150):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", place.port + 1), timeout=10))
            stranger.setblocking(False)
            with contextlib.suppress(OSError):
                stranger.send(sent)
        ready(place.node(1), tmp_path)

        assert first.wait() is None


def test_a_stranger_in_node_0s_place_is_not_believed(place: Place, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", place.port + 1)) as fake:
        second = ready(place.node(1, start_timeout_s=0.5), tmp_path)
        taken: list[bytes] = []

        def answer() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = fake.accept()
                    with connection:
                        connection.sendall(b'{"random": "1"}\n')
                        taken.append(connection.recv(65536))
                        connection.sendall(b'{"by": "call", "proof": "00"}\n')

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(Hang, match="not node 0 of this run"):
            second.wait()
        fake.shutdown(socket.SHUT_RDWR)

    assert taken and all(json.loads(hello).keys() == {"random", "proofs"} for hello in taken)


def test_who_knows_another_command_and_no_folder_is_turned_away_and_the_start_goes_on(
    place: Place, tmp_path: Path
) -> None:
    first = ready(place.node(0, words=("train", "x")), tmp_path / "a")
    stranger = place.node(1, words=("train", "y"))
    stranger.fail(RecipeError("wrong"))
    with meanwhile(first.wait):
        wait_until(lambda: any("turned away: 127.0.0.1" in line for line in place.said))
        stranger.close()

        ready(place.node(1, words=("train", "x", "--node-rank", "1")), tmp_path / "a")


def test_the_key_of_the_call_is_the_same_for_every_node_rank_and_no_other_command() -> None:
    keys = {
        call_key("", ["train", "x", *words], 29_500)
        for words in (["--node-rank", "0"], ["--node-rank=1"], ["--node-rank", "1"], [])
    }
    assert len(keys) == 1
    assert call_key("", ["train", "y"], 29_500) not in keys
    assert call_key("sent", ["train", "x"], 29_500) not in keys


def test_lines_that_are_no_messages_end_their_connection_and_nothing_else(place: Place, tmp_path: Path) -> None:
    first, failures = ready(place.node(0), tmp_path), list[object]()
    first.loop.set_exception_handler(lambda _, context: failures.append(context))

    async def call(*sent: dict[str, Any]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", place.port + 1)
        lines = await present(reader, writer, {"call": first.key})
        for line in sent:
            lines.send({"version": __version__, **line})
        while await asyncio.wait_for(reader.read(4096), 10):  # until node 0 closes it
            pass
        writer.close()

    for line in NO_MESSAGES:
        asyncio.run(call(line))
        asyncio.run(call(HELLO, line))
    ready(place.node(1), tmp_path)

    assert first.wait() is None
    assert not failures


async def present_with_another_version(*arguments: Any) -> Lines:
    """Return the lines of a node that has another version of tuner."""
    lines = await present(*arguments)
    send, read = lines.send, lines.read

    async def read_from_another(timeout_s: float) -> dict[str, Any]:
        return {**await read(timeout_s), "version": "0.0.9"}

    lines.send = lambda message: send({**message, "version": "0.0.9"})  # type: ignore[method-assign]
    lines.read = read_from_another  # type: ignore[method-assign]
    return lines


def test_nodes_with_different_versions_of_tuner_refuse_each_other(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caller, "present", present_with_another_version)
    first, second = ready(place.node(0), tmp_path), ready(place.node(1), tmp_path)

    for caught in at_once(first.wait, second.wait):
        assert isinstance(caught, UsageError)
        assert "127.0.0.1 has tuner 0.0.9" in caught.message and f"has {__version__}" in caught.message


def test_a_run_at_work_refuses_a_node_with_another_version_and_goes_on(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = met(place, tmp_path)
    monkeypatch.setattr(caller, "present", present_with_another_version)

    with pytest.raises(UsageError, match=r"has tuner 0\.0\.9"):
        ready(place.node(1), tmp_path).wait()

    assert first.interruption() is None and second.interruption() is None


def test_two_nodes_0_with_different_versions_of_tuner_refuse_each_other(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader, "present", present_with_another_version)

    caught = at_once(ready(place.node(0), tmp_path).wait)[0]

    assert isinstance(caught, UsageError) and "has tuner 0.0.9" in caught.message


# While the ranks run


def test_a_node_whose_launcher_is_gone_is_named_to_all_others_within_seconds(place: Place, tmp_path: Path) -> None:
    first, second, third = met(place, tmp_path, num_nodes=3)

    kill(third)

    for node in (first, second):
        wait_until(lambda node=node: node.interruption() is not None)
        assert (node.interruption().cause, "node 2 (" in node.interruption().text) == ("lost-peer", True)


def test_a_node_that_falls_silent_is_gone(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path, times=FAST._replace(silent=0.4))

    second.loop.call_soon_threadsafe(time.sleep, 1)

    wait_until(lambda: first.interruption() is not None)


def test_a_connection_that_breaks_for_a_moment_ends_nothing(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)
    lines = second._lines

    second.loop.call_soon_threadsafe(lines.close)

    wait_until(lambda: second._lines not in (None, lines) and first._nodes[1].lines is not None)
    time.sleep(2 * FAST.back)
    assert first.interruption() is None and second.interruption() is None


def test_who_has_started_the_nodes_over_ssh_is_told_which_answer_and_nobody_else(place: Place, tmp_path: Path) -> None:
    first, second, third = met(place, tmp_path, num_nodes=3, sent="secret")

    def answering(secret: str) -> list[int]:
        return asyncio.run(asked("127.0.0.1", place.port + 1, secret))

    assert (answering("secret"), answering("other")) == ([0, 1, 2], [])
    kill(third)
    wait_until(lambda: answering("secret") == [0, 1])
    second.ended(0, "", None, None)
    wait_until(lambda: bool(first._nodes[1].ended))
    second.close()
    wait_until(lambda: first._is_lost(first._nodes[1]))
    assert answering("secret") == [0, 1], "it has told its end, and is not lost"


def test_a_run_is_abandoned_when_no_node_has_its_ssh_connection_any_more(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)

    first.is_adrift = True
    time.sleep(4 * FAST.again)
    assert not first.is_abandoned
    second.is_adrift = True

    wait_until(lambda: first.is_abandoned)
    assert not second.is_abandoned, "one node stops, and all ranks stop with its"
    for waits in (first.wait, first.await_ends):
        with pytest.raises(Stopped) as caught:
            waits()
        assert caught.value.exit_code == 128 + signal.SIGHUP


def test_another_node_writes_the_status_where_node_0_is_gone(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path / "run")
    assert (first.keeps_status, second.keeps_status) == (True, False)

    kill(first)
    wait_until(lambda: second.keeps_status)

    (tmp_path / "run").mkdir(exist_ok=True)
    (tmp_path / "run" / "run.json").write_text(run_json(launch_id="a later launch"))
    assert not second.keeps_status, "it stood still, and the run has been resumed without it"


def test_a_node_0_whose_place_a_spare_has_taken_leaves_the_status_to_it(place: Place, tmp_path: Path) -> None:
    first, _ = met(place, tmp_path)
    lock.take(tmp_path, os.environ)
    assert first.keeps_status

    holder = json.loads((tmp_path / lock.NAME).read_text())
    (tmp_path / lock.NAME).write_text(json.dumps({**holder, "host": "spare"}))

    assert not first.keeps_status


def test_a_node_0_whose_ssh_connection_is_gone_does_not_wait_for_a_node_that_is_gone_too(
    place: Place, tmp_path: Path
) -> None:
    first, second = met(place, tmp_path)
    first.is_adrift = True
    kill(second)
    wait_until(lambda: first.interruption() is not None)
    first.ended(1, "", None, None)

    (stopped,) = at_once(first.wait)

    assert isinstance(stopped, Stopped)


def test_nodes_that_end_well_interrupt_nobody(place: Place, tmp_path: Path) -> None:
    first, second, third = met(place, tmp_path, num_nodes=3)

    third.ended(0, "", None, None)
    third.close()
    first.ended(75, "stopped", None, None)
    first.close()

    time.sleep(2 * FAST.back)
    assert second.interruption() is None


def test_the_failure_of_a_nodes_ranks_ends_those_of_all_others_with_its_code(place: Place, tmp_path: Path) -> None:
    first, second, third = met(place, tmp_path, num_nodes=3)

    third.ended(137, "rank 2 was killed by SIGKILL", "killed", None)

    for node in (first, second):
        wait_until(lambda node=node: node.interruption() is not None)
        assert (node.interruption().cause, node.interruption().exit_code) == ("killed", 137)
        assert node.interruption().text.startswith("node 2 (") and "rank 2 was killed" in node.interruption().text


def test_a_run_at_work_refuses_a_second_node_of_a_rank_and_goes_on(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)

    with pytest.raises(NodeError, match="two nodes claim node rank 1"):
        ready(place.node(1), tmp_path).wait()

    assert first.interruption() is None and second.interruption() is None


def test_who_knows_the_command_alone_cannot_end_a_run_at_work(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)

    place.node(1).fail(RecipeError("wrong"))

    assert first.interruption() is None and second.interruption() is None


# Between two attempts


def test_after_a_failure_all_go_on_in_the_next_launch(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)
    second.ended(137, "killed", "killed", None)
    wait_until(lambda: first.interruption() is not None)
    first.ended(137, "killed", "killed", None)

    go_on(first, second)

    assert first.interruption() is None and second.interruption() is None


def test_a_node_whose_ranks_do_not_end_is_named_again_and_again(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)
    first.ended(137, "killed", "killed", None)
    with meanwhile(first.await_ends):
        wait_until(lambda: sum("node 1 (" in line for line in place.said) == 2)

        second.ended(137, "killed", "killed", None)


def test_the_objection_of_one_node_is_what_node_0_hears(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)
    second.ended(2, "wrong", "bad-data", "node 1 ended with code 2")
    first.ended(2, "wrong", "bad-data", None)

    assert first.await_ends() == "node 1 ended with code 2"
    first.refuse("node 1 ended with code 2")

    assert second.await_next() == (None, "node 1 ended with code 2")


def test_after_a_node_was_lost_node_0_waits_for_one_that_takes_its_place(place: Place, tmp_path: Path) -> None:
    first, second, third = met(place, tmp_path, num_nodes=3)
    gone(third, first, second, name="node 2")
    assert first.await_ends() is None
    assert [name for name, _ in first._missing()] == ["node 2"]

    go_on(first, second, ready(place.node(2, nodes=3), tmp_path))


def test_a_node_that_comes_back_before_it_was_missed_ends_the_attempt_and_is_taken_into_the_next(
    place: Place, tmp_path: Path
) -> None:
    first, second = met(place, tmp_path)
    kill(second)
    again = ready(place.node(1), tmp_path)

    wait_until(lambda: first.interruption() is not None)
    first.ended(1, "node 1 is gone", "lost-peer", None)

    go_on(first, again)


def lose(first: Any, rank: int) -> None:
    """Let node 0 lose a node whose command and ranks go on, as one that was suspended for a while."""
    node = first._nodes[rank]
    lines = node.lines
    first.loop.call_soon_threadsafe(lambda: (first._lose(node), lines.close()))
    wait_until(lambda: node.lines not in (None, lines) and first.interruption() is not None)


def test_a_lost_node_that_calls_again_stops_its_ranks_before_it_counts_as_ready(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path, times=FAST._replace(back=20))
    lose(first, 1)
    first.ended(1, "node 1 is gone", "lost-peer", None)
    assert first.await_ends() is None

    wait_until(lambda: second.interruption() is not None)

    read_late = messages.Planned(plan=PLAN, launch=None)
    first._hear(first._nodes[1], first._nodes[1].lines, read_late)  # it was sent before the launch
    assert [name for name, _ in first._missing()] == ["node 1"], "its ranks have not ended"
    second.ended(1, "node 1 is gone", "lost-peer", None)
    go_on(first, second)
    assert second.interruption() is None


def test_after_a_stop_of_all_ranks_a_node_that_is_gone_is_named(place: Place, tmp_path: Path) -> None:
    first, second, third = met(place, tmp_path, num_nodes=3, times=FAST._replace(back=0.3))
    third._call = silent  # killed
    first.loop.call_soon_threadsafe(first._nodes[2].lines.close)

    words = at_once(first.await_word, second.await_word)

    assert all(isinstance(word, OtherNode) and word.text.startswith("node 2 (") for word in words)


def test_after_a_stop_that_another_node_was_asked_for_nobody_waits(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path, times=FAST._replace(back=60))
    second.ended(75, "stopped", None, "node 1 ended with code 75")
    assert first.await_word() is None
    first.close()
    assert second.await_word() is None


def test_a_node_that_others_have_gone_on_without_stops_its_ranks_and_stands_by(place: Place, tmp_path: Path) -> None:
    times = FAST._replace(back=20, settled=0.2)
    first, second, third = met(place, tmp_path, num_nodes=3, min_nodes=2, times=times)
    node = first._nodes[2]
    third._call, calls = silent, third._call  # cut off
    first.loop.call_soon_threadsafe(lambda: (first._lose(node), node.lines.close()))
    for each in (first, second):
        wait_until(lambda each=each: each.interruption() is not None)
        each.ended(1, "node 2 is gone", "lost-peer", None)
    go_on(first, second)

    third._call = calls

    wait_until(lambda: third.interruption() is not None)
    assert not node.is_ready
    third.ended(1, "it was left behind", "lost-peer", None)
    wait_until(lambda: node.is_ready)
    assert first.interruption() is None and third._stands_by


def test_nodes_that_lost_node_0_meet_again_where_it_is_started_anew(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)
    secret = (tmp_path / "meeting").read_bytes()
    kill(first)
    (tmp_path / "meeting").write_bytes(secret)  # as a killed process leaves it
    wait_until(lambda: second.interruption() is not None)
    assert second.interruption().text.startswith("node 0 (")
    second.ended(1, "node 0 is gone", "lost-peer", None)

    host, pid = socket.gethostname(), os.getpid()
    first = place.node(0)
    wait_until(lambda: second._shown is not None)  # before the new node 0 has planned, and can know what it is shown
    ready(first, tmp_path)
    first.wait()
    assert first.vouches(host, pid), "so that a spare may take the lock of the lost one"
    assert not first.vouches(host, pid + 1) and not first.vouches("elsewhere", pid)
    first.go("first")

    assert second.await_next() == ("first", None)


def test_a_node_0_that_nobody_has_lost_is_not_vouched_for(place: Place, tmp_path: Path) -> None:
    first, _ = met(place, tmp_path)

    assert not first.vouches(socket.gethostname(), os.getpid())


def test_a_second_start_leaves_the_secret_of_a_run_at_work_as_it_is(place: Place, tmp_path: Path) -> None:
    met(place, tmp_path)
    lock.take(tmp_path, {})
    secret = (tmp_path / "meeting").read_text()
    other = Place()

    ready(other.node(0), tmp_path).close()

    assert (tmp_path / "meeting").read_text() == secret
    lock.release(tmp_path)


def test_a_newcomer_that_does_not_fit_is_refused_alone_between_two_attempts(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)
    gone(second, first)

    with pytest.raises(NodeError, match="lr = "):
        ready(place.node(1), tmp_path, Plan.of("other", {"lr": 2e-4})).wait()
    with pytest.raises(NodeError, match="one of 3 nodes"):
        ready(place.node(1, nodes=3), tmp_path).wait()
    for _ in range(2):
        place.nodes.pop().close()
    place.node(1).fail(RecipeError("wrong"))
    place.nodes.pop().close()

    go_on(first, ready(place.node(1), tmp_path))


def test_a_node_that_prepares_is_interrupted_by_the_error_of_another(place: Place) -> None:
    first, second = place.node(0), place.node(1)
    failing = threading.Timer(0.2, second.fail, [RecipeError("wrong")])
    failing.start()

    began_s = time.monotonic()
    with pytest.raises(NodeError, match="wrong"), first.interrupting():
        time.sleep(25)
    assert time.monotonic() - began_s < 20
    failing.join()


def test_an_error_of_another_node_at_the_end_of_the_preparation_is_no_ctrl_c(place: Place) -> None:
    first, changed = place.node(0), threading.Condition()

    class Late:
        """A lock for which the main thread waits while the network's thread interrupts it."""

        def __enter__(self) -> None:
            first.changed, first.error_of_all = changed, NodeError("wrong")
            raise KeyboardInterrupt

        def __exit__(self, *_: object) -> None: ...

    with pytest.raises(NodeError, match="wrong"), first.interrupting():
        first.changed = Late()


def test_while_ranks_run_the_error_of_another_node_is_a_word_for_the_supervisor(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path)

    with pytest.raises(NodeError), first.interrupting():
        second.fail(MachineError("broken"))
        wait_until(lambda: first.interruption() is not None)
        assert first.interruption().exit_code == 3


# Fewer nodes than there could be: --nnodes MIN:MAX

SOON = FAST._replace(settled=0.5)


def two_of_three(place: Place, folder: Path) -> list[Any]:
    """Return two nodes that run without the third."""
    nodes = [ready(place.node(rank, nodes=3, min_nodes=2, times=SOON), folder) for rank in (0, 1)]
    assert at_once(nodes[0].wait) == [None]
    nodes[0].go("first")
    assert at_once(nodes[1].wait) == ["first"]
    return nodes


def test_all_nodes_begin_at_once(place: Place, tmp_path: Path) -> None:
    nodes = met(place, tmp_path, num_nodes=3, min_nodes=2, times=FAST._replace(settled=600.0))

    assert [node.place.num_nodes for node in nodes] == [3, 3, 3]


def test_nodes_that_are_enough_begin_when_none_has_come_for_a_while(place: Place, tmp_path: Path) -> None:
    nodes = [ready(place.node(rank, nodes=3, min_nodes=2, times=SOON), tmp_path) for rank in (0, 2)]

    assert at_once(nodes[0].wait) == [None]
    nodes[0].go("first")
    assert at_once(nodes[1].wait) == ["first"]

    assert [node.place.node_rank for node in nodes] == [0, 1], "those that are there are counted"
    assert [node.place.world_size for node in nodes] == [2, 2]
    assert any("node 1" in line and "never seen" in line for line in place.said)


def test_too_few_nodes_and_numbers_that_are_refused_wait_until_the_time_is_over(place: Place, tmp_path: Path) -> None:
    nodes = [place.node(rank, nodes=4, min_nodes=2, times=SOON, start_timeout_s=1.5) for rank in (0, 1, 2)]
    first, second, third = (ready(node, tmp_path) for node in nodes)
    third.close()
    wait_until(lambda: first._nodes[2].is_gone and first._nodes[1].is_ready)

    with pytest.raises(Hang):
        first.wait(refused={2})
    second.close()
    wait_until(lambda: first._nodes[1].is_gone)
    with pytest.raises(Hang):
        first.wait()


def test_a_restart_that_waits_in_vain_tells_each_node_what_to_type(place: Place, tmp_path: Path) -> None:
    first, second = met(place, tmp_path, times=FAST._replace(back=0.1))
    gone(second, first)
    assert first.await_ends() is None
    first._timeout_s = 0.3

    with pytest.raises(Hang) as caught:
        first.wait()

    assert resume_command(tmp_path) in str(caught.value.fix)


def test_a_node_that_comes_while_the_others_train_joins_at_their_next_restart(place: Place, tmp_path: Path) -> None:
    first, second = two_of_three(place, tmp_path)
    late = ready(place.node(2, nodes=3, min_nodes=2, times=SOON), tmp_path)
    waiting: list[object] = []
    thread = threading.Thread(target=lambda: waiting.extend(at_once(late.wait)))
    thread.start()
    wait_until(lambda: any("trains on 2 nodes" in line for line in place.said))
    wait_until(lambda: late._stands_by)
    late._timeout_s = 0.2
    time.sleep(0.6)
    assert not waiting, "the start's time limit is not for a node that stands by"

    for node in (first, second):
        node.ended(1, "killed", "killed", None)
    wait_until(lambda: late._runs_on == 0)
    late._timeout_s = 30.0
    go_on(first, second)

    thread.join(10)
    assert waiting == ["second"]
    assert [node.place.node_rank for node in (first, second, late)] == [0, 1, 2]


def test_a_node_that_is_lost_is_left_out_of_the_next_attempt(place: Place, tmp_path: Path) -> None:
    first = ready(place.node(0, nodes=3, min_nodes=2, times=FAST._replace(settled=0.5)), tmp_path)
    with meanwhile(first.wait):
        wait_until(lambda: first._ready == (0,))
        second, third = (ready(place.node(rank, nodes=3, min_nodes=2), tmp_path) for rank in (1, 2))
    first.go("first")
    assert at_once(second.wait, third.wait) == ["first", "first"]

    gone(second, first, third)
    assert first.await_ends() is None
    began_s = time.monotonic()
    assert at_once(first.wait) == [None]
    assert time.monotonic() - began_s >= 0.5, "it may come back"
    first.go("second")

    assert at_once(third.wait) == ["second"]
    assert first.members == third.members == (0, 2)


@pytest.mark.parametrize("end", ["done", "failed", "refused"])
def test_a_node_that_stands_by_ends_as_the_run_does_and_with_its_reason(place: Place, tmp_path: Path, end: str) -> None:
    first, second = two_of_three(place, tmp_path)
    late = ready(place.node(2, nodes=3, min_nodes=2, times=SOON), tmp_path)
    wait_until(lambda: late._stands_by)

    if end == "refused":
        first.refuse("it ended twice in step 4")
    else:
        first.ended(int(end == "failed"), "", None, None)
        first.close()

    (ended,) = at_once(late.wait)
    assert ended is None if end == "done" else isinstance(ended, NodeError)
    assert ("twice in step 4" in str(ended)) is (end == "refused")
    second.close()
