"""What LightningCLI's parser says about options of nested classes, in plain words."""

from __future__ import annotations

import difflib
import re
import textwrap
from collections.abc import Callable

from lightning_dcp.cli.messages import in_plain_words

__all__ = ["training_mistake"]

_KEY = re.compile(r'\AParser key "([^"]+)"(?: element (\d+))?:\s*')
_CLASS = re.compile(
    r"^( *)(?:- )?Problem with given class_path '([^']+)':\n((?:\1 {2,}.*(?:\n|\Z))+)", re.MULTILINE
)
_UNION = re.compile(
    r"\A\s*Does not validate against any of the Union subtypes\s+Subtypes: .*\n\s*Errors:\n"
    r"((?:.*\n)+)\s*Given value type"
)
_ITEM = re.compile(r"^( *)- (.*(?:\n\1 +.*)*)", re.MULTILINE)
_OTHER_TYPE = re.compile(
    r"Expected an? <class '[^']*'>\.?( Got value: .*)?|Not a valid subclass of .*", re.DOTALL
)
_NESTED = re.compile(r"NestedArg\(key='[^']*', val=('?)(.*?)\1\)")
_UNKNOWN = re.compile(
    r"unrecognized arguments: --(?P<flag>[\w.]+).*"
    r"|Group '(?P<group>[^']+)' does not accept option '(?P<name>[^']+)'"
    r"|(?:Subcommand '\w+' does not accept option|Option) '(?P<option>[^']+)'"
)
_NO_CLASS = re.compile(r"module '[^']+' has no attribute '[^']+'|No module named '[^']+'")
_NO_PATH = re.compile(r"Expected a dot import path string: (\S+)")
_NO_SUBCLASS = re.compile(r"does not correspond to a subclass of (\w+)")
_MISSING = re.compile(r"required: (?:\w+\.)?(model|data)\b")

_TRAINER = "lightning.Trainer"
_TOP = ["config", "seed_everything", "trainer", "model", "data", "optimizer", "lr_scheduler"]
_TOP += ["ckpt_path", "debug"]


def training_mistake(text: str, *, options_of: Callable[[str], list[str]]) -> str:
    """One line about a mistake in the options: which, what is allowed, what was given.

    Args:
        text: What the parser says.
        options_of: Options of the class at a dotted path, those of nested option classes with dots.
    """
    if found := _MISSING.search(text):
        return (
            f"--{found[1]} is missing. Name the class, such as --{found[1]} my_module.MyModel, or"
            f" write {found[1]}: with class_path: and init_args: into the file of --config."
        )
    option, text = _without_key("", text)
    path = ""
    while found := _CLASS.search(text):  # a class may be given among the options of a class
        path = found[2]
        option, text = _without_key(option, textwrap.dedent(found[3]))
    text = _told(text)
    if unknown := _UNKNOWN.search(text):
        return _no_such_option(option, path, unknown, options_of)
    if path and _NO_CLASS.fullmatch(text):
        return f"{option}: there is no class {path}: {text}."
    if "NestedArg" in text and (found := _NO_PATH.search(text)):
        key = re.findall(r"NestedArg\(key='([^']+)'", text)[0]
        return (
            f"{option}.{key}: the strategy {found[1]} is given by its name, which takes no options."
            f" Give its class: {option} lightning_dcp.DCPStrategy, or class_path: in the file."
        )
    if option and (found := _NO_PATH.search(text)):
        return (
            f"{option}: there is no class {found[1]}. Write its module too, such as"
            f" my_module.{found[1]}; it is looked for in the current folder as well."
        )
    if option and (found := _NO_SUBCLASS.search(text)):
        return f"{option}: the class that was given is no {found[1]}."
    plain = in_plain_words(ValueError(_NESTED.sub(r"\2", text)))
    return f"{option}: {plain}" if option else plain


def _without_key(option: str, text: str) -> tuple[str, str]:
    """Move the key that a message begins with over to the name of the option."""
    if found := _KEY.match(text):
        option = f"{option}.{found[1]}" if option else f"--{found[1]}"
        option += f", value {found[2]}" if found[2] else ""
        text = text[found.end() :]
    return option, text.strip()


def _told(text: str) -> str:
    """Of the errors about each type of a union, the one that is not about another type."""
    while found := _UNION.match(text):
        items = [textwrap.dedent(" " * 99 + item[2]).strip() for item in _ITEM.finditer(found[1])]
        items = [item for item in items if not _OTHER_TYPE.fullmatch(item)]
        if len(items) != 1 or _NO_PATH.match(items[0]):
            break
        text = items[0]
    return text


def _no_such_option(
    option: str, path: str, found: re.Match[str], options_of: Callable[[str], list[str]]
) -> str:
    name = found["flag"] or found["option"] or f"{found['group']}.{found['name']}"
    if not path and name.startswith("trainer."):
        option, path, name = "--trainer", _TRAINER, name.removeprefix("trainer.")
    options = options_of(path) if path else _TOP
    given = f"{option}.{name}" if option else f"--{name}"
    near = difflib.get_close_matches(name, options, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    group = name.rpartition(".")[0]
    allowed = [o for o in options if o.rpartition(".")[0] == group] or options
    there = f"There are {', '.join(allowed)}." if allowed else "It has none."
    return f"{given}: {path or 'the command'} has no option {name}.{hint} {there}"
