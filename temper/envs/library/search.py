"""Questions over a local corpus: search in full text, open an article, answer.

Owns: environment "search", generators "search" and "search_demo", the index. Refuses: writing; the index is read-only
once built, and shared by all episodes of the process.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sqlite3
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from temper.envs.adapters.reasoning_gym import final_answer
from temper.envs.library.problems import SAMPLES, read_rows, shuffled
from temper.envs.tool_calls import Calls, write_call
from temper.envs.tool_env import Presentation, ToolEnv, ToolLimits
from temper.envs.tools import Tool, ToolError, make_tool
from temper.errors import TaskError, UserError
from temper.types import Message, Task

MAX_WORDS = 32
"""Most words of a query; a policy that pastes a page into it gets the page's first words searched."""
MAX_PASSED_BY = 64
"""Questions in a row that search_demo cannot answer."""


def search(index: int, seed: int, *, path: str = "", hops: int = 0) -> Task:
    """Question number `index` of a .jsonl file of {question, answer, hops}, in seeded order; path "": the sample.

    hops: only questions that need so many articles; 0: all.
    """
    questions = _questions(Path(path).expanduser() if path else SAMPLES / "questions.jsonl", hops)
    row = shuffled(index, seed, len(questions))
    question, answer = questions[row]
    prompt = f"{question}\nSearch the articles. Give the answer alone on the last line."
    return Task(
        id=f"search:{hops}:{row}",
        messages=(Message(role="user", content=prompt),),
        env="search",
        answer=answer,
    )


def search_demo(
    index: int, seed: int, *, path: str = "", corpus: str = "", results: int = 5, call_format: str = "plain"
) -> Task:
    """A whole right episode to imitate: it looks for a name, opens what is found, and answers with what it read there.

    The words between are those of an env with call_format = "plain", show_tools = "no". All its turns are trained.
    Questions that one article, or one that it names, does not answer are passed by.
    """
    articles = open_index(_corpus_of(corpus))
    for place in range(index, index + MAX_PASSED_BY):
        task = search(place, seed, path=path)
        if way := _way_to(task, articles, results):
            break
    else:
        raise UserError(
            f"search_demo: {MAX_PASSED_BY} questions in a row are answered by no article that they name, nor by one "
            "that is named there. Give path and corpus that belong together."
        )
    said = list(task.messages)
    for name, id in way:
        found = ("search", {"query": name}, articles.search(name, results))
        for tool, arguments, shown in (found, ("open", {"id": id}, articles.open(id))):
            said.append(Message(role="assistant", content=write_call(call_format, tool, arguments)))
            said.append(Message(role="tool", content=shown, name=tool))
    extra = {**task.extra, "trained_turns": "all"}
    return replace(task, id=f"search_demo:{seed}:{index}", messages=tuple(said), extra=extra)


def _way_to(task: Task, articles: Index, results: int) -> list[tuple[str, str]]:
    """What to search for and which article to open then, once or twice: the last one opened has the answer."""
    question, answer = task.messages[0].content, task.answer or ""
    found = [(name, id, text) for name, id, text in articles.named if id in articles.search(name, results)]
    asked = [entry for entry in found if entry[0] in question]
    if not asked:
        return []
    name, id, text = max(asked, key=lambda entry: len(entry[0]))
    if answer in text:
        return [(name, id)]
    after = [(other, its) for other, its, said in found if its != id and other in text and answer in said]
    return [(name, id), after[0]] if after else []


@functools.lru_cache(maxsize=8)
def _questions(file: Path, hops: int) -> tuple[tuple[str, str], ...]:
    rows = _rows(file, ("question", "answer"))
    found = tuple((row["question"], row["answer"]) for row in rows if not hops or row.get("hops") == hops)
    if not found:
        raise UserError(f"{file}: no question has hops={hops}. Use hops = 0 for all {len(rows)}.")
    return found


class SearchEnv(ToolEnv):
    """Tools search and open over a corpus; paid 1 when the last line of the last message is the answer.

    corpus: a .jsonl file of {id, title, text}, or a folder of .txt and .md files; "": the sample.
    """

    def __init__(
        self,
        *,
        corpus: str = "",
        results: int = 5,
        max_calls: int = 16,
        call_format: str = "auto",
        show_tools: str = "auto",
    ) -> None:
        if results < 1:
            raise UserError(f'env "search": results={results} must be at least 1.')
        self._index = open_index(_corpus_of(corpus))
        self._results = results
        self._gold = ""
        self._seen: set[str] = set()
        """Digests of what tools have shown."""
        super().__init__(
            self._tools_of,
            limits=ToolLimits(calls_per_episode=max_calls),
            # A model that was taught by search_demo sees what is found without the marks of untrusted output.
            presentation=Presentation(
                call_format=call_format,
                show_tools=show_tools,
                mark_untrusted=(call_format, show_tools) != ("plain", "no"),
            ),
        )

    def reward(self, answer: str) -> float | None:
        return float(normalised(final_answer(answer, "", strict=False)) == self._gold)

    def state(self) -> str:
        """What has been seen, in whatever order."""
        return " ".join(sorted(self._seen))

    def solution(self, task: Task) -> Calls:
        way = _way_to(task, self._index, self._results)
        return [call for name, id in way for call in (("search", {"query": name}), ("open", {"id": id}))]

    def _tools_of(self, task: Task, seed: int) -> Iterable[Tool]:
        self._gold = normalised(task.answer or "")
        if not self._gold:
            raise TaskError(f"task {task.id} has no gold answer to compare with")

        def search(query: str) -> str:
            """Finds articles that have the words.

            query: words to look for
            """
            return self._see(self._index.search(query, self._results))

        def open(id: str) -> str:
            """Shows a whole article.

            id: as search() gives it
            """
            return self._see(self._index.open(id))

        return make_tool(search), make_tool(open)

    def _see(self, shown: str) -> str:
        self._seen.add(hashlib.blake2b(shown.encode(), digest_size=8).hexdigest())
        return shown


def normalised(answer: str) -> str:
    """Without case, article and punctuation: "the Arven Hills." is "arven hills"."""
    return " ".join(word for word in re.findall(r"\w+", answer.casefold()) if word not in ("a", "an", "the"))


class Index:
    """SQLite full-text search (FTS5) over articles, in memory."""

    def __init__(self, articles: Iterable[tuple[str, str, str]]) -> None:
        # Tools run in threads of their own. SQLite is built serialised, and nothing writes after this constructor.
        self._database = sqlite3.connect(":memory:", check_same_thread=False)
        self._database.execute("CREATE TABLE article (id TEXT PRIMARY KEY, title TEXT, text TEXT) WITHOUT ROWID")
        self._database.execute("CREATE VIRTUAL TABLE word USING fts5 (id UNINDEXED, title, text, tokenize = 'porter')")
        for article in articles:
            try:
                self._database.execute("INSERT INTO article VALUES (?, ?, ?)", article)
            except sqlite3.IntegrityError as error:
                raise UserError(f"two articles have the id {article[0]!r}. Make ids unique.") from error
            self._database.execute("INSERT INTO word VALUES (?, ?, ?)", article)
        self._database.commit()
        self._database.execute("PRAGMA query_only = ON")

    @functools.cached_property
    def named(self) -> tuple[tuple[str, str, str], ...]:
        """Name, id and text of every article; a name is the title without what stands in brackets behind it."""
        rows = self._database.execute("SELECT id, title, text FROM article ORDER BY id").fetchall()
        return tuple((title.partition(" (")[0], id, text) for id, title, text in rows)

    def search(self, query: str, limit: int) -> str:
        """The best articles by BM25, titles counted five times: id, title and the words found, a line each."""
        words = re.findall(r"\w+", query)[:MAX_WORDS]
        if not words:
            raise ToolError("the query has no words")
        # Quoted, so that AND, NEAR, * and ^ in a query are words and not operators.
        found = self._database.execute(
            "SELECT id, title, snippet(word, 2, '', '', '...', 16) FROM word WHERE word MATCH ? "
            "ORDER BY bm25(word, 0, 5, 1), id LIMIT ?",
            (" OR ".join(f'"{word}"' for word in words), limit),
        ).fetchall()
        return "\n".join(f"{id}: {title}: {' '.join(text.split())}" for id, title, text in found) or "nothing found"

    def open(self, id: str) -> str:
        found = self._database.execute("SELECT title, text FROM article WHERE id = ?", (id.strip(),)).fetchone()
        if found is None:
            raise ToolError(f"there is no article {id!r:.60}; search() gives ids")
        return f"{found[0]}\n{found[1]}"


def _corpus_of(given: str) -> str:
    return str(Path(given).expanduser() if given else SAMPLES / "corpus.jsonl")


@functools.lru_cache(maxsize=4)
def open_index(corpus: str) -> Index:
    """One index per corpus and process: every episode reads it, none can change it."""
    place = Path(corpus)
    if not place.is_dir():
        rows = _rows(place, ("id", "title", "text"))
        return Index((row["id"], row["title"], row["text"]) for row in rows)
    files = sorted(file for file in place.rglob("*") if file.suffix in (".txt", ".md") and file.is_file())
    if not files:
        raise UserError(f"{place}: the folder has no .txt or .md files. Give one with articles.")
    try:
        return Index((file.relative_to(place).as_posix(), file.stem, file.read_text("utf-8")) for file in files)
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: a file is not UTF-8 text ({error}). Convert it.") from error


def _rows(file: Path, columns: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows whose named columns are all text."""
    rows = read_rows(file)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or not all(isinstance(row.get(column), str) for column in columns):
            raise UserError(f"{file}, row {number}: it must have {', '.join(columns)}, each of them text.")
    return rows
