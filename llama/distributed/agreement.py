"""What all ranks must have in common, compared: else a difference gives other tokens, or a long wait."""

from collections.abc import Mapping

from ..errors import LlamaError
from .groups import gather_objects


def check_same_on_all_ranks(where: str, mine: Mapping[str, object]) -> None:
    """LlamaError, on every rank alike, that names what of `mine` is not the same on all of them; for every rank."""
    found = gather_objects({name: str(value) for name, value in mine.items()})
    for rank, theirs in enumerate(found):
        names = [name for name in found[0].keys() | theirs.keys() if found[0].get(name) != theirs.get(name)]
        if names:
            values = "; ".join(
                f"{name} is {found[0].get(name)!s:.100} on rank 0 and {theirs.get(name)!s:.100} on rank {rank}"
                for name in sorted(names)
            )
            raise LlamaError(f"the ranks do not agree {where}: {values}: give all ranks the same")
