"""Several processes of main() as torchrun starts them, over gloo: one run, one loss, one end."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import common
import train_dflash as td
from common import (
    Child,
    arguments,
    assert_same,
    data_file,
    distance,
    eval_lines,
    log_lines,
    losses,
    scratch,
    threads,
    train_ok,
    until,
    untimed,
)
from dflash_trainer import machines, settings, workers
from dflash_trainer.errors import UserError

WHOLE = dict(ROWS_PER_STEP=4, STEPS=6, EVAL_EVERY=3, SAVE_EVERY=2, KEEP=9)
HALF = dict(WHOLE, ROWS_PER_STEP=2)
LONG = dict(HALF, STEPS=10**6, EVAL_EVERY=0, SAVE_EVERY=10**6)  # it never ends by itself


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _machine(rank, size, port, setup=None, setup_args=()):
    if setup:
        setup(*setup_args)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _later_when(marker):
    """The watchdog's clock jumps once the file is there and the other machine's heartbeat is missed."""
    clusters = []

    def heartbeat(cluster, inner=machines.Cluster.heartbeat):
        clusters.append(cluster)
        inner(cluster)

    def is_late():
        return marker.exists() and clusters[0].missing_ranks() == [1]
    machines.Cluster.heartbeat = heartbeat
    workers.time = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * is_late())


def together(*settings, setup=None, setup_args=()):
    """main() on len(settings) machines -> their children. setup(*setup_args) runs in each one before."""
    port = free_port()
    return [Child(["train", *arguments(**each)], _machine, (rank, len(settings), port, setup, setup_args))
            for rank, each in enumerate(settings)]


def pair(out, elsewhere, setup=None, setup_args=(), **settings):
    """Two machines; the second one's OUT is a folder that must stay away."""
    return together(
        dict(settings, out=out), dict(settings, out=elsewhere), setup=setup, setup_args=setup_args
    )


def end_well(children):
    for child in children:
        assert child.code() == 0, child.text()[-3000:]


@pytest.fixture(scope="module")
def one_machine():
    return train_ok(scratch() / "one_machine", **WHOLE)


@pytest.fixture(scope="module")
def two_machines():
    out, elsewhere = scratch() / "two_machines", scratch() / "nothing_here"
    end_well(pair(out, elsewhere, **HALF, **threads(1, 2)))
    assert not elsewhere.exists()
    return out


def test_two_machines_are_one_with_twice_the_rows(one_machine, two_machines):
    assert np.allclose(losses(two_machines), losses(one_machine), rtol=0, atol=2e-3)
    assert len(losses(one_machine)) == 6
    assert distance(two_machines / "latest", one_machine / "latest") < 1e-5
    assert distance(one_machine / "step_00000006", one_machine / "step_00000002") > 0.02
    for ours, theirs in zip(log_lines(two_machines), log_lines(one_machine), strict=True):
        assert ours["lr"] == theirs["lr"] and ours["accept_len"] == pytest.approx(
            theirs["accept_len"], abs=0.1
        )


HEADS = {
    "dflash2": dict(HEAD="dflash2", SELECTOR_TOP_K=8, SELECTOR_RANK=16,
                    SELECTOR_TERMS="{'ce': 0.1, 'tv': 0.9}"),
    "dspark": dict(HEAD="dspark", MARKOV_RANK=16, LOSS="decay"),
}


@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains_on_two_machines_as_on_one(head, tmp_path):
    """Two drafters a machine; the second half resumed, with what each head reports at its evaluations."""
    shape = threads(1, 2)
    one = train_ok(tmp_path / "one", **WHOLE, **HEADS[head])
    two = tmp_path / "two"
    end_well(pair(two, tmp_path / "x", **HALF, **HEADS[head], **shape, STOP_AT=3))
    end_well(pair(two, tmp_path / "x", **HALF, **HEADS[head], **shape))
    assert distance(two / "latest", one / "latest") < 1e-5
    assert distance(one / "step_00000006", one / "step_00000002") > 0.02
    assert np.allclose(losses(two), losses(one), rtol=0, atol=2e-3)
    for ours, theirs in zip(eval_lines(two), eval_lines(one), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ("eval_loss", "tau_backbone", "expected_len"):
            assert ours[name] == pytest.approx(theirs[name], abs=0.05)


def test_held_out_rows_are_dealt_and_added_up(one_machine, two_machines):
    for ours, theirs in zip(eval_lines(two_machines), eval_lines(one_machine), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=2e-3)
        assert ours["tau"] == pytest.approx(theirs["tau"], abs=0.05)


def test_epochs_count_the_rows_of_all_machines(tmp_path, one_machine):
    """EPOCHS x rows / (M*R): the schedule's horizon."""
    settings = dict(HALF, STEPS=None, EPOCHS=4, EVAL_EVERY=0)
    end_well(pair(tmp_path / "two", tmp_path / "x", **settings))
    alone = train_ok(tmp_path / "one", **dict(settings, ROWS_PER_STEP=4))
    horizons = [json.loads((o / "run.json").read_text())["horizon"] for o in (tmp_path / "two", alone)]
    assert horizons[0] == horizons[1] > 4
    assert log_lines(tmp_path / "two")[-1]["step"] == log_lines(alone)[-1]["step"] == horizons[0]
    assert distance(tmp_path / "two" / "latest", alone / "latest") < 1e-5


def test_fewer_rows_than_a_step_of_all_machines_takes(monkeypatch):
    """15 rows are a step of 12, but not of 2 x 12."""
    stream = SimpleNamespace(total=lambda epochs: 15)
    monkeypatch.setattr(td, "read_conversations", lambda *arguments: None)
    monkeypatch.setattr(td, "RowStream", lambda *arguments: stream)
    with settings.changed(td, DATA="d.jsonl", STEPS=None, EPOCHS=6, EVAL_EVERY=0, ROWS_PER_STEP=12):
        assert td.load_data(None, 9, None, None, n_machines=1).horizon == 1
        message = r"DATA = d.jsonl: 15 rows in EPOCHS = 6.* ROWS_PER_STEP = 12 on each of 2 machines"
        with pytest.raises(UserError, match=message):
            td.load_data(None, 9, None, None, n_machines=2)


def test_two_then_one_then_two_machines_resume_one_run(tmp_path, one_machine):
    out = tmp_path / "o"
    end_well(pair(out, tmp_path / "x", **HALF, STOP_AT=2))
    train_ok(out, **WHOLE, STOP_AT=4)
    end_well(pair(out, tmp_path / "x", **HALF))
    assert distance(out / "latest", one_machine / "latest") < 1e-5
    assert [m["step"] for m in log_lines(out)] == [1, 2, 3, 4, 5, 6] and not (tmp_path / "x").exists()
    assert np.allclose(losses(out), losses(one_machine), rtol=0, atol=2e-3)


def test_other_rows_a_step_are_refused_by_all(tmp_path, one_machine):
    children = pair(one_machine, tmp_path / "x", **WHOLE)
    assert [c.code() for c in children] == [2, 2]
    assert "ROWS_PER_STEP = 8, but" in children[0].text() and "has 4" in children[0].text()
    assert "machine (rank 0) left the run" in children[1].text()


def test_unlike_settings_are_refused_by_all(tmp_path):
    a, b = dict(HALF, out=tmp_path / "a"), dict(HALF, out=tmp_path / "b", DATA=data_file("other", 30, seed=9))
    children = together(a, b)
    assert [c.code() for c in children] == [2, 2]
    for child, other in zip(children, (1, 0)):
        assert re.search(rf"error: DATA = '\w+', but machine \(rank {other}\) has '\w+'", child.text())


def started(out):
    """Some steps are done."""
    until(lambda: len(log_lines(out)) > 3)


@pytest.mark.parametrize("rank, last_heard, missing", [
    (0, (100, 100), []), (0, (100, 96), [1]), (1, (96, 100), [0]),
    (0, (90, 89), []),    # a busy host looked late: that says nothing of the other
    (1, (90, 90), [0]),   # machine 0's store does not answer
    (2, (99, 95, 99), [1])])
def test_a_machine_is_missing_by_its_own_heartbeat(monkeypatch, rank, last_heard, missing):
    """At second 100; a machine's own entry is when it looked last."""
    monkeypatch.setattr(machines, "time", SimpleNamespace(monotonic=lambda: 100))
    cluster = machines.Cluster.__new__(machines.Cluster)
    cluster.rank, cluster.last_heard = rank, list(last_heard)
    assert cluster.missing_ranks() == missing


@pytest.mark.parametrize("dead", [0, 1])
def test_a_killed_machine_ends_the_other_which_names_it(tmp_path, dead):
    children = pair(tmp_path / "o", tmp_path / "x", **LONG)
    started(tmp_path / "o")
    os.kill(children[dead].pid, signal.SIGKILL)
    assert children[1 - dead].code() == 1  # by its own words, not its watchdog's
    assert f"ERROR in thread drafter-0: machine (rank {dead}) left the run" in children[1 - dead].text()
    assert children[dead].code() == -signal.SIGKILL


def test_a_machine_that_falls_silent_is_named_after_stall_s(tmp_path):
    """Stopped, not dead: its connections stay open, as after a power cut."""
    late = tmp_path / "late"
    children = pair(tmp_path / "o", tmp_path / "x", setup=_later_when, setup_args=(late,), **LONG)
    started(tmp_path / "o")
    os.kill(children[1].pid, signal.SIGSTOP)
    late.touch()
    assert children[0].code() == 1
    said = rf"STALLED: nothing moved for {common.HANG_S} s.*machines not heard of \[1\]"
    assert re.search(said, children[0].text())
    children[1].process.kill()
    assert children[1].code() == -signal.SIGKILL


def test_sigterm_to_one_stops_both_at_the_same_step(tmp_path):
    """Machine 0 here, machine 1 under torchrun below."""
    out = tmp_path / "o"
    children = pair(out, tmp_path / "x", **LONG)
    started(out)
    os.kill(children[0].pid, signal.SIGTERM)
    assert [c.code() for c in children] == [128 + signal.SIGTERM] * 2
    last = [max(map(int, re.findall(r"^step (\d+) ", c.text(), re.M))) for c in children]
    assert last[0] == last[1] == int((out / "latest").resolve().name[5:]) < LONG["STEPS"]
    assert not (tmp_path / "x").exists()


def _poisoned(rank, size, port, rows):
    _machine(rank, size, port)
    inner = common.trainer.target_features

    def bad(forward, row, *args):
        hidden = inner(forward, row, *args)
        if row.index in rows:
            hidden[0, 3, 5] = float("nan")
        return hidden
    common.trainer.target_features = bad


def test_bad_rows_of_any_machine_are_skipped_and_counted_by_all(tmp_path):
    """Rows 6 (machine 1, step 2) and 8.. (all, from step 3): K_BAD ends both at the same step."""
    port, settings = free_port(), dict(LONG, K_BAD=3)
    children = [Child(["train", *arguments(tmp_path / str(r), **settings)], _poisoned,
                      (r, 2, port, {6, *range(12, 400)})) for r in (0, 1)]
    assert [c.code() for c in children] == [1, 1]
    bad = [json.loads(x) for x in (tmp_path / "0" / "bad_steps.jsonl").read_text().splitlines()]
    assert [(b["step"], b["rows"]) for b in bad][:2] == [(2, [6]), (4, [12, 13, 14, 15])]
    assert all("K_BAD = 3" in c.text() for c in children) and not (tmp_path / "1").exists()


def test_the_same_two_machines_give_the_same_bits(tmp_path, two_machines):
    end_well(pair(tmp_path / "o", tmp_path / "x", **HALF, **threads(2, 2)))
    assert_same(tmp_path / "o" / "latest", two_machines / "latest")
    assert untimed(tmp_path / "o") == untimed(two_machines)


def test_alone_nothing_of_torch_distributed_starts(tmp_path, monkeypatch):
    def started(*args, **kwargs):
        raise AssertionError("torch.distributed started")
    monkeypatch.setattr(torch.distributed, "init_process_group", started)
    monkeypatch.setattr(torch.distributed, "TCPStore", started)
    monkeypatch.setenv("WORLD_SIZE", "1")  # torchrun with one machine
    train_ok(tmp_path / "o", STEPS=1)
    monkeypatch.delenv("WORLD_SIZE")
    train_ok(tmp_path / "p", STEPS=1)
    assert not torch.distributed.is_initialized()


def boxes(arguments, **env):
    """`bash run.sh node` on two machines, as a user types it -> the two processes."""
    env = {**os.environ, "PYTHON": sys.executable, "NNODES": "2", "MASTER_ADDR": "127.0.0.1",
           "MASTER_PORT": str(free_port()), "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(common.HANG_S), **env}
    return [
        subprocess.Popen(
            ["bash", str(common.ROOT / "run.sh"), "node", *arguments],
            text=True,
            env={**env, "NODE_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]


def test_run_sh_node_under_torchrun_stops_by_sigterm(tmp_path):
    """Both boxes share OUT. The signal goes to torchrun of box 1, which hands it on."""
    out = tmp_path / "o"
    both = boxes(arguments(out, **LONG))
    try:
        started(out)
        both[1].terminate()
        texts = [b.communicate(timeout=common.HANG_S)[0] for b in both]
    finally:
        for b in both:  # not kill: torchrun's worker would live on
            b.terminate()
            b.wait(common.HANG_S)
    assert all("ended by signal 15" in text for text in texts), texts
    assert (out / "latest").resolve().name == f"step_{log_lines(out)[-1]['step']:08d}"
    assert len((out / "train.log").read_text().split("constants: ")) == 2


def test_run_sh_node_says_what_is_missing(tmp_path):
    box = boxes([], MASTER_ADDR="")[0]
    assert "MASTER_ADDR is not set" in box.communicate(timeout=common.HANG_S)[0] and box.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_run_sh_demo_hands_a_signal_on(tmp_path, number):
    """To the shell alone, as a service manager sends it: the run saves and ends, and the shell with it."""
    out = tmp_path / "o"
    shell = subprocess.Popen(
        ["bash", str(common.ROOT / "run.sh"), "demo", *arguments(out, **LONG)],
        text=True,
        env={**os.environ, "PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        started(out)
        shell.send_signal(number)
        text = shell.communicate(timeout=common.HANG_S)[0]
    finally:
        shell.kill()
    assert shell.returncode == 128 + number and f"ended by signal {int(number)}" in text, text
    assert (out / "latest").resolve().name == f"step_{log_lines(out)[-1]['step']:08d}"


def test_run_sh_refuses_an_unknown_mode_before_it_installs(tmp_path):
    copy = shutil.copy(common.ROOT / "run.sh", tmp_path / "run.sh")
    done = subprocess.run(
        ["bash", copy, "trian"], text=True, capture_output=True, env={"PATH": os.environ["PATH"]}
    )
    assert (
        done.returncode == 2
        and done.stderr.splitlines()[-1] == "run.sh: mode 'trian' is unknown"
        and "generate    one PROMPT decoded" in done.stderr
        and not (tmp_path / ".venv").exists()
    )
