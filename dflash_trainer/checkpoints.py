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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file, save_file

from dflash_trainer.errors import UserError, require, user_error_on
from dflash_trainer.workers import Workers, start_thread
from model_drafter import DrafterConfig


def free_memory() -> float:
    """Host memory in GiB. MemAvailable counts the page cache as free, SC_AVPHYS_PAGES doesn't."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                kib = int(line.split()[1])
                return kib / 2**20
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


def read_config(directory: str | Path) -> DrafterConfig:
    """-> DrafterConfig of a checkpoint."""
    return config_from_json(json.loads(Path(directory, "config.json").read_text()))


def save_drafter(directory: str | Path, config: DrafterConfig, state: dict[str, torch.Tensor]) -> None:
    """config.json + model.safetensors (bf16, published tensor names) into an existing directory."""
    directory = Path(directory)
    (directory / "config.json").write_text(json.dumps(config_json(config), indent=2) + "\n")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in state.items()}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def load_drafter(directory: str | Path) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """-> (DrafterConfig, state dict on the CPU) of a checkpoint of ours or a published one."""
    there = [str(Path(directory, name)) for name in ("best", "latest") if Path(directory, name).exists()]
    if there:
        raise ValueError(f"it is the OUT of a run: give {' or '.join(there)}")
    weights = load_file(Path(directory, "model.safetensors"))
    of_target = [name for name in weights if name.startswith(("embed_tokens.", "lm_head."))]
    if of_target:  # DeepSpec's files hold them
        print(f"{directory}: {', '.join(of_target)} left out, they are the target's")
    published = {}
    for name, weight in weights.items():
        if name not in of_target:
            published[name.replace("_codebook.weight", "_codebook")] = weight
    return read_config(directory), published


def differences(ours: DrafterConfig, theirs: DrafterConfig) -> list[str]:
    """Fields in which two configs can't share weights or meaning: 'name: X here, Y there' each."""
    free = {"initializer_range", "max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
            "rms_norm_eps", "input_embedding_scale", "num_anchors"}
    there = asdict(theirs)
    found = []
    for name, value in asdict(ours).items():
        if name not in free and value != there[name]:
            found.append(f"{name}: {value} here, {there[name]} there")
    return found


# ---------------------------------------------------------------------------------------- checkpoints

State = dict[str, torch.Tensor]  # by name, on the host


def checksum(path: Path) -> list:
    """[bytes, sha256]."""
    with open(path, "rb") as f:
        return [path.stat().st_size, hashlib.file_digest(f, "sha256").hexdigest()]


def sync_path(path: Path) -> None:
    """fsync a file or a directory."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def point(link: Path, target: Path) -> None:
    """Relative symlink, replaced in one step."""
    new = link.with_name(f".{link.name}.new")
    new.unlink(missing_ok=True)
    new.symlink_to(target.name)
    os.replace(new, link)


def master_weights(state: State) -> State:
    """The weights in a trainer's state, by their published names."""
    prefix = "master."
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def write_index(directory: Path, names: Iterable[str]) -> None:
    """Says which file holds the drafter's tensors: without it servers load every *.safetensors of a
    directory, the trainer's state as well, and stop at its first name (vLLM 0.32, SGLang 0.5.23)."""
    index = {"metadata": {}, "weight_map": dict.fromkeys(sorted(names), "model.safetensors")}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def step_path(out: Path, step: int) -> Path:
    return out / f"step_{step:08d}"


def part_path(out: Path, step: int) -> Path:
    """Where a checkpoint lies while it is being written."""
    return out / f".part_step_{step:08d}"


def write_checkpoint(out: Path, step: int, config: DrafterConfig, state: State, info: dict) -> Path:
    """OUT/step_N, complete or not there: temporary name, fsync, rename. -> its path."""
    final = step_path(out, step)
    part = part_path(out, step)
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    weights = master_weights(state)
    save_drafter(part, config, weights)
    write_index(part, weights)
    save_file(state, part / "trainer.safetensors")
    files = {path.name: checksum(path) for path in sorted(part.iterdir())}
    (part / "trainer.json").write_text(json.dumps({**info, "files": files}, indent=1))
    for path in part.glob("*.safetensors"):  # written for their owner alone: a server may be somebody else
        path.chmod((part / "config.json").stat().st_mode)
    for path in (*part.iterdir(), part):
        sync_path(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(part, final)
    sync_path(out)
    return final


def read_checkpoint(path: Path) -> tuple[dict, State]:
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


def step_directories(out: Path) -> list[Path]:
    """Newest first; names as write_checkpoint gives them, so that a copy called step_5 is left alone."""
    found = []
    for path in out.glob("step_*"):
        if path.is_dir() and re.fullmatch(r"step_[0-9]{8}", path.name):
            found.append(path)
    return sorted(found, reverse=True)


def find_checkpoint(out: Path, resume: str) -> tuple[Path, dict, State] | None:
    """RESUME -> (path, info, state) or None. A damaged newest one is named, and the one before it is used.

    UserError where OUT holds another run than RESUME says, or only damaged checkpoints.
    """
    found = step_directories(out)
    held = found or (out / "metrics.jsonl").exists()
    if resume not in ("auto", "no"):
        require(not held or Path(resume).resolve().parent == out.resolve(),
                f"RESUME = {resume}, but OUT = {out} holds another run: choose another OUT, or RESUME=auto")
        trouble = f'RESUME = {resume}: neither "auto" nor "no" nor a complete checkpoint'
        with user_error_on(trouble, ValueError):
            return Path(resume), *read_checkpoint(Path(resume))
    for link in (out / "latest", out / "best"):
        require(link.is_symlink() or not link.exists(),
                f"OUT = {out}: {link} is no symlink (a copy?): move it")
    # newer ones than `latest` were left behind by a run that went back to it; a link that leads elsewhere
    # says nothing
    latest = (out / "latest").resolve()
    resolved = [path.resolve() for path in found]
    if latest in resolved:
        found = found[resolved.index(latest):]
    require(resume == "auto" or not held,
            f"RESUME = no, but OUT = {out} holds a run already: choose another OUT, or RESUME=auto")
    for path in found:
        try:
            return path, *read_checkpoint(path)
        except ValueError as e:
            print(f"checkpoint {path} is damaged ({e}): using the one before it")
    require(not found, f"OUT = {out}: its {len(found)} checkpoints are all damaged; move them to start again")
    return None


def best_of(out: Path) -> dict | None:
    """{step, tau} of OUT/best, or None."""
    try:
        return json.loads((out / "best" / "trainer.json").read_text())["best"]
    except (OSError, ValueError, KeyError):
        return None


class Saver:
    """Writes checkpoints in a thread of its own, one at a time; after a failure the next save tries again.
    The `keep` newest stay, and the best."""

    def __init__(self, workers: Workers, log, out: Path, config: DrafterConfig, keep: int):
        self.workers = workers
        self.log = log      # run_log.LogFiles
        self.out = out
        self.config = config
        self.keep = keep
        self.thread = None
        self.failed = None  # why the last save failed

    def start(self, step: int, copy_state: Callable[[], State], info: dict, progress, best: bool) -> None:
        """copy_state(): the copy to host memory, made when the last one is on the disk. progress:
        run_log.Progress, whose best checkpoint a failed save takes back."""
        self.wait()
        state = copy_state()
        self.thread = start_thread("saver", self.workers.run_guarded, self.save, step, state, info, progress,
                                   best, daemon=False)

    def save(self, step: int, state: State, info: dict, progress, best: bool) -> None:
        with self.workers.slow():
            try:
                self.write(step, state, info, best)
            except (OSError, safetensors.SafetensorError) as e:
                self.failed = f"checkpoint of step {step} could not be written: {e}"
                shutil.rmtree(part_path(self.out, step), ignore_errors=True)
                if best:  # back to the best that is on the disk
                    progress.best = best_of(self.out)
                self.log.write(f"WARNING: {self.failed}; training goes on, the next save tries again")

    def write(self, step: int, state: State, info: dict, best: bool) -> None:
        self.log.lines.require_written()  # a run that resumes here must find every line up to here
        final = write_checkpoint(self.out, step, self.config, state, info)
        point(self.out / "latest", final)
        if best:
            point(self.out / "best", final)
        self.failed = None
        self.rotate(step)
        self.log.write(f"saved {final}" + (" (best)" if best else ""))

    def rotate(self, step: int) -> None:
        """The newest up to `step` and the best stay; newer ones are damaged or of a line that was left."""
        best = (self.out / "best").resolve().name
        found = step_directories(self.out)
        newer = [path for path in found if path.name > step_path(self.out, step).name]
        for old in newer + found[len(newer) + self.keep:]:
            if old.name == best:
                continue
            if old.is_symlink():
                old.unlink()
            else:
                shutil.rmtree(old)

    def wait(self) -> None:
        if self.thread:
            self.thread.join()


def point_best(out: Path, step: int) -> None:
    """A step that is on the disk already is the best so far."""
    path = step_path(out, step)
    if path.is_dir():  # RESUME may name another folder's
        with user_error_on(f"OUT = {out}: can't be written", OSError):
            point(out / "best", path)


# ------------------------------------------------------------------------------- the run's folder

def commit() -> str | None:
    """Of the trainer's own repository, or None."""
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parents[1],
                              capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() or None


def tensorboard(out: Path):
    """A writer where tensorboard is installed, else None."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("tensorboard is not installed: metrics go to metrics.jsonl and the log alone")
        return None
    return SummaryWriter(str(out / "tensorboard"))


class Lines:
    """Lines appended to files of a folder. Those that a full disk rejects are kept in memory and retried with
    the next ones."""

    def __init__(self, out: Path):
        self.out = out
        self.lock = threading.RLock()
        self.waiting = {}  # file -> lines that a full disk rejected

    def append(self, name: str, *texts: str) -> OSError | None:
        """-> the error that keeps them, and those before them, in memory; None when all are written."""
        with self.lock:
            waiting = self.waiting.setdefault(name, [])
            is_first = not waiting
            waiting.extend(texts)
            try:
                append_text(self.out / name, "".join(f"{text}\n" for text in waiting))
            except OSError as e:
                if is_first:
                    print(f"WARNING: {self.out / name}: {e}; its lines wait in memory for room", flush=True)
                return e
            waiting.clear()
            return None

    def require_written(self) -> None:
        """OSError where lines still wait."""
        for name in list(self.waiting):
            error = self.append(name)
            if error:
                raise error


def append_text(path: Path, text: str) -> None:
    """All of it or nothing: a full disk leaves no half line."""
    data = text.encode()
    with open(path, "ab", buffering=0) as f:
        end = f.tell()
        if f.write(data) < len(data):
            f.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def truncate_lines(out: Path, step: int, evaluated: int | None = None) -> None:
    """Drop the lines of metrics and bad steps that a run resumed at `step` will repeat. evaluated: the last
    step whose evaluation the checkpoint holds."""
    def stays(line):
        try:
            values = json.loads(line)
            last_kept = step  # the line of a step is written after it, that of an evaluation before it
            if "eval_loss" in values and evaluated != step:
                last_kept = step - 1
            return values["step"] <= last_kept
        except (ValueError, TypeError, KeyError):  # half a line
            return False

    for path in (out / "metrics.jsonl", out / "bad_steps.jsonl"):
        if not path.exists():
            continue
        kept = [line for line in path.read_text(errors="replace").splitlines() if stays(line)]
        with user_error_on(f"OUT = {out}: can't be written", OSError):
            new = path.with_suffix(".new")
            new.write_text("".join(f"{line}\n" for line in kept))
            os.replace(new, path)


@contextmanager
def only_run_in(out: Path, clear: bool = False) -> Iterator[Path]:
    """Two runs never share one OUT: UserError naming the process that has it. clear: what an earlier run left
    there goes.

    Not filelock's FileLock: taking it empties the file, which here names the process that holds it.
    """
    with user_error_on(f"OUT = {out}: not a directory that can be written", OSError):
        out.mkdir(parents=True, exist_ok=True)
        lock = open(out / ".lock", "a+")  # noqa: SIM115
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
            if clear:
                clear_folder(out)
        yield out


def clear_folder(out: Path) -> None:
    left = [path for path in out.iterdir() if path.name != ".lock"]
    if left:
        print(f"OUT = {out} is cleared, the demo starts anew (another OUT keeps a run, and resumes it)")
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
