"""What the code looks like in numbers, to be looked at beside nanoGPT and others. Facts, no quota.

    python dev/code_measures.py        a table: each file of the trainer and its library, and their totals
    python dev/code_measures.py walk   the functions a training run meets, thread by thread, in reading order
    ... ROOT=/path/to/another/tree     of another checkout
    ... FILES=a.py,b.py                the table for these files instead (any project's)

Columns of the table:
    lines       all of them; `code` are those that are not blank, a comment alone, or a docstring
    nodes       syntax nodes, ast.expr and ast.stmt; per code line
    pairs       assignments of a tuple to a tuple, `a, b = x, y`; per 1,000 lines
    compr.      comprehensions and generator expressions; per 1,000 lines
    comments    comments; per 100 lines of code and docstring
    hints       public functions and methods with a type hint, of all public ones (not nested ones)

The walk trains in this process, one target thread and one drafter thread on packed chats, without
evaluation, and lists for each thread the named functions of the project in the order in which that thread
first enters them. What it counts is how often the file changes along that list (marked ">").
"""
import ast
import contextlib
import io
import os
import sys
import tempfile
import threading
import tokenize
from pathlib import Path
from types import FrameType
from typing import NamedTuple

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


# ----------------------------------------------------------------------------------------------- the table

class Measures(NamedTuple):
    lines: int
    code_lines: int
    code_and_docstring_lines: int
    nodes: int
    pairs: int
    comprehensions: int
    comments: int
    hinted: int
    public: int


def library_files(root: Path) -> list[Path]:
    """The trainer and its library: *.py of the top level and of dflash_trainer/. In a tree from before that
    package: what train_dflash.py imports of tools/, at any depth."""
    top = [path for path in sorted(root.glob("*.py")) if path.name != "test_smoke.py"]
    package = root / "dflash_trainer"
    if package.is_dir():
        return top + sorted(package.rglob("*.py"))
    found = []
    waiting = [path for path in top if path.name == "train_dflash.py"]
    while waiting:
        for path in imported_files(waiting.pop(), root):
            if path not in found and path.parent != root:
                found.append(path)
                waiting.append(path)
    return top + sorted(found)


def imported_files(path: Path, root: Path) -> list[Path]:
    """Files of the project that `path` imports, wherever in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    paths = [root / (name.replace(".", "/") + ".py") for name in sorted(names)]
    return [path for path in paths if path.exists()]


def docstring_lines(tree: ast.Module) -> set[int]:
    """Numbers of the lines that docstrings take up."""
    numbers = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            numbers.update(range(docstring.lineno, docstring.end_lineno + 1))
    return numbers


def is_pair_assignment(node: ast.AST) -> bool:
    return (isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)
            and isinstance(node.targets[0], ast.Tuple))


def public_functions(body: list[ast.stmt]) -> list[ast.FunctionDef]:
    """Functions of a module and methods of its public classes, without those that are nested in functions."""
    found = []
    for node in body:
        if isinstance(node, (ast.ClassDef, *FUNCTIONS)) and not node.name.startswith("_"):
            found += public_functions(node.body) if isinstance(node, ast.ClassDef) else [node]
    return found


def has_hint(function: ast.FunctionDef) -> bool:
    given = function.args
    arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    hints = [function.returns]
    hints += [argument.annotation for argument in arguments if argument]
    return any(hint is not None for hint in hints)


def measure(path: Path) -> Measures:
    text = path.read_text()
    lines = [line.strip() for line in text.splitlines()]
    tree = ast.parse(text)
    nodes = list(ast.walk(tree))
    docstrings = docstring_lines(tree)
    written = [number for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    functions = public_functions(tree.body)
    return Measures(
        lines=len(lines),
        code_lines=sum(number not in docstrings for number in written),
        code_and_docstring_lines=len(written),
        nodes=sum(isinstance(node, (ast.expr, ast.stmt)) for node in nodes),
        pairs=sum(map(is_pair_assignment, nodes)),
        comprehensions=sum(isinstance(node, COMPREHENSIONS) for node in nodes),
        comments=sum(token.type == tokenize.COMMENT for token in tokens),
        hinted=sum(map(has_hint, functions)),
        public=len(functions))


def table_line(name: str, m: Measures) -> str:
    nodes = m.nodes / max(1, m.code_lines)
    pairs = 1000 * m.pairs / max(1, m.lines)
    comprehensions = 1000 * m.comprehensions / max(1, m.lines)
    comments = 100 * m.comments / max(1, m.code_and_docstring_lines)
    return (f"{name:34} {m.lines:6,} {m.code_lines:6,} {m.nodes:7,} {nodes:9.2f} {pairs:6.1f} "
            f"{comprehensions:7.1f} {comments:9.1f} {m.hinted:5} of {m.public}")


def print_table(root: Path, files: list[Path]) -> None:
    print(f"{'file':34} {'lines':>6} {'code':>6} {'nodes':>7} {'per line':>9} {'pairs':>6} {'compr.':>7} "
          f"{'comments':>9} {'hints':>8}")
    measures = [measure(path) for path in files]
    for path, of_file in zip(files, measures, strict=True):
        name = path.relative_to(root) if path.is_relative_to(root) else path
        print(table_line(str(name), of_file))
    total = Measures(*map(sum, zip(*measures, strict=True)))
    print(table_line(f"total of {len(files)} files", total))


# ------------------------------------------------------------------------------------------------ the walk

class Function(NamedTuple):
    file: str
    line: int
    name: str


class Walk:
    """The functions of the project that each thread enters, in the order of the first time."""

    def __init__(self, root: Path):
        self.prefix = f"{root}/"
        self.met = {}  # name of a thread -> {Function: None}, in order

    def on_event(self, frame: FrameType, event: str, _argument: object) -> None:
        """As sys.setprofile calls it."""
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(self.prefix) or code.co_name.startswith("<"):
            return
        file = code.co_filename.removeprefix(self.prefix)
        if file.startswith((".venv/", "dev/")):
            return
        function = Function(file, code.co_firstlineno, code.co_qualname)
        of_thread = self.met.setdefault(threading.current_thread().name, {})
        of_thread.setdefault(function)

    @contextlib.contextmanager
    def recording(self):
        """This thread and all that start meanwhile."""
        threading.setprofile(self.on_event)
        sys.setprofile(self.on_event)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


def changes_of_file(functions: list[Function]) -> int:
    pairs = zip(functions, functions[1:], strict=False)
    return sum(one.file != other.file for one, other in pairs)


def walk_of_one_run(root: Path) -> Walk:
    """Train a tiny drafter with the trainer of the tree at `root`; raises RuntimeError where that fails."""
    import tiny_jobs  # torch and transformers are imported for the walk alone

    walk = Walk(root)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        os.environ.update(
            XDG_CACHE_HOME=str(folder / "cache"), HF_HUB_OFFLINE="1", TQDM_DISABLE="1",
            CUDA_VISIBLE_DEVICES="")
        chats = [line for line in tiny_jobs.chat_lines(60, seed=0) if "messages" in line]
        data = tiny_jobs.write_lines(folder / "chats.jsonl", chats)
        target = tiny_jobs.make_target(folder / "target")
        settings = dict(
            tiny_jobs.SETTINGS, TARGET=target, DATA=data, SEQ_LEN=96, SAVE_EVERY=2, OUT=folder / "out")
        arguments = tiny_jobs.arguments(settings)
        sys.path.insert(0, str(root))
        os.chdir(root)
        import train_dflash

        output = io.StringIO()
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output), walk.recording():
            code = train_dflash.main(["train", *arguments])
        if code:
            raise RuntimeError(f"the run ended with exit code {code}:\n{output.getvalue()[-3000:]}")
    return walk


def print_walk(walk: Walk) -> None:
    for thread, met in walk.met.items():
        print(f"\n{thread}")
        file = None
        for function in met:
            mark = ">" if file not in (None, function.file) else " "
            file = function.file
            print(f"  {mark} {function.file}:{function.line} {function.name}")
    different = set().union(*walk.met.values())
    files = {function.file for function in different}
    print(f"\n{len(different)} functions in {len(files)} files")
    total = 0
    for thread, met in walk.met.items():
        changes = changes_of_file(list(met))
        total += changes
        print(f"{thread:12} {len(met):4} functions {changes:4} changes of file")
    print(f"all threads {total} changes of file")


def main(argv: list[str]) -> int:
    """-> exit code."""
    given = {"ROOT": str(Path(__file__).resolve().parents[1]), "FILES": ""}
    words = [word for word in argv if "=" not in word]
    for argument in argv:
        name, equals, value = argument.partition("=")
        if equals and name in given:
            given[name] = value
        elif argument != "walk":
            print(f"error: {argument}: it takes the word walk, and {', '.join(given)} as NAME=VALUE",
                  file=sys.stderr)
            return 2
    root = Path(given["ROOT"]).resolve()
    if words:
        print_walk(walk_of_one_run(root))
        return 0
    files = [Path(name) for name in given["FILES"].split(",") if name] or library_files(root)
    missing = [str(path) for path in files if not path.is_file()]
    if missing or not files:
        print(f"error: no such file: {', '.join(missing) or root / 'train_dflash.py'}", file=sys.stderr)
        return 2
    print_table(root, files)
    return 0


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))
