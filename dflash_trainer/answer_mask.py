r"""Chats -> text and the stretches of it that the assistant said.

    AnswerFinder.find(chat) -> (text, [Stretch])     in characters of the text that the chat template makes
    mask_tokens(offsets, stretches)                  -> turn number of each token

How: the conversation is rendered once more as a *skeleton*, in which every text is replaced by a numbered
mark. The skeleton says what the template writes between the texts, and walking the real text along it says
where each one stands. What the target itself emits around its texts (channel names, <tool_call>, its end of
turn) follows from two more renderings: of the prompt before an answer, and of the conversation that ends with
it.

    skeleton   <|im_start|>user\n[0]<|im_end|>\n<|im_start|>assistant\n[1]<|im_end|>\n
    text       <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n
    said                                                              ^^^^^^^^^^^^^^^^

Conversations of the same shape share a skeleton: what was learnt from one is kept (Layout), so most need a
single rendering. One rule decides what is refused: every piece of an assistant's message (its text, each call
with name and arguments, the last answer's thought) stands in the text as often as it was said, in its place.
"""
import functools
import json
import os
import re
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import NamedTuple

import numpy as np
from transformers.utils.chat_template_utils import _compile_jinja_template

from dflash_trainer.chat_lines import THOUGHT_KEYS, BadLine, Chat
from dflash_trainer.errors import UserError

# around a mark's number: Unicode noncharacters, meant for a program's own use
OPEN = "\ufdd0"
CLOSE = "\ufdd1"
MARK = re.compile(f"{OPEN}(\\d+){CLOSE}")
PROBE = f"{OPEN}{10 ** 9}{CLOSE}"
EMPTY_BLOCK = re.compile(r"([<\[◁]\W?)(\w+)(\W?[>\]▷])\s*\1/\2\3\s*")  # such as <think>\n\n</think>\n\n
THOUGHT_TAG = re.compile(r"[<\[◁|]+/?[\w:]*(?:think|thought|reason)\w*[>\]▷|]+", re.IGNORECASE)
THOUGHT_END = re.compile(r"\s*[<\[◁]/[\w:]*(?:think|thought|reason)\w*[>\]▷]\s*", re.IGNORECASE)
ONLY_TAGS = re.compile(r"(?:\s|<[^<>]*>|\[[^\[\]]*\]|◁[^◁▷]*▷)*")
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
TEMPLATE_DATE = "2026-01-01"  # what strftime_now writes, on every day: CHAT_TEMPLATE_KWARGS may name another
MOST_LAYOUTS = 2_000          # shapes that are remembered

TEXT, THOUGHT, CALL, ARGUMENTS, ASKED = "text", "thought", "tool call", "arguments of a tool call", "context"


class Stretch(NamedTuple):
    """What the assistant says in one turn, in characters of the text."""
    turn: int       # from 1
    start: int      # where the target's prompt ends
    text_end: int   # where its own text ends
    end: int        # where its end of turn ends: text_end if it has none


class Piece(NamedTuple):
    """A text that a mark stands for."""
    text: str
    message: int    # number of its message
    kind: str
    call: int       # number of the tool call in the message, or -1


class TemplateRefused(BadLine):
    """What a template raised: raise_exception, a missing field."""


class OthersRewritten(BadLine):
    """The text of a message that isn't the assistant's can't be followed: another way may do without."""


class TextInside(BadLine):
    """Words of others stand inside an answer: no way of making a skeleton helps."""


# -------------------------------------------------------------------------------------------- rendering


class ChatTemplate:
    """A tokenizer's chat template with all that shapes its text beside the messages."""

    def __init__(self, tokenizer, template_kwargs: dict):
        if tokenizer is None or not tokenizer.chat_template:
            raise UserError("TARGET: has no tokenizer with a chat template; input_ids + loss_mask rows need "
                            "none")
        self.tokenizer = tokenizer
        date = template_kwargs.get("strftime_now", TEMPLATE_DATE)
        try:
            day = datetime.fromisoformat(date)
        except (TypeError, ValueError):
            raise UserError(f"CHAT_TEMPLATE_KWARGS: strftime_now = {date!r}: a date such as 2026-01-31 is "
                            "expected") from None
        self.variables = {**tokenizer.special_tokens_map, **template_kwargs, "strftime_now": day.strftime}

        self.sources = {}

    def source(self, has_tools: bool) -> str:
        """Its text; some tokenizers have another one for conversations with tools."""
        if has_tools not in self.sources:
            self.sources[has_tools] = self.tokenizer.get_chat_template(None, [{}] if has_tools else None)
        return self.sources[has_tools]

    def render(self, messages: list, tools: list | None, prompt: bool = False,
               blocks: list | None = None) -> str:
        """The text of a conversation, with the generation prompt if `prompt`. `blocks` gets the (start, end)
        of what stands between {% generation %} tags. What a template raises is the row's fault: BadLine."""
        template = _compile_jinja_template(self.source(bool(tools)))
        data = {
            "messages": [with_thoughts(message) for message in messages],
            "tools": tools, "documents": None, "add_generation_prompt": prompt, **self.variables}
        try:
            if blocks is None:
                return template.render(**data)
            written = []
            with template.environment.activate_tracker(written, blocks):
                for part in template.generate(**data):
                    written.append(part)
            return "".join(written)
        except Exception as e:
            reason = (str(e).strip() or type(e).__name__).splitlines()[0]
            raise TemplateRefused(f"chat template: {reason[:200]}") from None

    def rendered(self, chat: Chat) -> tuple[Chat, str]:
        """-> (the chat with arguments as the template takes them, its text). Objects first, then JSON text:
        some templates concatenate it, some print an object as Python does."""
        calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
        if not calls:
            return chat, self.render(chat.messages, chat.tools)
        as_text = chat._replace(messages=with_argument_texts(chat.messages, chat.argument_texts))
        try:
            text = self.render(chat.messages, chat.tools)
        except BadLine as refused:
            try:
                return as_text, self.render(as_text.messages, chat.tools)
            except BadLine:
                raise refused from None
        objects = [call["function"]["arguments"] for call in calls]
        if any(arguments and str(arguments) in text for arguments in objects):
            return as_text, self.render(as_text.messages, chat.tools)
        return chat, text



def with_thoughts(message: dict) -> dict:
    """The message with its thought under each name that templates read it by."""
    if "reasoning_content" not in message:
        return message
    return {**dict.fromkeys(THOUGHT_KEYS, message["reasoning_content"]), **message}


def with_argument_texts(messages: list, texts: Iterable[str]) -> list:
    """The messages with the arguments of their calls as JSON text, for templates that can't take objects."""
    texts = iter(texts)
    out = []
    for message in messages:
        if "tool_calls" in message:
            calls = [{**call, "function": {**call["function"], "arguments": next(texts)}}
                     for call in message["tool_calls"]]
            message = {**message, "tool_calls": calls}
        out.append(message)
    return out


# --------------------------------------------------------------------------------------------- skeletons


@functools.lru_cache(8)
def tags_of(template: str) -> re.Pattern:
    """Pattern of every tag that a template mentions: what it can look for in a text."""
    tags = set(re.findall(r"<[^<>\s\"'{}]{1,40}>|\[/?\w+\]|◁/?\w+▷", template)) or {OPEN}
    longest_first = sorted(tags, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")


class Way(NamedTuple):
    """How a skeleton is made. The first way that can be followed is taken."""
    asked: str        # texts of others: "whole" replaced, "parts" (as in answers), or "shown" as they are
    arguments: bool   # replace the texts in a call's arguments, too


WAYS = Way("whole", True), Way("parts", True), Way("shown", True), Way("whole", False), Way("shown", False)


class Skeleton:
    """Messages whose texts are replaced by marks.

    In answers, white space at the ends and the template's own tags stay as they are, so a template that
    strips, or that looks for </think>, treats the skeleton as it treats the text.
    """

    def __init__(self, messages: list, tags: re.Pattern, way: Way):
        self.pieces = []
        self.shown = []      # (message, call, key, value) of arguments that aren't replaced
        self.tags = tags
        self.way = way
        self.messages = [self.replaced(number, message) for number, message in enumerate(messages)]

    def mark(self, text: str, number: int, kind: str, call: int = -1) -> str:
        self.pieces.append(Piece(text, number, kind, call))
        return f"{OPEN}{len(self.pieces) - 1}{CLOSE}"

    def replaced(self, number: int, message: dict) -> dict:
        out = dict(message)
        content = message["content"]
        if message["role"] == "assistant":
            if "reasoning_content" in message:
                out["reasoning_content"] = self.parts(message["reasoning_content"], number, THOUGHT)
            out["content"] = self.parts(content, number, TEXT, self.end_of_thought(content))
            if "tool_calls" in message:
                calls = enumerate(message["tool_calls"])
                out["tool_calls"] = [self.replaced_call(number, n, call) for n, call in calls]
        elif content.strip() and self.way.asked == "whole":
            out["content"] = self.mark(content, number, ASKED)
        elif self.way.asked == "parts":
            out["content"] = self.parts(content, number, ASKED)
        return out

    def parts(self, text: str, number: int, kind: str, thought_end: int = 0) -> str:
        """Text with its parts between the template's tags replaced; those before `thought_end` are a
        thought."""
        parts = self.tags.split(text)
        at = 0
        for n, part in enumerate(parts):
            bare = part.strip()
            if n % 2 == 0 and bare:
                mark = self.mark(bare, number, THOUGHT if at < thought_end else kind)
                parts[n] = part.replace(bare, mark, 1)
            at += len(part)
        return "".join(parts)

    def end_of_thought(self, content: str) -> int:
        """Where a thought at the beginning of a content ends: <think>...</think>, or ...</think> where the
        prompt has opened it. 0 if there is none, or the template knows no such tags."""
        closed = [m for m in self.tags.finditer(content) if THOUGHT_TAG.fullmatch(m[0]) and is_closing(m[0])]
        if not closed:
            return 0
        end = closed[0].start()
        opened = [m.start() for m in THOUGHT_TAG.finditer(content, 0, end) if not is_closing(m[0])]
        if opened and content[:opened[0]].strip():
            return 0  # a text that mentions the tags
        return end

    def replaced_call(self, number: int, n: int, call: dict) -> dict:
        function = call["function"]
        name = function["name"]
        name_mark = self.mark(name, number, CALL, n)
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = self.mark(arguments, number, ARGUMENTS, n)
        else:
            arguments = self.replaced_leaves(arguments, number, n, "")
        out = {**call, "function": {**function, "name": name_mark, "arguments": arguments}}
        if name in call.get("id", ""):  # some templates write functions.NAME:0 in place of the name
            out["id"] = call["id"].replace(name, name_mark, 1)
        return out

    def replaced_leaves(self, value: object, number: int, n: int, key: str) -> object:
        if isinstance(value, dict) and value:
            return {k: self.replaced_leaves(item, number, n, k) for k, item in value.items()}
        if isinstance(value, list) and value:
            return [self.replaced_leaves(item, number, n, key) for item in value]
        if isinstance(value, str) and value.strip() and self.way.arguments:
            return self.mark(value, number, ARGUMENTS, n)
        if key:
            self.shown.append((number, n, key, value))
        return value


def is_closing(tag: str) -> bool:
    return tag[1:2] == "/" or "END" in tag


def forms_of(piece: Piece) -> Iterable[str]:
    """How a template may write a piece. An assistant's text stands as it is; what others say and a call's
    arguments may be stripped, or stand in JSON."""
    yield piece.text
    if piece.kind not in (ASKED, ARGUMENTS):
        return
    for text in (piece.text, piece.text.strip(), piece.text.rstrip(), piece.text.lstrip()):
        yield text
        yield json.dumps(text, ensure_ascii=False)[1:-1]
        yield json.dumps(text)[1:-1]
        yield repr(text)[1:-1]  # where calls are written as Python


def shortened(text: str) -> str:
    text = " ".join(text.split())
    return repr(text if len(text) <= 40 else text[:37] + "...")


def missing(piece: Piece, verb: str = "leaves out") -> BadLine:
    if piece.kind == CALL:
        return BadLine(f"the chat template {verb.split()[0]} tool calls {verb.partition(' ')[2]}".rstrip()
                       + f": {shortened(piece.text)}")
    kind = {TEXT: "text of an answer", THOUGHT: "the thought before the last answer",
            ARGUMENTS: "arguments of tool calls", ASKED: "a message"}[piece.kind]
    return BadLine(f"the chat template {verb} {kind}: {shortened(piece.text)}")


# ----------------------------------------------------------------------------------------------- layouts


class TurnPlace(NamedTuple):
    """Where a turn stands, from its marks."""
    turn: int
    first: int      # number of its first mark, in the order of the text
    before: int     # characters before that mark which the target emits
    last: int       # number of its last mark
    text_end: int   # characters after that mark that belong to its text
    end: int        # and that belong to its text and end of turn


class Layout(NamedTuple):
    """What a template makes of conversations of one shape."""
    literals: list      # its own texts: before the first mark, between marks, after the last one
    order: list         # the marks between them: numbers of pieces
    places: list        # TurnPlace
    spliced: bool       # the template drops the last answer's thought, which follows the target's prompt


def split_at_marks(text: str) -> tuple[list, list]:
    parts = MARK.split(text)
    return parts[::2], [int(number) for number in parts[1::2]]


def walk(text: str, layout: Layout, pieces: list) -> list:
    """Follow a text along its skeleton: [(start, end)] of each mark. BadLine where they differ."""
    at = len(layout.literals[0])
    if not text.startswith(layout.literals[0]):
        raise BadLine("mask: the template's first words depend on the conversation")
    spans = []
    for number, literal in zip(layout.order, layout.literals[1:], strict=True):
        piece = pieces[number]
        for form in forms_of(piece):
            if text.startswith(form, at) and text.startswith(literal, at + len(form)):
                break
        else:
            kind = OthersRewritten if piece.kind == ASKED else BadLine
            raise kind("mask: the template rewrites a text, or adds words that depend on it: "
                       f"{shortened(piece.text)}")
        spans.append((at, at + len(form)))
        at += len(form) + len(literal)
    if at != len(text):
        raise BadLine("mask: the template adds text that depends on the answer")
    return spans


def common_prefix(text: str, other: str) -> int:
    """Length of their common beginning, not ending inside a tag or word where they part."""
    if text.startswith(other):
        return len(other)
    n = len(os.path.commonprefix([text, other]))
    inside = re.search(r"(<[^<>\s]*|\[[^\[\]\s]*|\w+)\Z", text[:n])
    return inside.start() if inside else n


class LayoutMaker:
    """One conversation's skeleton -> Layout. Renders few times, however many turns there are."""

    def __init__(self, finder, skeleton: Skeleton, chat: Chat):
        self.finder = finder
        self.skeleton = skeleton
        self.messages = skeleton.messages
        self.pieces = skeleton.pieces
        self.tools = chat.tools
        self.chat = chat
        self.answers = [n for n, message in enumerate(self.messages) if message["role"] == "assistant"]
        # the target's next words are known for an answer at the end alone
        self.last = len(self.messages) - 1 if self.answers[-1] == len(self.messages) - 1 else None
        self.text = self.render(self.messages)
        self.literals, self.order = split_at_marks(self.text)
        self.first_place = {}
        for place, number in enumerate(self.order):
            self.first_place.setdefault(number, place)
        self.headers = {}     # text before an answer -> characters of it that the target emits
        self.closings = {}    # text after an answer -> (end of the text, end of turn)

    def render(self, messages, prompt=False):
        return self.finder.template.render(messages, self.tools, prompt)

    def make(self) -> Layout:
        spliced = self.check_pieces()
        places = []
        refused = []          # turns whose prompt or end the template does not render alone
        for turn, m in enumerate(self.answers, 1):
            try:
                places += self.place_of(turn, m, spliced)
            except TemplateRefused:
                if m == self.last:
                    raise
                refused.append((turn, m))
        for turn, m in refused:
            try:              # another turn may have shown by now what stands around an answer
                places += self.place_of(turn, m, spliced)
            except TemplateRefused:
                if not places:
                    raise     # else it is context: a greeting before the user's first turn
        places = self.between_tags(sorted(places))
        places = [place for place in places if self.answers[place.turn - 1] not in self.chat.untrained]
        return Layout(self.literals, self.order, places, spliced)

    def place_of(self, turn: int, m: int, spliced: bool) -> list[TurnPlace]:
        """One turn's place; none for an empty answer, or a turn that the template drops."""
        own = self.places_of_message.get(m)
        if not own:
            return []
        first = min(own)
        last = max(own)
        if any(self.pieces[number].message != m for number in self.order[first:last + 1]):
            raise TextInside("mask: other text inside an answer")
        before = len(self.literals[first]) - self.prompt_end(m, first, spliced)
        text_end, end = 0, 0
        if m not in self.chat.cut:
            text_end, end = self.end_of_turn(m, last)
        return [TurnPlace(turn, first, before, last, text_end, end)]

    @functools.cached_property
    def places_of_message(self) -> dict:
        found = {}
        for number, place in self.first_place.items():
            found.setdefault(self.pieces[number].message, []).append(place)
        return found

    # ---- pieces

    def check_pieces(self) -> bool:
        """BadLine for a piece that isn't there, or there twice. -> whether the last answer's thought has to
        be put back: it is in its content, and alone is missing."""
        counts = np.bincount(self.order, minlength=len(self.pieces)) if self.order else [0] * len(self.pieces)
        dropped_thoughts = []
        for number, piece in enumerate(self.pieces):
            if piece.kind == ASKED:
                continue
            if counts[number] > 1 and piece.kind in (TEXT, THOUGHT):
                raise missing(piece, "repeats")
            if counts[number]:
                continue
            if piece.kind != THOUGHT:
                raise missing(piece)
            if piece.message == self.last:
                dropped_thoughts.append(piece)
        self.check_shown_arguments()
        if not dropped_thoughts:
            return False
        kept = [n for n, piece in enumerate(self.pieces) if piece.kind == THOUGHT and counts[n]
                and piece.message == self.last]
        message = self.messages[self.last]
        if kept or "tool_calls" in message or "reasoning_content" in message:
            raise missing(dropped_thoughts[0])
        return True

    def check_shown_arguments(self):
        """Arguments that marks can't stand for (numbers, null, true, empty ones): key and value are looked
        for between a call's name and the next mark that isn't of this call."""
        regions = {}
        for m, n, key, value in self.skeleton.shown:
            if (m, n) not in regions:
                regions[m, n] = self.call_text(m, n)
            written = {json.dumps(value), json.dumps(value, ensure_ascii=False), str(value)}
            if isinstance(value, str):
                written |= {json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]}
                written.add(repr(value))
            values = "|".join(re.escape(text) for text in written)
            pattern = rf"(?<!\w){re.escape(key)}(?!\w)"
            if value not in ("", {}, []):
                pattern += rf".*?(?<![\w.])(?:{values})(?!\w)"
            if not re.search(pattern, regions[m, n], re.DOTALL):
                raise BadLine(f"the chat template leaves out arguments of tool calls: {shortened(key)}")

    def call_text(self, m: int, n: int) -> str:
        """The text of message m's call n: from the mark before its first one to the next that isn't its
        own."""
        own = [place for number, place in self.first_place.items()
               if self.pieces[number].message == m and self.pieces[number].call == n]
        begin = self.mark_starts[min(own) - 1] if min(own) else 0
        after = max(own) + 1
        end = self.mark_starts[after] if after < len(self.order) else len(self.text)
        return self.text[begin:end]

    @functools.cached_property
    def mark_starts(self):
        return [match.start() for match in MARK.finditer(self.text)]

    # ---- where a turn begins

    def prompt_end(self, m: int, first: int, spliced: bool) -> int:
        """Number of characters of the text before mark `first` that are the prompt of the target's. What
        follows is its own: <tool_call>, a channel's name, but not an empty block of thoughts that the
        template adds."""
        before = self.literals[first]
        key = before, self.shows_empty_block(m)
        if key not in self.headers or m == self.last:
            self.headers[key] = self.measured_prompt_end(m, first, spliced and m == self.last)
        return self.headers[key]

    def measured_prompt_end(self, m: int, first: int, spliced: bool) -> int:
        before = self.literals[first]
        prompt, is_probed = self.prompt_of(m)
        literals, order = split_at_marks(prompt)
        tail = literals[-1]
        is_last = m == self.last
        if order[-1:] != self.order[:first][-1:]:
            raise BadLine("mask: the text before an answer depends on what follows it")
        if is_last and prompt[:len(prompt) - len(tail)] != self.text[:self.mark_starts[first] - len(before)]:
            raise BadLine("mask: the text before the last answer depends on what follows it")
        common = common_prefix(before, tail)
        rest = tail[common:]
        if spliced:
            return self.spliced_prompt_end(before, common, tail)
        block = self.added_block(before, common, m)
        if rest and not block and not is_probed:
            if not ONLY_TAGS.fullmatch(rest):
                raise BadLine("mask: the text before an answer depends on what follows it")
            if is_last:
                raise BadLine("mask: the last answer does not begin where the target's prompt ends, at "
                              f"{rest!r}: its thought is missing")
        return max(common, block)

    def prompt_of(self, m: int) -> tuple[str, bool]:
        """-> (the text that the target goes on from, whether it had to be guessed from a plain answer)."""
        history = self.messages[:m]
        if history:
            prompt = self.render(history, prompt=True)
            if prompt != self.render(history):
                return prompt, False
        probe = self.render([*history, {"role": "assistant", "content": PROBE}])
        header = probe.partition(PROBE)[0] if PROBE in probe else ""
        return EMPTY_BLOCK.sub("", header).rstrip(" "), True  # a blank begins a SentencePiece token

    def shows_empty_block(self, m: int) -> bool:
        """Whether the message itself begins with an empty block of thoughts."""
        message = self.messages[m]
        texts = [message.get(key, "").lstrip() for key in ("content", "reasoning_content")]
        return any(EMPTY_BLOCK.match(text) or THOUGHT_END.match(text) for text in texts)

    def added_block(self, before: str, common: int, m: int) -> int:
        """End of the empty block of thoughts (or of the lone end of one) that a template writes where an
        answer has no thought, or where it has removed it. 0 if there is none."""
        if self.shows_empty_block(m):
            return 0
        for block in EMPTY_BLOCK.finditer(before):
            if block.end() > common and not before[common:block.start()].strip():
                return block.end()
        lone = THOUGHT_END.match(before, common)
        return lone.end() if lone else 0

    def spliced_prompt_end(self, before: str, common: int, tail: str) -> int:
        """The template drops the last answer's thought: the target says it after its prompt."""
        if before[common:].strip() or not ONLY_TAGS.fullmatch(tail[common:]):
            raise missing(next(p for p in self.pieces if p.message == self.last and p.kind == THOUGHT))
        return len(before)

    # ---- where a turn ends

    def end_of_turn(self, m: int, last: int) -> tuple[int, int]:
        """-> (end of its text, end of its end of turn), in characters from the mark `last`."""
        after = self.literals[last + 1]
        is_text = self.pieces[self.order[last]].kind in (TEXT, THOUGHT)
        key = after, is_text, m == self.last
        if key not in self.closings:
            self.closings[key] = self.measured_end(m, last, after, is_text)
        return self.closings[key]

    def measured_end(self, m: int, last: int, after: str, is_text: bool) -> tuple[int, int]:
        special = self.finder.special
        ends = self.finder.ends
        blank = len(after) - len(after.lstrip())
        at_once = special.match(after, blank) or ends.match(after, blank)
        run = self.finder.special_run.match(after, blank)
        if is_text and run:
            found = ends.search(after, blank, run.end())
            if found:
                return blank, found.end()
        if not at_once or not is_text:
            found = ends.search(after) if self.skeleton.way.asked != "shown" or m == self.last else None
            if found and self.skeleton.way.arguments:
                return found.start(), found.end()
        closing = self.closing_of(m, last, after)
        found = list(special.finditer(closing))
        if found:
            # text is closed at once; a call's last piece is followed by markers first
            skip = len(closing) - len(closing.lstrip())
            at = found[0].start() if is_text and found[0].start() == skip else found[-1].start()
            closer = special.match(after, at)
            if closer and after[:at] == closing[:at]:
                return at, closer.end()
            closing = closing[:at]
        # no token of its own: the words of the template that close a turn, without white space
        words = closing.rstrip()
        if not after.startswith(words):
            words = words[:common_prefix(after, words)].rstrip()
        return 0, len(words)

    def closing_of(self, m: int, last: int, after: str) -> str:
        """What follows the last mark of message m in the conversation that ends with it."""
        if m == len(self.messages) - 1:
            return after
        literals, order = split_at_marks(self.render(self.messages[:m + 1]))
        if order[-1:] != [self.order[last]]:
            raise BadLine("mask: an answer's end is not where its turn ends")
        return literals[-1]

    # ---- {% generation %} tags

    def between_tags(self, places: list) -> list:
        """Turns that a template with generation tags has between them: it may leave out what isn't trained
        on."""
        if not GENERATION.search(self.finder.template.source(bool(self.tools))):
            return places
        blocks = []
        self.finder.template.render(self.messages, self.tools, blocks=blocks)
        kept = []
        for place in places:
            first = self.mark_starts[place.first]
            if any(start <= first < end for start, end in blocks):
                kept.append(place)
        if self.last is not None and (not kept or kept[-1].turn != len(self.answers)):
            raise BadLine("mask: the last answer is not between the template's generation tags")
        return kept


# ------------------------------------------------------------------------------------------- the finder


class AnswerFinder:
    """A tokenizer's chats -> texts and what the assistant said in them."""

    def __init__(self, tokenizer, template_kwargs: dict, end_tokens: Collection[str] = ()):
        self.template = ChatTemplate(tokenizer, template_kwargs)
        specials = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special}
        self.special = any_of(specials | set(tokenizer.all_special_tokens))
        self.ends = any_of({*end_tokens, tokenizer.eos_token or ""})
        self.special_run = re.compile(f"(?:{self.special.pattern}|{self.ends.pattern})+")
        self.layouts = {}

    def find(self, chat: Chat) -> tuple[str, list[Stretch]]:
        """A chat -> (its text, what the assistant says in it). BadLine where a piece of an answer isn't in
        the text, or where it can't be said what the target itself emits: such a mask is never used."""
        chat, text = self.template.rendered(chat)
        if OPEN in text or CLOSE in text:
            raise BadLine("mask: the text holds U+FDD0 or U+FDD1, which mark answers here")
        try:
            text.encode()
        except UnicodeEncodeError:
            raise BadLine("half of a surrogate pair in the text") from None
        self.refuse_ends_inside(chat)
        has_calls = any("tool_calls" in message for message in chat.messages)
        reasons = []
        for way in WAYS:
            if not way.arguments and not has_calls:
                continue
            try:
                return self.placed(chat, text, way)
            except TextInside:
                raise
            except BadLine as e:
                reasons.append(e)
        of_answers = [reason for reason in reasons if not isinstance(reason, OthersRewritten)]
        raise (of_answers or reasons)[0]

    def refuse_ends_inside(self, chat: Chat) -> None:
        """BadLine for an answer to train on whose own text holds a token that ends a turn: no decode goes
        past it, so nothing after it is ever drafted."""
        for number, message in enumerate(chat.messages):
            content = message.get("content")
            if message["role"] != "assistant" or number in chat.untrained or not isinstance(content, str):
                continue
            found = self.ends.search(content)
            if found:
                raise BadLine(f"the text of an answer holds {found[0]!r}, which ends a turn")

    def placed(self, chat: Chat, text: str, way: Way) -> tuple[str, list[Stretch]]:
        skeleton = Skeleton(chat.messages, tags_of(self.template.source(bool(chat.tools))), way)
        key = way, json.dumps([skeleton.messages, chat.tools]), chat.cut, chat.untrained
        layout = self.layouts.get(key)
        if layout is None:
            layout = LayoutMaker(self, skeleton, chat).make()
            if len(self.layouts) >= MOST_LAYOUTS:
                self.layouts.clear()
            self.layouts[key] = layout
        spans = walk(text, layout, skeleton.pieces)
        stretches = []
        for turn, first, before, last, text_end, end in layout.places:
            start = spans[first][0] - before
            stop = spans[last][1]
            stretches.append(Stretch(turn, start, stop + text_end, stop + end))
        if layout.spliced:
            last = len(chat.messages) - 1
            thought = next(p for p in skeleton.pieces if p.message == last and p.kind == THOUGHT)
            return self.with_thought(chat, text, stretches, spans, thought)
        return text, stretches

    def with_thought(self, chat: Chat, text: str, stretches: list, spans: list,
                     thought: Piece) -> tuple[str, list[Stretch]]:
        """The last answer as the target says it after its prompt, for a template that drops its thought."""
        prompt = self.template.render(chat.messages[:-1], chat.tools, prompt=True)
        body = chat.messages[-1]["content"]
        opened = THOUGHT_TAG.match(body.lstrip())
        is_opened = opened is not None and not is_closing(opened[0])
        prompt_tags = THOUGHT_TAG.findall(prompt[-40:])
        prompt_opens = bool(prompt_tags) and prompt.rstrip().endswith(prompt_tags[-1])
        if is_opened and prompt_opens:
            body = body.lstrip()[opened.end():]
            if prompt.endswith("\n"):
                body = body.lstrip("\n")
        elif not is_opened and not prompt_opens:
            raise missing(thought)
        body = body.rstrip()
        end_of_body = len(prompt) + len(body)
        closing = text[spans[-1][1]:]
        if stretches and stretches[-1].end >= spans[-1][1]:  # it may have a weight of 0
            turn, _, text_end, end = stretches.pop()
            shift = end_of_body - spans[-1][1]
            stretches.append(Stretch(turn, len(prompt), text_end + shift, end + shift))
        return prompt + body + closing, stretches


def any_of(words: Iterable[str]) -> re.Pattern:
    """Pattern of any of these words; matches nothing when there are none."""
    words = sorted((word for word in words if word), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or "(?!)")


def mask_tokens(offsets: np.ndarray, stretches: list[Stretch]) -> np.ndarray:
    """Character offsets (n, 2) of tokens -> turn of each, int32 (n,): 0 where the assistant didn't say it.

    A token across a stretch's border is left out: the target, prompted up to that border, splits it
    differently.
    """
    begin = offsets[:, 0]
    end = offsets[:, 1]
    if len(end):
        # trim_offsets (Llama 3) gives tokens of white space no width: they begin where the token before ended
        before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
        begin = np.where(begin == end, np.minimum(begin, before), begin)
    turn = np.zeros(len(offsets), np.int32)
    for number, start, text_end, turn_end in stretches:
        # an end of turn may swallow the newline after it (rstrip), so only its beginning counts
        is_own = (begin >= start) & (begin < turn_end) & ((end <= text_end) | (begin >= text_end))
        if not is_own.any():
            raise BadLine("mask: an answer that lies inside one token of the template")
        turn[is_own] = number
    return turn
