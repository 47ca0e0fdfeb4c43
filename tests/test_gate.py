"""What keeps compiled work safe under threads: the Gate, the guards against silent compiles, the
checked copies."""

import random
import sys
import threading
import time
from collections import Counter
from contextlib import contextmanager

import pytest
import torch

import common
import flex_utils
import train_dflash
from dflash_trainer import workers
from dflash_trainer.devices import check_pairs, transfer
from dflash_trainer.machines import SingleMachine
from flex_utils import Gate, attend_flex, block_mask, worker_compile_settings

PATIENCE = common.HANG_S  # seconds after which a thread counts as hung


def in_threads(*jobs):
    """Run jobs side by side; the first exception of any is raised here, a hang is a failure."""
    errors = []

    def run_guarded(job):
        try:
            job()
        except BaseException as e:  # noqa: BLE001 - handed to the test below
            errors.append(e)

    threads = [threading.Thread(target=run_guarded, args=(job,), daemon=True) for job in jobs]
    for t in threads:
        t.start()
    deadline = time.monotonic() + PATIENCE
    for t in threads:
        t.join(max(0.0, deadline - time.monotonic()))
    assert not any(t.is_alive() for t in threads), "a thread hangs"
    if errors:
        raise errors[0]


def until(condition):
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.001)


class Inside:
    """Counts who is inside, independently of the gate's own book-keeping."""

    def __init__(self):
        self.lock, self.alone, self.side, self.most, self.faults = threading.Lock(), 0, 0, 0, []

    @contextmanager
    def enter(self, alone):
        with self.lock:
            if self.alone or (alone and self.side):
                self.faults.append(f"alone {self.alone}, side by side {self.side}, entering alone={alone}")
            self.alone, self.side = self.alone + alone, self.side + (not alone)
            self.most = max(self.most, self.side)
        try:
            yield
        finally:
            with self.lock:
                self.alone, self.side = self.alone - alone, self.side - (not alone)


def storm(gate, inside, seed, runs, together):
    """Random signatures, one in eight of them failing; `alone` must be what this thread's own history
    says. At the end all threads are inside at once, or hang at the barrier."""
    rng, done = random.Random(seed), set()
    for _ in range(runs):
        key = rng.choice(("train", "eval", "target")), rng.randrange(6)
        fails = rng.random() < 0.125
        try:
            with gate.work(*key) as alone, inside.enter(alone):
                assert alone == (key not in done), (key, alone)
                time.sleep(rng.choice((0, 0, 0.0005)))
                if fails:
                    raise KeyError(key)
            done.add(key)
        except KeyError:
            pass
    with gate.work("the last"):
        pass
    together.wait(PATIENCE)  # nobody needs to be alone any more
    with gate.work("the last") as alone, inside.enter(alone):
        together.wait(PATIENCE)


def test_storm_of_eight_threads():
    gate, inside, together = Gate(threading.Lock()), Inside(), threading.Barrier(8)
    in_threads(*(lambda seed=seed: storm(gate, inside, seed, 300, together) for seed in range(8)))
    assert not inside.faults, inside.faults[:3]
    assert inside.most == 8  # a gate that lets one in at a time would pass everything else
    assert "nobody alone, 0 side by side, 0 waiting" in gate.holder()


def test_known_work_really_runs_side_by_side():
    gate, warm, at_barrier = Gate(threading.Lock()), threading.Barrier(4), threading.Barrier(4)

    def job():
        with gate.work("train", 1):
            pass
        warm.wait(PATIENCE)  # nobody needs to be alone any more, or the wait below would be a real deadlock
        with gate.work("train", 1):
            at_barrier.wait(PATIENCE)  # passes only when all four are inside at once

    in_threads(*[job] * 4)


def test_signature_is_per_thread_kind_and_grad_mode():
    gate, seen = Gate(threading.Lock()), []

    def record(*signature):
        with gate.work(*signature) as alone:
            seen.append(alone)

    record("train", 1, "a")
    record("train", 1, "a")
    record("eval", 1, "a")
    record("train", 1, "b")
    with torch.no_grad():
        record("train", 1, "a")
    in_threads(lambda: record("train", 1, "a"))
    assert seen == [True, False, True, True, True, True]


def test_a_new_thread_inherits_nothing_from_a_dead_one():
    """The system hands out thread ids again; the second thread has run nothing yet."""
    gate, seen = Gate(threading.Lock()), []

    def job():
        with gate.first_step() as first, gate.work("train", 1) as alone:
            seen.append((first, alone))

    for _ in range(3):
        in_threads(job)
    assert seen == [(True, True)] * 3


def test_a_waiting_writer_goes_before_a_later_reader_and_the_reader_follows():
    """No starvation either way, decided by order and not by luck: reader in, writer waits, reader waits."""
    gate, order, leave = Gate(threading.Lock()), [], threading.Event()

    def first_reader():
        with gate.work("train"):
            pass
        with gate.work("train"):
            order.append("reader in")
            leave.wait(PATIENCE)

    def writer():
        until(lambda: order)
        with gate.work("new"):
            order.append("writer")

    def second_reader():
        with gate.work("train"):
            pass
        warm.set()
        until(lambda: "1 waiting" in gate.holder())
        threading.Timer(0.05, leave.set).start()
        with gate.work("train"):
            order.append("second reader")

    warm = threading.Event()
    in_threads(second_reader, lambda: (warm.wait(PATIENCE), first_reader()), writer)
    assert order == ["reader in", "writer", "second reader"]


def test_writer_gets_in_among_readers_that_never_pause():
    """Once a writer waits, no reader gets in before it."""
    gate, stop, written = Gate(threading.Lock()), threading.Event(), [0]
    warm = threading.Barrier(5)

    def reader():  # warm, then nearly always inside; four of them overlap
        with gate.work("train"):
            pass
        warm.wait(PATIENCE)
        while not stop.is_set():
            before = written[0]
            one_waits = ", 1 waiting" in gate.holder()
            with gate.work("train"):
                overtaken = one_waits and written[0] == before
                time.sleep(0.001)
            if overtaken:
                stop.set()
                raise AssertionError("a reader got in before a writer that was waiting")

    def writer():
        warm.wait(PATIENCE)
        while not stop.is_set():
            with gate.work("target", written[0]) as alone:
                assert alone
                written[0] += 1
            if written[0] == 20:
                stop.set()

    in_threads(reader, reader, reader, reader, writer)
    assert written == [20]


def test_readers_get_in_after_a_queue_of_writers():
    gate, entered, hold = Gate(threading.Lock()), [], threading.Event()

    def reader():
        with gate.work("train"):
            pass
        warm.wait(PATIENCE)
        until(lambda: "5 waiting" in gate.holder())
        threading.Timer(0.05, hold.set).start()
        with gate.work("train"):
            entered.append("reader")

    def holder():
        warm.wait(PATIENCE)
        with gate.work("target", "held"):
            hold.wait(PATIENCE)

    def writer():
        warm.wait(PATIENCE)
        until(lambda: "alone for" in gate.holder())
        with gate.work("target", 1):
            entered.append("writer")

    warm = threading.Barrier(8)
    in_threads(reader, reader, holder, *[writer] * 5)
    assert Counter(entered) == {"writer": 5, "reader": 2}


def test_exception_releases_and_is_not_recorded():
    gate = Gate(threading.Lock())
    for _ in range(2):
        with pytest.raises(KeyError), gate.work("train", 1) as alone:
            raise KeyError
        assert alone
    with gate.work("train", 1) as alone:
        assert alone
    with pytest.raises(KeyError), gate.work("train", 1) as alone:  # known by now: leaves as a reader
        raise KeyError
    assert not alone

    def other():
        with gate.work("train", 1):
            pass

    in_threads(other)


def test_first_step_lock_is_held_released_on_exception_and_taken_again():
    lock = threading.Lock()
    gate = Gate(lock)
    for _ in range(2):
        with pytest.raises(KeyError), gate.first_step() as first:
            assert first and lock.locked()
            raise KeyError
        assert not lock.locked()
    with gate.first_step() as first:
        assert first and lock.locked()
    with gate.first_step() as first:
        assert not first and not lock.locked()


def test_first_steps_of_threads_exclude_each_other():
    gate, inside = Gate(threading.Lock()), Inside()

    def job():
        with gate.first_step(), inside.enter(True):
            time.sleep(0.005)

    in_threads(*[job] * 8)
    assert not inside.faults


def test_lock_before_gate_never_deadlocks():
    """Cold threads (lock, then alone), warm readers and a warm thread that keeps meeting new shapes,
    all at once."""
    gate, cold_left = Gate(threading.Lock()), [4]

    def cold():
        time.sleep(0.02)
        for _ in range(20):
            with gate.first_step(), gate.work("train", 1):
                time.sleep(0.0005)
        cold_left[0] -= 1

    def warm(new_shapes):
        step = 0
        while cold_left[0] or step < 5:
            step += 1
            with gate.first_step(), gate.work("target", step if new_shapes else 0):
                time.sleep(0.0005)
            time.sleep(0.0002)

    in_threads(*[cold] * 4, *[lambda: warm(False)] * 3, lambda: warm(True))


# ------------------------------------------------------------------------------- a code object a thread


def doubled_or_not(x, double):
    return x * 2 if double else x + 1


def compiles_while_warm(functions, seconds):
    """Each thread warms up its function alone, then all call theirs: how often is one compiled again?"""
    warm, lock, started = threading.Barrier(len(functions)), threading.Lock(), []
    until_then, x = [0.0], torch.ones(3)

    def job(function):
        worker_compile_settings(64)
        with lock:
            for double in (False, True):
                function(x, double)
        if warm.wait() == 0:
            started.clear()
            until_then[0] = time.monotonic() + seconds
        warm.wait()
        while time.monotonic() < until_then[0] and not started:
            for double in (False, True):
                function(x, double)

    handler = torch._dynamo.callback.callback_handler
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    handler.register_start_callback(watch := lambda args: started.append(args.compile_id))
    try:
        in_threads(*(lambda f=f: job(f) for f in functions))
    finally:
        handler.remove_start_callback(watch)
        sys.setswitchinterval(before)
    return len(started)


@pytest.fixture
def no_guard_swap(monkeypatch):
    """Without a GPU torch's CUDA builds swap the device guard while they trace, unlocked, and segfault."""
    compile_now()
    if torch.version.cuda and not torch.cuda.is_available():
        monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)


def test_threads_that_share_a_code_object_compile_again(no_guard_swap):
    """The positive control of the next test: seen within a second on torch 2.11 and 2.13."""
    shared = torch.compile(doubled_or_not, backend="eager", dynamic=False)
    assert compiles_while_warm([shared] * 4, seconds=PATIENCE / 2)


def test_threads_with_their_own_code_objects_do_not(no_guard_swap):
    own = [flex_utils.compiled(doubled_or_not, i, "eager") for i in range(4)]
    assert compiles_while_warm(own, seconds=3) == 0


def test_an_own_copy_is_the_same_function():
    class Scale:
        def by(self, x, factor=3, *, plus=1):
            return x * factor + plus + self.bias
    scale = Scale()
    scale.bias = 10
    one, two = (flex_utils.compiled(scale.by, owner, "eager") for owner in ("a", "b"))
    assert one(torch.ones(1)).item() == two(torch.ones(1)).item() == 14
    assert one(torch.ones(1), 5, plus=0).item() == 15
    assert flex_utils.clone_code(Scale.by, "a") is flex_utils.clone_code(Scale.by, "a")
    assert flex_utils.clone_code(Scale.by, "a").__code__ is not flex_utils.clone_code(Scale.by, "b").__code__


# ---------------------------------------------------------------------------------------- compiles outside


def compile_now():
    """A new code object each time, so that it really compiles."""
    made = {}
    exec("def f(x): return x + 1", made)
    torch.compile(made["f"], backend="eager")(torch.ones(3))


@pytest.fixture
def watched():
    """A gate that watches compiles, with one signature this thread already knows."""
    # torch 2.11's CUDA build without a GPU dies when the first compile was a thread's that has ended
    compile_now()
    gate = Gate(threading.Lock())
    with gate.work("known"):
        pass
    end = gate.forbid_compiles_outside()
    yield gate
    end()


def run_named(job, name):
    thread = threading.Thread(target=job, name=name)
    thread.start()
    thread.join(PATIENCE)


def test_compile_outside_the_gate_names_the_thread(watched):
    run_named(compile_now, "stray-7")
    with pytest.raises(RuntimeError, match="outside the gate in thread stray-7"), watched.work("known"):
        pass


def test_compile_side_by_side_is_an_error(watched):
    with pytest.raises(RuntimeError, match="outside the gate in thread MainThread"), watched.work("known"):
        compile_now()


def test_compile_alone_is_fine_and_the_watch_can_end():
    gate = Gate(threading.Lock())
    end = gate.forbid_compiles_outside()
    with gate.work("new"):
        compile_now()
    end()
    compile_now()
    with gate.work("new"):
        pass
    assert not gate.violations


def test_flex_outside_a_compile_names_shape_and_thread():
    q, k = torch.zeros(1, 4, 32, 16), torch.zeros(1, 2, 72, 16)
    seen = []

    def job():
        with pytest.raises(RuntimeError) as e:
            attend_flex()(q, k, k, block_mask(torch.tensor([0, 0]), torch.tensor([9, 20]), 40, 16, None))
        seen.append(str(e.value))

    run_named(job, "drafter-5")
    assert "drafter-5" in seen[0] and "(1, 4, 32, 16)" in seen[0] and "(1, 2, 72, 16)" in seen[0]


def attention_by_loops(q, k, v, visible):
    """fp64, one query and head at a time; visible(i, j) as in design 3.3, full attention."""
    out, group = torch.zeros(q.shape, dtype=torch.float64), q.shape[1] // k.shape[1]
    for h in range(q.shape[1]):
        for i in range(q.shape[2]):
            keys = [j for j in range(k.shape[2]) if visible(i, j)]
            scores = (
                torch.stack([q[0, h, i].double() @ k[0, h // group, j].double() for j in keys])
                / q.shape[3] ** 0.5
            )
            out[0, h, i] = scores.softmax(0) @ v[0, h // group, keys].double()
    return out


def test_flex_inside_a_compile_equals_attention_by_loops():
    """Forward only (flex has no backward on the CPU); backend eager, so the attention is torch's
    reference."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, h, t, 16, generator=generator) for h, t in ((4, 8), (2, 28), (2, 28)))
    mask = block_mask(torch.tensor([0, 0]), torch.tensor([5, 12]), 20, 4, None)
    with torch.no_grad():
        got = torch.compile(attend_flex(), backend="eager")(q, k, v, mask)
    want = attention_by_loops(
        q, k, v, lambda i, j: j < (5, 12)[i // 4] if j < 20 else (j - 20) // 4 == i // 4
    )
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    dense = flex_utils.attend_dense(
        q, k, v, flex_utils.dense_mask(torch.tensor([0, 0]), torch.tensor([5, 12]), 20, 4, None)
    )
    torch.testing.assert_close(dense.double(), want, atol=1e-5, rtol=1e-5)


def test_worker_settings_hold_in_the_thread_that_made_them():
    """Reaching the limit is an error there, and the limit leaves room for every device."""
    seen = []

    def job():
        worker_compile_settings(8)
        seen.append((torch._dynamo.config.recompile_limit, torch._dynamo.config.fail_on_recompile_limit_hit))

    keep = {
        k: getattr(torch._dynamo.config, k)
        for k in ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    }
    try:
        run_named(job, "w")
    finally:
        for name, value in keep.items():  # torch 2.11: the configuration is the process's
            setattr(torch._dynamo.config, name, value)
    assert seen[0][0] >= 64 and seen[0][1] is True


# ----------------------------------------------------------------------------------------------- device pairs


GPU = [torch.device("cuda", i) for i in range(3)]


@pytest.fixture
def no_devices(monkeypatch):
    """`host.to(gpu)` stays on the CPU and remembers where it was sent."""
    at = {}

    def to(self, device, **_):
        at["source"] = device
        return self

    monkeypatch.setattr(torch.Tensor, "to", to)
    return at


@pytest.mark.parametrize(
    "broken",
    [torch.zeros_like, lambda t: t.flip(0), lambda t: torch.cat([t[:-1], t[-1:] + 1])],
    ids=["zeros", "garbage", "one word"],
)
def test_check_pairs_finds_the_bad_pair_only(no_devices, broken):
    def copy(tensor, destination):
        return broken(tensor) if (no_devices["source"], destination) == (GPU[0], GPU[2]) else tensor.clone()

    pairs = [(a, b) for a in GPU for b in GPU] + [(GPU[0], GPU[1]), (torch.device("cpu"), GPU[0])]
    assert check_pairs(pairs, copy) == {(GPU[0], GPU[2])}
    assert check_pairs(pairs, lambda t, d: t.clone()) == frozenset()


def test_check_pairs_copies_each_pair_once_and_never_to_itself(no_devices):
    copied = []

    def copy(tensor, destination):
        copied.append((no_devices["source"], destination))
        return tensor

    check_pairs([(GPU[0], GPU[1]), (GPU[1], GPU[1]), (GPU[0], GPU[1]), (GPU[1], torch.device("cpu"))], copy)
    assert copied == [(GPU[0], GPU[1])]


class Traveller:
    """Stands for a tensor and writes down its journey."""

    shape, dtype, is_cuda = (2, 3), torch.bfloat16, True

    def __init__(self, device):
        self.device, self.journey = device, []

    def copy_(self, source):
        self.journey = [*source.journey, "pinned host"]
        return self

    def to(self, device, **_):
        self.journey.append(device)
        return self


def test_transfer_takes_a_bad_pair_through_pinned_host_memory(monkeypatch):
    def host(shape, dtype, pin_memory):
        assert (shape, dtype, pin_memory) == ((2, 3), torch.bfloat16, True)
        return Traveller(torch.device("cpu"))
    monkeypatch.setattr(torch, "empty", host)
    bad = frozenset({(GPU[0], GPU[1])})
    assert transfer(Traveller(GPU[0]), GPU[1], bad).journey == ["pinned host", GPU[1]]
    assert transfer(Traveller(GPU[1]), GPU[0], bad).journey == [GPU[0]]  # pairs are ordered
    assert transfer(Traveller(GPU[0]), GPU[1]).journey == [GPU[1]]


def test_gradients_of_drafters_without_nccl_go_by_transfer_both_ways(monkeypatch):
    """It alone knows of bad pairs."""
    lists, bad, crossed = [[torch.full((3,), 10.0 ** d)] for d in range(3)], frozenset({1}), []

    def copy(tensor, device, bad_pairs):
        crossed.append((tensor[0].item(), bad_pairs))
        return tensor.clone()
    monkeypatch.setattr(train_dflash, "transfer", copy)
    train_dflash.sum_over_replicas(lists, False, SingleMachine(), bad)
    assert [tensors[0].tolist() for tensors in lists] == [[111.0] * 3] * 3
    assert crossed == [(10.0, bad), (100.0, bad), (111.0, bad), (111.0, bad)]


def test_the_watchdog_waits_longer_for_loading_and_saving(monkeypatch, capfd):
    clock = common.WatchdogClock()
    monkeypatch.setattr(workers, "time", clock)
    crew = workers.Workers(1)
    ends = []

    def end(code):
        ends.append(code)
        crew.stop.set()
    monkeypatch.setattr(workers.os, "_exit", end)
    watchdog = workers.start_thread("watchdog", crew.watchdog, 0.5, lambda: "state")
    clock.pass_by(0.4)
    with crew.slow():
        clock.pass_by(3.5)
        assert not ends
    clock.pass_by(0.4)
    assert not ends
    clock.now += 0.2
    watchdog.join(PATIENCE)
    assert ends == [1]
    assert "nothing moved for 0.5 s (STALL_S); state" in capfd.readouterr().out


# ------------------------------------------------------------------------------------------------------- cost


def test_steady_state_cost():
    """About 20 microseconds a micro-step: counted in calls, which are the same on a busy machine."""
    gate, calls = Gate(threading.Lock()), [0]

    def micro_step():
        with gate.first_step(), gate.work("train", torch.device("cuda", 0), (1, 4096), torch.bfloat16):
            pass

    def count(frame, event, arg):
        calls[0] += event in ("call", "c_call")
    for _ in range(100):
        micro_step()
    sys.setprofile(count)
    try:
        micro_step()
    finally:
        sys.setprofile(None)
    print(f"gate: {calls[0]} calls a step")
    assert calls[0] < 80
