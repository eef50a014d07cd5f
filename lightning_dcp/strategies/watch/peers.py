"""Processes of other ranks, as the operating system sees them: alive, stopped, ended, by what."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Peer"]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One rank's process, which other ranks of the same machine can look at.

    Attributes:
        rank: Of the process.
        host: Same for processes that see each other's process ids.
        pid: Its process id, there.
        started_s: When it started, which tells it from a later process of the same id.
    """

    rank: int
    host: str
    pid: int
    started_s: float

    @classmethod
    def of_this_process(cls, rank: int) -> Peer:
        """The calling process."""
        process = psutil.Process()
        return cls(rank=rank, host=_host(), pid=process.pid, started_s=process.create_time())

    def has_ended(self) -> bool:
        """Whether the process is gone, or a zombie that nobody has waited for yet."""
        process = self._process
        try:
            return process is None or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        except psutil.Error:
            return True

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger."""
        process = self._process
        try:
            return process is not None and process.status() in (
                psutil.STATUS_STOPPED,
                psutil.STATUS_TRACING_STOP,
            )
        except psutil.Error:
            return False

    def is_child(self) -> bool:
        """Whether the calling process started it and has not waited for its end."""
        process = self._process
        try:
            return process is not None and process.ppid() == os.getpid()
        except psutil.Error:
            return False

    def how_it_ended(self) -> str:
        """As the rest of a sentence; the reason only where the caller started the process."""
        try:
            # WNOWAIT: whoever started the process still gets its exit status.
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except (AttributeError, OSError):  # not our child, or somebody has waited for it
            return "died: its process has ended"
        if result is None:
            return "died: its process has ended"
        if result.si_code == os.CLD_EXITED:
            return f"died: its process ended with exit code {result.si_status}"
        name = signal.Signals(result.si_status).name
        hint = ", as the system does where memory runs out" if name == "SIGKILL" else ""
        return f"died: its process was killed by {name}{hint}"

    def kill(self) -> None:
        """End it, if it is still there; a stopped process, too."""
        process = self._process
        if process is not None:
            with contextlib.suppress(psutil.Error):
                process.kill()

    @property
    def _process(self) -> psutil.Process | None:
        try:
            process = psutil.Process(self.pid)
            # The start is rounded to clock ticks, and shifts with the system's clock.
            return process if abs(process.create_time() - self.started_s) < 5.0 else None
        except psutil.Error:
            return None


@functools.cache
def _host() -> str:
    """Processes with the same text are on one machine and share one space of process ids."""
    parts = [socket.gethostname()]
    boot, namespace = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/pid")
    with contextlib.suppress(OSError):  # not Linux
        parts += [boot.read_text().strip(), os.readlink(namespace)]
    return " ".join(parts)
