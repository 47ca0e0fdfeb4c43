"""Before the first step: can these settings, files, devices and checkpoints work together? Head of the log.

    check_settings    all that can be said before a file or a device is touched
    preflight         compiler, disk, host memory: what would otherwise fail late
    check_machines    all machines of a run train the same thing on the same rows
    check_devices     every pair of GPUs that copies will cross
    find_start        the step, the weights and the training state to begin with
    describe_run      head of the log, OUT/run.json

`settings` is the trainer's frozen snapshot. A setting that can't work is a UserError that names it and both
values.
"""
import itertools
import json
import math
import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import safetensors
import torch
import transformers

from dflash_trainer import checkpoints
from dflash_trainer.data_files import resolve_files
from dflash_trainer.devices import check_pairs
from dflash_trainer.errors import require, user_error_on
from dflash_trainer.machines import Cluster, SingleMachine
from dflash_trainer.run_log import LogFiles, Progress
from dflash_trainer.settings import check_types, require_one_of, require_positive
from dflash_trainer.token_cache import overlap
from model_drafter import HEADS, Drafter, DrafterConfig, LossTerms

# what a resumed run must share with the one that wrote the checkpoint; the rest may change and is printed
MUST_MATCH_CHECKPOINT = (
    "SEED", "SEQ_LEN", "NUM_ANCHORS", "ROWS_PER_STEP", "LOSS", "CHAT_TEMPLATE_KWARGS", "LOSS_TERMS",
    "SELECTOR_TERMS", "SELECTOR_WARMUP", "SELECTOR_RAMP", "SELECTOR_DETACH", "CONFIDENCE")
# the settings that only one head has
SETTINGS_OF_HEAD = {
    "dflash2": ("CONV_TAPS", "CONV_GROUP", "SELECTOR_RANK", "SELECTOR_TOP_K", "SELECTOR_TERMS",
                "SELECTOR_WARMUP", "SELECTOR_RAMP", "SELECTOR_DETACH"),
    "dspark": ("MARKOV_RANK", "CONFIDENCE"),
}
# what machines must share as well, since every one decides by itself what happens after a step
MUST_MATCH_ACROSS_MACHINES = (
    "LR", "WARMUP", "CLIP", "GAMMA", "LOG_EVERY", "EVAL_EVERY", "SAVE_EVERY", "K_BAD",
    "TARGET_PRECISION", "DRAFTER_PRECISION")
PARTS_OF_HEADS = ("candidate_selector", "markov_head", "confidence_head")  # convolutions are in the layers
USE_OR_RESTART = ("use the checkpoint's value, or start a new run (another OUT; INIT_FROM=... keeps the "
                  "weights)")


def check_settings(trainer: ModuleType) -> None:
    check_types(trainer)  # they may have been edited
    require_positive(
        trainer, "SEQ_LEN", "NUM_ANCHORS", "DRAFT_LAYERS", "SLIDING_WINDOW", "INIT_STD", "EPOCHS", "STEPS",
        "STOP_AT", "ROWS_PER_STEP", "LR", "CLIP", "GAMMA", "LOSS_CHUNK", "QUEUE_DEPTH", "LOG_EVERY",
        "SAVE_EVERY", "KEEP", "STALL_S", "K_BAD", "MAX_NEW_TOKENS")

    def check(name: str, ok: bool, wanted: str) -> None:
        require(ok, f"{name} = {getattr(trainer, name)!r}: {wanted}")

    check("BLOCK_SIZE", trainer.BLOCK_SIZE >= 2,
          "must be 2 or more, the anchor and at least one drafted token")
    check("OUT", bool(trainer.OUT), "name a directory")
    check("EVAL_EVERY", trainer.EVAL_EVERY >= 0, "0 (never) or above")
    check("SEED", 0 <= trainer.SEED < 2**63, "0 or above, below 2**63")
    check("TEMPERATURE", trainer.TEMPERATURE >= 0, "0 (greedy) or above")
    check("WARMUP", 0 <= trainer.WARMUP < 1, "a share of the horizon, 0 <= WARMUP < 1")
    check("MAX_BAD_SHARE", 0 <= trainer.MAX_BAD_SHARE <= 1, "a share, 0 to 1")
    if trainer.LAYER_TYPES is not None:
        n_types = len(trainer.LAYER_TYPES)
        check("LAYER_TYPES", n_types == trainer.DRAFT_LAYERS,
              f"{n_types} entries, DRAFT_LAYERS = {trainer.DRAFT_LAYERS}")
        for kind in trainer.LAYER_TYPES:
            require_one_of("an entry of LAYER_TYPES", kind, ("full_attention", "sliding_attention"))
    n_drafters = len(trainer.DRAFTER_DEVICES)
    check("ROWS_PER_STEP", n_drafters <= trainer.ROWS_PER_STEP,
          f"too few for {n_drafters} drafters, DRAFTER_DEVICES = {trainer.DRAFTER_DEVICES}")
    require_one_of("LOSS", trainer.LOSS, ("decay", "dpace"))
    require_one_of("INIT", trainer.INIT, ("normal", "target"))
    require_one_of("LOSS_FORM", trainer.LOSS_FORM, ("fused", "checkpoint"))
    require_one_of("TARGET_PRECISION", trainer.TARGET_PRECISION, ("bf16", "fp8"))
    require_one_of("DRAFTER_PRECISION", trainer.DRAFTER_PRECISION, ("bf16", "fp8_head", "fp8", "fp8_wgrad"))
    check("DRAFTER_PRECISION", trainer.DRAFTER_PRECISION == "bf16" or trainer.LOSS_FORM == "fused",
          f"an fp8 head makes its gradient in forward: LOSS_FORM = {trainer.LOSS_FORM} can't")
    check_head(trainer, check)


def check_head(trainer: ModuleType, check: Callable[[str, bool, str], None]) -> None:
    """The head's settings, and those that another head forbids."""
    require_one_of("HEAD", trainer.HEAD, HEADS)
    if trainer.IN_BLOCK is not None:
        require_one_of("IN_BLOCK", trainer.IN_BLOCK, ("by_type", "bidirectional"))
    require_positive(trainer, "CONV_TAPS", "CONV_GROUP", "SELECTOR_RANK", "MARKOV_RANK")
    for head, names in SETTINGS_OF_HEAD.items():
        for name in names:
            check(name, head == trainer.HEAD or getattr(trainer, name) == trainer.AS_WRITTEN[name],
                  f"is of HEAD={head}, but HEAD = {trainer.HEAD!r}")
    if trainer.LOSS_TERMS is not None:
        check_terms("LOSS_TERMS", trainer.LOSS_TERMS, LossTerms._fields)
        only_tv = {name for name, value in trainer.LOSS_TERMS.items() if value} == {"tv"}
        check("LOSS_TERMS", not only_tv or bool(trainer.INIT_FROM),
              "tv has no gradient where drafter and target share no token, so it can't train from scratch: "
              'add "ce", or set INIT_FROM')
    check_terms("SELECTOR_TERMS", trainer.SELECTOR_TERMS, ("ce", "tv"))
    check("CONV_TAPS", trainer.CONV_TAPS <= trainer.BLOCK_SIZE,
          f"more than BLOCK_SIZE = {trainer.BLOCK_SIZE}")
    check("SELECTOR_TOP_K", trainer.SELECTOR_TOP_K >= 2, "must be 2 or more")
    check("SELECTOR_WARMUP", 0 <= trainer.SELECTOR_WARMUP < 1, "a share of the horizon, 0 to 1")
    check("SELECTOR_RAMP", 0 <= trainer.SELECTOR_RAMP < 1, "a share of the horizon, 0 to 1")
    check("CONFIDENCE", 0 <= trainer.CONFIDENCE < math.inf, "0 (no confidence head) or above")
    if trainer.HEAD == "dspark":
        check("LAYER_TYPES", "sliding_attention" not in (trainer.LAYER_TYPES or ()),
              "servers run all layers with full attention where HEAD = 'dspark'")
        check("IN_BLOCK", trainer.IN_BLOCK is None, "has no meaning where HEAD = 'dspark'")
        check("LOSS_CHUNK", trainer.LOSS_CHUNK >= trainer.BLOCK_SIZE,
              f"HEAD = 'dspark' needs whole blocks, BLOCK_SIZE = {trainer.BLOCK_SIZE} or more")


def check_terms(name: str, terms: dict, known: Sequence[str]) -> None:
    """{term: coefficient} of a loss; UserError naming what is wrong in it."""
    for term, value in terms.items():
        require_one_of(f"a term of {name}", term, known)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        require(is_number and 0 <= value < math.inf,
                f"{name} = {terms}: {term!r} must be a number, 0 or above")
    require(sum(terms.values()) > 0, f"{name} = {terms}: at least one must be above 0")


def with_head(settings, config: DrafterConfig) -> DrafterConfig:
    """The drafter's config with what HEAD adds. UserError where it doesn't fit the target's sizes."""
    in_block = settings.IN_BLOCK
    slides = "sliding_attention" in config.layer_types
    if in_block is None and settings.HEAD == "dflash2" and slides:
        in_block = "bidirectional"  # as published ones
        if settings.INIT_FROM:
            in_block = load_drafter("INIT_FROM", settings.INIT_FROM)[0].in_block
    config = replace(config, head=settings.HEAD, in_block=in_block or "by_type")
    if config.in_block == "bidirectional" and slides:  # servers differ where the window ends inside the block
        require(config.sliding_window >= config.block_size,
                f"SLIDING_WINDOW = {config.sliding_window}: IN_BLOCK = 'bidirectional' needs BLOCK_SIZE = "
                f"{config.block_size} or more")
    if settings.HEAD == "dflash2":
        require(config.hidden_size % settings.CONV_GROUP == 0,
                f"CONV_GROUP = {settings.CONV_GROUP}: doesn't divide the hidden size {config.hidden_size}")
        top_k = settings.SELECTOR_TOP_K
        require(top_k <= config.vocab_size,
                f"SELECTOR_TOP_K = {top_k}: more than the vocabulary of {config.vocab_size}")
        config = replace(config, conv_taps=settings.CONV_TAPS, conv_group=settings.CONV_GROUP,
                         selector_rank=settings.SELECTOR_RANK, selector_top_k=top_k)
    if settings.HEAD == "dspark":
        config = replace(config, markov_rank=settings.MARKOV_RANK, confidence=settings.CONFIDENCE > 0,
                         num_anchors=settings.NUM_ANCHORS)
    check_target_of_head(config)
    return config


def check_target_of_head(config: DrafterConfig, logit_scale: float = 1.0) -> None:
    """Servers' classes for DSpark know no scaled embeddings and no capped logits. A factor on the target's
    logits changes a selector's scores and what a bias does; a plain drafter's choices stay what they are."""
    scale = config.input_embedding_scale
    softcap = config.final_logit_softcapping
    require(config.head != "dspark" or (scale == 1.0 and softcap is None),
            f"HEAD = 'dspark': this target scales its embeddings ({scale:.4g}) or caps its logits "
            f"({softcap}), which no server does for such drafters: use dflash2")
    require(config.head == "dflash" or logit_scale == 1.0,
            f"HEAD = {config.head!r}: this target multiplies its logits by {logit_scale:.4g}, which no "
            "server does for such drafters: use dflash")


# ---- devices and machines


def quiet_bars() -> None:
    """transformers' bar is for a terminal: in a file it is a line of a thousand characters."""
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()


def device_names() -> list[str]:
    return ["cpu"] + [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def require_devices(name: str, devices: list[str]) -> None:
    require(devices, f"{name} is empty")
    for device in devices:
        require(device in device_names(),
                f"{name} has {device!r}, this machine has {', '.join(device_names())}")


class Links(NamedTuple):
    """How tensors get from one device of this machine to another."""
    bad_pairs: frozenset  # (source, destination) whose direct copies arrive damaged: through host memory
    direct: bool          # gradients are summed by NCCL: the drafters have CUDA devices of their own


def check_devices(targets: list, drafters: list) -> Links:
    """Try every pair of devices that copies will cross, before any weight does."""
    to_targets = itertools.product(targets[:1], targets)
    to_drafters = itertools.product(targets + drafters, drafters)
    bad_pairs = check_pairs(itertools.chain(to_targets, to_drafters))
    for source, destination in sorted(bad_pairs, key=str):
        print(f"GPU peer copies {source} -> {destination} are corrupted on this machine: copying through "
              "host memory instead")
        os.environ["NCCL_P2P_DISABLE"] = "1"
    distinct = 1 < len(drafters) == len(set(drafters))
    return Links(bad_pairs, distinct and all(device.type == "cuda" for device in drafters))


def join_machines(stall_s: int) -> SingleMachine:
    """One machine, or what torchrun started this process for."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return SingleMachine()
    return Cluster(stall_s)


@contextmanager
def output_folder(out: Path, rank: int, clear: bool) -> Iterator[Path]:
    """Only machine 0 writes OUT. The other machines use a temporary folder, deleted at the end."""
    if rank:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
    else:
        with checkpoints.only_run_in(out, clear):
            yield out


def preflight(settings, config: DrafterConfig, out: Path, rank: int) -> None:
    """Whatever would fail late is said before anything slow: files, compiler, disk, host memory."""
    resolve_files(settings.DATA, "DATA")
    if settings.EVAL_EVERY:
        resolve_files(settings.EVAL_DATA, "EVAL_DATA")
    for part in out.glob(".part_step_*"):
        print(f"{part} is a save that was cut off: removed, the complete one before it counts")
        shutil.rmtree(part)
    if settings.COMPILE and any(device.startswith("cuda") for device in settings.DRAFTER_DEVICES):
        require_compiler(config.head_dim)
    if rank == 0:  # machine 0 saves
        require_room(settings.KEEP, config, out)


def require_compiler(head_dim: int) -> None:
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    header = Path(sysconfig.get_paths()["include"], "Python.h")
    require(head_dim >= 16,  # Triton's matrix products start there
            f"COMPILE = True: flex_attention needs a head_dim of 16 or more, this is {head_dim}")
    require(compiler, "COMPILE = True: Triton needs a C compiler on the PATH: install gcc, or set CC")
    require(header.exists(), f"COMPILE = True: Triton needs {header}: install python3-dev")


def require_room(keep: int, config: DrafterConfig, out: Path) -> None:
    with torch.device("meta"):
        drafter = Drafter(config, None)
    billions = sum(p.numel() for p in drafter.parameters()) / 2**30
    checkpoint_gib = billions * 14  # bf16, fp32 masters, two fp32 moments
    copied_gib = billions * 12      # what a save first copies to host memory
    free_gib = shutil.disk_usage(out).free / 2**30
    n_present = len(checkpoints.step_directories(out))  # a run to resume has some already
    wanted_gib = checkpoint_gib * max(1, keep + 2 - n_present)
    print(f"a checkpoint is {checkpoint_gib:.2f} GiB, {keep} newest and the best are kept (KEEP), "
          f"{free_gib:.2f} GiB free")
    require(free_gib >= wanted_gib, f"OUT = {out}: {free_gib:.2f} GiB free, KEEP = {keep}, the best "
            f"and one being written need {wanted_gib:.2f}")
    memory_gib = checkpoints.free_memory()
    if memory_gib < copied_gib:
        print(f"WARNING: {memory_gib:.1f} GiB of host memory is free, a save copies {copied_gib:.1f} GiB "
              "there")


def warn_of_overlap(settings, train, held_out) -> None:
    n_shared, n_held_out = overlap(train, held_out)
    if n_shared:
        print(f"WARNING: {n_shared} of {n_held_out} different conversations of EVAL_DATA = "
              f"{settings.EVAL_DATA} are in DATA = {settings.DATA} too: tau will be too optimistic")


def check_machines(settings, machines, config: DrafterConfig, data, end_step: int) -> None:
    """All machines train the same thing on the same rows; UserError naming both values."""
    mine = {name: getattr(settings, name) for name in MUST_MATCH_CHECKPOINT + MUST_MATCH_ACROSS_MACHINES}
    mine["DATA"] = data.train.conversations.fingerprint
    mine["EVAL_DATA"] = data.held_out and data.held_out.conversations.fingerprint
    mine |= vars(config)
    mine["the last step"] = end_step
    mine["the horizon"] = data.horizon
    for rank, theirs in enumerate(machines.gather(mine)):
        for name in mine:
            require(mine[name] == theirs[name],
                    f"{name} = {mine[name]!r}, but machine (rank {rank}) has {theirs[name]!r}")


# ---- where training begins


class Start(NamedTuple):
    """Where a run begins; small enough to be sent to the other machines."""
    step: int
    progress: Progress


def saved_constants(settings, n_machines: int) -> dict:
    """The constants as saved: ROWS_PER_STEP counts the rows of all machines."""
    return {**vars(settings), "ROWS_PER_STEP": settings.ROWS_PER_STEP * n_machines}


def load_drafter(name: str, path: str):
    """The drafter checkpoint that setting `name` names -> (DrafterConfig, weights)."""
    with user_error_on(f"{name} = {path}: not a drafter checkpoint", OSError, ValueError,
                       safetensors.SafetensorError):
        return checkpoints.load_drafter(path)


def check_resume(path: Path, info: dict, settings, config: DrafterConfig, data, n_machines: int,
                 log: LogFiles) -> None:
    """Refuse to continue what can't be continued, naming both values; say what merely changed."""
    theirs = info["constants"]
    ours = saved_constants(settings, n_machines)
    fingerprint = data.train.conversations.fingerprint
    of_heads = sum(SETTINGS_OF_HEAD.values(), ())
    for name in MUST_MATCH_CHECKPOINT:
        note = f", summed over machines, here {n_machines}" if name == "ROWS_PER_STEP" else ""
        without = ours[name] if name in of_heads else None  # in checkpoints from before the heads
        saved = theirs.get(name, without)
        require(saved == ours[name],
                f"{name} = {ours[name]!r}, but {path} has {saved!r}{note}: {USE_OR_RESTART}")
    require(info["horizon"] == data.horizon,
            f"the schedule's horizon is {data.horizon} steps, but {path} has {info['horizon']}: "
            f"set STEPS={info['horizon']} (STOP_AT ends early without changing it)")
    require(info["data"] == fingerprint,
            f"DATA = {settings.DATA} holds other conversations than {path} was trained on, "
            f"DATA = {theirs['DATA']} (fingerprints {fingerprint} and {info['data']}): {USE_OR_RESTART}")
    changed = checkpoints.differences(config, checkpoints.read_config(path))
    require(not changed, f"{path} is another drafter: {'; '.join(changed)}")
    for name in sorted(set(theirs) & set(ours) - {"RESUME", "CKPT", "PROMPT"}):
        if theirs[name] != ours[name]:
            log.write(f"resume: {name} was {theirs[name]!r}, now {ours[name]!r}")


def find_start(settings, config: DrafterConfig, data, out: Path, n_machines: int, log: LogFiles):
    """-> (Start, state): a checkpoint's whole training state, or fp32 masters alone (`master.*`): those of
    INIT_FROM, or fresh ones from SEED."""
    eval_data = data.held_out and data.held_out.conversations.fingerprint
    found = checkpoints.find_checkpoint(out, settings.RESUME)
    if found:
        path, info, state = found
        check_resume(path, info, settings, config, data, n_machines, log)
        end = min(data.horizon, settings.STOP_AT or data.horizon)
        require(info["step"] < end or path.resolve().parent == out.resolve(),
                f"RESUME = {settings.RESUME} is at step {info['step']} of {end}: nothing is left to do in "
                f"OUT = {settings.OUT}")
        progress = Progress.from_info(info)
        checkpoints.truncate_lines(out, info["step"], progress.last_eval_step)
        log.write(f"resuming from {path}, step {info['step']}")
        if progress.best and progress.best["step"] == info["step"]:  # a kill can come before its link
            checkpoints.point_best(out, info["step"])
        if eval_data and progress.eval_data not in (None, eval_data):
            log.write(f"resume: EVAL_DATA = {settings.EVAL_DATA} has changed: the best checkpoint will be "
                      "chosen again")
            progress.best = None
            progress.best_eval_loss = None
            progress.eval_loss_rose = False
            progress.last_eval_step = None
        progress.eval_data = eval_data or progress.eval_data
        return Start(info["step"], progress), state

    if (out / "metrics.jsonl").exists():
        log.write(f"OUT = {settings.OUT}: no checkpoint to resume (RESUME = {settings.RESUME}), this run "
                  "starts at step 0")
    checkpoints.truncate_lines(out, -1)  # of a run that was killed before its first save
    with torch.device("meta"):  # else the modules would first draw weights of their own
        drafter = Drafter(config, None)
    drafter.to_empty(device="cpu").init_weights(settings.SEED)
    weights = drafter.state_dict()
    if settings.INIT_FROM:
        weights = warm_start(settings, config, weights, log)
    masters = {f"master.{name}": weight for name, weight in weights.items()}
    return Start(0, Progress(eval_data=eval_data)), masters


def warm_start(settings, config: DrafterConfig, fresh: dict[str, torch.Tensor],
               log: LogFiles) -> dict[str, torch.Tensor]:
    """The weights of INIT_FROM; `fresh` ones of a head that it hasn't."""
    what = f"INIT_FROM = {settings.INIT_FROM}"
    theirs, weights = load_drafter("INIT_FROM", settings.INIT_FROM)
    compared = config
    from_plain = theirs.head == "dflash" != config.head
    if from_plain:  # its backbone alone
        compared = replace(config, head="dflash", conv_taps=0, conv_group=0, selector_rank=0,
                           selector_top_k=0, markov_rank=0, confidence=False)
        if config.head == "dspark" and theirs.block_size == config.block_size + 1:
            compared = replace(compared, block_size=theirs.block_size)  # as many drafts
    elif theirs.head == config.head == "dspark" and theirs.markov_rank == 0:
        compared = replace(config, markov_rank=0, confidence=theirs.confidence)
    require(theirs.head in ("dflash", config.head),
            f"{what} has the head {theirs.head!r}, which HEAD = {config.head!r} would drop")
    wrong = checkpoints.differences(compared, theirs)
    require(not wrong, f"{what} doesn't fit: {'; '.join(wrong)}")

    new = [name for name in fresh if name not in weights]
    of_head = [name for name in new if name.split(".")[0] in PARTS_OF_HEADS or "_conv." in name]
    unknown = [name for name in weights if name not in fresh]
    require(not unknown, f"{what} holds tensors that this drafter hasn't: {', '.join(unknown[:5])}")
    missing = new if compared == config else [name for name in new if name not in of_head]
    require(not missing, f"{what} lacks tensors: {', '.join(missing[:5])}")
    if new:
        log.write(f"{what}: {len(new)} tensors of HEAD = {config.head!r} are new: {', '.join(new[:4])}"
                  f"{', ...' if len(new) > 4 else ''}")
    if from_plain and config.head == "dspark":
        log.write(f"{what} predicts one token less far in each slot: HEAD = 'dspark' has to learn the shift")
    return {**fresh, **weights}


def masters_from_target(config: DrafterConfig, masters: dict, decoder: torch.nn.Module) -> dict:
    """INIT = "target": fresh masters, with what the target's decoder has in the same shape in their place."""
    drafter = Drafter(config, None)
    drafter.load_state_dict(masters)
    copied = drafter.init_from_target(decoder.layers, getattr(decoder, "norm", None))
    print(f"INIT = target: {len(copied)} parts of the drafter start as the target's: {', '.join(copied[:5])}"
          f"{', ...' if len(copied) > 5 else ''}")
    return drafter.state_dict()


# ---- head of the log


def describe_run(settings, config: DrafterConfig, data, schedule, machines, n_trainable: int, out: Path,
                 log: LogFiles) -> None:
    conversations = data.train.conversations
    stats = conversations.stats
    n_rows = data.train.total(1)
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
        "python": sys.version.split()[0],
        "commit": checkpoints.commit(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "machines": machines.size,
        "trainable_parameters": n_trainable,
        "horizon": data.horizon,
        "mask_token_id": config.mask_token_id,
    }
    for name, value in facts.items():
        log.note(f"{name}: {value}")
    facts.update(data=stats, drafter=checkpoints.config_json(config), constants=vars(settings))
    (out / "run.json").write_text(json.dumps(facts, indent=1, default=str))
    constants = [f"{name}={value!r}" for name, value in vars(settings).items()]
    log.note("constants: " + ", ".join(constants))

    lengths = conversations.lengths
    most = config.max_position_embeddings
    if lengths.max() > most:
        log.write(f"WARNING: DATA has conversations of {lengths.max()} tokens, max_position_embeddings of "
                  f"TARGET is {most}: the target was not trained beyond that length. SEQ_LEN = {most} "
                  f"instead of {settings.SEQ_LEN} would cut them there")
    n_cut = (lengths >= settings.SEQ_LEN).sum()
    n_drafters = len(settings.DRAFTER_DEVICES)
    anchors_per_row = min(settings.NUM_ANCHORS, stats["supervised"] / n_rows)
    log.note(
        f"{stats['rows']} conversations, {n_cut} of them cut at SEQ_LEN or just as long, "
        f"{stats['tokens']} tokens, supervised {stats['supervised'] / stats['tokens']:.3f}; "
        f"{n_rows} rows of {settings.SEQ_LEN} an epoch, about {anchors_per_row:.0f} anchors a row; "
        f"steps {schedule.start} to {schedule.end} of {data.horizon}; "
        f"ROWS_PER_STEP = {settings.ROWS_PER_STEP} over {n_drafters} drafters "
        f"({settings.ROWS_PER_STEP / n_drafters:.3g} each) on each of {machines.size} machines; "
        f"targets on {settings.TARGET_DEVICES}, drafters on {settings.DRAFTER_DEVICES}")
    print(f"{stats['rows']:,} conversations of {stats['tokens']:,} tokens: {n_rows:,} rows of "
          f"{settings.SEQ_LEN} an epoch")
    print(f"steps {schedule.start} to {schedule.end}, {settings.ROWS_PER_STEP} rows each; "
          f"{n_trainable / 1e6:,.1f} M weights to train")
    print(f"targets on {', '.join(settings.TARGET_DEVICES)}; "
          f"drafters on {', '.join(settings.DRAFTER_DEVICES)}")
    print(f"settings, versions and every figure: {out / 'train.log'}", flush=True)
