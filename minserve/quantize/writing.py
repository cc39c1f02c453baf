"""What a model writes beside another: greedy texts and short answers, by the engine itself.

Why: a distribution that has moved a little may still have the same best token, and a single other token makes another text. Texts are
compared up to their first difference; answers are right or wrong.

Invariant: the same runner writes the same texts.

Taught in notebook 08.
"""

from collections.abc import Sequence

from minserve.core.block_manager import BlockManager
from minserve.core.clock import WallClock
from minserve.core.engine import Engine, ModelLimits
from minserve.core.request import SamplingParams
from minserve.core.scheduler import Scheduler, SchedulerConfig
from minserve.model.runner import ModelRunner
from minserve.quantize.subjects import BLOCK_SIZE, OpenModel
from minserve.quantize.tasks import Task

PROMPT_TOKENS = 32  # of a document that a greedy text begins with
GREEDY_TOKENS = 64


def greedy(
    model: OpenModel, runner: ModelRunner, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], stops: bool
) -> list[list[int]]:
    """The engine's greedy answers, all prompts served together. A request that fails (NaN) gives what it has so far."""
    blocks = BlockManager(runner.cache.num_blocks, BLOCK_SIZE, prefix_caching=True)
    limits = ModelLimits(model.config.max_positions, model.config.vocab_size, model.tokenizer.eos_ids)
    engine = Engine(Scheduler(SchedulerConfig(), blocks), runner, WallClock(), limits)
    params = [SamplingParams(max_tokens=most, ignore_eos=not stops) for most in max_tokens]
    added = [engine.add(prompt, own)[0] for prompt, own in zip(prompts, params, strict=True)]
    while engine.has_work:
        engine.step()
    return [request.output_ids for request in added]


def greedy_texts(model: OpenModel, runner: ModelRunner, texts: Sequence[Sequence[int]]) -> list[list[int]]:
    prompts = [text[:PROMPT_TOKENS] for text in texts]
    return greedy(model, runner, prompts, [GREEDY_TOKENS] * len(prompts), stops=False)


def num_agreeing(expected: Sequence[int], got: Sequence[int]) -> int:
    """Tokens before the first difference. Behind it two texts are about different things, and equal tokens say nothing.

    >>> num_agreeing([1, 2, 3, 4], [1, 2, 9, 4])
    2
    """
    return next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), min(len(expected), len(got)))


def marks_of(model: OpenModel, runner: ModelRunner, tasks: Sequence[Task]) -> list[bool]:
    """Which questions are answered exactly: the first line of the greedy answer, no more and no less."""
    encode = model.tokenizer.encode
    most = [len(encode(f" {task.answer}\n")) for task in tasks]
    answers = greedy(model, runner, [encode(task.prompt) for task in tasks], most, stops=True)
    lines = [model.tokenizer.decode(ids).split("\n")[0].strip() for ids in answers]
    return [line == task.answer for line, task in zip(lines, tasks, strict=True)]
