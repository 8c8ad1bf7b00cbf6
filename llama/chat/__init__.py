"""Dialogs to ids: one object per chat format, and which of them a checkpoint gets."""

from .chatml import ChatMLFormat
from .dialog import ChatFormat, Dialog, Message, Role
from .llama2 import B_INST, B_SYS, E_INST, E_SYS, LLAMA2, SPECIAL_TAGS, UNSAFE_ERROR, Llama2Format, encode_dialog
from .llama3 import Llama3Format
from .selection import FORMATS, family_format, pick_format
from .template import TemplateFormat

__all__ = [
    "B_INST",
    "B_SYS",
    "E_INST",
    "E_SYS",
    "FORMATS",
    "LLAMA2",
    "SPECIAL_TAGS",
    "UNSAFE_ERROR",
    "ChatFormat",
    "ChatMLFormat",
    "Dialog",
    "Llama2Format",
    "Llama3Format",
    "Message",
    "Role",
    "TemplateFormat",
    "encode_dialog",
    "family_format",
    "pick_format",
]
