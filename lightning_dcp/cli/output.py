"""Where output goes: results to stdout, progress and notes to stderr, pictures to a folder."""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

__all__ = ["Output", "plots_folder"]

_WIDTH = 100  # where no terminal has one


class Output:
    """Streams of one run of the command.

    Args:
        as_json: stdout is for JSON; what is for people goes to stderr.
        quiet: The result only.
    """

    def __init__(self, *, as_json: bool, quiet: bool) -> None:
        self._as_json, self._quiet = as_json, quiet
        self._people = _console(stderr=as_json, quiet=as_json and quiet)
        self._notes = _console(stderr=True, quiet=quiet)

    def show(self, *renderables: Any) -> None:
        """Print a result for people."""
        for renderable in renderables:
            self._people.print(renderable, highlight=False, markup=False, soft_wrap=False)

    def note(self, text: str) -> None:
        """Print progress or a remark, to stderr."""
        self._notes.print(text, highlight=False, markup=False, soft_wrap=True)

    def json(self, value: Any) -> None:
        """Print a value as JSON to stdout; nothing without ``--json``."""
        self.line(json.dumps(value, indent=2))

    def line(self, text: str) -> None:
        """Print a line of JSON to stdout; nothing without ``--json``."""
        if self._as_json:
            sys.stdout.write(text + "\n")


def _console(*, stderr: bool, quiet: bool) -> Console:
    console = Console(stderr=stderr, quiet=quiet)
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def plots_folder(path: str | None) -> Path | None:
    """The folder to draw into, made if need be. Checked before minutes of work, not after.

    Raises:
        ImportError: matplotlib is not installed.
        OSError: The folder cannot be made or written.
    """
    if path is None:
        return None
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "--plots needs matplotlib, which is not installed. Install it with: "
            "pip install 'lightning_dcp[plot]'"
        )
    folder = Path(path)
    if folder.exists() and not folder.is_dir():
        raise OSError(f"Cannot write plots into {folder}: it is a file, not a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OSError(f"Cannot write plots into {folder}: {error.strerror}.") from None
    return folder
