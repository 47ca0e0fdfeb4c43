"""Nothing is lost: dead threads, wrong settings, signals, kill -9, damaged checkpoints, full disks."""
import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file

import common
import train_dflash as trainer
from common import (
    EOS,
    VOCAB,
    assert_same,
    complete,
    data_file,
    eval_lines,
    fail_at,
    log_lines,
    metrics,
    metrics_text,
    no_leftovers,
    plus_one_target,
    random_target,
    scratch,
    start,
    threads,
    train,
    train_ok,
    until,
    untimed,
)
from dflash_trainer import (
    checkpoints,
    errors,
    workers,
)
from dflash_trainer.rows import RowStream
from dflash_trainer.run_log import RunLog
from dflash_trainer.target import check_weights

SHAPE = dict(ROWS_PER_STEP=2, STEPS=8, EVAL_EVERY=2, SAVE_EVERY=2, KEEP=3)


@pytest.fixture(scope="module")
def undisturbed():
    return train_ok(scratch() / "undisturbed", **SHAPE)


def printed(capfd):
    got = capfd.readouterr()
    return got.out + got.err


# ------------------------------------------------------------------------------------------ dead threads


STAGES = {  # stage of a row's or a step's way: the thread that dies there, the function that raises
    "reader": ("target", RowStream.row),
    "target": ("target", trainer.target_features),
    "batch": ("target", trainer.send_batch),
    "put": ("target", trainer.Queues.put),
    "drafter": ("drafter", trainer.micro_step),
    "sum": ("drafter", trainer.sum_gradients),
    "update": ("drafter", trainer.Optimizer.update),
    "evaluate": ("drafter", trainer.evaluate_row),
    "evaluation's end": ("drafter", trainer.merge_evaluation),
    "log": ("drafter", RunLog.log_if_due),
    "state": ("drafter", trainer.Optimizer.state),
    "saver": ("saver", checkpoints.write_checkpoint),
}


@pytest.mark.parametrize("call", [1, 3])
@pytest.mark.parametrize("stage", STAGES)
def test_a_worker_that_dies_ends_the_run(tmp_path, monkeypatch, capfd, stage, call):
    thread, function = STAGES[stage]
    died = fail_at(monkeypatch, function, call)
    code = train(tmp_path / "o", **dict(SHAPE, EVAL_EVERY=1, SAVE_EVERY=1), **threads(2, 2))
    text = printed(capfd)  # train() itself finds threads that are left
    assert code not in (0, 2) and "does not end" not in text
    assert died and died[0].startswith(thread), died
    assert f"thread {died[0]}" in text and f"boom in {function.__name__}" in text and "Traceback" in text


FULL_DEVICE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.\nmore lines")
FULL_HOST = RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate")
LOWER = "SEQ_LEN", "NUM_ANCHORS", "LOSS_CHUNK", "QUEUE_DEPTH", "TARGET_DEVICES", "DRAFTER_DEVICES"


@pytest.mark.parametrize("function, role, error", [
    (trainer.micro_step, "thread drafter-0", FULL_DEVICE),
    (trainer.target_features, "thread target-0", FULL_DEVICE),
    (trainer.sum_gradients, "thread drafter-0", FULL_HOST),
    (checkpoints.write_checkpoint, "thread saver", MemoryError()),
    (trainer.load_target, "error", FULL_DEVICE),
    (check_weights, "error", FULL_DEVICE),
    (trainer.Optimizer.load_state, "error", FULL_HOST)])
def test_out_of_memory_is_one_line(tmp_path, monkeypatch, capfd, undisturbed, function, role, error):
    """Role, device, budget and the constants to lower; also in the main thread, while loading."""
    def full(*args):
        raise error
    out = tmp_path / "o"
    if function is trainer.Optimizer.load_state:
        shutil.copytree(undisturbed, out, symlinks=True)
    common.replace_function(monkeypatch, function, full)
    assert train(out, **SHAPE) == 1
    text = printed(capfd)
    line, = (x for x in text.splitlines() if "out of memory on" in x)
    assert role in line and "Traceback" not in text and (str(error) or "MemoryError").splitlines()[0] in line
    assert re.search(r"on host: peak \d+\.\d\d of \d+\.\d\d GiB", line) and all(n in line for n in LOWER)


def test_out_of_memory_names_the_gpu_that_is_full(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    card = SimpleNamespace(total_memory=96 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: card)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda i: (90 + i) * 2**30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    named = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 9 GiB. GPU 5 has a total capacity of"
    )
    assert "out of memory on cuda:5: peak 95.00 of 96.00 GiB" in errors.out_of_memory(named)
    assert "cuda:3: peak 93.00 of" in errors.out_of_memory(torch.OutOfMemoryError("CUDA is full"))
    assert errors.out_of_memory(RuntimeError("shapes differ")) is None


# ---------------------------------------------------------------------------------------- wrong settings


def one_line(capfd, *wanted):
    """Exit 2 left one line on stderr that holds all of `wanted`."""
    got = capfd.readouterr()
    lines = [x for x in got.err.splitlines() if x.strip() and not x.startswith("tokenising")]  # a bar's rest
    assert len(lines) == 1, f"{len(lines)} lines on stderr:\n{got.err[-1500:]}"
    missing = [w for w in map(str, wanted) if w not in lines[0]]
    assert not missing, f"{missing} not in: {lines[0]}"


WRONG = {
    "unknown name": (dict(NOSUCH=1), "NOSUCH"),
    "near name": (dict(STEP=1), "STEPS"),
    "word for int": (dict(SEQ_LEN="abc"), "SEQ_LEN", "abc", "int"),
    "float for int": (dict(LOG_EVERY=1.5), "LOG_EVERY", "1.5", "int"),
    "list of words": (dict(TARGET_LAYER_IDS="a,b"), "TARGET_LAYER_IDS", "a,b", "None"),
    "json for dict": (dict(CHAT_TEMPLATE_KWARGS='{"a": false}'), "CHAT_TEMPLATE_KWARGS", "a dict such as"),
    "word for bool": (dict(COMPILE="yes"), "COMPILE", "yes", "True or False"),
    "choice": (dict(LOSS="cubic"), "LOSS", "cubic", "decay", "dpace"),
    "zero": (dict(LR=0), "LR", "0"),
    "block of one": (dict(BLOCK_SIZE=1), "BLOCK_SIZE", "1", "2"),
    "mask id outside": (dict(MASK_TOKEN_ID=70), "MASK_TOKEN_ID", 70, VOCAB),
    "negative mask id": (dict(MASK_TOKEN_ID=-1), "MASK_TOKEN_ID", -1, VOCAB),
    "mask id is eos": (dict(MASK_TOKEN_ID=EOS), "MASK_TOKEN_ID", EOS, "eos"),
    "last layer tapped": (dict(TARGET_LAYER_IDS="0,3"), "TARGET_LAYER_IDS", "3", "0..2"),
    "negative tap": (dict(TARGET_LAYER_IDS="-1,2"), "TARGET_LAYER_IDS", "-1", "0..2"),
    "falling taps": (dict(TARGET_LAYER_IDS="2,0"), "TARGET_LAYER_IDS", "[2, 0]"),
    "too few layers": (dict(TARGET_LAYER_IDS=None), "TARGET_LAYER_IDS", "4 layers"),
    "no target": (dict(TARGET="/nowhere/model"), "TARGET", "/nowhere/model", "no such directory"),
    "no model of this name": (
        dict(TARGET="nobody/nothing"),
        "TARGET",
        "nobody/nothing",
        "not a directory here",
    ),
    "negative seed": (dict(SEED=-1), "SEED", "-1"),
    "negative temperature": (dict(TEMPERATURE=-1), "TEMPERATURE", "-1"),
    "no data": (dict(DATA="/nowhere/train.jsonl"), "DATA", "/nowhere/train.jsonl"),
    "no eval data": (dict(EVAL_DATA="/nowhere/eval.jsonl", EVAL_EVERY=2), "EVAL_DATA", "/nowhere/eval.jsonl"),
    "no checkpoint": (dict(RESUME="/nowhere/step_1"), "RESUME", "/nowhere/step_1"),
    "no initial drafter": (dict(INIT_FROM="/nowhere/drafter"), "INIT_FROM", "/nowhere/drafter"),
    "drafters without rows": (
        dict(ROWS_PER_STEP=1, DRAFTER_DEVICES="cpu,cpu"),
        "ROWS_PER_STEP",
        "1",
        "2",
        "DRAFTER_DEVICES",
    ),
    "no such device": (dict(DRAFTER_DEVICES="cuda:99"), "DRAFTER_DEVICES", "cuda:99", "cpu"),
    "no such kind": (dict(TARGET_DEVICES="gpu"), "TARGET_DEVICES", "gpu", "cpu"),
    "layer types": (dict(LAYER_TYPES="full_attention"), "LAYER_TYPES", "DRAFT_LAYERS", "1", "2"),
    "layer kind": (dict(LAYER_TYPES="full_attention,linear"), "LAYER_TYPES", "linear", "sliding_attention"),
    "too little data": (dict(STEPS=None, EPOCHS=1, ROWS_PER_STEP=500), "ROWS_PER_STEP", "500", "EPOCHS"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings_end_with_one_line(tmp_path, capfd, case):
    settings, *wanted = WRONG[case]
    assert train(tmp_path / "o", **settings) == 2
    one_line(capfd, *wanted)


def test_a_target_whose_weights_are_missing_is_refused(tmp_path, capfd):
    target = shutil.copytree(random_target(), tmp_path / "target")
    state = load_file(target / "model.safetensors")
    state.pop("model.layers.1.mlp.up_proj.weight")
    safetensors.torch.save_file(state, target / "model.safetensors", metadata={"format": "pt"})
    assert train(tmp_path / "o", TARGET=target) == 2
    assert "layers.1.mlp.up_proj.weight" in capfd.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("why", ["You are trying to access a gated repo.", "We couldn't connect to the hub"])
def test_a_gated_or_unreachable_target_says_what_to_do(tmp_path, monkeypatch, capfd, why):
    def refused(name):
        raise OSError(f"{why}\nand more lines")
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", refused)
    assert train(tmp_path / "o", TARGET="owner/gated") == 2
    one_line(capfd, "TARGET = owner/gated", why, "offline", "licence", "hf auth login")


@pytest.mark.parametrize("argv, wanted", [
    (["eval", "CKPT={}", "SEQ_LEN=0"], "SEQ_LEN = 0"),
    (["generate", "CKPT={}", "MAX_NEW_TOKENS=0"], "MAX_NEW_TOKENS"),
    (["eval", "CKPT={}", "NUM_ANCHORS=-1"], "NUM_ANCHORS"), (["inspect", "SEQ_LEN=-3"], "SEQ_LEN = -3"),
    (["generate"], "CKPT is empty"), (["generate", "CKPT=/nowhere"], "CKPT = /nowhere"),
    (["eval", "CKPT={}", "TARGET=/nowhere"], "TARGET = /nowhere"), (["inspect", "TARGET=/nowhere"], "TARGET"),
    (["generate", "CKPT={}", "TARGET_DEVICES=cuda:77"], "cuda:77"), (["eval", "CKPT={}/.."], "/../latest")])
def test_every_mode_checks_its_settings(capfd, undisturbed, argv, wanted):
    mode, *given = (word.format(undisturbed / "latest") for word in argv)
    assert common.run_main(mode, f"TARGET={random_target()}", "TARGET_DEVICES=cpu", *given) == 2
    one_line(capfd, wanted)


@pytest.mark.parametrize("missing", ["tokenizer", "chat template"])
def test_generate_needs_a_tokenizer_with_a_template(tmp_path, capfd, undisturbed, missing):
    target = shutil.copytree(random_target(), tmp_path / "target")
    for path in target.glob("*token*" if missing == "tokenizer" else "chat_template*"):
        path.unlink()
    checkpoint = f"CKPT={undisturbed / 'latest'}"
    assert common.run_main("generate", f"TARGET={target}", "TARGET_DEVICES=cpu", checkpoint) == 2
    one_line(capfd, f"TARGET = {target}", "no tokenizer with a chat template")


@pytest.mark.parametrize(
    "tool", ["dev/ablation.py", "tools/plot_metrics.py", "tools/random_target.py", "tools/regenerate.py"]
)
def test_a_tool_shows_what_it_is_for(tool, tmp_path):
    done = subprocess.run([sys.executable, str(common.ROOT / tool), "--help"], text=True, cwd=tmp_path,
                          capture_output=True)
    assert done.returncode == 0 and f"{tool} " in done.stdout, done
    assert not list(tmp_path.iterdir())


def test_an_unknown_mode_is_refused(capfd):
    assert common.run_main("trian") == 2
    one_line(capfd, "trian", "train")


INIT = {
    "block size": (dict(BLOCK_SIZE=6), "block_size", "6", "4"),
    "layers": (dict(DRAFT_LAYERS=3), "num_layers", "3", "2"),
    "taps": (dict(TARGET_LAYER_IDS="0,1"), "target_layer_ids", "(0, 1)", "(0, 2)"),
    "mask": (dict(MASK_TOKEN_ID=40), "mask_token_id", "40", "3"),
    "another target": (dict(TARGET=plus_one_target), "hidden_size", "64", "32"),
}


@pytest.mark.parametrize("case", INIT)
def test_a_drafter_that_does_not_fit_is_refused(tmp_path, capfd, undisturbed, case):
    settings, *wanted = INIT[case]
    settings = {k: v() if callable(v) else v for k, v in settings.items()}
    assert train(tmp_path / "o", INIT_FROM=undisturbed / "latest", **settings) == 2
    one_line(capfd, "INIT_FROM", *wanted)


RESUMED = {
    "fresh run wanted": (dict(RESUME="no"), "RESUME", "no"),
    "horizon": (dict(STEPS=9), "STEPS", "9", "8"),
    "seed": (dict(SEED=7), "SEED", "7", "0"),
    "taps": (dict(TARGET_LAYER_IDS="1,2"), "target_layer_ids", "(1, 2)", "(0, 2)"),
    "block size": (dict(BLOCK_SIZE=5), "block_size", "5", "4"),
    "rows a step": (dict(ROWS_PER_STEP=4), "ROWS_PER_STEP", "4", "2"),
    "sequence": (dict(SEQ_LEN=128), "SEQ_LEN", "128", "64"),
    "loss": (dict(LOSS="decay"), "LOSS", "decay", "dpace"),
    "data": (dict(DATA=lambda: data_file("other", 30, seed=9)), "DATA", "other"),
}


@pytest.mark.parametrize("case", RESUMED)
def test_what_can_not_be_resumed_is_refused(tmp_path, capfd, undisturbed, case):
    out = shutil.copytree(undisturbed, tmp_path / "o", symlinks=True)
    settings, *wanted = RESUMED[case]
    before = sorted((p.name, p.stat().st_mtime_ns) for p in out.glob("step_*/*")), metrics(out)
    settings = {k: v() if callable(v) else v for k, v in settings.items()}
    assert train(out, **dict(SHAPE, **settings)) == 2
    one_line(capfd, *wanted)
    assert before == (sorted((p.name, p.stat().st_mtime_ns) for p in out.glob("step_*/*")), metrics(out))


def test_the_command_line_ends_with_one_line(tmp_path):
    done = common.command(tmp_path / "o", MASK_TOKEN_ID=70)
    assert done.returncode == 2 and "Traceback" not in done.stdout + done.stderr
    assert len(done.stderr.strip().splitlines()) == 1 and "MASK_TOKEN_ID = 70" in done.stderr


# ------------------------------------------------------------------------------------------- preflight


@pytest.fixture
def before_data(monkeypatch):
    """What is refused below is refused before a line is tokenised or a weight is read."""
    def too_late(*args):
        raise AssertionError("the slow part has begun")
    for function in (trainer.read_conversations, trainer.load_target, checkpoints.find_checkpoint):
        common.replace_function(monkeypatch, function, too_late)
    common.replace_function(monkeypatch, trainer.start.device_names, lambda: ["cpu", "cuda:0"])


def test_no_c_compiler(tmp_path, monkeypatch, capfd, before_data):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert train(tmp_path / "o", DRAFTER_DEVICES="cuda:0", TARGET=random_target(hidden=128)) == 2
    one_line(capfd, "COMPILE = True", "C compiler", "gcc")


def test_no_python_headers(tmp_path, monkeypatch, capfd, before_data):
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/cc")
    monkeypatch.setattr(trainer.start.sysconfig, "get_paths", lambda: {"include": "/nowhere"})
    assert train(tmp_path / "o", DRAFTER_DEVICES="cuda:0", TARGET=random_target(hidden=128)) == 2
    one_line(capfd, "/nowhere/Python.h", "python3-dev")


@pytest.mark.parametrize("unbuffered", ["1", ""])
def test_a_reader_that_leaves_early(tmp_path, unbuffered):
    """`inspect | head -1`"""
    argv = [
        sys.executable,
        str(common.ROOT / "train_dflash.py"),
        "inspect",
        *common.arguments(tmp_path / "o"),
    ]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    process.stdout.close()
    assert "BrokenPipe" not in process.stderr.read()
    assert process.wait(common.HANG_S) == 128 + signal.SIGPIPE


def test_help_is_the_head_of_the_script(capsys):
    assert trainer.main(["train", "--help"]) == 0
    assert "The path of the data, in order" in capsys.readouterr().out


def test_training_outlives_its_reader(tmp_path):
    """`train | head -1`"""
    argv = [sys.executable, str(common.ROOT / "train_dflash.py"), "train", *common.arguments(tmp_path / "o")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert any("first rows of all" in line for line in process.stdout)  # the threads run
    process.stdout.close()
    process.stderr.read()
    process.wait(common.HANG_S)
    complete(tmp_path / "o" / "latest")
    assert "done: " in (tmp_path / "o" / "train.log").read_text()


@pytest.mark.parametrize("name", ["DATA", "EVAL_DATA"])
def test_a_missing_file_is_said_before_the_other_is_tokenised(tmp_path, capfd, before_data, name):
    assert train(tmp_path / "o", EVAL_EVERY=2, **{name: "/nowhere/x.jsonl"}) == 2
    text = printed(capfd)
    assert text.splitlines() == [
        f"error: {name} = /nowhere/x.jsonl: no such file. To make one: bash run.sh tools/regenerate.py "
        "PROMPTS=prompts.jsonl TARGET=<model> OUT=/nowhere/x.jsonl"]


def test_the_missing_one_of_several_files_is_named(tmp_path, capfd):
    assert train(tmp_path / "o", DATA=f"{data_file('train')},/nowhere/x.jsonl") == 2
    one_line(capfd, "DATA = ", "no such file: /nowhere/x.jsonl. To make one")


def test_a_runs_folder_is_no_checkpoint_and_those_in_it_are_named(tmp_path, capfd):
    """`best` alone where there is one."""
    out = train_ok(tmp_path / "o", STEPS=1)
    capfd.readouterr()
    words = f"CKPT={out}", f"TARGET={random_target()}", "TARGET_DEVICES=cpu"
    assert common.run_main("eval", *words) == 2
    one_line(capfd, f"CKPT = {out}: not a drafter checkpoint: it is the OUT of a run: give {out}/latest")
    (out / "best").symlink_to((out / "latest").resolve().name)
    assert common.run_main("eval", *words) == 2
    one_line(capfd, f"give {out}/best or {out}/latest")


def free_disk(monkeypatch, checkpoints):
    """Room for so many checkpoints of the tiny run: 14 bytes a parameter."""
    usage = SimpleNamespace(free=checkpoints * 14 * 20704)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_too_little_disk(tmp_path, monkeypatch, capfd, before_data):
    """KEEP, the best, and the one that is being written."""
    free_disk(monkeypatch, 3.9)
    assert train(tmp_path / "o", KEEP=2) == 2
    one_line(capfd, f"OUT = {tmp_path / 'o'}", "GiB free", "KEEP = 2")


def test_a_resumed_run_needs_no_room_for_what_it_has(tmp_path, monkeypatch, capfd, undisturbed):
    """Three checkpoints are there, of KEEP + 2 = 5."""
    for room, code in ((1.9, 2), (2.1, 0)):
        out = shutil.copytree(undisturbed, tmp_path / str(room), symlinks=True)
        free_disk(monkeypatch, room)
        assert len(list(out.glob("step_*"))) == 3 and train(out, **SHAPE) == code


def test_size_of_a_checkpoint_and_host_memory_are_said(tmp_path, monkeypatch, capfd):
    common.replace_function(monkeypatch, checkpoints.free_memory, lambda: 0.0)
    train_ok(tmp_path / "o", STEPS=1, KEEP=3)
    lines = capfd.readouterr().out.splitlines()
    said, = (x for x in lines if x.startswith("a checkpoint is"))
    assert re.search(r"is \d+\.\d\d GiB, 3 newest and the best are kept \(KEEP\), \d+\.\d\d GiB free", said)
    assert any(re.match(r"WARNING: 0\.0 GiB of host memory is free, a save copies", x) for x in lines)


# ----------------------------------------------------------------------------------------------- one OUT


def _hang_after(rows, speed=1):
    """The target makes `rows` rows, then hangs; then the watchdog's clock is `speed` times as fast."""
    inner, count, hung = trainer.target_features, [0], []

    def hang_here(*args):
        count[0] += 1
        if count[0] > rows:
            hung.append(time.monotonic())
            time.sleep(1000)
        return inner(*args)

    def fast_clock():
        now = time.monotonic()
        return now + (speed - 1) * (now - hung[0] if hung else 0)
    trainer.target_features = hang_here
    workers.time = SimpleNamespace(monotonic=fast_clock)


def test_two_runs_on_one_out_the_second_refuses(tmp_path, capfd):
    first = start(tmp_path / "o", _hang_after, (4,), **dict(SHAPE, EVAL_EVERY=0))
    try:
        until(lambda: metrics(tmp_path / "o") or first.process.exitcode is not None)
        capfd.readouterr()
        assert train(tmp_path / "o", **SHAPE) == 2
        one_line(capfd, "OUT", tmp_path / "o", first.pid)
        assert first.process.is_alive()
    finally:
        first.process.kill()
        first.code()
    train_ok(tmp_path / "o", **SHAPE)  # the lock dies with its process


def test_a_demo_clears_its_folder_but_not_under_another_run(tmp_path, capsys):
    for name in ("metrics.jsonl", "step_00000001/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "latest").symlink_to("step_00000001")
    with trainer.checkpoints.only_run_in(tmp_path):
        another = trainer.checkpoints.only_run_in(tmp_path, clear=True)
        with pytest.raises(errors.UserError, match="in use by another run"), another:
            pass
        assert (tmp_path / "latest" / "config.json").exists()
    with trainer.checkpoints.only_run_in(tmp_path, clear=True):
        assert [p.name for p in tmp_path.iterdir()] == [".lock"]
    assert (
        capsys.readouterr().out
        == f"OUT = {tmp_path} is cleared, the demo starts anew (another OUT keeps a run, and resumes it)\n"
    )


def test_resume_of_a_finished_run_in_another_out_is_refused(tmp_path, capfd, undisturbed):
    assert train(tmp_path / "new", **SHAPE, RESUME=undisturbed / "latest") == 2
    one_line(capfd, "RESUME = ", "at step 8 of 8", tmp_path / "new")


@pytest.mark.parametrize(
    "name, value, wanted",
    [
        ("SEQ_LEN", "4096", "int"),
        ("LR", (6e-4,), "float"),
        ("TARGET_LAYER_IDS", [1.5, 3], "list[int] | None"),
        ("TARGET_DEVICES", "cpu", "list[str]"),
        ("RESUME", True, "str"),
        ("CHAT_TEMPLATE_KWARGS", None, "a dict such as {'name': False}"),
        ("COMPILE", 1, "True or False"),
        ("EPOCHS", True, "int"),
        ("OUT", "", "name a directory"),
    ],
)
def test_edited_constants_are_checked(monkeypatch, name, value, wanted):
    monkeypatch.setattr(trainer, name, value)
    with pytest.raises(errors.UserError, match=rf"^{name} = ") as error:
        trainer.start.check_settings(trainer)
    assert str(error.value).endswith(wanted)


def test_a_stalled_run_says_where_it_hangs_and_ends(tmp_path):
    child = start(tmp_path / "o", _hang_after, (4, 300), **dict(SHAPE, EVAL_EVERY=0), **threads(2, 2))
    code, text = child.code(), child.text()
    assert code == 1, text[-3000:]
    fills = r"queues \[target\]\[drafter\] \[\[\d, \d\], \[\d, \d\]\]"
    assert re.search(rf"STALLED.*STALL_S.*{fills}.*gate: ", text), text[-3000:]
    for function in ("hang_here", "drafter_worker", "target_worker"):
        assert f"in {function}" in text, text[-3000:]


# ---------------------------------------------------------------------------------------------- signals


def signal_at(monkeypatch, number, call, inner=trainer.micro_step):
    """The signal comes during the call-th micro-step; no later one goes on before it is heard. -> [calls]"""
    count, lock = [0], threading.Lock()
    heard, hear = threading.Event(), workers.Workers.on_signal
    if signal.getsignal(number) == signal.SIG_IGN:
        heard.set()

    def on_signal(*args):
        hear(*args)
        heard.set()

    def micro_step(*args):
        with lock:
            count[0] += 1
            me = count[0]
        if me == call:
            os.kill(os.getpid(), number)
        if me >= call:
            assert heard.wait(common.HANG_S)
        return inner(*args)
    common.replace_function(monkeypatch, hear, on_signal)
    common.replace_function(monkeypatch, inner, micro_step)
    return count


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("drafters", [1, 2])
def test_a_signal_saves_and_resume_is_exact(tmp_path, monkeypatch, undisturbed, number, code, drafters):
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    base = undisturbed if drafters == 1 else train_ok(tmp_path / "base", **SHAPE, **threads(2, 2))
    with monkeypatch.context() as patch:
        signal_at(patch, number, 5)  # a row of step 3: no step at which a save is due
        assert train(tmp_path / "o", **SHAPE, **threads(drafters, drafters)) == code
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
    latest = (tmp_path / "o" / "latest").resolve()
    assert latest.name == "step_00000003" and log_lines(tmp_path / "o")[-1]["step"] == 3
    train_ok(tmp_path / "o", **SHAPE, **threads(drafters, drafters))
    assert_same(tmp_path / "o" / "latest", base / "latest")
    assert untimed(tmp_path / "o") == untimed(base)


def test_nohup_is_respected(tmp_path, monkeypatch, undisturbed):
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with monkeypatch.context() as patch:
            signal_at(patch, signal.SIGHUP, 5)
            assert train(tmp_path / "o", **SHAPE) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, old)
    assert_same(tmp_path / "o" / "latest", undisturbed / "latest")


def test_a_signal_in_a_long_evaluation_ends_it(tmp_path, monkeypatch):
    """Step 4's, of 60 rows: it is not waited for, and the resumed run makes it."""
    settings = dict(
        SHAPE, EVAL_EVERY=4, SAVE_EVERY=100, EVAL_DATA=data_file("eval", 60, 40, seed=1), **threads(2, 2)
    )
    base = train_ok(tmp_path / "base", **settings)
    with monkeypatch.context() as patch:
        calls = signal_at(patch, signal.SIGTERM, 60 + 20, trainer.evaluate_row)
        assert train(tmp_path / "o", **settings) == 143
    assert 60 + 20 <= calls[0] <= 60 + 20 + 2
    assert (tmp_path / "o" / "latest").resolve().name == "step_00000004"
    train_ok(tmp_path / "o", **settings)
    assert_same(tmp_path / "o" / "latest", base / "latest")
    assert untimed(tmp_path / "o") == untimed(base)


def _slow_step(marker):
    def micro_step(*args):
        Path(marker).touch()
        time.sleep(1000)
    trainer.micro_step = micro_step


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_at_once(tmp_path, number, code):
    child = start(tmp_path / "o", _slow_step, (tmp_path / "marker",), **SHAPE)
    until((tmp_path / "marker").exists)
    os.kill(child.pid, number)
    until(lambda: f"signal {number}" in child.text())
    assert child.process.is_alive()
    os.kill(child.pid, number)
    assert child.code() == code  # the step would take longer than that waits


def test_ctrl_c_before_training_has_begun(tmp_path, monkeypatch, capfd):
    def load_target(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(9)
    common.replace_function(monkeypatch, trainer.load_target, load_target)
    old = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert train(tmp_path / "o", **SHAPE) == 130
    finally:
        signal.signal(signal.SIGINT, old)
    one_line(capfd, "interrupted")


# ---------------------------------------------------------------------------------------------- kill -9

MANY = dict(ROWS_PER_STEP=2, STEPS=40, EVAL_EVERY=7, SAVE_EVERY=1, KEEP=2, LOG_EVERY=4)


def _seven_steps():
    """The run makes seven steps, then hangs: it can't end before it is killed."""
    inner, made = trainer.train_step, set()

    def train_step(run, replica, optimizer, plan):
        if len(made | {plan.step}) > 7:
            time.sleep(1000)
        made.add(plan.step)
        inner(run, replica, optimizer, plan)
    trainer.train_step = train_step


def test_kill_9_at_five_random_instants_changes_nothing(tmp_path):
    """A save is under way nearly all the time; the instants differ between runs, what comes out does not."""
    settings = dict(MANY, **threads(2, 2))
    base, out, rng = train_ok(tmp_path / "base", **settings), tmp_path / "o", random.Random(5)
    for _ in range(5):
        seen = len(metrics_text(out))
        child = start(out, _seven_steps, **settings)

        def moved_or_ended(seen=seen, child=child):
            return len(metrics_text(out)) > seen or child.process.exitcode is not None
        until(moved_or_ended)
        time.sleep(rng.uniform(0, 0.1))
        os.kill(child.pid, signal.SIGKILL)
        assert child.code() == -signal.SIGKILL, child.text()[-3000:]
        complete(out)
    train_ok(out, **settings)
    assert_same(out / "latest", base / "latest")
    assert untimed(out) == untimed(base)
    no_leftovers(out)


def _kill_at_operation(which):
    """kill -9 before the saver's which-th operation on files (open, mkdir, rename, unlink, ...)."""
    count = [0]

    def audit(event, args):
        if event.split(".")[0] in ("open", "os", "shutil") and threading.current_thread().name == "saver":
            count[0] += 1
            if count[0] == which:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(audit)


def operations(tmp_path):
    """How many operations two saves take."""
    child = start(tmp_path / "count", _count_operations, (tmp_path / "n",), **dict(SHAPE, STOP_AT=4))
    assert child.code() == 0
    return int((tmp_path / "n").read_text())


def _count_operations(path):
    count = [0]

    def audit(event, args):
        if event.split(".")[0] in ("open", "os", "shutil") and threading.current_thread().name == "saver":
            count[0] += 1
    sys.addaudithook(audit)
    wait = checkpoints.Saver.wait
    checkpoints.Saver.wait = lambda saver: (wait(saver), Path(path).write_text(str(count[0])))


def test_kill_9_before_any_file_operation_of_a_save(tmp_path, undisturbed):
    """From the first operation of the first save to the last of the second, eight of them."""
    n = operations(tmp_path)
    assert n > 20
    for i, which in enumerate(sorted(random.Random(1).sample(range(1, n + 1), 6) + [1, n])):
        out = tmp_path / f"o{i}"
        assert start(out, _kill_at_operation, (which,), **SHAPE).code() == -signal.SIGKILL
        complete(out)
        train_ok(out, **SHAPE)
        assert_same(out / "latest", undisturbed / "latest")
        assert untimed(out) == untimed(undisturbed)
        no_leftovers(out)


def test_half_written_checkpoints_of_any_step_are_cleared(tmp_path, capfd, undisturbed):
    """A run killed while a signal made it save at step 3: nobody will write that step's files again."""
    out = tmp_path / "o"
    (out / ".part_step_00000003").mkdir(parents=True)
    (out / ".part_step_00000003" / "trainer.safetensors").write_bytes(b"half")
    capfd.readouterr()
    train_ok(out, **SHAPE)
    assert ".part_step_00000003 is a save that was cut off" in printed(capfd)
    no_leftovers(out)


# ---------------------------------------------------------------------------------- damaged checkpoints


def truncate(path):
    os.truncate(path, path.stat().st_size - 7)


def no_object(path):
    path.write_text("[]")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


DAMAGE = [(truncate, "model.safetensors"), (flip, "model.safetensors"), (flip, "trainer.safetensors"),
          (os.unlink, "config.json"), (truncate, "trainer.safetensors"), (os.unlink, "trainer.safetensors"),
          (os.unlink, "trainer.json"), (truncate, "trainer.json"), (no_object, "trainer.json"),
          (os.unlink, "model.safetensors")]


@pytest.mark.parametrize("damage, name", DAMAGE)
def test_a_damaged_newest_checkpoint_is_said_and_not_used(tmp_path, capfd, undisturbed, damage, name):
    out = train_ok(tmp_path / "o", **SHAPE, STOP_AT=4)
    damage(out / "step_00000004" / name)
    capfd.readouterr()
    train_ok(out, **SHAPE)
    text = printed(capfd)
    assert "step_00000004 is damaged" in text and "resuming from" in text and "step_00000002, step 2" in text
    assert_same(out / "latest", undisturbed / "latest")
    assert untimed(out) == untimed(undisturbed)


def test_no_usable_checkpoint_is_an_error_not_a_fresh_start(tmp_path, capfd):
    out = train_ok(tmp_path / "o", **SHAPE, STOP_AT=4)
    for step in (2, 4):
        truncate(out / f"step_0000000{step}" / "trainer.safetensors")
    capfd.readouterr()
    assert train(out, **SHAPE) == 2
    one_line(capfd, out)


# -------------------------------------------------------------------------------------- full disk, KEEP


FULL = [OSError(errno.ENOSPC, "No space left on device"),
        safetensors.SafetensorError("Error while serializing: I/O error: No space left on device")]


def disk_full(monkeypatch, saves, error):
    """Saves with these numbers (from 1) find no room; on a full tmpfs the error is safetensors' own."""
    inner, count = checkpoints.save_file, [0]

    def save_file(tensors, path, **kwargs):
        count[0] += path.name == "trainer.safetensors"
        if path.name == "trainer.safetensors" and count[0] in saves:
            raise error
        return inner(tensors, path, **kwargs)
    monkeypatch.setattr(checkpoints, "save_file", save_file)


@pytest.mark.parametrize("error", FULL, ids=["os", "safetensors"])
def test_a_full_disk_is_said_and_the_run_goes_on(tmp_path, monkeypatch, capfd, undisturbed, error):
    disk_full(monkeypatch, [1, 2], error)
    train_ok(tmp_path / "o", **SHAPE)
    text = printed(capfd)
    for step in (2, 4):
        assert re.search(rf"WARNING.*step {step} .*No space left", text)
    assert_same(tmp_path / "o" / "latest", undisturbed / "latest")
    assert sorted(p.name for p in (tmp_path / "o").glob("step_*")) == ["step_00000006", "step_00000008"]
    no_leftovers(tmp_path / "o")


@pytest.mark.parametrize("error", FULL, ids=["os", "safetensors"])
def test_a_full_disk_at_the_last_save_is_an_error(tmp_path, monkeypatch, capfd, error):
    disk_full(monkeypatch, [4], error)
    assert train(tmp_path / "o", **SHAPE) == 1
    assert "step 8 could not be written" in printed(capfd).splitlines()[-1]
    assert (tmp_path / "o" / "latest").resolve().name == "step_00000006"
    complete(tmp_path / "o")


def _no_room():
    """The trainer's state is larger than any file may be; the published one isn't."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))


def test_a_write_that_the_system_refuses(tmp_path, capfd):
    child = start(tmp_path / "o", _no_room, **SHAPE)
    assert child.code() == 1
    assert child.text().count("could not be written") >= 4 and "Traceback" not in child.text()
    assert [m["step"] for m in log_lines(tmp_path / "o")] == list(range(1, 9))
    no_leftovers(tmp_path / "o")


def no_room_for_lines(monkeypatch, name, full):
    """Appending to `name` fails where full(number of this try, text)."""
    inner, count = checkpoints.append_text, [0]

    def append_text(path, text):
        count[0] += path.name == name
        if path.name == name and full(count[0], text):
            raise FULL[0]
        inner(path, text)
    common.replace_function(monkeypatch, inner, append_text)


@pytest.mark.parametrize("name", ["metrics.jsonl", "train.log"])
def test_lines_that_find_no_room_are_written_later(tmp_path, monkeypatch, capfd, undisturbed, name):
    no_room_for_lines(monkeypatch, name, lambda n, text: 3 <= n < 7)
    train_ok(tmp_path / "o", **SHAPE)
    assert len(re.findall(rf"WARNING.*{name}.*No space left.*wait", printed(capfd))) == 1
    assert untimed(tmp_path / "o") == untimed(undisturbed)
    assert_same(tmp_path / "o" / "latest", undisturbed / "latest")
    ours, theirs = (re.findall(r"^(?:eval )?step \d+", (out / "train.log").read_text(), re.MULTILINE)
                    for out in (tmp_path / "o", undisturbed))
    assert ours == theirs and len(ours) == 13


def test_metrics_that_can_not_be_written_to_the_end_are_an_error(tmp_path, monkeypatch, capfd):
    """And no checkpoint is written that a resumed run would continue without the lines before it."""
    no_room_for_lines(monkeypatch, "metrics.jsonl", lambda n, text: '"step": 5' in text)
    assert train(tmp_path / "o", **SHAPE) == 1
    lines, text = metrics(tmp_path / "o"), printed(capfd)
    assert "ERROR" in text.splitlines()[-1] and "No space left" in text and "Traceback" not in text
    assert (tmp_path / "o" / "latest").resolve().name == "step_00000004" and lines[-1]["step"] == 4
    monkeypatch.undo()
    train_ok(tmp_path / "o", **SHAPE)
    assert [m["step"] for m in log_lines(tmp_path / "o")] == list(range(1, 9))


def test_a_full_disk_leaves_no_half_line(tmp_path):
    path = tmp_path / "lines"
    checkpoints.append_text(path, "one\n")
    handler, limit = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6, limit[1]))
    try:
        with pytest.raises(OSError, match="No space left"):
            checkpoints.append_text(path, "two and more\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_text() == "one\n"


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch, undisturbed):
    """The save of step 4 waits until step 7 is trained: were training to wait for it, neither would move."""
    write, update = checkpoints.write_checkpoint, trainer.Optimizer.update
    reached, in_time = threading.Event(), []

    def slow_write(out, step, *args):
        if step == 4:
            in_time.append(reached.wait(common.HANG_S))
        return write(out, step, *args)

    n_updates = itertools.count(1)

    def counted(optimizer, *args):
        if next(n_updates) == 7:
            reached.set()
        update(optimizer, *args)
    common.replace_function(monkeypatch, write, slow_write)
    common.replace_function(monkeypatch, update, counted)
    train_ok(tmp_path / "o", **dict(SHAPE, SAVE_EVERY=4, EVAL_EVERY=0))
    assert in_time == [True]
    assert_same(tmp_path / "o" / "step_00000004", undisturbed / "step_00000004")  # not what came later


def taus(monkeypatch, values):
    """Evaluations find these tau."""
    inner, left = trainer.EvalSums.metrics, list(values)
    common.replace_function(monkeypatch, inner, lambda sums: {**inner(sums), "tau": left.pop(0)})


def test_keep_rotates_but_not_the_best_and_not_the_newest(tmp_path, monkeypatch):
    """Step 0 is no candidate; the first of equals stays the best."""
    taus(monkeypatch, [9.0, 1.5, 2.5, 2.0, 2.5, 1.0, 1.0])
    out = train_ok(tmp_path / "o", STEPS=6, EVAL_EVERY=1, SAVE_EVERY=1, KEEP=2)
    assert [m["tau"] for m in eval_lines(out)] == [9.0, 1.5, 2.5, 2.0, 2.5, 1.0, 1.0]
    assert sorted(p.name for p in out.glob("step_*")) == ["step_00000002", "step_00000005", "step_00000006"]
    assert os.readlink(out / "best") == "step_00000002" and os.readlink(out / "latest") == "step_00000006"


def test_the_best_survives_a_resume(tmp_path, monkeypatch):
    taus(monkeypatch, [1.0, 1.5, 2.5, 2.0, 2.1, 2.2, 2.3])
    train_ok(tmp_path / "o", STEPS=6, EVAL_EVERY=1, SAVE_EVERY=1, KEEP=1, STOP_AT=3)
    out = train_ok(tmp_path / "o", STEPS=6, EVAL_EVERY=1, SAVE_EVERY=1, KEEP=1)
    assert sorted(p.name for p in out.glob("step_*")) == ["step_00000002", "step_00000006"]
    assert os.readlink(out / "best") == "step_00000002"


def test_other_held_out_text_has_a_best_of_its_own(tmp_path, monkeypatch, capfd):
    taus(monkeypatch, [1.0, 3.0, 2.5, 1.5, 2.0])
    settings = dict(STEPS=4, EVAL_EVERY=2, SAVE_EVERY=1, KEEP=1)
    train_ok(tmp_path / "o", **settings, STOP_AT=2)
    assert os.readlink(tmp_path / "o" / "best") == "step_00000002"
    out = train_ok(tmp_path / "o", **settings, EVAL_DATA=data_file("other", n=6, seed=9))
    assert "has changed: the best checkpoint will be chosen again" in capfd.readouterr().out
    assert [m["tau"] for m in eval_lines(out)] == [1.0, 3.0, 2.5, 1.5]  # step 2 twice
    assert os.readlink(out / "best") == "step_00000002"


def test_eos_is_no_mask_token_where_it_is_the_padding_too(tmp_path, capfd):
    target = shutil.copytree(random_target(), tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "pad_token_id": EOS}))
    assert train(tmp_path / "o", TARGET=target, MASK_TOKEN_ID=EOS) == 2
    one_line(capfd, f"MASK_TOKEN_ID = {EOS}", "bos or eos")


def test_a_best_that_could_not_be_saved_is_not_the_best(tmp_path, monkeypatch):
    """The disk is full at step 4; step 6, better than all that is on the disk, becomes the best."""
    taus(monkeypatch, [1.0, 1.5, 3.0, 2.9, 2.8])
    inner = checkpoints.write_checkpoint

    def full_at_four(out, step, *rest):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return inner(out, step, *rest)
    common.replace_function(monkeypatch, inner, full_at_four)
    inside = trainer.save_if_due

    def and_wait(run, *args):  # else the next evaluation may come first
        inside(run, *args)
        run.saver.wait()
    common.replace_function(monkeypatch, inside, and_wait)
    out = train_ok(tmp_path / "o", STEPS=8, EVAL_EVERY=2, SAVE_EVERY=2, KEEP=1)
    assert os.readlink(out / "best") == "step_00000006" and (out / "best").is_dir()


def test_a_held_out_loss_that_is_no_number_is_written_as_none(tmp_path, monkeypatch):
    """JSON has no NaN, and it is no lowest loss either."""
    inner, left = trainer.EvalSums.metrics, [3.0, float("nan"), 2.0, 2.5]
    common.replace_function(monkeypatch, inner, lambda sums: {**inner(sums), "eval_loss": left.pop(0)})
    out = train_ok(tmp_path / "o", STEPS=6, EVAL_EVERY=2)
    assert [m["eval_loss"] for m in eval_lines(out)] == [3.0, None, 2.0, 2.5]
    assert "held-out loss is rising (best 2.0000 at step 4, now 2.5" in (out / "train.log").read_text()


def test_another_run_is_not_resumed_into_a_run(tmp_path, capfd):
    first = train_ok(tmp_path / "a", STEPS=4, SAVE_EVERY=2)
    other = train_ok(tmp_path / "b", STEPS=4, SAVE_EVERY=2, STOP_AT=2)
    before = {p.name for p in first.iterdir()}
    capfd.readouterr()
    assert train(first, STEPS=4, RESUME=other / "step_00000002") == 2
    one_line(capfd, f"RESUME = {other}", f"OUT = {first} holds another run")
    assert {p.name for p in first.iterdir()} == before
    train_ok(tmp_path / "c", STEPS=4, RESUME=other / "step_00000002")  # a new folder takes it


def test_rotation_never_removes_what_was_just_saved(tmp_path):
    """A damaged step 6 stays the highest number while the run goes on from step 2 and saves step 3."""
    out = train_ok(tmp_path / "o", STEPS=8, SAVE_EVERY=2, KEEP=4, STOP_AT=6)
    for step in (4, 6):
        truncate(out / f"step_0000000{step}" / "trainer.safetensors")
    train_ok(out, STEPS=8, SAVE_EVERY=100, KEEP=1, STOP_AT=3)
    assert (out / "latest").resolve().name == "step_00000003"
    complete(out)


def test_every_checkpoint_is_servable_and_holds_nothing_else(undisturbed):
    """The file formats' details are test_smoke.py's; here: each one is whole."""
    found = sorted(undisturbed.glob("step_*"))
    assert len(found) >= 3
    for path in found:
        info, state = checkpoints.read_checkpoint(path)
        assert info["step"] == int(path.name[5:]) and common.config_of(path)["model_type"] == "qwen3"
        assert all(t.dtype == torch.float32 for t in state.values())


# --------------------------------------------------------------------------- a folder that was meddled with


def test_a_signal_where_an_evaluation_is_due_keeps_the_best(tmp_path, monkeypatch):
    """The resumed run evaluates the step that is on the disk already: `best` has to point at it."""
    settings = dict(STEPS=8, EVAL_EVERY=4, SAVE_EVERY=4, KEEP=1)
    taus(monkeypatch, [1.0, 3.0, 2.0])
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGTERM, 8)  # the last row of step 4
        assert train(tmp_path / "o", **settings) == 143
    assert not (tmp_path / "o" / "best").exists()
    out = train_ok(tmp_path / "o", **settings)
    assert [(m["step"], m["tau"]) for m in eval_lines(out)] == [(0, 1.0), (4, 3.0), (8, 2.0)]
    assert os.readlink(out / "best") == "step_00000004" and (out / "best").is_dir()


def test_an_evaluation_that_no_checkpoint_knows_is_listed_once(tmp_path, monkeypatch):
    """A finished run evaluated again, e.g. after a signal at its last step."""
    with monkeypatch.context() as patch:
        signal_at(patch, signal.SIGTERM, 8)
        assert train(tmp_path / "o", STEPS=4, EVAL_EVERY=4) == 143
    for _ in range(2):
        out = train_ok(tmp_path / "o", STEPS=4, EVAL_EVERY=4)
        assert [m["step"] for m in eval_lines(out)] == [0, 4]


def test_a_best_whose_link_a_kill_prevented(tmp_path, monkeypatch):
    taus(monkeypatch, [1.0, 1.5, 3.0, 2.0])
    settings = dict(STEPS=6, EVAL_EVERY=2, SAVE_EVERY=2, KEEP=1)
    out = train_ok(tmp_path / "o", **settings, STOP_AT=4)
    checkpoints.point(out / "best", out / "step_00000002")
    train_ok(out, **settings)
    assert os.readlink(out / "best") == "step_00000004" and (out / "best").is_dir()


@pytest.mark.parametrize("form", ["{out}/step_00000004", "./step_00000004", "elsewhere"])
def test_a_latest_of_another_form_is_no_fresh_start(tmp_path, capfd, undisturbed, form):
    out = train_ok(tmp_path / "o", **SHAPE, STOP_AT=4)
    (out / "elsewhere").mkdir()
    (out / "latest").unlink()
    (out / "latest").symlink_to(form.format(out=out))
    capfd.readouterr()
    train_ok(out, **SHAPE)
    assert "step_00000004, step 4" in printed(capfd)
    assert untimed(out) == untimed(undisturbed)


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_copied_link_is_said_before_anything_is_trained(tmp_path, capfd, name):
    """`cp -rL` and `rsync -L` make directories of the links: no save could replace them."""
    out = train_ok(tmp_path / "o", **SHAPE, STOP_AT=2)
    (out / name).unlink(missing_ok=True)
    shutil.copytree(out / "step_00000002", out / name)
    capfd.readouterr()
    assert train(out, **SHAPE) == 2
    one_line(capfd, out / name)


def test_copies_and_links_among_the_checkpoints(tmp_path):
    """A copy called step_9 takes no checkpoint's place; a checkpoint moved away goes as its link."""
    out = train_ok(tmp_path / "o", STEPS=6, SAVE_EVERY=2, KEEP=1, STOP_AT=2)
    shutil.copytree(out / "step_00000002", out / "step_9")
    (out / "step_00000002").rename(tmp_path / "moved")
    (out / "step_00000002").symlink_to(tmp_path / "moved")
    train_ok(out, STEPS=6, SAVE_EVERY=2, KEEP=1)
    assert sorted(p.name for p in out.glob("step_*")) == ["step_00000006", "step_9"]
    assert (tmp_path / "moved" / "config.json").exists()
    complete(out)


HALVES = b'{"step": 4, "tau_by_source": {"a": 1.0}', b'{"step": 3\xff\xfe', b"{}", b"3}"


@pytest.mark.parametrize("tail", HALVES)
def test_half_a_line_of_metrics_does_not_stop_a_resume(tmp_path, undisturbed, tail):
    out = train_ok(tmp_path / "o", **SHAPE, STOP_AT=2)
    with open(out / "metrics.jsonl", "ab") as file:
        file.write(tail)
    train_ok(out, **SHAPE)
    assert untimed(out) == untimed(undisturbed)


# ------------------------------------------------------------------------------ what no thread waits for


def _die_beside(function, stuck):
    """Target 0 dies at row 8 while the thread `stuck` is in a function for long, as in a compile."""
    is_stuck = threading.Event()

    def hung(*args):
        row = args[3 if stuck.startswith("drafter") else 1]  # where their row or batch stands
        if threading.current_thread().name == stuck and row.index >= 2:  # past its first step
            is_stuck.set()
            time.sleep(1000)
        return function(*args)
    patch = pytest.MonkeyPatch()
    common.replace_function(patch, function, hung)

    def dies(forward, row, *args, inner=trainer.target_features):
        if threading.current_thread().name == "target-0" and row.index >= 8:
            assert is_stuck.wait(common.HANG_S)
            raise RuntimeError("boom in target_features")
        return inner(forward, row, *args)
    trainer.target_features = dies
    join = threading.Thread.join

    def join_others(thread, timeout=None):
        """Those that are not stuck end, however long a busy machine takes over it."""
        join(thread, timeout if thread.name == stuck else common.HANG_S)
    threading.Thread.join = join_others


@pytest.mark.parametrize("function, stuck", [
    (trainer.micro_step, "drafter-0"), (trainer.target_features, "target-1")])
def test_a_death_beside_a_busy_thread_is_said_within_seconds(tmp_path, function, stuck):
    settings = dict(SHAPE, EVAL_EVERY=0, **threads(2, 2))
    child = start(tmp_path / "o", _die_beside, (function, stuck), **settings)
    code, text = child.code(), child.text()
    assert code == 1 and f"thread {stuck} does not end" in text, text[-3000:]
    assert "ERROR in thread target-0: Traceback" in text and "boom in target_features" in text, text[-3000:]


def _slow_files(seconds):
    load, write = trainer.target.load_model, trainer.checkpoints.write_checkpoint
    workers.time = common.WatchdogClock()

    def slowly(work):
        def wait_first(*args):
            workers.time.pass_by(seconds)
            return work(*args)
        return wait_first
    trainer.target.load_model, trainer.checkpoints.write_checkpoint = slowly(load), slowly(write)


def test_loading_and_saving_may_take_longer_than_stall_s(tmp_path):
    child = start(tmp_path / "o", _slow_files, (500,), **dict(SHAPE, EVAL_EVERY=0, STEPS=4, SAVE_EVERY=2))
    assert child.code() == 0, child.text()[-3000:]
    assert len(list((tmp_path / "o").glob("step_*"))) == 2


def test_tokenising_ticks_the_watchdog(tmp_path):
    """One tick for each 512 lines: a large file may take longer than STALL_S."""
    data, ticks = data_file("many", 1000), []
    vocab = dict(vocab_size=VOCAB, tick=lambda: ticks.append(0))
    trainer.read_conversations("DATA", data, None, **vocab)
    assert len(ticks) == 2
