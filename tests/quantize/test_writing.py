"""Texts and answers of a net, and where two of them part."""

import torch

from minserve.quantize.subjects import make_runner
from minserve.quantize.tasks import Task
from minserve.quantize.writing import GREEDY_TOKENS, PROMPT_TOKENS, greedy, greedy_texts, marks_of, num_agreeing
from tests.model.tiny_net import full_logits
from tests.quantize.small import TEXTS, small_model


def test_texts_agree_up_to_the_first_difference() -> None:
    assert num_agreeing([1, 2, 3], [1, 2, 3]) == 3
    assert num_agreeing([1, 2, 3], [1, 2]) == 2
    assert num_agreeing([1, 2, 3], [9, 2, 3]) == 0


def test_a_greedy_text_takes_the_most_likely_token_every_time() -> None:
    model = small_model()
    decoder = model.decoder(torch.float32)
    runner = make_runner(model, decoder, "fp32", "fp32", 64)
    texts = greedy_texts(model, runner, TEXTS)
    assert [len(text) for text in texts] == [GREEDY_TOKENS] * 3
    for prompt, text in zip(TEXTS, texts, strict=True):
        logits = full_logits(decoder, prompt[:PROMPT_TOKENS] + text)
        known = logits[PROMPT_TOKENS - 1 : -1, : model.tokenizer.num_tokens_known]  # ids that mean nothing are not written
        assert known.argmax(-1).tolist() == text


def test_a_mark_is_for_the_whole_first_line() -> None:
    model = small_model()
    runner = make_runner(model, model.decoder(torch.float32), "fp32", "fp32", 64)
    encode, decode = model.tokenizer.encode, model.tokenizer.decode
    [answer] = greedy(model, runner, [encode("one ->")], [6], stops=True)
    line = decode(answer).split("\n")[0].strip()
    tasks = [Task("echo", "one ->", line), Task("echo", "one ->", f"{line}?")]
    assert marks_of(model, runner, tasks)[1] is False
