"""`temper score-records`: scores for what `temper serve --record` wrote.

Heavy imports happen inside the verb, so --help is instant.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from temper.cli.console import app, importing, note, out


@app.command("score-records")
def score_records(
    records: Annotated[Path, typer.Argument(help="A file that temper serve --record wrote")],
    reward: Annotated[str, typer.Option(help="Kind of reward that judges")] = "",
    options: Annotated[str, typer.Option(help="Options of the reward, as JSON")] = "{}",
    tasks: Annotated[Path | None, typer.Option(help="File with gold answers, found by what was asked")] = None,
    prompt_field: Annotated[str, typer.Option(help="Column of that file with the question")] = "prompt",
    answer_field: Annotated[str, typer.Option(help="Column of that file with the gold answer")] = "answer",
    template: Annotated[str, typer.Option(help="How a question became what the client asked")] = "{prompt}",
    scores: Annotated[Path | None, typer.Option(help="People's scores: a file of rows with id and score")] = None,
    again: Annotated[bool, typer.Option("--again", help="Judge also what has a score")] = False,
    export: Annotated[Path | None, typer.Option(help="Write all episodes, for people to fill in scores")] = None,
) -> None:
    """Scores recorded episodes, by a verifier or by people; a recipe then trains on them. Alone it counts them."""
    with importing():
        from temper.commands.judging import score_records as command
        from temper.commands.judging.verify import read_options

    wanted = command.ScoreRequest(
        reward=reward, options=read_options(options), scores=scores, tasks=tasks, prompt_field=prompt_field,
        answer_field=answer_field, template=template, is_again=again,
    )  # fmt: skip
    found = command.score_records(records, wanted)
    if export is not None:
        command.export(found.episodes, export)
        note(f"saved: {export}")
    out.print(command.render(found))
    if found.failures:
        raise typer.Exit(1)
