"""The one way to set a constant: annotated UPPERCASE names at a program's top, NAME=VALUE as its arguments.

    declared(module)             names and types of a module's settings
    override(module, words)      NAME=VALUE words into the module, each one typed, checked and printed
    check_types(module)          constants may have been edited: every value has its declared type
    require_positive             a number above 0, or None where the type allows it
    snapshot(module)             a frozen copy, for everything outside the hot path
    changed(module, NAME=...)    other values for a while (tests, benchmarks)
    as_words(module)             the NAME=VALUE words that make another process's settings equal to these
    split_words(module, words)   for programs that pass settings on to the trainer
    run_program(module, work)    a program's command line from --help to its exit code

A module is the module object, `sys.modules[__name__]` in the program itself: under `__main__` an import of
the program by name would be a second copy with constants of its own.
"""
import ast
import dataclasses
import difflib
import math
import os
import signal
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType

from dflash_trainer.errors import UserError, out_of_memory, require

EXIT_ERROR = 1
EXIT_USER_ERROR = 2


def declared(module: ModuleType) -> dict[str, object]:
    """Annotated UPPERCASE names of a module -> their types. Names without an annotation are no settings."""
    hints = typing.get_type_hints(module)
    return {name: hint for name, hint in hints.items() if name.isupper()}


def values(module: ModuleType) -> dict[str, object]:
    """The present value of every setting."""
    return {name: getattr(module, name) for name in declared(module)}


def snapshot(module: ModuleType) -> object:
    """A frozen dataclass instance with one field per setting."""
    fields = list(declared(module).items())
    frozen = dataclasses.make_dataclass("Settings", fields, frozen=True)
    return frozen(**values(module))


@contextmanager
def changed(module: ModuleType, **new: object) -> Iterator[None]:
    """Settings with other values inside the `with` block, put back after it."""
    old = values(module)
    for name in new:
        require(name in old, f"unknown setting {name!r}")
    vars(module).update(new)
    try:
        yield
    finally:
        vars(module).update(old)


def has_type(value: object, hint: object) -> bool:
    if isinstance(hint, types.UnionType):
        return any(has_type(value, kind) for kind in typing.get_args(hint))
    if typing.get_origin(hint) is list:
        (kind,) = typing.get_args(hint)
        return type(value) is list and all(has_type(item, kind) for item in value)
    if hint is float:
        return type(value) in (int, float)
    return type(value) is hint


def type_name(hint: object) -> str:
    """A type in a user's words."""
    words = {bool: "True or False", dict: "a dict such as {'name': False}"}
    if hint in words:
        return words[hint]
    is_plain = isinstance(hint, type) and not typing.get_args(hint)
    return hint.__name__ if is_plain else str(hint)


def convert(text: str, kind: type) -> object:
    """Text of NAME=VALUE -> a value of `kind`; ValueError, SyntaxError or TypeError where it isn't one."""
    if kind is str:
        return text
    if typing.get_origin(kind) is list:
        (item_kind,) = typing.get_args(kind)
        items = ast.literal_eval(text) if text[:1] in ("[", "(") else text.split(",")
        return [convert(str(item), item_kind) for item in items]
    value = ast.literal_eval(text)
    if not has_type(value, kind):
        raise ValueError(text)
    return float(value) if kind is float else value


def override(module: ModuleType, words: Iterable[str],
             announce: Callable[[str], object] | None = print) -> None:
    """NAME=VALUE words -> the module's settings, each announced; UserError for a wrong name or type."""
    hints = declared(module)
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in hints:
            near = difflib.get_close_matches(name.upper(), hints)
            also = f"; did you mean {', '.join(near)}?" if near else ""
            raise UserError(f"unknown setting {name!r}{also}")
        hint = hints[name]
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        try:
            is_none = text == "None" and type(None) in kinds
            value = None if is_none else convert(text, kinds[0])
        except (ValueError, SyntaxError, TypeError):
            raise UserError(f"{name}={text}: expected {type_name(hint)}") from None
        setattr(module, name, value)
        if announce:
            announce(f"setting {name} = {value!r}")


def as_words(module: ModuleType) -> list[str]:
    """The inverse of `override`: NAME=VALUE words that give another copy of the program these settings."""
    return [f"{name}={value}" for name, value in values(module).items()]


def split_words(module: ModuleType, words: Iterable[str]) -> tuple[list[str], list[str]]:
    """Command-line words -> (those for this module, NAME=VALUE for another: settings that it lacks)."""
    names = declared(module)
    own = []
    others = []
    for word in words:
        name, equals, _ = word.partition("=")
        is_foreign = equals and name not in names
        (others if is_foreign else own).append(word)
    return own, others


def check_types(module: ModuleType) -> None:
    """UserError naming the first setting whose value has another type than its annotation."""
    for name, hint in declared(module).items():
        value = getattr(module, name)
        require(has_type(value, hint), f"{name} = {value!r}: must be of type {type_name(hint)}")


def require_positive(module: ModuleType, *names: str) -> None:
    for name in names:
        value = getattr(module, name)
        require(value is None or 0 < value < math.inf, f"{name} = {value}: must be a number above 0")


def require_one_of(name: str, value: object, legal: Iterable) -> None:
    require(value in legal, f"{name} = {value!r}: must be one of {', '.join(legal)}")


def user_errors_as_lines(work: Callable[[], int]) -> int:
    """work() -> its exit code. A mistake of the user's, a closed pipe, Ctrl-C or a full memory is one line
    and an exit code of its own, never a traceback."""
    try:
        code = work()
        sys.stdout.flush()
        return code
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        return EXIT_USER_ERROR
    except BrokenPipeError:  # `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except (RuntimeError, MemoryError) as e:  # torch.OutOfMemoryError is a RuntimeError
        text = out_of_memory(e)
        if text is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return EXIT_ERROR


def run_program(
    module: ModuleType,
    work: Callable[..., int | None],
    argv: list[str],
    positional: int = 0,
    announce: Callable[[str], object] = print,
) -> int:
    """A program's command line -> exit code: --help prints its docstring, NAME=VALUE sets, the first
    `positional` words without `=` go to work(*words) as they are. announce: see `override`."""
    def start() -> int:
        if {"-h", "--help"} & set(argv):
            print(module.__doc__)
            return 0
        words = [word for word in argv if "=" not in word]
        require(len(words) <= positional, f"{' '.join(words[positional:])}: settings are given as NAME=VALUE")
        with changed(module):  # a second call in one process starts from the program's own values again
            override(module, [word for word in argv if "=" in word], announce)
            check_types(module)
            return work(*words) or 0

    return user_errors_as_lines(start)
