"""``lightning-dcp fit|validate|test|predict``: LightningCLI for users without an own script.

The only module of the command that imports torch, Lightning and the strategies; ``main`` imports it
for these subcommands alone.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import yaml  # type: ignore[import-untyped,unused-ignore]
from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_dcp.callback import DCPCallback
from lightning_dcp.cli.training_messages import training_mistake
from lightning_dcp.strategies.mixin import DCPStrategyMixin
from lightning_dcp.strategies.registration import register_strategies

__all__ = ["Mistake", "TrainingCLI", "run_training"]

_CALLBACK = {"class_path": "lightning_dcp.DCPCallback"}
_STRATEGY = {"class_path": "lightning_dcp.DCPStrategy"}
#: Classes of options inside a strategy's, each with one of them.
_GROUPS = {"planning": "policy", "profiling": "budget_s", "reliability": "rank_timeout_s"}
_LIBRARIES = ("lightning_dcp", "lightning", "jsonargparse")


class Mistake(ValueError):
    """A mistake in the options, found before any training; its text is one for users."""


def run_training(words: Sequence[str]) -> None:
    """Run a subcommand.

    Args:
        words: The subcommand and its options.

    Raises:
        Mistake: The options cannot be run. What goes wrong later is raised as it is.
    """
    register_strategies()
    _make_this_folder_importable()
    TrainingCLI(words)


class TrainingCLI(LightningCLI):
    """LightningCLI whose model, data and callbacks are named in the configuration.

    The strategy is `lightning_dcp.DCPStrategy` unless another is given. With a DCP strategy, `fit`
    gets a `DCPCallback`, unless one is given or `trainer.callbacks` is an empty list.

    Args:
        words: The subcommand and its options.

    Raises:
        Mistake: The options cannot be run.
    """

    def __init__(self, words: Sequence[str]) -> None:
        names = self.subcommands()
        _let_yaml_hold_enums()
        super().__init__(
            subclass_mode_model=True,
            subclass_mode_data=True,
            # By its class, so that options can be given without it:
            # `--trainer.strategy.policy bucket`.
            trainer_defaults={"strategy": _STRATEGY},
            parser_kwargs={
                "prog": "lightning-dcp",
                "exit_on_error": False,
                **{name: {"exit_on_error": False} for name in names},
            },
            args=list(words),
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        # No value, so that a saved configuration reloads in a script of the user's.
        parser.add_argument("--debug", action=_Flag, help="A traceback for mistakes in options.")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # Lightning's would warn that `args` are given and the process has arguments as well.
        try:
            self.config = parser.parse_args(args)
            self._resolve_strategy()
            self._check_groups()
            self._add_callback()
        except (argparse.ArgumentError, argparse.ArgumentTypeError) as error:
            raise Mistake(training_mistake(str(error), options_of=_options_of)) from error
        except UnicodeDecodeError as error:
            raise Mistake("--config: the file is no text: it is not UTF-8.") from error

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except (MisconfigurationException, TypeError, ValueError) as error:
            cause = _raised_by_the_user(error)
            if cause is not None:  # a model or a data module, whose author needs the traceback
                raise cause from None
            raise Mistake(training_mistake(str(error), options_of=_options_of)) from error

    def _resolve_strategy(self) -> None:
        """Take a string that names no registered strategy for the name of a class."""
        strategy = self._trainer_config().strategy
        known = StrategyRegistry.available_strategies()
        if not isinstance(strategy, str) or strategy in ("auto", *known):
            return
        try:
            self._override({"strategy": {"class_path": strategy}})
        except argparse.ArgumentError as error:
            near = difflib.get_close_matches(strategy, known)
            raise Mistake(
                f"--trainer.strategy: {strategy!r} is no strategy."
                + (f" Did you mean {near[0]}?" if near else "")
                + f" Ours are {', '.join(_ours())}; a class is given by its path, such as"
                " lightning_dcp.DCPStrategy."
            ) from error

    def _check_groups(self) -> None:
        """The parser lets a list, number or null pass where a class of options is asked for."""
        init_args = getattr(self._trainer_config().strategy, "init_args", None) or {}
        for name in _GROUPS:
            if name in init_args and not isinstance(value := init_args[name], Namespace | dict):
                given = "nothing (leave the name out, too)" if value is None else value
                raise Mistake(
                    f"--trainer.strategy.{name}: expected the options by name, such as"
                    f" --trainer.strategy.{name}.{_GROUPS[name]}; got {given}."
                )

    def _add_callback(self) -> None:
        trainer = self._trainer_config()
        given = trainer.callbacks
        callbacks = given if isinstance(given, list) else [] if given is None else [given]
        if self.config.subcommand != "fit" or not _is_ours(trainer.strategy) or given == []:
            return
        if not any(_is_subclass(callback, DCPCallback) for callback in callbacks):
            self._override({"callbacks": [*callbacks, _CALLBACK]})

    def _override(self, trainer: dict[str, Any]) -> None:
        changes = {self.config.subcommand: {"trainer": trainer}}
        self.config = self.parser.parse_object(changes, self.config)

    def _trainer_config(self) -> Any:
        return self.config[self.config.subcommand].trainer


class _Flag(argparse.Action):
    """An option that the parser accepts and keeps no value of."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        kwargs.pop("default", None)
        super().__init__(
            option_strings, argparse.SUPPRESS, nargs=0, default=argparse.SUPPRESS, **kwargs
        )

    @override
    def __call__(self, *_: Any) -> None:
        pass


def _make_this_folder_importable() -> None:
    """As `python -m` does: a console script has the folder of the script instead."""
    here = os.getcwd()
    if not getattr(sys.flags, "safe_path", False) and not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def _let_yaml_hold_enums() -> None:
    """Defaults of Lightning's own classes, such as Timer's, are enums that YAML cannot save."""
    yaml.SafeDumper.add_multi_representer(
        enum.Enum, lambda dumper, member: dumper.represent_data(member.value)
    )


def _ours() -> list[str]:
    """Names of the DCP strategies."""
    return [
        name
        for name in StrategyRegistry.available_strategies()
        if _is_dcp(StrategyRegistry[name]["strategy"])
    ]


def _is_dcp(cls: object) -> bool:
    return isinstance(cls, type) and issubclass(cls, DCPStrategyMixin)


def _is_ours(strategy: Any) -> bool:
    """Whether a parsed `trainer.strategy` is a DCP strategy."""
    if isinstance(strategy, str):
        return strategy in _ours()
    return _is_subclass(strategy, DCPStrategyMixin)


def _is_subclass(config: Any, cls: type) -> bool:
    found = _class_at(getattr(config, "class_path", ""))
    return isinstance(found, type) and issubclass(found, cls)


def _class_at(path: str) -> Any:
    """The class at a dotted path; None where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None) if module else None
    except ImportError:  # a class inside a class
        return None


def _options_of(path: str) -> list[str]:
    """The options of a class, with dots for those of nested option classes."""
    cls = _class_at(path)
    if not isinstance(cls, type):
        return []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(cls, "of", fail_untyped=False)
    return [name.removeprefix("of.") for name in parser.get_defaults().keys(branches=False)]


def _raised_by_the_user(error: BaseException) -> BaseException | None:
    """The error among an error's causes that code outside of the libraries raised, if any did."""
    cause: BaseException | None = error
    while cause is not None:
        frames = [frame for frame, _ in traceback.walk_tb(cause.__traceback__)]
        module = str(frames[-1].f_globals.get("__name__", "")) if frames else _LIBRARIES[0]
        if module.partition(".")[0] not in _LIBRARIES:
            return cause
        cause = cause.__cause__
    return None
