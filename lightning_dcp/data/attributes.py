"""A data set that stands in for the user's, whose attributes it passes on."""

from __future__ import annotations

from typing import Any, ClassVar

from typing_extensions import override

__all__ = ["AttributesOfDataset"]


class AttributesOfDataset:
    """Attributes are those of `_dataset`, to read and to set, but for the class's own.

    So a `worker_init_fn` that opens a file in `get_worker_info().dataset`, or code that looks at
    `loader.dataset`, works as before. Mixed in before torch's class of data sets.
    """

    #: Names of what is set on this object itself; `_dataset` among them.
    _OWN: ClassVar[frozenset[str]]
    _dataset: Any

    def __getattr__(self, name: str) -> Any:
        # Only what is not found here. Special methods are not passed on: pickling and copying look
        # for some before there is a data set.
        if name in self._OWN or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self._dataset, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            super().__setattr__(name, value)
        else:
            setattr(self._dataset, name, value)
