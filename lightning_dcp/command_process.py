"""Whether this process is the command ``lightning-dcp`` and not somebody's training."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import PurePath

__all__ = ["TRAINING_COMMANDS", "is_command", "runs_without_torch"]

TRAINING_COMMANDS: tuple[str, ...] = ("fit", "validate", "test", "predict")
"""Subcommands that run a Trainer; the others plan with numpy alone."""

_COMMAND = "lightning-dcp"
_PACKAGE = "lightning_dcp"
_FOR_TRAINING = ("torch", "lightning", "deepspeed")


def runs_without_torch() -> bool:
    """True for the command, unless it trains.

    The command plans with numpy alone and must start at once, also where torch is not installed;
    but running it imports this package, and importing the package registers strategies with
    Lightning. There is no third place to look: entry points name a function inside the package,
    and Lightning has no plugin point that would import the strategies when they are asked for.

    Where it is to train but something is missing, the answer is True as well: the package can then
    be imported, and the command says what to install.
    """
    if not is_command():
        return False
    if sys.argv[1:2] and sys.argv[1] in TRAINING_COMMANDS:
        return any(importlib.util.find_spec(name) is None for name in _FOR_TRAINING)
    return True


def is_command() -> bool:
    """True for the console script and ``python -m lightning_dcp``."""
    program = PurePath(sys.argv[0]) if getattr(sys, "argv", None) else PurePath()
    if program.name in (_COMMAND, f"{_COMMAND}.exe", f"{_COMMAND}-script.py"):
        return True
    if program.name == "-m":  # what argv[0] is while `python -m` looks for the module
        given = sys.orig_argv
        # Lightning starts further ranks by the name of the module that runs, `__main__` included.
        names = (_PACKAGE, f"{_PACKAGE}.__main__")
        return f"-m{_PACKAGE}" in given or any(name in _after(given, "-m") for name in names)
    return program.parts[-2:] == (_PACKAGE, "__main__.py")


def _after(words: list[str], option: str) -> list[str]:
    """The word that follows the first ``option``, in a list; empty where there is none."""
    place = words.index(option) if option in words else len(words)
    return words[place + 1 : place + 2]
