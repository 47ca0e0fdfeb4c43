"""Training, evaluation, resume, warm start and decoding with the heads and with losses on the target's
distribution, through the trainer's own main()."""
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train_dflash as trainer
from common import (
    assert_same,
    data_file,
    distance,
    losses,
    plus_one_target,
    random_target,
    run_main,
    threads,
    train,
    train_ok,
    weights,
)
from dflash_trainer import start
from dflash_trainer.errors import UserError
from dflash_trainer.features import TappedForward

SMALL = dict(SELECTOR_TOP_K=8, SELECTOR_RANK=16)
HEADS = {
    "dflash2": dict(HEAD="dflash2", **SMALL),
    "dspark": dict(HEAD="dspark", MARKOV_RANK=16),
    "soft": dict(LOSS_TERMS="{'ce': 0.1, 'tv': 1.8}"),
    "dflash2 soft": dict(HEAD="dflash2", LOSS_TERMS="{'ce': 0.1, 'lk': 1}",
                         SELECTOR_TERMS="{'ce': 0.1, 'tv': 0.9}", **SMALL),
}


def metrics(out):
    return [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]


def evaluations(out):
    return [line for line in metrics(out) if "tau" in line]


@pytest.mark.parametrize("name", HEADS)
def test_three_drafters_learn_what_one_does(name, tmp_path):
    settings = dict(HEADS[name], STEPS=6, EVAL_EVERY=6, ROWS_PER_STEP=3)
    one = train_ok(tmp_path / "one", **settings)
    three = train_ok(tmp_path / "three", **settings, **threads(2, 3))
    assert losses(three) == pytest.approx(losses(one), abs=2e-3)
    assert distance(one / "latest", three / "latest") < 1e-3


@pytest.mark.parametrize("precision", ["fp8_head", "fp8", "fp8_wgrad"])
@pytest.mark.parametrize("name", HEADS)
def test_fp8_trains_every_head_as_full_precision_does(name, precision, tmp_path):
    """Near enough to be the same loss, and too far to be the same arithmetic."""
    settings = dict(HEADS[name], STEPS=6, EVAL_EVERY=6, LR=0.003)
    full = train_ok(tmp_path / "full", **settings)
    fp8 = train_ok(tmp_path / "fp8", **settings, DRAFTER_PRECISION=precision, TARGET_PRECISION="fp8")
    assert losses(fp8) == pytest.approx(losses(full), rel=0.02)
    assert losses(fp8) != losses(full)
    moved = distance(full / "latest", train_ok(tmp_path / "fresh", **settings, STOP_AT=1) / "latest")
    assert distance(full / "latest", fp8 / "latest") < 0.5 * moved


@pytest.mark.parametrize("name", HEADS)
def test_stopped_and_resumed_is_bit_for_bit_undisturbed(name, tmp_path):
    settings = dict(HEADS[name], STEPS=6, EVAL_EVERY=3)
    straight = train_ok(tmp_path / "straight", **settings)
    train_ok(tmp_path / "halves", **settings, STOP_AT=3)
    halves = train_ok(tmp_path / "halves", **settings)
    assert_same(straight / "latest", halves / "latest")
    fresh = train_ok(tmp_path / "fresh", **settings, STOP_AT=1)
    assert distance(straight / "latest", fresh / "latest") > 1e-3  # it did move


@pytest.mark.parametrize("name", HEADS)
def test_evaluation_reports_the_heads_own_walk(name, tmp_path):
    settings = dict(HEADS[name], TARGET=plus_one_target(), STEPS=60, EVAL_EVERY=60, LR=0.01, LOG_EVERY=20)
    out = train_ok(tmp_path, **settings)
    first, last = evaluations(out)[0], evaluations(out)[-1]
    assert last["tau"] > max(1.5, first["tau"]) and last["eval_loss"] < first["eval_loss"]
    dspark = name == "dspark"
    assert len(last["acc_k"]) == (4 if dspark else 3)
    assert ("tau_backbone" in last) == (name != "soft")
    assert ("recall" in last and "tau_oracle" in last) == name.startswith("dflash2")
    if "recall" in last:
        assert last["tau_oracle"] >= last["tau"] and 0 < last["recall"] <= 1
    soft = name != "dflash2"
    for key in ("tv", "kl", "expected_len"):
        assert (key in last) == soft
    assert ("conf_mae" in last) == dspark
    if soft:
        assert 0 <= last["tv"] <= 1 <= last["expected_len"] <= 5
        assert all(0 < line["tv"] < 1 for line in metrics(out) if "lr" in line)


def test_eval_takes_the_head_from_the_checkpoint(tmp_path, capfd):
    """And gives the numbers of the run's own last evaluation."""
    for name in ("dflash2", "dspark"):
        out = train_ok(tmp_path / name, **HEADS[name], STEPS=4, EVAL_EVERY=4)
        capfd.readouterr()
        code = run_main("eval", f"CKPT={out}/latest", f"TARGET={random_target()}", "TARGET_DEVICES=cpu",
                        f"EVAL_DATA={data_file('eval', 6, seed=1)}", "SEQ_LEN=64", "NUM_ANCHORS=8")
        found = json.loads(capfd.readouterr().out.splitlines()[-1])
        wanted = evaluations(out)[-1]
        assert code == 0 and set(found) == set(wanted) - {"step"}
        assert found["tau"] == pytest.approx(wanted["tau"], abs=0.02)
        assert found["eval_loss"] == pytest.approx(wanted["eval_loss"], rel=0.02)  # weights in bf16


def test_generate_decodes_without_loss(tmp_path, capfd):
    target = random_target(spread=0.4)
    for name in ("dflash2", "dspark"):
        out = train_ok(tmp_path / name, **HEADS[name], TARGET=target, STEPS=4)
        capfd.readouterr()
        code = run_main("generate", f"CKPT={out}/latest", f"TARGET={target}", "TARGET_DEVICES=cpu",
                        "PROMPT=w9 w10", "MAX_NEW_TOKENS=24")
        assert code == 0 and "equal: True" in capfd.readouterr().out


# ------------------------------------------------------------------------------------------- the hand-off

def test_the_last_hidden_state_travels_only_when_the_loss_needs_it(tmp_path, monkeypatch):
    """Width of what the drafter gets, and layers that the target keeps."""
    widths = []
    original = trainer.Replica.signature

    def noted(replica, batch):
        widths.append(batch.target_hidden.shape[-1])
        return original(replica, batch)

    monkeypatch.setattr(trainer.Replica, "signature", noted)
    markov_alone = dict(HEADS["dspark"], CONFIDENCE=0, LOSS_TERMS="{'ce': 1}")
    for settings, parts in ((dict(), 2), (dict(LOSS_TERMS="{'ce': 1}"), 2), (HEADS["dflash2"], 2),
                            (HEADS["soft"], 3), (HEADS["dspark"], 3), (markov_alone, 2)):
        widths.clear()
        train_ok(tmp_path / str(len(list(tmp_path.iterdir()))), **settings, STEPS=1)
        assert set(widths) == {parts * 32}


def test_the_last_hidden_state_is_the_one_after_the_norm():
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(random_target())
    decoder = model.get_decoder()
    ids = torch.arange(12).view(2, 6) + 8
    forward = TappedForward(decoder, (0, 2), with_last=True)
    with torch.no_grad():
        found = forward(ids)
        states = decoder(ids, output_hidden_states=True).hidden_states
        alone = forward.layers_alone(ids, forward.layer_arguments(ids))  # what a CUDA graph is made of
    wanted = torch.cat([states[1], states[3], states[-1]], -1)
    assert torch.equal(found, wanted) and torch.equal(alone, wanted)
    assert torch.allclose(model.lm_head(found[..., 64:]), model(ids).logits)


def test_a_decoder_without_a_norm_runs_eagerly_and_says_so(capsys):
    class Decoder(torch.nn.Module):
        layers = torch.nn.ModuleList([torch.nn.Identity() for _ in range(3)])

    forward = TappedForward(Decoder(), (0,), with_last=True)
    assert forward.refused and "no final norm" in capsys.readouterr().out


# -------------------------------------------------------------------------------------------- warm start

def test_a_plain_drafter_starts_a_dflash2_one_exactly(tmp_path, capfd):
    plain = train_ok(tmp_path / "plain", TARGET=plus_one_target(), STEPS=40, EVAL_EVERY=40, LR=0.01)
    capfd.readouterr()
    warm = train_ok(tmp_path / "warm", **HEADS["dflash2"], TARGET=plus_one_target(), STEPS=40, STOP_AT=1,
                    EVAL_EVERY=40, INIT_FROM=plain / "latest")
    text = capfd.readouterr().out
    assert "11 tensors of HEAD = 'dflash2' are new" in text  # two layers of 4, the selector's 3
    first = evaluations(warm)[0]
    wanted = evaluations(plain)[-1]
    assert first["tau"] == first["tau_backbone"] == pytest.approx(wanted["tau"], abs=0.05)  # bf16 files
    assert first["tau"] > 1.5


def test_a_plain_drafter_starts_a_dspark_one_whose_slots_move_by_one(tmp_path, capfd):
    plain = train_ok(tmp_path / "plain", STEPS=2, BLOCK_SIZE=5)
    train_ok(tmp_path / "warm", **HEADS["dspark"], STEPS=1, INIT_FROM=plain / "latest", BLOCK_SIZE=4)
    text = capfd.readouterr().out
    assert "4 tensors of HEAD = 'dspark' are new" in text and "learn the shift" in text


def test_of_the_same_head_every_tensor_is_taken(tmp_path, capfd):
    for name in ("dflash2", "dspark"):
        out = train_ok(tmp_path / name, **HEADS[name], STEPS=2)
        capfd.readouterr()
        warm = train_ok(tmp_path / f"{name} warm", **HEADS[name], STEPS=20, STOP_AT=1, LR=1e-12,
                        INIT_FROM=out / "latest")
        assert "are new" not in capfd.readouterr().out
        published = load_file(out / "latest" / "model.safetensors")
        started = weights(warm / "latest")
        assert set(started) == set(published)
        for key, weight in published.items():
            torch.testing.assert_close(started[key], weight.float(), atol=1e-10, rtol=0)


REFUSED = {
    "a richer head": (dict(), "dflash2", "has the head 'dflash2', which HEAD = 'dflash' would drop"),
    "another head": (HEADS["dspark"], "dflash2", "has the head 'dflash2', which HEAD = 'dspark' would drop"),
    "another rank": (dict(HEADS["dflash2"], SELECTOR_RANK=8), "dflash2", "selector_rank: 8 here, 16 there"),
    "another block": (dict(HEADS["dflash2"], BLOCK_SIZE=8), "plain", "block_size: 8 here, 4 there"),
    "a shorter block": (dict(HEADS["dspark"], BLOCK_SIZE=5), "plain", "block_size: 5 here, 4 there"),
}


@pytest.fixture(scope="module")
def starts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("starts")
    return {"plain": train_ok(folder / "plain", STEPS=1),
            "dflash2": train_ok(folder / "dflash2", **HEADS["dflash2"], STEPS=1)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_init_from_cannot_start_is_refused(name, starts, tmp_path, capfd):
    settings, source, text = REFUSED[name]
    code = train(tmp_path / "x", **settings, STEPS=1, INIT_FROM=starts[source] / "latest")
    assert code == 2 and text in capfd.readouterr().err


def test_a_file_that_lacks_a_tensor_is_refused(starts, tmp_path, capfd):
    from safetensors.torch import save_file
    for gone in ("candidate_selector.successor_codebook", "norm.weight"):
        broken = tmp_path / gone
        broken.mkdir()
        source = starts["dflash2"] / "latest"
        (broken / "config.json").write_text((source / "config.json").read_text())
        tensors = load_file(source / "model.safetensors")
        del tensors[gone]
        save_file(tensors, broken / "model.safetensors")
        code = train(tmp_path / f"{gone} out", **HEADS["dflash2"], STEPS=1, INIT_FROM=broken)
        assert code == 2 and f"lacks tensors: {gone}" in capfd.readouterr().err


# -------------------------------------------------------------------------------------------- settings

WRONG = {
    "HEAD=dflash3": "HEAD = 'dflash3': must be one of dflash, dflash2, dspark",
    "CONV_TAPS=3": "CONV_TAPS = 3: is of HEAD=dflash2, but HEAD = 'dflash'",
    "SELECTOR_TERMS={'ce':0.1,'tv':0.9}": "is of HEAD=dflash2",
    "MARKOV_RANK=8": "MARKOV_RANK = 8: is of HEAD=dspark, but HEAD = 'dflash'",
    "CONFIDENCE=0.5": "is of HEAD=dspark",
    "LOSS_TERMS={'tv':1}": "tv has no gradient",
    "LOSS_TERMS={'l1':1}": "a term of LOSS_TERMS = 'l1': must be one of ce, tv, kl, nla, lk",
    "LOSS_TERMS={'ce':-1}": "'ce' must be a number, 0 or above",
    "LOSS_TERMS={'ce':0}": "at least one must be above 0",
    "LOSS_TERMS=[1]": "LOSS_TERMS=[1]: expected",
    "IN_BLOCK=causal": "IN_BLOCK = 'causal': must be one of by_type, bidirectional",
    "HEAD=dflash2 CONV_TAPS=5": "CONV_TAPS = 5: more than BLOCK_SIZE = 4",
    "HEAD=dflash2 CONV_GROUP=5": "CONV_GROUP = 5: doesn't divide the hidden size 32",
    "HEAD=dflash2 SELECTOR_TOP_K=1": "SELECTOR_TOP_K = 1: must be 2 or more",
    "HEAD=dflash2 SELECTOR_TOP_K=65": "SELECTOR_TOP_K = 65: more than the vocabulary of 64",
    "HEAD=dflash2 SELECTOR_TERMS={'ce':0}": "at least one must be above 0",
    "HEAD=dflash2 SELECTOR_TERMS={'kl':1}": "a term of SELECTOR_TERMS = 'kl'",
    "HEAD=dflash2 MARKOV_RANK=8": "is of HEAD=dspark, but HEAD = 'dflash2'",
    "HEAD=dflash2 SELECTOR_TOP_K=8 LAYER_TYPES=sliding_attention,sliding_attention SLIDING_WINDOW=3":
        "SLIDING_WINDOW = 3: IN_BLOCK = 'bidirectional' needs BLOCK_SIZE = 4 or more",
    "HEAD=dspark LAYER_TYPES=sliding_attention,full_attention": "full attention where HEAD = 'dspark'",
    "HEAD=dspark IN_BLOCK=by_type": "has no meaning where HEAD = 'dspark'",
    "HEAD=dspark CONFIDENCE=-1": "0 (no confidence head) or above",
    "HEAD=dspark LOSS_CHUNK=3": "needs whole blocks, BLOCK_SIZE = 4 or more",
}


@pytest.mark.parametrize("words", WRONG)
def test_settings_that_make_no_sense_are_refused_by_name(words, tmp_path, capfd):
    settings = dict(word.split("=", 1) for word in words.split())
    assert train(tmp_path / "x", **settings) == 2
    text = capfd.readouterr().err
    assert text.startswith("error: ") and WRONG[words] in text


SCALED = [dict(input_embedding_scale=5.5), dict(final_logit_softcapping=30.0)]


@pytest.mark.parametrize("changes", SCALED, ids=str)
def test_dspark_for_a_target_that_no_server_scales_is_refused(changes):
    from test_heads import config_of
    with pytest.raises(UserError, match="HEAD = 'dspark'"):
        start.check_target_of_head(config_of("dspark", **changes))
    start.check_target_of_head(config_of("dflash2", **changes))


RESUMED = {
    "LOSS_TERMS": (HEADS["soft"], dict(LOSS_TERMS="{'ce': 0.2, 'tv': 1.8}")),
    "SELECTOR_TERMS": (HEADS["dflash2"], dict(SELECTOR_TERMS="{'ce': 2.0}")),
    "SELECTOR_WARMUP": (HEADS["dflash2"], dict(SELECTOR_WARMUP=0.5)),
    "CONFIDENCE": (HEADS["dspark"], dict(CONFIDENCE=2)),
    "another drafter: head": (HEADS["dspark"], dict(HEAD="dflash", MARKOV_RANK=256)),
    "markov_rank": (HEADS["dspark"], dict(MARKOV_RANK=8)),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_is_not_resumed_with_another_head_or_loss(name, tmp_path, capfd):
    settings, change = RESUMED[name]
    train_ok(tmp_path, **settings, STEPS=2, STOP_AT=1)
    capfd.readouterr()
    assert train(tmp_path, **settings | change, STEPS=2) == 2
    text = capfd.readouterr().err
    assert name in text


def test_a_checkpoint_from_before_the_heads_resumes(tmp_path):
    out = train_ok(tmp_path, STEPS=4, STOP_AT=2)
    info = json.loads((out / "latest" / "trainer.json").read_text())
    for name in ("HEAD", "LOSS_TERMS", *start.SETTINGS_OF_HEAD["dflash2"], *start.SETTINGS_OF_HEAD["dspark"]):
        del info["constants"][name]
    (out / "latest" / "trainer.json").write_text(json.dumps(info))
    train_ok(tmp_path, STEPS=4)


def test_the_selectors_loss_sets_in_after_the_warm_up(monkeypatch):
    monkeypatch.setattr(trainer, "SELECTOR_WARMUP", 0.1)
    monkeypatch.setattr(trainer, "SELECTOR_RAMP", 0.2)
    shares = [trainer.selector_ramp(step, 20) for step in range(8)]
    assert shares == pytest.approx([0, 0, 0.25, 0.5, 0.75, 1, 1, 1])
    monkeypatch.setattr(trainer, "SELECTOR_WARMUP", 0.0005)
    monkeypatch.setattr(trainer, "SELECTOR_RAMP", 0.0005)
    assert [trainer.selector_ramp(step, 10_000) for step in (4, 5, 9, 10)] == pytest.approx([0, 0.2, 1, 1])


def test_dflash2_with_sliding_layers_is_bidirectional_in_the_block_unless_told(tmp_path):
    sliding = dict(LAYER_TYPES="sliding_attention,full_attention", SLIDING_WINDOW=9, STEPS=1)
    found = {}
    for name, settings in (("default", {}), ("by type", dict(IN_BLOCK="by_type"))):
        out = train_ok(tmp_path / name, **HEADS["dflash2"], **sliding, **settings)
        found[name] = json.loads((out / "latest" / "config.json").read_text()).get("is_causal")
    plain = train_ok(tmp_path / "plain", **sliding)
    warm = train_ok(tmp_path / "warm", **HEADS["dflash2"], **sliding, INIT_FROM=plain / "latest")
    assert found == {"default": False, "by type": None}
    assert "is_causal" not in json.loads((warm / "latest" / "config.json").read_text())
