"""Messages of jsonargparse in plain words."""

from __future__ import annotations

import re

__all__ = ["in_plain_words"]

_KEY = re.compile(r'Parser key "([^"]+)"(?: element (\d+))?: ')
_UNION = re.compile(
    r"Does not validate against any of the Union subtypes Subtypes: \[(.*), "
    r"<class 'NoneType'>\] Errors: .* Given value type: .*? Given value: (.*)"
)
_OTHER = re.compile(r"Expected an? (.*?)\. Got value: (.*)")
_NO_FILE = re.compile(r"Unable to load config '(.*?)'")
_KINDS = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a finite number",
    "<class 'str'>": "text",
    "<class 'bool'>": "true or false",
    "collections.abc.Sequence[int]": 'whole numbers in brackets, such as "[1, 2]"',
    "tuple[int, ...]": 'whole numbers in brackets, such as "[1, 2]"',
}
_HINTS = {
    "does not accept option 'world_size'": ". Its name is num_gpus",
    "on_too_long": ". `simulate` runs every sample with every policy: remove or cut those that are "
    "too long. `plan` can skip them",
}


def in_plain_words(error: BaseException) -> str:
    """One line about a mistake in the options: which, what is allowed, what was given."""
    text = " ".join(str(error).split())
    text = re.sub(r"^argument (--[\w.-]+: )(\1)?", r"\1", text)  # our own types name the option
    name = ""
    if key := _KEY.match(text):
        option, element = key.groups()
        own = option.startswith("planning.")  # whose names keep their underscores
        name = f"--{option if own else option.replace('_', '-')}"
        name += f", value {element}: " if element else ": "
        text = text[key.end() :]
    if found := _UNION.fullmatch(text) or _OTHER.fullmatch(text):
        kind, value = found.groups()
        text = f"expected {_plain(kind)}; got {value}"
    elif found := _NO_FILE.match(text):
        text = f"expected the options by name, or a file that holds them; got {found[1]}"
    elif not name:
        refused = "does not accept option" in text or "nrecognized arguments" in text
        text += next((hint for part, hint in _HINTS.items() if refused and part in text), "")
    return name + text


def _plain(kind: str) -> str:
    if kind.startswith("typing.Literal["):
        return "one of " + ", ".join(re.findall(r"'([^']*)'", kind))
    return _KINDS.get(kind, kind)
