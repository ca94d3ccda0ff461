"""How a command is written and shown: options in other tools' spellings, examples, and --help in groups."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any

import click

from tuner.importers import aliases

GROUPS: dict[str, str] = {
    "Model and data": "model data val val_split method adapter",
    "Training": "epochs lr batch_size max_steps max_length lora_rank rewards seed save_every eval_every report_to"
    " sets cfg_options",
    "Run": "work_dir resume resume_weights max_restarts grace_s push dry_run as_json",
    "DeepSpeed and memory": "deepspeed ds nvme ignore_fit on_oom",
    "Processes and machines": """gpus gpu nodes launcher nproc_per_node nnodes node_rank master_addr master_port
        start_timeout_s hostfile include exclude spare_nodes ssh bind_cores""",
    "Safety and help": "allow_code trust_remote_code catalog debug help",
}
"""Headings of --help and the options below each, by their names in Python; others come first, under "Options"."""

SPELLINGS = {
    "--learning-rate": "--lr",
    "--num-train-epochs": "--epochs",
    "--num-epochs": "--epochs",
    "--global-batch-size": "--batch-size",
    "--train-batch-size": "--batch-size",
    "--max-seq-length": "--max-length",
    "--cutoff-len": "--max-length",
    "--lora-r": "--lora-rank",
    "--save-steps": "--save-every",
    "--eval-steps": "--eval-every",
    "--output-dir": "--work-dir",
    "--model-name-or-path": "--model",
    "--dataset": "--data",
}
"""Spellings of Hugging Face's tools for options that tuner has; recipe keys: importers/aliases.toml."""


class Command(click.Command):
    """A command with examples, shown before its options.

    Args:
        json_keys: The command with --json -> the keys at the top of its JSON in backticks, those inside one in
            parentheses after it. `tests/test_skill.py` runs the command and compares; two pages show them.
        uses: What one may want -> the command that gives it, as docs/skill/SKILL.md shows it to agents.
    """

    def __init__(
        self,
        *args: Any,
        examples: Sequence[str] = (),
        json_keys: Mapping[str, str] = MappingProxyType({}),
        uses: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.examples, self.json_keys, self.uses = examples, json_keys, uses

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, [*self._in_our_words(args)])

    def _in_our_words(self, args: Sequence[str]) -> Iterator[str]:
        """Yield arguments with other tools' spellings replaced: underscores, other names, and keys of a recipe."""
        our_flags = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        words_left = [*args]
        while words_left:
            word = words_left.pop(0)
            name, equals, value = word.partition("=")
            dashed = name.replace("_", "-")
            spelled = dashed if dashed in our_flags else SPELLINGS.get(dashed)
            if word == "--":
                yield from (word, *words_left)
                return
            takes_several = word.replace("_", "-") == "--cfg-options"  # as XTuner's does
            pairs = [*takewhile(lambda pair: "=" in pair and pair[0] != "-", words_left)] if takes_several else []
            if pairs:
                yield from (f"{dashed}={pair}" for pair in pairs)
                words_left = words_left[len(pairs) :]
                continue
            if name in our_flags or not name.startswith("--"):
                yield word
            elif spelled in our_flags:
                yield f"{spelled}{equals}{value}"
            elif "--set" in our_flags and _is_key(name.removeprefix("--")):
                if not equals:  # a switch of transformers' is true where no value follows
                    value = "True" if not words_left or words_left[0].startswith("--") else words_left.pop(0)
                yield from ("--set", f"{name.removeprefix('--').replace('-', '_')}={value}")
            else:
                yield word

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for example in self.examples:
                    formatter.write(f"{'':>{formatter.current_indent}}{example}\n")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [option for option in self.get_params(ctx) if isinstance(option, click.Option)]
        records = {_name(option): _plain(*shown) for option in options if (shown := option.get_help_record(ctx))}
        groups = {title: [name for name in names.split() if name in records] for title, names in GROUPS.items()}
        first = [name for name in records if not any(name in names for names in groups.values())]
        if "sets" not in records:  # it has no recipe, and so few options that they need no headings
            first, groups = [*records], {}
        for title, names in {"Options": first, **groups}.items():
            if names:
                with formatter.section(title):
                    formatter.write_dl([records[name] for name in names])


def _name(option: click.Option) -> str:
    """Return an option's name in Python; click 8.5 has a private one for --help."""
    return "help" if "--help" in option.opts else option.name or ""


def _plain(option: str, text: str) -> tuple[str, str]:
    """Return an option's two columns without click's words for types and ranges."""
    for words in ("INTEGER RANGE", "FLOAT RANGE", "INTEGER", "FLOAT"):
        option = option.replace(words, "NUMBER")
    return option, re.sub(r"\[([^]]*)\]$", _without_range, text).rstrip().replace("  [", " [")


def _without_range(extra: re.Match[str]) -> str:
    parts = [part for part in extra[1].split("; ") if not re.search(r"x[<>]|[<>]=?x", part)]
    return f"[{'; '.join(parts)}]" if parts else ""


def _is_key(word: str) -> bool:
    """Return whether a word is another tool's for one key of a recipe, as aliases.toml has it."""
    alias = aliases.find(word.replace("-", "_"), "")
    return alias is not None and alias.key is not None
