"""Does z-lab's client accept what the trainer's walk says? Decodes with `dflash`, then walks the same ids.

    python tools/compare_client.py CKPT=<checkpoint> TARGET=<dir> DATA=<answers.jsonl> [N=100] [OUT=file]

Per prompt: the client's ids against plain greedy decoding in fp32 on the CPU; over all answers that ended by
themselves: the client's mean acceptance against `train_dflash.py eval` on the ids that the client produced.
Needs dflash==0.1.0.
"""
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TRAINER = Path(__file__).resolve().parents[1] / "train_dflash.py"


def decode(settings):
    """-> (rows of answers that ended by themselves, their acceptance lengths, prompts, unequal answers)."""
    import dflash.model as client
    client._cuda_time = time.perf_counter
    target = AutoModelForCausalLM.from_pretrained(settings["TARGET"], dtype=torch.float32).eval()
    drafter = client.DFlashDraftModel.from_pretrained(settings["CKPT"], dtype=torch.float32).eval()
    tokenizer, rows, lengths, unequal, done = AutoTokenizer.from_pretrained(settings["TARGET"]), [], [], 0, 0
    stop = target.generation_config.eos_token_id
    stop = stop if isinstance(stop, list) else [stop]
    for line in Path(settings["DATA"]).read_text().splitlines():
        row = json.loads(line)
        if done == int(settings["N"]) or row.get("finish_reason") == "length":
            continue
        prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True,
                                               return_tensors="pt", return_dict=True)["input_ids"]
        limit = len(tokenizer(row["messages"][1]["content"])["input_ids"]) + 1 + drafter.block_size
        with torch.no_grad():
            plain = target.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                                    max_new_tokens=limit)
        out = client.dflash_generate(drafter, target, prompt, limit, stop, return_stats=True)
        unequal += out.output_ids[0].tolist() != plain[0].tolist()
        done += 1
        if out.output_ids[0, -1].item() in stop:
            ids = out.output_ids[0].tolist()
            n = prompt.shape[1]
            rows.append({"input_ids": ids, "loss_mask": [0] * n + [1] * (len(ids) - n)})
            lengths += out.acceptance_lengths
        print(f"{done}: {len(plain[0]) - prompt.shape[1]} tokens, {len(out.acceptance_lengths)} passes",
              flush=True)
    return rows, lengths, done, unequal


def main(argv):
    settings = {"N": "100", "OUT": "", **dict(a.partition("=")[::2] for a in argv)}
    if set(settings) != {"CKPT", "TARGET", "DATA", "N", "OUT"}:
        sys.exit(f"error: CKPT=, TARGET=, DATA= are needed, N= and OUT= may be there, got {argv}")
    rows, lengths, done, unequal = decode(settings)
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as f:
        f.write("".join(json.dumps(r) + "\n" for r in rows))
        f.flush()
        same = [f"{name}={settings[name]}" for name in ("CKPT", "TARGET")]
        command = [sys.executable, str(TRAINER), "eval", *same, f"EVAL_DATA={f.name}", "TARGET_DEVICES=cpu",
                   "SEQ_LEN=512", "NUM_ANCHORS=256"]
        out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ours, theirs = json.loads(out.splitlines()[-1])["tau"], sum(lengths) / len(lengths)
    text = (f"{done} prompts, {unequal} answers differ from plain greedy; {len(rows)} ended by themselves: "
            f"client {theirs:.6f} tokens a pass over {len(lengths)} passes, the trainer's walk on the same ids "
            f"{ours:.6f}")
    print(text)
    if settings["OUT"]:
        Path(settings["OUT"]).write_text(text + "\n")
    return 0 if not unequal and abs(ours - theirs) < 1e-6 else 1


if __name__ == "__main__":
    if {"-h", "--help"} & set(sys.argv[1:]):
        sys.exit(print(__doc__))
    sys.exit(main(sys.argv[1:]))
