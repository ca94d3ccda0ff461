"""Rooms stand on their floors, heavy libraries stay in the worker, effects at the edge, and no value stands twice."""

from __future__ import annotations

import ast
import gc
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.cli.command import ACT, of_recipes
from tests.e2e.warm import warm
from tests.each import each
from tests.launch.plans import TINY
from tests.recipes.test_catalog import composed_parts
from tuner.cli import COMMANDS
from tuner.recipes import catalog
from tuner.recipes.loading import with_other_tools_defaults
from tuner.recipes.merging import Merged, leaves
from tuner.recipes.recipe import layer_of
from tuner.recipes.recipe_file import read_file, read_part
from tuner.recipes.schema import RecipeConfig, schema_keys
from tuner.recipes.schema.objectives import OBJECTIVES

ROOT = Path(tuner.__file__).parent
MODULES = sorted(path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0] != "configs")
FLOORS = {
    "__main__": 6,
    "cli": 5,
    "api": 5,  # the same functions, for programs; neither imports the other
    "launch": 4,
    "lab": 4.5,  # measures and tries what launch and results do
    "results": 4,
    "worker": 3.8,  # the rank reads the run directory; a launcher imports nothing of it
    "data": 3.5,
    "importers": 3.5,
    "models": 3.5,
    "rewards": 3.5,
    "zero": 3,
    "fit": 3.1,  # what a preset costs
    "report": 3,  # the rank that nobody supervises writes it too
    "recipes": 2,
    "hub": 2.2,  # an upload clears the variables that `machine` knows
    "machine": 2,
    "runs": 1.4,  # what recipes and ranks ask of a run directory
    "assets": 1.1,
    "paths": 1.2,
    "vocabulary": 1.2,
    "optimizers": 1.2,
    "pretrained": 1.4,  # what libraries raise for a model's files, for all who read them
    "model_folder": 1.3,  # what may be in it, for those who plan and those who load
    "remote_code": 1.3,  # of a model's folder: what it is, for those who decide and those who load
    "files": 1,
    "progress": 1,
    "notebook": 1,
    "errors": 0,
    "hooks": 1.6,  # loads a side room when it is called, and imports none
    "__init__": 0,
}
LONGEST_CHAIN = 21  # a command, the start, its decisions, their arithmetic, the config, names, the hooks, files, errors
MOST_FILES_TO_READ = 30
HOOKS = "hooks.py"
HEAVY = {"torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "deepspeed", "accelerate"}

CHANGES = (
    "mkdir",
    "unlink",
    "rmdir",
    "rmtree",
    "rename",
    "touch",
    "copytree",
    "copy2",
    "copyfile",
    "symlink_to",
    "chmod",
)


@dataclass(frozen=True)
class Effect:
    """The rooms that may have an effect, and what has it: dotted names, modules imported, methods that write."""

    rooms: tuple[str, ...]
    names: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    calls: Collection[str] = ()

    def of(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Name | ast.Attribute):
            return bool(self.names) and is_one_of(dotted_name(node), self.names)
        if isinstance(node, ast.Import):
            return any(alias.name.split(".")[0] in self.modules for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            return str(node.module).split(".")[0] in self.modules
        return bool(self.calls) and isinstance(node, ast.Call) and writes(node)


@cache
def is_one_of(dotted: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(dotted, pattern) for pattern in patterns)


@cache
def dotted_name(node: ast.AST) -> str:
    """Return `os.environ.get` for such an expression, and nothing for one that is no chain of names."""
    if isinstance(node, ast.Attribute):
        owner = dotted_name(node.value)
        return owner and f"{owner}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def writes(node: ast.Call) -> bool:
    if not isinstance(node.func, ast.Attribute):
        return False
    modes = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    opens = node.func.attr == "open" and any(isinstance(mode, str) and set(mode) & set("wax+") for mode in modes)
    texts = node.func.attr in {"write_text", "write_bytes"} and dotted_name(node.func.value) != "files"
    return opens or texts or node.func.attr in CHANGES


# Which rooms may have an effect on the world outside. A line elsewhere says why it has one: `# effect: WHY`.
EFFECTS = {
    "starts a process": Effect(
        ("launch", "machine", "lab", "rewards"),
        names=("os.system", "os.popen", "os.fork*", "os.spawn*", "os.posix_spawn*"),
        modules=("subprocess", "multiprocessing", "pty"),
    ),
    "becomes another program": Effect(("launch",), names=("os.exec*",)),
    "reads the environment": Effect(("cli", "worker", "lab"), names=("os.environ*", "os.getenv", "os.putenv")),
    "takes a signal": Effect(("launch", "machine", "worker", "lab"), names=("signal.signal", "signal.sigaction")),
    "leaves Python": Effect(("cli", "worker", "lab"), names=("sys.exit", "os._exit", "exit", "quit", "SystemExit")),
    "prints": Effect(("cli", "launch", "worker", "lab"), names=("print",)),
    # What decides leaves no trace: recipes, machine, zero, fit, report and cli.
    "changes the disk": Effect(
        ("files", "runs", "launch", "data", "models", "worker", "results", "lab"), calls=CHANGES
    ),
}


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """Read each module once for all tests here; none looks among a million nodes for garbage."""
    gc.disable()
    yield
    for cached in (is_one_of, dotted_name, tree_of, nodes_of):
        cached.cache_clear()
    gc.enable()


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def dotted(path: Path) -> str:
    parts = ("tuner", *path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


@cache
def dotted_names() -> dict[str, Path]:
    return {dotted(path): path for path in MODULES}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.expr | ast.stmt]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.expr | ast.stmt)]


def imports(path: Path) -> Iterator[str]:
    """Yield every module that a file imports, anywhere in it; `from x import y` is x.y where that is a module.

    Of `hooks`, those alone that it does not load for a side room when it is called.
    """
    yield from imported(tree_of(path).body if name_of(path) == HOOKS else nodes_of(path), path)


def imported(nodes: Iterable[ast.AST], path: Path) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.Import) or node.level == 0, (
                f"{name_of(path)}:{node.lineno}: imports are absolute"
            )
            yield from modules_of(node)


def lines_that(path: Path, has: Callable[[ast.AST], bool]) -> dict[int, str]:
    """Return the lines of a file with a node that a test says yes to, by their numbers."""
    lines = path.read_text(encoding="utf-8").splitlines()
    numbers = {node.lineno for node in nodes_of(path) if has(node)}
    return {number: lines[number - 1] for number in sorted(numbers)}


def test_every_room_has_a_floor() -> None:
    rooms = {path.relative_to(ROOT).parts[0].removesuffix(".py") for path in MODULES}

    assert rooms <= FLOORS.keys()


@each(MODULES)
def test_a_room_imports_only_from_floors_below(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0].removesuffix(".py")
    above = [
        module
        for module in imports(path)
        if module.split(".")[0] == "tuner" and room_of(module) != room and FLOORS[room_of(module)] >= FLOORS[room]
    ]

    assert above == []


STRAIGHT_WAY = {"recipes", "machine", "zero", "fit", "launch", "runs", "worker", "data", "models", "hooks"}
SIDE_ROOMS = {"report", "importers", "results", "lab"}


@each(path for path in MODULES if path.relative_to(ROOT).parts[0].removesuffix(".py") in STRAIGHT_WAY)
def test_the_straight_way_imports_no_side_room(path: Path) -> None:
    rooms = {room_of(module) for module in imports(path) if module.split(".")[0] == "tuner"}

    assert rooms & SIDE_ROOMS == set()


def test_each_hook_loads_one_side_room_when_it_is_called() -> None:
    functions = [node for node in tree_of(ROOT / HOOKS).body if isinstance(node, ast.FunctionDef)]
    rooms = {node.name: {*map(room_of, imported(ast.walk(node), ROOT / HOOKS))} for node in functions}

    assert rooms
    assert all(len(of_hook) == 1 and of_hook <= SIDE_ROOMS for of_hook in rooms.values()), rooms


OTHER_TOOLS = re.compile(r"xtuner|axolotl|llama-?_?factory|torchtune|ms-?_?swift|openmind", re.IGNORECASE)
"""Not LLaVA, which is a kind of model too, and not TRL, which trains."""


@each(path for path in MODULES if path.relative_to(ROOT).parts[:1] == ("recipes",))
def test_what_reads_a_recipe_knows_no_word_of_another_tool(path: Path) -> None:
    nodes = list(ast.walk(tree_of(path)))
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.alias)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]

    assert [word for word in (*names, *texts) if OTHER_TOOLS.search(word)] == []


def test_modules_import_each_other_in_no_circle() -> None:
    graph = {dotted(path): {module for module in imports(path) if module.startswith("tuner.")} for path in MODULES}

    TopologicalSorter(graph).prepare()


@each(MODULES)
def test_heavy_libraries_are_imported_where_models_and_rows_are_alone(path: Path) -> None:
    heavy = HEAVY & {module.split(".")[0] for module in imports(path)}

    assert not heavy or path.relative_to(ROOT).parts[0] in ("worker", "data", "models", "rewards", "results", "lab")


COMMANDS_IMPORT_LATER = {"launch", "lab", "results", "worker", "data", "models", "rewards"}
"""What takes a third of a second or more, which `--help` of a command and the Tab key do not wait for."""
# Slow ones, and extras; asyncio takes a tenth of a second, and a run of one node has nobody to meet.
HELD_BACK = HEAVY | {"numpy", "pyarrow", "huggingface_hub", "fastapi", "uvicorn", "asyncio"}


def statements(path: Path, *, at_top: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that Python runs with a module, or else those in its functions and those for types alone."""

    def below(node: ast.AST, outside: bool) -> Iterator[ast.Import | ast.ImportFrom]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import | ast.ImportFrom):
                if outside == at_top:
                    yield child
                continue
            is_later = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            is_for_types = isinstance(child, ast.If) and dotted_name(child.test) == "TYPE_CHECKING"
            yield from below(child, outside and not is_later and not is_for_types)

    yield from below(tree_of(path), True)


def modules_of(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    whole = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in dotted_names() else str(node.module) for name in whole]


@cache
def loaded_by(module: str) -> frozenset[str]:
    """Return what an import of a module runs at once: its packages, and what it imports at its top."""
    packages = {".".join(module.split(".")[:end]) for end in range(1, module.count(".") + 1)}
    nodes = statements(dotted_names()[module], at_top=True) if module in dotted_names() else ()
    return frozenset(packages).union(*(modules_of(node) for node in nodes))


@cache
def held_back_by(module: str) -> frozenset[str]:
    """Return the libraries held back that an import of an own module loads in the end."""
    found, left = set(), [module]
    while left:
        if (name := left.pop()) not in found:
            found.add(name)
            left += loaded_by(name)
    return HELD_BACK & {name.partition(".")[0] for name in found}


@each(MODULES)
def test_own_modules_are_imported_at_the_top_unless_that_loads_a_heavy_library(path: Path) -> None:
    """A command's file may wait with the rooms that run things, too, and a hook with its side room."""
    room, here = path.relative_to(ROOT).parts[0], dotted(path)
    hidden = [
        f"{name_of(path)}:{node.lineno}: {module}"
        for node in statements(path, at_top=False)
        for module in modules_of(node)
        if module.split(".")[0] == "tuner"
        and name_of(path) != HOOKS
        and not (room == "cli" and room_of(module) in COMMANDS_IMPORT_LATER)
        and held_back_by(module) <= held_back_by(here)
    ]

    assert hidden == []


def test_no_chain_of_imports_is_longer_than_one_can_follow() -> None:
    @cache
    def longest(module: str) -> tuple[str, ...]:
        return (module, *max((longest(below) for below in graph.get(module, ())), key=len, default=()))

    graph = {dotted(path): {module for module in imports(path) if module.startswith("tuner.")} for path in MODULES}
    chain = max(map(longest, graph), key=len)

    assert len(chain) <= LONGEST_CHAIN, " > ".join(chain)


RANK = ("worker", "data", "models")
OF_A_LAUNCHER = {"zero", "fit", "launch", "cli", "api", "importers", "report", "results", "lab"}


def is_for_launchers(module: str) -> bool:
    """Say whether a rank must not import a module: of the recipes it reads the schema alone."""
    room, _, inside = module.removeprefix("tuner.").partition(".")
    return room in OF_A_LAUNCHER or (room == "recipes" and inside.partition(".")[0] not in ("", "schema", "objectives"))


@each(path for path in MODULES if path.relative_to(ROOT).parts[0] in RANK)
def test_a_rank_reads_recipes_through_the_schema_alone(path: Path) -> None:
    assert [module for module in imports(path) if module.startswith("tuner.") and is_for_launchers(module)] == []


def test_a_rank_loads_no_module_of_a_launcher() -> None:
    code = "import sys; print(*(name for name in sys.modules['__main__'].OF_A_RANK if name.startswith('tuner.')))"
    done = warm().run([], code=code, env=os.environ)

    assert done.returncode == 0, done.stderr
    loaded = done.stdout.splitlines()[-1].split()
    assert "tuner.recipes.schema" in loaded
    assert list(filter(is_for_launchers, loaded)) == []


WRAPPER = """
import json, sys
from tuner.cli import main
ends = {}
for command in sys.argv[1:]:
    sys.argv = ["tuner", *command.split()]
    try:
        main()
    except SystemExit as end:
        ends[command] = end.code or 0, sorted({name.split(".")[0] for name in sys.modules})
print(json.dumps(ends), file=sys.stderr)
"""
PLAIN = [f"{name} {TINY} --deepspeed zero3_offload" for name in ("check", "show")]
"""Commands that print no table."""
TRAIN_NOTHING = [
    *PLAIN,
    *("--help", "--version", *(f"{name} --help" for name in COMMANDS)),
    *("list", "list tiny_*lora_alpaca*", "list *qlora*", "runs"),
    *(" ".join(words).replace("@", TINY) for name, words in of_recipes().items() if name not in {*ACT} - {"submit"}),
    "train tiny_qlora_sample_e1 --dry-run --deepspeed zero2",
    f"train {TINY} --dry-run --json",
]


def test_a_command_that_trains_nothing_loads_nothing_heavy(tmp_path: Path) -> None:
    # One after the other in one process: what one loads, the later ones have too.
    argv, env = [sys.executable, "-c", WRAPPER, *TRAIN_NOTHING], {**os.environ, "PYTHONPATH": str(ROOT.parent)}
    done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)

    assert done.returncode == 0, done.stderr
    ends = json.loads(done.stderr.splitlines()[-1])
    assert list(ends) == TRAIN_NOTHING
    for command, (code, loaded) in ends.items():
        assert code == 0, (command, done.stderr)
        assert "click" in loaded
        unwanted = HEAVY | {"numpy", "PIL", "mmengine"} | ({"rich"} if command in PLAIN else set())
        assert set(loaded) & unwanted == set(), command


@each(EFFECTS)
def test_only_the_rooms_made_for_an_effect_have_it_or_say_why(kind: str) -> None:
    effect = EFFECTS[kind]
    found = {path: lines_that(path, effect.of) for path in MODULES}
    outside = [
        f"{name_of(path)}:{number}"
        for path, lines in found.items()
        for number, line in lines.items()
        if path.relative_to(ROOT).parts[0].removesuffix(".py") not in effect.rooms and "# effect: " not in line
    ]

    assert any(found.values()), "the rule sees one"
    assert outside == []


def test_an_objective_is_named_in_its_own_files_alone() -> None:
    """Other code asks `config.objective.facts`. Importers translate other tools' names."""
    own = ("recipes/schema/objectives", "worker/objectives", "importers")
    named = {
        f"{name_of(path)}: {node.value}"
        for path in MODULES
        if not name_of(path).startswith(own)
        for node in nodes_of(path)
        if isinstance(node, ast.Constant) and node.value in OBJECTIVES
    }

    a_metric = {"runs/verdict.py: reward"}  # TRL's name for the mean reward of a step
    a_column = {"data/hints.py: reward"}
    assert named == a_metric | a_column


@each(MODULES)
def test_a_module_says_what_it_owns(path: Path) -> None:
    assert ast.get_docstring(tree_of(path))


def repeated(values: Mapping[str, Any], below: Mapping[str, Any]) -> list[str]:
    known = dict(leaves(below))
    return [key for key, value in leaves(values) if key in known and repr(known[key]) == repr(value)]


PARTS = [(kind, name) for kind in catalog.KINDS if kind != "recipes" for name in catalog.names(kind)]


@each(PARTS)
def test_a_part_repeats_no_default(kind: str, name: str) -> None:
    assert repeated(read_part(kind, name).values, read_file(catalog.BASE).values) == []


@each(catalog.names("recipes"))
def test_a_recipe_repeats_no_value_of_what_it_builds_on(name: str) -> None:
    delta = read_part("recipes", name).values
    composed = composed_parts(delta["_base_"])
    assert composed
    parts = [layer_of(part) for part in itertools.starmap(read_part, composed.kinds())]
    below = Merged()
    for layer in (layer_of(read_file(catalog.BASE)), *with_other_tools_defaults(parts)):
        below.lay(layer)

    assert repeated(delta, below.values) == []


def test_the_check_for_repeated_values_sees_one() -> None:
    assert repeated({"log": {"interval": "auto", "trackers": ("wandb",)}}, read_file(catalog.BASE).values) == [
        "log.interval"
    ]


def test_the_defaults_hold_every_key_of_the_schema_and_no_other() -> None:
    base = {key for key, _ in leaves(read_file(catalog.BASE).values)}
    absent = {key for key, value in read_file(catalog.BASE).values.items() if value is None}
    inner = {".".join(keys[:-1]) for keys in schema_keys()}
    schema = {".".join(keys) for keys in schema_keys()} - {block for block in inner if block not in absent}
    # An objective's settings and a mixture's data sets are there only where something takes them.
    schema = {
        key for key in schema if ".mixture." not in key and (not key.startswith("objective.") or key.endswith(".type"))
    }
    schema = {key for key in schema if not key.startswith(("model.vision.", "model.vision_lora."))}
    schema |= {"model.vision", "model.vision_lora"}
    schema.add("train_dataloader.dataset.mixture")

    assert base == {key for key in schema if key in absent or key.split(".")[0] not in absent}
    assert list(read_file(catalog.BASE).values) == list(RecipeConfig.model_fields)


def test_the_files_to_read_are_few_and_as_the_map_says() -> None:
    page = (ROOT.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    stations = re.findall(r"^\| [^|]*\| `(tuner/[^`]+)` \| ([^|]*) \|", page, re.MULTILINE)

    assert 20 <= len(stations) <= MOST_FILES_TO_READ
    assert len(stations) == len(re.findall(r"^\| [^|]*\| `tuner/", page, re.MULTILINE)), "every row is checked"
    names = [(file, name) for file, cell in stations for name in re.findall(r"`(\w+)`", cell) or [cell]]
    texts = {file: (ROOT.parent / file).read_text(encoding="utf-8") for file, _ in stations}
    assert [at for at in names if not re.search(rf"(?m)^(def|class) {re.escape(at[1])}\b", texts[at[0]])] == []


DRIVER = "launch/resolve.py"
OF_STAGES = ("tuner.launch.", "tuner.zero.choice.", "tuner.machine.hardware.")
"""Where the functions stand that decide a part of a plan."""
DECIDE_NOTHING = {
    *("batch_size.with_split", "memory.hopeless", "memory.warning", "pins.laid_on", "pins.notes", "pins.of_level"),
    *("resolved_run.batch_settings", "row_counts.dataset_sizes", "row_counts.warnings"),
}
"""What the driver calls and others may: it lays a decision on a recipe, or says something of one."""
DECIDED_OUTSIDE = {
    "cli/plan.py": {"decide_precision", "with_measured_model"},  # --max-context: no run, but the longest row
    "cli/show.py": {"hold_out", "launch_flags"},  # a recipe alone, or the machines that are looked up for it
    "launch/previewing.py": {"choose_global_batch", "hold_out", "require"},  # `tuner data`: the length of packed rows
    "launch/resuming.py": {"with_tensor_parallel"},  # a stage that needs the number of ranks of another
    "launch/trainable.py": {"decide_precision", "with_measured_model"},  # many recipes, and no run of them
    "results/loaded_model.py": {"decide_precision"},  # a model that is not trained
}
"""Who decides a part of a plan beside the driver."""


def called(path: Path) -> Iterator[str]:
    """Yield the functions of other own modules that a file calls or passes on, as `tuner.launch.pins.notes`."""
    nodes = nodes_of(path)
    origins = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in nodes
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("tuner")
        for alias in node.names
    }
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute):
            first, _, rest = dotted_name(node).partition(".")
            if origin := origins.get(first):
                yield f"{origin}.{rest}" if rest else origin


def test_a_stage_of_the_plan_is_called_by_its_driver_alone() -> None:
    functions = {
        f"{dotted(path)}.{node.name}": path
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.FunctionDef)
    }
    stages = {
        name: functions[name]
        for name in called(ROOT / DRIVER)
        if name in functions and name.startswith(OF_STAGES) and name.removeprefix("tuner.launch.") not in DECIDE_NOTHING
    }
    outside: dict[str, set[str]] = {}
    for path in MODULES:
        for name in {*called(path)} & stages.keys():
            if name_of(path) != DRIVER and path != stages[name]:
                outside.setdefault(name_of(path), set()).add(name.rpartition(".")[2])

    assert len(stages) > 20
    assert outside == DECIDED_OUTSIDE


TYPED = re.compile(r"\.(run_json|status|data|pace)$|\b(run|status|data|pace|manifest)\.json\b|\bMANIFEST\b")
"""How an argument names a file that `runs.records` types."""
READERS = {"runs/directory.py", "runs/checkpoints.py"}


@each(MODULES)
def test_the_typed_files_of_a_run_are_read_as_types_alone(path: Path) -> None:
    calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
    readers = {"read_json", "read_json_object", "load_json"}
    by_string = [
        ast.unparse(call)
        for call in calls
        if getattr(call.func, "attr", getattr(call.func, "id", None)) in readers
        and any(TYPED.search(ast.unparse(argument)) for argument in call.args)
    ]

    assert by_string == [] or path.relative_to(ROOT).as_posix() in READERS
