"""The questions: repeatable, different, and answered by a reader of the prompt alone."""

import itertools
import json

import pytest

from minserve.quantize.tasks import KINDS, NUM_EXAMPLES, make_tasks


def test_a_seed_gives_the_same_questions() -> None:
    assert make_tasks(4, seed=1) == make_tasks(4, seed=1)
    assert make_tasks(4, seed=1) != make_tasks(4, seed=2)
    assert make_tasks(4, seed=1)[:2] == make_tasks(2, seed=1)[:2]  # more questions, the same first ones


def test_there_are_as_many_of_each_kind() -> None:
    tasks = make_tasks(5)
    assert [task.kind for task in tasks] == [kind for kind in KINDS for _ in range(5)]
    assert len({task.prompt for task in tasks}) == len(tasks)
    assert all("\n" not in task.answer and task.answer == task.answer.strip() for task in tasks)


def test_the_questions_of_a_kind_share_their_examples() -> None:
    tasks = make_tasks(3)
    for kind, count in NUM_EXAMPLES.items():
        heads = {task.prompt.rpartition("\n")[0] for task in tasks if task.kind == kind}
        if count:
            assert len(heads) == 1 and len(heads.pop().splitlines()) == count


def test_answers_follow_from_the_prompts() -> None:
    for task in make_tasks(20):
        last = task.prompt.splitlines()[-1]
        if task.kind == "copy":
            assert task.prompt.splitlines()[0].endswith(f"{last.partition(': ')[2]} {task.answer}")
        elif task.kind == "look up":
            assert f"{last} {task.answer}" in task.prompt.splitlines()[:-1]
        elif task.kind == "format":
            assert ", ".join(map(str, json.loads(task.answer).values())) == last.removesuffix(" =>")
        elif task.kind == "count":
            numbers = [int(number) for number in f"{last} {task.answer}".removesuffix(".").split(", ")]
            assert len({b - a for a, b in itertools.pairwise(numbers)}) == 1 and len(numbers) == 6
        else:
            a, b = last.removesuffix(" =").split(" + ")
            assert int(a) + int(b) == int(task.answer)


def test_there_are_only_so_many_questions() -> None:
    assert len(make_tasks(100)) == 500
    for count in (0, 101):
        with pytest.raises(ValueError, match=f"from 1 to 100 questions of each kind, {count} were asked for"):
            make_tasks(count)
