"""Who read which block: the counts, and that the picture shows them."""

from dataclasses import dataclass

import numpy as np
import pytest

from minserve.lab.style import pale, request_colour
from minserve.lab.traffic import BlockReads, Program, Row, block_reads, traffic_map
from tests.lab.boxes import boxes


@dataclass(frozen=True)
class Seen:
    program: Program
    kind: str
    tensor: str
    element_bytes: int
    elements: np.ndarray


BLUE, ORANGE = request_colour(0), request_colour(1)
FIRST, SECOND = (0, 0, 0), (1, 0, 0)


def test_reads_are_added_up_by_program_and_block() -> None:
    accesses = [
        Seen(FIRST, "load", "codes", 2, np.array([0, 1, 4])),  # blocks of 4 elements: two of block 0, one of block 1
        Seen(FIRST, "load", "codes", 2, np.array([5, 5])),  # what one load asks twice counts once
        Seen(SECOND, "load", "codes", 2, np.array([4, 5, 6])),
        Seen(SECOND, "store", "codes", 2, np.array([8])),
        Seen(SECOND, "load", "q", 2, np.array([0])),
    ]
    reads = block_reads(accesses, "codes", num_block_elements=4, num_blocks=3)
    assert {program: counts.tolist() for program, counts in reads.by_program.items()} == {FIRST: [4, 4, 0], SECOND: [0, 6, 0]}
    assert reads.distinct_bytes.tolist() == [4, 6, 0]
    assert reads.times_fetched.tolist() == [1.0, pytest.approx(10 / 6), 0.0]


def test_nothing_read_is_no_division_by_zero() -> None:
    reads = block_reads([], "codes", num_block_elements=4, num_blocks=2)
    assert reads.by_program == {} and reads.times_fetched.tolist() == [0.0, 0.0]
    assert isinstance(reads, BlockReads)


def test_a_box_is_filled_up_to_the_share_that_was_read() -> None:
    rows = [Row("R0", 0, np.array([8, 0, 4])), Row("R1", 1, np.array([0, 8, 0]))]
    figure = traffic_map({"One program a request": rows}, [[2, 0], [1]], part_bytes=8, num_blocks=3)
    [ax] = figure.axes
    found = {(box.left + 0.46, box.colour, round(box.height, 2)) for box in boxes(ax)}
    assert found == {(0, pale(BLUE, 0.6), 0.84), (2, pale(BLUE, 0.6), 0.42), (1, pale(ORANGE, 0.6), 0.84)}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["R0", "R1"]


def test_a_box_names_the_place_of_its_block_in_the_table() -> None:
    rows = [Row("R0", 0, np.array([8, 0, 4]))]
    figure = traffic_map({"Title": rows}, [[2, 0]], part_bytes=8, num_blocks=3)
    [ax] = figure.axes
    words = {(text.get_position()[0], text.get_text()) for text in ax.texts}
    assert {(0, "1"), (2, "0")} <= words and "Title" in {word for _, word in words}


def test_panels_stand_one_above_the_other_on_the_same_blocks() -> None:
    row = Row("R0", 0, np.array([8, 0]))
    figure = traffic_map({"One": [row], "Two": [row, row]}, [[0]], part_bytes=8, num_blocks=2)
    first, second = figure.axes
    assert first.get_xlim() == second.get_xlim() and len(second.get_yticklabels()) == 2
    assert figure.get_size_inches()[1] < 3
