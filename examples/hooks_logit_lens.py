"""A logit lens: what the model would say after each block, read through forward hooks.

    python examples/hooks_logit_lens.py --prompt "The capital of Japan is"

A hook on every block keeps the block's output at the prompt's last position. The model's own final norm and output
head turn each into probabilities of the next token, as if the remaining blocks were not there (nostalgebraist,
"interpreting GPT: the logit lens", 2020). Under `torchrun` every rank runs this; the first one prints.
"""

import fire
import torch
from torch import Tensor, nn

from llama import Llama
from llama.tokenizer import piece


@torch.no_grad()
def lens(generator: Llama, prompt: str) -> list[Tensor]:
    """The probabilities (vocab_size,) of the next token after each block; the last are the model's own."""
    states: list[Tensor] = []

    def keep(block: nn.Module, inputs: tuple[object, ...], output: Tensor) -> None:
        states.append(output[:, -1])  # (1, dim)

    model = generator.model
    handles = [block.register_forward_hook(keep) for block in model.layers]
    try:
        ids = generator.tokenizer.encode(prompt, bos=True, eos=False)
        model.forward(torch.tensor([ids]), 0)
    finally:
        for handle in handles:
            handle.remove()
    return [torch.softmax(model.output(model.norm(state))[0].float(), dim=-1) for state in states]


def main(
    prompt: str = "The capital of Japan is",
    ckpt_dir: str = "checkpoints/demo",
    tokenizer_path: str | None = None,
    top: int = 5,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Print the `top` likeliest next tokens after each block, with their probabilities."""
    with Llama.build(ckpt_dir, tokenizer_path, 256, 1, device=device, dtype=dtype) as generator:
        for layer, probs in enumerate(lens(generator, prompt)):
            best = torch.topk(probs, top)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            said = "  ".join(f"{piece(generator.tokenizer, token)!r} {p:.2f}" for token, p in pairs)
            print(f"block {layer:2}: {said}")


if __name__ == "__main__":
    fire.Fire(main)
