"""The real model against transformers, in fp32 and greedy: all 64 requests of the fixed workload, served together.

tests/data/greedy_mixed_fp32.json holds what `transformers.generate` gave for them (static batches of 16, left-padded; the file says
with which versions). A token may differ only where transformers itself had its two best logits within 1e-3.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from minserve import LLM, SamplingParams
from minserve.bench import load_workload

RECORDED = Path(__file__).parent / "data" / "greedy_mixed_fp32.json"
NEAR_TIE = 1e-3


@pytest.fixture(scope="module")
def recorded() -> dict[str, list[int]]:
    return json.loads(RECORDED.read_text(encoding="utf-8"))["tokens"]


@pytest.fixture(scope="module")
def reference(default_model_dir: Path):
    """transformers' model in fp32, on two threads: it and the engine below are the only large work of the tests."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32).eval()
    torch.set_num_threads(num_threads)


@torch.inference_mode()
def gaps(reference, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> list[float]:
    """By how much transformers prefers another token to each of the outputs, given those before it; 0 where it agrees."""
    logits = reference(torch.tensor([[*prompt_ids, *output_ids]])).logits[0, len(prompt_ids) - 1 : -1]
    return (logits.max(dim=-1).values - logits[range(len(output_ids)), list(output_ids)]).tolist()


def test_all_64_requests_give_the_tokens_of_transformers_generate(
    reference, recorded: dict[str, list[int]], default_model_dir: Path
) -> None:
    requests = load_workload()["mixed"]
    params = [SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True) for request in requests]
    with LLM(default_model_dir, dtype="fp32", num_blocks=1200, max_model_len=1024, num_threads=2, verbose=False) as llm:
        outputs = llm.generate([request["prompt_ids"] for request in requests], params, progress=False)
    near_ties = {}
    for request, output in zip(requests, outputs, strict=True):
        ours, theirs = output.token_ids, recorded[request["id"]]
        assert len(ours) == len(theirs) == request["max_tokens"]
        if ours != theirs:
            place = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b)
            near_ties[request["id"]] = (place, gaps(reference, request["prompt_ids"], ours[: place + 1])[place])
    print(f"differs at (place, gap of the two best logits): {near_ties}")
    assert all(gap < NEAR_TIE for _, gap in near_ties.values()), near_ties
    assert len(near_ties) <= 3, "more near ties than chance explains"


def test_the_recorded_tokens_are_still_what_transformers_chooses(reference, recorded: dict[str, list[int]]) -> None:
    """The file is checked too, for every eighth request, by one forward pass over prompt and output."""
    for request in load_workload()["mixed"][::8]:
        tokens = recorded[request["id"]]
        assert max(gaps(reference, request["prompt_ids"], tokens)) < NEAR_TIE, request["id"]
