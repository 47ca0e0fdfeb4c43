"""One JSONL line -> messages, or token ids with a loss mask: four forms, each fault with a reason.
"""
import json

ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "chatgpt": "assistant",
         "bot": "assistant", "function": "tool", "observation": "tool", "function_response": "tool"}
REASONING = "reasoning_content", "reasoning", "thinking"


class BadLine(Exception):
    """A line that can't be used, with the reason: skipped and counted."""


def load_json(text, name="the line"):
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


def parse_line(row):
    """A line's JSON value -> {input_ids, loss_mask} or {messages, tools}, with source, finish_reason."""
    if not isinstance(row, dict):
        raise BadLine(f"a JSON object is expected, this is a {type(row).__name__}")
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
        raise BadLine("prompt without response" if "prompt" in row else "response without prompt")
    else:
        raise BadLine("none of messages, conversations, prompt + response, input_ids + loss_mask")
    if not isinstance(turns, list):
        raise BadLine(f"the messages are a {type(turns).__name__}, a list is expected")
    if isinstance(row.get("system"), str) and row["system"]:
        turns = [{"role": "system", "content": row["system"]}, *turns]
    messages = [parse_message(m) for m in turns]
    check_messages(messages, turns)
    return {"messages": messages, "tools": parse_tools(row.get("tools")), **known}


def parse_ids(ids, mask):
    if not isinstance(ids, list) or not isinstance(mask, list):
        raise BadLine("input_ids and loss_mask must both be lists")
    if len(ids) != len(mask):
        raise BadLine(f"input_ids has {len(ids)} entries, loss_mask {len(mask)}")
    if not all(type(i) is int for i in ids):
        raise BadLine("input_ids holds something that is not an integer")
    if not all(isinstance(m, (int, float)) and m in (0, 1) for m in mask):
        raise BadLine("loss_mask holds something other than 0 and 1")
    return {"input_ids": ids, "loss_mask": mask}


def parse_message(message):
    """role/content or from/value -> keys that templates read, text joined, tool arguments as objects."""
    if not isinstance(message, dict):
        raise BadLine(f"a message is a {type(message).__name__}, an object is expected")
    role = message.get("role", message.get("from"))
    if not isinstance(role, str):
        raise BadLine("a message has no role")
    out = {"role": ROLES.get(role, role), "content": parse_text(message.get("content", message.get("value")))}
    calls = message.get("tool_calls")
    if role == "function_call":
        out, calls = {"role": "assistant", "content": ""}, [load_json(out["content"], "a function_call")]
    if out["role"] not in ("system", "developer", "user", "assistant", "tool"):
        raise BadLine(f"unknown role {role[:40]!r}")
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
            raise BadLine(f"content part of type {str(part['type'])[:40]!r}: only text can be used")
        if not isinstance(part, str) and not (isinstance(part, dict) and isinstance(part.get("text"), str)):
            raise BadLine("a content part has no text")
    if isinstance(content, list):
        content = "".join(p if isinstance(p, str) else p["text"] for p in content)
    if not isinstance(content, str):
        raise BadLine(f"content is a {type(content).__name__}, text is expected")
    return content


def parse_call(call):
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name.strip():
        raise BadLine("a tool call has no function name")
    arguments = function.get("arguments") or {}
    arguments = load_json(arguments, "a tool call's arguments") if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise BadLine(f"a tool call's arguments are a {type(arguments).__name__}, an object is expected")
    known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {"type": "function", **known, "function": {"name": name.strip(), "arguments": arguments}}


def parse_tools(tools):
    tools = load_json(tools, "tools") if isinstance(tools, str) and tools.strip() else tools
    if tools and not (isinstance(tools, list) and all(isinstance(t, dict) for t in tools)):
        raise BadLine("tools is not a list of objects")
    return tools or None


def check_messages(messages, given):
    """BadRow with a reason of its own for each way to have no answer."""
    answers = [g for m, g in zip(messages, given) if m["role"] == "assistant"]
    if not messages:
        raise BadLine("no messages")
    if all(m["role"] in ("system", "developer") for m in messages):
        raise BadLine("only a system message")
    if not answers:
        raise BadLine("no assistant message")
    if not any(m["content"].strip() or "tool_calls" in m or any(m.get(k, "").strip() for k in REASONING)
               for m in messages if m["role"] == "assistant"):
        null = all(g.get("content", g.get("value")) is None for g in answers)
        raise BadLine("the answer is null or missing" if null else "the answer is empty")
