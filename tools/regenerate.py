"""Prompts in, the target's own answers out: JSONL to train on.

    python tools/regenerate.py PROMPTS=in.jsonl OUT=train.jsonl URL=http://127.0.0.1:8000/v1 MODEL=name
    python tools/regenerate.py PROMPTS=in.jsonl OUT=train.jsonl TARGET=dir DEVICE=cuda:0 BATCH=256

read_prompts -> Output (what is done already) -> answer_by_server | answer_locally -> OUT

PROMPTS is whatever the trainer reads (docs/data.md); a row's last answer is replaced. A killed run is resumed
by the same command. Every different prompt is answered once, in no particular order. To have the target write
the prompts as well: tools/draw_prompts.py.
"""
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tqdm import tqdm

from dflash_trainer import settings
from dflash_trainer.chat_lines import BadLine, Chat, parse_prompt
from dflash_trainer.data_files import load_row, read_rows, resolve_files
from dflash_trainer.errors import require
from dflash_trainer.line_files import append_line, open_lines

PROMPTS: str = ""               # files of rows of any form
OUT: str = "answers.jsonl"      # {"messages": [...], "finish_reason": "stop" | "length" (cut) | "tool_calls"}
MAX_NEW_TOKENS: int = 1024
TEMPERATURE: float = 0.0        # 0: greedy
TOP_P: float = 1.0
SEED: int = 0                   # of the sampling with a local target
CHAT_TEMPLATE_KWARGS: dict = {}  # such as {"enable_thinking": False}; must be those of the training
# an OpenAI-compatible server; the key is read from the environment variable OPENAI_API_KEY
URL: str = ""                   # http://host:port/v1
MODEL: str = ""                 # its name there
CONCURRENCY: int = 64           # requests in flight
TIMEOUT_S: float = 600.0        # of one request
RETRIES: int = 5                # after the first attempt
BACKOFF_S: float = 1.0          # before the first retry; doubles, at most 60
MAX_FAILED_IN_A_ROW: int = 50   # rows; then the server is taken for gone
# or a local model of transformers: bf16 on a GPU, fp32 on the CPU
TARGET: str = ""                # directory or name
DEVICE: str = "cuda:0"
BATCH: int = 64                 # prompts generated together
ROUNDTRIP: bool = True          # keep only rows whose text tokenises back to the very ids generated

# an OUT that was begun with other values of these is refused
DECISIVE = "MODEL", "TARGET", "MAX_NEW_TOKENS", "TEMPERATURE", "TOP_P", "CHAT_TEMPLATE_KWARGS", "ROUNDTRIP"


def check_settings():
    require(bool(URL) != bool(TARGET),
            f"give a server (URL) or a local model (TARGET): URL = {URL!r}, TARGET = {TARGET!r}")
    if URL:
        address = urlsplit(URL)
        require(address.scheme in ("http", "https") and address.netloc and MODEL,
                f"expected URL=http://host:port/v1 MODEL=name, not URL = {URL!r}, MODEL = {MODEL!r}")
    settings.require_positive(sys.modules[__name__], "MAX_NEW_TOKENS", "CONCURRENCY", "BATCH")
    for name in ("RETRIES", "TEMPERATURE"):
        require(globals()[name] >= 0, f"{name} = {globals()[name]}: must be at least 0")
    require(0 < TOP_P <= 1, f"TOP_P = {TOP_P}: must be in (0, 1]")
    require(PROMPTS, "PROMPTS is empty: name a file of prompts")
    require(not PROMPTS.startswith("none:"),
            f"PROMPTS = {PROMPTS}: tools/draw_prompts.py has a target write prompts")


# ----------------------------------------------------------------------------------------------- prompts


def read_prompts(counts):
    """key -> row: messages in the form of chat templates, tools and source where given. Rows that are no
    prompts are printed and counted; repeated prompts are counted."""
    rows = {}
    for path in resolve_files(PROMPTS, "PROMPTS", announce=True):
        for number, row in read_rows(path, "PROMPTS"):
            try:
                chat = parse_prompt(load_row(row))
            except BadLine as error:
                counts["bad lines"] += 1
                print(f"{path} line {number}: skipped, {error}", file=sys.stderr)
                continue
            row = {"messages": chat.messages}
            if chat.tools:
                row["tools"] = chat.tools
            if chat.source:
                row["source"] = chat.source
            key = row_key(row)
            counts["duplicates"] += key in rows
            rows.setdefault(key, row)
    require(rows, f"PROMPTS = {PROMPTS}: no prompt in it")
    return rows


def row_key(row):
    text = json.dumps([row["messages"], row.get("tools")], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


# ------------------------------------------------------------------------------------------------ output


class Output:
    """OUT, and beside it OUT.state: the settings that decide the answers, and the prompts left out."""

    def __init__(self, counts):
        self.counts = counts
        self.lock = threading.Lock()
        is_strange = os.path.exists(OUT) and os.path.getsize(OUT) and not os.path.exists(OUT + ".state")
        require(not is_strange,
                f"OUT = {OUT} is there already and was not made by this tool (no {OUT}.state): give another "
                "OUT")
        self.file, rows = open_lines(OUT, "OUT")
        self.state, lines = open_lines(OUT + ".state", "OUT")
        if not rows and len(lines) == 1:  # begun, nothing answered: other settings are welcome
            self.state.truncate(0)
            lines = []
        decisive = {name: globals()[name] for name in DECISIVE}
        begun_with = lines[0]["settings"] if lines else decisive
        for name, value in begun_with.items():
            require(value == decisive[name],
                    f"OUT = {OUT} was begun with {name} = {value!r}, now {decisive[name]!r}: give another "
                    "OUT")
        if not lines:
            append_line(self.state, {"settings": decisive})
        self.done = {row_key({**row, "messages": row["messages"][:-1]}) for row in rows}
        self.done |= {line["left_out"] for line in lines[1:]}
        counts["there already"] = len(rows)
        counts["not round-trip"] = len(lines[1:])
        counts["cut"] = sum(row["finish_reason"] == "length" for row in rows)

    def add(self, row, message, finish_reason):
        with self.lock:
            self.counts["new"] += 1
            self.counts["cut"] += finish_reason == "length"
            messages = row["messages"] + [message]
            append_line(self.file, {**row, "messages": messages, "finish_reason": finish_reason})

    def leave_out(self, key):
        self.counts["not round-trip"] += 1
        append_line(self.state, {"left_out": key})

    def close(self):
        for file in (self.file, self.state):
            os.fsync(file.fileno())
            file.close()


# ---------------------------------------------------------------------------------------------- a server


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


def request_of(row):
    """The body of a request: in OpenAI's form, the arguments of calls are text."""
    messages = []
    for message in row["messages"]:
        if "tool_calls" in message:
            calls = []
            for n, call in enumerate(message["tool_calls"]):
                function = call["function"]
                function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
                calls.append({"id": f"call_{n}", **call, "function": function})
            message = {**message, "tool_calls": calls}
        messages.append(message)
    body = {"model": MODEL, "messages": messages, "max_tokens": MAX_NEW_TOKENS, "temperature": TEMPERATURE,
            "top_p": TOP_P}
    if "tools" in row:
        body["tools"] = row["tools"]
    if CHAT_TEMPLATE_KWARGS:
        body["chat_template_kwargs"] = CHAT_TEMPLATE_KWARGS
    return body


def read_reply(data):
    """The message and its finish_reason; thinking and tool calls are part of what the target produced."""
    choice = json.loads(data)["choices"][0]
    if choice["finish_reason"] not in ("stop", "length", "tool_calls"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}")
    reply = choice["message"]
    message = {"role": "assistant", "content": reply.get("content") or ""}
    thought = reply.get("reasoning_content") or reply.get("reasoning")
    if thought:
        message["reasoning_content"] = thought
    if reply.get("tool_calls"):
        message["tool_calls"] = reply["tool_calls"]
    return message, choice["finish_reason"]


def ask_server(row, given_up):
    """-> (message, finish_reason); Failed."""
    body = request_of(row)
    reason = ""
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
    failed = {}
    given_up = threading.Event()
    lock = threading.Lock()
    in_a_row = 0

    def answer_one(row):
        """In a thread of the pool. Written and counted before it asks for another row: a kill costs no more
        answers than there are threads, nor does a server that is gone."""
        nonlocal in_a_row
        try:
            message, finish_reason = ask_server(row, given_up)
        except Failed:
            with lock:
                in_a_row += 1
                if in_a_row >= MAX_FAILED_IN_A_ROW:
                    given_up.set()
            raise
        output.add(row, message, finish_reason)
        with lock:
            in_a_row = 0

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        futures = {pool.submit(answer_one, row): key for key, row in rows.items()}
        try:
            for future in tqdm(as_completed(futures), total=len(rows), unit="row", disable=None):
                try:
                    future.result()
                except Failed as error:
                    failed[futures[future]] = str(error)
        except BaseException:  # Ctrl-C, a full disk: don't go on asking
            given_up.set()
            raise
    return failed


# ---------------------------------------------------------------------------------------- a local target


class LocalTarget:
    """A target in this process, its tokenizer, and the trainer's reading of its chats."""

    def __init__(self):
        from dflash_trainer import generating  # torch: not needed with a server
        from dflash_trainer.answer_mask import AnswerFinder
        from dflash_trainer.target_config import end_tokens
        self.model, self.tokenizer = generating.load_generator(TARGET, DEVICE, SEED)
        self.finder = AnswerFinder(self.tokenizer, CHAT_TEMPLATE_KWARGS, end_tokens(TARGET, self.tokenizer))

    def encode(self, text):
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def prompt_ids(self, row):
        """BadLine where the chat template refuses it."""
        chat, _ = self.finder.template.rendered(chat_of(row))
        return self.encode(self.finder.template.render(chat.messages, chat.tools, prompt=True))

    def is_roundtrip(self, row, message, ended, ids):
        """Whether the trainer finds these very ids, the prompt's and the answer's, in the finished row."""
        chat = chat_of({**row, "messages": row["messages"] + [message]})
        if not ended:
            chat = chat._replace(cut=frozenset([len(row["messages"])]))
        try:
            text, _ = self.finder.find(chat)
        except BadLine:
            return False
        return self.encode(text)[:len(ids)] == ids


def chat_of(row):
    calls = [call for message in row["messages"] for call in message.get("tool_calls", ())]
    texts = [json.dumps(call["function"]["arguments"], ensure_ascii=False) for call in calls]
    return Chat(row["messages"], row.get("tools"), texts, "", frozenset(), frozenset())


def answer_locally(rows, output, local):
    """Answers every row; returns key -> reason of those that the chat template refuses."""
    import torch

    from dflash_trainer.generating import generate
    prompts = {}
    failed = {}
    for key, row in rows.items():
        try:
            prompts[key] = local.prompt_ids(row)
        except BadLine as error:
            failed[key] = str(error)
    longest_first = sorted(prompts, key=lambda key: -len(prompts[key]))  # too large a BATCH fails early
    with tqdm(total=len(longest_first), unit="row", disable=None) as bar:
        for start in range(0, len(longest_first), BATCH):
            keys = longest_first[start:start + BATCH]
            torch.manual_seed(int(keys[0][:12], 16) + SEED)  # other numbers in each batch, resumed or not
            batch = [prompts[key] for key in keys]
            answers = generate(local.model, batch, MAX_NEW_TOKENS, TEMPERATURE, TOP_P)
            for key, (ids, ended) in zip(keys, answers):
                said = ids[:-1] if ended else ids
                text = local.tokenizer.decode(said, clean_up_tokenization_spaces=False)
                message = {"role": "assistant", "content": text}
                if ROUNDTRIP and not local.is_roundtrip(rows[key], message, ended, prompts[key] + ids):
                    output.leave_out(key)
                else:
                    output.add(rows[key], message, "stop" if ended else "length")
            bar.update(len(keys))
    return failed


# -------------------------------------------------------------------------------------------------- main


def report(counts, rows, failed, seconds):
    """Prints what became of the rows -> exit code."""
    for key, reason in failed.items():
        if reason:
            question = json.dumps(rows[key]["messages"][-1].get("content"))[:80]
            print(f"failed: {question} {reason}", file=sys.stderr)
    parts = ("there already", "cut", "not round-trip", "bad lines", "duplicates")
    known = ", ".join(f"{counts[part]} {part}" for part in parts)
    print(f"{OUT}: {counts['there already'] + counts['new']} rows, {known}, {len(failed)} failed; "
          f"{counts['new']} new in {seconds:.1f} s, {counts['new'] / seconds:.1f} rows/s")
    if failed:
        print(f"error: {len(failed)} rows failed (listed above): the same command asks for them again",
              file=sys.stderr)
    return settings.EXIT_ERROR if failed else 0


def regenerate():
    check_settings()
    counts = Counter()
    rows = read_prompts(counts)
    try:
        with closing(Output(counts)) as output:
            local = LocalTarget() if TARGET else None
            todo = {key: row for key, row in rows.items() if key not in output.done}
            began = time.monotonic()
            failed = answer_locally(todo, output, local) if TARGET else answer_by_server(todo, output)
            seconds = time.monotonic() - began + 1e-9
    except KeyboardInterrupt:
        print("regenerate: stopped; the same command goes on", file=sys.stderr)
        os._exit(130)  # threads may still wait for a reply
    return report(counts, rows, failed, seconds)


def main(argv):
    return settings.run_program(sys.modules[__name__], regenerate, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
