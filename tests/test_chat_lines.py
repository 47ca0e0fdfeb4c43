# ruff: noqa: E501
"""Rows of all forms -> conversations: what is read, what is refused and why."""
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import train_dflash as td
from chats import (
    CASES,
    CHATML,
    GOOD,
    QWEN3,
    answer,
    build,
    own_cache,  # noqa: F401  a fixture of every test here
    tokenizer,
    turns,
    user,
    write,
)
from dflash_trainer import rows as rows_module
from dflash_trainer.chat_lines import BadLine, parse_row
from dflash_trainer.errors import UserError


@pytest.mark.parametrize(
    "name, rows, bad",
    [
        ("bom.jsonl", 6, []),
        ("crlf_blank_lines.jsonl", 3, []),
        ("cut_last_line.jsonl", 4, [5]),
        ("no_final_newline.jsonl", 6, []),
        ("sharegpt.jsonl", 6, []),
        ("prompt_response.jsonl", 6, []),
        ("token_ids.jsonl", 6, []),
        ("twenty_short_turns.jsonl", 1, []),
        ("thin_rows.jsonl", 7, [2, 3, 4, 5, 6, 7]),
    ],
)
def test_case_files(name, rows, bad):
    got = build(name)
    assert (len(got), [b["line"] for b in got.bad_rows]) == (rows, bad)
    assert got.stats["rows"] == rows and got.stats["bad"] == len(bad) and got.stats["thin"] == 0


def test_token_ids_need_no_tokenizer():
    assert len(td.read_conversations("DATA", str(CASES / "token_ids.jsonl"), None, 300)) == 6
    with pytest.raises(UserError, match="outside the vocabulary of 100"):
        td.read_conversations("DATA", str(CASES / "token_ids.jsonl"), None, 100)


def test_thin_rows_have_reasons_of_their_own_and_the_one_word_answer_is_used():
    got = build("thin_rows.jsonl")
    assert len({b["reason"] for b in got.bad_rows}) == 6
    c = got[1]
    assert turns(c.ids, c.turn, tokenizer()) == {1: "Yes<|im_end|>"}


def test_the_forms_give_the_same_tokens():
    forms = [build(f"{n}.jsonl") for n in ("no_final_newline", "bom", "sharegpt", "prompt_response")]
    assert len({f.fingerprint for f in forms}) == 1
    for a, b in zip(forms[0], forms[2]):
        assert (a.ids == b.ids).all() and (a.turn == b.turn).all()


def test_token_ids_keep_their_mask():
    got = build("token_ids.jsonl")
    line = json.loads((CASES / "token_ids.jsonl").read_text().splitlines()[0])
    assert got[0].ids.tolist() == line["input_ids"] and got[0].turn.tolist() == line["loss_mask"]



MALFORMED = [
    "{",
    "nonsense",
    "42",
    "null",
    '"text"',
    "[1, 2]",
    "{}",
    '{"messages": 5}',
    '{"messages": {}}',
    '{"messages": [3]}',
    '{"messages": [{"content": "no role"}]}',
    '{"messages": [{"role": 7, "content": "x"}]}',
    '{"messages": [{"role": "wizard", "content": "x"}]}',
    '{"messages": [{"role": "user", "content": 5}]}',
    '{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, {"role": "assistant", "content": "x"}]}',
    '{"messages": [{"role": "user", "content": [7]}]}',
    '{"prompt": "no response"}',
    '{"response": "no prompt"}',
    '{"completion": "no prompt"}',
    '{"prompt": "q", "response": "x y", "completion": "x y"}',
    '{"prompt": "q", "completion": [{"role": "user", "content": "x y"}]}',
    '{"prompt": "q", "response": {"a": 1}}',
    '{"prompt": NaN, "response": "x y"}',
    '{"input_ids": [1, 2, 3]}',
    '{"input_ids": [1, 2, 3], "loss_mask": [1, 1]}',
    '{"input_ids": [1, 2.0, 3], "loss_mask": [1, 1, 1]}',
    '{"input_ids": [1, -2, 3], "loss_mask": [1, 1, 1]}',
    '{"input_ids": [1, 99999999999999999999, 3], "loss_mask": [1, 1, 1]}',
    '{"input_ids": [1, 2, 3], "loss_mask": [0, 1, 2]}',
    '{"input_ids": "123", "loss_mask": "011"}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}]}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}]}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "half \\ud83d pair"}]}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}], "tools": "x"}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b"}], "tools": 3}',
    '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "cut in the midd',
    '{"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": null}]}',
    '{"conversations": [{"from": "human", "value": "q"}, {"from": "function_call", "value": "no json"}]}',
    "[" * 100000 + "]" * 100000,
    '{"messages": ' + "[" * 100000,
    '{"a": ' + "1" * 5000 + "}",
]


@pytest.mark.parametrize("line", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_lines_are_counted(line, tmp_path):
    got = build(write(tmp_path / "x.jsonl", [GOOD, line, GOOD]))
    assert len(got) == 2 and [b["line"] for b in got.bad_rows] == [2] and got.bad_rows[0]["reason"]


def test_invalid_utf8_is_a_bad_line(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(
        json.dumps(GOOD).encode() + b'\n{"prompt": "\xff\xfe", "response": "x y"}\n'
    )
    assert build(tmp_path / "x.jsonl").bad_rows[0]["reason"] == "invalid UTF-8"


json_value = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["user", "assistant", "gpt"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "messages",
                    "conversations",
                    "role",
                    "content",
                    "from",
                    "value",
                    "prompt",
                    "response",
                    "input_ids",
                    "loss_mask",
                    "tools",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "source",
                    "finish_reason",
                    "text",
                    "type",
                    "system",
                    "reasoning_content",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "x"]), "content": json_value},
    optional={"tool_calls": json_value, "reasoning_content": json_value, "name": json_value},
)
any_row = (
    json_value
    | st.fixed_dictionaries({"messages": st.lists(message, max_size=4)}, optional={"tools": json_value})
    | st.fixed_dictionaries(
        {
            "input_ids": st.lists(st.integers(-1, 450), max_size=5),
            "loss_mask": st.lists(st.integers(0, 1), max_size=5),
        }
    )
)
any_line = st.one_of(
    any_row.map(lambda v: json.dumps(v).encode()),
    st.binary(max_size=40).map(lambda b: b.replace(b"\n", b"")),
    any_row.map(lambda v: json.dumps(v)[:-2].encode()),
)


@given(st.lists(any_line, max_size=5))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_line_is_lost_and_none_crashes(tmp_path, lines):
    file = tmp_path / "fuzz.jsonl"
    file.write_bytes(b"\n".join([json.dumps(GOOD).encode(), *lines]))
    for template in (CHATML, QWEN3):
        got = build(file, template)
        filled = sum(bool(line.strip()) for line in lines) + 1
        assert got.stats["rows"] + got.stats["thin"] + got.stats["bad"] == got.stats["lines"] == filled
        assert len(got) == got.stats["rows"] and len(got.bad_rows) == got.stats["bad"]
        for c in got:
            assert (
                len(c.ids) == len(c.turn) <= 512
                and rows_module.run_length(c.turn, np.zeros(len(c.turn))).max() >= 1
            )


def test_other_accepted_forms(tmp_path):
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "1 plus 1?"}]
    rows = [
        GOOD,
        {"conversations": GOOD["messages"]},
        {"messages": [user(parts), answer("1 plus 1 equals 2.")]},
        {"prompt": [user("What is 1 plus 1?")], "response": "1 plus 1 equals 2."},
        {"prompt": "What is 1 plus 1?", "completion": "1 plus 1 equals 2."},
        {"prompt": [user("What is 1 plus 1?")], "completion": [answer("1 plus 1 equals 2.")], "response": None},
        {
            "messages": [
                {"from": "human", "value": "What is 1 plus 1?"},
                {"from": "model", "value": "1 plus 1 equals 2."},
            ]
        },
    ]
    got = build(write(tmp_path / "x.jsonl", rows))
    assert len({c.ids.tobytes() + c.turn.tobytes() for c in got}) == 1 and len(got) == len(rows)
    called = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "3"},
        {"from": "gpt", "value": "It is 3."},
    ]
    c = build(
        write(tmp_path / "y.jsonl", [{"conversations": called, "system": "Be nice.", "source": "s"}]), QWEN3
    )[0]
    assert c.source == "s" and list(turns(c.ids, c.turn, tokenizer()).values()) == [
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>',
        "It is 3.<|im_end|>",
    ]


def test_too_many_bad_lines(tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "x.jsonl", [GOOD] * 985 + ["{"] * 15)
    with pytest.raises(UserError, match=r"15 of 1000 .*MAX_BAD_SHARE = 0.01"):
        build(file, out=tmp_path / "out")
    shown = capsys.readouterr().out
    assert shown.count("bad line") == 10 and f"{file}:986" in shown
    saved = [json.loads(line) for line in (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()]
    assert len(saved) == 15 and saved[0]["line"] == 986 and saved[0]["file"] == file and saved[0]["reason"]
    monkeypatch.setattr(td, "MAX_BAD_SHARE", 0.015)
    assert build(file).stats["reasons"] == {saved[0]["reason"]: 15}
    assert len(build(write(tmp_path / "small.jsonl", [GOOD] + ["{"] * 900))) == 1
    with pytest.raises(UserError, match="none of 3 lines"):
        build(write(tmp_path / "none.jsonl", ["{"] * 3))


@pytest.mark.parametrize("where, entry, reason", [
    ("message", {"weight": 0.5}, "weight is 0.5: an answer is trained on"),
    ("message", {"weight": -1}, "weight is -1"),
    ("message", {"weight": "1"}, "weight is a str"),
    ("message", {"finish_reason": 7}, "finish_reason is a int"),
    ("row", {"finish_reason": ["length"]}, "finish_reason is a list"),
])
def test_what_would_be_taken_for_something_else_is_refused(where, entry, reason):
    row = {"messages": [user("hi"), answer("yes") | (entry if where == "message" else {})]}
    row |= entry if where == "row" else {}
    with pytest.raises(BadLine, match=reason):
        parse_row(row)


def test_weights_and_reasons_that_mean_something():
    for entry in ({"weight": 1}, {"weight": 0}, {"weight": 1.0}, {"weight": None}, {"finish_reason": "stop"},
                  {"finish_reason": None}):
        chat = parse_row({"messages": [user("hi"), answer("yes") | entry]})
        assert chat.untrained == ({1} if entry.get("weight") == 0 else set()) and not chat.cut


def test_an_answer_that_holds_the_end_of_a_turn_is_refused(tmp_path):
    """No decode goes past it. In a question, or in an answer that is context only, it is nobody's target."""
    inside = answer("An <|im_end|> oak.")
    rows = [
        GOOD,
        {"messages": [user("Which tree?"), inside]},
        {"messages": [user("Which tree?"), inside | {"weight": 0}, user("Sure?"), answer("Yes.")]},
        {"messages": [user("What is <|im_end|>?"), answer("The end of a turn.")]},
    ]
    got = build(write(tmp_path / "x.jsonl", rows))
    (bad,) = got.bad_rows
    assert bad["line"] == 2
    assert bad["reason"] == "the text of an answer holds '<|im_end|>', which ends a turn"
    assert len(got) == 3
