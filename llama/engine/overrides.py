"""Whether a model is ours through and through, or somebody's hook or override would notice another schedule."""

from typing import Any

from torch import nn

from .. import model as architecture
from ..distributed import ColumnParallelLinear, ParallelEmbedding, RowParallelLinear

_FORWARDS: dict[type, Any] = {
    cls: cls.forward
    for cls in (
        architecture.Transformer,
        architecture.TransformerBlock,
        architecture.Attention,
        architecture.FeedForward,
        architecture.RMSNorm,
        ColumnParallelLinear,
        RowParallelLinear,
        ParallelEmbedding,
        nn.ModuleList,
    )
}
# torch has a function for this, but not in 2.5
_GLOBAL_HOOKS = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def has_overrides(model: Any) -> bool:
    """Whether any forward is not ours: a stub, a subclass, a patched method."""
    if type(model) is not architecture.Transformer:
        return True
    for module in model.modules():
        forward = _FORWARDS.get(type(module))
        if forward is None or type(module).forward is not forward or "forward" in vars(module):
            return True
    return False


def has_hooks_or_overrides(model: Any) -> bool:
    """Whether any forward is not ours, or any hook, a global one included, would notice a difference."""
    if has_overrides(model) or any(getattr(nn.modules.module, hooks) for hooks in _GLOBAL_HOOKS):
        return True
    return any(getattr(module, hooks) for module in model.modules() for hooks in _HOOKS)
