"""Code runs only where a flag of this very command allows it: no recipe, part, run or file trusts itself."""

from __future__ import annotations

import ast
import json
import shutil
import sys
from pathlib import Path

import pytest

import tuner as api
from tests.cli.command import ACT, Tuner, of_recipes
from tests.cli.conftest import nothing_starts as nothing_starts
from tests.cli.conftest import tuner as tuner
from tests.hostile.test_commands import TINY, hostile_model
from tests.launch.plans import checkpoint, made
from tests.results.made import make_result
from tests.tiny_model import tiny
from tuner import assets, remote_code
from tuner.errors import ModelError
from tuner.launch import render
from tuner.launch.resolved_run import Request
from tuner.recipes import loading
from tuner.recipes.names import identify
from tuner.runs import creation
from tuner.runs.directory import RunDirectory

pytestmark = pytest.mark.usefixtures("nothing_starts", "environment")

FLAG = "--trust-remote-code"
ASKS = f"""
_base_ = "{TINY}"
model = dict(path="./model", trust_remote_code=True, revision={"a" * 40!r})
"""


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep the records of trusted code in the test's own folder, and name no folder of modules."""
    monkeypatch.setenv("TUNER_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PYTHONPATH", raising=False)


def model_with_code(folder: Path, code: str = "") -> Path:
    """Write a copy of the tiny model with a class of its own for its config, and code that runs when it is loaded."""
    shutil.copytree(tiny(), folder)
    facts = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    facts |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config"}}
    (folder / "config.json").write_text(json.dumps(facts), encoding="utf-8")
    write_code(folder, code)
    return folder


def write_code(folder: Path, code: str) -> None:
    canary = str(folder.parent / "canary")
    text = f"from transformers import LlamaConfig\n{code}\nopen({canary!r}, 'w').close()\n"
    (folder / "mine.py").write_text(f"{text}class Config(LlamaConfig):\n    model_type = 'mine'\n")


@pytest.mark.parametrize("command", ACT)
def test_a_recipe_does_not_trust_itself(tuner: Tuner, command: str, tmp_path: Path) -> None:
    hostile_model(tmp_path / "model")
    (tmp_path / "evil.py").write_text(ASKS)

    result = tuner(*(word.replace("@", "./evil.py") for word in of_recipes()[command]))

    assert result.code == 2
    assert "evil.py:3" in result.out + result.err, "where it asks"
    assert f"(evil.py), then add {FLAG}" in result.out + result.err, "the code is named beside the flag"
    assert not (tmp_path / "canary").exists()


def test_a_recipe_that_asks_can_be_looked_at(tuner: Tuner, tmp_path: Path) -> None:
    hostile_model(tmp_path / "model")
    (tmp_path / "evil.py").write_text(ASKS)

    for command in of_recipes().keys() - {*ACT}:
        result = tuner(*(word.replace("@", "./evil.py") for word in of_recipes()[command]))

        assert result.code == 0, result.err
        assert f"has no effect without {FLAG}" in result.out + result.err
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("grant", [[FLAG], ["--set", "model.trust_remote_code=True"], ["--allow-code"]])
def test_what_is_typed_grants_it(tuner: Tuner, grant: list[str], tmp_path: Path) -> None:
    model_with_code(tmp_path / "model")
    (tmp_path / "mine.py").write_text(ASKS)

    result = tuner("data", "./mine.py", *grant, "--set", "model.revision=None")

    assert result.code == 0, result.err
    assert (tmp_path / "canary").exists()


def test_a_commit_says_nothing_of_a_folder(tuner: Tuner, tmp_path: Path) -> None:
    model_with_code(tmp_path / "model")
    (tmp_path / "mine.py").write_text(ASKS)

    for command in (["data"], ["check"], ["train", "--dry-run"]):
        result = tuner(command[0], "./mine.py", *command[1:], FLAG)

        assert result.code == 2
        assert "model.revision" in result.out + result.err
    assert not (tmp_path / "canary").exists()


def test_the_model_that_is_typed_is_not_trusted_because_the_recipe_trusts_another(tuner: Tuner, tmp_path: Path) -> None:
    hostile_model(tmp_path / "model")
    (tmp_path / "evil.py").write_text(ASKS.replace("./model", "acme/other"))

    assert tuner("data", "./evil.py", "--model", "./model", "--allow-code").code == 0
    assert not (tmp_path / "canary").exists()


def test_a_part_in_the_working_directory_neither_trusts_itself_nor_hides(tuner: Tuner, tmp_path: Path) -> None:
    hostile_model(tmp_path / "model")
    parts = tmp_path / "tuner_configs" / "models"
    parts.mkdir(parents=True)
    (parts / "tiny.py").write_text('"""Mine."""\nmodel = dict(path="./model", trust_remote_code=True)\n')

    for command in ACT:
        result = tuner(*(word.replace("@", TINY) for word in of_recipes()[command]))

        assert result.code == 2, command
        assert "tuner_configs/models/tiny.py:2" in result.out + result.err, command
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("kind", ["models", "methods", "datasets"])
def test_a_part_that_shadows_one_of_the_package_is_named_at_every_use(tuner: Tuner, kind: str, tmp_path: Path) -> None:
    name = {"models": "tiny", "methods": "full", "datasets": "sample"}[kind]
    parts = tmp_path / "tuner_configs" / kind
    parts.mkdir(parents=True)
    ours = assets.CONFIGS / kind / f"{name}.py"
    (parts / f"{name}.py").write_text(ours.read_text(encoding="utf-8"))

    for command in sorted(of_recipes().keys() - {"smoke", "tune"}):  # which train
        arguments = [word.replace("@", TINY) for word in of_recipes()[command]]
        result = tuner(*arguments)

        assert result.code == 0, result.err
        assert f"tuner_configs/{kind}/{name}.py shadows" in result.out + result.err, arguments


@pytest.mark.parametrize("command", ["chat", "eval", "export", "export --merge", "serve"])
def test_a_run_does_not_trust_itself(tuner: Tuner, command: str, tmp_path: Path) -> None:
    run, _ = make_result(tmp_path / "run", "tiny_lora_sample_e1" if "merge" in command else TINY)
    model = hostile_model(tmp_path / "model")
    for file in model.iterdir():
        if not (file.suffix == ".safetensors" and "merge" in command):
            (run.final / file.name).write_bytes(file.read_bytes())
    if "merge" in command:
        (run.final / "config.json").unlink()
    text = run.recipe.read_text(encoding="utf-8")
    assert "trust_remote_code=False" in text and 'path="package:tiny"' in text
    text = text.replace("trust_remote_code=False", "trust_remote_code=True").replace("package:tiny", str(model))
    run.recipe.write_text(text, encoding="utf-8")
    (tmp_path / "prompt.txt").write_text("Why?")
    arguments = {
        "chat": ["chat", run.path],
        "eval": ["eval", run.path],
        "export": ["export", run.path, "out"],
        "export --merge": ["export", run.path, "out", "--merge"],
        "serve": ["serve", run.path],
    }[command]

    with (tmp_path / "prompt.txt").open() as stdin:
        sys_stdin, sys.stdin = sys.stdin, stdin
        try:
            result = tuner(*arguments)
        finally:
            sys.stdin = sys_stdin

    assert result.code == 2, result.out + result.err
    assert "recipe.py:" in result.err and f"(evil.py), then add {FLAG}" in result.err
    assert not (tmp_path / "canary").exists()
    with pytest.raises(api.TunerError):
        api.Run(run.path).tokenizer()
    assert not (tmp_path / "canary").exists()


def test_the_code_of_a_folder_is_what_it_was_at_its_first_trusted_start(tuner: Tuner, tmp_path: Path) -> None:
    model = model_with_code(tmp_path / "model")
    arguments = ("data", TINY, "--model", model, FLAG)
    hash_of_first = remote_code.code_in(model).hash

    first, again = tuner(*arguments), tuner(*arguments)

    assert first.code == again.code == 0, first.err + again.err
    assert "mine.py" in first.err and hash_of_first in first.err, "it is printed"
    assert hash_of_first not in again.err
    for change in ("other code in the file", "another file"):
        (tmp_path / "canary").unlink(missing_ok=True)
        file = model / ("mine.py" if change == "other code in the file" else "more.py")
        before = file.read_text() if file.exists() else None
        file.write_text(f"{before or ''}\n# changed\n")

        for refused in (arguments, ("check", *arguments[1:]), ("train", *arguments[1:], "--dry-run")):
            result = tuner(*refused)

            assert result.code == 2, (change, refused)
            assert file.name in result.out + result.err and "has changed" in result.out + result.err
        assert not (tmp_path / "canary").exists(), change
        file.unlink() if before is None else file.write_text(before)
    assert tuner(*arguments).code == 0


def trusted_run(path: Path, model: Path) -> RunDirectory:
    """Write the directory of a run with a model whose code is trusted, as its start would."""
    resolved = made("model.trust_remote_code=True", model=str(model), work_dir=path)
    return creation.create(path, render.files(resolved), resume=False)


def test_a_start_records_the_code_and_its_run_holds_the_hash(here: Path) -> None:
    model = model_with_code(here / "model")

    run = trusted_run(here / "run", model)

    block = run.recipe_block("model")
    assert (block["trust_remote_code"], block["revision"]) == (True, remote_code.code_in(model).hash)


def test_a_resume_needs_the_flag_again(tuner: Tuner, tmp_path: Path) -> None:
    model = model_with_code(tmp_path / "model")
    run = trusted_run(tmp_path / "run", model)
    checkpoint(run.path, 1)
    resume = ("--resume", run.path, "--dry-run")

    for recipe in ([run.recipe], [TINY, "--model", model]):
        result = tuner("train", *recipe, *resume)

        assert result.code == 2, recipe
        assert "model.trust_remote_code" in result.err
    assert tuner("train", run.recipe, *resume, FLAG).code == 0
    write_code(model, "# changed")
    assert tuner("train", run.recipe, *resume, FLAG).code == 2, "the run holds the hash"


def test_a_job_carries_the_grant_and_the_hash(tuner: Tuner, tmp_path: Path) -> None:
    model = model_with_code(tmp_path / "model")

    result = tuner("submit", TINY, "--model", model, FLAG, "--dry-run", "--gpus-per-node=0")

    assert result.code == 0, result.err
    (srun,) = (line for line in result.out.splitlines() if line.startswith("srun"))
    assert f" {FLAG} " in srun
    assert f"--set=model.revision={remote_code.code_in(model).hash}" in srun


@pytest.mark.parametrize("reference", ["acme/other--mine.Config", "../model2/mine.Config", "sub/mine.Config"])
def test_code_outside_the_folder_is_bound_to_nothing(tmp_path: Path, reference: str) -> None:
    model = model_with_code(tmp_path / "model")
    facts = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps({**facts, "auto_map": {"AutoConfig": reference}}))

    with pytest.raises(ModelError, match="outside its folder"):
        remote_code.check(str(model), None)


def test_python_grants_it_by_an_argument_alone(here: Path) -> None:
    model_with_code(here / "model")
    (here / "mine.py").write_text(ASKS.replace(f"revision={'a' * 40!r}", ""))

    assert api.load_recipe("./mine.py").config.model.trust_remote_code is False
    assert not api.check("./mine.py").ok
    with pytest.raises(api.TunerError, match="trust_remote_code=True"):
        api.preview_data(recipe="./mine.py")
    assert not (here / "canary").exists()
    assert api.load_recipe("./mine.py", trust_remote_code=True).config.model.trust_remote_code is True
    api.preview_data(recipe="./mine.py", trust_remote_code=True)
    assert (here / "canary").exists()


def test_an_export_names_no_class_whose_code_it_does_not_hold(tuner: Tuner, tmp_path: Path) -> None:
    """A converter to GGUF trusts what a tokenizer names, and would fetch it from another repository."""
    run, _ = make_result(tmp_path / "run", TINY)
    for name, classes in (
        ("config.json", {"AutoConfig": "x/y--evil.C"}),
        ("tokenizer_config.json", ["x/y--evil.T", None]),
    ):
        facts = json.loads((run.final / name).read_text(encoding="utf-8"))
        (run.final / name).write_text(json.dumps({**facts, "auto_map": classes}), encoding="utf-8")

    assert tuner("export", run.path, "out").code == 0

    for name in ("config.json", "tokenizer_config.json"):
        assert "auto_map" not in json.loads((tmp_path / "out" / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", ["acme/kernel", "kernels-community/flash-attn@main:f", "paged|acme/kernel"])
def test_attention_that_is_code_of_the_hub_needs_the_flag(tuner: Tuner, name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(f"_base_ = {TINY!r}\nmodel = dict(attn_implementation={name!r})\n")

    for command in (["train", "--dry-run"], ["check"], ["data"]):
        result = tuner(command[0], "./mine.py", *command[1:])

        assert result.code == 2
        assert "mine.py:2" in result.out + result.err and "https://huggingface.co/" in result.out + result.err


LOADERS = ("from_pretrained", "from_config")
WITHOUT_CODE = ("GenerationConfig", "PeftConfig", "PeftModel", "LlavaConfig")
"""Classes of transformers and PEFT that load no class by name."""
PASSED_ON = {"options", "arguments", "result"}
"""Names of the result of `arguments.load_options`, where a function passes it on."""


def test_every_call_that_loads_a_model_says_whether_its_code_may_run() -> None:
    """Without a word, transformers asks the terminal: "Do you wish to run the custom code? [y/N]"."""
    silent = []
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(assets.PACKAGE.rglob("*.py"))}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if any(f".{name}(" in text for name in LOADERS) else ():
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LOADERS):
                continue
            if ast.unparse(node.func.value).rpartition(".")[2] in WITHOUT_CODE:
                continue
            words = {word.arg for word in node.keywords}
            spread = {ast.unparse(word.value).partition("(")[0] for word in node.keywords if word.arg is None}
            if "trust_remote_code" not in words and not spread & (PASSED_ON | {"load_options"}):
                silent.append(f"{file}:{node.lineno}")

    assert silent == []


def test_transformers_asks_nobody_even_if_a_library_forgets_the_word(tmp_path: Path) -> None:
    from transformers import AutoConfig

    import tuner.models  # noqa: F401  what every command that loads a model imports

    hostile = hostile_model(tmp_path / "model")
    facts = json.loads((hostile / "config.json").read_text(encoding="utf-8"))
    (hostile / "config.json").write_text(json.dumps({**facts, "model_type": "unknown"}))

    with pytest.raises(ValueError, match="trust_remote_code"):
        AutoConfig.from_pretrained(hostile)

    assert not (tmp_path / "canary").exists()


def test_a_request_allows_nothing_unless_it_says_so() -> None:
    assert Request(identify(TINY)).allow_code is False
    assert loading.load(TINY).config.model.trust_remote_code is False
