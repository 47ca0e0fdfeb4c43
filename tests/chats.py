# ruff: noqa: E501
"""What the tests of the data share: chat templates, a tokenizer, rows, and how the trainer reads them."""
import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

import train_dflash as td
from dflash_trainer import chat_lines, token_cache
from dflash_trainer.answer_mask import mask_tokens

CASES = Path(__file__).parent / "data"

# ---- templates that behave like the known ones (written for these tests, not copied)

CHATML = """{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system
You are helpful.<|im_end|>
{% endif %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TAGGED = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>
{% endgeneration %}{% else %}{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

TAGGED_TEXT_ONLY = TAGGED.replace("<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n")

NO_PROMPT = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}"""

THINKING = """{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}{{- '<|im_start|>system\n# Tools\n' -}}{%- for t in tools -%}{{- t | tojson + '\n' -}}{%- endfor -%}
{{- '<|im_end|>\n' -}}{%- endif -%}
{%- for m in messages -%}
{%- set content = m.content if m.content is string else '' -%}
{%- if m.role == 'assistant' -%}
{%- set thought = '' -%}
{%- if m.reasoning_content is string -%}{%- set thought = m.reasoning_content -%}
{%- elif '</think>' in content -%}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\n') -%}
{%- endif -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > ns.last KEEP -%}{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' -}}{%- endif -%}
{{- content -}}
{%- for c in m.tool_calls or [] -%}
{{- ('\n' if content or not loop.first else '') + '<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' -}}
{{- (c.function.arguments | tojson) + '}\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\n' -}}
{%- elif m.role == 'tool' -%}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\nPROMPT' -}}
{%- if enable_thinking is defined and enable_thinking is false -%}{{- 'EMPTY' -}}{%- endif -%}{%- endif -%}"""

QWEN3 = (
    THINKING.replace("KEEP", "and (loop.last or thought)")
    .replace("PROMPT", "")
    .replace("EMPTY", "<think>\\n\\n</think>\\n\\n")
)
QWEN35 = THINKING.replace("KEEP", "").replace("PROMPT", "<think>\\n").replace("EMPTY", "\\n</think>\\n\\n")

LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{{- '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{- '}' }}
{%- else %}{{- m.content | trim }}{%- endif %}{{- '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + m.content | trim + '<end_of_turn>\n' }}
{%- endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

GPT_OSS = """{{- '<|start|>system<|message|>Effort: ' + (reasoning_effort or 'medium') + '<|end|>' }}
{%- for m in messages %}
{%- if m.role == 'assistant' %}
{%- if m.thinking and (loop.last or m.tool_calls) %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{%- if m.tool_calls %}{{- '<|start|>assistant to=functions.' + m.tool_calls[0].function.name }}
{{- '<|channel|>commentary json<|message|>' + m.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- else %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- endif %}
{%- elif m.role == 'tool' %}{%- set call = messages[loop.index0 - 1].tool_calls[0].function.name %}
{{- '<|start|>functions.' + call + ' to=assistant<|channel|>commentary<|message|>' + m.content | tojson + '<|end|>' }}
{%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{%- endif %}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""

MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}
{%- else %}{{ ' ' + m.content + '</s>' }}{% endif %}{% endfor %}"""

TRUNCATES = CHATML.replace("{{ m.content }}", "{{ m.content[:20] }}")

SPECIAL = [
    "<|im_start|>",
    "<|im_end|>",
    "<bos>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
    "[INST]",
    "[/INST]",
]


@lru_cache
def bpe(trim=False):
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = [
        m["content"]
        for f in ("bom.jsonl", "twenty_short_turns.jsonl")
        for line in (CASES / f).read_text("utf-8-sig").splitlines()
        for m in json.loads(line)["messages"]
    ]
    raw.train_from_iterator(
        text * 3,
        trainers.BpeTrainer(
            vocab_size=400,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            special_tokens=SPECIAL,
            show_progress=False,
        ),
    )
    raw.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    if trim:
        raw.post_processor = processors.ByteLevel(trim_offsets=True)
    return raw.to_str()


@lru_cache
def tokenizer(template=CHATML, eos="<|im_end|>", trim=False):
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe(trim)),
        chat_template=template,
        bos_token="<bos>",
        eos_token=eos,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(td, "TARGET", str(tmp_path))  # no config there: what ends a turn is known from the tokenizer
    monkeypatch.setattr(td, "SEQ_LEN", 512)
    monkeypatch.setattr(td, "CHAT_TEMPLATE_KWARGS", {})
    monkeypatch.setattr(td, "MAX_BAD_SHARE", 0.01)


def turns(ids, turn, tok):
    """{turn: decoded supervised text}."""
    return {
        int(t): tok.decode(ids[turn == t].tolist(), skip_special_tokens=False)
        for t in np.unique(turn[turn > 0])
    }


def said(template, messages, tools=None, cut=False, eos="<|im_end|>", trim=False, **kwargs):
    tok = tokenizer(template, eos, trim)
    row = {"messages": messages, "tools": tools, "finish_reason": "length" if cut else None}
    ids, turn = tokens(tok, row, kwargs)
    chat = chat_lines.parse_row(row)
    text = tok.apply_chat_template(chat.messages, tools=chat.tools, tokenize=False, **kwargs)
    assert tok.decode(ids.tolist(), skip_special_tokens=False) == text  # nothing lost or added
    return turns(ids, turn, tok)


def tokens(tok, row, kwargs=None, ends=(), vocab=10**6):
    """One row -> (ids, turns), or BadLine."""
    settings = token_cache.Settings(tok, 10**6, kwargs or {}, vocab, ends)
    results = token_cache.Tokeniser(settings)
    prepared = results.prepare(row)
    encoding = results.encode([prepared.text])[0]
    return np.array(encoding.ids), mask_tokens(np.array(encoding.offsets), prepared.stretches)


def user(text):
    return {"role": "user", "content": text}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def write(path, rows):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


def build(name, template=CHATML, **kwargs):
    file, tok = str(name if Path(name).is_absolute() else CASES / name), tokenizer(template)
    return td.read_conversations("DATA", file, tok, len(tok), **kwargs)


GOOD = {"messages": [user("What is 1 plus 1?"), answer("1 plus 1 equals 2.")]}
