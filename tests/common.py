"""What the tests of the trainer share: tiny targets, data files, runs of main() here and in child processes.

random_target() / plus_one_target()   directories for transformers: a Llama, tokenizer, chat template
tiny_config()                         sizes of a drafter that needs no target
data_file()                           JSONL of token ids that go up by one
train() / run_main()                      main(argv) in this process; constants are set back, no thread left
WatchdogClock                         for what must not depend on how fast the machine is
start() / Child                       main(argv) in a child of a server that has imported the trainer once
replace_function()                    where a test breaks something, by the function itself and not its name
fail_at(), put_nan(), delay_calls()   faults put into the trainer from outside
losses(), weights(), assert_same()    what a run left behind
"""
import atexit
import functools
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TQDM_DISABLE="1")
ROOT = Path(__file__).resolve().parents[1]
for folder in (str(ROOT), str(ROOT / "tests")):
    if folder not in sys.path:
        sys.path.insert(0, folder)

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import model_drafter as md
import train_dflash as trainer
from dflash_trainer import checkpoints, settings
from model_drafter import DrafterConfig

transformers.utils.logging.disable_progress_bar()

VOCAB, LAYERS = 64, 4
PAD, BOS, EOS, MASK, START, USER, ASSISTANT, FIRST_WORD = range(8)  # token ids; words w7..w63 follow
FIELDS = [  # design, section 4
    "step", "loss", "accept_len", "lr", "grad_norm", "tokens_per_s", "step_ms", "wait_ms", "target_wait_ms",
    "reduce_ms", "queue", "mem_gib", "skipped", "bad_rows"]
TIMED = {"tokens_per_s", "step_ms", "wait_ms", "target_wait_ms", "reduce_ms", "queue", "mem_gib"}
DEFAULTS = settings.values(trainer)
HANG_S = 600  # what takes longer hangs: how fast the machine is decides no test
TINY = dict(TARGET_DEVICES="cpu", DRAFTER_DEVICES="cpu", SEQ_LEN=64, NUM_ANCHORS=8, BLOCK_SIZE=4,
            DRAFT_LAYERS=2, TARGET_LAYER_IDS="0,2", ROWS_PER_STEP=2, STEPS=6, LR=0.003, EVAL_EVERY=0,
            SAVE_EVERY=1000, LOG_EVERY=1, STALL_S=HANG_S)
TEMPLATE = ("{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
            "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}")


@functools.cache
def scratch():
    """One folder for the whole session, gone at its end."""
    folder = Path(tempfile.mkdtemp(prefix="dflash_tests_"))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(folder, ignore_errors=True))
    return folder


# ------------------------------------------------------------------------------------------------- targets


def save_tokenizer(folder):
    """Words split at spaces, ChatML-like template without generation tags; id 3 is a special token unused."""
    words = ["<pad>", "<bos>", "<|im_end|>", "<|unused|>", "<|im_start|>", "user", "assistant"]
    words += [f"w{i}" for i in range(len(words), VOCAB - 1)] + ["<unk>"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>",
        eos_token="<|im_end|>",         additional_special_tokens=["<|unused|>", "<|im_start|>"])
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def llama(hidden=32, heads=4, kv_heads=2, spread=0.02, seed=0):
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=LAYERS,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=512,
        initializer_range=spread,         bos_token_id=BOS, eos_token_id=EOS,
        pad_token_id=PAD)).eval().requires_grad_(False)


def save_target(model, name):
    folder = scratch() / name
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


@functools.cache
def random_target(**shape):
    """Random weights: its first loss is near ln VOCAB; with spread=0.4 its greedy answers vary."""
    return save_target(llama(**shape), "random" + "".join(f"_{k}{v}" for k, v in sorted(shape.items())))


@functools.cache
def plus_one_target():
    """Says t + 1 after every token t, by weights set by hand: layers add nothing to the embedding, embeddings
    are orthogonal, and the head's row of t + 1 is the embedding of t."""
    model = llama(hidden=VOCAB)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    table = torch.nn.init.orthogonal_(torch.empty(VOCAB, VOCAB), generator=torch.Generator().manual_seed(1))
    model.model.embed_tokens.weight.copy_(table)
    model.lm_head.weight.copy_(table.roll(1, 0) * 4)
    return save_target(model, "plus_one")


def fit(drafter, rows, loss_of):
    """25 passes of Adam over `rows`, loss_of(drafter, *row) -> RowResult, until it is accepted often;
    then its weights are rounded to bf16, as a file holds them."""
    optimiser = torch.optim.Adam(drafter.parameters(), 5e-3)
    for step in range(25 * len(rows)):
        result = loss_of(drafter, *rows[step % len(rows)])
        optimiser.zero_grad()
        (result.loss / result.weight).backward()
        optimiser.step()
    with torch.no_grad():
        for param in drafter.parameters():
            param.copy_(param.bfloat16())


def tiny_config(**changes):
    """Of a drafter: three layers, of both types."""
    kinds = "sliding_attention", "full_attention", "sliding_attention"
    c = DrafterConfig(
        hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
        vocab_size=61, block_size=4, mask_token_id=60, target_layer_ids=(1, 3), num_target_layers=6,
        layer_types=kinds, sliding_window=6, rope_theta=5e5)
    return replace(c, **changes)


def batch_of(ids, positions, start, anchors, run_length, n_anchors, block_size, chunk, target_hidden=None):
    """Host arrays of a row -> its Batch, one group of anchors."""
    blocks = md.block_arrays(start, run_length, anchors, n_anchors, block_size, chunk)
    tensors = [torch.from_numpy(np.asarray(array)) for array in (ids, positions, *blocks)]
    return md.Batch(target_hidden, *tensors)


def loss_of_row(drafter, embed, head, target_hidden, batch, make_mask, spec):
    return md.row_loss(drafter, embed, head, batch._replace(target_hidden=target_hidden), 0, make_mask, spec)


# ---------------------------------------------------------------------------------------------------- data


def data_file(name="train", n=40, shortest=10, longest=50, cycle=40, seed=0):
    """n conversations of token ids FIRST_WORD + (s + i) % cycle, supervised after the first four."""
    path = scratch() / f"{name}_{n}_{shortest}_{longest}_{cycle}_{seed}.jsonl"
    rng = random.Random(seed)
    lines = []
    for _ in range(n):
        length, first = rng.randint(shortest, longest), rng.randrange(cycle)
        ids = [FIRST_WORD + (first + i) % cycle for i in range(length)]
        lines.append({"input_ids": ids, "loss_mask": [0] * 4 + [1] * (length - 4)})
    return write_lines(path, lines)


def message_file(name="messages", n=40, longest=30, seed=0):
    """The same kind of text as chats: the answer counts on from the user's last word; some have two turns."""
    path, rng, lines = scratch() / f"{name}_{n}_{longest}_{seed}.jsonl", random.Random(seed), []
    for i in range(n):
        word, chat = rng.randrange(40), []
        for _ in range(1 + i % 2):
            for role, length in (("user", rng.randint(2, 4)), ("assistant", rng.randint(5, longest))):
                words = [f"w{FIRST_WORD + (word + j) % 40}" for j in range(length)]
                chat.append({"role": role, "content": " ".join(words)})
                word += length
        lines.append({"messages": chat})
    return write_lines(path, lines)


def write_lines(path, lines):
    Path(path).write_text("".join(json.dumps(x) + "\n" for x in lines))
    return Path(path)


def arguments(out, **settings):
    """NAME=VALUE of a tiny run; lists in the a,b form."""
    given = dict(TINY, OUT=out, TARGET=random_target(), DATA=data_file(),
                 EVAL_DATA=data_file("eval", 6, seed=1))
    given.update(settings)
    return [f"{k}={','.join(map(str, v)) if isinstance(v, (list, tuple)) else v}" for k, v in given.items()]


def threads(targets, drafters):
    return dict(TARGET_DEVICES=["cpu"] * targets, DRAFTER_DEVICES=["cpu"] * drafters)


# ------------------------------------------------------------------------------------- runs in this process


def run_main(*argv):
    """main(argv) -> exit code. Constants are set back; a thread left behind is a failure."""
    before = set(threading.enumerate())
    vars(trainer).update(DEFAULTS)
    try:
        return trainer.main([str(a) for a in argv])
    finally:
        vars(trainer).update(DEFAULTS)
        new = [t for t in threading.enumerate() if t not in before and t.name != "tqdm_monitor"]
        for thread in new:
            thread.join(HANG_S)  # a library's pool may still be on its way out
        left = [t.name for t in new if t.is_alive()]
        assert not left, f"threads left behind: {left}"


def train(out, **settings):
    return run_main("train", *arguments(out, **settings))


def train_ok(out, **settings):
    """A run that has to end well -> its folder."""
    assert train(out, **settings) == 0
    return Path(out)


def command(out, env=None, **settings):
    """`python train_dflash.py train NAME=VALUE ...` as a user starts it -> CompletedProcess."""
    argv = [sys.executable, str(ROOT / "train_dflash.py"), "train", *arguments(out, **settings)]
    env = {**os.environ, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **(env or {})}
    return subprocess.run(argv, text=True, capture_output=True, env=env, timeout=HANG_S)


# ------------------------------------------------------------------------------------------ runs in children


@functools.cache
def fork_server():
    """Imports the trainer once and has no threads, so a forked child starts in milliseconds and in safety."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_dflash", "common"])
    return context


def _child_main(argv, log, setup, setup_args):
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    torch.set_num_threads(1)  # as conftest.py does: on a busy machine OpenMP's spinning costs seconds
    if setup is not None:
        setup(*setup_args)
    sys.exit(trainer.main(argv))


class Child:
    """main(argv) in a process of its own; setup(*setup_args) of a test module runs there first."""

    def __init__(self, argv, setup=None, setup_args=()):
        self.log = Path(tempfile.mkstemp(dir=scratch(), suffix=".log")[1])
        arguments = [str(a) for a in argv], str(self.log), setup, setup_args
        self.process = fork_server().Process(target=_child_main, args=arguments)
        self.process.start()
        self.pid = self.process.pid

    def code(self, timeout=HANG_S):
        """Exit code, negative for a signal that killed it. A hang is a failure."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
            raise AssertionError(f"child still ran after {timeout} s:\n{self.log.read_text()[-3000:]}")
        return self.process.exitcode

    def text(self):
        return self.log.read_text()


def start(out, setup=None, setup_args=(), **settings):
    return Child(["train", *arguments(out, **settings)], setup, setup_args)


def until(condition, timeout=HANG_S):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.002)


class WatchdogClock:
    """The watchdog's clock, which a test moves: it stands still at `now`."""

    def __init__(self):
        self.now = 0.0
        self.looks = 0  # of the watchdog's thread

    def monotonic(self):
        self.looks += threading.current_thread().name == "watchdog"
        return self.now

    def pass_by(self, seconds):
        """So much later; back when the watchdog has seen it."""
        self.now += seconds
        seen = self.looks
        until(lambda: self.looks >= seen + 2)


# -------------------------------------------------------------------------------------------------- faults
# `patch` is pytest's monkeypatch, or anything with its setattr


def replace_function(patch, function, new):
    """`new` stands where a function or a class's method is looked up: in its module or its class.

    Given the function, tests follow a rename as all code does: one that is forgotten fails when it is
    imported, instead of breaking nothing in silence.
    """
    *path, name = function.__qualname__.split(".")
    owner = sys.modules[function.__module__]
    for part in path:
        owner = getattr(owner, part)
    assert getattr(owner, name) is function, f"{function} is replaced already"
    patch.setattr(owner, name, new)


def fail_at(patch, function, call):
    """The call-th call of it by a worker raises, whichever it is; those that start the run don't count.
    -> a list: that thread's name."""
    count, lock, died = [0], threading.Lock(), []

    def failing(*args, **kwargs):
        with lock:
            count[0] += threading.current_thread() is not threading.main_thread()
            if count[0] == call and not died:
                died.append(threading.current_thread().name)
                raise RuntimeError(f"boom in {function.__name__}")
        return function(*args, **kwargs)
    replace_function(patch, function, failing)
    return died


def put_nan(patch, rows, value=math.nan):
    """Hidden states of these training rows hold one bad number each."""
    inner = trainer.target_features

    def bad(forward, row, *args):
        hidden = inner(forward, row, *args)
        if row.index in rows:
            hidden[0, 3, 5] = value
        return hidden
    replace_function(patch, inner, bad)


def delay_calls(patch, function, seed, before=True):
    """It sleeps for random times, different in every thread."""
    draws = {}
    name = function.__name__

    def slow(*args, **kwargs):
        me = threading.current_thread().name
        pause = draws.setdefault(me, random.Random(f"{seed} {name} {me}")).choice([0, 0, 0.002, 0.01, 0.03])
        if before:
            time.sleep(pause)
        result = function(*args, **kwargs)
        if not before:
            time.sleep(pause)
        return result
    replace_function(patch, function, slow)


# ------------------------------------------------------------------------------------------ what a run left


def metrics(out):
    path = Path(out) / "metrics.jsonl"
    return [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []


def metrics_text(out):
    path = Path(out) / "metrics.jsonl"
    return path.read_text() if path.exists() else ""


def log_lines(out):
    return [m for m in metrics(out) if "eval_loss" not in m]


def eval_lines(out):
    return [m for m in metrics(out) if "eval_loss" in m]


def losses(out):
    return [m["loss"] for m in log_lines(out)]


def untimed(out):
    """The metrics without what a clock or a queue decides."""
    return [{k: v for k, v in m.items() if k not in TIMED} for m in metrics(out)]


def tensors(checkpoint):
    """Every tensor of every file of a checkpoint."""
    files = sorted(Path(checkpoint).glob("*.safetensors"))
    return {f"{p.name}:{n}": t for p in files for n, t in load_file(p).items()}


def published(checkpoint):
    return load_file(Path(checkpoint) / "model.safetensors")


def weights(checkpoint):
    """fp32 masters, by published name."""
    return {n.split("master.")[1]: t for n, t in tensors(checkpoint).items() if "master." in n}


def assert_same(a, b):
    """Two checkpoints hold the same bits."""
    ours, theirs = tensors(Path(a)), tensors(Path(b))
    assert ours.keys() == theirs.keys() and len(ours) > 10
    different = [n for n in ours if not torch.equal(ours[n], theirs[n])]
    assert not different, f"{len(different)} of {len(ours)} tensors differ: {different[:4]}"


def distance(a, b):
    """Relative L2 distance of the fp32 weights of two checkpoints."""
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys() and ours
    off = sum((ours[n] - theirs[n]).double().square().sum() for n in ours)
    return float((off / sum(t.double().square().sum() for t in theirs.values())).sqrt())


def config_of(checkpoint):
    return json.loads((Path(checkpoint) / "config.json").read_text())


def complete(out):
    """`latest`, if there is one, is a checkpoint that can be read."""
    latest = Path(out) / "latest"
    if latest.is_symlink():
        assert len(load_file(latest / "model.safetensors")) == 2 * 11 + 3
        assert checkpoints.read_checkpoint(latest)[0]["step"] == int(latest.resolve().name[5:])


def no_leftovers(out):
    """No temporary file of any kind."""
    left = [p for p in Path(out).rglob("*") if p.name != ".lock" and any(
        mark in p.name or p.name.startswith(".") for mark in ("part", "new", "tmp"))]
    assert not left, left
