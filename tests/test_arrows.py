"""Imports go down: dev, tools -> train_dflash (dev alone) -> dflash_trainer -> model_drafter, flex_utils."""
import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OWN = {"train_dflash", "model_drafter", "flex_utils", "dflash_trainer", "tools", "dev", "tests"}
MAY_IMPORT = {
    "model_drafter.py": set(),
    "flex_utils.py": set(),
    "dflash_trainer": {"dflash_trainer", "model_drafter", "flex_utils"},
    "train_dflash.py": {"dflash_trainer", "model_drafter", "flex_utils"},
    "test_smoke.py": {"train_dflash", "dflash_trainer", "model_drafter", "flex_utils"},
    "tools": {"dflash_trainer", "model_drafter", "flex_utils"},
    "dev": {"train_dflash", "dflash_trainer", "model_drafter", "flex_utils"},
}
SHARED = {"bench_rig", "tiny_jobs"}  # in dev/, no programs: what several programs there use
# inside the library, lower ones first: a module imports those before it alone
LAYERS = [
    "errors",
    "settings",
    "chat_lines",
    "data_files",
    "answer_mask",
    "token_cache",
    "rows",
    "features",
    "target",
    "decoding",
]


def imported(path):
    """Dotted names of all modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def sources(place):
    path = ROOT / place
    return [path] if path.is_file() else sorted(path.glob("*.py"))


@pytest.mark.parametrize("place", MAY_IMPORT)
def test_arrows_go_down(place):
    for path in sources(place):
        siblings = {p.stem for p in path.parent.glob("*.py")} if place in ("tools", "dev") else set()
        for name in imported(path):
            top = name.split(".")[0]
            if top in OWN:
                assert top in MAY_IMPORT[place], f"{path.name} imports {name}"
            assert top not in siblings - SHARED, f"{path.name} imports the program {name}"


@pytest.mark.parametrize("module", LAYERS)
def test_the_library_has_layers(module):
    path = ROOT / "dflash_trainer" / f"{module}.py"
    for name in imported(path):
        part = name.split(".")
        if part[0] == "dflash_trainer" and part[1:2] and part[1] in LAYERS:
            assert LAYERS.index(part[1]) < LAYERS.index(module), f"{module} imports {name}"


def test_it_sees_the_imports():
    found = set(imported(ROOT / "train_dflash.py"))
    assert {"model_drafter", "dflash_trainer.checkpoints"} <= found
