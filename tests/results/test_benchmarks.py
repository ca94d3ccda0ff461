"""Task scores are lm-eval's own, of the model that is loaded; without lm-eval one line says how to get it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from tests.machine.gpus import CPU
from tests.results.made import make_result
from tuner.errors import MachineError, UsageError
from tuner.results.evaluate import check_tasks, task_scores
from tuner.results.loaded_model import LoadedModel, load, spec_of

TASK = """
task: colours
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: ["red", "blue"]
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def likelier(tiny: LoadedModel, question: str) -> int:
    """Return which of the two choices the model is likelier to write after a question and a space."""
    start = tiny.encoder.library_object(question)["input_ids"]
    found = []
    for choice in ("red", "blue"):
        ids = tiny.encoder.library_object(f"{question} {choice}")["input_ids"]
        with torch.no_grad():
            each = torch.log_softmax(tiny.model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        found.append(sum(float(each[at - 1, ids[at]]) for at in range(len(start), len(ids))))
    return found.index(max(found))


def test_a_missing_lm_eval_is_told_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)

    with pytest.raises(MachineError, match=r"task scores need lm-eval.*pip install 'tuner-deepspeed\[eval\]'"):
        check_tasks(("hellaswag",))


@pytest.mark.filterwarnings("ignore")
def test_a_task_is_scored_by_lm_eval(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="an extra: pip install 'tuner-deepspeed[eval]'")
    rows, task = tmp_path / "rows.jsonl", tmp_path / "colours.yaml"
    rows.write_text("".join(json.dumps({"question": f"{n}?", "answer": n % 2}) + "\n" for n in range(8)))
    task.write_text(TASK.format(rows=rows))
    make_result(tmp_path / "run", "tiny_lora_sample_e1")
    tiny = load(spec_of(str(tmp_path / "run"), None), CPU)

    found = task_scores(tiny, [str(task)], 2, limit=4)
    assert found["colours"]["sample_len"] == 4
    assert found["colours"]["acc,none"] == sum(likelier(tiny, f"{n}?") == n % 2 for n in range(4)) / 4
    with pytest.raises(UsageError, match=r"lm-eval has no task 'hellaswak'.*'hellaswag'"):
        check_tasks(("hellaswag", "mine.yaml", "hellaswak"))
