"""`minserve demo`: two dozen real requests, served at once on this machine.

It shows the whole engine in under a minute: chats and completions of mixed length arrive together, join and leave the
running batch step by step, share the blocks of a common system prompt, and end in one table and one picture.
"""

import time
from pathlib import Path

from minserve.core.report import table
from minserve.core.request import SamplingParams
from minserve.llm import LLM, RequestOutput

SYSTEM = (
    "You are the guide of a small museum of the sea. The museum has four rooms: the lighthouse room with its lamps and lenses, the "
    "chart room with old maps and compasses, the workshop where wooden boats are repaired, and the aquarium with fish of the North Sea. "
    "It opens at nine and closes at five, on Sundays at noon. Answer visitors in one or two short and friendly sentences."
)
VISITORS = (
    "When do you open on Sundays?",
    "What can I see in the chart room?",
    "My children love boats. Where should we go first?",
    "How does a lighthouse lens work?",
    "Which fish live in the North Sea?",
    "Is there something to do when it rains?",
    "How long does a visit take?",
    "Can I repair my own boat here?",
)
QUESTIONS = (
    ("What is the capital of France?", 24),
    ("Write a haiku about the sea.", 40),
    ("Explain in one sentence what a cache is.", 48),
    ("Give three names for a ship's cat.", 48),
    ("What is 12 plus 30?", 24),
    ("Name the planets of the solar system in order.", 64),
    ("Why is the sky blue? Answer briefly.", 72),
    ("Translate 'good morning' into Spanish.", 24),
)
BEGINNINGS = (
    ("The capital of France is", 12),
    ("Once upon a time, a keeper of a lighthouse", 72),
    ("The three most important rules of sailing are", 64),
    ("def fibonacci(n):", 48),
    ("Dear Sir or Madam, I am writing to you because", 48),
    ("The recipe for a simple bread: mix flour, water, salt and", 56),
    ("In the year 2050 the city", 64),
    ("List of prime numbers: 2, 3, 5, 7,", 32),
)


def main(model: str | None = None, figure: str | None = "figures/demo_timeline.png") -> None:
    """Serve the demo's requests, print three answers and the table, write the picture."""
    with LLM(model, max_running=16) as llm:  # fewer than arrive, so that some wait and join as others leave
        prompts, params = _requests(llm)
        llm.generate(prompts[:2], SamplingParams(max_tokens=2), progress=False)  # first use: memory is touched, kernels are chosen
        llm.engine.scheduler.blocks.flush_cache()
        llm.reset_trace()
        print(f"{len(prompts)} requests arrive at once ...")
        start_s = time.perf_counter()
        outputs = llm.generate(prompts, params)
        wall_s = time.perf_counter() - start_s
        for output in (outputs[0], outputs[len(VISITORS) + 5], outputs[-7]):  # a visitor, a question, a beginning
            _print_answer(llm, output)
        print(f"\nserved in {wall_s:.1f} s by {llm.describe().splitlines()[0]}")
        if figure is not None:
            _draw(llm, figure)
        print(f"\n{table(llm.trace.summary(), llm.num_blocks)}")


def _requests(llm: LLM) -> tuple[list[list[int]], list[SamplingParams]]:
    """Token ids and parameters of all requests: visitors of the museum, chats, completions."""
    chats = [([{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}], 48) for text in VISITORS]
    chats += [([{"role": "user", "content": text}], max_tokens) for text, max_tokens in QUESTIONS]
    prompts = [(llm.tokenizer.chat(messages), max_tokens) for messages, max_tokens in chats]
    prompts += [(llm.tokenizer.encode(text), max_tokens) for text, max_tokens in BEGINNINGS]
    return [ids for ids, _ in prompts], [SamplingParams(max_tokens=max_tokens) for _, max_tokens in prompts]


def _print_answer(llm: LLM, output: RequestOutput) -> None:
    prompt = llm.tokenizer.decode(list(output.prompt_ids)).strip().replace("\n", " ")
    shown = prompt if len(prompt) <= 90 else "... " + prompt[-86:]
    print(f"\n[{output.request_id}] {shown}\n  -> {output.text.strip()}  ({output.finish_reason})")


def _draw(llm: LLM, path: str) -> None:
    try:
        from minserve.lab import figures  # matplotlib comes with the extra `lab`; serving does not need it
    except ImportError:
        print("no picture: pip install 'minserve[lab]' brings matplotlib")
        return
    print(f"timeline: {figures.save(figures.timeline(llm.trace), Path(path))}")
