"""Llama 2 in Python: the published package's interface, right, fast and readable.

    from llama import Llama

    with Llama.build("llama-2-7b", "tokenizer.model", max_seq_len=512, max_batch_size=4) as generator:
        print(generator.text_completion(["The capital of France is"])[0]["generation"])

`Llama` builds a generator from a checkpoint: it completes texts, answers dialogs, streams, scores. `Conversation` is a
dialog that goes on, `serve` lets many ranks answer one server. `Transformer` and `ModelArgs` are the model, for
research, `Tokenizer` is text to ids and back, `encode_dialog` the chat format. A mistake of the caller's is a
`LlamaError`.

At a shell: python -m llama {complete, chat, trace, convert, info, bench}.
"""

from .chat import encode_dialog
from .errors import LlamaError
from .generation import Dialog, Llama, Step
from .model import ModelArgs, Transformer
from .serving.conversation import Conversation
from .serving.ranks import serve
from .tokenizer import Tokenizer

__all__ = [
    "Conversation",
    "Dialog",
    "Llama",
    "LlamaError",
    "ModelArgs",
    "Step",
    "Tokenizer",
    "Transformer",
    "encode_dialog",
    "serve",
]
