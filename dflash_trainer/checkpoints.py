"""What is written to disk and read back: the drafter's published files, checkpoints, lines of a log.

    save_drafter / load_drafter         the files that z-lab's client, vLLM and SGLang read
    write_checkpoint / read_checkpoint  these and the trainer's own state: complete or not there, checksums
    find_checkpoint                     where RESUME goes on
    Saver                               writes them in a thread of its own, keeps the newest and the best
    Lines / truncate_lines, tensorboard  metrics and logs, over a full disk and a resume
    only_run_in                         a folder that one run has to itself
"""
import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import threading
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file

from dflash_trainer.errors import UserError, require, user_error_on
from dflash_trainer.workers import start_thread
from model_drafter import DrafterConfig


def free_memory():
    """Host memory in GiB. MemAvailable counts the page cache in, SC_AVPHYS_PAGES doesn't."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable:")) / 2**20
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2**30


# ------------------------------------------------------------------------------ the published files

ARCHITECTURES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}


def config_json(c: DrafterConfig) -> dict:
    """The dict that z-lab's client, vLLM, SGLang and speculators read. Never the target's mrope keys or
    partial_rotary_factor; without is_causal, engines take sliding = causal, full = bidirectional."""
    sliding = "sliding_attention" in c.layer_types
    dflash_config = {
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "block_size": c.block_size,
    }
    if c.input_embedding_scale != 1.0:
        dflash_config["input_embedding_scale"] = c.input_embedding_scale
    if c.final_logit_softcapping is not None:
        dflash_config["final_logit_softcapping"] = c.final_logit_softcapping
    if c.head == "dflash2":  # vLLM reads these nowhere else
        dflash_config["conv_kernel_size"] = c.conv_taps
        dflash_config["conv_group_size"] = c.conv_group
        dflash_config["selector_rank"] = c.selector_rank
        dflash_config["selector_top_k"] = c.selector_top_k
    if c.output_multiplier != 1.0:
        dflash_config["output_multiplier"] = c.output_multiplier
    config = {
        "architectures": [ARCHITECTURES[c.head]],
        "model_type": "qwen3",
        "block_size": c.block_size,
        "dflash_config": dflash_config,
        "num_target_layers": c.num_target_layers,
        "layer_types": list(c.layer_types),
        "sliding_window": c.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "max_window_layers": c.num_layers,
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": c.initializer_range,
        "max_position_embeddings": c.max_position_embeddings,
        "tie_word_embeddings": False,
        "vocab_size": c.vocab_size,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "bos_token_id": c.bos_token_id,
        "eos_token_id": c.eos_token_id,
        "pad_token_id": c.pad_token_id,
        "rope_theta": c.rope_theta,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
    }
    if c.in_block == "bidirectional":
        config["is_causal"] = False
    if c.head == "dspark":  # flat, as DeepSpec writes it; sample_from_anchor in dflash_config would stop vLLM
        config |= {
            "mask_token_id": c.mask_token_id,
            "target_layer_ids": list(c.target_layer_ids),
            "num_anchors": c.num_anchors,
            "markov_rank": c.markov_rank,
            "markov_head_type": "vanilla",
            "enable_confidence_head": c.confidence,
            "confidence_head_with_markov": True,
            "sample_from_anchor": True,
        }
    return config


def config_from_json(j: dict) -> DrafterConfig:
    """The inverse of config_json, also for published drafters. ValueError names the key that is missing, or
    what of the file this trainer doesn't know."""
    (architecture,) = j.get("architectures") or [ARCHITECTURES["dflash"]]
    heads = {name: head for head, name in ARCHITECTURES.items()}
    if architecture not in heads:
        raise ValueError(f"config.json: architectures {architecture!r} is not one of {', '.join(heads)}")
    head = heads[architecture]
    d = {**j, **j.get("dflash_config", {})}
    if d.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"config.json: markov_head_type {d['markov_head_type']!r} is not 'vanilla'")
    rope = d.get("rope_parameters") or {}
    try:
        n_layers = d["num_hidden_layers"]
        sizes_of_head = {}
        if head == "dflash2":
            sizes_of_head = {
                "conv_taps": d["conv_kernel_size"], "conv_group": d["conv_group_size"],
                "selector_rank": d["selector_rank"], "selector_top_k": d["selector_top_k"],
                "output_multiplier": float(d.get("output_multiplier", 1.0))}
        elif head == "dspark":
            sizes_of_head = {
                "markov_rank": d["markov_rank"], "confidence": bool(d.get("enable_confidence_head", False)),
                "num_anchors": d.get("num_anchors", 0)}
        is_causal = d.get("is_causal")
        return DrafterConfig(
            hidden_size=d["hidden_size"],
            intermediate_size=d["intermediate_size"],
            num_layers=n_layers,
            num_heads=d["num_attention_heads"],
            num_kv_heads=d["num_key_value_heads"],
            head_dim=d.get("head_dim") or d["hidden_size"] // d["num_attention_heads"],
            vocab_size=d["vocab_size"],
            block_size=d["block_size"],
            mask_token_id=d["mask_token_id"],
            target_layer_ids=tuple(d["target_layer_ids"]),
            num_target_layers=d["num_target_layers"],
            layer_types=tuple(d.get("layer_types") or ["full_attention"] * n_layers),
            sliding_window=d.get("sliding_window"),
            rope_theta=float(d.get("rope_theta") or rope["rope_theta"]),
            rms_norm_eps=d["rms_norm_eps"],
            initializer_range=d.get("initializer_range", 0.02),
            max_position_embeddings=d["max_position_embeddings"],
            bos_token_id=d.get("bos_token_id"),
            eos_token_id=d.get("eos_token_id"),
            pad_token_id=d.get("pad_token_id"),
            input_embedding_scale=float(d.get("input_embedding_scale", 1.0)),
            final_logit_softcapping=d.get("final_logit_softcapping"),
            head=head,
            in_block="bidirectional" if is_causal is False and head != "dspark" else "by_type",
            **sizes_of_head)
    except KeyError as e:
        raise ValueError(f"config.json of the drafter lacks {e}") from None


def read_config(directory):
    """-> DrafterConfig of a checkpoint."""
    return config_from_json(json.loads(Path(directory, "config.json").read_text()))


def save_drafter(directory, config, state):
    """config.json + model.safetensors (bf16, published tensor names) into an existing directory."""
    directory = Path(directory)
    (directory / "config.json").write_text(json.dumps(config_json(config), indent=2) + "\n")
    tensors = {name: t.to(torch.bfloat16).contiguous() for name, t in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_drafter(directory):
    """-> (DrafterConfig, state dict on the CPU) of a checkpoint of ours or a published one."""
    if Path(directory, "latest").exists():
        raise ValueError(f"it is the OUT of a run: give {Path(directory, 'latest')} or {Path(directory, 'best')}")
    weights = load_file(Path(directory, "model.safetensors"))
    of_target = [name for name in weights if name.startswith(("embed_tokens.", "lm_head."))]
    if of_target:  # DeepSpec's files hold them
        print(f"{directory}: {', '.join(of_target)} left out, they are the target's")
    published = {name.replace("_codebook.weight", "_codebook"): weights[name] for name in weights
                 if name not in of_target}
    return read_config(directory), published


def differences(ours, theirs):
    """Fields in which two configs can't share weights or meaning: 'name: ours X, theirs Y' lines."""
    free = {"initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
            "rms_norm_eps", "input_embedding_scale", "num_anchors"}
    a, b = asdict(ours), asdict(theirs)
    return [f"{k}: {a[k]} here, {b[k]} there" for k in a if k not in free and a[k] != b[k]]


# ---------------------------------------------------------------------------------------- checkpoints

def checksum(path):
    with open(path, "rb") as f:
        return [path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]


def sync_path(path):
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def point(link, target):
    """Relative symlink, replaced in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.name)
    os.replace(new, link)


def masters_of(state):
    """The weights in a trainer's state, by their published names."""
    return {k.removeprefix("master."): v for k, v in state.items() if k.startswith("master.")}


def write_index(directory, names):
    """Says which file holds the drafter's tensors: without it servers load every *.safetensors of a directory,
    the trainer's state as well, and stop at its first name (vLLM 0.32, SGLang 0.5.23)."""
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def write_checkpoint(out, step, config, state, info):
    """OUT/step_N, complete or not there: temporary name, fsync, rename. -> its path."""
    final, part = out / f"step_{step:08d}", out / f".part_step_{step:08d}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = masters_of(state)
    save_drafter(part, config, weights)
    write_index(part, weights)
    save_file(state, part / "trainer.safetensors")
    files = {p.name: checksum(p) for p in sorted(part.iterdir())}
    (part / "trainer.json").write_text(json.dumps({**info, "files": files}, indent=1))
    for path in part.glob("*.safetensors"):  # written for their owner alone: a server may be somebody else
        path.chmod((part / "config.json").stat().st_mode)
    for path in (*part.iterdir(), part):
        sync_path(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    sync_path(out)
    return final


def read_checkpoint(path):
    """-> (info, state) of a complete checkpoint; ValueError saying what is damaged."""
    try:
        info = json.loads((path / "trainer.json").read_text())
        for name, expected in info["files"].items():
            found = checksum(path / name)
            if found != expected:
                raise ValueError(f"{name} has size and checksum {found}, expected {expected}")
        return info, load_file(path / "trainer.safetensors")
    except (OSError, KeyError, TypeError, json.JSONDecodeError, safetensors.SafetensorError) as e:
        raise ValueError(f"{type(e).__name__}: {e}") from None


def step_directories(out):
    """Newest first; names as write_checkpoint gives them, so that a copy called step_5 is left alone."""
    found = (p for p in out.glob("step_*") if p.is_dir() and re.fullmatch(r"step_[0-9]{8}", p.name))
    return sorted(found, reverse=True)


def find_checkpoint(out, resume):
    """RESUME -> (path, info, state) or None. A damaged newest one is named, and the one before it is used."""
    found, latest = step_directories(out), (out / "latest").resolve()
    held = found or (out / "metrics.jsonl").exists()
    if resume not in ("auto", "no"):
        require(not held or Path(resume).resolve().parent == out.resolve(),
             f"RESUME = {resume}, but OUT = {out} holds another run: choose another OUT, or RESUME=auto")
        with user_error_on(f'RESUME = {resume}: neither "auto" nor "no" nor a complete checkpoint', ValueError):
            return Path(resume), *read_checkpoint(Path(resume))
    for link in (out / "latest", out / "best"):
        require(link.is_symlink() or not link.exists(), f"OUT = {out}: {link} is no symlink (a copy?): move it")
    # newer ones were left behind by a run that went back to it; a link that leads elsewhere says nothing
    found = found[next((i for i, p in enumerate(found) if p.resolve() == latest), 0):]
    require(resume == "auto" or not held,
         f"RESUME = no, but OUT = {out} holds a run already: choose another OUT, or RESUME=auto")
    for path in found:
        try:
            return path, *read_checkpoint(path)
        except ValueError as e:
            print(f"checkpoint {path} is damaged ({e}): using the one before it")
    require(not found, f"OUT = {out}: its {len(found)} checkpoints are all damaged; move them to start anew")
    return None


def best_of(out):
    """{step, tau} of OUT/best, or None."""
    try:
        return json.loads((out / "best" / "trainer.json").read_text())["best"]
    except (OSError, ValueError, KeyError):
        return None


class Saver:
    """Writes checkpoints in a thread of its own, one at a time; after a failure the next save tries again.
    The `keep` newest stay, and the best."""

    def __init__(self, workers, log, out, config, keep):
        self.workers = workers
        self.log = log          # run_log.LogFiles
        self.out = out
        self.config = config
        self.keep = keep
        self.thread = None
        self.failed = None      # why the last save failed

    def start(self, step, copy_state, info, progress, best):
        """copy_state(): the copy to host memory, made when the last one is on the disk."""
        self.wait()
        state = copy_state()
        self.thread = start_thread("saver", self.workers.run_guarded, self.save, step, state, info, progress, best,
                                   daemon=False)

    def save(self, step, state, info, progress, best):
        with self.workers.slow():
            try:
                self.write(step, state, info, best)
            except (OSError, safetensors.SafetensorError) as e:
                self.failed = f"checkpoint of step {step} could not be written: {e}"
                shutil.rmtree(self.out / f".part_step_{step:08d}", ignore_errors=True)
                if best:  # the best that there is
                    progress.best = best_of(self.out)
                self.log.write(f"WARNING: {self.failed}; training goes on, the next save tries again")

    def write(self, step, state, info, best):
        self.log.lines.require_written()  # a run that resumes here must find every line up to here
        final = write_checkpoint(self.out, step, self.config, state, info)
        point(self.out / "latest", final)
        if best:
            point(self.out / "best", final)
        self.failed = None
        self.rotate(step)
        self.log.write(f"saved {final}" + (" (best)" if best else ""))

    def rotate(self, step):
        """The newest up to `step` and the best stay; newer ones are damaged or of a line that was left."""
        best = (self.out / "best").resolve().name
        found = step_directories(self.out)
        left = [path for path in found if int(path.name[5:]) > step]
        for old in left + found[len(left) + self.keep:]:
            if old.name == best:
                continue
            if old.is_symlink():
                old.unlink()
            else:
                shutil.rmtree(old)

    def wait(self):
        if self.thread:
            self.thread.join()


def point_best(out, step):
    """A step that is on the disk already is the best so far."""
    path = out / f"step_{step:08d}"
    if path.is_dir():  # RESUME may name another folder's
        with user_error_on(f"OUT = {out}: can't be written", OSError):
            point(out / "best", path)


# ------------------------------------------------------------------------------- the run's folder

def commit():
    """Of the trainer's own repository, or None."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parents[1],
                              capture_output=True, text=True)
        return done.stdout.strip() or None
    except OSError:
        return None


def tensorboard(out):
    """A writer where tensorboard is installed, else None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: metrics go to metrics.jsonl and the log alone")
        return None
    return SummaryWriter(str(out / "tensorboard"))


class Lines:
    """Lines appended to files of a folder; what a full disk refuses goes there with later ones."""

    def __init__(self, out):
        self.out, self.lock = out, threading.RLock()
        self.waiting = {}  # file -> lines that a full disk refused

    def append(self, name, *texts):
        """-> the error that keeps them, and those before them, in memory; or None."""
        with self.lock:
            waiting = self.waiting.setdefault(name, [])
            first = not waiting
            waiting += texts
            try:
                append_text(self.out / name, "".join(text + "\n" for text in waiting))
                waiting.clear()
            except OSError as e:
                if first:
                    print(f"WARNING: {self.out / name}: {e}; its lines wait in memory for room", flush=True)
                return e

    def require_written(self):
        for error in filter(None, [self.append(name) for name in list(self.waiting)]):
            raise error


def append_text(path, text):
    """All of it or nothing: a full disk leaves no half line."""
    with open(path, "ab", buffering=0) as f:
        end, data = f.tell(), text.encode()
        if f.write(data) < len(data):
            f.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def truncate_lines(out, step, evaluated=None):
    """What will be trained or evaluated again leaves the metrics and the list of bad steps."""
    def stays(line):
        try:
            values = json.loads(line)
            return values["step"] < step + ("eval_loss" not in values or evaluated == step)
        except (ValueError, TypeError, KeyError):  # half a line
            return False

    for path in filter(Path.exists, (out / "metrics.jsonl", out / "bad_steps.jsonl")):
        lines = [x for x in path.read_text(errors="replace").splitlines() if stays(x)]
        with user_error_on(f"OUT = {out}: can't be written", OSError):
            path.with_suffix(".new").write_text("".join(x + "\n" for x in lines))
            os.replace(path.with_suffix(".new"), path)


@contextmanager
def only_run_in(out, clear=False):
    """Two runs never share one OUT. clear: what an earlier one left there goes."""
    with user_error_on(f"OUT = {out}: not a directory that can be written", OSError):
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "a+")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.seek(0)
            owner = lock.read().strip() or "unknown"
            raise UserError(f"OUT = {out} is in use by another run (process {owner})") from None
        with user_error_on(f"OUT = {out}: can't be written", OSError):
            lock.truncate(0)
            lock.write(str(os.getpid()))
            lock.flush()
            left = [path for path in out.iterdir() if clear and path.name != ".lock"]
            if left:
                print(f"OUT = {out} is cleared, the demo starts anew (another OUT keeps a run, and resumes it)")
            for path in left:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        yield out
