"""docs/guide.md: the questions of the guide with their claims, from its pages.

Owns: the index. Refuses: the answers; the pages stand in temper/guide, so that they come with the package.
"""

from __future__ import annotations

from temper.guide.pages import TOPICS, read_pages

INTRO = """# The guide: questions, and commands that show the answers

Written by `temper pages docs`; do not edit. Every page answers one question, says what is established and what is
argued about, and has a command that shows the answer on two CPU cores. `temper guide` lists them, `temper guide 7`
prints one, `temper guide 7 --run` runs its command. Most take a few seconds on one core, none may take more than five
minutes. A test runs every command, compares what it prints, and draws again the pictures that are drawn from it.
"""


def guide_text() -> str:
    pages = read_pages()
    lines = [INTRO]
    for topic in TOPICS:
        lines += [f"## {topic.capitalize()}\n"]
        for page in pages:
            if page.topic == topic:
                address = f"../temper/guide/{topic}/{page.path.name}"
                lines.append(f"{page.number}. [{page.question}]({address}) {page.claim}")
        lines.append("")
    return "\n".join(lines)
