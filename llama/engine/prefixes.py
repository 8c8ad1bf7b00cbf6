"""Prompts that begin alike: which of one call are worth being fed in part once for all."""

from collections.abc import Sequence

from .request import RowState

# Positions. Shorter beginnings are cheaper fed again than in a forward pass of their own, which reads all weights.
MIN_SHARED = 32


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids two lists begin with alike."""
    shorter = min(len(one), len(other))
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), shorter)


def shared_length(rows: Sequence[RowState]) -> int:
    """Positions that rows' prompts can share: those of the ids in common but the last, whose state every row needs, and
    whose log-probabilities of what follows are the row's own.
    """
    prompts = [row.prompt for row in rows]
    return common_length(min(prompts), max(prompts)) - 1  # the others lie between these two


def prefix_runs(rows: Sequence[RowState]) -> list[list[RowState]]:
    """Rows, in order, as runs that share at least `MIN_SHARED` positions or else nothing; each run longest first."""
    groups: list[list[RowState]] = []
    for row in rows:
        if groups and shared_length([groups[-1][0], row]) >= MIN_SHARED:
            groups[-1].append(row)
        else:
            groups.append([row])
    runs: list[list[RowState]] = []
    strangers = False
    for group in groups:
        if len(group) == 1 and strangers:
            runs[-1] += group
        else:
            runs.append(group)
        strangers = len(group) == 1
    return [sorted(run, key=lambda row: -len(row.prompt)) for run in runs]
