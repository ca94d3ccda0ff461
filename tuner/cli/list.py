"""`tuner list`: the parts that recipe names are composed of."""

from __future__ import annotations

import json

import click

from tuner.recipes import catalog


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print names and summaries as JSON.")
def command(as_json: bool) -> None:
    """List the parts of recipe names: MODEL_[OBJECTIVE_]METHOD_DATASET_eEPOCHS."""
    parts = {kind: {name: catalog.summary(kind, name) for name in catalog.names(kind)} for kind in catalog.KINDS}
    if as_json:
        click.echo(json.dumps({**parts, "presets": list(catalog.presets())}, indent=2, ensure_ascii=False))
        return
    click.echo("A recipe is MODEL_[OBJECTIVE_]METHOD_DATASET_eEPOCHS, such as internlm2_chat_7b_qlora_oasst1_e3.\n")
    for kind, named in parts.items():
        click.echo(f"{kind}:")
        width = max(map(len, named), default=0)
        for name, summary in named.items():
            click.echo(f"  {name:<{width}}  {summary}")
        click.echo()
    click.echo("DeepSpeed presets (--deepspeed):")
    click.echo("  " + ", ".join(catalog.presets()) + ", auto, none, or a path to a JSON")
    click.echo("\nNext: tuner show NAME, tuner train NAME --dry-run, tuner copy NAME")
