"""Generated conversations through chat templates: is every line read rightly, or refused for a true reason?

    python dev/fuzz_templates.py                  N=10000 lines over the templates of tests/data/templates
    python dev/fuzz_templates.py N=200 SEED=7
    python dev/fuzz_templates.py TEMPLATES=folder other templates: NAME.jinja, and their tokens in tokens.json

Each line is a row of random form (thoughts, calls, parallel calls, tools, nulls, empty and odd texts) for one
of the templates. What the trainer makes of it is checked without the trainer's own reasoning:

    accepted   the last turn's supervised ids are what follows the prompt rendered alone, up to its end; every
               turn holds its message's pieces, as often as said, and no words of others
    refused    what the reason names is missing: put in its place, a word of our own does not show either;
               or the template raises, or the text does not begin with the prompt rendered alone

Exit code 1, and the line, for anything else.
"""
import json
import random
import re
import string
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dflash_trainer import settings
from dflash_trainer.answer_mask import ChatTemplate
from dflash_trainer.chat_lines import BadLine, parse_row
from dflash_trainer.errors import require
from dflash_trainer.token_cache import Settings, Tokeniser, texts_of

N: int = 10_000
SEED: int = 0
TEMPLATES: str = str(ROOT / "tests" / "data" / "templates")

WORD_OF_OUR_OWN = "QZ7QZ7QZ"
EMPTY_THOUGHT = re.compile(r"\s*(<think>)?\s*</think>\s*")
ODD_TEXTS = ["Grüße, 世界 🙂", "a < b > c", "{\"x\": [1]}", "line\n\n    indented",
             "'quoted' \"twice\" \\ slash",
             "<b>bold</b>", "[1] (2) {3}", "{{ no template }}", "tab\there", "e\u0301 \u2028 x"]


class Family(NamedTuple):
    """A template with a tokenizer of single bytes and its own tokens."""
    name: str
    tokenizer: PreTrainedTokenizerFast
    template: ChatTemplate
    tokeniser: Tokeniser


def byte_tokenizer(template, special, ends):
    """Every byte is a token, so no token crosses a border of texts; special tokens are whole."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(token, special=True) for token in [*special, "<bos>", *ends]])
    eos = ends[0]
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token="<bos>", eos_token=eos, chat_template=template)


def families(folder):
    tokens = json.loads((Path(folder) / "tokens.json").read_text())
    found = []
    for name, own in tokens.items():
        source = (Path(folder) / f"{name}.jinja").read_text().rstrip("\n")
        tokenizer = byte_tokenizer(source, own["special"], own["ends"])
        reader = Tokeniser(Settings(tokenizer, 10**6, {}, len(tokenizer), tuple(own["ends"])))
        found.append(Family(name, tokenizer, ChatTemplate(tokenizer, {}), reader))
    return found


# ------------------------------------------------------------------------------------------------ rows


class Maker:
    """Random rows. Texts hold a word that no other text of the row holds, so a piece can be told from
    another."""

    def __init__(self, rng):
        self.rng = rng
        self.n = 0

    def chance(self, p):
        return self.rng.random() < p

    def text(self):
        self.n += 1
        word = "".join(self.rng.choices(string.ascii_lowercase, k=5))
        text = f"{word}{self.n} {self.rng.choice(ODD_TEXTS) if self.chance(0.4) else 'plain words.'}"
        if self.chance(0.15):
            text = self.rng.choice([" ", "\n", "  "]) + text
        if self.chance(0.15):
            text += self.rng.choice([" ", "\n", "\n\n"])
        return text

    def value(self, depth=0):
        kind = self.rng.randrange(8 if depth < 2 else 5)
        if kind < 3:
            return self.text().strip()
        if kind == 3:
            return self.rng.choice([0, 7, 1234, -5, 2.5, True, False])
        if kind == 4:
            return self.rng.choice(["", None, 12])
        if kind == 5:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(3))]
        return {f"k{n}": self.value(depth + 1) for n in range(self.rng.randrange(3))}

    def call(self, tools):
        tool = self.rng.choice(tools)["function"]
        arguments = {key: self.value() for key in tool["parameters"]["properties"] if self.chance(0.8)}
        if self.chance(0.3):
            arguments = json.dumps(arguments, ensure_ascii=self.chance(0.5))
        return {"type": "function", "function": {"name": tool["name"], "arguments": arguments}}

    def tools(self):
        names = ["get_rate", "weather", "look_up", "run"]
        self.rng.shuffle(names)
        keys = ["code", "city", "n", "unit", "q"]
        return [{"type": "function", "function": {"name": name, "parameters": {
            "type": "object", "properties": {key: {} for key in self.rng.sample(keys, 2)}, "required": None}}}
            for name in names[:self.rng.randint(1, 3)]]

    def answer(self, may_think):
        message = {"role": "assistant", "content": self.text()}
        if may_think and self.chance(0.5):
            if self.chance(0.5):
                message[self.rng.choice(["reasoning_content", "reasoning", "thinking"])] = self.text()
            else:
                opened = self.rng.choice(["<think>\n", "<think>", ""])
                message["content"] = f"{opened}{self.text().strip()}\n</think>\n\n{message['content']}"
        elif self.chance(0.03):
            message["content"] = f"{self.text()} <think>x</think> {self.text()}"
        return message

    def row(self):
        may_think = self.chance(0.5)
        tools = self.tools() if self.chance(0.4) else None
        messages = []
        if self.chance(0.3):
            messages.append({"role": "system", "content": self.text()})
        if self.chance(0.03):
            messages.append(self.answer(False))
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            messages.append({"role": "user", "content": self.text()})
            for _ in range(self.rng.randrange(3) if tools else 0):
                asked = self.answer(may_think)
                if self.chance(0.7):
                    asked["content"] = self.rng.choice(["", None])
                calls = [self.call(tools) for _ in range(self.rng.choice([1, 1, 2]))]
                if len(calls) == 1 and self.chance(0.2):
                    asked["function_call"] = calls[0]["function"]
                else:
                    asked["tool_calls"] = calls
                messages.append(asked)
                for _ in calls:
                    messages.append({"role": self.rng.choice(["tool", "function"]), "content": self.text()})
            messages.append(self.answer(may_think))
        if self.chance(0.05):
            messages.append({"role": "user", "content": self.text()})
        if self.chance(0.05):
            messages[-1]["weight"] = 0
        if self.chance(0.1):
            messages[-1]["finish_reason"] = self.rng.choice(["length", "stop"])
        row = {"messages": messages}
        if tools:
            row["tools"] = json.dumps(tools) if self.chance(0.3) else tools
        if self.chance(0.2):  # what merged tables look like
            row.update({"prompt": None, "source": None, "input_ids": None, "conversations": None})
            for message in messages:
                for key in ("tool_calls", "name", "weight", "reasoning_content"):
                    message.setdefault(key, None)
        return row


# ---------------------------------------------------------------------------------------------- checking


class Wrong(Exception):
    """What the trainer made of a line isn't right."""


def ensure(ok, text):
    if not ok:
        raise Wrong(text)


def forms(value):
    """How a value may stand in a text."""
    if isinstance(value, str):
        return {value.strip(), json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]}
    return {json.dumps(value), str(value)}


def parts_of(message):
    """An answer's (thought, text) as its author meant them."""
    content = message["content"]
    thought = message.get("reasoning_content", "")
    head, closed, tail = content.partition("</think>")
    before_open, opened, inside = head.partition("<think>")
    if closed and not (opened and before_open.strip()):
        return (inside if opened else head).strip() or thought.strip(), tail.strip()
    return thought.strip(), content.strip()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in leaves(item)]
    return [value]


def check_accepted(family, chat, prepared, conversation):
    """`chat` in the form that its template takes; `conversation` None where nothing is supervised."""
    text = prepared.text
    last = len(chat.messages) - 1
    final = family.template.render(chat.messages, chat.tools)
    answers = [m for m, message in enumerate(chat.messages) if message["role"] == "assistant"]
    if text != final:  # a thought that the template drops was put back
        prompt = family.template.render(chat.messages[:-1], chat.tools, prompt=True)
        thought, said = parts_of(chat.messages[-1])
        ensure(text.startswith(prompt), "a text of our own does not begin with the prompt")
        spoken = text[len(prompt):]
        ensure(thought in spoken and said in spoken, "a text of our own lacks the answer")
        ensure(final.startswith(prompt[:len(prompt) - len("<think>\n")]), "what stands before is another")
    for stretch in prepared.stretches:
        m = answers[stretch.turn - 1]
        check_turn(chat.messages, m, text[stretch.start:stretch.end], m == last)
    spoken = [m for m in answers if m not in chat.untrained]
    ensure(len(prepared.stretches) >= len([m for m in spoken if sum(map(bool, parts_of(chat.messages[m])))
                                           and m > 1]), "an answer is not supervised")
    if last in spoken and prepared.stretches and answers[prepared.stretches[-1].turn - 1] == last:
        check_last(family, chat, prepared, conversation)


def check_turn(messages, m, stretch, is_last):
    message = messages[m]
    thought, said = parts_of(message)
    ensure(not said or stretch.count(said) == 1, f"text {said!r} stands {stretch.count(said)} times")
    ensure(not (is_last and thought) or stretch.count(thought) == 1, f"thought {thought!r} is missing")
    calls = message.get("tool_calls", [])
    for name, count in Counter(call["function"]["name"] for call in calls).items():
        ensure(stretch.count(name) == count, f"call {name!r} stands {stretch.count(name)} times, not {count}")
    for call in calls:
        arguments = call["function"]["arguments"]
        for value in [arguments] if isinstance(arguments, str) else leaves(arguments):
            ensure(value in ("", {}, []) or any(form in stretch for form in forms(value)),
                   f"argument {value!r} is missing")
    for other in messages[:m] + messages[m + 1:]:
        word = other["content"].strip().split(" ")[0]
        ensure(not word or word not in stretch, f"words of another message: {word!r}")


def check_last(family, chat, prepared, conversation):
    """The supervised ids of the last turn are what follows the prompt rendered alone."""
    text = prepared.text
    stretch = prepared.stretches[-1]
    prompt = family.template.render(chat.messages[:-1], chat.tools, prompt=True)
    n = len(prompt) if text.startswith(prompt) else len(prompt) - len("<think>\n")
    ensure(text[:n] == prompt[:n], "the text does not begin with the prompt")
    between = text[n:stretch.start]
    ensure(not between or EMPTY_THOUGHT.fullmatch(between), f"{between!r} between the prompt and the answer")
    ensure(len(prompt) == n or between, f"the prompt goes on with {prompt[n:]!r}")
    rest = text[stretch.end:]
    is_cut = len(chat.messages) - 1 in chat.cut
    ensure(is_cut or not rest.strip(), f"{rest!r} after the answer")
    ids = family.tokenizer(text[:stretch.start], add_special_tokens=False)["input_ids"]
    whole = family.tokenizer(text[:stretch.end], add_special_tokens=False)["input_ids"]
    is_last = conversation.turn == stretch.turn
    ensure(conversation.ids[is_last].tolist() == whole[len(ids):], "other ids are supervised")


def check_refused(family, chat, reason):
    """`chat` as parsed."""
    named = re.search(r": '(.*)'\Z|: \"(.*)\"\Z", reason, re.DOTALL)
    if reason.startswith("chat template:"):
        ensure(raises(family, chat), "the template takes it")
    elif reason.startswith(("mask: the last answer does not begin", "mask: the text before the last answer")):
        chat, final = family.template.rendered(chat)
        prompt = family.template.render(chat.messages[:-1], chat.tools, prompt=True)
        ensure(not final.startswith(prompt), "it does begin with the prompt")
    elif named:
        ensure(not_shown(family, chat, reason), "it is not missing")
    else:
        raise Wrong(f"no such reason is expected: {reason}")


def raises(family, chat):
    try:
        family.template.rendered(chat)
        family.template.render(chat.messages[:-1], chat.tools, prompt=True)
    except BadLine:
        return True
    return False


def not_shown(family, chat, reason):
    """Whether a word of our own, put in place of what the reason names, does not show in the text."""
    needle = re.search(r": (['\"])(.*)\1\Z", reason, re.DOTALL)[2]
    words = re.findall(r"[a-z]{5}\d+|get_rate|weather|look_up|run|code|city|unit|\bk\d\b|\bn\b|\bq\b", needle)
    word = words[0] if words else None
    ensure(word, f"{needle!r} names nothing of ours")
    dropped = False
    for m, message in enumerate(chat.messages):
        if message["role"] != "assistant" or word not in json.dumps(message):
            continue
        for changed in with_our_word(message, word):
            messages = [*chat.messages[:m], changed, *chat.messages[m + 1:]]
            calls = [call for item in messages for call in item.get("tool_calls", ())]
            texts = [json.dumps(call["function"]["arguments"]) for call in calls]
            try:
                _, text = family.template.rendered(chat._replace(messages=messages, argument_texts=texts))
            except BadLine as e:
                raise Wrong(f"the template refuses it for another reason: {e}") from None
            dropped |= text.count(WORD_OF_OUR_OWN) == 0
    return dropped


def with_our_word(message, word):
    """The message with the word replaced in one of its places after the other."""
    for key in ("content", "reasoning_content"):
        if word in message.get(key, ""):
            yield {**message, key: message[key].replace(word, WORD_OF_OUR_OWN)}
    calls = message.get("tool_calls", [])
    for n, call in enumerate(calls):
        text = json.dumps(call["function"])
        if word in text:
            function = json.loads(text.replace(word, WORD_OF_OUR_OWN))
            changed = [*calls[:n], {**call, "function": function}, *calls[n + 1:]]
            yield {**message, "tool_calls": changed}


def check(family, row):
    """One line through the trainer's reader -> "used", "thin" or the kind of its refusal. Wrong."""
    line = json.dumps(row).encode()
    prepared = family.tokeniser.prepare_all([("", 1, line)])
    results = family.tokeniser.finish_all(prepared, family.tokeniser.encode(texts_of(prepared)))
    chat = parse_row(json.loads(line))
    if results.bad:
        reason = results.bad[0]["reason"]
        check_refused(family, chat, reason)
        return re.sub(r":? ?['\"].*", "", reason, flags=re.DOTALL)[:60]
    chat, _ = family.template.rendered(chat)
    conversation = results.conversations[0] if results.conversations else None
    check_accepted(family, chat, prepared[0][2], conversation)
    return "used" if conversation else "thin"


def fuzz(n, seed, folder, log=print):
    """-> (Counter of (family, outcome), the lines that went wrong)."""
    rng = random.Random(seed)
    everyone = families(folder)
    outcomes = Counter()
    wrong = []
    for _ in range(n):
        family = rng.choice(everyone)
        row = Maker(rng).row()
        try:
            outcomes[family.name, check(family, row)] += 1
        except Wrong as e:
            outcomes[family.name, "WRONG"] += 1
            wrong.append((family.name, str(e), row))
            log(f"{family.name}: {e}: {json.dumps(row)}")
    return outcomes, wrong


def run():
    settings.require_positive(sys.modules[__name__], "N")
    require((Path(TEMPLATES) / "tokens.json").exists(), f"TEMPLATES = {TEMPLATES}: has no tokens.json")
    outcomes, wrong = fuzz(N, SEED, TEMPLATES)
    for (family, outcome), count in sorted(outcomes.items()):
        print(f"{family:10s} {count:6d} {outcome}")
    used = sum(count for (_, outcome), count in outcomes.items() if outcome in ("used", "thin"))
    print(f"{N} lines: {used} used, {N - used - len(wrong)} refused for a true reason, {len(wrong)} wrong")
    return 1 if wrong else 0


def main(argv):
    return settings.run_program(sys.modules[__name__], run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
