"""Above one generator: a conversation that keeps its cache, and many ranks behind one server."""

from .conversation import Conversation
from .ranks import serve

__all__ = ["Conversation", "serve"]
