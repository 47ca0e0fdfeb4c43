"""Templates and rows that broke public trainers: what is supervised in a line of tests/data/cases2."""
import json
import shutil

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from chats import (
    CASES,
    CHATML,
    bpe,
    own_cache,  # noqa: F401  a fixture of every test here
    turns,
)
from dflash_trainer import token_cache
from dflash_trainer.errors import UserError

FOLDER = CASES / "cases2"
TOKENS = json.loads((FOLDER / "tokens.json").read_text())
CALL = '<tool_call>get_rate {"code": "EUR"}</tool_call>'


def target(name):
    """The tokenizer of a case and the tokens that end a turn by its config."""
    own = TOKENS.get(name, {})
    template = FOLDER / f"{name}.jinja"
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe()), eos_token=own.get("eos_token", "<|im_end|>"),
        additional_special_tokens=own.get("special", []) + ["<|endoftext|>"],
        chat_template=template.read_text().rstrip("\n") if template.exists() else CHATML)
    return tokenizer, tuple(own.get("eos", ()))


def read(file, name, ends=None, vocab=10**6, **kwargs):
    tokenizer, listed = target(name)
    settings = token_cache.Settings(tokenizer, 8192, kwargs, vocab, listed if ends is None else ends)
    return token_cache.build_conversations(str(file), settings, 1.0), tokenizer


def outcomes(name, ends=None):
    """Line -> its supervised texts, "thin", or the reason why it is refused."""
    tokenizer, listed = target(name)
    settings = token_cache.Settings(tokenizer, 10**6, {}, 10**6, listed if ends is None else ends)
    tokeniser = token_cache.Tokeniser(settings)
    told = []
    for number, line in enumerate((FOLDER / f"{name}.jsonl").read_bytes().splitlines(), 1):
        prepared = tokeniser.prepare_all([(name, number, line)])
        results = tokeniser.finish_all(prepared, tokeniser.encode(token_cache.texts_of(prepared)))
        told += [list(turns(c.ids, c.turn, tokenizer).values()) for c in results.conversations]
        told += [bad["reason"] for bad in results.bad] + ["thin"] * results.n_thin
    return told


PAIR = "An oak is a tree.<|im_end|>"
DEEPSEEK = "<｜tool▁call▁begin｜>get_rate\n```json\n{}\n```<｜tool▁call▁end｜><｜end▁of▁sentence｜>"
RATE = "It is 1.1 now."
WANTED = {
    "calls_left_out": [
        "!tool calls", "!tool calls",
        ['<|tool_call_start|>[get_rate(code="EUR")]<|tool_call_end|><|im_end|>', f"{RATE}<|im_end|>"]],
    "second_call_left_out": [
        "!tool calls", "!tool calls",
        [' to=functions.get_rate<|channel|>commentary json<|message|>{"code": "EUR"}<|call|>',
         f"<|channel|>final<|message|>{RATE}<|return|>"]],
    "function_call": [
        [f"{CALL}<|im_end|>", f"{RATE}<|im_end|>"],
        [f"Let me look.{CALL}<|im_end|>", f"{RATE}<|im_end|>"],
        ["An oak.<|im_end|>"]],
    "thought_left_out": [
        ["I add the numbers one by one.\n</think>\n\nFour.<|im_end|>"],
        ["I add the numbers one by one.\n</think>\n\nFour.<|im_end|>"],
        "!thought",
        ["Four.<|im_end|>", "One more.\n</think>\n\nFive.<|im_end|>"]],
    "text_around_a_thought": [
        "!A pair is",
        ["Four.<|im_end|>", "<think>\nOne more.\n</think>\n\nFive.<|im_end|>"]],
    "arguments_as_text": [
        [DEEPSEEK.format('{"code": "EUR"}'), f"{RATE}<｜end▁of▁sentence｜>"],
        [DEEPSEEK.format('{"code":"EUR"}'), f"{RATE}<｜end▁of▁sentence｜>"],
        [DEEPSEEK.format('{"code": "EUR"}'), f"{RATE}<｜end▁of▁sentence｜>"]],
    "arrow_nulls": [
        [f"{CALL}<|im_end|>", f"{RATE}<|im_end|>"],
        ["<tool_call>get_rate {}</tool_call><|im_end|>"],
        ['<tool_call>weather {"city": "Rome", "unit": null}</tool_call><|im_end|>']],
    "next_header_ends_the_turn": [
        ["\nAn oak is a tree.<|user|>", "\nA pine too."],
        [f"\n{CALL}<|observation|>", f"\n{RATE}"],
        ["\nAn oak is a tr"]],
    "end_after_the_last_only": [
        ["An oak is a tree.", "A pine too.<|im_end|>"],
        [PAIR]],
    "tags_that_hold_the_prompt": [
        ["I add the numbers.\n</think>\n\nFour.<|im_end|>"],
        ["Four.<|im_end|>"]],
    "greeting_first": [
        ["Hello, how can I help?<|im_end|>", PAIR],
        [PAIR]],
    "many_turns": [[f"Answer {n} is here.<|im_end|>" for n in range(400)]],
    "null_columns": [[PAIR]] * 5,
    "weight_zero": [
        ["Four, sorry.<|im_end|>"],
        "thin",
        ["Five, I guess.<|im_end|>", "Four, sorry.<|im_end|>"]],
    "finish_reason_on_the_message": [
        ["An oak is a tr"],
        ["An oak.<|im_end|>", "A pin"],
        [PAIR]],
}


@pytest.mark.parametrize("name", WANTED)
def test_cases(name):
    got = outcomes(name)
    assert len(got) == len(WANTED[name])
    for line, (outcome, wanted) in enumerate(zip(got, WANTED[name], strict=True), 1):
        if isinstance(wanted, str) and wanted.startswith("!"):
            assert wanted[1:] in outcome, (name, line)
        else:
            assert outcome == wanted, (name, line)


def test_without_its_config_a_role_header_ends_nothing():
    assert outcomes("next_header_ends_the_turn", ends=())[0] == ["\nAn oak is a tree.", "\nA pine too."]


def test_the_text_around_what_is_supervised():
    """A thought that the template drops stands where the target says it: after its prompt."""
    conversations, tokenizer = read(FOLDER / "thought_left_out.jsonl", "thought_left_out")
    shown = [token_cache.render(conversation, tokenizer) for conversation in conversations]
    assert shown[0] == shown[1] == (
        "<|im_start|>user\nTwo plus two?<|im_end|>\n<|im_start|>assistant\n<think>\n"
        "⟦I add the numbers one by one.\n</think>\n\nFour.<|im_end|>⟧\n")
    assert "assistant\n⟦Four.<|im_end|>⟧\n<|im_start|>user\nAnd one?<|im_end|>" in shown[2]


def test_arrow_nulls_are_nowhere_in_the_tools():
    conversations, tokenizer = read(FOLDER / "arrow_nulls.jsonl", "arrow_nulls")
    shown = [token_cache.render(conversation, tokenizer) for conversation in conversations]
    assert "zone" not in shown[0] and "null" not in shown[0] + shown[1]
    assert '"unit": {"type": ["string", "null"]}' in shown[2]


def test_null_columns_give_equal_ids():
    conversations, _ = read(FOLDER / "null_columns.jsonl", "null_columns")
    assert len(conversations) == 5 and len({c.ids.tobytes() + c.turn.tobytes() for c in conversations}) == 1


def test_what_is_rendered_grows_linearly_with_the_turns(monkeypatch):
    written = []
    finder = token_cache.AnswerFinder
    messages = json.loads((FOLDER / "many_turns.jsonl").read_text())["messages"]
    tokenizer, _ = target("many_turns")
    for turns_ in (50, 400):
        answers = finder(tokenizer, {})
        inner = answers.template.render
        count = []
        monkeypatch.setattr(
            answers.template,
            "render",
            lambda *a, inner=inner, count=count, **k: count.append(inner(*a, **k)) or count[-1],
        )
        text, found = answers.find(token_cache.parse_row({"messages": messages[:2 * turns_]}))
        assert len(found) == turns_
        written.append(sum(map(len, count)) / len(text))
    assert written[1] <= written[0] + 1 and written[1] < 8


def test_one_array_is_as_good_as_lines(tmp_path):
    array = json.loads((FOLDER / "array.json").read_text())
    texts = {"plain.json": json.dumps(array), "indented.json": json.dumps(array, indent=2),
             "bom.json": "\ufeff" + json.dumps(array), "lines.json": "\n".join(map(json.dumps, array))}
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, array)))
    lines, _ = read(tmp_path / "lines.jsonl", "array")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        got, _ = read(tmp_path / name, "array")
        assert len(got) == 3 and got.fingerprint == lines.fingerprint, name
    (tmp_path / "bad.json").write_text(json.dumps([array[0], 7, array[1], {"prompt": "x"}]))
    got, _ = read(tmp_path / "bad.json", "array")
    assert len(got) == 2 and [bad["line"] for bad in got.bad_rows] == [2, 4]
    (tmp_path / "torn.json").write_text(json.dumps(array)[:-60])
    got, _ = read(tmp_path / "torn.json", "array")
    assert (
        len(got) == 2
        and [bad["line"] for bad in got.bad_rows] == [3]
        and "damaged" in got.bad_rows[0]["reason"]
    )


def three_kinds(tmp_path):
    tmp_path = tmp_path / "rows"
    tmp_path.mkdir()
    array = json.loads((FOLDER / "array.json").read_text())
    (tmp_path / "b.json").write_text(json.dumps(array[:1]))
    for name in ("beside.jsonl", "beside.parquet"):
        shutil.copy(FOLDER / name, tmp_path / name)
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "config.json").write_text('{\n "model_type": "x"\n}')
    return tmp_path


def test_files_of_several_kinds(tmp_path, capsys):
    pytest.importorskip("pyarrow")
    both = f"{FOLDER / 'beside.jsonl'},{FOLDER / 'beside.parquet'}"
    conversations, tokenizer = read(both, "beside")
    said = [list(turns(c.ids, c.turn, tokenizer).values()) for c in conversations]
    assert said == [["A crow.<|im_end|>"], ["A cod.<|im_end|>"], ["Flint.<|im_end|>"]]
    conversations, _ = read(three_kinds(tmp_path), "beside")
    assert len(conversations) == 4
    told = capsys.readouterr().out
    assert "not read: " in told and "notes.txt" in told and "config.json" in told


def test_parquet_without_pyarrow(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("dflash_trainer.data_files.has_pyarrow", lambda: False)
    with pytest.raises(UserError, match=r"DATA = .*beside\.parquet: parquet needs pyarrow"):
        read(FOLDER / "beside.parquet", "beside")
    conversations, _ = read(three_kinds(tmp_path), "beside")
    assert len(conversations) == 2 and "beside.parquet" in capsys.readouterr().out


def test_a_token_that_the_targets_table_lacks():
    tokenizer, _ = target("token_beyond_the_table")
    table = tokenizer.convert_tokens_to_ids("<image_soft_token>")
    conversations, _ = read(FOLDER / "token_beyond_the_table.jsonl", "token_beyond_the_table", vocab=table)
    assert len(conversations) == 12
    assert [(bad["line"], bad["reason"]) for bad in conversations.bad_rows] == [
        (9, f"token id {table} is outside the vocabulary of {table}")]


def test_the_date_that_a_template_writes_is_the_same_every_day(monkeypatch):
    """It is no day's own, so tokens and fingerprint don't change overnight, nor between machines."""
    import transformers.utils.chat_template_utils as utils

    class Tomorrow(utils.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2031, 5, 7)
    first, tokenizer = read(FOLDER / "date.jsonl", "date")
    monkeypatch.setattr(utils, "datetime", Tomorrow)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    settings = token_cache.Settings(tokenizer, 8192, {}, 10**6)
    finder = token_cache.AnswerFinder(tokenizer, settings.template_kwargs)
    text, _ = finder.find(
        token_cache.parse_row(json.loads((FOLDER / "date.jsonl").read_text().splitlines()[0]))
    )
    assert tokenizer.decode(first[0].ids.tolist()) == text and "Today Date: 01 Jan 2026" in text
    other = token_cache.AnswerFinder(tokenizer, {"strftime_now": "2025-07-04"})
    text, _ = other.find(token_cache.parse_row({"prompt": "a", "response": "b c"}))
    assert "Today Date: 04 Jul 2025" in text
    with pytest.raises(UserError, match="strftime_now"):
        token_cache.AnswerFinder(tokenizer, {"strftime_now": "today"})


def test_masks_are_those_of_one_row_at_a_time():
    """Rows share what was learnt from rows of the same shape: it must not matter which came first."""
    for name in WANTED:
        tokenizer, ends = target(name)
        together = token_cache.AnswerFinder(tokenizer, {}, ends)
        for line in (FOLDER / f"{name}.jsonl").read_text().splitlines() * 2:
            results = []
            for finder in (together, token_cache.AnswerFinder(tokenizer, {}, ends)):
                try:
                    results.append(finder.find(token_cache.parse_row(json.loads(line))))
                except token_cache.BadLine as e:
                    results.append(str(e))
            assert results[0] == results[1]
