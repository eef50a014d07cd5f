"""The command ``lightning-dcp``: predict what DCP would give, and train with it.

Modules::

    arguments  the options of `simulate` and `plan`, read by jsonargparse
    values     types of options
    checks     values that are refused before any work
    messages   what jsonargparse says, in plain words
    setup      lengths, costs, memory and batch size out of the options
    simulate   ``lightning-dcp simulate``: policies compared over an epoch
    findings   what a comparison means, in sentences
    plan       ``lightning-dcp plan``: buckets, iterations and micro-batches of one policy
    output     stdout, stderr and the folder of plots
    fit        ``lightning-dcp fit|validate|test|predict``: LightningCLI

Only ``fit`` imports torch and Lightning, and it is imported for its own subcommands alone: the
others start at once, also where torch is not installed (see ``command_process``).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from lightning_dcp.cli.arguments import build_parser
from lightning_dcp.cli.messages import in_plain_words
from lightning_dcp.cli.plan import run_plan
from lightning_dcp.cli.simulate import run_simulate
from lightning_dcp.command_process import TRAINING_COMMANDS

__all__ = ["build_parser", "main"]

_RUN = {"simulate": run_simulate, "plan": run_plan}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        arguments: Words after the command's name; None: those of the process.

    Returns:
        Exit status: 0, 2 for a mistake in the input (one line on stderr), 130 when interrupted.
        Errors of a training that has begun are raised.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if sys.stderr is None:  # the shell closed it, by 2>&-
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        return _failed("stdout is closed: there is nowhere to write the result.")
    if words[:1] and words[0] in TRAINING_COMMANDS:
        return _train(words, debug=debug)
    try:
        parsed = build_parser().parse_args(words)
        _RUN[parsed.command](parsed[parsed.command])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return 130
    except (
        argparse.ArgumentError,
        argparse.ArgumentTypeError,  # by a value in a configuration file
        ImportError,
        OSError,
        TypeError,
        ValueError,
    ) as error:
        if debug:
            raise
        if isinstance(error, UnicodeDecodeError):  # other files are named where they are read
            return _failed("--config: the file is no text: it is not UTF-8.")
        return _failed(in_plain_words(error))
    except (MemoryError, OverflowError) as error:
        if debug:
            raise
        what = "not enough memory" if isinstance(error, MemoryError) else "a number is too large"
        return _failed(f"{what} ({error}). Try fewer samples, shorter ones, or fewer GPUs.")
    return 0


def _train(words: list[str], *, debug: bool) -> int:
    try:
        from lightning_dcp.cli.fit import Mistake, run_training
    except ModuleNotFoundError as error:
        if debug or error.name is None:
            raise
        return _failed(
            f"`lightning-dcp {words[0]}` needs {error.name.split('.')[0]}, which is not installed."
            " Install this package with its dependencies. `simulate` and `plan` work without."
        )
    try:
        run_training(words)
    except KeyboardInterrupt:
        return 130
    except Mistake as error:
        if debug:
            raise
        return _failed(str(error))
    return 0


def _failed(text: str) -> int:
    sys.stderr.write(f"lightning-dcp: error: {text}\n")
    return 2
