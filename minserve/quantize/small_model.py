"""A small Llama trained here, in fp32, for those who do not trust a table made on weights that were in 4 bits before.

Why: the default model's weights come from a 4-bit file. Whoever quantizes them again may only be measuring how two grids fit together.
These weights have never been on a grid: 3.7 million of them, trained for a few minutes on most of the project's own prose, with a
tokenizer of 2,048 entries made of the same text. What was held out is written beside the model, for measuring:

    python -m minserve.quantize.small_model --out DIR
    minserve quality --model DIR --text DIR/held_out.txt --tasks 0 --reference fp32 --weights int8,int4,gptq-int4,awq-int4

It is no useful model. It knows the words of this project and which of them follow each other.

Invariant: the same seed on the same machine gives the same weights; no source that is held out is trained on.

Taught in notebook 09.
"""

import argparse
import re
from pathlib import Path

import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from minserve.quantize.prose import SECTION, own_prose
from minserve.quantize.walk import HELD_OUT

HELD_OUT_FILE = "held_out.txt"
END = "<end>"
SHAPE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
WINDOW_TOKENS = 128
WINDOWS_A_STEP = 8
NUM_STEPS = 300
WARM_UP_STEPS = 20
LEARNING_RATE = 2e-3


def split(text: str) -> tuple[str, str]:
    """What is trained on, and what is held out: whole sources, since one explains a thing in words that its next paragraph uses again.

    >>> [part.split() for part in split("=== a\\n\\nOne.\\n\\n=== 06_scheduler.ipynb\\n\\nTwo.\\n")]
    [['===', 'a', 'One.'], ['===', '06_scheduler.ipynb', 'Two.']]
    """
    sections = re.split(rf"^(?={re.escape(SECTION)})", text, flags=re.MULTILINE)
    held = [section for section in sections if section.startswith(tuple(SECTION + name for name in HELD_OUT))]
    return "".join(section for section in sections if section not in held), "".join(held)


def make_tokenizer(text: str, vocab_size: int = SHAPE["vocab_size"]) -> PreTrainedTokenizerFast:
    """Byte pairs, learned from the text."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=END, eos_token=END)


def train(token_ids: Tensor, config: LlamaConfig, num_steps: int = NUM_STEPS, seed: int = 0, progress: bool = True) -> LlamaForCausalLM:
    """AdamW on windows of the text, the learning rate falling along a cosine. token_ids: [N]"""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate(step, num_steps))
    bar = tqdm(range(num_steps), desc="training", disable=not progress)
    for _ in bar:
        starts = torch.randint(len(token_ids) - WINDOW_TOKENS, (WINDOWS_A_STEP,))
        windows = token_ids[starts[:, None] + torch.arange(WINDOW_TOKENS)]
        loss = model(input_ids=windows, labels=windows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    return model.eval()


def _rate(step: int, num_steps: int) -> float:
    """The share of the learning rate: up in a line, down along half a cosine."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return warm * float(0.5 + 0.5 * torch.cos(torch.tensor(torch.pi * step / num_steps)))


def make(directory: Path, num_steps: int = NUM_STEPS, seed: int = 0, progress: bool = True) -> Path:
    """Train the model and write it, its tokenizer, and the text that was held out."""
    trained_on, held_out = split(own_prose())
    tokenizer = make_tokenizer(trained_on)
    token_ids = torch.tensor(tokenizer.encode(trained_on))
    end = tokenizer.backend_tokenizer.token_to_id(END)
    model = train(token_ids, LlamaConfig(**SHAPE, bos_token_id=end, eos_token_id=end), num_steps, seed, progress)
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / HELD_OUT_FILE).write_text(held_out, encoding="utf-8")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minserve.quantize.small_model", description="train a small fp32 model")
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--steps", type=int, default=NUM_STEPS, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"model: {make(arguments.out, arguments.steps, arguments.seed)}")


if __name__ == "__main__":
    main()
