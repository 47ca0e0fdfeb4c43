"""The real main() on tiny targets: the same numbers for any number of threads, exact resume, it learns."""
import functools
import json
import math
import random
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

import common
import model_drafter as md
import train_dflash as trainer
from common import (
    EOS,
    FIELDS,
    FIRST_WORD,
    MASK,
    assert_same,
    data_file,
    delay_calls,
    distance,
    eval_lines,
    log_lines,
    losses,
    metrics,
    plus_one_target,
    published,
    put_nan,
    random_target,
    scratch,
    start,
    threads,
    train,
    train_ok,
    untimed,
    weights,
)
from dflash_trainer import (
    checkpoints,
    decoding,
    devices,
    features,
    run_log,
    settings,
)
from dflash_trainer import rows as rows_module
from flex_utils import attend_dense

EVALUATED = dict(ROWS_PER_STEP=3, STEPS=6, EVAL_EVERY=2, SAVE_EVERY=2, KEEP=9)


@pytest.fixture(scope="module")
def one_and_one():
    """The run that others are compared with: one target thread, one drafter thread."""
    return train_ok(scratch() / "one_and_one", **EVALUATED)


# ------------------------------------------------------------------------------- threads change nothing


@pytest.mark.parametrize("targets, drafters", [(5, 3), (2, 2), (2, 1)])
def test_any_number_of_threads_gives_the_same_run(one_and_one, tmp_path, targets, drafters):
    out = train_ok(tmp_path / "o", **EVALUATED, **threads(targets, drafters))
    assert np.allclose(losses(out), losses(one_and_one), rtol=0, atol=2e-3) and len(losses(out)) == 6
    assert distance(out / "latest", one_and_one / "latest") < 1e-3
    for ours, theirs in zip(eval_lines(out), eval_lines(one_and_one), strict=True):
        assert ours["step"] == theirs["step"]
        assert ours["eval_loss"] == pytest.approx(theirs["eval_loss"], abs=2e-3)
        assert ours["tau"] == pytest.approx(theirs["tau"], abs=0.05)  # one argmax may turn on rounding


def test_a_new_target_shape_at_step_300(tmp_path, monkeypatch):
    """The one long conversation comes late: its shape runs alone, beside threads that are long warm."""
    lengths, seen = [34] * 639 + [60], []  # one a row
    seed = next(s for s in range(99) if 600 < rows_module.pack(lengths, s, 0, 64).index([639]) < 630)
    data = common.write_lines(tmp_path / "data.jsonl", (
        {"input_ids": [FIRST_WORD + j % 40 for j in range(n)], "loss_mask": [0] * 4 + [1] * (n - 4)}
        for n in lengths))

    class NotingBatches(features.TargetBatches):
        def split(self, *args):
            plan = super().split(*args)
            seen.append(plan[0][1])
            return plan
    monkeypatch.setattr(trainer, "choose_target_batches", lambda *args: NotingBatches([(1, 40), (1, 64)], 1))
    train_ok(tmp_path / "o", DATA=data, SEED=seed, NUM_ANCHORS=4, STEPS=320, LOG_EVERY=80, **threads(2, 2))
    assert seen.count(64) == 1 and seen.index(64) > 590 and seen.count(40) == 639


def test_the_run_did_move_the_weights(one_and_one):
    """Else equal weights would say nothing."""
    assert distance(one_and_one / "step_00000006", one_and_one / "step_00000002") > 0.02


def test_the_same_seed_twice_gives_the_same_bits(tmp_path):
    a, b = (train_ok(tmp_path / name, **EVALUATED, **threads(2, 2)) for name in "ab")
    assert_same(a / "latest", b / "latest")
    assert untimed(a) == untimed(b)


def test_another_seed_gives_another_run(one_and_one, tmp_path):
    out = train_ok(tmp_path / "o", **EVALUATED, SEED=1)
    assert distance(out / "latest", one_and_one / "latest") > 0.1


def test_replicas_hold_the_same_bits_after_every_step(tmp_path, monkeypatch):
    seen, update = {}, trainer.Optimizer.update

    def recorded(optimizer, *args):
        update(optimizer, *args)
        name = threading.current_thread().name
        seen.setdefault(name, []).append([m.detach().clone() for m in optimizer.masters.values()])
    common.replace_function(monkeypatch, trainer.Optimizer.update, recorded)
    train_ok(tmp_path / "o", **EVALUATED, **threads(2, 3))
    names = [f"drafter-{d}" for d in range(3)]
    assert sorted(seen) == names and all(len(steps) == 6 for steps in seen.values())
    for other in names[1:]:
        assert all(torch.equal(a, b) for s, t in zip(seen[names[0]], seen[other]) for a, b in zip(s, t))


@pytest.mark.parametrize("seed", [1, 2])
def test_random_delays_in_every_thread_change_nothing(tmp_path, monkeypatch, seed):
    base = train_ok(tmp_path / "base", **EVALUATED, **threads(3, 2), QUEUE_DEPTH=1)
    for function in (trainer.micro_step, trainer.target_features, trainer.evaluate_row, trainer.send_batch,
                     trainer.sum_gradients, trainer.Optimizer.update, checkpoints.write_checkpoint):
        delay_calls(monkeypatch, function, seed)
    delay_calls(monkeypatch, trainer.Queues.put, seed, before=False)
    out = train_ok(tmp_path / "o", **EVALUATED, **threads(3, 2), QUEUE_DEPTH=1 + seed)
    assert_same(out / "latest", base / "latest")
    assert untimed(out) == untimed(base)


def _slow_after_put():
    inner = trainer.Queues.put

    def put(queues, job, *args):
        inner(queues, job, *args)
        time.sleep(0.4 * (job.target == 1))
    trainer.Queues.put = put


def test_a_target_that_is_late_for_an_evaluation_keeps_the_order(tmp_path):
    """Target 0 has the only held-out row; target 1 hears of that evaluation when it is over."""
    settings = dict(EVALUATED, ROWS_PER_STEP=4, EVAL_DATA=data_file("eval", 1, seed=1))
    base = train_ok(tmp_path / "base", **settings)
    child = start(tmp_path / "o", _slow_after_put, **settings, **threads(2, 1))
    assert child.code() == 0, child.text()[-2000:]
    assert_same(tmp_path / "o" / "latest", base / "latest")


# ---------------------------------------------------------------------------------------------- resume


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_stop_and_resume_gives_the_bits_of_one_go(tmp_path, one_and_one, stop):
    out = train_ok(tmp_path / "o", **EVALUATED, STOP_AT=stop)
    assert [m["step"] for m in log_lines(out)] == list(range(1, stop + 1))
    train_ok(out, **EVALUATED)
    assert_same(out / "latest", one_and_one / "latest")
    assert [m["step"] for m in log_lines(out)] == [1, 2, 3, 4, 5, 6]
    assert [[m[k] for k in ("loss", "accept_len", "lr", "grad_norm", "skipped")] for m in log_lines(out)] == \
        [[m[k] for k in ("loss", "accept_len", "lr", "grad_norm", "skipped")] for m in log_lines(one_and_one)]
    extra = {stop} if stop % 2 else set()  # the last step of a run is evaluated
    assert sorted(m["step"] for m in eval_lines(out)) == sorted({0, 2, 4, 6} | extra)


@pytest.mark.parametrize("targets, drafters", [(2, 2), (1, 3)])
def test_resume_with_another_number_of_threads(tmp_path, one_and_one, targets, drafters):
    out = train_ok(tmp_path / "o", **EVALUATED, STOP_AT=3)
    train_ok(out, **EVALUATED, **threads(targets, drafters))
    assert distance(out / "latest", one_and_one / "latest") < 1e-3
    assert np.allclose(losses(out), losses(one_and_one), rtol=0, atol=2e-3)


def test_resume_with_other_log_and_save_settings(tmp_path, one_and_one):
    out = train_ok(tmp_path / "o", **EVALUATED, STOP_AT=3)
    train_ok(out, **dict(EVALUATED, LOG_EVERY=2, SAVE_EVERY=5, EVAL_EVERY=3, KEEP=1))
    assert_same(out / "latest", one_and_one / "latest")
    assert [m["step"] for m in log_lines(out)] == [1, 2, 3, 4, 6]


def test_resume_of_a_finished_run_trains_no_step(tmp_path, one_and_one):
    out = train_ok(tmp_path / "o", **EVALUATED)
    before = untimed(out)
    train_ok(out, **EVALUATED)
    assert untimed(out) == before
    assert_same(out / "latest", one_and_one / "latest")


def test_resume_from_a_named_older_checkpoint_continues_there(tmp_path, one_and_one):
    """What was trained after it is trained again; a later `auto` continues what was trained last."""
    out = train_ok(tmp_path / "o", **EVALUATED)
    train_ok(out, **EVALUATED, RESUME=out / "step_00000002", STOP_AT=3)
    assert (out / "latest").resolve().name == "step_00000003"
    assert max(m["step"] for m in metrics(out)) == 3
    train_ok(out, **EVALUATED)
    assert [m["step"] for m in log_lines(out)] == [1, 2, 3, 4, 5, 6]
    assert_same(out / "latest", one_and_one / "latest")


# ------------------------------------------------------------------------------------------ what is logged


def test_log_fields_and_eval_fields(one_and_one):
    for line in log_lines(one_and_one):
        assert list(line) == FIELDS
        assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in line.values())
    for line in eval_lines(one_and_one):
        assert list(line)[:4] == ["step", "eval_loss", "tau", "acc_k"] and len(line["acc_k"]) == 3
    logged = [x for x in (one_and_one / "train.log").read_text().splitlines() if x.startswith("step 1 |")]
    assert [part.split()[0] for part in logged[0].split("|")] == FIELDS


def test_run_json_holds_versions_and_constants(one_and_one):
    facts = json.loads((one_and_one / "run.json").read_text())
    assert (
        facts["torch"] == torch.__version__ and facts["constants"].keys() == settings.declared(trainer).keys()
    )
    assert facts["constants"]["ROWS_PER_STEP"] == 3


def test_schedule_in_the_log(tmp_path):
    out = train_ok(tmp_path / "o", STEPS=50, STOP_AT=10, LR=0.001)
    warm = [0.0005, 0.001]  # 4 % of 50 steps
    cosine = [0.0005 * (1 + math.cos(math.pi * i / 48)) for i in range(8)]
    assert [m["lr"] for m in log_lines(out)] == pytest.approx(warm + cosine, rel=1e-9)


def test_first_loss_of_a_random_target_is_ln_v(one_and_one):
    assert losses(one_and_one)[0] == pytest.approx(math.log(common.VOCAB), abs=0.05)


def test_the_split_that_balances():
    """12 rows keep 5 targets busy for 1 s and 3 drafters for 0.84 s: 5 x 1 / 12 and 3 x 0.84 / 12 s a row."""
    said = []
    times = run_log.WindowTimes(wall=1.0, evaluation=0, drafters_waited=0.16, first_drafter_waited=0.16,
                                targets_waited=0, reduce=0)
    for targets, drafters in ((range(5), range(5, 8)), ((0,), (0,)), ((0, 0), (1,))):
        given = types.SimpleNamespace(ROWS_PER_STEP=12, TARGET_DEVICES=[f"cuda:{i}" for i in targets],
                                      DRAFTER_DEVICES=[f"cuda:{i}" for i in drafters])
        log = types.SimpleNamespace(settings=given, write=said.append)
        run_log.RunLog.advise_split(log, times, n_steps=1)
    assert said == [
        "one row costs a target 417 ms and a drafter 210 ms; balanced: 5 targets + 3 drafters (now 5 + 3)"
    ]
    # and nothing where a GPU does both


def test_small_data_may_pass_many_times_within_one_log_window(tmp_path):
    out = train_ok(tmp_path / "o", DATA=data_file("few", 5), STEPS=20, LOG_EVERY=20)
    assert [m["step"] for m in log_lines(out)] == [20]


def test_a_log_line_is_the_mean_of_its_steps(tmp_path, one_and_one):
    out = train_ok(tmp_path / "o", **dict(EVALUATED, LOG_EVERY=3))
    every = losses(one_and_one)
    assert losses(out) == pytest.approx([np.mean(every[:3]), np.mean(every[3:])], rel=1e-9)


# ---------------------------------------------------------------------------------------- what is learnt


@pytest.fixture(scope="module")
def learnt():
    """The toy target's next token is t + 1; 120 steps of 256 tokens."""
    rows = data_file("long", 60, 250, 256, cycle=50)
    held_out = data_file("long_eval", 2, 250, 256, cycle=50, seed=5)
    return train_ok(scratch() / "learnt", TARGET=plus_one_target(), DATA=rows, EVAL_DATA=held_out,
                    SEQ_LEN=256, NUM_ANCHORS=32, STEPS=200, LR=0.004, EVAL_EVERY=200, LOG_EVERY=20)


def test_the_next_token_toy_is_learnt(learnt):
    """Acceptance by the trainer's own labels reaches the block size."""
    assert eval_lines(learnt)[0]["tau"] < 1.5
    assert log_lines(learnt)[-1]["accept_len"] > 0.95 * 4
    assert eval_lines(learnt)[-1]["tau"] > 0.95 * 4 and min(eval_lines(learnt)[-1]["acc_k"]) > 0.95
    assert losses(learnt)[-1] < 0.2 < 3 < losses(learnt)[0]


def test_the_live_target_accepts_what_was_learnt(learnt):
    """Slot k proposes token a+k: had it learnt another label, the target would take one token a pass."""
    model = AutoModelForCausalLM.from_pretrained(plus_one_target(), dtype=torch.float32).eval()
    config, state = checkpoints.load_drafter(learnt / "latest")
    drafter = md.Drafter(config, attend_dense)
    drafter.load_state_dict(state)
    prompt = torch.arange(FIRST_WORD, FIRST_WORD + 8)[None]
    answer, produced = decoding.speculative_generate(
        drafter,
        model.get_input_embeddings(),
        md.Head(model.lm_head),
        model,
        model.model.layers,
        prompt,
        33,
        {common.VOCAB},
    )
    assert answer.tolist() == list(range(FIRST_WORD + 8, FIRST_WORD + 41))
    assert sum(produced) / len(produced) > 0.95 * 4


def test_every_norm_weight_has_moved(learnt):
    """In the bf16 file too: pure bf16 training leaves norms at exactly 1.0."""
    norms = {n: t for n, t in published(learnt / "latest").items() if t.dim() == 1}
    assert len(norms) == 2 * 4 + 2
    for name, t in norms.items():
        assert t.dtype == torch.bfloat16 and (t != 1).float().mean() > 0.8, f"{name}: {t}"


def test_gamma_follows_the_block_size(tmp_path):
    settings = dict(STEPS=2, SEQ_LEN=64, WARMUP=0.0, LOSS="decay")
    for k, gamma, other in ((8, 4.0, 7.0), (16, 7.0, 8.0), (6, 3.0, 7.0)):
        alone, same, not_same = (train_ok(tmp_path / f"{k}_{g}", **settings, BLOCK_SIZE=k, GAMMA=g)
                                 for g in (None, gamma, other))
        assert_same(alone / "latest", same / "latest")
        assert abs(losses(alone)[1] - losses(not_same)[1]) > 1e-6
        assert distance(alone / "latest", not_same / "latest") > 1e-6


def test_init_from_starts_where_the_other_ended(tmp_path, one_and_one):
    source = one_and_one / "latest"
    out = train_ok(tmp_path / "o", **dict(EVALUATED, STEPS=1, LR=1e-12), INIT_FROM=source)
    ours, theirs = published(out / "latest"), published(source)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)
    began, ended, fresh = eval_lines(out)[0], eval_lines(one_and_one)[-1], eval_lines(one_and_one)[0]
    assert began["eval_loss"] == pytest.approx(ended["eval_loss"], abs=0.01)  # bf16 weights against fp32
    assert abs(began["eval_loss"] - fresh["eval_loss"]) > 0.05


# ------------------------------------------------------------------------------------------ bad rows


def anchorless(monkeypatch, *rows):
    """These rows of the stream have no usable anchor."""
    inner = trainer.RowStream.row
    monkeypatch.setattr(trainer.RowStream, "row", lambda stream, i: (
        (lambda row, anchors: (row, anchors[:0] if i in rows else anchors))(*inner(stream, i))))


@pytest.mark.parametrize("targets, drafters", [(1, 1), (2, 2)])
def test_a_row_without_anchors_leaves_the_loss_to_the_others(tmp_path, monkeypatch, targets, drafters):
    alone = train_ok(tmp_path / "alone", STEPS=9, STOP_AT=1, ROWS_PER_STEP=1)
    anchorless(monkeypatch, 1)
    out = train_ok(tmp_path / "o", STEPS=9, STOP_AT=2, ROWS_PER_STEP=2, SAVE_EVERY=1, KEEP=9,
                   **threads(targets, drafters))
    assert losses(out)[0] == pytest.approx(losses(alone)[0], abs=1e-9)
    assert distance(out / "step_00000001", alone / "latest") < 1e-6
    assert all(math.isfinite(x) for x in losses(out)) and log_lines(out)[-1]["skipped"] == 0


def test_a_step_without_any_anchor_is_skipped(tmp_path, monkeypatch):
    """sum(w) = 0: no update, counted; the schedule goes on."""
    anchorless(monkeypatch, 2, 3)
    out = train_ok(tmp_path / "o", STEPS=4, SAVE_EVERY=1, KEEP=9, **threads(1, 2))
    assert [m["skipped"] for m in log_lines(out)] == [0, 1, 1, 1]
    ours, before = weights(out / "step_00000002"), weights(out / "step_00000001")
    assert all(torch.equal(ours[n], before[n]) for n in ours)
    assert distance(out / "step_00000003", out / "step_00000002") > 1e-6
    cosine = [0.003 * 0.5 * (1 + math.cos(math.pi * i / 3)) for i in range(3)]
    assert [m["lr"] for m in log_lines(out)] == pytest.approx([0.003, *cosine], rel=1e-9)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("targets, drafters", [(1, 1), (2, 2)])
def test_nan_in_a_row_skips_that_step_on_every_drafter(tmp_path, monkeypatch, targets, drafters, value):
    put_nan(monkeypatch, [5], value)
    out = train_ok(tmp_path / "o", STEPS=5, SAVE_EVERY=1, KEEP=9, **threads(targets, drafters))
    assert [m["skipped"] for m in log_lines(out)] == [0, 0, 1, 1, 1]
    bad = [json.loads(x) for x in (out / "bad_steps.jsonl").read_text().splitlines()]
    assert [(b["step"], b["rows"]) for b in bad] == [(3, [5])]
    before, after = (common.tensors(out / f"step_0000000{s}") for s in (2, 3))
    assert all(torch.equal(before[n], after[n]) for n in before)  # masters, moments, Adam's step
    assert distance(out / "step_00000004", out / "step_00000003") > 1e-6
    assert all(t.isfinite().all() for t in weights(out / "latest").values())


def test_nan_rows_do_not_break_resume(tmp_path, monkeypatch):
    put_nan(monkeypatch, [5])
    whole = train_ok(tmp_path / "whole", STEPS=6)
    out = train_ok(tmp_path / "o", STEPS=6, STOP_AT=3)
    train_ok(out, STEPS=6)
    assert_same(out / "latest", whole / "latest")
    for run in (out, whole):
        assert [m["skipped"] for m in log_lines(run)] == [0, 0, 1, 1, 1, 1]
    assert len((out / "bad_steps.jsonl").read_text().splitlines()) == 1


def test_a_bad_step_that_is_trained_again_is_listed_once(tmp_path, monkeypatch):
    put_nan(monkeypatch, [5])
    out = train_ok(tmp_path / "o", STEPS=6, SAVE_EVERY=2, STOP_AT=4)
    train_ok(out, STEPS=6, RESUME=out / "step_00000002")
    bad = [json.loads(x) for x in (out / "bad_steps.jsonl").read_text().splitlines()]
    assert [b["step"] for b in bad] == [3] and log_lines(out)[-1]["skipped"] == 1


@pytest.mark.parametrize("log_every", [1, 4])
def test_k_bad_steps_in_a_row_end_the_run(tmp_path, monkeypatch, capsys, log_every):
    put_nan(monkeypatch, range(4, 1000))
    assert train(tmp_path / "o", STEPS=40, K_BAD=3, LOG_EVERY=log_every, **threads(2, 2)) not in (0, 2)
    text = "".join(capsys.readouterr())
    names = published_names()
    last = next(x for x in text.splitlines() if "ERROR" in x)
    assert "K_BAD = 3" in last and any(n in last for n in names), last
    assert "Traceback" not in text
    steps = [json.loads(x)["step"] for x in (tmp_path / "o" / "bad_steps.jsonl").read_text().splitlines()]
    assert steps == list(range(3, 3 + len(steps))) and 3 <= len(steps) <= 2 + log_every


def published_names():
    parts = ["self_attn.q_proj", "self_attn.k_norm", "mlp.down_proj", "input_layernorm",
             "post_attention_layernorm"]
    names = [f"layers.{i}.{p}.weight" for i in range(2) for p in parts]
    return ["fc.weight", "hidden_norm.weight", "norm.weight", *names]


# ---------------------------------------------------------------------------------- agreement with the client


@functools.cache
def own_answers(wanted, longest):
    """A target, and prompts of random words whose greedy answer ends with the stop token, not at once."""
    target, rng = random_target(spread=0.4, seed=2), random.Random(3)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    prompts = [[rng.randrange(FIRST_WORD, common.VOCAB - 1) for _ in range(5)] for _ in range(400)]
    ids = torch.tensor(prompts)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=longest,
                         eos_token_id=EOS, pad_token_id=0)[:, 5:].tolist()
    pairs = [(p, a[:a.index(EOS) + 1]) for p, a in zip(prompts, out) if EOS in a[5:] and EOS not in a[:5]]
    assert len(pairs) >= wanted
    return target, model, pairs[:wanted]


def client_run(checkpoint, model, prompts, longest, monkeypatch):
    """z-lab's own client on our checkpoint -> answers, tokens produced by every pass."""
    client = pytest.importorskip("dflash.model")
    monkeypatch.setattr(client, "_cuda_time", time.perf_counter)
    drafter = client.DFlashDraftModel.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers, passes = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        got = client.dflash_generate(drafter, model, ids, longest, [EOS], return_stats=True)
        answers.append(got.output_ids[0, len(prompt):].tolist())
        passes += got.acceptance_lengths
    return answers, passes


@pytest.mark.parametrize("kinds", [["full_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_the_client_counts_what_the_trainer_counts(tmp_path, monkeypatch, capsys, kinds):
    longest, k = 40, 6
    target, model, pairs = own_answers(10, longest)
    prompts = [p for p, _ in pairs]

    def lines(answers):
        return [{"input_ids": p + a, "loss_mask": [0] * len(p) + [1] * len(a)}
                for p, a in zip(prompts, answers)]
    data = common.write_lines(tmp_path / "own.jsonl", lines([a for _, a in pairs]))
    settings = dict(TARGET=target, BLOCK_SIZE=k, MASK_TOKEN_ID=MASK, LAYER_TYPES=kinds, SLIDING_WINDOW=8)
    out = train_ok(tmp_path / "o", DATA=data, EVAL_DATA=data, STEPS=65, LR=0.01, LOG_EVERY=65, NUM_ANCHORS=32,
                   SEQ_LEN=128, EVAL_EVERY=65, **settings)
    assert 2 < eval_lines(out)[-1]["tau"] < 5  # accepts some and rejects some

    answers, passes = client_run(out / "latest", model, prompts, longest + k, monkeypatch)
    assert answers == [a for _, a in pairs]
    decoded = common.write_lines(tmp_path / "decoded.jsonl", lines(answers))
    capsys.readouterr()
    assert common.run_main("eval", f"CKPT={out / 'latest'}", f"TARGET={target}", f"EVAL_DATA={decoded}",
                       "TARGET_DEVICES=cpu", "SEQ_LEN=128", "NUM_ANCHORS=32") == 0
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert sum(passes) == sum(len(a) - 1 for a in answers)
    assert measured["tau"] == pytest.approx(sum(passes) / len(passes), abs=1e-12) and measured["tau"] > 2


def test_answers_of_others_are_warned_about(capsys):
    """The target says t + 1: its own answers pass in silence, others with the share that it would say."""
    others = common.write_lines(
        common.scratch() / "others.jsonl",
        [
            {"input_ids": [8 + (7 * i + 3 * j) % 50 for j in range(20)], "loss_mask": [0] * 4 + [1] * 16}
            for i in range(12)
        ],
    )
    for data, warned in ((common.data_file(), False), (others, True)):
        out = common.scratch() / f"others_{warned}"
        assert common.train(out, TARGET=common.plus_one_target(), DATA=data, STEPS=1) == 0
        printed = capsys.readouterr().out
        assert ("WARNING: only 0 % of the labels" in printed) == warned


def test_adamw_is_torchs():
    """Five updates against torch.optim.AdamW in fp64, a skipped one between; weights follow the masters."""
    torch.manual_seed(0)
    shapes = (7, 5), (6,)
    masters = [torch.randn(s) for s in shapes]
    truth = [m.double().requires_grad_() for m in masters]
    theirs = torch.optim.AdamW(truth, lr=0.02, betas=(0.9, 0.999), weight_decay=0.0)
    weights, (first, second) = (
        [m.bfloat16() for m in masters],
        [[torch.zeros(s) for s in shapes] for _ in "mv"],
    )
    count, scale = torch.zeros(()), torch.tensor(3.0)
    for step in range(6):
        grads, skip = [torch.randn(s) for s in shapes], torch.tensor(step == 2)
        if skip:
            grads[0][1] = torch.nan
        else:
            for p, g in zip(truth, grads):
                p.grad = g.double() / 3
            theirs.step()
        count += ~skip
        trainer.adamw(masters, weights, grads, first, second, torch.tensor(0.02), count, scale, skip)
    for p, w, want in zip(masters, weights, truth):
        assert torch.allclose(p.double(), want, atol=1e-6) and torch.equal(w, p.bfloat16())


@pytest.mark.parametrize("same", [True, False])
def test_held_out_conversations_that_are_trained_on_are_named(tmp_path, capfd, same):
    data, other = data_file("overlap", 30, 12, 40), data_file("apart", 8, 41, 50, seed=5)
    lines = Path(other).read_text().splitlines() + Path(data).read_text().splitlines()[:3] * 2 * same
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text("\n".join(lines) + "\n")
    common.train_ok(tmp_path / "out", DATA=data, EVAL_DATA=held_out, STEPS=1, EVAL_EVERY=1)
    said = capfd.readouterr().out
    assert (
        ("WARNING: 3 of 11 different conversations of EVAL_DATA" in said)
        == same
        == ("tau will be too optimistic" in said)
    )


def test_a_server_of_another_user_can_read_the_checkpoint(tmp_path):
    out = common.train_ok(tmp_path / "out", DATA=data_file("modes", 20, 12, 40), STEPS=1)
    modes = {p.name: p.stat().st_mode for p in (out / "latest").iterdir()}
    assert len(set(modes.values())) == 1, modes


def test_a_server_that_loads_every_safetensors_finds_the_drafter_alone(tmp_path):
    """As vLLM 0.32 and SGLang 0.5.23 do: all *.safetensors of the directory but what its index lacks."""
    out = common.train_ok(tmp_path / "out", DATA=data_file("index", 20, 12, 40), STEPS=1)
    latest = out / "latest"
    index = json.loads((latest / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = {}
    for path in latest.glob("*.safetensors"):
        if path.name in index.values():
            loaded |= common.load_file(path)
    assert set(loaded) == set(index) == set(common.weights(latest))


# -------------------------------------------------------------------------------------- small definitions


@pytest.mark.parametrize("loss, want", [("decay", 3 + 1), ("dpace", 4 + 2)])
def test_a_step_is_divided_by_its_weights_or_for_dpace_by_its_blocks(loss, want, monkeypatch):
    """Design 3.6 and 3.10, over all rows of the step; columns: sum of w*ce, of w, matches, anchors, bad."""
    monkeypatch.setattr(trainer, "LOSS", loss)
    assert trainer.loss_denominator(torch.tensor([[8.0, 3, 2, 4, 0], [4.0, 1, 0, 2, 0]])).item() == want


@pytest.mark.parametrize("loss", ["decay", "dpace"])
def test_the_first_loss_of_a_random_target_is_near_ln_vocabulary(loss, tmp_path):
    """A weighted mean of cross-entropies, whichever the weights are and whatever the step divides by."""
    out = train_ok(tmp_path / "o", LOSS=loss, STEPS=2, EVAL_EVERY=2, **threads(1, 2))
    assert losses(out)[0] == pytest.approx(math.log(common.VOCAB), abs=0.15)
    assert eval_lines(out)[0]["eval_loss"] == pytest.approx(math.log(common.VOCAB), abs=0.15)


def test_a_stopwatch_counts_a_span_once_its_device_is_through():
    """Two of three spans are over on the device: the third is counted by a later call, none twice."""
    class Event:
        def __init__(self, at):
            self.at, self.done = at, True

        def query(self):
            return self.done

        def elapsed_time(self, other):
            return other.at - self.at

    watch = devices.Stopwatch(torch.device("cuda", 0))
    events = [Event(ms) for ms in (0, 10, 50, 75, 100, 104)]
    watch.now = iter(events).__next__
    for _ in range(3):
        with watch:
            pass
    events[-1].done = False
    assert watch.read_and_reset() == pytest.approx(0.035) and watch.read_and_reset() == 0
    events[-1].done = True
    assert watch.read_and_reset() == pytest.approx(0.004) and watch.read_and_reset() == 0


def test_tau_is_told_over_passes_over_answers_and_by_source():
    """By hand, K 4: tokens 2-5 are an answer of source a, tokens 7-8 one of b. The walk of the first accepts
    one draft at token 2, then one at token 4, where the answer's end leaves 1 token: passes of 2 and 1. The
    second needs one pass."""
    run_length = np.array([0, 0, 3, 2, 1, 0, 0, 1, 0])
    row = types.SimpleNamespace(
        run_length=run_length, conversation=np.array([0] * 6 + [1] * 3), sources=["a", "b"]
    )
    correct = torch.tensor([[0, 1, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0]])
    given = {"correct": correct, "loss": torch.zeros(()), "weight": torch.ones(())}
    sums = trainer.EvalSums(common.tiny_config())
    sums.add_row(
        row, np.array([2, 3, 4, 7]), [md.RowResult(**{**dict.fromkeys(md.RowResult._fields), **given})]
    )
    total = trainer.EvalSums(common.tiny_config())
    for part in (sums, trainer.EvalSums(common.tiny_config())):
        total.add(part)
    told = total.metrics()
    assert told["tau"] == 4 / 3
    assert told["tau_answers"] == (1.5 + 1) / 2
    assert told["tau_by_source"] == {"a": 1.5, "b": 1.0}
