"""The command line. Each verb parses its arguments and calls one function of temper.commands or below.

Owns: names and help of verbs, exit codes, what is printed.
"""

from __future__ import annotations

import io
import sys
import traceback
from typing import NoReturn

# The verbs register themselves, in the order of --help.
import temper.cli.init
import temper.cli.train
import temper.cli.sweep
import temper.cli.planning.plan
import temper.cli.planning.simulate
import temper.cli.report
import temper.cli.rollouts
import temper.cli.watch
import temper.cli.judging.evaluate
import temper.cli.judging.compare
import temper.cli.judging.scale
import temper.cli.judging.best
import temper.cli.judging.label_steps
import temper.cli.judging.choose
import temper.cli.judging.verify
import temper.cli.judging.score_records
import temper.cli.judging.environment
import temper.cli.sample
import temper.cli.serve
import temper.cli.sampler
import temper.cli.export
import temper.cli.reference.guide
import temper.cli.reference.presets
import temper.cli.reference.metrics
import temper.cli.reference.recipe
import temper.cli.reference.pages
import temper.cli.doctor
import temper.cli.model
from temper.cli.console import app
from temper.errors import TemperError
from temper.terminal import SafeConsole


def main() -> NoReturn:
    """Runs the command line. Mistakes of the user end with exit code 2 and one clear message, no traceback."""
    import os

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # we start worker processes; a forked tokenizer would warn
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: what a model says must not fail to be shown
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(standalone_mode=True)
    except TemperError as error:
        SafeConsole(stderr=True, soft_wrap=True).print(f"temper: {error}", highlight=False)
        sys.exit(error.exit_code)
    except Exception:  # a mistake of ours: the traceback may quote what a model wrote
        SafeConsole(stderr=True, soft_wrap=True).print(traceback.format_exc(), highlight=False)
        sys.exit(1)
    sys.exit(0)
