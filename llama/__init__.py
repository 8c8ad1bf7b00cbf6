"""Llama 2 in Python: the published package's interface, right, fast and readable.

from llama import Llama

with Llama.build("llama-2-7b", "tokenizer.model", max_seq_len=512, max_batch_size=4) as generator:
    print(generator.text_completion(["The capital of France is"])[0]["generation"])
"""

from .chat import encode_dialog
from .errors import LlamaError
from .generation import Dialog, Llama, Step
from .model import ModelArgs, Transformer
from .tokenizer import Tokenizer

__all__ = ["Dialog", "Llama", "LlamaError", "ModelArgs", "Step", "Tokenizer", "Transformer", "encode_dialog"]
