"""dflash_trainer/settings.py: NAME=VALUE into a module's annotated constants; a program's command line."""
import dataclasses
import signal
import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dflash_trainer import settings
from dflash_trainer.errors import UserError

SOURCE = '''"""python program.py [NAME=VALUE ...]"""
OUT: str = "out"
STEPS: int = 5
STOP_AT: int | None = None
LR: float = 0.5
COMPILE: bool = True
DEVICES: list[str] = ["cpu"]
LAYER_IDS: list[int] | None = None
OPTIONS: dict = {}
NOT_A_SETTING = 1
lower: int = 2
'''


@pytest.fixture
def program():
    return make_program()


def make_program():
    module = types.ModuleType("program")
    exec(SOURCE, vars(module))
    module.__doc__ = "python program.py [NAME=VALUE ...]"
    return module


def silent(text):
    """Takes what override() announces."""


def test_settings_are_the_annotated_uppercase_names(program):
    names = ["OUT", "STEPS", "STOP_AT", "LR", "COMPILE", "DEVICES", "LAYER_IDS", "OPTIONS"]
    assert list(settings.declared(program)) == names
    assert settings.declared(program)["LAYER_IDS"] == list[int] | None
    assert settings.values(program)["STEPS"] == 5


@pytest.mark.parametrize("word, value", [
    ("OUT=runs/a=b", "runs/a=b"),
    ("OUT=7", "7"),
    ("OUT=", ""),
    ("STEPS=12", 12),
    ("STEPS=-3", -3),
    ("STOP_AT=3", 3),
    ("STOP_AT=None", None),
    ("LR=1e-4", 1e-4),
    ("LR=2", 2.0),
    ("COMPILE=False", False),
    ("DEVICES=cuda:0,cuda:1", ["cuda:0", "cuda:1"]),
    ("DEVICES=['cuda:0', 'cpu']", ["cuda:0", "cpu"]),
    ("DEVICES=[]", []),
    ("LAYER_IDS=1,14,27", [1, 14, 27]),
    ("LAYER_IDS=(1, 2)", [1, 2]),
    ("LAYER_IDS=5", [5]),
    ("LAYER_IDS=None", None),
    ("OPTIONS={'enable_thinking': False}", {"enable_thinking": False}),
])
def test_a_word_sets_a_typed_value_and_is_announced(program, word, value):
    announced = []
    settings.override(program, [word], announced.append)
    name = word.partition("=")[0]
    found = getattr(program, name)
    assert found == value and type(found) is type(value)
    assert announced == [f"setting {name} = {value!r}"]
    settings.check_types(program)


@pytest.mark.parametrize("word, wanted", [
    ("STEPS=ten", "STEPS=ten: expected int"),
    ("STEPS=1.5", "STEPS=1.5: expected int"),
    ("STEPS=True", "STEPS=True: expected int"),
    ("STEPS=None", "STEPS=None: expected int"),
    ("STEPS=", "STEPS=: expected int"),
    ("STOP_AT=x", "STOP_AT=x: expected int | None"),
    ("LR=fast", "LR=fast: expected float"),
    ("LR=True", "LR=True: expected float"),
    ("COMPILE=no", "COMPILE=no: expected True or False"),
    ("COMPILE=0", "COMPILE=0: expected True or False"),
    ("LAYER_IDS=1,b", "LAYER_IDS=1,b: expected list[int] | None"),
    ("LAYER_IDS=[1, 2", "LAYER_IDS=[1, 2: expected list[int] | None"),
    ("OPTIONS=[1]", "OPTIONS=[1]: expected a dict such as {'name': False}"),
])
def test_a_value_of_another_type_is_refused(program, word, wanted):
    before = settings.values(program)
    with pytest.raises(UserError) as refused:
        settings.override(program, [word], silent)
    assert str(refused.value) == wanted
    assert settings.values(program) == before


@pytest.mark.parametrize("word, wanted", [
    ("STEP=3", "unknown setting 'STEP'; did you mean STEPS"),
    ("steps=3", "unknown setting 'steps'; did you mean STEPS"),
    ("DEVICE=cpu", "unknown setting 'DEVICE'; did you mean DEVICES"),
    ("QQQ=1", "unknown setting 'QQQ'"),
    ("NOT_A_SETTING=2", "unknown setting 'NOT_A_SETTING'"),
    ("STEPS", "unknown setting 'STEPS'; did you mean STEPS"),
])
def test_an_unknown_name_is_refused_with_what_is_near(program, word, wanted):
    with pytest.raises(UserError) as refused:
        settings.override(program, [word], silent)
    assert str(refused.value).startswith(wanted)


@pytest.mark.parametrize("name, value", [
    ("STEPS", 1.0), ("STEPS", True), ("STEPS", None), ("LR", "0.1"), ("OUT", None), ("DEVICES", "cpu"),
    ("DEVICES", [0]), ("DEVICES", ("cpu",)), ("LAYER_IDS", [1, None]), ("OPTIONS", None),
])
def test_an_edited_constant_of_another_type_is_refused(program, name, value):
    setattr(program, name, value)
    with pytest.raises(UserError, match=f"^{name} = .*: must be of type "):
        settings.check_types(program)


def test_a_whole_number_is_a_float_too(program):
    program.LR = 1
    settings.check_types(program)


@pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan")])
def test_positive_numbers(program, value):
    program.LR = value
    with pytest.raises(UserError, match="LR = .*: must be a number above 0"):
        settings.require_positive(program, "STEPS", "LR")
    settings.require_positive(program, "STEPS", "STOP_AT")  # None passes


def test_one_of_several():
    settings.require_one_of("LOSS", "decay", ("decay", "dpace"))
    with pytest.raises(UserError, match="LOSS = 'hinge': must be one of decay, dpace"):
        settings.require_one_of("LOSS", "hinge", ("decay", "dpace"))


def test_a_snapshot_is_frozen_and_does_not_follow_the_module(program):
    frozen = settings.snapshot(program)
    program.STEPS = 6
    assert frozen.STEPS == 5
    with pytest.raises(dataclasses.FrozenInstanceError):
        frozen.STEPS = 7


def test_changed_puts_back_whatever_was_set_inside(program):
    with settings.changed(program, STEPS=7):
        assert program.STEPS == 7
        settings.override(program, ["LR=3"], silent)
    assert (program.STEPS, program.LR) == (5, 0.5)
    with pytest.raises(ZeroDivisionError), settings.changed(program, STEPS=7):
        raise ZeroDivisionError
    assert program.STEPS == 5
    with pytest.raises(UserError, match="STEP"), settings.changed(program, STEP=7):
        pass


words = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(st.fixed_dictionaries({
    "OUT": words,
    "STEPS": st.integers(),
    "STOP_AT": st.none() | st.integers(),
    "LR": st.floats(allow_nan=False, allow_infinity=False),
    "COMPILE": st.booleans(),
    "DEVICES": st.lists(words, max_size=3),
    "LAYER_IDS": st.none() | st.lists(st.integers(), max_size=3),
    "OPTIONS": st.dictionaries(words, st.integers() | st.booleans() | words, max_size=2),
}))
def test_words_carry_every_value_to_another_process(given_values):
    sender = make_program()
    vars(sender).update(given_values)
    receiver = make_program()
    settings.override(receiver, settings.as_words(sender), silent)
    assert settings.values(receiver) == given_values


def test_words_for_the_trainer_are_told_from_a_program_s_own(program):
    own, others = settings.split_words(program, ["STEPS=3", "ROWS=4", "file", "OUT=a=b", "EPOCHS=1"])
    assert (own, others) == (["STEPS=3", "file", "OUT=a=b"], ["ROWS=4", "EPOCHS=1"])


# ---------------------------------------------------------------------------------- a program's command line


def run(program, work, *argv, **how):
    return settings.run_program(program, work, list(argv), **how)


def test_a_program_runs_with_its_settings_and_words(program, capsys):
    def work(first, second="second"):
        return f"{first} {second} {program.STEPS}"
    assert run(program, work, "one", "STEPS=8", positional=2) == "one second 8"
    assert capsys.readouterr().out == "setting STEPS = 8\n"
    assert program.STEPS == 5, "a second call must start from the program's own values"
    assert run(program, lambda: None) == 0


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_is_the_docstring(program, flag, capsys):
    assert run(program, pytest.fail, "STEPS=x", flag) == 0
    assert capsys.readouterr().out.strip() == program.__doc__


@pytest.mark.parametrize("argv, wanted", [
    (["STEPS=x"], "error: STEPS=x: expected int\n"),
    (["one", "two"], "error: two: settings are given as NAME=VALUE\n"),
    (["one", "--steps"], "error: --steps: settings are given as NAME=VALUE\n"),
])
def test_a_mistake_is_one_line_and_exit_code_2(program, argv, wanted, capsys):
    assert run(program, pytest.fail, *argv, positional=1) == settings.EXIT_USER_ERROR == 2
    assert capsys.readouterr().err == wanted


def raising(error):
    def work():
        raise error
    return work


def test_errors_of_the_work_have_exit_codes_of_their_own(program, capsys):
    assert run(program, raising(UserError("OUT = x: is a file"))) == 2
    assert capsys.readouterr().err == "error: OUT = x: is a file\n"
    assert run(program, raising(KeyboardInterrupt())) == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted\n"
    assert run(program, raising(MemoryError())) == settings.EXIT_ERROR
    assert capsys.readouterr().err.startswith("error: out of memory on host: ")
    with pytest.raises(RuntimeError, match="a bug"):  # anything else is a fault of the program's: a traceback
        run(program, raising(RuntimeError("a bug")))


def test_a_closed_pipe_is_no_error(tmp_path):
    import subprocess
    program = tmp_path / "prints.py"
    root = str(settings.__file__).rsplit("/", 2)[0]
    program.write_text(
        f"import sys\nsys.path.insert(0, {root!r})\nfrom dflash_trainer import settings\n"
        "def work():\n    for i in range(10**5):\n        print(i)\n"
        "sys.exit(settings.run_program(sys.modules[__name__], work, []))\n")
    pipe = f"{sys.executable} {program} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", pipe], capture_output=True, text=True)
    assert done.stdout.split() == ["0", str(128 + signal.SIGPIPE)] and done.stderr == ""
