"""What a user sees while costs are measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def progress_bar(budget_s: float, shown: bool) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows what is measured now and the seconds that have passed."""
    console = Console(stderr=True)
    if not (shown and console.is_terminal):
        yield lambda what, elapsed_s: None
        return
    columns = (
        TextColumn("measuring costs"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=budget_s)

        def report(what: str, elapsed_s: float) -> None:
            bar.update(task, description=what, completed=min(elapsed_s, budget_s))

        yield report
