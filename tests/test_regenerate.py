"""tools/regenerate.py against a stand-in OpenAI-compatible server, and with a tiny random target."""
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from dflash_trainer import generating, settings

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "regenerate.py"
FORMS = ROOT / "tests" / "data" / "cases2" / "regenerate_forms.jsonl"
HANG_S = 600  # what takes longer hangs: how fast the machine is decides no test
QUICK = ("BACKOFF_S=0.02", f"TIMEOUT_S={HANG_S}", "CONCURRENCY=8", "MODEL=stand-in")


class Handler(BaseHTTPRequestHandler):
    """Echoes the last message. The first word of a prompt names the trouble its first attempts meet."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.asked[text] += 1
            self.server.bodies.append((self.path, body))
            attempt = self.server.asked[text]
            process = self.headers["Authorization"]
            self.server.requests[process] += 1
            n = self.server.requests[process]
        if n > self.server.answered:
            self.server.release.wait(HANG_S)
        trouble = text.split()[0] if attempt <= self.server.bad_attempts else ""
        if trouble == "reset":  # RST instead of a reply
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            return
        if trouble == "slow":  # until the other side gives up
            self.connection.settimeout(HANG_S)
            with suppress(OSError):
                self.connection.recv(1)
            self.close_connection = True
            return
        status = {"busy": 500, "limit": 429}.get(trouble, 400 if text.startswith("refused") else 200)
        finish = "abort" if trouble == "abort" else "length" if text.startswith("cut") else "stop"
        message = {"role": "assistant", "content": "echo " + text}
        reply = {"choices": [{"message": message, "finish_reason": finish}]}
        data = b"no json" if trouble == "garbage" else json.dumps(reply).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data) + (9 if trouble == "short" else 0)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:
            pass  # the other side gave up waiting
        self.close_connection = True

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.lock, server.asked, server.bodies = threading.Lock(), Counter(), []
    server.bad_attempts = 1
    server.requests = Counter()  # of each process: one that was killed may still be heard of
    server.answered = 10**9  # requests of a process; later ones wait until the test says go
    server.release = threading.Event()
    server.url = f"URL=http://127.0.0.1:{server.server_port}/v1"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


def prompts(path, texts):
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return f"PROMPTS={path}"


def start(*words, name="one"):
    """name: of the process, which the server hears as its key."""
    return subprocess.Popen([sys.executable, str(SCRIPT), *words], text=True,
                            env={**os.environ, "OPENAI_API_KEY": name},
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def call(*words, name="one"):
    process = start(*words, name=name)
    out, err = process.communicate(timeout=HANG_S)
    return process.returncode, out, err


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path):
    """prompt -> answer; fails when a prompt is there twice."""
    rows = rows_of(path)
    result = {row["messages"][-2]["content"]: row["messages"][-1]["content"] for row in rows}
    assert len(result) == len(rows), "a row is doubled"
    return result


def one_line(result, *words):
    code, _, err = result
    lines = err.strip().splitlines()
    assert code not in (0, None) and len(lines) == 1 and "Traceback" not in err, err
    assert all(word in lines[0] for word in words), err


# ---- server --------------------------------------------------------------------------------------


def test_every_form_of_line_is_answered_once(server, tmp_path):
    lines = [{"prompt": "one", "response": "old"},
             {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "two"},
                           {"role": "assistant", "content": "old"}], "source": "web"},
             {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                {"from": "human", "value": "three"}, {"from": "gpt", "value": "old"}]},
             {"messages": [{"role": "user", "content": "four\u2028 \U0001f642 \ud83d"}],
              "tools": [{"type": "function", "function": {"name": "f"}}]},
             {"prompt": "one"}, {"input_ids": [1, 2], "loss_mask": [0, 1]}, {"messages": []},
             {"prompt": None}, 7,
             {"messages": [{"role": "system", "content": "no question"}]}]
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(map(json.dumps, lines)).encode() + b"\r\n\r\n{torn")
    code, text, err = call(f"PROMPTS={source}", f"OUT={out}", server.url, *QUICK, "MAX_NEW_TOKENS=7",
                           "CHAT_TEMPLATE_KWARGS={'enable_thinking': False}")
    assert code == 0, err
    rows = {row["messages"][-2]["content"]: row for row in rows_of(out)}
    assert set(rows) == {"one", "two", "three", "four\u2028 \U0001f642 \ud83d"} and len(rows_of(out)) == 4
    for key, row in rows.items():
        assert row["messages"][-1] == {"role": "assistant", "content": "echo " + key}
    assert rows["two"]["source"] == "web" and rows["two"]["messages"][0]["role"] == "system"
    assert [m["content"] for m in rows["three"]["messages"]] == ["a", "b", "three", "echo three"]
    assert "4 rows" in text and "6 bad lines" in text and "1 duplicates" in text
    for number in (6, 7, 8, 9, 10, 12):
        assert f"line {number}: skipped" in err
    path, body = next(item for item in server.bodies if "tools" in item[1])
    assert path == "/v1/chat/completions" and body["max_tokens"] == 7 and body["temperature"] == 0
    assert body["model"] == "stand-in" and body["chat_template_kwargs"] == {"enable_thinking": False}


def test_troubles_are_retried_and_cut_answers_marked(server, tmp_path):
    server.bad_attempts = 2
    kinds = ("busy", "limit", "reset", "slow", "garbage", "short", "abort", "cut", "fine")
    texts, out = [f"{kind} {i}" for i in range(4) for kind in kinds], tmp_path / "out.jsonl"
    words = prompts(tmp_path / "in.jsonl", texts), f"OUT={out}", server.url
    # as many retries as it takes: a request that a busy machine makes late is asked again too
    code, text, err = call(*words, *QUICK, "RETRIES=100", "TIMEOUT_S=6")
    assert code == 0, err
    assert answers(out) == {text: "echo " + text for text in texts}
    cut = [row["messages"][0]["content"] for row in rows_of(out) if row["finish_reason"] == "length"]
    assert sorted(cut) == [f"cut {i}" for i in range(4)] and "4 cut" in text
    assert all(server.asked[text] >= 3 for text in texts if text.split()[0] not in ("cut", "fine"))


def test_rows_that_fail_are_listed_and_asked_again_next_time(server, tmp_path):
    server.bad_attempts = 3
    words = (prompts(tmp_path / "in.jsonl", ["busy a", "fine b", "refused c"]), f"OUT={tmp_path / 'out'}",
             server.url)
    code, text, err = call(*words, *QUICK, "RETRIES=2")
    assert code == 1 and "2 failed" in text and "Traceback" not in err
    assert 'failed: "busy a" HTTP 500' in err and 'failed: "refused c" HTTP 400' in err
    assert server.asked == {"busy a": 3, "fine b": 1, "refused c": 1}  # a refusal is not retried
    code, text, err = call(*words, *QUICK, "RETRIES=2")
    assert code == 1 and "2 rows, 1 there already" in text and server.asked["fine b"] == 1
    assert answers(tmp_path / "out") == {"busy a": "echo busy a", "fine b": "echo fine b"}


def test_a_server_that_is_gone_ends_the_run_early(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"URL=http://127.0.0.1:{free.getsockname()[1]}/v1"
    texts = [str(i) for i in range(2000)]
    code, text, err = call(prompts(tmp_path / "in.jsonl", texts), f"OUT={tmp_path / 'out'}", url, *QUICK,
                           "RETRIES=1", "MAX_FAILED_IN_A_ROW=10")
    assert code == 1 and "refused" in err and "2000 failed" in text
    assert 10 <= err.count("failed: ") < 40  # the others were not asked


def wait_for_rows(path, count, process):
    until = time.monotonic() + HANG_S
    while time.monotonic() < until and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        time.sleep(0.01)
    raise AssertionError(f"no {count} rows: {process.poll()}")


def test_kill_and_resume_loses_and_doubles_no_row(server, tmp_path):
    """Whatever the machine's speed: the server answers so many requests of a process, then none until it is
    killed."""
    texts, out = [f"fine {i}" for i in range(300)], tmp_path / "out.jsonl"
    words = prompts(tmp_path / "in.jsonl", texts), f"OUT={out}", server.url, *QUICK
    for n, count in enumerate((40, 70, 70)):
        server.answered = count
        process = start(*words, name=f"killed {n}")
        before = len(answers_of_whole_lines(out)) if out.exists() else 0
        wait_for_rows(out, before + count, process)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        with open(out, "ab") as file:  # what a kill inside a write leaves
            file.write(b'{"messages": [{"role": "user", "content": "fine 29')
    server.answered = 10**9
    server.release.set()
    kept = set(answers_of_whole_lines(out))
    assert len(kept) == 180
    code, text, err = call(*words)
    assert code == 0, err
    assert answers(out) == {text: "echo " + text for text in texts}
    assert f"300 rows, {len(kept)} there already" in text
    # asked twice at most: those in flight when a kill came, at most one for each thread and kill
    assert sum(server.asked.values()) <= 300 + 3 * 8
    asked = sum(server.asked.values())
    assert call(*words)[0] == 0 and sum(server.asked.values()) == asked  # nothing left to ask


def answers_of_whole_lines(path):
    return [json.loads(line)["messages"][0]["content"] for line in path.read_bytes().split(b"\n")[:-1]]


def test_two_processes_do_not_write_one_file(server, tmp_path):
    server.answered = 1
    words = (prompts(tmp_path / "in.jsonl", [f"fine {i}" for i in range(40)]), f"OUT={tmp_path / 'out'}",
             server.url)
    first = start(*words, *QUICK)
    wait_for_rows(tmp_path / "out", 1, first)
    one_line(call(*words, *QUICK), "another process")
    first.kill()
    first.communicate()


# ---- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words, told", [
    (["NO_SUCH=1"], ["unknown setting 'NO_SUCH'"]),
    (["concurrency=4"], ["concurrency", "CONCURRENCY"]),
    (["CONCURRENCY=many"], ["CONCURRENCY=many", "int"]),
    (["CONCURRENCY=0"], ["CONCURRENCY = 0", "above 0"]),
    (["TEMPERATURE=hot"], ["TEMPERATURE=hot", "float"]),
    (["ROUNDTRIP=1"], ["ROUNDTRIP=1", "True or False"]),
    (["CHAT_TEMPLATE_KWARGS=[]"], ["CHAT_TEMPLATE_KWARGS", "dict"]),
    (["TOP_P=0"], ["TOP_P"]),
    (["URL="], ["URL", "TARGET"]),
    (["TARGET=there"], ["URL", "TARGET"]),
    (["MODEL="], ["MODEL"]),
    (["URL=localhost:8000"], ["URL = 'localhost:8000'"]),
    (["PROMPTS=/nowhere.jsonl"], ["PROMPTS = /nowhere.jsonl", "no such file"]),
    (["PROMPTS="], ["PROMPTS"]),
    (["PROMPTS=none:5"], ["none:5", "draw_prompts.py"]),
    (["OUT=/nowhere/out.jsonl"], ["/nowhere/out.jsonl"]),
])
def test_bad_settings_are_one_line(tmp_path, words, told):
    good = (prompts(tmp_path / "in", ["a"]), f"OUT={tmp_path / 'out'}",
            "URL=http://127.0.0.1:9/v1", "MODEL=m")
    one_line(call(*good, *words), *told)


def test_other_settings_or_a_damaged_file_are_refused(server, tmp_path):
    out = tmp_path / "out"
    words = prompts(tmp_path / "in.jsonl", ["fine"]), f"OUT={out}", server.url, *QUICK
    assert call(*words)[0] == 0
    one_line(call(*words, "TEMPERATURE=0.7"), "TEMPERATURE = 0.0", "0.7", "another OUT")
    out.write_bytes(b"garbage\n" + out.read_bytes())
    one_line(call(*words), "line 1 is not JSON")


def test_a_file_of_the_users_own_is_not_touched(server, tmp_path):
    """Its last line may end without a newline, as one that a kill cut off does."""
    prompts(tmp_path / "in.jsonl", ["fine"])
    for own in (tmp_path / "own.jsonl", tmp_path / "in.jsonl"):
        own.write_bytes((tmp_path / "in.jsonl").read_bytes().rstrip())
        before = own.read_bytes()
        result = call(f"PROMPTS={tmp_path / 'in.jsonl'}", f"OUT={own}", server.url, *QUICK)
        one_line(result, str(own), "another OUT")
        assert own.read_bytes() == before


# ---- a local target ------------------------------------------------------------------------------

TEMPLATE = ("{% if 'REFUSE' in messages[0]['content'] %}{{ raise_exception('no such thing') }}{% endif %}"
            "{% for m in messages %}{{ '<s>' + m['role'] + '\n' + m['content'] + '</s>' + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random llama over ASCII and three bytes that are no text alone; it ends a turn now and then."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("tiny")
    letters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "Ã", "Ä", "Å"]
    vocab = {token: i for i, token in enumerate(["<s>", "</s>", *letters])}
    bpe = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", pad_token="</s>",
                            chat_template=TEMPLATE).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(vocab), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=2,
                         bos_token_id=0, eos_token_id=1, pad_token_id=1)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(20)  # not nearly uniform: greedy then doesn't hang on rounding
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def regenerate(tiny):
    """The module, for calls in this process: starting torch anew each time would take most of the time."""
    sys.path.insert(0, str(SCRIPT.parent))
    import regenerate as module
    return module


@pytest.fixture(scope="module")
def draw_prompts(regenerate):
    import draw_prompts as module
    return module


def run(module, capsys, tiny, *words, code=0):
    """A program in this process -> what it prints."""
    with settings.changed(module):
        assert module.main([f"TARGET={tiny}", "DEVICE=cpu", "MAX_NEW_TOKENS=12", *words]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_local_batches_equal_one_by_one(regenerate, capsys, tiny, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer
    texts = ["a" * (1 + 3 * i % 17) + str(i) for i in range(21)]
    words = prompts(tmp_path / "in.jsonl", texts), "ROUNDTRIP=False", "BATCH=8", f"OUT={tmp_path / 'out'}"
    run(regenerate, capsys, tiny, *words)
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    rows = {row["messages"][0]["content"]: row for row in rows_of(tmp_path / "out")}
    assert set(rows) == set(texts)
    for row in rows.values():
        ids = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True,
                                            return_tensors="pt", return_dict=False)
        new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1]:].tolist()
        ended = new[-1] == 1
        assert row["messages"][1]["content"] == tokenizer.decode(new[:-1] if ended else new)
        assert row["finish_reason"] == ("stop" if ended else "length")


def test_roundtrip_keeps_only_rows_that_tokenise_back(regenerate, monkeypatch, capsys, tiny, tmp_path):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    out, seen = tmp_path / "out", {}
    generate = generating.generate

    def spy(model, batch, *how):
        results = generate(model, batch, *how)
        seen.update((tuple(prompt), ids) for prompt, (ids, _) in zip(batch, results))
        return results

    monkeypatch.setattr(generating, "generate", spy)
    words = (prompts(tmp_path / "in.jsonl", [f"question {i}" for i in range(60)]), f"OUT={out}",
             "TEMPERATURE=5", "MAX_NEW_TOKENS=24", "BATCH=32")  # nearly uniform: some rows end, some don't
    text = run(regenerate, capsys, tiny, *words)
    rows = rows_of(out)
    assert 10 < len(rows) < 60
    assert f"{len(rows)} rows" in text and f"{60 - len(rows)} not round-trip" in text
    assert {row["finish_reason"] for row in rows} == {"stop", "length"}
    for row in rows:
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True,
                                               return_dict=False)
        whole = tokenizer.apply_chat_template(row["messages"], return_dict=False)
        ids = seen[tuple(prompt)]
        assert whole[len(prompt):len(prompt) + len(ids)] == ids
        assert (ids[-1] == 1) == (row["finish_reason"] == "stop")
    asked = len(seen)
    text = run(regenerate, capsys, tiny, *words)  # nor are the rows left out generated again
    assert len(seen) == asked and rows_of(out) == rows and f"{len(rows)} there already" in text


def test_local_resume_completes_the_file(regenerate, capsys, tiny, tmp_path):
    texts = [f"question {i}" for i in range(20)]
    words = prompts(tmp_path / "in.jsonl", texts), "ROUNDTRIP=False", "BATCH=4"
    run(regenerate, capsys, tiny, *words, f"OUT={tmp_path / 'whole'}")
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / "part").write_bytes(b"".join(lines[:7]) + lines[7][:30])
    (tmp_path / "part.state").write_bytes((tmp_path / "whole.state").read_bytes())
    text = run(regenerate, capsys, tiny, *words, f"OUT={tmp_path / 'part'}")
    assert "20 rows, 7 there already" in text
    assert answers(tmp_path / "part") == answers(tmp_path / "whole")


def test_prompts_drawn_from_nothing(draw_prompts, regenerate, capsys, tiny, tmp_path):
    out = tmp_path / "prompts.jsonl"
    words = "N=12", "BATCH=16", f"OUT={out}"
    run(draw_prompts, capsys, tiny, *words)
    drawn = [row["prompt"] for row in rows_of(out)]
    assert len(set(drawn)) == len(drawn) == 12
    assert not any("<s>" in prompt or "</s>" in prompt or not prompt.strip() for prompt in drawn)
    run(regenerate, capsys, tiny, f"PROMPTS={out}", "ROUNDTRIP=False", f"OUT={tmp_path / 'out'}")
    assert set(answers(tmp_path / "out")) == set(drawn)
    out.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in drawn[:5]) + '{"prompt": "to')
    run(draw_prompts, capsys, tiny, *words)
    resumed = [row["prompt"] for row in rows_of(out)]
    assert len(set(resumed)) == 12 and resumed[:5] == drawn[:5]
    assert "N = 0" in run(draw_prompts, capsys, tiny, "N=0", code=2)


def test_whatever_the_trainer_reads_is_a_prompt(regenerate, capsys, tiny, tmp_path):
    out = tmp_path / "out"
    words = f"PROMPTS={FORMS}", "ROUNDTRIP=False", "MAX_NEW_TOKENS=3", f"OUT={out}"
    text = run(regenerate, capsys, tiny, *words)
    rows = {row["messages"][-2]["content"]: row["messages"] for row in rows_of(out)}
    assert "5 rows" in text and set(rows) == {
        f"Name a {thing}." for thing in ("tree", "river", "hill", "bird", "fish")}
    assert rows["Name a hill."][:2] == [{"role": "system", "content": "Answer in one word."},
                                        {"role": "user", "content": "Name a hill."}]
    assert [len(messages) for messages in rows.values()].count(2) == 4


def test_a_server_gets_arguments_as_text(server, tmp_path):
    """And a prompt in normal form: null columns, an older call, tools as text."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}, "b": None}}}}
    row = {"prompt": None, "tools": json.dumps([tool]), "messages": [
        {"role": "user", "content": "q", "weight": None},
        {"role": "assistant", "content": None,
         "function_call": {"name": "f", "arguments": {"a": 1, "b": None}}},
        {"role": "function", "name": "f", "content": "two"}, {"role": "assistant", "content": "old"}]}
    (tmp_path / "in.jsonl").write_text(json.dumps(row) + "\n")
    code, _, err = call(f"PROMPTS={tmp_path / 'in.jsonl'}", f"OUT={tmp_path / 'out'}", server.url, *QUICK)
    assert code == 0, err
    (_, body), = server.bodies
    asked, said, got = body["messages"]
    assert said["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
    assert got == {"role": "tool", "content": "two", "name": "f"} and "b" not in json.dumps(body["tools"])
    row, = rows_of(tmp_path / "out")
    assert row["messages"][1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert row["messages"][-1]["content"] == "echo two"


def test_a_prompt_that_the_template_refuses_fails_alone(regenerate, capsys, tiny, tmp_path):
    words = prompts(tmp_path / "in", ["REFUSE this", "fine"]), f"OUT={tmp_path / 'out'}", "ROUNDTRIP=False"
    told = run(regenerate, capsys, tiny, *words, code=1)
    assert "1 rows failed" in told and "no such thing" in told
    assert set(answers(tmp_path / "out")) == {"fine"}


def test_bad_target_or_device_is_one_line(regenerate, capsys, tiny, tmp_path):
    words = prompts(tmp_path / "in", ["a"]), f"OUT={tmp_path / 'out'}"
    for wrong in ("TARGET=/nowhere/at/all", "DEVICE=toaster", "DEVICE=cuda:99"):  # and none spoils OUT
        told = run(regenerate, capsys, tiny, *words, wrong, code=2).strip()
        assert wrong.replace("=", " = ") in told and "\n" not in told
