"""Does a running server accept what `train_dflash.py eval` says of the same checkpoint?

    python tools/serve_check.py URL=http://127.0.0.1:8000 CKPT=<dir> TARGET=<dir> EVAL_DATA=<file.jsonl>

read_prompts    held-out conversations up to their last answer
ask_all         one greedy request at a time, with what the server reports of its drafter
walk            `train_dflash.py eval` on the very ids that the server produced
greedy_share    are these ids TARGET's own first choice?
print_table     both sides; then the verdict, and the causes of a difference that are seen or possible

A PASS is one run of the target that checks a block. The server must be idle otherwise. Where acceptance is
read (from the code of vLLM 0.32.0 and of SGLang 0.5.23, 0.5.12 and 0.5.6):
    vLLM    metrics.speculative_decoding of a reply (vllm serve --per-request-spec-decode-metrics summary),
            else /metrics before and after each request: vllm:spec_decode_num_drafts and its neighbours
    SGLang  sglext.spec_tokens_details or meta_info of a reply: spec_verify_ct and its neighbours,
            else /metrics (--enable-metrics) before and after each request: sglang:spec_verify_calls
Exit codes: 0 equal, 1 different, 2 it could not be compared.
"""
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from dflash_trainer import settings
from dflash_trainer.chat_lines import BadLine, parse_prompt, parse_row
from dflash_trainer.data_files import load_row, read_rows, resolve_files
from dflash_trainer.devices import compute_dtype
from dflash_trainer.errors import UserError, require
from dflash_trainer.target import forward_whole, load_model
from dflash_trainer.target_config import load_config, load_tokenizer

# ------------------------------------------------------------------ settings: NAME=VALUE overrides them
URL: str = "http://127.0.0.1:8000"     # of the server; the key is read from the environment's OPENAI_API_KEY
MODEL: str = ""                        # its name there; "": the first that /v1/models lists
CKPT: str = ""                         # the checkpoint that the server drafts with
TARGET: str = ""                       # the target that it serves: directory or name
EVAL_DATA: str = ""                    # JSONL of held-out conversations: each one's last answer is asked for
N: int = 50                            # prompts
MAX_NEW_TOKENS: int = 256
CHAT_TEMPLATE_KWARGS: dict = {}        # those of the training, e.g. {"enable_thinking": False}
TARGET_DEVICES: list[str] = ["cpu"]    # for `eval`: fp32 on a CPU, bf16 on a GPU (the server may fill it)
CHECK_GREEDY: bool = True              # look whether the answers are TARGET's own choice: loads it once more
TOLERANCE: float = 0.02                # of tokens a pass: bf16 and batched kernels break near-ties otherwise
ANSWERS: str = ""                      # file that keeps the server's answers; with an empty URL it is read
TIMEOUT_S: float = 600.0               # of one request

SETTLE_S = 10.0         # how long /metrics may lag behind a reply
GREEDY_SHARE = 0.98     # of the answers' tokens: below that they are not this target's greedy text
TRAINER = ROOT / "train_dflash.py"
# architecture in config.json: (name of the head, drafts of a pass less block_size)
HEADS = {"DFlashDraftModel": ("dflash", -1), "DFlash2DraftModel": ("dflash2", -1),
         "Qwen3DSparkModel": ("dspark", 0)}


# ------------------------------------------------------------------------------------------ the checkpoint

class Checkpoint(NamedTuple):
    """What config.json says about drafting."""
    head: str
    block_size: int
    drafts: int                # tokens that one pass drafts when served as trained
    sliding: bool              # some layer slides
    scaled: bool               # embedding scale or soft cap of the target (Gemma)
    trained_length: int | None  # SEQ_LEN of its training, where trainer.json is there


def read_checkpoint(path: str) -> Checkpoint:
    """UserError where CKPT is no drafter that `eval` could load."""
    try:
        config = json.loads(Path(path, "config.json").read_text())
    except (OSError, ValueError) as e:
        raise UserError(f"CKPT = {path}: no config.json that can be read ({type(e).__name__})") from None
    architecture = (config.get("architectures") or ["none"])[0]
    require(architecture in HEADS, f"CKPT = {path}: its architecture {architecture} is no drafter known here "
            f"({', '.join(HEADS)})")
    head, offset = HEADS[architecture]
    flat = {**config, **config.get("dflash_config", {})}
    require(isinstance(flat.get("block_size"), int), f"CKPT = {path}: its config.json has no block_size")
    try:
        trained = json.loads(Path(path, "trainer.json").read_text())["constants"]["SEQ_LEN"]
    except (OSError, ValueError, KeyError, TypeError):  # a published checkpoint has none
        trained = None
    scaled = flat.get("input_embedding_scale") not in (None, 1.0) or bool(flat.get("final_logit_softcapping"))
    sliding = "sliding_attention" in (flat.get("layer_types") or ())
    return Checkpoint(head, flat["block_size"], flat["block_size"] + offset, sliding, scaled, trained)


# ------------------------------------------------------------------------------------------------- prompts

class Prompt(NamedTuple):
    ids: list[int]              # as TARGET's tokenizer has them, or as the line gives them
    messages: list[dict] | None = None  # chat messages up to where the answer begins; None for a line of ids
    tools: list[dict] | None = None
    argument_texts: list[str] = []      # of the messages' tool calls, in order


def prompt_of(row: dict, tokenizer) -> Prompt:
    """A conversation up to its last answer. BadLine where there is none."""
    if isinstance(row, dict) and "input_ids" in row:
        tokens = parse_row(row)
        starts = [i for i in range(1, len(tokens.mask)) if tokens.mask[i] and not tokens.mask[i - 1]]
        if not starts:
            raise BadLine("no supervised token after a prompt")
        return Prompt(tokens.ids[:starts[-1]])
    chat = parse_prompt(row)
    require(getattr(tokenizer, "chat_template", None),
            f"TARGET = {TARGET} has no tokenizer with a chat template")
    ids = tokenizer.apply_chat_template(chat.messages, tools=chat.tools, add_generation_prompt=True,
                                        return_dict=True, **CHAT_TEMPLATE_KWARGS)["input_ids"]
    return Prompt(list(ids), chat.messages, chat.tools, chat.argument_texts)


def read_prompts(tokenizer) -> list[Prompt]:
    """The first N of EVAL_DATA. Lines that can't be used are said and skipped."""
    prompts = []
    for path in resolve_files(EVAL_DATA, "EVAL_DATA"):
        for number, row in read_rows(path, "EVAL_DATA"):
            if len(prompts) == N:
                return prompts
            try:
                prompts.append(prompt_of(load_row(row), tokenizer))
            except BadLine as e:
                print(f"{path} line {number}: skipped, {e}")
    require(prompts, f"EVAL_DATA = {EVAL_DATA}: no prompt in it")
    return prompts


# -------------------------------------------------------------------------------------------- the server

class Report(NamedTuple):
    """What a server says about its drafter, for one answer or, as counters, since it started."""
    passes: float
    drafted: float | None      # draft tokens; None where it doesn't say
    accepted: float | None
    generated: float | None = None  # tokens of all answers; in counters alone


COUNTERS = {  # their names in /metrics, less `_total`
    "vLLM": Report("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
                   "vllm:spec_decode_num_accepted_tokens", "vllm:generation_tokens"),
    "SGLang": Report("sglang:spec_verify_calls", None, None, "sglang:generation_tokens")}


class Answer(NamedTuple):
    prompt_ids: list[int]
    ids: list[int]             # the answer's, end-of-turn included
    finish_reason: str
    report: Report


def require_of_server(ok: object, text: str) -> None:
    require(ok, f"URL = {URL}: {text}")


def request(method: str, path: str, body: dict | None = None) -> tuple[int, bytes]:
    """(status, bytes). No proxy: an address that has to be reached through one is not tested here."""
    url = urlsplit(URL)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("OPENAI_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = kind(url.netloc, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, reply.read()
    except (OSError, http.client.HTTPException) as e:
        raise UserError(f"URL = {URL}: no answer to {method} {path} ({type(e).__name__}: {e})") from None
    finally:
        connection.close()


def as_json(path: str, status: int, data: bytes) -> dict:
    """A reply's JSON object; UserError with the server's own words for anything else."""
    try:
        value = json.loads(data)
    except ValueError:
        value = None
    if status != 200 or not isinstance(value, dict):
        words = " ".join(data[:300].decode("utf-8", "replace").split())
        require_of_server(False, f"{path} answers with HTTP {status} {words}")
    return value


SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$")  # a line of the Prometheus text format


def metric_sums(text: str) -> dict[str, float]:
    """Name -> sum over the labels (engines, models), without the `_total` that exporters put on counters."""
    sums = {}
    for line in text.splitlines():
        if found := SAMPLE.match(line):
            name = found[1].removesuffix("_total")
            sums[name] = sums.get(name, 0.0) + float(found[2])
    return sums


def counters() -> Report | str:
    """The counters of /metrics, or why there are none."""
    status, data = request("GET", "/metrics")
    if status != 200:
        return f"/metrics answers with HTTP {status} (SGLang needs --enable-metrics)"
    sums = metric_sums(data.decode("utf-8", "replace"))
    for server, names in COUNTERS.items():
        if names.passes in sums:
            return Report(*(sums.get(name) for name in names))
        if names.generated in sums:
            return f"/metrics of this {server} has no {names.passes}: it has no drafter, or is too old"
    return "/metrics has no counters of vLLM or SGLang"


def report_in(reply: dict) -> Report | None:
    """What the reply itself says about its passes."""
    if vllm := (reply.get("metrics") or {}).get("speculative_decoding"):
        return Report(vllm["num_spec_steps"], vllm["num_draft_tokens"], vllm["num_accepted_draft_tokens"])
    choice = (reply.get("choices") or [{}])[0]
    details = (reply.get("sglext") or {}).get("spec_tokens_details")
    details = details or choice.get("meta_info") or reply.get("meta_info") or {}
    if not details.get("spec_verify_ct"):
        return None
    accepted = details.get("spec_num_correct_drafts", details.get("spec_accept_token_num"))
    drafted = details.get("spec_num_proposed_drafts", details.get("spec_draft_token_num"))
    return Report(details["spec_verify_ct"], drafted, accepted)


def counted_since(before: Report, n_tokens: int) -> Report:
    """The counters' change over one request, once they have caught up with its reply."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        now = counters()
        require_of_server(isinstance(now, Report), now)
        generated = now.generated - before.generated
        if generated >= n_tokens or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    require_of_server(generated == n_tokens,
                      f"/metrics counted {generated:.0f} generated tokens during an answer of {n_tokens}: "
                      "other requests were running, or not every process is behind this /metrics")
    return Report(*(None if new is None else new - old for new, old in zip(now, before, strict=True)))


def over_http(prompt: Prompt) -> list[dict]:
    """The messages as the OpenAI interface wants them: arguments of tool calls are text."""
    texts = iter(prompt.argument_texts)
    messages = []
    for message in prompt.messages:
        calls = [{**call, "function": {**call["function"], "arguments": next(texts)}}
                 for call in message.get("tool_calls", ())]
        messages.append({**message, "tool_calls": calls} if calls else message)
    return messages


def chat_body(model: str, prompt: Prompt) -> dict:
    """A request for one greedy answer; everything that a model's generation_config could set is set."""
    body = {"model": model, "max_tokens": MAX_NEW_TOKENS, "temperature": 0, "top_p": 1,
            "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1.0,
            "return_token_ids": True, "return_spec_tokens_details": True}
    if prompt.messages is None:
        return {**body, "prompt": prompt.ids}
    body["messages"] = over_http(prompt)
    if prompt.tools:
        body["tools"] = prompt.tools
    if CHAT_TEMPLATE_KWARGS:
        body["chat_template_kwargs"] = CHAT_TEMPLATE_KWARGS
    return body


def ask(model: str, prompt: Prompt) -> tuple[dict, list[int], list[int], str]:
    """One answer over the OpenAI interface -> (reply, prompt ids, answer ids, finish reason)."""
    path = "/v1/completions" if prompt.messages is None else "/v1/chat/completions"
    reply = as_json(path, *request("POST", path, chat_body(model, prompt)))
    choice = (reply.get("choices") or [{}])[0]
    ids = choice.get("token_ids")
    prompt_ids = reply.get("prompt_token_ids") or choice.get("prompt_token_ids")
    return reply, prompt_ids or prompt.ids, ids, choice.get("finish_reason")


def ask_natively(prompt: Prompt) -> tuple[dict, list[int], list[int], str]:
    """The same over SGLang's own interface, which has returned ids before its chat replies could."""
    sampling = {"max_new_tokens": MAX_NEW_TOKENS, "temperature": 0, "repetition_penalty": 1.0}
    body = {"input_ids": prompt.ids, "sampling_params": sampling}
    reply = as_json("/generate", *request("POST", "/generate", body))
    ended = (reply.get("meta_info") or {}).get("finish_reason") or {}
    return reply, prompt.ids, reply.get("output_ids"), ended.get("type")


def counted(reply: dict, ids: list[int], before: Report | str) -> tuple[Report, bool]:
    """The passes of one answer -> (report, whether the reply itself carried it)."""
    report = report_in(reply)
    if report is not None:
        return report, True
    if isinstance(before, str):
        require_of_server(len(ids) == 1, f"no acceptance is reported: replies don't carry it, and {before}")
        return Report(0, None, None), True
    return counted_since(before, len(ids)), False


def ask_all(prompts: list[Prompt]) -> tuple[list[Answer], str]:
    """One request at a time, so that each answer has its own passes. -> (answers, where passes are said)."""
    listed = as_json("/v1/models", *request("GET", "/v1/models")).get("data") or [{}]
    model = MODEL or listed[0].get("id") or "default"
    answers = []
    where = "its replies"
    natively = False
    for number, prompt in enumerate(prompts, 1):
        before = counters()
        if not natively:
            reply, prompt_ids, ids, ended = ask(model, prompt)
            natively = not ids and listed[0].get("owned_by") == "sglang"
        if natively:
            where = "its replies over /generate, which take the prompts as TARGET's token ids"
            before = "SGLang reports spec_verify_ct there when it drafts"
            reply, prompt_ids, ids, ended = ask_natively(prompt)
        require_of_server(isinstance(ids, list) and ids,
                          "the reply has no token ids: return_token_ids needs a newer vLLM (0.32.0 has it)")
        require_of_server(ended in ("stop", "length", "tool_calls"), f"answer {number} ended by {ended!r}")
        counts = reply.get("usage") or reply.get("meta_info") or {}
        said = counts.get("completion_tokens", len(ids))
        require_of_server(said == len(ids),
                          f"answer {number} has {len(ids)} token ids, its reply speaks of {said} tokens")
        report, in_reply = counted(reply, ids, before)
        require_of_server(report.passes > 0 or len(ids) == 1,
                          f"it counted no pass during an answer of {len(ids)} tokens: it does not draft")
        if not in_reply:
            where = "the counters of /metrics"
        answers.append(Answer(prompt_ids, ids, ended, report))
        print(f"{number}: {len(prompt_ids)} + {len(ids)} tokens, {report.passes:.0f} passes", flush=True)
    return answers, where


def keep_answers(answers: list[Answer]) -> None:
    with open(ANSWERS, "w") as file:
        for answer in answers:
            file.write(json.dumps({**answer._asdict(), "report": answer.report._asdict()}) + "\n")


def kept_answers() -> list[Answer]:
    """The answers of an earlier call, for which the server may have been stopped since."""
    try:
        lines = [json.loads(line) for line in Path(ANSWERS).read_text().splitlines()]
        return [Answer(**{**line, "report": Report(**line["report"])}) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise UserError(f"ANSWERS = {ANSWERS}: no file of this program's ({type(e).__name__}: {e})") from None


# ---------------------------------------------------------------------------------------- this project's side

class Walk(NamedTuple):
    """What `eval` says of the same ids."""
    tau: float                 # tokens a pass, mean over passes
    passes: list[int]          # of each answer
    over_answers: float        # mean over answers of their tokens a pass


def walk(answers: list[Answer]) -> Walk:
    """Runs `train_dflash.py eval` on the server's ids. Each answer is a source of its own, so that its tokens
    a pass come back by number: passes = (tokens - 1) / that, for an answer's first token is the prefill's."""
    longest = max(len(a.prompt_ids) + len(a.ids) for a in answers)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for number, answer in enumerate(answers):
            n_prompt, n_answer = len(answer.prompt_ids), len(answer.ids)
            row = {"input_ids": answer.prompt_ids + answer.ids, "loss_mask": [0] * n_prompt + [1] * n_answer,
                   "finish_reason": answer.finish_reason, "source": f"answer {number:06}"}
            file.write(json.dumps(row) + "\n")
        file.flush()
        command = [sys.executable, str(TRAINER), "eval", f"CKPT={CKPT}", f"TARGET={TARGET}",
                   f"EVAL_DATA={file.name}", f"TARGET_DEVICES={','.join(TARGET_DEVICES)}",
                   f"SEQ_LEN={max(512, longest)}", "NUM_ANCHORS=256"]
        child = subprocess.run(command, capture_output=True, text=True)
    last_words = (child.stderr.strip() or child.stdout.strip() or "no output").splitlines()[-1]
    require(child.returncode == 0, f"train_dflash.py eval ended with {child.returncode}: {last_words}")
    result = json.loads(child.stdout.splitlines()[-1])
    by_source = result.get("tau_by_source") or {"answer 000000": result["tau"]}
    taus = [by_source[name] for name in sorted(by_source)]
    require(len(taus) == len(answers), f"train_dflash.py eval walked {len(taus)} of {len(answers)} answers")
    passes = [round((len(a.ids) - 1) / tau) for a, tau in zip(answers, taus, strict=True)]
    return Walk(result["tau"], passes, result["tau_answers"])


@torch.no_grad()
def greedy_share(answers: list[Answer]) -> float:
    """The part of the answers' tokens that are TARGET's own first choice after the tokens before them."""
    device = torch.device(TARGET_DEVICES[0])
    model = load_model(TARGET, device, compute_dtype(device), 0)
    same = 0
    for answer in answers:
        ids = torch.tensor([answer.prompt_ids + answer.ids], device=device)
        logits = forward_whole(model, ids).logits[0, len(answer.prompt_ids) - 1:-1]  # (T, V)
        same += int((logits.argmax(-1) == ids[0, len(answer.prompt_ids):]).sum())
    return same / sum(len(a.ids) for a in answers)


# ---------------------------------------------------------------------------------------------- the verdict

def other_prompts(prompts: list[Prompt], answers: list[Answer], tokenizer) -> list[str]:
    """One line where the server's prompt ids are not those of TARGET's template with CHAT_TEMPLATE_KWARGS."""
    ids = [(prompt.ids, answer.prompt_ids) for prompt, answer in zip(prompts, answers, strict=True)]
    others = [(ours, theirs) for ours, theirs in ids if ours != theirs]
    if not others:
        return []
    ours, theirs = others[0]
    unequal = (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
    at = next(unequal, min(len(ours), len(theirs)))
    here, there = (tokenizer.decode(some[at:at + 8]) if tokenizer else some[at:at + 8] for some in others[0])
    return [f"chat template or thinking mode: {len(others)} of {len(ids)} prompts have other token ids there "
            f"than by TARGET's template with CHAT_TEMPLATE_KWARGS = {CHAT_TEMPLATE_KWARGS}; the first "
            f"from token {at} on: {there!r} there, {here!r} here"]


def causes_seen(checkpoint: Checkpoint, prompts: list[Prompt], answers: list[Answer], share: float | None,
                tokenizer) -> list[str]:
    """Causes of another acceptance for which there is evidence."""
    found = []
    reports = [a.report for a in answers]
    drafted = [r.drafted / r.passes for r in reports if r.drafted is not None]
    if drafted and round(max(drafted)) != checkpoint.drafts:
        found.append(f"block length: the server drafts {max(drafted):.3g} tokens a pass, a {checkpoint.head} "
                     f"checkpoint of block_size {checkpoint.block_size} is trained for {checkpoint.drafts}")
    found += other_prompts(prompts, answers, tokenizer)
    if share is not None and share < GREEDY_SHARE:
        found.append("quantised or other target, or answers that are not greedy: only "
                     f"{share:.3f} of their tokens are TARGET's own first choice")
    longest = max(len(a.prompt_ids) + len(a.ids) for a in answers)
    if checkpoint.trained_length and longest > checkpoint.trained_length:
        found.append(f"context longer than trained: {longest} tokens, SEQ_LEN was "
                     f"{checkpoint.trained_length} (fewer tokens a pass, on both sides)")
    return found


def causes_possible(checkpoint: Checkpoint) -> list[str]:
    """Causes that can't be seen from outside the server (docs/serving.md)."""
    possible = ["another checkpoint than CKPT is loaded there"]
    if checkpoint.sliding:
        possible.append("sliding layers whose window is ignored, or which are causal there and not in "
                        "training, or the reverse (is_causal in config.json)")
    if checkpoint.scaled:
        possible.append("a target that scales its embeddings or caps its logits (Gemma): vLLM's class for "
                        "plain DFlash ignores both")
    possible.append("the drafter is quantised there, or runs in another precision")
    possible.append("vLLM's CPU build, which uses the first layer's k_norm for all layers' context keys")
    return possible


def own_figure(answers: list[Answer]) -> str:
    """Tokens a pass in the server's own counting."""
    passes = sum(a.report.passes for a in answers)
    if any(a.report.accepted is None for a in answers if len(a.ids) > 1):
        return "not said"
    return f"{1 + sum(a.report.accepted or 0 for a in answers) / passes:.4f}"


def print_table(checkpoint: Checkpoint, answers: list[Answer], ours: Walk) -> float:
    """The two sides beside each other. -> the server's tokens a pass over eval's, less 1."""
    passes = [round(a.report.passes) for a in answers]
    tokens = [len(a.ids) - 1 for a in answers]                    # an answer's first comes from the prefill
    theirs = sum(tokens) / sum(passes)
    each = [n / p for n, p in zip(tokens, passes, strict=True)]
    equal = sum(a == b for a, b in zip(passes, ours.passes, strict=True))
    cut = sum(a.finish_reason == "length" for a in answers)
    print(f"{len(answers)} answers, {sum(tokens) + len(tokens)} tokens, {cut} cut at MAX_NEW_TOKENS; "
          f"{checkpoint.head}, block_size {checkpoint.block_size}, {checkpoint.drafts} drafts a pass")
    print(f"{'':38}{'server':>10}{'eval':>10}")
    print(f"{'passes':38}{sum(passes):10}{sum(ours.passes):10}   equal on {equal} of {len(answers)} answers")
    print(f"{'tokens a pass, mean over passes (tau)':38}{theirs:10.4f}{ours.tau:10.4f}")
    print(f"{'tokens a pass, mean over answers':38}{sum(each) / len(each):10.4f}{ours.over_answers:10.4f}")
    print(f"{'1 + accepted / passes, as it reports':38}{own_figure(answers):>10}{'':10}   with the drafts "
          "accepted after an answer's end")
    return theirs / ours.tau - 1


def check_settings() -> None:
    for name in ("CKPT", "TARGET"):
        require(globals()[name], f"{name} is empty: it is needed")
    settings.require_positive(sys.modules[__name__], "N", "MAX_NEW_TOKENS", "TIMEOUT_S", "TOLERANCE")
    require(URL or ANSWERS, "URL is empty: give a server, or ANSWERS of an earlier call")
    require(EVAL_DATA, "EVAL_DATA is empty: it is needed")
    url = urlsplit(URL)
    require(not URL or (url.scheme in ("http", "https") and url.netloc and url.path in ("", "/")),
            f"URL = {URL}: must look like http://host:port")
    require(TARGET_DEVICES, "TARGET_DEVICES is empty: it is needed")


def main() -> int:
    """-> 0 equal, 1 different."""
    check_settings()
    checkpoint = read_checkpoint(CKPT)
    load_config(TARGET)  # a TARGET that isn't there is said before its tokenizer is missed
    tokenizer = load_tokenizer(TARGET)
    prompts = read_prompts(tokenizer)
    if URL:
        answers, where = ask_all(prompts)
        print(f"acceptance read from {where}")
        if ANSWERS:
            keep_answers(answers)
    else:
        answers = kept_answers()
        require(len(answers) == len(prompts), f"ANSWERS = {ANSWERS}: holds {len(answers)} answers, EVAL_DATA "
                f"and N give {len(prompts)} prompts")
    long_enough = [len(answer.ids) > 1 for answer in answers]  # the prefill gives the first token: no pass
    prompts = list(itertools.compress(prompts, long_enough))
    answers = list(itertools.compress(answers, long_enough))
    require(answers, "no answer has two tokens: nothing was drafted")
    ours = walk(answers)
    share = greedy_share(answers) if CHECK_GREEDY else None
    off = print_table(checkpoint, answers, ours)
    if share is not None:
        print(f"{share:.4f} of the answers' tokens are TARGET's own first choice")
    seen = causes_seen(checkpoint, prompts, answers, share, tokenizer)
    equal = abs(off) <= TOLERANCE
    print(f"verdict: {'EQUAL' if equal else 'DIFFERENT'}, {100 * off:+.2f} % from eval's tau; up to "
          f"{100 * TOLERANCE:g} % (TOLERANCE) is taken for rounding")
    for cause in seen:
        print(f"  seen: {cause}")
    if not equal:
        for cause in causes_possible(checkpoint):
            print(f"  possible: {cause}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(settings.run_program(sys.modules[__name__], main, sys.argv[1:]))
