"""Texts that a model goes on with. Run it with the model that ships:

    torchrun --nproc_per_node 1 example_text_completion.py \\
        --ckpt_dir checkpoints/demo --tokenizer_path checkpoints/demo/tokenizer.model

A base model is not asked, it continues: the beginning of a text decides what comes out. Each prompt becomes token ids,
the model gives a probability to every possible next token, one is drawn, and so on until the model ends the text or
`max_gen_len` tokens are there. `temperature` 0 always takes the likeliest token; above that, `top_p` leaves out the
unlikely rest.
"""

import sys

import fire

from llama import Llama
from llama.distributed import choose_threads


def main(
    ckpt_dir: str,
    tokenizer_path: str,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int = 128,
    max_gen_len: int = 64,
    max_batch_size: int = 4,
    device: str | None = None,
    dtype: str | None = None,
    seed: int = 1,
) -> None:
    """Continue four texts.

    The prompt and what is generated must fit in `max_seq_len` tokens; `max_batch_size` prompts run side by side.
    `device` (cpu, cuda) and `dtype` (float32, bfloat16, float16) are chosen by the machine unless given.
    """
    with Llama.build(
        ckpt_dir=ckpt_dir,
        tokenizer_path=tokenizer_path,
        max_seq_len=max_seq_len,
        max_batch_size=max_batch_size,
        seed=seed,
        device=device,
        dtype=dtype,
    ) as generator:
        choose_threads(generator.model)  # small models are slower on several; OMP_NUM_THREADS wins
        prompts = [
            "Once upon a time, there was a little girl named",
            "In a small village lived a boy named",
            "One day, Mia lost her red kite near the river.",
            "Tom had a wooden boat and took it everywhere.",
        ]
        results = generator.text_completion(
            prompts, max_gen_len=max_gen_len, temperature=temperature, top_p=top_p, keep_space=True
        )
        for prompt, result in zip(prompts, results, strict=True):
            print(f"\n{prompt} >{result['generation']}")
        print("\n==================================")


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal that knows no UTF-8
    fire.Fire(main)
