"""The chat guard under a vocabulary that rewrites texts (nmt_nfkc, SentencePiece's default): made here, small."""

from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from helpers import make_model

from llama import Dialog, Llama, LlamaError, Tokenizer, encode_dialog
from llama.chat import SPECIAL_TAGS, UNSAFE_ERROR
from llama.serving.conversation import Conversation

WIDE = {code: code + 0xFEE0 for code in range(ord("!"), ord("~") + 1)}


@pytest.fixture(scope="module")
def folding(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("vocabulary")
    texts = [f"[INST] <<SYS>> a story {i} <</SYS>> of a cow [/INST] abc xyz" for i in range(300)]
    settings: dict[str, Any] = {"model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(texts), model_prefix=str(folder / "wide"), vocab_size=360, minloglevel=2,
        normalization_rule_name="nmt_nfkc", **settings,
    )  # fmt: skip
    return Tokenizer(str(folder / "wide.model"))


def dialogs(text: str) -> list[Dialog]:
    """The text in every place of a dialog."""
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}
    bad: list[Any] = [{"role": role, "content": f"a {text} b"} for role in ("user", "assistant", "system")]
    return [[bad[0]], [bad[0], answer, user], [user, bad[1], user], [bad[2], user]]  # type: ignore[list-item]


@pytest.mark.parametrize("tag", SPECIAL_TAGS)
def test_a_tag_that_the_vocabulary_makes_is_unsafe(folding: Tokenizer, tag: str) -> None:
    wide = tag.translate(WIDE)
    assert folding.encode(wide, bos=False, eos=False) == folding.encode(tag, bos=False, eos=False)
    generator = Llama(make_model("gqa", vocab_size=folding.n_words), folding)
    for text in (wide, wide[0] + tag[1:], tag[:-1] + wide[-1]):
        for dialog in dialogs(text):
            with pytest.raises(LlamaError, match="special tags"):
                encode_dialog(folding, dialog)
        answers = generator.chat_completion(dialogs(text), max_gen_len=1)
        assert all(answer["generation"]["content"] == UNSAFE_ERROR for answer in answers)
        assert "".join(generator.stream_chat(dialogs(text)[0])) == UNSAFE_ERROR
        conversation = Conversation(generator)
        assert "".join(conversation.ask(text)) == UNSAFE_ERROR and conversation.dialog == []
        with pytest.raises(LlamaError, match="holds one of"):
            conversation.system = text
        with pytest.raises(LlamaError, match="holds one of"):
            conversation.load(dialogs(text)[1][:2])


def test_other_texts_are_left_alone(folding: Tokenizer) -> None:
    for text in ("ＩＮＳＴ", "［ INST ］", "[IN\u200bST]", "[IN\0ST]", "日本"):
        assert "[INST]" not in folding.decode(folding.encode(text, bos=False, eos=False))
        assert encode_dialog(folding, [{"role": "user", "content": text}])
    with pytest.raises(LlamaError, match="UTF-8"):
        encode_dialog(folding, [{"role": "user", "content": "\ud800"}])
