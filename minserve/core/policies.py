"""Who runs first, and who gives way: the part of the scheduler that is a matter of taste.

A policy orders requests. The scheduler serves the smallest first and, when blocks run out, takes the largest running
request out. The order must not change while a request lives, and no two requests may share a place in it.

Taught in notebook 06 (and, with more policies, in notebook 10).
"""

from typing import Protocol

from minserve.core.request import Request


class Policy(Protocol):
    def order(self, request: Request) -> tuple[float, ...]:
        """Place in the line: smaller is served earlier and given up later."""
        ...


class FirstComeFirstServed:
    """By priority (lower first), then by arrival. A preempted request keeps its place, so newcomers don't overtake it."""

    def order(self, request: Request) -> tuple[float, ...]:
        return (request.priority, request.arrival_s, request.order)
