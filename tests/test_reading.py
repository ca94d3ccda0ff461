"""Every file is read through `tuner.files`, and every model inside `pretrained.explained`, or a list says why not.

A file that another program opens by its name may be a pipe without a writer, a device without an end, or gigabytes.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import tuner
from tests.test_architecture import tree_of

ROOT = Path(tuner.__file__).parent
CHECKED = "require_regular"
"""A function that calls it may hand the file to a library."""
METHODS = {"read_text", "read_bytes", "open"}
LIBRARIES = {
    *("safe_open", "load_file", "ParquetFile", "memory_map", "input_stream", "from_file", "read_table", "file_digest"),
    *("torch.load", "np.load", "numpy.load", "json.load", "tomllib.load", "yaml.load", "pickle.load", "Image.open"),
    *("shutil.copyfile", "shutil.copy", "shutil.copy2", "shutil.copytree", "os.open", "io.open", "ZipFile", "tarfile"),
    *("load_dataset", "load_from_disk", "GGUFReader", "fromfile", "fileinput", "linecache"),
}
"""The ends of names of functions that open a file by its name."""
WATCHED = {CHECKED, *METHODS, *(name.rpartition(".")[2] for name in LIBRARIES)}
READS = {
    "cli/__init__.py: _open_closed_streams": "standard streams that are closed, by their numbers",
    "data/images.py: _opened": "`_file_of` has checked it",
    "data/layouts.py: write_rows": "this process has written it",
    "data/packing.py: _written": "this process has written it",
    "data/prepare.py: _state_of_images": "prepared rows in the user's cache",
    "data/prepared.py: load": "prepared rows in the user's cache",
    "data/prepared.py: seen": "prepared rows in the user's cache",
    "data/sources.py: _loaded": "a data set of the hub, which `datasets` has downloaded",
    "lab/measuring.py: main": "no file: what the process that started this one sends",
    "launch/checks/deepspeed_config.py: _unwritable": "this process has made it",
    "machine/kernel.py: log_records": "the kernel's log, a device",
    "models/adapters.py: _save_for_base": "this process has written it",
    "models/load.py: make_tiny": "a folder of the package",
    "recipes/code_file.py: run_file": "--allow-code runs it; the reader has read it just before",
    "recipes/trust.py: _editable_folders": "a file of an installed distribution",
    "recipes/trust.py: _is_distributed": "a file of an installed distribution",
    "results/gguf_quants.py: _in_numpy": "the converter that this process started has written it",
    "results/gguf.py: added_bos": "the converter that this process started has written it",
    "worker/guard.py: take_output": "no file: a process",
    "worker/resume.py: write_weights": "a checkpoint: its manifest has the size of each file",
}
"""`file: function` that opens files in another way -> why it may."""
LOADS = {
    **dict.fromkeys((f"lab/stand_ins.py: {name}" for name in ("outputs", "_load")), "the trial has written it"),
    "lab/measuring.py: _config_of": "whatever it raises is told as the reason why a model is not measured",
    "models/adapters.py: _save_for_base": "this process has written it",
    "models/compat.py: processor": "it is called inside",
    "models/load.py: _tiny_weights": "a folder of the package",
    "models/vision.py: load_processor": "it is called inside",
    "results/gguf.py: _modelfile": "the export has written it",
    "results/gguf.py: _tokenizer_for_converter": "the export has written it",
    "results/llava_layouts.py: _config": "the export has written it",
    "rewards/reward_process.py: _load": "it is called inside",
    "worker/samples.py: _before": "whatever it raises is a warning",
    "worker/samples.py: _show": "the run has written it",
}
"""`file: function` that calls from_pretrained outside of `explained` -> why it may."""


def functions(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """Yield each function of a module, and what stands outside of them, with `file: name`."""
    tree = tree_of(path)
    name = path.relative_to(ROOT).as_posix()
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    blocks = [node for top in tree.body for node in (top.body if isinstance(top, ast.ClassDef) else [top])]
    yield from ((f"{name}: {node.name}" if isinstance(node, kinds) else name, node) for node in blocks)


def calls(node: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    """Yield the calls that may open a file, each with the name of its function."""
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call) and getattr(inner.func, "attr", getattr(inner.func, "id", "")) in WATCHED:
            yield inner, ast.unparse(inner.func)


def reads(call: ast.Call, name: str) -> bool:
    """Return whether a call opens a file by its name to read it, and not through `tuner.files`."""
    owner, _, last = name.rpartition(".")
    if any(f".{name}".endswith(f".{library}") for library in LIBRARIES):
        return not {"O_WRONLY", "O_DIRECTORY"} & {getattr(inner, "attr", "") for inner in ast.walk(call)}
    if last not in METHODS or owner == "files" or (not owner and last != "open"):
        return False
    if last != "open":
        return True
    arguments = [*call.args[not owner :], *(given.value for given in call.keywords if given.arg == "mode")]
    if arguments and not isinstance(arguments[0], ast.Constant):
        return False  # no mode: no file's method
    return not (arguments and set(str(arguments[0].value)) & set("wxa"))  # type: ignore[attr-defined]


def found() -> Iterator[tuple[str, ast.AST]]:
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith("configs/") and name != "files.py":
            yield from functions(path)


def test_every_file_is_read_by_the_one_reader() -> None:
    others = {
        place
        for place, node in found()
        for call, name in calls(node)
        if reads(call, name) and not any(called == CHECKED for _, called in calls(node))
    }

    assert others == READS.keys()


def test_the_rule_sees_a_direct_read() -> None:
    wrong = (
        "open(p)",
        "p.read_text()",
        "p.open()",
        "p.open('rb')",
        "shutil.copy2(p, q)",
        "os.open(p, 0)",
        "safe_open(p)",
    )
    fine = "files.read_text(p)\nread_text(p)\np.open('wb')\nopen(p, 'w')\nread_bytes(p)\nself.heart.go()"
    fine += "\ntarfile.open(fileobj=stream, mode='w:gz')"

    assert [text for text in wrong if not any(reads(call, name) for call, name in calls(ast.parse(text)))] == []
    assert not any(reads(call, name) for call, name in calls(ast.parse(fine)))


def outside(node: ast.AST, inside: bool = False) -> Iterator[ast.Call]:
    """Yield the calls of from_pretrained that are in no `with explained(...)`."""
    if isinstance(node, ast.With):
        names = [ast.unparse(item.context_expr.func) for item in node.items if isinstance(item.context_expr, ast.Call)]
        inside = inside or any(name.rpartition(".")[2] == "explained" for name in names)
    if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".from_pretrained") and not inside:
        yield node
    for child in ast.iter_child_nodes(node):
        yield from outside(child, inside)


def test_every_call_that_loads_a_strangers_model_explains_its_mistakes() -> None:
    assert {place for place, node in found() if any(outside(node))} == LOADS.keys()
