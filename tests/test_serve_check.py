"""tools/serve_check.py against a stand-in server that speaks as vLLM 0.32.0 and SGLang 0.5.23 and 0.5.6 do.

The stand-in decodes with a live target and drafter, whose passes tests/test_decode.py holds against z-lab's
client; the tool walks the ids it got. Field names are those of the servers' own code.
"""
import functools
import json
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import common
from common import EOS, ROOT, VOCAB
from dflash_trainer import checkpoints, settings
from dflash_trainer.decoding import speculative_generate
from dflash_trainer.target import make_head
from flex_utils import attend_dense
from model_drafter import Drafter

sys.path.insert(0, str(ROOT / "tools"))
import serve_check as tool

K, LIMIT, N = 4, 24, 6
VLLM_METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {passes}.0
vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 100.0
# TYPE vllm:spec_decode_num_drafts_created gauge
vllm:spec_decode_num_drafts_created{{engine="0",model_name="m"}} 1.7e+09
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {drafted}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="m",position="0"}} 3.0
vllm:generation_tokens_total{{engine="0",model_name="m"}} {generated}.0
"""
SGLANG_METRICS = """# TYPE sglang:spec_accept_length gauge
sglang:spec_accept_length{{model_name="m",tp_rank="0"}} 3.25
# TYPE sglang:spec_verify_calls_total counter
sglang:spec_verify_calls_total{{model_name="m"}} {passes}.0
sglang:generation_tokens_total{{is_streaming="false",model_name="m"}} {generated}.0
"""


# -------------------------------------------------------------------------------- what the stand-in serves


@functools.cache
def served():
    """A target whose answers vary, a drafter fitted to half of those asked for, so that passes vary too."""
    folder = common.random_target(spread=0.4)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    generator = torch.Generator().manual_seed(5)
    asked = []
    for n_words in (2, 3, 4, 5) * 3:
        words = torch.randint(7, VOCAB - 1, (n_words,), generator=generator).tolist()
        asked.append(" ".join(f"w{i}" for i in words))
    rows = []
    for text in asked[::2]:
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True,
                                            return_dict=True, return_tensors="pt")["input_ids"]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LIMIT)
        mask = [int(i >= ids.shape[1]) for i in range(out.shape[1])]
        rows.append(json.dumps({"input_ids": out[0].tolist(), "loss_mask": mask, "finish_reason": "length"}))
    data = common.scratch() / "serve_train.jsonl"
    data.write_text("\n".join(rows) + "\n")
    out = common.train_ok(common.scratch() / "serve_out", TARGET=folder, DATA=data, EVAL_DATA=data, STEPS=120,
                          LR=0.01, BLOCK_SIZE=K, NUM_ANCHORS=48, LOG_EVERY=50)
    config, weights = checkpoints.load_drafter(out / "latest")
    drafter = Drafter(config, attend_dense)
    drafter.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    held_out = common.scratch() / "serve_eval.jsonl"
    lines = [{"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "w9"}]}
             for text in asked[:N]]
    held_out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return SimpleNamespace(target=str(folder), ckpt=str(out / "latest"), data=str(held_out), model=model,
                           tokenizer=tokenizer, drafter=drafter)


@functools.cache
def decoded(prompt_ids, limit, sampled):
    """-> (answer ids, tokens produced by each pass)."""
    s = served()
    answer, produced = speculative_generate(
        s.drafter, s.model.get_input_embeddings(), make_head(s.model), s.model, s.model.get_decoder().layers,
        torch.tensor([prompt_ids]), limit, {EOS}, 2.0 if sampled else 0.0, torch.Generator().manual_seed(1))
    return answer.tolist(), produced


class Handler(BaseHTTPRequestHandler):
    """server.kind: vllm, vllm-counters, sglang, sglang-counters, sglang-old; server.fault: see the tests."""

    def do_GET(self):
        server = self.server
        if self.path == "/v1/models":
            owner = "sglang" if server.kind.startswith("sglang") else "vllm"
            return self.reply({"data": [{"id": "served-name", "owned_by": owner}]})
        if self.path != "/metrics" or server.fault == "no metrics":
            return self.reply({"detail": "Not Found"}, 404)
        text = VLLM_METRICS if server.kind.startswith("vllm") else SGLANG_METRICS
        if server.fault == "no drafter":
            text = "\n".join(line for line in text.splitlines() if "spec_" not in line) + "\n"
        counts = server.lagging if server.lags > 0 else server.counts
        server.lags -= 1
        return self.reply(text.format(**counts).encode())

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.bodies.append((self.path, body))
        if server.fault == "error":
            return self.reply({"error": {"message": "the context is too long"}}, 400)
        if server.fault == "no json":
            return self.reply(b"<html>a proxy</html>")
        if server.fault == "hangs up":
            self.close_connection = True
            return None
        prompt_ids = self.prompt_ids(body)
        limit = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
        ids, produced = decoded(tuple(prompt_ids), limit, server.fault == "sampled")
        passes, drafted = len(produced), len(produced) * (K - 1)
        if server.fault == "short blocks":  # as with num_speculative_tokens = 1: two tokens a pass at best
            passes = drafted = sum((n + 1) // 2 for n in produced)
        if server.fault == "lower":
            passes = round(1.5 * passes)
        accepted = sum(produced) - passes
        self.count(passes, drafted, accepted, len(ids))
        ended = "stop" if ids[-1] == EOS else "length"
        if server.fault == "aborted":
            ended = "abort"
        reply_of = self.natively if self.path == "/generate" else self.openai
        return self.reply(reply_of(prompt_ids, ids, ended, passes, drafted, accepted))

    def prompt_ids(self, body):
        if "input_ids" in body:
            return body["input_ids"]
        if "prompt" in body:
            return body["prompt"]
        messages = body["messages"]
        if self.server.fault == "other template":
            messages = [{"role": "assistant", "content": "w8"}, *messages]
        return served().tokenizer.apply_chat_template(messages, add_generation_prompt=True,
                                                      return_dict=True)["input_ids"]

    def count(self, passes, drafted, accepted, generated):
        server = self.server
        server.lagging = dict(server.counts)
        server.lags = 2 if server.fault == "lag" else 0
        new = {"passes": passes, "drafted": drafted, "accepted": accepted, "generated": generated}
        if server.fault == "counters stand still":
            new = {"generated": generated}
        if server.fault == "other traffic":
            new["generated"] += 7
        for name, value in new.items():
            server.counts[name] += value

    def openai(self, prompt_ids, ids, ended, passes, drafted, accepted):
        kind = self.server.kind
        choice = {"index": 0, "finish_reason": ended, "token_ids": ids}
        reply = {"choices": [choice], "usage": {"completion_tokens": len(ids)}}
        if self.server.fault == "ids cut":
            choice["token_ids"] = ids[:-1]
        if self.server.fault == "no ids" or kind == "sglang-old":
            choice["token_ids"] = None
        if kind.startswith("vllm"):
            reply["prompt_token_ids"] = prompt_ids
        else:
            choice["prompt_token_ids"] = prompt_ids
        if kind == "vllm":
            reply["metrics"] = {"speculative_decoding": {
                "mean_acceptance_length": 1 + accepted / passes, "num_spec_steps": passes,
                "num_accepted_draft_tokens": accepted, "num_draft_tokens": drafted, "num_spec_tokens": K - 1}}
        if kind == "sglang":
            reply["sglext"] = {"spec_tokens_details": {
                "spec_accept_length": len(ids) / passes, "spec_verify_ct": passes,
                "spec_num_correct_drafts": accepted, "spec_num_proposed_drafts": drafted}}
        return reply

    def natively(self, prompt_ids, ids, ended, passes, drafted, accepted):
        meta = {"finish_reason": {"type": ended}, "completion_tokens": len(ids), "spec_verify_ct": passes,
                "spec_accept_token_num": accepted, "spec_draft_token_num": drafted}
        if self.server.fault == "no drafter":
            meta = {"finish_reason": {"type": ended}, "completion_tokens": len(ids)}
        return {"output_ids": ids, "meta_info": meta}

    def reply(self, value, status=200):
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@contextmanager
def stand_in(kind, fault=""):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.kind, server.fault, server.bodies = kind, fault, []
    server.counts = dict.fromkeys(("passes", "drafted", "accepted", "generated"), 1000)
    server.lagging, server.lags = {}, 0
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


WALKS = {}  # the ids of a call -> what `eval` says of them: its child takes seconds


def walk_once(answers, real=tool.walk):
    key = json.dumps([answer.ids for answer in answers])
    if key not in WALKS:
        WALKS[key] = real(answers)
    return WALKS[key]


@pytest.fixture
def check(monkeypatch, capsys):
    """check(NAME=VALUE, ...) -> (exit code, what it printed, what it said on stderr)."""
    monkeypatch.setattr(tool, "walk", walk_once)
    monkeypatch.setattr(tool, "SETTLE_S", 0.3)

    def call(**changes):
        s = served()
        given = {"CKPT": s.ckpt, "TARGET": s.target, "EVAL_DATA": s.data, "N": N, "MAX_NEW_TOKENS": LIMIT}
        words = [f"{name}={value}" for name, value in {**given, **changes}.items()]
        capsys.readouterr()
        with settings.changed(tool):
            code = settings.run_program(tool, tool.main, words)
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


def refused(result, *words):
    """A user's mistake: exit code 2 and one line that has these words."""
    code, _, err = result
    assert code == 2 and len(err.strip().splitlines()) == 1 and err.startswith("error: "), (code, err)
    for word in words:
        assert word in err, err


def numbers(out, row):
    """The two columns of a row of the table."""
    (line,) = [line for line in out.splitlines() if line.startswith(row)]
    return [float(word) for word in line.removeprefix(row).split()[:2]]


# ---------------------------------------------------------------------------------------------- the two agree


@pytest.mark.parametrize("kind", ["vllm", "vllm-counters", "sglang", "sglang-counters", "sglang-old"])
def test_a_server_that_serves_the_checkpoint_is_equal(kind, check):
    with stand_in(kind) as server:
        code, out, _ = check(URL=server.url)
    assert code == 0 and "verdict: EQUAL" in out and "seen:" not in out and "possible:" not in out, out
    live = [decoded(tuple(ids), LIMIT, False) for ids in prompts_of_file()]
    tokens = [len(ids) - 1 for ids, _ in live]
    passes = [len(produced) for _, produced in live]
    assert sum(tokens) / sum(passes) > 1.3, "too weak a drafter to tell one acceptance from another"
    assert numbers(out, "passes") == [sum(passes), sum(passes)] and f"equal on {N} of {N} answers" in out
    tau = round(sum(tokens) / sum(passes), 4)
    assert numbers(out, "tokens a pass, mean over passes (tau)") == [tau, tau]
    mean = round(sum(n / p for n, p in zip(tokens, passes, strict=True)) / N, 4)
    assert numbers(out, "tokens a pass, mean over answers") == [mean, mean] and mean != tau
    assert "1.0000 of the answers' tokens are TARGET's own first choice" in out
    own = [line for line in out.splitlines() if line.startswith("1 + accepted / passes")][0]
    assert ("not said" in own) == (kind == "sglang-counters")


def prompts_of_file():
    lines = [json.loads(line) for line in Path(served().data).read_text().splitlines()]
    return [served().tokenizer.apply_chat_template(line["messages"][:1], add_generation_prompt=True,
                                                   return_dict=True)["input_ids"] for line in lines]


def test_the_request_is_greedy_whatever_the_models_own_settings_are(check):
    with stand_in("vllm") as server:
        assert check(URL=server.url, CHAT_TEMPLATE_KWARGS="{'enable_thinking': False}")[0] == 0
    for path, body in server.bodies:
        assert path == "/v1/chat/completions" and body["model"] == "served-name" and body["return_token_ids"]
        assert (body["temperature"], body["top_p"], body["repetition_penalty"]) == (0, 1, 1)
        assert body["chat_template_kwargs"] == {"enable_thinking": False}


def test_lines_of_ids_go_as_ids_up_to_their_last_answer(check, tmp_path):
    lines = []
    for ids in prompts_of_file():
        asked = [0] * len(ids)
        lines.append({"input_ids": [*ids, 9, EOS, *ids, 10, 11], "loss_mask": [*asked, 1, 1, *asked, 1, 1]})
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with stand_in("vllm") as server:
        code, out, _ = check(URL=server.url, EVAL_DATA=tmp_path / "ids.jsonl")
    assert code == 0, out
    assert [(path, body["prompt"]) for path, body in server.bodies] == [
        ("/v1/completions", line["input_ids"][:-2]) for line in lines]


def test_tools_and_earlier_calls_are_sent_as_the_interface_wants_them(check, tmp_path):
    call = {"id": "1", "type": "function", "function": {"name": "w12", "arguments": {"x": 1}}}
    tools = [{"type": "function", "function": {"name": "w12", "parameters": {}}}]
    messages = [{"role": "user", "content": "w8"},
                {"role": "assistant", "content": "w9", "tool_calls": [call]},
                {"role": "tool", "content": "w10"}, {"role": "assistant", "content": "w11"}]
    (tmp_path / "t.jsonl").write_text(json.dumps({"messages": messages, "tools": tools}) + "\n")
    with stand_in("vllm") as server:
        check(URL=server.url, EVAL_DATA=tmp_path / "t.jsonl")
    (_, body), = server.bodies
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "tool"] and body["tools"] == tools
    assert body["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"x": 1}'


def test_answers_cut_by_the_limit_count_like_others(check):
    with stand_in("vllm") as server:
        code, out, _ = check(URL=server.url, MAX_NEW_TOKENS=9)
    assert code == 0 and f"equal on {N} of {N}" in out and f"{N} cut at MAX_NEW_TOKENS" in out


def test_counters_that_lag_behind_the_reply_are_waited_for(check, monkeypatch):
    monkeypatch.setattr(tool, "SETTLE_S", common.HANG_S)
    with stand_in("vllm-counters", "lag") as server:
        code, out, _ = check(URL=server.url)
    assert code == 0 and f"equal on {N} of {N}" in out


def test_kept_answers_are_walked_without_the_server(check, tmp_path):
    kept = tmp_path / "answers.jsonl"
    with stand_in("sglang") as server:
        first = check(URL=server.url, ANSWERS=kept)[1]
    code, again, _ = check(URL="", ANSWERS=kept)
    assert code == 0 and again.splitlines()[-7:] == first.splitlines()[-7:]
    refused(check(URL="", ANSWERS=kept, N=2), "ANSWERS", "holds 6 answers")
    kept.write_text("{}\n")
    refused(check(URL="", ANSWERS=kept), "ANSWERS", "no file of this program's")


# -------------------------------------------------------------------------------------- the two do not agree


@pytest.mark.parametrize("kind", ["vllm", "vllm-counters", "sglang", "sglang-old"])
def test_another_block_length_is_seen(kind, check):
    with stand_in(kind, "short blocks") as server:
        code, out, _ = check(URL=server.url)
    assert code == 1 and "verdict: DIFFERENT" in out
    seen = f"seen: block length: the server drafts 1 tokens a pass, a dflash checkpoint of block_size {K}"
    assert seen in out


def test_an_acceptance_that_is_lower_without_a_sign_has_the_possible_causes(check):
    with stand_in("vllm", "lower") as server:
        code, out, _ = check(URL=server.url, TOLERANCE=0.05)
    assert code == 1 and "possible: another checkpoint than CKPT is loaded there" in out
    assert "k_norm" in out and "sliding" not in out and "Gemma" not in out


def test_answers_that_are_not_greedy_are_seen(check):
    with stand_in("sglang", "sampled") as server:
        _, out, _ = check(URL=server.url)
    assert "seen: quantised or other target, or answers that are not greedy" in out


def test_another_chat_template_is_seen(check):
    with stand_in("vllm", "other template") as server:
        _, out, _ = check(URL=server.url)
    assert f"seen: chat template or thinking mode: {N} of {N} prompts" in out
    assert "from token 1 on: 'assistant w8" in out


def test_a_context_longer_than_trained_is_seen(check, monkeypatch):
    shorter = tool.read_checkpoint(served().ckpt)._replace(trained_length=16)
    monkeypatch.setattr(tool, "read_checkpoint", lambda path: shorter)
    with stand_in("vllm") as server:
        code, out, _ = check(URL=server.url)
    assert code == 0 and "seen: context longer than trained" in out and "SEQ_LEN was 16" in out


@pytest.mark.parametrize("changes, word", [
    ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding layers"),
    ({"dflash_config": {"final_logit_softcapping": 30.0}}, "Gemma"),
    ({"dflash_config": {"input_embedding_scale": 5.5}}, "Gemma")])
def test_what_the_checkpoint_asks_of_a_server_is_a_possible_cause(changes, word, tmp_path):
    config = json.loads(Path(served().ckpt, "config.json").read_text())
    for name, value in changes.items():
        config[name] = {**config[name], **value} if isinstance(value, dict) else value
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert any(word in cause for cause in tool.causes_possible(tool.read_checkpoint(str(tmp_path))))


@pytest.mark.parametrize("architecture, head, drafts", [
    ("DFlashDraftModel", "dflash", K - 1),
    ("DFlash2DraftModel", "dflash2", K - 1),
    ("Qwen3DSparkModel", "dspark", K)])
def test_how_many_tokens_a_pass_drafts_depends_on_the_head(architecture, head, drafts, tmp_path):
    config = {"architectures": [architecture], "block_size": K}
    (tmp_path / "config.json").write_text(json.dumps(config))
    checkpoint = tool.read_checkpoint(str(tmp_path))
    assert (checkpoint.head, checkpoint.drafts, checkpoint.trained_length) == (head, drafts, None)


# --------------------------------------------------------------------------------------- faults, one line


@pytest.mark.parametrize("kind, fault, words", [
    ("vllm", "error", ["HTTP 400", "the context is too long"]),
    ("vllm", "no json", ["HTTP 200", "a proxy"]),
    ("vllm", "hangs up", ["no answer to POST /v1/chat/completions"]),
    ("vllm", "no ids", ["no token ids", "return_token_ids"]),
    ("vllm", "ids cut", ["token ids", "speaks of"]),
    ("vllm", "aborted", ["ended by 'abort'"]),
    ("vllm-counters", "no metrics", ["no acceptance is reported", "/metrics answers with HTTP 404"]),
    ("sglang-counters", "no metrics", ["no acceptance is reported", "--enable-metrics"]),
    ("vllm-counters", "no drafter", ["no acceptance is reported", "vllm:spec_decode_num_drafts"]),
    ("sglang-counters", "no drafter", ["no acceptance is reported", "sglang:spec_verify_calls"]),
    ("sglang-old", "no drafter", ["no acceptance is reported", "spec_verify_ct"]),
    ("vllm-counters", "counters stand still", ["counted no pass", "does not draft"]),
    ("sglang-counters", "counters stand still", ["counted no pass", "does not draft"]),
    ("vllm-counters", "other traffic", ["generated tokens during an answer", "other requests were running"])])
def test_a_server_that_can_not_be_compared_is_one_line(kind, fault, words, check):
    with stand_in(kind, fault) as server:
        refused(check(URL=server.url), f"URL = {server.url}", *words)


def test_a_server_that_is_down_is_one_line(check):
    with stand_in("vllm") as server:
        url = server.url
    refused(check(URL=url), "no answer to GET /v1/models", "ConnectionRefusedError")


@pytest.mark.parametrize("changes, words", [
    ({"CKPT": ""}, ["CKPT is empty"]),
    ({"TARGET": ""}, ["TARGET is empty"]),
    ({"EVAL_DATA": ""}, ["EVAL_DATA is empty"]),
    ({"CKPT": "/nowhere"}, ["CKPT = /nowhere", "config.json"]),
    ({"TARGET": "/nowhere"}, ["TARGET = /nowhere"]),
    ({"EVAL_DATA": "/nowhere.jsonl"}, ["EVAL_DATA = /nowhere.jsonl"]),
    ({"N": 0}, ["N = 0"]),
    ({"N": "x"}, ["N=x"]),
    ({"NUMBER": 3}, ["unknown setting"]),
    ({"URL": ""}, ["URL is empty"]),
    ({"URL": "127.0.0.1:8000"}, ["URL = 127.0.0.1:8000", "http://host:port"]),
    ({"URL": "http://127.0.0.1:8000/v1"}, ["must look like http://host:port"])])
def test_a_setting_that_can_not_work_is_one_line(changes, words, check):
    refused(check(**changes), *words)


def test_a_checkpoint_of_another_kind_is_named(check, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    refused(check(CKPT=tmp_path), "LlamaForCausalLM is no drafter known here")


def test_lines_without_an_answer_are_skipped_and_said(check, tmp_path):
    lines = ['{"messages": ', json.dumps({"messages": [{"role": "assistant", "content": "w9"}]})]
    (tmp_path / "some.jsonl").write_text("\n".join(lines) + "\n" + Path(served().data).read_text())
    with stand_in("vllm") as server:
        code, out, _ = check(URL=server.url, EVAL_DATA=tmp_path / "some.jsonl")
    assert code == 0 and "line 1: skipped" in out and "line 2: skipped" in out and len(server.bodies) == N


def test_an_eval_that_fails_is_one_line_with_its_words(check, monkeypatch):
    def real(answers):
        with settings.changed(tool, TARGET_DEVICES=["cuda:9"]):
            return spare(answers)
    spare = walk_once.__defaults__[0]
    monkeypatch.setattr(tool, "walk", real)
    with stand_in("vllm") as server:
        refused(check(URL=server.url), "train_dflash.py eval ended with 2", "cuda:9")
