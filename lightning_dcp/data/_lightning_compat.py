"""Every private name of Lightning that the data layer touches, each with the reason.

`lightning_dcp.strategies._lightning_compat` is the same for the strategies; it cannot be imported
from here, since imports point downwards only. Written against Lightning 2.6.6.

==========================================  ===================================================
private name                                why
==========================================  ===================================================
``_get_dataloader_init_args_and_kwargs``    arguments to make a `DataLoader` subclass again, by
                                            the rules that Lightning's users know: captured when
                                            it was made inside a hook, else from its attributes
``_reinstantiate_wrapped_cls``              calls the constructor and repeats attribute changes
``_replace_value_in_saved_args``            replaces an argument, positional or by name
==========================================  ===================================================
"""

from __future__ import annotations

import inspect
from typing import Any

from lightning.fabric.utilities.data import (
    _get_dataloader_init_args_and_kwargs,
    _reinstantiate_wrapped_cls,
    _replace_value_in_saved_args,
)
from torch.utils.data import DataLoader, Sampler


def remake_subclass(
    dataloader: DataLoader[Any], *, dataset: Any, sampler: Sampler[Any]
) -> DataLoader[Any]:
    """A new loader of the same subclass, with another data set and sampler, without batching.

    Args:
        dataloader: The user's loader, of a subclass of `DataLoader`.
        dataset: Takes the place of the user's.
        sampler: Takes the place of the user's; its keys go to `dataset` one by one.

    Returns:
        The new loader. Its constructor may have ignored what it was given: the caller checks.

    Raises:
        TypeError, MisconfigurationException: The constructor's arguments cannot be found out, or it
            does not take one that is needed.
    """
    args: tuple[Any, ...]
    args, kwargs = _get_dataloader_init_args_and_kwargs(dataloader, sampler)
    # A batch sampler that Lightning made again is not wanted: DCP decides what makes a batch.
    replacements = {"dataset": dataset, "batch_size": None, "drop_last": False}
    names = tuple(getattr(dataloader, "__pl_saved_arg_names", ()))
    defaults = dict(getattr(dataloader, "__pl_saved_default_kwargs", {}))
    # Not DataLoader's own signature: Lightning's capture replaces __init__ only inside hooks.
    params = inspect.signature(type(dataloader).__init__).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in params.values())
    for name, value in replacements.items():
        found, args, kwargs = _replace_value_in_saved_args(
            name, value, args, kwargs, defaults, names
        )
        if not found and (name in params or takes_any) and name != "drop_last":
            kwargs[name] = value
    result: DataLoader[Any] = _reinstantiate_wrapped_cls(dataloader, *args, **kwargs)
    return result
