"""Any chat file -> token ids and turns, tokenised once into a memory-mapped cache.

    resolve_files -> read_lines -> parse_line     JSONL lines in four forms, each fault counted with a reason
    supervise                                     which tokens the assistant said, on the final token sequence
    build_conversations -> Conversations          several processes, one cache; a second run starts at once

The trainer's reader: `python train_dflash.py inspect DATA=...` shows what it makes of a file.
"""
import fcntl
import functools
import glob
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import re
import shutil
import signal
import zlib
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import numpy as np
import transformers
from tqdm import tqdm
from transformers.utils.chat_template_utils import render_jinja_template

from flex_utils import UserError, refusing

DATA_VERSION = 2       # raise it when a change below changes any token or turn: caches are made anew
SMALL_FILE = 16 << 20  # bytes; smaller files are known by their content
PER_PROCESS = 4 << 20  # bytes of input that are worth another process: each takes seconds to start
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
         "bot": "assistant", "function": "tool", "observation": "tool", "function_response": "tool"}
REASONING = "reasoning_content", "reasoning", "thinking"
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around sentinels: Unicode noncharacters, meant for a program's own use
SENTINEL = re.compile(f"{OPEN}(\\d+){CLOSE}")
EMPTY_BLOCK = re.compile(r"([<\[◁]\W?)(\w+)(\W?[>\]▷])\s*\1/\2\3\s*")  # such as <think>\n\n</think>\n\n


class Conversation(NamedTuple):
    """One JSONL line, cut to SEQ_LEN."""
    ids: np.ndarray   # int32 (n,)
    turn: np.ndarray  # int16 (n,): 0 not supervised, t >= 1 said by the assistant in its turn t
    source: str       # "" if the line has none
    cut: bool         # finish_reason "length": the last answer has no end of turn of its own


class BadRow(Exception):
    """A line that can't be used, with the reason: skipped and counted."""


def unreadable(error):
    raise error


def resolve_files(spec, what="DATA"):
    """files_of, for which what can't be read is a UserError."""
    with refusing(f"{what} = {spec}: can't be read", OSError):
        files = files_of(spec, what)
        for path in files:
            open(path).close()
    return files


def files_of(spec, what):
    """File, directory, glob, list or comma-separated mix of them -> [Path], each once, directories sorted."""
    words = [str(s) for s in spec] if isinstance(spec, (list, tuple)) else [str(spec)]
    if len(words) == 1 and (not words[0] or not Path(words[0]).expanduser().exists()):
        words = [w.strip() for w in words[0].split(",") if w.strip()]
    files = {}
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            found = [Path(folder, name) for folder, _, names in os.walk(path, onerror=unreadable)
                     for name in names if name.endswith((".jsonl", ".jsonl.gz"))]
        else:
            found = [path] if path.is_file() else [Path(p) for p in glob.glob(str(path), recursive=True)]
        found = sorted(p for p in found if p.is_file())
        if not found:
            wrong = "no .jsonl or .jsonl.gz in directory" if path.is_dir() else "no such file"
            raise UserError(f"{what} = {spec}: {wrong}: {word}. To make one: bash run.sh tools/regenerate.py "
                            f"PROMPTS=prompts.jsonl TARGET=<model> OUT={word}")
        files.update(dict.fromkeys(found))
    if not files:
        raise UserError(f"{what} = {spec!r} names no file")
    return list(files)


def read_lines(path, bar=None):
    """Yields (line number from 1, bytes) of lines that aren't blank; UserError for what isn't JSONL."""
    try:
        with open(path, "rb") as raw:
            lines, head, at = gzip.GzipFile(fileobj=raw) if path.name.endswith(".gz") else raw, None, 0
            for number, line in enumerate(lines, 1):
                line = line.removeprefix(b"\xef\xbb\xbf").strip() if number == 1 else line.strip()
                if bar is not None:
                    bar.update(raw.tell() - at)
                    at = raw.tell()
                if line and head is None:
                    head = check_head(path, line)
                if line:
                    yield number, line
    except (OSError, EOFError, zlib.error) as e:
        raise UserError(f"{path}: can't be read to its end: {e}") from None
    if head is None:
        raise UserError(f"{path}: is empty; JSONL with one conversation a line is expected")


def check_head(path, line):
    """Its first line tells a file that isn't JSONL from one with a bad line."""
    if line[:1] == b"[":
        raise UserError(f"{path}: is one JSON array, not a conversation a line: jq -c '.[]' {path}")
    magic = line.startswith((b"\x1f\x8b", b"PK", b"\xff\xfe", b"\xfe\xff", b"PAR1"))
    if line[:1] != b"{" and (magic or b"\0" in line):
        raise UserError(f"{path}: is a binary file (compressed, parquet, UTF-16?), not UTF-8 JSONL")
    return line


# ---- one line -> its normal form


def load_json(text, name="the line"):
    def refuse(constant):
        raise BadRow(f"{name} has {constant}, which is not JSON")
    try:
        return json.loads(text, parse_constant=refuse)
    except UnicodeDecodeError:
        raise BadRow("invalid UTF-8") from None
    except RecursionError:
        raise BadRow(f"{name} is nested too deeply") from None
    except ValueError as e:
        raise BadRow(f"{name} is not JSON: {str(e).split(':')[0]}") from None


def parse_line(row):
    """A line's JSON value -> {input_ids, loss_mask} or {messages, tools}, with source, finish_reason."""
    if not isinstance(row, dict):
        raise BadRow(f"a JSON object is expected, this is a {type(row).__name__}")
    source = row["source"] if isinstance(row.get("source"), str) else ""
    source = source.encode(errors="replace").decode()  # half a surrogate pair can't be printed
    known = {"source": source, "finish_reason": row.get("finish_reason")}
    if "input_ids" in row or "loss_mask" in row:
        return {**parse_ids(row.get("input_ids"), row.get("loss_mask")), **known}
    if "messages" in row or "conversations" in row:
        turns = row["messages"] if "messages" in row else row["conversations"]
    elif "prompt" in row and "response" in row:
        asked = row["prompt"]
        turns = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
        turns = [*turns, {"role": "assistant", "content": row["response"]}]
    elif "prompt" in row or "response" in row:
        raise BadRow("prompt without response" if "prompt" in row else "response without prompt")
    else:
        raise BadRow("none of messages, conversations, prompt + response, input_ids + loss_mask")
    if not isinstance(turns, list):
        raise BadRow(f"the messages are a {type(turns).__name__}, a list is expected")
    if isinstance(row.get("system"), str) and row["system"]:
        turns = [{"role": "system", "content": row["system"]}, *turns]
    messages = [parse_message(m) for m in turns]
    check_messages(messages, turns)
    return {"messages": messages, "tools": parse_tools(row.get("tools")), **known}


def parse_ids(ids, mask):
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise BadRow("input_ids and loss_mask must both be lists")
    if len(ids) != len(mask):
        raise BadRow(f"input_ids has {len(ids)} entries, loss_mask {len(mask)}")
    if not all(type(i) is int for i in ids):
        raise BadRow("input_ids holds something that is not an integer")
    if not all(isinstance(m, (int, float)) and m in (0, 1) for m in mask):
        raise BadRow("loss_mask holds something other than 0 and 1")
    return {"input_ids": ids, "loss_mask": mask}


def parse_message(message):
    """role/content or from/value -> keys that templates read, text joined, tool arguments as objects."""
    if not isinstance(message, dict):
        raise BadRow(f"a message is a {type(message).__name__}, an object is expected")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise BadRow("a message has no role")
    out = {"role": ROLES.get(role, role), "content": parse_text(message.get("content", message.get("value")))}
    calls = message.get("tool_calls")
    if role == "function_call":
        out, calls = {"role": "assistant", "content": ""}, [load_json(out["content"], "a function_call")]
    if out["role"] not in ("system", "developer", "user", "assistant", "tool"):
        raise BadRow(f"unknown role {role[:40]!r}")
    if calls:
        out["tool_calls"] = [parse_call(c) for c in (calls if isinstance(calls, list) else [calls])]
    for key in REASONING:
        if message.get(key):
            out[key] = parse_text(message[key])
    out.update({k: message[k] for k in ("name", "tool_call_id") if isinstance(message.get(k), str)})
    return out


def parse_text(content):
    if content is None:
        return ""
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type", "text") != "text":
            raise BadRow(f"content part of type {str(part['type'])[:40]!r}: only text can be used")
        if not isinstance(part, str) and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise BadRow("a content part has no text")
    if isinstance(content, list):
        content = "".join(p if isinstance(p, str) else p["text"] for p in content)
    if not isinstance(content, str):
        raise BadRow(f"content is a {type(content).__name__}, text is expected")
    return content


def parse_call(call):
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise BadRow("a tool call has no function name")
    arguments = function.get("arguments") or {}
    arguments = load_json(arguments, "a tool call's arguments") if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise BadRow(f"a tool call's arguments are a {type(arguments).__name__}, an object is expected")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **known, "function": {"name": name.strip(), "arguments": arguments}}


def parse_tools(tools):
    tools = load_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise BadRow("tools is not a list of objects")
    return tools or None


def check_messages(messages, given):
    """BadRow with a reason of its own for each way to have no answer."""
    answers = [g for m, g in zip(messages, given) if m["role"] == "assistant"]
    if not messages:
        raise BadRow("no messages")
    if all(m["role"] in ("system", "developer") for m in messages):
        raise BadRow("only a system message")
    if not answers:
        raise BadRow("no assistant message")
    if not any(m["content"].strip() or "tool_calls" in m or any(m.get(k, "").strip() for k in REASONING)
               for m in messages if m["role"] == "assistant"):
        null = all(g.get("content", g.get("value")) is None for g in answers)
        raise BadRow("the answer is null or missing" if null else "the answer is empty")


# ---- which tokens the assistant said, on the final token sequence


def render_chat(tokenizer, messages, tools, template_kwargs, prompt=False):
    """The template's text. What a template raises (raise_exception, a missing field) is the row's fault."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **template_kwargs)
    except Exception as e:
        raise BadRow(f"chat template: {(str(e).strip() or type(e).__name__).splitlines()[0][:200]}") from None


def supervise(tokenizer, messages, tools, template_kwargs, cut):
    """Messages -> (ids int32 (n,), turn int16 (n,)), found on the tokens of the whole rendered conversation.

    Text between generation tags where the template has them, else what skeleton_spans finds. A turn
    runs from where a generation prompt ends to its end of turn, so it holds what the model itself must emit
    (<tool_call>, channel names). BadRow where renderings don't agree: such a mask is never used.
    """
    if tokenizer is None or not tokenizer.chat_template:
        raise UserError("TARGET: has no tokenizer with a chat template; input_ids + loss_mask rows need none")
    final = render_chat(tokenizer, messages, tools, template_kwargs)
    if OPEN in final or CLOSE in final:
        raise BadRow("mask: the text holds U+FDD0 or U+FDD1, which mark answers here")
    called = [call["function"]["name"] for m in messages for call in m.get("tool_calls", ())]
    if not all(name in final for name in called):
        raise BadRow("the chat template leaves tool calls out")
    try:
        final.encode()
    except UnicodeEncodeError:
        raise BadRow("half of a surrogate pair in the text") from None
    template = tokenizer.get_chat_template(None, tools)
    special = special_tokens(tokenizer)
    if re.search(r"\{%-?\s*generation\s*-?%\}", template):
        spans = tagged_spans(tokenizer, template, messages, tools, template_kwargs, special, cut)
    else:
        spans = skeleton_spans(tokenizer, template, messages, tools, template_kwargs, special, cut, final)
    return tokens_of(tokenizer, final, spans)


def special_tokens(tokenizer):
    """Pattern of any special token; matches nothing when there are none."""
    words = {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    words = sorted(words | set(tokenizer.all_special_tokens), key=len, reverse=True)
    return re.compile("|".join(re.escape(w) for w in words if w) or "(?!)")


def tokens_of(tokenizer, final, spans):
    """Spans (turn, start, end of the text, end of turn) in characters -> ids, turn.

    A token across a span's border is left out: the target, prompted up to that border, splits it differently.
    """
    encoded = tokenizer(final, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids = np.array(encoded["input_ids"], np.int32)
    begin, end = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2).T
    # trim_offsets (Llama 3) gives tokens of white space no width: they begin where the token before ended
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]]) if len(end) else end
    begin = np.where(begin == end, np.minimum(begin, before), begin)
    turn = np.zeros(len(ids), np.int16)
    for t, start, text_end, turn_end in spans:
        # an end of turn may swallow the newline after it (rstrip), so only its beginning counts
        turn[(begin >= start) & (begin < turn_end) & ((end <= text_end) | (begin >= text_end))] = t
        if not (turn == t).any():
            raise BadRow("mask: an answer that lies inside one token of the template")
    return ids, turn


def tagged_spans(tokenizer, template, messages, tools, template_kwargs, special, cut):
    """Spans between {% generation %} tags; tags with nothing between them belong to one turn."""
    (final,), (tagged,) = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=template, return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **template_kwargs})
    said = [m for m in messages if m["role"] == "assistant"]
    spans, turn, last = [], 0, -1
    for a, b in tagged:
        turn, last, text = turn + (a != last), b, final[a:b].rstrip()
        block = None if any(map(says_empty_block, said)) else EMPTY_BLOCK.match(text)
        start = a + len(block.group()) if block else a
        closers = [m for m in special.finditer(text) if m.end() == len(text)]
        closer = closers[0] if closers else special.match(final, b)
        if text and closer:
            at = a if closers else 0
            spans.append((turn, start, at + closer.start(), at + closer.end()))
        elif text:
            spans.append((turn, start, b, b))
    if not spans or said[-1]["content"].split(">")[-1].strip() not in "".join(final[a:b] for a, b in tagged):
        raise BadRow("mask: the last answer is not between the template's generation tags")
    return [*spans[:-1], (*spans[-1][:3], spans[-1][2])] if cut else spans


def says_empty_block(message):
    return any(EMPTY_BLOCK.match(message.get(k, "").lstrip()) for k in ("content", *REASONING))


@functools.lru_cache
def tags_of(template):
    """Pattern of every tag that a template mentions: what it can look for in an answer's text."""
    tags = set(re.findall(r"<[^<>\s\"'{}]{1,40}>|\[/?\w+\]|◁/?\w+▷", template)) or {OPEN}
    return re.compile("(" + "|".join(re.escape(t) for t in sorted(tags, key=len, reverse=True)) + ")")


def skeleton_of(messages, template):
    """Assistant text -> numbered sentinels. -> (messages, texts, [message number], [is a tool's name]).

    White space at the ends and the template's own tags stay as they are, so a template that strips, or that
    looks for </think>, treats the skeleton as it treats the text.
    """
    texts, owner, named, out = [], [], [], []

    def hide(text, m, name=False):
        parts = tags_of(template).split(text)
        for n, part in enumerate(parts):
            if n % 2 == 0 and part.strip():
                parts[n] = part.replace(part.strip(), f"{OPEN}{len(texts)}{CLOSE}", 1)
                texts.append(part.strip()), owner.append(m), named.append(name)
        return "".join(parts)

    for m, message in enumerate(messages):
        if message["role"] == "assistant":
            message = {k: hide(v, m) if k in ("content", *REASONING) else v for k, v in message.items()}
            functions = [call["function"] for call in message.get("tool_calls", ())]
            functions = [{**f, "name": hide(f["name"], m, True)} for f in functions]
            calls = [{**call, "function": f} for call, f in zip(message.get("tool_calls", ()), functions)]
            message.update({"tool_calls": calls} if calls else {})
        out.append(message)
    return out, texts, owner, named


def align(final, parts, texts):
    """Walk the final text along its skeleton: [(start, end)] of each sentinel. BadRow where they differ."""
    spans, at = [], 0
    for n, part in enumerate(parts):
        text = texts[int(part)] if n % 2 else part
        if not final.startswith(text, at):
            raise BadRow("mask: the template rewrites an answer in a way that can't be followed")
        if n % 2:
            spans.append((at, at + len(text)))
        at += len(text)
    if at != len(final):
        raise BadRow("mask: the template adds text that depends on the answer")
    return spans


def skeleton_spans(tokenizer, template, messages, tools, template_kwargs, special, cut, final):
    """Spans for a template without tags. One rendering with sentinels says where each answer's text is in the
    final text; renderings of the conversation's beginnings, where a turn's prompt ends and what closes it."""
    skeleton, texts, owner, named = skeleton_of(messages, template)

    def split(end, prompt=False, extra=()):
        text = render_chat(tokenizer, [*skeleton[:end], *extra], tools, template_kwargs, prompt)
        return SENTINEL.split(text)

    parts, spans = split(len(skeleton)), []
    places, order = align(final, parts, texts), [int(p) for p in parts[1::2]]
    answers = [m for m, message in enumerate(messages) if message["role"] == "assistant"]
    for turn, m in enumerate(answers, 1):
        mine = [j for j, t in enumerate(order) if owner[t] == m and t not in order[:j]]
        if not mine:  # an empty answer, or a turn that the template drops
            continue
        first, last = mine[0], mine[-1]
        if any(owner[t] != m for t in order[first:last + 1]):
            raise BadRow("mask: other text inside an answer")
        start = places[first][0] - produced_before(parts, first, split, m, says_empty_block(messages[m]))
        ends = 0, 0
        if not (cut and m == answers[-1]):
            closed = split(m + 1) if m + 1 < len(messages) else parts
            ends = end_of_turn(parts, last, closed, special, named[order[last]])
        spans.append((turn, start, places[last][1] + ends[0], places[last][1] + ends[1]))
    return spans


def produced_before(parts, first, split, m, said_itself):
    """Number of characters before sentinel `first` that the model emits itself: what follows the generation
    prompt, without an empty thinking block that the template adds."""
    plain, prompt = (split(m), split(m, True)) if m else ([""], [""])
    before = parts[2 * first]
    if prompt == plain:  # no generation prompt here: the template's text before a plain answer is the header
        probe = str(10 ** 9)
        prompt = split(m, extra=[{"role": "assistant", "content": f"{OPEN}{probe}{CLOSE}"}])
        prompt = prompt[:prompt.index(probe)] if probe in prompt else [""]
        prompt[-1] = EMPTY_BLOCK.sub("", prompt[-1]).rstrip(" ")  # a blank begins a SentencePiece token
    if parts[:2 * first][-1:] != prompt[:-1][-1:]:
        raise BadRow("mask: the text before an answer depends on what follows it")
    common = shared(before, prompt[-1])
    for block in EMPTY_BLOCK.finditer(before):
        if not said_itself and block.end() > common:
            common = block.end()
    return len(before) - common


def shared(text, prompt):
    """Length of their common beginning, not ending inside a tag or word where they part."""
    if text.startswith(prompt):
        return len(prompt)
    n = len(os.path.commonprefix([text, prompt]))
    inside = re.search(r"(<[^<>\s]*|\[[^\[\]\s]*|\w+)\Z", text[:n])
    return inside.start() if inside else n


def end_of_turn(parts, last, closed, special, is_name):
    """-> (begin, end) of the end of turn, in characters from the last sentinel. `closed`: up to this turn."""
    after, sentinel = parts[2 * last + 2], parts[2 * last + 1]
    same = [n for n in range(1, len(closed), 2) if closed[n] == sentinel]
    if not same or same[0] + 2 != len(closed):
        raise BadRow("mask: an answer's end is not where its turn ends")
    closing, skip = closed[-1], len(closed[-1]) - len(closed[-1].lstrip())
    found = list(special.finditer(closing))
    if not found:  # no token of its own: the words of the template that close a turn, without white space
        closing = closing.rstrip()
        if not after.startswith(closing):
            raise BadRow("mask: the end of an answer depends on what follows it")
        return 0, len(closing)
    # text is closed at once; a tool's name is followed by arguments and markers first
    at = found[0].start() if found[0].start() == skip and not is_name else found[-1].start()
    closer = special.match(after, at)
    if not closer or after[:at] != closing[:at]:
        raise BadRow("mask: the end of an answer depends on what follows it")
    return at, closer.end()


# ---- lines -> memory-mapped tokens


def tokenise_line(line, settings):
    """One line -> Conversation, or None if it is thin. BadRow."""
    row = parse_line(load_json(line))
    cut = row["finish_reason"] == "length"
    if "input_ids" in row:
        outside = [i for i in row["input_ids"] if not 0 <= i < settings.vocab]
        if outside:
            raise BadRow(f"token id {outside[0]} is outside the vocabulary of {settings.vocab}")
        ids, mask = np.array(row["input_ids"], np.int32), np.array(row["loss_mask"], bool)
        turn = np.cumsum(mask & ~np.concatenate([[False], mask[:-1]])) * mask
    else:
        chat = row["messages"], row["tools"], settings.template_kwargs
        ids, turn = supervise(settings.tokenizer, *chat, cut)
    ids, turn = ids[:settings.seq_len], turn[:settings.seq_len]
    if turn.max(initial=0) > np.iinfo(np.int16).max:
        raise BadRow(f"{turn.max()} assistant turns")
    thin = not ((turn[:-1] > 0) & (turn[:-1] == turn[1:])).any()
    return None if thin else Conversation(ids, turn.astype(np.int16), row["source"], cut)


def tokenise_lines(chunk, settings):
    """[(file, line number, bytes)] -> (conversations, bad rows, number of thin ones)."""
    done, bad = [], []
    for file, number, line in chunk:
        try:
            done.append(tokenise_line(line, settings))
        except BadRow as e:
            bad.append({"file": file, "line": number, "reason": str(e)})
    used = [c for c in done if c is not None]
    return used, bad, len(done) - len(used)


WORKER_SETTINGS = None  # set in each worker process


def start_tokeniser(settings):
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    globals()["WORKER_SETTINGS"] = settings


def tokenise_in_worker(chunk):
    return tokenise_lines(chunk, WORKER_SETTINGS)


def tokenise_files(files, what, settings):
    """Yields tokenise_lines of all lines, in order, by one process a core where that pays."""
    size = sum(f.stat().st_size for f in files)
    workers = min(len(os.sched_getaffinity(0)), 32, size // PER_PROCESS)
    with tqdm(total=size, unit="B", unit_scale=True, desc=f"tokenising {what}", mininterval=2,
              disable=size < PER_PROCESS) as bar:
        lines = ((str(f), number, line) for f in files for number, line in read_lines(f, bar))
        chunks = iter(lambda: list(itertools.islice(lines, 128)), [])
        if workers <= 1:
            yield from (tokenise_lines(chunk, settings) for chunk in chunks)
            return
        # spawn: a fork of a process with threads can hang. Not a Pool: it waits for ever for a killed worker
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, start_tokeniser, (settings,)) as pool:
            waiting = deque(pool.submit(tokenise_in_worker, c) for c in itertools.islice(chunks, 4 * workers))
            while waiting:
                yield waiting.popleft().result()
                waiting.extend(pool.submit(tokenise_in_worker, c) for c in itertools.islice(chunks, 1))


class Conversations:
    """The tokens of all conversations, memory-mapped: nothing is read before it is asked for."""

    def __init__(self, directory):
        self.stats = json.loads((directory / "stats.json").read_text())
        self.fingerprint = self.stats["fingerprint"]  # of tokens and turns: the same for a copied file
        self.lengths, self.supervised, self.source_number, self.cut = (
            np.load(directory / f"{name}.npy") for name in ("lengths", "supervised", "source", "cut"))
        self.offsets = np.concatenate([[0], np.cumsum(self.lengths)])
        self.ids, self.turn = (
            np.memmap(directory / name, kind, "r") if len(self.lengths) else np.zeros(0, kind)
            for name, kind in (("ids.bin", np.int32), ("turn.bin", np.int16)))
        self.source_names = json.loads((directory / "sources.json").read_text())
        self.bad_rows = [json.loads(line) for line in (directory / "bad.jsonl").read_text().splitlines()]

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, i):
        span, source = slice(self.offsets[i], self.offsets[i + 1]), self.source_names[self.source_number[i]]
        return Conversation(np.array(self.ids[span]), np.array(self.turn[span]), source, bool(self.cut[i]))


class Settings(NamedTuple):
    """All that the tokens depend on beside the files."""
    tokenizer: object        # of transformers; None: rows of input_ids + loss_mask alone
    seq_len: int             # tokens kept of a conversation
    template_kwargs: dict    # CHAT_TEMPLATE_KWARGS
    vocab: int               # token ids are below it


def build_conversations(spec, settings, max_bad_share, what="DATA", out=None, tick=lambda: None):
    """Files -> Conversations: tokenised once, then from the cache. UserError for too many malformed lines.

    stats: lines, rows, tokens, supervised, bad, thin (counts), reasons and sources (counts by name).
    `out`: the run's directory, for bad_rows.jsonl. `tick` is called as lines are done.
    """
    files = resolve_files(spec, what)
    if settings.tokenizer is not None and not settings.tokenizer.is_fast:
        raise UserError("TARGET: its tokenizer has no character offsets (it is not a fast one)")
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dflash_trainer"
    directory = root / f"tokens_{cache_key(files, settings)}"
    if not directory.exists():
        try:
            build_cache(directory, files, what, settings, tick)
        except OSError as e:
            raise UserError(f"the token cache can't be written: {e}; XDG_CACHE_HOME moves it") from None
        except BrokenProcessPool:
            raise UserError(f"{what} = {spec}: a tokenising process was killed; out of memory?") from None
    conversations = Conversations(directory)
    report_bad(conversations, spec, what, settings.seq_len, max_bad_share, out)
    return conversations


def cache_key(files, settings):
    """Hash over all that the tokens depend on. A large file is known by its path, size and time of change."""
    key, t = hashlib.sha256(), settings.tokenizer
    for path in files:
        stat = path.stat()
        key.update(repr((str(path.resolve()), stat.st_size)).encode())
        key.update(path.read_bytes() if stat.st_size < SMALL_FILE else str(stat.st_mtime_ns).encode())
    rest = [DATA_VERSION, transformers.__version__, *settings[1:]]
    if t is not None:
        rest += [t.backend_tokenizer.to_str(), t.chat_template, t.special_tokens_map, len(t)]
    key.update(json.dumps(rest, sort_keys=True, default=str).encode())
    return key.hexdigest()[:24]


def build_cache(directory, files, what, settings, tick):
    """Tokenise into a directory of another name, renamed when all is on the disk: never a killed build."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    for left in directory.parent.glob("tokens_*.tmp"):
        if not locked(left):  # its process was killed
            shutil.rmtree(left, ignore_errors=True)
    tmp = directory.with_name(f"{directory.name}.{os.getpid()}.tmp")
    tmp.mkdir()
    try:
        with open(tmp / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_cache(tmp, tokenise_files(files, what, settings), tick)
            for name in os.listdir(tmp):
                with open(tmp / name, "rb") as file:
                    os.fsync(file.fileno())
            if not directory.exists():  # another run may have made it meanwhile
                os.rename(tmp, directory)
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def locked(tmp):
    try:
        with open(tmp / "lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:  # held, or its directory is a moment old
        return True


def write_cache(tmp, results, tick):
    """All that Conversations reads. The tokens stream to the disk, in the order of the lines."""
    rows, numbers, reasons, thin = [], {"": 0}, Counter(), 0
    digest = hashlib.blake2b(digest_size=12)
    with (open(tmp / "ids.bin", "wb") as ids, open(tmp / "turn.bin", "wb") as turn,
          open(tmp / "bad.jsonl", "w") as bad):
        for used, bad_rows, thin_rows in results:
            tick()
            for c in used:
                for part, file in ((c.ids, ids), (c.turn, turn)):
                    file.write(part.tobytes())
                    digest.update(part.tobytes())
                number = numbers.setdefault(c.source, len(numbers))
                rows.append((len(c.ids), np.count_nonzero(c.turn), number, c.cut))
            bad.writelines(json.dumps(b) + "\n" for b in bad_rows)
            reasons.update(b["reason"] for b in bad_rows)
            thin += thin_rows
    table = np.array(rows, np.int64).reshape(-1, 4)
    digest.update(table[:, 0].tobytes())
    kinds = {"lengths": np.int64, "supervised": np.int64, "source": np.int32, "cut": bool}
    for (name, kind), column in zip(kinds.items(), table.T):
        np.save(tmp / f"{name}.npy", column.astype(kind))
    names, bad_count = list(numbers), reasons.total()
    (tmp / "sources.json").write_text(json.dumps(names))
    (tmp / "stats.json").write_text(json.dumps({
        "lines": len(rows) + bad_count + thin, "rows": len(rows), "bad": bad_count, "thin": thin,
        "tokens": int(table[:, 0].sum()), "supervised": int(table[:, 1].sum()),
        "reasons": dict(reasons.most_common(50)),
        "sources": {names[n]: k for n, k in Counter(table[:, 2].tolist()).most_common(50)},
        "fingerprint": digest.hexdigest()}))


def report_bad(conversations, spec, what, seq_len, max_bad_share, out):
    """Ten bad lines to the screen, all to OUT/bad_rows.jsonl; UserError for too many, or nothing left."""
    bad, s = conversations.bad_rows, conversations.stats
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        with open(Path(out) / "bad_rows.jsonl", "w" if what == "DATA" else "a") as file:
            file.writelines(json.dumps({"setting": what, **b}) + "\n" for b in bad)
    for b in bad[:10]:
        print(f"{what}: bad line {b['file']}:{b['line']}: {b['reason']}")
    counts = f"{len(bad)} malformed, {s['thin']} without two supervised tokens in a row"
    if bad or s["thin"]:
        print(f"{what}: {s['rows']} of {s['lines']} lines used, {counts}")
    first = f"; the first: {bad[0]['file']}:{bad[0]['line']}: {bad[0]['reason']}" if bad else ""
    if not len(conversations):
        raise UserError(f"{what} = {spec}: none of {s['lines']} lines can be used within SEQ_LEN = {seq_len}"
                        f": {counts}{first}")
    if s["lines"] >= 1000 and len(bad) > max_bad_share * s["lines"]:
        raise UserError(f"{what} = {spec}: {len(bad)} of {s['lines']} lines are malformed, a share of "
                        f"{len(bad) / s['lines']:.4f}, more than MAX_BAD_SHARE = {max_bad_share}{first}")


def overlap(train, held_out):
    """-> (different conversations of held_out that are in train too, token for token; all different ones).
    Tokens are read where a conversation's length and three of its tokens agree: few of a million."""
    def keys(c):
        key = c.lengths.copy()
        for quarter in (1, 2, 3):
            key = key * 1000003 + c.ids[c.offsets[:-1] + c.lengths * quarter // 4]
        return key

    wanted = {held_out[i].ids.tobytes() for i in range(len(held_out))}
    found = np.flatnonzero(np.isin(keys(train), keys(held_out)))
    return len(wanted & {train[int(i)].ids.tobytes() for i in found}), len(wanted)


# ---- a look at the data


def render(c, tokenizer, marks=("⟦", "⟧")):
    """A conversation's text with its supervised stretches between marks."""
    edges = np.flatnonzero(np.diff(c.turn, prepend=c.turn[:1])).tolist()
    text = ""
    for a, b in zip([0, *edges], [*edges, len(c.ids)]):
        piece = tokenizer.decode(c.ids[a:b].tolist(), skip_special_tokens=False)
        text += f"{marks[0]}{piece}{marks[1]}" if c.turn[a] else piece
    return text
