"""docs/troubleshooting.md: symptom, cause, cure, for messages and for alarms.

Owns: which messages need more words than they have themselves. A test finds each of them in the code. Refuses: alarms'
own texts, which stand with their rules.
"""

from __future__ import annotations

from dataclasses import dataclass

from temper.commands.pages.entries import plain, table
from temper.runs.alarms.rules import RULES

INTRO = """# Troubleshooting

Written by `temper pages docs`; do not edit. Symptom, cause, cure. Messages say what to do themselves; here are those
that come most often, with a little more. `temper train RECIPE --dry-run` finds most of them before anything is trained.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """A message of Temper, or what one sees instead of one."""

    said: str
    """A piece of the message as it stands in the code; empty: there is none, and `seen` describes it."""
    seen: str = ""
    cause: str
    cure: str


INSTALLING = (
    Trouble(
        said="",
        seen="`temper: command not found`",
        cause="The environment is not active in this shell.",
        cure="`. .venv/bin/activate`, or type `.venv/bin/temper`.",
    ),
    Trouble(
        said="needs the package",
        cause="A part that not everybody needs is not installed.",
        cure="The line behind it is the command; from a clone all of them are "
        '`.venv/bin/pip install -c constraints.txt -e ".[all]"`.',
    ),
    Trouble(
        said="",
        seen="the GPU is idle",
        cause="The torch that is installed does not fit its driver, or was built for CPUs.",
        cure="`temper doctor` says what torch sees; install the one that "
        "[pytorch.org](https://pytorch.org/get-started/locally/) names for your driver.",
    ),
    Trouble(
        said="bubblewrap could not be started",
        cause="Model-written code runs behind bubblewrap or not at all.",
        cure="`apt-get install bubblewrap`; [the sandbox](sandbox.md) says what it needs.",
    ),
)
RECIPES = (
    Trouble(
        said="is unknown.",
        cause="A key, preset, factor, reward or environment is misspelt, or another framework calls it so.",
        cure="Take the name that the message offers; `temper recipe`, `temper presets` and "
        "[the reference](reference/rewards.md) list all.",
    ),
    Trouble(
        said="is a preset. Write kind",
        cause='`kind` is a kind of stage: rl, sft, preference and so on. GRPO is a preset of "rl".',
        cure="The message has the two keys to write.",
    ),
    Trouble(
        said="is not a directory.",
        cause="The model was not fetched, or the path is relative to another folder.",
        cure="`temper model fetch smollm2-135m`, a folder, or a name on the hub; where the hub cannot be reached, "
        "bring a folder.",
    ),
    Trouble(
        said="lacks weights",
        cause="A download that was interrupted, or files of another model: transformers would fill the rest with "
        "random numbers.",
        cure="Fetch the checkpoint again.",
    ),
    Trouble(
        said="is not there.",
        cause="A file was found neither beside the recipe nor in the working folder.",
        cure="Put it beside the recipe; the message has the nearest name.",
    ),
    Trouble(
        said="has no function",
        cause="The file was found and the function was not.",
        cure='`kind = "file.py:function"`: the name behind the colon is that of the function.',
    ),
)
DATA = (
    Trouble(
        said="is a worked solution with",
        cause="GSM8K and its like keep the result behind `####`; `exact` and `contains` compare all of the column.",
        cure='`answer_pattern = "#### (.+)"` in `[[train]]` and `[heldout]`.',
    ),
    Trouble(
        said="cannot be parsed as mathematics",
        cause="A gold answer is text that the verifier does not understand.",
        cure='`answer_pattern` if only a part is the answer; another reward ("exact", one of your own) if it is no '
        "mathematics; `skip_bad = true` to leave such rows out.",
    ),
    Trouble(
        said="no gold answer is worth more than saying nothing",
        cause="The reward does not accept right answers as your data writes them.",
        cure="Mend the reward or the column. If a response has to be written in another way than the gold answer, in "
        "tags or a box, nothing is wrong: say so in `prompt.template`.",
    ),
    Trouble(
        said="",
        seen="empty answers are worth as much as gold ones",
        cause="The reward pays for saying nothing.",
        cure='Gate it: `reward = [{ kind = "format", gate = true, options = { pattern = ".+" } }, ...]`.',
    ),
    Trouble(
        said="rollout.error_limit=",
        cause="More rollouts broke than may: a reward that raises, an environment or a service that is down.",
        cure="The message has the commonest reasons with file and line; mend those. Raising the limit trains on what "
        "is left, which is a biased sample.",
    ),
)
RUNNING = (
    Trouble(
        said="They did not arrive",
        cause="The sampler draws with other weights than the trainer trains.",
        cure="With the built-in engine this is a mistake of ours; with vLLM or SGLang, see [the engine](engine.md).",
    ),
    Trouble(
        said="If the gap is expected, set engine.max_logprob_gap",
        cause="Sampler and trainer disagree on log-probabilities: the update would be for another policy.",
        cure='Read the cause that it names, then [sampler against trainer](mismatch.md); `engine.numerics = "exact"` '
        "makes the gap zero.",
    ),
    Trouble(
        said="does not fit into the KV cache",
        cause="The longest prompt and answer together need more than `engine.kv_tokens`.",
        cure="Raise it, or shorten `sampling.max_new_tokens`.",
    ),
    Trouble(
        said="",
        seen="CUDA out of memory",
        cause="Activations, moments or the KV cache are too large.",
        cure="[Memory and speed](tutorials/memory_and_speed.md#out-of-memory) has what to change, in order.",
    ),
    Trouble(
        said="",
        seen="the reward stays at 0",
        cause="No answer of any group is right, so there is nothing to compare.",
        cure="Partial credit, easier tasks, larger groups, or imitation first ([SFT to RL](tutorials/sft_rl_eval.md)).",
    ),
    Trouble(
        said="",
        seen="the run was killed",
        cause="Any cause: nothing is lost but the steps since the last checkpoint.",
        cure="`temper train RECIPE --run RUN --resume`; it ends with the same weights as if it had not been killed.",
    ),
    Trouble(
        said="of an earlier version of Temper",
        cause="The run was begun before its layout changed.",
        cure="It can be looked at and started from (`model.path`), not resumed.",
    ),
)
SECTIONS = {"Installing": INSTALLING, "Recipes": RECIPES, "Data and rewards": DATA, "While it runs": RUNNING}
ALARMS_INTRO = """## Alarms

What a run says of itself, what that usually means and what to try. Levels, thresholds and how to change them:
[alarms](alarms.md).
"""


def troubleshooting_text() -> str:
    parts = [INTRO]
    for title, troubles in SECTIONS.items():
        rows = [(one.seen or f'"... {plain(one.said)} ..."', one.cause, one.cure) for one in troubles]
        parts.append(f"## {title}\n\n{table(('symptom', 'cause', 'cure'), rows)}")
    alarms = [(f"`{rule.name}`: {plain(rule.saw)}", plain(rule.meaning), plain(rule.advice)) for rule in RULES]
    return "\n".join([*parts, ALARMS_INTRO, table(("alarm", "usually means", "try"), alarms)])
