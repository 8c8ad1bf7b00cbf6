"""`Conversation` under the name it is documented by; it lives in `llama.serving`."""

from .serving.conversation import Conversation

__all__ = ["Conversation"]
