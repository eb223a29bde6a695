"""`temper guide`: questions about reinforcement learning of language models, and commands that show their answers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markdown import Markdown
from rich.table import Table
from rich.text import Text

from temper.cli.console import app, out


@app.command()
def guide(
    number: Annotated[int | None, typer.Argument(help="A question by its number", show_default=False)] = None,
    run: Annotated[bool, typer.Option("--run", help="Run the command that shows the answer")] = False,
    picture: Annotated[
        Path | None, typer.Option(help="Run it and draw what it computed, e.g. guide.svg", show_default=False)
    ] = None,
) -> None:
    """List questions about algorithms and infrastructure, answer one, or run the command that shows its answer."""
    from temper.errors import UserError
    from temper.guide.pages import TOPICS, find_page, read_pages, terminal_text

    pages = read_pages()
    if number is None:
        if run or picture is not None:
            raise UserError(
                '--run and --picture: name a question, e.g. "temper guide 7 --run". "temper guide" lists them'
            )
        table = Table("", "question")
        for topic in TOPICS:
            table.add_section()
            table.add_row("", Text(topic, style="bold"))
            for page in pages:
                if page.topic == topic:
                    table.add_row(str(page.number), page.question)
        out.print(table)
        out.print('"temper guide NUMBER" answers one; with --run it runs the command that shows the answer.')
        return
    page = find_page(pages, number)
    if picture is not None:
        from temper.commands.pages.pictures import draw_page

        picture.write_text(draw_page(page), encoding="utf-8")
        out.print(f"saved: {picture}", highlight=False)
        return
    if not run:
        out.print(Markdown(terminal_text(page)), soft_wrap=False)
        return
    from temper.guide.running import run_page

    out.print(f"{page.number}. {page.question}\n", style="bold", highlight=False, markup=False)
    out.print(f"{page.command.rstrip()}\n", highlight=False, markup=False)
    out.file.flush()  # what follows is written by another process
    run_page(page)
    out.print(f"\n{page.claim}", highlight=False, markup=False)
