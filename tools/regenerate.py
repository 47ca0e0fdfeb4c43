"""Prompts in, the target's own answers out: JSONL to train on.

    python tools/regenerate.py PROMPTS=in.jsonl OUT=train.jsonl URL=http://127.0.0.1:8000/v1 MODEL=name
    python tools/regenerate.py PROMPTS=in.jsonl OUT=train.jsonl TARGET=dir DEVICE=cuda:0 BATCH=256
    python tools/regenerate.py PROMPTS=none:50000 OUT=train.jsonl TARGET=dir   the target writes the prompts

read_prompts | draw_prompts -> Output (what is done already) -> answer_by_server | answer_locally -> OUT
A killed run is resumed by the same command. Every different prompt is answered once, in no particular order.
"""
import ast
import fcntl
import hashlib
import http.client
import json
import os
import random
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from tqdm import tqdm

# ---- settings: NAME=VALUE on the command line overrides them -------------------------------------

PROMPTS = ""               # JSONL: `messages`, `conversations` or `prompt`; none:N = N that the target writes
OUT = "answers.jsonl"      # {"messages": [...], "finish_reason": "stop" | "length" (cut) | "tool_calls"}
MAX_NEW_TOKENS = 1024
TEMPERATURE = 0.0          # 0: greedy
TOP_P = 1.0
SEED = 0                   # of the sampling with a local target
CHAT_TEMPLATE_KWARGS = {}  # such as {"enable_thinking": False}; must be those of the training
# an OpenAI-compatible server; the key is read from the environment variable OPENAI_API_KEY
URL = ""                   # http://host:port/v1
MODEL = ""                 # its name there
CONCURRENCY = 64           # requests in flight
TIMEOUT_S = 600.0          # of one request
RETRIES = 5                # after the first attempt
BACKOFF_S = 1.0            # before the first retry; doubles, at most 60
MAX_FAILED_IN_A_ROW = 50   # rows; then the server is taken for gone
# or a local model of transformers: bf16 on a GPU, fp32 on the CPU
TARGET = ""                # directory or name
DEVICE = "cuda:0"
BATCH = 64                 # prompts generated together
ROUNDTRIP = True           # keep only rows whose text tokenises back to the very ids generated

SETTINGS = {name: value for name, value in globals().items() if name.isupper()}
DECISIVE = "MODEL", "TARGET", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_P", "CHAT_TEMPLATE_KWARGS", "ROUNDTRIP"
DRAW = {"max_new_tokens": 64, "temperature": 1.0, "top_p": 0.95}  # how PROMPTS=none:N samples


def stop(text):
    raise SystemExit(f"regenerate: {text}")


def override(words):
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or name not in SETTINGS:
            stop(f"unknown setting {word!r}, known: {', '.join(SETTINGS)}")
        globals()[name] = parse(name, text, type(SETTINGS[name]))
        print(f"{name} = {globals()[name]!r}")


def parse(name, text, kind):
    try:
        value = text if kind is str else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = None
    value = float(value) if kind is float and type(value) is int else value
    return value if type(value) is kind else stop(f"{name}={text}: expected {kind.__name__}")


def check_settings():
    if bool(URL) == bool(TARGET):
        stop(f"give a server (URL) or a local model (TARGET): URL={URL!r} TARGET={TARGET!r}")
    if URL and (urlsplit(URL).scheme not in ("http", "https") or not urlsplit(URL).netloc or not MODEL):
        stop(f"expected URL=http://host:port/v1 MODEL=name, not URL={URL} MODEL={MODEL}")
    for name in ("MAX_NEW_TOKENS", "CONCURRENCY", "BATCH", "RETRIES", "TEMPERATURE"):
        if globals()[name] < (least := int(name not in ("RETRIES", "TEMPERATURE"))):
            stop(f"{name}={globals()[name]}: must be at least {least}")
    if not 0 < TOP_P <= 1:
        stop(f"TOP_P={TOP_P}: must be in (0, 1]")
    if PROMPTS.startswith("none:") and not (TARGET and PROMPTS[5:].isdigit() and int(PROMPTS[5:])):
        stop(f"PROMPTS={PROMPTS}: expected none:N, N > 0, and a TARGET, which draws them")


# ---- prompts -------------------------------------------------------------------------------------

ROLES = {"human": "user", "gpt": "assistant", "function": "tool", "observation": "tool"}


def prompt_row(line):
    """A line of any form -> {"messages": without the final answer; `tools` and `source` where given}."""
    data = json.loads(line)
    if not isinstance(data, dict):
        raise ValueError("not a JSON object")
    if "messages" in data:
        messages = list(data["messages"])
    elif "conversations" in data:
        messages = [{"role": ROLES.get(turn["from"], turn["from"]), "content": turn["value"]}
                    for turn in data["conversations"]]
    elif "prompt" in data:
        prompt = data["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    else:
        raise ValueError(f"no messages, conversations or prompt, only {', '.join(data) or 'nothing'}")
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("no user turn to answer at the end")
    if any(turn.get("content") is None and "tool_calls" not in turn for turn in messages):
        raise ValueError("a message without content")
    return {"messages": messages, **{name: data[name] for name in ("tools", "source") if data.get(name)}}


def row_key(row):
    text = json.dumps([row["messages"], row.get("tools")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_prompts(path, counts):
    """key -> row. Lines that aren't prompts are said and counted; repeated prompts are counted."""
    rows = {}
    try:
        # not splitlines: U+2028 is text
        lines = Path(path).read_bytes().decode("utf-8-sig", "replace").split("\n")
    except OSError as error:
        stop(f"PROMPTS={path}: {error.strerror}")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = prompt_row(line)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            counts["bad lines"] += 1
            print(f"{path} line {number}: skipped, {type(error).__name__}: {error}", file=sys.stderr)
            continue
        counts["duplicates"] += row_key(row) in rows
        rows.setdefault(row_key(row), row)
    return rows or stop(f"PROMPTS={path}: no prompt in it")


# ---- output --------------------------------------------------------------------------------------


def open_lines(path):
    """The file, opened for appending, and its lines; a last line that a kill cut off is removed."""
    try:
        file = open(path, "a+b")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        stop(f"OUT={OUT}: another process is writing it")
    except OSError as error:
        stop(f"OUT={OUT}: {error.strerror}")
    file.seek(0)
    whole, rows = 0, []
    for number, line in enumerate(file, 1):
        if not line.endswith(b"\n"):
            break
        try:
            rows.append(json.loads(line))
        except ValueError:
            stop(f"{path} line {number} is not JSON: not a file of this tool, or a damaged one")
        whole += len(line)
    file.truncate(whole)
    return file, rows


def append(file, row):
    file.write(json.dumps(row).encode() + b"\n")
    file.flush()  # one write per line: a kill can cut the last line only


class Output:
    """OUT, and beside it OUT.state: the settings that decide the answers, and the prompts left out."""

    def __init__(self, counts):
        self.counts = counts
        if os.path.exists(OUT) and os.path.getsize(OUT) and not os.path.exists(OUT + ".state"):
            stop(f"OUT={OUT} is there already and was not made by this tool (no {OUT}.state): give another OUT")
        self.file, rows = open_lines(OUT)
        self.state, lines = open_lines(OUT + ".state")
        if not rows and len(lines) == 1:  # begun, nothing answered: other settings are welcome
            self.state.truncate(0)
            lines = []
        settings = {name: globals()[name] for name in DECISIVE}
        for name, value in (lines[0]["settings"] if lines else settings).items():
            if value != settings[name]:
                stop(f"OUT={OUT} was begun with {name}={value!r}, now {settings[name]!r}: give another OUT")
        if not lines:
            append(self.state, {"settings": settings})
        self.done = {row_key({**row, "messages": row["messages"][:-1]}) for row in rows}
        self.done |= {line["left_out"] for line in lines[1:]}
        counts["there already"], counts["not round-trip"] = len(rows), len(lines[1:])
        counts["cut"] = sum(row["finish_reason"] == "length" for row in rows)

    def add(self, row, message, finish_reason):
        self.counts["new"] += 1
        self.counts["cut"] += finish_reason == "length"
        append(self.file, {**row, "messages": row["messages"] + [message], "finish_reason": finish_reason})

    def leave_out(self, key):
        self.counts["not round-trip"] += 1
        append(self.state, {"left_out": key})

    def close(self):
        for file in (self.file, self.state):
            os.fsync(file.fileno())
            file.close()


# ---- a server ------------------------------------------------------------------------------------


class Failed(Exception):
    """No answer after the retries, or asking again is useless. Empty text: the row was not asked."""


def post(body):
    """(status, bytes). No proxy: servers of this kind are in the same room."""
    url = urlsplit(URL)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    connection = kind(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request("POST", url.path.rstrip("/") + "/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    finally:
        connection.close()


def read_reply(data):
    """The message and its finish_reason; thinking and tool calls are part of what the target produced."""
    choice = json.loads(data)["choices"][0]
    if choice["finish_reason"] not in ("stop", "length", "tool_calls"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}")
    reply = choice["message"]
    message = {"role": "assistant", "content": reply.get("content") or ""}
    if thinking := reply.get("reasoning_content") or reply.get("reasoning"):
        message["reasoning_content"] = thinking
    if reply.get("tool_calls"):
        message["tool_calls"] = reply["tool_calls"]
    return message, choice["finish_reason"]


def ask_server(row, given_up):
    body = {"model": MODEL, "messages": row["messages"], "max_tokens": MAX_NEW_TOKENS,
            "temperature": TEMPERATURE, "top_p": TOP_P, **({"tools": row["tools"]} if "tools" in row else {}),
            **({"chat_template_kwargs": CHAT_TEMPLATE_KWARGS} if CHAT_TEMPLATE_KWARGS else {})}
    for attempt in range(RETRIES + 1):
        # jitter: threads that failed together should not come back together
        wait = 0 if attempt == 0 else min(60.0, BACKOFF_S * 2 ** (attempt - 1)) * random.uniform(0.5, 1)
        if given_up.wait(wait):
            raise Failed("")
        try:
            status, data = post(body)
            if status == 200:
                return read_reply(data)
            reason = f"HTTP {status} {data[:200].decode('utf-8', 'replace')}"
            if status < 500 and status not in (408, 409, 425, 429):
                break
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            reason = f"{type(error).__name__}: {error}"
    raise Failed(" ".join(reason.split()))


def answer_by_server(rows, output):
    """Asks for every row; returns key -> reason of those that failed."""
    failed, in_a_row, given_up = {}, 0, threading.Event()
    with ThreadPoolExecutor(CONCURRENCY) as pool:
        futures = {pool.submit(ask_server, row, given_up): key for key, row in rows.items()}
        try:
            for future in tqdm(as_completed(futures), total=len(rows), unit="row", disable=None):
                key = futures[future]
                try:
                    output.add(rows[key], *future.result())
                    in_a_row = 0
                except Failed as error:
                    failed[key] = str(error)
                    in_a_row += 1
                    if in_a_row >= MAX_FAILED_IN_A_ROW:
                        given_up.set()
        except BaseException:  # Ctrl-C, a full disk: don't go on asking
            given_up.set()
            raise
    return failed


# ---- a local target ------------------------------------------------------------------------------


def load_target():
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging
    logging.disable_progress_bar()  # that of loading; ours stays
    torch.backends.cuda.enable_cudnn_sdp(False)  # cuDNN plans anew for every length of an answer
    try:
        device = torch.zeros(1, device=DEVICE).device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        tokenizer = AutoTokenizer.from_pretrained(TARGET)
        model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=dtype).to(device).eval()
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        stop(f"TARGET={TARGET} DEVICE={DEVICE}: {(str(error) or repr(error)).splitlines()[0]} "
             f"(DEVICE=cpu runs anywhere)")
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [tokenizer.eos_token_id if ends is None else ends]
    pad = ends[0] if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    # a fresh one: a target's own may carry penalties or a top-k, which were not asked for
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=pad)
    return model, tokenizer


def generate(model, prompts, max_new_tokens, temperature, top_p):
    """[prompt ids] -> [(new ids, end-of-turn included; ended by itself?)], in one left-padded batch."""
    import torch
    config, width = model.generation_config, max(map(len, prompts))
    ids = torch.tensor([[config.pad_token_id] * (width - len(p)) + p for p in prompts], device=model.device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=model.device)
    how = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0} if temperature else {}
    with torch.no_grad():
        new = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=max_new_tokens, **how)
    results = []
    for row in new[:, width:].tolist():
        end = next((i for i, token in enumerate(row) if token in config.eos_token_id), None)
        results.append((row, False) if end is None else (row[:end + 1], True))
    return results


def encode(tokenizer, row, **kwargs):
    return tokenizer.apply_chat_template(
        row["messages"], tools=row.get("tools"), return_dict=False, **CHAT_TEMPLATE_KWARGS, **kwargs)


def encode_prompts(rows, tokenizer):
    """(key -> ids, key -> reason of those that the chat template refuses)."""
    prompts, failed = {}, {}
    for key, row in rows.items():
        try:
            prompts[key] = encode(tokenizer, row, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            failed[key] = f"chat template: {type(error).__name__}: {error}"
    return prompts, failed


def answer_locally(rows, output, model, tokenizer):
    import torch
    prompts, failed = encode_prompts(rows, tokenizer)
    # longest first: too large a BATCH fails early
    order = sorted(prompts, key=lambda key: -len(prompts[key]))
    with tqdm(total=len(order), unit="row", disable=None) as bar:
        for keys in (order[start:start + BATCH] for start in range(0, len(order), BATCH)):
            torch.manual_seed(int(keys[0][:12], 16) + SEED)  # other numbers in each batch, resumed or not
            batch = [prompts[key] for key in keys]
            for key, (ids, ended) in zip(keys, generate(model, batch, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)):
                text = tokenizer.decode(ids[:-1] if ended else ids, clean_up_tokenization_spaces=False)
                message = {"role": "assistant", "content": text}
                if ROUNDTRIP and not is_roundtrip(tokenizer, rows[key], message, prompts[key] + ids):
                    output.leave_out(key)
                else:
                    output.add(rows[key], message, "stop" if ended else "length")
            bar.update(len(keys))
    return failed


def is_roundtrip(tokenizer, row, message, ids):
    return encode(tokenizer, {**row, "messages": row["messages"] + [message]})[:len(ids)] == ids


def draw_prompts(wanted, path, model, tokenizer):
    """Fills `path` with different prompts that the target writes after the bare start of a user turn."""
    import torch
    file, lines = open_lines(path)
    seen, batches, barren = {line["prompt"] for line in lines}, len(lines), 0
    turn = [{"role": "user", "content": "STARTSHERE"}]
    text = tokenizer.apply_chat_template(turn, tokenize=False, **CHAT_TEMPLATE_KWARGS)
    prefix = tokenizer(text.partition("STARTSHERE")[0], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids)
    with file, tqdm(total=wanted, initial=len(seen), unit="prompt", disable=None) as bar:
        while len(seen) < wanted:
            torch.manual_seed(SEED * 1_000_003 + batches)
            before, batches = len(seen), batches + 1
            for ids, ended in generate(model, [prefix] * BATCH, **DRAW):
                prompt = tokenizer.decode(ids[:-1], clean_up_tokenization_spaces=False).strip()
                # one that was cut is half a sentence
                usable = ended and prompt and not special.intersection(ids[:-1]) and prompt not in seen
                if usable and len(seen) < wanted:
                    seen.add(prompt)
                    append(file, {"prompt": prompt})
            bar.update(len(seen) - before)
            barren = 0 if len(seen) > before else barren + 1
            if barren == 20:
                stop(f"PROMPTS={PROMPTS}: 20 batches in a row without a new prompt, {len(seen)} so far")


# ---- main ----------------------------------------------------------------------------------------


def answer(rows, output):
    """Answers what OUT lacks. -> (rows, key -> reason of those that failed, seconds)"""
    local = load_target() if TARGET else ()
    if not rows:
        draw_prompts(int(PROMPTS[5:]), OUT + ".prompts", *local)
        rows = read_prompts(OUT + ".prompts", output.counts)
    todo = {key: row for key, row in rows.items() if key not in output.done}
    began = time.monotonic()
    failed = answer_locally(todo, output, *local) if TARGET else answer_by_server(todo, output)
    return rows, failed, time.monotonic() - began + 1e-9


def report(counts, rows, failed, seconds):
    for key, reason in failed.items():
        question = json.dumps(rows[key]["messages"][-1].get("content"))[:80]
        if reason:
            print(f"failed: {question} {reason}", file=sys.stderr)
    parts = ("there already", "cut", "not round-trip", "bad lines", "duplicates")
    print(f"{OUT}: {counts['there already'] + counts['new']} rows, "
          + ", ".join(f"{counts[part]} {part}" for part in parts) + f", {len(failed)} failed; "
          + f"{counts['new']} new in {seconds:.1f} s, {counts['new'] / seconds:.1f} rows/s")
    if failed:
        stop(f"{len(failed)} rows failed (listed above): the same command asks for them again")


def main():
    override(sys.argv[1:])
    check_settings()
    counts = Counter()
    rows = {} if PROMPTS.startswith("none:") else read_prompts(PROMPTS, counts)
    with closing(Output(counts)) as output:
        result = answer(rows, output)
    report(counts, *result)


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    try:
        main()
    except KeyboardInterrupt:
        print("regenerate: stopped; the same command goes on", file=sys.stderr)
        os._exit(130)  # threads may still wait for a reply
