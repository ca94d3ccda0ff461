"""What ends a run before its weights are spoilt; the real stages are in tests/faults.

A small class stands in for DeepSpeed's engine in fp16, which it refuses on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tuner.errors import NotANumber
from tuner.worker.agree import Agree


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class _Engine:
    """An engine in fp16: a step that overflows is skipped, as the loss scaler wants it."""

    def __init__(self, scale: float = 4.0) -> None:
        self.module = torch.nn.Linear(2, 1)
        scaler = SimpleNamespace(dynamic_loss_scale=True, cur_scale=scale, min_loss_scale=1.0)
        self.optimizer = SimpleNamespace(overflow=False, loss_scale_config=scaler)

    def fp16_enabled(self) -> bool:
        return True

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        gradient = self.module.weight.grad
        assert gradient is not None
        self.optimizer.overflow = not bool(gradient.isfinite().all())


class _Control:
    should_save = should_training_stop = should_evaluate = False


def _begun(engine: _Engine) -> Agree:
    loader = torch.utils.data.DataLoader(range(4), batch_size=2)  # type: ignore[arg-type, var-annotated]
    loader.set_epoch = lambda _: None  # type: ignore[attr-defined]
    rows = [{"input_ids": [row]} for row in range(4)]
    arguments = SimpleNamespace(gradient_accumulation_steps=1, device="cpu")
    state = SimpleNamespace(global_step=1)
    trainer = SimpleNamespace(deepspeed=engine, model=engine.module, args=arguments, state=state, train_dataset=rows)
    guard: Any = SimpleNamespace(stop_requested=False, step=2, can_stop_at_a_step=False)
    agree = Agree(trainer, guard, SimpleNamespace(decode=lambda ids: f"row {ids[0]}"))
    agree.on_train_begin(arguments, state, _Control())
    agree.on_step_begin(arguments, state, _Control(), train_dataloader=loader)
    return agree


def _step(engine: _Engine, factor: float) -> None:
    engine.backward((engine.module(torch.ones(2)) * factor).sum())
    engine.step()


def test_an_infinite_gradient_is_ordinary_in_fp16() -> None:
    engine = _Engine()
    _begun(engine)
    engine.module.weight.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]

    _step(engine, 1.0)

    assert engine.optimizer.overflow


def test_an_infinite_gradient_at_the_smallest_scale_ends_the_run() -> None:
    engine = _Engine(scale=1.0)
    _begun(engine)
    engine.module.weight.register_hook(lambda gradient: gradient * float("inf"))  # type: ignore[no-untyped-call]

    with pytest.raises(NotANumber, match="at the smallest loss scale in step 2"):
        _step(engine, 1.0)


def test_a_loss_that_is_none_ends_the_run_in_fp16_too_and_names_its_rows() -> None:
    engine = _Engine()
    _begun(engine)

    with pytest.raises(
        NotANumber, match=r"loss is nan in step 2 on rank 0, from rows 2, 3 .* begins 'row 2'"
    ) as caught:
        _step(engine, float("nan"))

    assert caught.value.rank == 0


def test_weights_that_a_finite_gradient_has_spoilt_are_not_saved() -> None:
    engine, control = _Engine(), _Control()
    agree = _begun(engine)
    _step(engine, 1.0)
    with torch.no_grad():
        engine.module.weight[0, 1] = float("inf")

    agree.on_step_end(None, SimpleNamespace(global_step=2), control)
    control.should_save = True
    with pytest.raises(NotANumber, match="weights are no numbers after step 2"):
        agree.on_step_end(None, SimpleNamespace(global_step=2), control)


@pytest.mark.parametrize("is_asked", [True, False])
def test_a_stop_in_the_middle_of_an_epoch_waits_for_no_validation(is_asked: bool) -> None:
    engine, control, state = _Engine(), _Control(), SimpleNamespace(global_step=2)
    agree = _begun(engine)
    agree.guard.stop_requested = is_asked
    _step(engine, 1.0)

    agree.on_step_end(None, state, control)
    control.should_evaluate = True  # as transformers does after the loop over an epoch, however that has ended
    agree.on_epoch_end(None, state, control)

    assert control.should_training_stop is is_asked
    assert control.should_evaluate is not is_asked
