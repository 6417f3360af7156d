"""Write golden.json: what Transformers makes of these templates, which are ours, in the formats of ten families.

python tests/tokenizer/families/make_golden.py
"""

import json
from pathlib import Path

HERE = Path(__file__).parent
SPECIAL = {
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "qwen2": ("", "<|im_end|>"),
    "gemma": ("<bos>", "<eos>"),
    "phi3": ("<s>", "<|endoftext|>"),
    "command-r": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "zephyr": ("<s>", "</s>"),
    "deepseek": ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "granite": ("<|end_of_text|>", "<|end_of_text|>"),
}
SYSTEM = {"role": "system", "content": "  Be brief & kind; answer in <b>prose</b>.\n"}
ASK, REPLY = {"role": "user", "content": "What is 2 + 2, 'é' or \"東京\"?\n"}, {"role": "assistant", "content": " <think>add</think>\n4.  "}
TALKS = {
    "one question": [ASK],
    "system and question": [SYSTEM, ASK],
    "a longer talk": [SYSTEM, ASK, REPLY, {"role": "user", "content": "and\n\n 3 + 3?"}],
    "ends with an answer": [ASK, REPLY],
    "two users in a row": [ASK, ASK],
    "an empty question": [{"role": "user", "content": ""}],
}
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "a < b & 'c'", "parameters": {"type": "object", "é": [1, 2.5, None]}}}
]
VARIANTS = {
    "": {},
    "no prompt": {"add_generation_prompt": False},
    "tools": {"tools": TOOLS},
    "variables": {"enable_thinking": False, "controls": {"x": 1}},
}


def main() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    golden = []
    for family, (bos, eos) in SPECIAL.items():
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
        template = (HERE / f"{family}.jinja").read_text(encoding="utf-8")
        special = {"bos_token": bos, "eos_token": eos}
        for talk, messages in TALKS.items():
            for variant, options in VARIANTS.items():
                settings = {"add_generation_prompt": True, **options}
                tokenizer.chat_template = template
                tokenizer.bos_token, tokenizer.eos_token = bos or None, eos
                entry = {"family": family, "talk": talk, "variant": variant, "special_tokens": {k: v for k, v in special.items() if v}}
                try:
                    entry["text"] = tokenizer.apply_chat_template(messages, tokenize=False, **settings)
                except Exception as error:
                    entry["error"] = str(error)
                golden.append({**entry, "messages": messages, "options": settings})
    (HERE / "golden.json").write_text(json.dumps(golden, ensure_ascii=False, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main()
