"""Worlds of real processes for tests: started once per test module or class, never hanging.

A world is ``size`` gloo processes that stay alive between tests. Each call sends one top-level
function to every rank and collects what the ranks return. A call that takes too long, a rank that
dies and a rank that raises all end the same way: every rank's traceback or stack in one
``WorldFailure``, the world killed, and a fresh world at the next call.

Example::

    def sum_of_ranks(rank: int, factor: int) -> float:       # top level: it is sent by name
        value = torch.tensor([float(rank * factor)])
        dist.all_reduce(value)
        return value.item()

    @pytest.fixture(scope="module")
    def world():
        with World(4) as world:
            yield world

    def test_all_reduce(world):
        assert world.run(sum_of_ranks, 10) == [60.0] * 4

The function gets its rank first, then the arguments of ``run``. Arguments and results are pickled;
tensors are sent by value. Before each call torch, ``random`` and numpy are seeded with 0, the same
on all ranks. ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` are set
in each process, so that code which reads its rank from there (Lightning's environments) agrees;
``init_process_group=False`` leaves ``torch.distributed`` to the function.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# The fork server imports torch once; each rank is then a fork of it and starts in milliseconds.
# Nothing in the server has run a kernel or started a thread, so that the fork is safe.
_CONTEXT = multiprocessing.get_context("forkserver")
# torch._dynamo and sympy with it would else be imported by each rank at its first checkpoint: 3 s;
# Lightning at its first import: another 2 s, and this package with what it needs of torch 1 s.
# (Not deepspeed: it asks for CUDA when it is imported.)
_CONTEXT.set_forkserver_preload(
    [
        "torch",
        "torch.distributed",
        "torch._dynamo",
        "numpy",
        "lightning.pytorch",
        "lightning_dcp.strategies.ddp",
        "lightning_dcp.strategies.fsdp",
    ]
)

_GRACE_S = 3.0  # for the other ranks, once one has failed


class WorldFailure(AssertionError):
    """A rank raised, died or did not answer; holds every rank's traceback or stack."""


class World:
    """``size`` processes that run functions together; started lazily, again after a failure.

    Args:
        size: number of ranks.
        timeout_s: limit of one call, unless ``run`` is given another.
        backend: of ``torch.distributed``.
        init_process_group: whether ranks come with the default process group.
        env: further environment variables of the ranks.
    """

    def __init__(
        self,
        size: int,
        *,
        timeout_s: float = 60.0,
        backend: str = "gloo",
        init_process_group: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._backend = backend if init_process_group else None
        self._env = dict(env or {})
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._directory: Path | None = None

    def __enter__(self) -> World:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout_s: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(rank, *args, **kwargs)`` on every rank; return the results in rank order.

        Raises:
            WorldFailure: if a rank raised, died or took longer than ``timeout_s`` (start-up not
                counted).
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((_name_of(function), args, kwargs))
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a dead rank is reported below
                connection.send_bytes(message)
        return self._collect(function.__name__, self.timeout_s if timeout_s is None else timeout_s)

    def close(self) -> None:
        """End the processes: politely, then not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self._kill()

    # ------------------------------------------------------------------ the parent's side

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="world-"))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        for rank in range(self.size):
            here, there = _CONTEXT.Pipe()
            env = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(self.size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                **self._env,
            }
            process = _CONTEXT.Process(
                target=_serve,
                args=(rank, self.size, self._backend, str(self._directory), env, there),
                daemon=True,
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)
        self._collect("start-up", 110.0)

    def _collect(self, what: str, timeout_s: float) -> list[Any]:
        replies: dict[int, tuple[str, Any]] = {}
        rank_of = {connection: rank for rank, connection in enumerate(self._connections)}
        deadline = time.monotonic() + timeout_s
        late = f"no answer within {timeout_s:g} s"
        while len(replies) < self.size:
            waiting = [c for c, rank in rank_of.items() if rank not in replies]
            ready = wait(waiting, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = rank_of[connection]  # type: ignore[index]
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    replies[rank] = ("error", f"the process died (exit code {code})")
                if replies[rank][0] == "error":
                    # The others now probably wait in a collective for ever.
                    if deadline > time.monotonic() + _GRACE_S:
                        late = f"no answer {_GRACE_S:g} s after another rank had failed"
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if all(replies.get(rank, ("late",))[0] == "ok" for rank in range(self.size)):
            return [replies[rank][1] for rank in range(self.size)]

        stacks = self._stacks([rank for rank in range(self.size) if rank not in replies])
        parts = [f"{what} failed in a world of {self.size} ranks"]
        for rank in range(self.size):
            kind, value = replies.get(rank, ("late", f"{late}; stack:\n{stacks.get(rank, '?')}"))
            text = "finished" if kind == "ok" else str(value).rstrip()
            parts.append(f"--- rank {rank}: {text}")
        self._kill()
        raise WorldFailure("\n".join(parts))

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        assert self._directory is not None
        for rank in ranks:
            pid = self._processes[rank].pid
            if pid is not None and self._processes[rank].is_alive():
                os.kill(pid, signal.SIGUSR1)
        if ranks:
            time.sleep(0.5)
        texts = {}
        for rank in ranks:
            with contextlib.suppress(OSError):
                texts[rank] = (self._directory / f"stack-{rank}").read_text()
        return texts

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(5.0)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None


def _name_of(function: Callable[..., Any]) -> tuple[str, str, str | None]:
    module = sys.modules[function.__module__]
    if "." in function.__qualname__:
        raise TypeError(
            f"{function.__qualname__} is sent to other processes by name: define it at the top "
            f"level of its module"
        )
    return function.__module__, function.__qualname__, getattr(module, "__file__", None)


# ---------------------------------------------------------------------- the ranks' side


def _serve(
    rank: int,
    size: int,
    backend: str | None,
    directory: str,
    env: dict[str, str],
    connection: Connection,
) -> None:
    os.environ.update(env)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Ranks are daemons so that they end with the tests; yet loaders may start workers in them.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    # Kept open for the life of the process: the handler writes to its descriptor.
    stack_file = open(Path(directory) / f"stack-{rank}", "w")  # noqa: SIM115
    faulthandler.enable(file=sys.stderr)

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
    try:
        if backend is not None:
            dist.init_process_group(
                backend,
                init_method=f"file://{directory}/rendezvous",
                rank=rank,
                world_size=size,
                timeout=datetime.timedelta(
                    seconds=600
                ),  # the parent's limit is the one that counts
            )
        reply: tuple[str, Any] = ("ok", None)
    except Exception:  # noqa: BLE001 - told to the parent
        reply = ("error", traceback.format_exc())
    connection.send_bytes(pickle.dumps(reply))

    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:
            break
        if not message:
            break
        # Anew each time: a Trainer that ends puts the handlers back that Python knows of.
        faulthandler.unregister(signal.SIGUSR1)
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
        connection.send_bytes(_answer(rank, message))
    os._exit(0)  # no destructors: those of a process group may wait for a rank that is gone


def _answer(rank: int, message: bytes) -> bytes:
    import numpy
    import torch

    try:
        (module_name, name, path), args, kwargs = pickle.loads(message)
        function = getattr(_import(module_name, path), name)
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)  # noqa: NPY002
        return pickle.dumps(("ok", function(rank, *args, **kwargs)))
    except BaseException:  # noqa: BLE001 - pytest.fail and SystemExit too are the caller's business
        return pickle.dumps(("error", traceback.format_exc()))


def _import(name: str, path: str | None) -> Any:
    """Import a test module under the name that pytest gave it, whatever the import mode."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        if path is None:
            raise
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
        return module
