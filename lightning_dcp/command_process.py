"""Whether this process is the command ``lightning-dcp`` and not somebody's training."""

from __future__ import annotations

import sys
from pathlib import PurePath

__all__ = ["is_command"]

_COMMAND = "lightning-dcp"
_PACKAGE = "lightning_dcp"


def is_command() -> bool:
    """True for the console script and ``python -m lightning_dcp``.

    The command plans with numpy alone and must start at once, also where torch is not installed;
    but running it imports this package, and importing the package registers strategies with
    Lightning. There is no third place to look: entry points name a function inside the package,
    and Lightning has no plugin point that would import the strategies when they are asked for.
    """
    program = PurePath(sys.argv[0]) if getattr(sys, "argv", None) else PurePath()
    if program.name in (_COMMAND, f"{_COMMAND}.exe", f"{_COMMAND}-script.py"):
        return True
    if program.name == "-m":  # what argv[0] is while `python -m` looks for the module
        given = sys.orig_argv
        return f"-m{_PACKAGE}" in given or (_PACKAGE in _after(given, "-m"))
    return program.parts[-2:] == (_PACKAGE, "__main__.py")


def _after(words: list[str], option: str) -> list[str]:
    """The word that follows the first ``option``, in a list; empty where there is none."""
    place = words.index(option) if option in words else len(words)
    return words[place + 1 : place + 2]
