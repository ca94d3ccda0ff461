"""What ends a run before its weights are spoilt; the real stages are in tests/faults.

A small class stands in for DeepSpeed's engine in fp16, which it refuses on a CPU.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.refused import refused
from tuner.errors import NotANumber
from tuner.runs.beats import Phase
from tuner.worker.consensus import Interrupted, RankConsensus

INF, NAN = float("inf"), float("nan")


pytestmark = pytest.mark.usefixtures("one_rank")


class _Engine:
    """An engine that skips a step with infinite gradients: as the loss scaler of fp16 wants it, and ZeRO elsewhere."""

    def __init__(self, scale: float = 4.0, *, is_fp16: bool = True) -> None:
        self.module = torch.nn.Linear(2, 1)
        scaler = SimpleNamespace(dynamic_loss_scale=True, cur_scale=scale, min_loss_scale=1.0)
        self.optimizer = SimpleNamespace(loss_scale_config=scaler)
        self.is_fp16, self.is_applied = is_fp16, False

    def fp16_enabled(self) -> bool:
        return self.is_fp16

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        pass

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        gradient = self.module.weight.grad
        assert gradient is not None
        self.is_applied = bool(gradient.isfinite().all())
        self.module.weight.grad = None

    def was_step_applied(self) -> bool:
        return self.is_applied


def _collated(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {"factor": sum(row["factor"] for row in rows)}


class _Trainer(SimpleNamespace):
    """Two micro-batches a step, each of two rows; the factors of the second step's rows are those of their losses."""

    def __init__(self, engine: _Engine, factors: list[float]) -> None:
        super().__init__(deepspeed=engine, model=engine.module, state=SimpleNamespace(global_step=1))
        self.args = SimpleNamespace(gradient_accumulation_steps=2, train_batch_size=2, device="cpu")
        self.state.num_input_tokens_seen = 0
        self.train_dataset = [{"input_ids": [row], "factor": factor} for row, factor in enumerate([1.0] * 4 + factors)]
        self.accelerator = SimpleNamespace(sync_gradients=False)
        self.batches_of_step = [_collated(self.train_dataset[4:6]), _collated(self.train_dataset[6:])]
        self.num_items_of_step, self.num_tokens, self.stream = None, 7, None
        self.compute_loss_context_manager = nullcontext

    steps_per_generation, generates = 1, False

    def compute_loss(self, engine: _Engine, batch: dict[str, float], num_items_in_batch: None) -> torch.Tensor:
        loss: torch.Tensor = (engine.module(torch.ones(2)) * batch["factor"]).sum()
        self.consensus.hear(loss)
        return loss


class _Control:
    should_save = should_training_stop = should_evaluate = False


def _begun(engine: _Engine, *factors: float) -> RankConsensus:
    trainer = _Trainer(engine, list(factors) or [0.5] * 4)
    loader = torch.utils.data.DataLoader(trainer.train_dataset, batch_size=2, collate_fn=_collated)
    loader.set_epoch = lambda _: None  # type: ignore[attr-defined]
    guard: Any = SimpleNamespace(stop_requested=False, step=2, can_stop_at_a_step=False)
    consensus = RankConsensus(trainer, guard, SimpleNamespace(decode=lambda ids: f"row {ids[0]}"))
    consensus.on_train_begin(trainer.args, trainer.state, _Control())
    consensus.on_step_begin(trainer.args, trainer.state, _Control(), train_dataloader=loader)
    return consensus


def _step(consensus: RankConsensus) -> None:
    trainer = consensus.trainer
    for batch in trainer.batches_of_step:
        trainer.accelerator.sync_gradients = batch is trainer.batches_of_step[-1]
        trainer.deepspeed.backward(trainer.compute_loss(trainer.deepspeed, batch, None))
    trainer.deepspeed.step()
    consensus.on_pre_optimizer_step(trainer.args, trainer.state, _Control())


def _spoil(engine: _Engine) -> None:
    """Make the gradient of a loss above 1 infinite, on the way back: the loss is a number."""
    engine.module.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: gradient * (float("inf") if gradient.max() > 1 else 1)
    )


def test_an_infinite_gradient_is_ordinary_in_fp16() -> None:
    engine = _Engine()
    consensus = _begun(engine, 0.5, 0.5, 0.5, 1.5)
    _spoil(engine)

    _step(consensus)

    assert not engine.is_applied


@pytest.mark.parametrize(
    ("engine", "named"),
    [(_Engine(scale=1.0), (2,)), (_Engine(is_fp16=False), ("inf", "step 2", "rank 0", "row 7", "'row 7'"))],
    ids=["the smallest scale", "not fp16: rows are found by taking the step again"],
)
def test_an_infinite_gradient_that_no_scale_may_skip_ends_the_run(engine: _Engine, named: tuple[object, ...]) -> None:
    consensus = _begun(engine, 0.5, 0.5, 0.5, 1.5)
    _spoil(engine)

    with refused(NotANumber, None, *named):
        _step(consensus)


def test_gradients_that_are_infinite_only_together_are_told_as_that() -> None:
    engine = _Engine(is_fp16=False)
    consensus = _begun(engine)
    factors = iter([1.0, INF, 1.0, 1.0])  # the second pass over the step finds nothing in either alone
    engine.module.weight.register_hook(lambda gradient: gradient * next(factors))  # type: ignore[no-untyped-call]

    with refused(NotANumber, None, "all ranks", 2):
        _step(consensus)


@pytest.mark.parametrize(
    ("factors", "rows", "text"),
    [((1.0, NAN), "row 7", "'row 7'"), ((NAN, NAN), "rows 6, 7", "'row 6'"), ((INF, -INF), "rows 6, 7", "'row 6'")],
)
def test_a_loss_that_is_none_ends_the_run_in_fp16_too_and_names_the_rows_that_are_the_cause(
    factors: tuple[float, ...], rows: str, text: str
) -> None:
    consensus = _begun(_Engine(), 1.0, 1.0, *factors)

    with refused(NotANumber, None, "nan", "step 2", "rank 0", rows, text) as caught:
        _step(consensus)

    assert caught.value.rank == 0


def test_rows_that_are_no_number_only_together_are_all_named() -> None:
    engine, most = _Engine(), 3e38
    for weight in engine.module.parameters():
        weight.data.fill_(0.2)
    consensus = _begun(engine, 1.0, 1.0, most, most)

    with refused(NotANumber, None, "inf", "rows 6, 7", "'row 6'", "alone"):
        _step(consensus)


@pytest.mark.parametrize(("is_evaluating", "phase"), [(False, Phase.GENERATION), (True, Phase.VALIDATION)])
def test_completions_of_a_validation_are_no_part_of_a_step(is_evaluating: bool, phase: Phase) -> None:
    consensus, phases = _begun(_Engine()), list[Phase]()
    consensus.trainer.is_evaluating = is_evaluating
    heart: Any = SimpleNamespace(within=lambda phase: phases.append(phase) or nullcontext())
    consensus.guard.heart = heart

    with consensus.generating():
        assert phases == [phase]


def test_the_rows_of_a_loss_over_completions_are_their_prompts() -> None:
    consensus = _begun(_Engine(), 1.0, 1.0, NAN, NAN)
    consensus.trainer.generates = True
    loader: Any = consensus._loader
    loader.batch_sampler.sampler = [SimpleNamespace(row=row // 4 + 5) for row in range(8)]

    with refused(NotANumber, None, "nan", "row 6", "'row 6'"):
        _step(consensus)


def test_a_healthy_step_counts_its_tokens() -> None:
    consensus = _begun(_Engine(is_fp16=False))

    _step(consensus)

    assert consensus.trainer.state.num_input_tokens_seen == 7


def test_weights_that_a_finite_gradient_has_spoilt_are_not_saved() -> None:
    engine, control = _Engine(), _Control()
    consensus = _begun(engine)
    _step(consensus)
    with torch.no_grad():
        engine.module.weight[0, 1] = float("inf")

    consensus.on_step_end(None, SimpleNamespace(global_step=2), control)
    control.should_save = True
    with refused(NotANumber, None, "weights", 2):
        consensus.on_step_end(None, SimpleNamespace(global_step=2), control)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stop_in_the_middle_of_an_epoch_waits_for_no_validation(is_asked: bool) -> None:
    engine, control, state = _Engine(), _Control(), SimpleNamespace(global_step=2)
    consensus = _begun(engine)
    consensus.guard.stop_requested = is_asked
    _step(consensus)

    consensus.on_step_end(None, state, control)
    control.should_evaluate = True  # as transformers does after the loop over an epoch, however that has ended
    consensus.on_epoch_end(None, state, control)

    assert control.should_training_stop is is_asked
    assert control.should_evaluate is not is_asked


def test_a_stop_at_a_step_leaves_its_validation_to_the_resumed_run() -> None:
    control, consensus = _Control(), _begun(_Engine())
    control.should_evaluate = consensus.guard.stop_requested = True
    _step(consensus)

    consensus.on_step_end(None, SimpleNamespace(global_step=2), control)

    assert (control.should_save, control.should_evaluate) == (True, False)


@pytest.mark.parametrize("interrupts", [True, False])
def test_a_stop_leaves_a_validation_and_ends_a_generation_after_a_token(interrupts: bool) -> None:
    consensus, ids_BT = _begun(_Engine()), torch.zeros(3, 5, dtype=torch.long)
    _step(consensus)
    consensus.interrupts = interrupts
    consensus.on_prediction_step(None, consensus.trainer.state, _Control())
    assert consensus.ends_generation(ids_BT).tolist() == [False] * 3

    consensus.guard.stop_requested = True

    assert consensus.ends_generation(ids_BT).tolist() == [interrupts] * 3
    with pytest.raises(Interrupted) if interrupts else nullcontext():
        consensus.on_prediction_step(None, consensus.trainer.state, _Control())


@pytest.mark.parametrize(
    ("step", "generates", "may_stop"), [(0, False, [False, True]), (0, True, [False, False]), (4, True, [True, True])]
)
def test_a_signal_ends_a_rank_at_once_as_long_as_there_is_no_step_to_save(
    step: int, generates: bool, may_stop: list[bool]
) -> None:
    consensus, state = _begun(_Engine()), SimpleNamespace(global_step=step)
    consensus.trainer.generates, seen = generates, []
    for event in (consensus.on_train_begin, consensus.on_epoch_begin):
        event(None, state, _Control())
        seen.append(consensus.guard.can_stop_at_a_step)
    _step(consensus)

    assert seen == may_stop
    assert consensus.guard.can_stop_at_a_step, "the first completions are there"


def test_a_stop_waits_for_all_steps_on_the_same_completions() -> None:
    consensus, stops = _begun(_Engine()), []
    consensus.guard.stop_requested = True
    consensus.trainer.steps_per_generation = 2
    for step in (3, 4):
        _step(consensus)
        control = _Control()
        consensus.on_step_end(None, SimpleNamespace(global_step=step), control)
        stops.append(control.should_training_stop)

    assert stops == [False, True]
    assert consensus.stopped_at == 4
