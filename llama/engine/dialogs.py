"""Dialogs to prompts, and results to answers: what `chat_completion` does around `generate`."""

from typing import Any

from ..chat import ChatFormat


def chat_prompts(
    chat_format: ChatFormat, tokenizer: Any, dialogs: list[Any], budget: int | None
) -> tuple[dict[int, list[int]], dict[int, int]]:
    """The prompts of the dialogs that are not refused, by number, and how many messages each lost to fit in `budget`
    (None: they stay whole). LlamaError names the dialog.
    """
    for i, dialog in enumerate(dialogs):
        chat_format.check(dialog, i)
    prompts, dropped = dict[int, list[int]](), dict[int, int]()
    for i, dialog in enumerate(dialogs):
        if chat_format.is_unsafe(dialog, tokenizer):
            continue
        if budget is not None:
            dialog, dropped[i] = chat_format.truncate(tokenizer, dialog, budget)
        prompts[i] = chat_format.encode(tokenizer, dialog, i)
    return prompts, dropped


def chat_answers(found: dict[int, tuple[str, dict[str, Any]]], dropped: dict[int, int]) -> dict[int, Any]:
    """Texts and what goes with them, by the number of their dialog, as answers; `dropped` is told where it is known."""
    return {
        i: {"generation": {"role": "assistant", "content": text}, **extras}
        | ({"dropped": dropped[i]} if i in dropped else {})
        for i, (text, extras) in found.items()
    }
