"""PyTorch: the graphs that its compiler has made so far."""

from __future__ import annotations

from collections import Counter

from torch._dynamo.utils import counters


def graphs_so_far() -> tuple[int, Counter[str]]:
    """Return how many graphs were made, and how often each reason ended one."""
    # The compiler's own counters (private, torch 2.11 to 2.13).
    ended = {str(why): n for why, n in counters["graph_break"].items()}
    return counters["stats"]["unique_graphs"], Counter(ended)
