"""Messages -> token ids and turns: which tokens the assistant said, on the final token sequence.
"""
import functools
import os
import re

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from dflash_trainer.chat_lines import REASONING, BadLine
from dflash_trainer.errors import UserError

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # around sentinels: Unicode noncharacters, meant for a program's own use
SENTINEL = re.compile(f"{OPEN}(\\d+){CLOSE}")
EMPTY_BLOCK = re.compile(r"([<\[◁]\W?)(\w+)(\W?[>\]▷])\s*\1/\2\3\s*")  # such as <think>\n\n</think>\n\n


def render_chat(tokenizer, messages, tools, template_kwargs, prompt=False):
    """The template's text. What a template raises (raise_exception, a missing field) is the row's fault."""
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **template_kwargs)
    except Exception as e:
        raise BadLine(f"chat template: {(str(e).strip() or type(e).__name__).splitlines()[0][:200]}") from None


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
        raise BadLine("mask: the text holds U+FDD0 or U+FDD1, which mark answers here")
    called = [call["function"]["name"] for m in messages for call in m.get("tool_calls", ())]
    if not all(name in final for name in called):
        raise BadLine("the chat template leaves tool calls out")
    try:
        final.encode()
    except UnicodeEncodeError:
        raise BadLine("half of a surrogate pair in the text") from None
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
            raise BadLine("mask: an answer that lies inside one token of the template")
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
        raise BadLine("mask: the last answer is not between the template's generation tags")
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
            raise BadLine("mask: the template rewrites an answer in a way that can't be followed")
        if n % 2:
            spans.append((at, at + len(text)))
        at += len(text)
    if at != len(final):
        raise BadLine("mask: the template adds text that depends on the answer")
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
            raise BadLine("mask: other text inside an answer")
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
        raise BadLine("mask: the text before an answer depends on what follows it")
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
        raise BadLine("mask: an answer's end is not where its turn ends")
    closing, skip = closed[-1], len(closed[-1]) - len(closed[-1].lstrip())
    found = list(special.finditer(closing))
    if not found:  # no token of its own: the words of the template that close a turn, without white space
        closing = closing.rstrip()
        if not after.startswith(closing):
            raise BadLine("mask: the end of an answer depends on what follows it")
        return 0, len(closing)
    # text is closed at once; a tool's name is followed by arguments and markers first
    at = found[0].start() if found[0].start() == skip and not is_name else found[-1].start()
    closer = special.match(after, at)
    if not closer or after[:at] != closing[:at]:
        raise BadLine("mask: the end of an answer depends on what follows it")
    return at, closer.end()
