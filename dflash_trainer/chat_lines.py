"""One row of data -> a chat, or token ids with a loss mask: four forms, each fault with a reason.

    parse_row       a row's JSON value -> Chat or Tokens, to train on
    parse_prompt    the same forms without the last answer -> Chat, to be answered

A key whose value is null is an absent key, in rows, messages, tools and calls: merged tables and Arrow files
give every row the keys of all.
"""
import json
from collections.abc import Iterator
from typing import NamedTuple

ROLES = {
    "human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant", "bot": "assistant",
    "function": "tool", "observation": "tool", "function_response": "tool"}
KNOWN_ROLES = "system", "developer", "user", "assistant", "tool"
THOUGHT_KEYS = "reasoning_content", "reasoning", "thinking"
# how servers say that an answer did not end by itself
CUT_REASONS = "length", "max_tokens", "max_output_tokens", "content_filter", "abort", "error"


class BadLine(Exception):
    """A row that can't be used, with the reason: skipped and counted."""


class Chat(NamedTuple):
    """A conversation in the form that chat templates read."""
    messages: list          # dicts: role, content; if given tool_calls, reasoning_content, name, tool_call_id
    tools: list | None      # JSON schemas
    argument_texts: list    # each tool call's arguments as JSON text, the row's own where it had one
    source: str             # "" if the row has none
    cut: frozenset          # numbers of messages that did not end by themselves: they lack an end of turn
    untrained: frozenset    # numbers of messages with weight 0: context only


class Tokens(NamedTuple):
    """A conversation given as token ids."""
    ids: list
    mask: list              # 0 or 1 for each id; 1: said by the assistant
    source: str
    cut: bool


def load_json(text: str | bytes, name: str = "the line") -> object:
    """BadLine for what isn't JSON; NaN and Infinity are not."""
    def refuse(constant):
        raise BadLine(f"{name} has {constant}, which is not JSON")
    try:
        return json.loads(text, parse_constant=refuse)
    except UnicodeDecodeError:
        raise BadLine("invalid UTF-8") from None
    except RecursionError:
        raise BadLine(f"{name} is nested too deeply") from None
    except ValueError as e:
        raise BadLine(f"{name} is not JSON: {str(e).split(':')[0]}") from None


def without_nulls(value: object) -> object:
    """The value without the keys of its objects that are null, at any depth."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def given(row: dict) -> dict:
    """Its keys that aren't null."""
    return {key: value for key, value in row.items() if value is not None}


# ---------------------------------------------------------------------------------------------- rows


def parse_row(row: object) -> Chat | Tokens:
    """A row to train on. BadLine where it has no answer of the assistant's."""
    row = require_object(row)
    if "input_ids" in row or "loss_mask" in row:
        return parse_tokens(row)
    is_pair = "messages" not in row and "conversations" not in row
    answer = answer_of_pair(row) if is_pair else []
    turns = [*turns_of(row), *answer]
    chat = parse_chat(row, turns)
    require_answer(chat.messages, turns)
    return chat


def parse_prompt(row: object) -> Chat:
    """A row of any form, to be answered: what stands before its last answer."""
    row = require_object(row)
    chat = parse_chat(row, turns_of(row))
    messages = list(chat.messages)
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise BadLine("no user turn to answer at the end")
    n_calls = sum(len(message.get("tool_calls", ())) for message in messages)
    return chat._replace(messages=messages, argument_texts=chat.argument_texts[:n_calls])


def require_object(row: object) -> dict:
    if not isinstance(row, dict):
        raise BadLine(f"a JSON object is expected, this is a {type(row).__name__}")
    return given(row)


def answer_of_pair(row: dict) -> list:
    """The messages that answer a row's prompt, [] where it has neither: `response`, or `completion` as TRL
    calls it, which may be a list of messages."""
    names = [name for name in ("response", "completion") if name in row]
    if len(names) > 1:
        raise BadLine("both response and completion")
    if "prompt" in row and not names:
        raise BadLine("prompt without response")
    if not names:
        return []
    (name,) = names
    if "prompt" not in row:
        raise BadLine(f"{name} without prompt")
    answer = row[name]
    if isinstance(answer, list) and any(isinstance(part, dict) and "role" in part for part in answer):
        return answer
    return [{"role": "assistant", "content": answer}]


def turns_of(row: dict) -> list:
    """The messages as they stand in a row of any form, without the answer of prompt + response."""
    if "messages" in row:
        turns = row["messages"]
    elif "conversations" in row:
        turns = row["conversations"]
    elif "prompt" in row:
        turns = row["prompt"]
        if not isinstance(turns, list):
            turns = [{"role": "user", "content": turns}]
    else:
        raise BadLine("none of messages, conversations, prompt + response, input_ids + loss_mask")
    if not isinstance(turns, list):
        raise BadLine(f"the messages are a {type(turns).__name__}, a list is expected")
    return turns


def source_of(row: dict) -> str:
    source = row.get("source")
    if not isinstance(source, str):
        return ""
    return source.encode(errors="replace").decode()  # half a surrogate pair can't be printed


def parse_tokens(row: dict) -> Tokens:
    ids = row.get("input_ids")
    mask = row.get("loss_mask")
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise BadLine("input_ids and loss_mask must both be lists")
    if len(ids) != len(mask):
        raise BadLine(f"input_ids has {len(ids)} entries, loss_mask {len(mask)}")
    if not all(type(i) is int for i in ids):
        raise BadLine("input_ids holds something that is not an integer")
    if not all(isinstance(m, (int, float)) and m in (0, 1) for m in mask):
        raise BadLine("loss_mask holds something other than 0 and 1")
    return Tokens(ids, mask, source_of(row), was_cut(row))


def parse_chat(row: dict, turns: list) -> Chat:
    """Messages of any form -> Chat."""
    system = row.get("system")
    if isinstance(system, str) and system:
        turns = [{"role": "system", "content": system}, *turns]
    tools = parse_tools(row.get("tools"))
    declared = declared_properties(tools)
    messages = []
    argument_texts = []
    cut = set()
    untrained = set()
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            raise BadLine(f"a message is a {type(turn).__name__}, an object is expected")
        turn = given(turn)
        message, texts = parse_message(turn, declared)
        messages.append(message)
        argument_texts += texts
        if message["role"] == "assistant":
            if was_cut(turn):
                cut.add(number)
            if parse_weight(turn.get("weight")) == 0:
                untrained.add(number)
    if was_cut(row):
        cut |= {number for number, message in enumerate(messages) if message["role"] == "assistant"
                and not any(later["role"] == "assistant" for later in messages[number + 1:])}
    return Chat(messages, tools, argument_texts, source_of(row), frozenset(cut), frozenset(untrained))


def require_answer(messages: list, turns: list) -> None:
    """BadLine with a reason of its own for each way to have no answer."""
    answers = [message for message in messages if message["role"] == "assistant"]
    if not messages:
        raise BadLine("no messages")
    if all(message["role"] in ("system", "developer") for message in messages):
        raise BadLine("only a system message")
    if not answers:
        raise BadLine("no assistant message")
    if not any(says_something(message) for message in answers):
        contents = [turn.get("content", turn.get("value")) for turn in turns
                    if ROLES.get(role_of(turn), role_of(turn)) == "assistant"]
        is_null = all(content is None for content in contents)
        raise BadLine("the answer is null or missing" if is_null else "the answer is empty")


def says_something(message: dict) -> bool:
    thought = message.get("reasoning_content", "")
    return "tool_calls" in message or bool(message["content"].strip() or thought.strip())


# ------------------------------------------------------------------------------------------ messages


def role_of(turn: dict) -> object:
    role = turn.get("role")
    return turn.get("from") if role is None else role


def parse_message(turn: dict, declared: dict) -> tuple[dict, list]:
    """role/content or from/value -> (message for templates, the arguments of its calls as text)."""
    role = role_of(turn)
    if not isinstance(role, str):
        raise BadLine("a message has no role")
    content = parse_text(turn.get("content", turn.get("value")))
    calls = parse_calls(turn)
    if role == "function_call":  # ShareGPT's: the call is the text of a turn
        calls = [load_json(content, "a function_call")]
        role = "assistant"
        content = ""
    role = ROLES.get(role, role)
    if role not in KNOWN_ROLES:
        raise BadLine(f"unknown role {role[:40]!r}")
    message = {"role": role, "content": content}
    texts = []
    for call in calls:
        parsed, text = parse_call(call, declared)
        message.setdefault("tool_calls", []).append(parsed)
        texts.append(text)
    thoughts = {parse_text(turn[key]) for key in THOUGHT_KEYS if turn.get(key)}
    if len(thoughts) > 1:
        raise BadLine("a message has two different thoughts")
    if thoughts:
        message["reasoning_content"] = thoughts.pop()
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    return message, texts


def parse_text(content: object) -> str:
    """Text, or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadLine(f"content is a {type(content).__name__}, text is expected")
    texts = []
    for part in content:
        if isinstance(part, dict):
            part = given(part)
            if part.get("type", "text") != "text":
                raise BadLine(f"content part of type {str(part['type'])[:40]!r}: only text can be used")
            part = part.get("text")
        if not isinstance(part, str):
            raise BadLine("a content part has no text")
        texts.append(part)
    return "".join(texts)


def parse_weight(weight: object) -> float:
    if weight is None:
        return 1.0
    if not isinstance(weight, (int, float)):
        raise BadLine(f"weight is a {type(weight).__name__}, a number is expected")
    if weight not in (0, 1):
        raise BadLine(f"weight is {weight}: an answer is trained on (1) or is context only (0)")
    return float(weight)


def was_cut(entry: dict) -> bool:
    """Was a row's last answer, or a message, cut at a limit or broken off?"""
    reason = entry.get("finish_reason")
    if not isinstance(reason, (str, type(None))):
        raise BadLine(f"finish_reason is a {type(reason).__name__}, a text is expected")
    return reason is not None and reason.lower() in CUT_REASONS


def parse_calls(turn: dict) -> list:
    """tool_calls, or the older function_call."""
    calls = turn.get("tool_calls") or []
    if not isinstance(calls, list):
        calls = [calls]
    if turn.get("function_call"):
        calls = [*calls, turn["function_call"]]
    return calls


def parse_call(call: object, declared: dict) -> tuple[dict, str]:
    """-> (the call with its arguments as an object, the arguments as JSON text)."""
    function = call.get("function") or call if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise BadLine("a tool call has no function name")
    name = name.strip()
    own = function.get("arguments")
    arguments = own
    if isinstance(own, str):
        arguments = load_json(own, "a tool call's arguments") if own.strip() else None
    arguments = arguments or {}
    if not isinstance(arguments, dict):
        raise BadLine(f"a tool call's arguments are a {type(arguments).__name__}, an object is expected")
    kept = declared_arguments(arguments, declared.get(name, {}))
    if isinstance(own, str) and kept and kept == arguments:
        text = own
    else:
        text = json.dumps(kept, ensure_ascii=False)
    parsed = {"type": "function", "function": {"name": name, "arguments": kept}}
    if isinstance(call.get("id"), str):
        parsed = {"id": call["id"], **parsed}
    return parsed, text


def declared_properties(tools: list | None) -> dict:
    """Function name -> the properties that its tool declares (a JSON schema each)."""
    found = {}
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found[function["name"].strip()] = properties_of(function.get("parameters"))
    return found


def properties_of(schema: object) -> dict:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def declared_arguments(arguments: dict, properties: dict) -> dict:
    """Arguments without the nulls that no tool declares: Arrow's filling of a column."""
    kept = {}
    for key, value in arguments.items():
        schema = properties.get(key)
        if value is None and key not in properties:
            continue
        kept[key] = declared_items(value, schema)
    return kept


def declared_items(value: object, schema: object) -> object:
    if isinstance(value, dict):
        return declared_arguments(value, properties_of(schema))
    if isinstance(value, list):
        items = schema.get("items") if isinstance(schema, dict) else None
        return [declared_items(item, items) for item in value]
    return value


def parse_tools(tools: object) -> list | None:
    if isinstance(tools, str) and tools.strip():
        tools = load_json(tools, "tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadLine("tools is not a list of objects")
    return without_nulls(tools)


def leaves(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """(key, value) of everything in an object that is neither an object nor a list, or is empty."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from leaves(item, name)
    elif isinstance(value, list) and value:
        for item in value:
            yield from leaves(item, key)
    else:
        yield key, value
