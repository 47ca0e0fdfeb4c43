"""Stand-ins of public chat templates: which forms of conversation work with which, and a fuzz over all of
them."""
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "dev"))
import fuzz_templates
from dflash_trainer.chat_lines import BadLine

FAMILIES = {family.name: family for family in fuzz_templates.families(fuzz_templates.TEMPLATES)}
TOOLS = [{"type": "function", "function": {"name": "rate", "parameters": {
    "type": "object", "properties": {"code": {"type": "string"}}}}}]
RESULT = {"role": "tool", "content": "1.1"}
IM, EOT, TURN, EOS = "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<｜end▁of▁sentence｜>"
FINAL = "<|channel|>final<|message|>"


def user(text="Rate?"):
    return {"role": "user", "content": text}


def answer(text="It is 1.1.", **more):
    return {"role": "assistant", "content": text, **more}


def call(code="EUR"):
    return {"type": "function", "function": {"name": "rate", "arguments": {"code": code}}}


FORMS = {
    "turns": [user("Hi"), answer("Hello."), user("More"), answer("Sure.")],
    "system": [{"role": "system", "content": "Be kind."}, user("Hi"), answer("Hello.")],
    "thought": [user("Hi"), answer("Hello.", reasoning_content="Greet.")],
    "thought in text": [user("Hi"), answer("<think>\nGreet.\n</think>\n\nHello.")],
    "earlier thought": [user("Hi"), answer("Hello.", reasoning_content="Greet."), user("Rate?"),
                        answer("", tool_calls=[call()]), RESULT, answer()],
    "call": [user(), answer("", tool_calls=[call()]), RESULT, answer()],
    "text and call": [user(), answer("Look.", tool_calls=[call()]), RESULT, answer()],
    "two calls": [user(), answer("", tool_calls=[call(), call("USD")]), RESULT, RESULT, answer()],
}
JSON_CALL = '<tool_call>\n{"name": "rate", "arguments": {"code": "%s"}}\n</tool_call>'
XML_CALL = "<tool_call>\n<function=rate>\n<parameter=code>\n%s\n</parameter>\n</function>\n</tool_call>"
GLM_CALL = "<tool_call>rate\n<arg_key>code</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>"
DEEP_CALL = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>rate\n```json\n{"code": "%s"}\n```<｜tool▁call▁end｜>'
DEEP_CALLS = "<｜tool▁calls▁begin｜>%s<｜tool▁calls▁end｜>" + EOS
LLAMA_CALL = '{"name": "rate", "parameters": {"code": "EUR"}}' + EOT
HARMONY_CALL = ' to=functions.rate<|channel|>commentary json<|message|>{"code": "EUR"}<|call|>'
MISTRAL_CALL = '{"name": "rate", "arguments": {"code": "%s"}}'
RATE = "It is 1.1."

# what is supervised, turn by turn; "!": refused, and words of the reason
TABLE = {
    "chatml": {
        "turns": ["Hello." + IM, "Sure." + IM], "system": ["Hello." + IM], "thought": "!thought",
        "thought in text": ["<think>\nGreet.\n</think>\n\nHello." + IM],
        "earlier thought": ["Hello." + IM, JSON_CALL % "EUR" + IM, RATE + IM],
        "call": [JSON_CALL % "EUR" + IM, RATE + IM],
        "text and call": ["Look.\n" + JSON_CALL % "EUR" + IM, RATE + IM],
        "two calls": [JSON_CALL % "EUR" + "\n" + JSON_CALL % "USD" + IM, RATE + IM]},
    "llama3": {
        "turns": ["Hello." + EOT, "Sure." + EOT], "system": ["Hello." + EOT], "thought": "!thought",
        "thought in text": ["<think>\nGreet.\n</think>\n\nHello." + EOT],
        "earlier thought": ["Hello." + EOT, LLAMA_CALL, RATE + EOT], "call": [LLAMA_CALL, RATE + EOT],
        "text and call": "!text of an answer: 'Look.'", "two calls": "!single tool calls"},
    "gemma": {
        "turns": ["Hello." + TURN, "Sure." + TURN], "system": ["Hello." + TURN], "thought": "!thought",
        "thought in text": ["<think>\nGreet.\n</think>\n\nHello." + TURN],
        **dict.fromkeys(["earlier thought", "call", "text and call", "two calls"], "!alternate")},
    "harmony": {
        "turns": [FINAL + "Hello.<|end|>", FINAL + "Sure.<|return|>"], "system": [FINAL + "Hello.<|return|>"],
        "thought": [
            "<|channel|>analysis<|message|>Greet.<|end|><|start|>assistant" + FINAL + "Hello.<|return|>"],
        "thought in text": [FINAL + "<think>\nGreet.\n</think>\n\nHello.<|return|>"],
        "earlier thought": [FINAL + "Hello.<|end|>", HARMONY_CALL, FINAL + RATE + "<|return|>"],
        "call": [HARMONY_CALL, FINAL + RATE + "<|return|>"], "text and call": "!text of an answer: 'Look.'",
        "two calls": "!tool calls out: 'rate'"},
    "deepseek": {  # of the thinking kind: its prompt opens a thought that the template then drops
        "turns": "!its thought is missing", "system": "!its thought is missing", "thought": "!thought",
        "thought in text": ["Greet.\n</think>\n\nHello." + EOS],
        "earlier thought": ["Hello." + EOS, DEEP_CALLS % (DEEP_CALL % "EUR"), RATE + EOS],
        "call": [DEEP_CALLS % (DEEP_CALL % "EUR"), RATE + EOS],
        "text and call": ["Look." + DEEP_CALLS % (DEEP_CALL % "EUR"), RATE + EOS],
        "two calls": [DEEP_CALLS % (DEEP_CALL % "EUR" + "\n" + DEEP_CALL % "USD"), RATE + EOS]},
    "glm": {
        "turns": ["Hello.<|user|>", "Sure."], "system": ["Hello."],
        "thought": ["\n<think>Greet.</think>\nHello."],
        "thought in text": ["\n<think>Greet.</think>\nHello."],
        "earlier thought": ["Hello.<|user|>", GLM_CALL % "EUR" + "<|observation|>", RATE],
        "call": [GLM_CALL % "EUR" + "<|observation|>", RATE],
        "text and call": ["Look.\n" + GLM_CALL % "EUR" + "<|observation|>", RATE],
        "two calls": [GLM_CALL % "EUR" + "\n" + GLM_CALL % "USD" + "<|observation|>", RATE]},
    "mistral": {
        "turns": ["Hello.</s>", "Sure.</s>"], "system": ["Hello.</s>"], "thought": "!thought",
        "thought in text": ["<think>\nGreet.\n</think>\n\nHello.</s>"],
        "earlier thought": ["Hello.</s>", "[TOOL_CALLS][" + MISTRAL_CALL % "EUR" + "]</s>", RATE + "</s>"],
        "call": ["[TOOL_CALLS][" + MISTRAL_CALL % "EUR" + "]</s>", RATE + "</s>"],
        "text and call": "!text of an answer: 'Look.'",
        "two calls": [f"[TOOL_CALLS][{MISTRAL_CALL % 'EUR'}, {MISTRAL_CALL % 'USD'}]</s>", RATE + "</s>"]},
    "qwen3_5": {
        "turns": ["Hello." + IM, "Sure." + IM], "system": ["Hello." + IM],
        "thought": ["Greet.\n</think>\n\nHello." + IM],
        "thought in text": ["Greet.\n</think>\n\nHello." + IM],
        "earlier thought": ["Hello." + IM, XML_CALL % "EUR" + IM, RATE + IM],
        "call": [XML_CALL % "EUR" + IM, RATE + IM],
        "text and call": ["Look.\n\n" + XML_CALL % "EUR" + IM, RATE + IM],
        "two calls": [XML_CALL % "EUR" + "\n" + XML_CALL % "USD" + IM, RATE + IM]},
}


def outcome(family, messages):
    """The supervised texts, or the reason of a refusal."""
    row = {"messages": messages, "tools": TOOLS if any("tool_calls" in m for m in messages) else None}
    try:
        prepared = FAMILIES[family].tokeniser.prepare(row)
    except BadLine as e:
        return str(e)
    return [prepared.text[stretch.start:stretch.end] for stretch in prepared.stretches]


@pytest.mark.parametrize("family", TABLE)
def test_the_table_of_families_and_forms(family):
    for form, wanted in TABLE[family].items():
        got = outcome(family, FORMS[form])
        if isinstance(wanted, str):
            assert wanted[1:] in got, form
        else:
            assert got == wanted, form


def test_the_page_has_the_table():
    """docs/data.md: a row for each family, yes or no for each form."""
    lines = (ROOT / "docs" / "data.md").read_text().splitlines()
    for family, forms in TABLE.items():
        row = next(line for line in lines if f"`{family}`" in line and line.startswith("|"))
        cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
        assert len(cells) == len(FORMS)
        for cell, form in zip(cells, FORMS, strict=True):
            assert (cell == "yes") == (not isinstance(forms[form], str)), (family, form)


def test_fuzz():
    outcomes, wrong = fuzz_templates.fuzz(200, 0, fuzz_templates.TEMPLATES)
    assert not wrong
    assert {family for family, _ in outcomes} == set(TABLE)
    used = sum(count for (_, kind), count in outcomes.items() if kind == "used")
    assert 100 < used < 190


@pytest.mark.parametrize("harm", ["start", "end", "piece", "reason"])
def test_the_fuzz_sees_what_is_wrong(harm, monkeypatch):
    """A turn that begins or ends elsewhere, a piece that nobody looks for, a reason that isn't true."""
    from dflash_trainer import answer_mask
    find = answer_mask.AnswerFinder.find

    def harmed(self, chat):
        if harm == "reason" and len(chat.messages) > 1:
            text = chat.messages[-1]["content"][:6]
            raise BadLine(f"the chat template leaves out text of an answer: {text!r}")
        text, stretches = find(self, chat)
        moved = {"start": (1, 0, 0), "end": (0, 0, -1)}.get(harm, (0, 0, 0))
        return text, [answer_mask.Stretch(s.turn, s.start + moved[0], s.text_end + moved[2], s.end + moved[2])
                      for s in stretches]
    monkeypatch.setattr(answer_mask.AnswerFinder, "find", harmed)
    if harm == "piece":
        monkeypatch.setattr(answer_mask.LayoutMaker, "check_pieces", lambda self: False)
    _, wrong = fuzz_templates.fuzz(60, 0, fuzz_templates.TEMPLATES, log=lambda text: None)
    assert wrong
