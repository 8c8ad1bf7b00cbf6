"""`convert`: write a checkpoint in Meta's, Hugging Face's or llama2.c's format."""

from pathlib import Path

from ..checkpoint import open_checkpoint
from ..checkpoint.convert import write_checkpoint
from ..checkpoint.memory import gigabytes
from ..checkpoint.source import Source
from .output import printable
from .session import adapters


def convert(
    src: str,
    dst: str,
    to: str = "hf",
    *,
    shards: int = 1,
    dtype: str | None = None,
    context: int | None = None,
    quantize: str | None = None,
    force: bool = False,
    lora: list[str] | None = None,
    lora_scale: list[float] | None = None,
) -> None:
    """Write a checkpoint in another format, another type or another number of files.

    The folder DST appears when it is whole. LlamaError for what cannot be written so, and nothing is left behind.

    Args:
        src: The checkpoint, a folder or a file of any known format.
        dst: The folder to write; one that holds files is replaced only with `force`.
        to: meta (params.json and consolidated.NN.pth), hf (a Hugging Face folder) or llama2c (model.bin).
        shards: Files of weights that meta gets.
        dtype: float32, bfloat16 or float16; the stored type if not given, float32 always for llama2c.
        context: The longest window, in tokens, for formats that have a field for it; what SRC says if not given.
        quantize: int8 or int4 (meta in one file): the layers' weights as quantized values and scales (X.weight,
            X.scales), which `build` loads as they are.
        force: Replace a checkpoint that is in DST.
        lora: The folder of a LoRA adapter to merge; may be given several times.
        lora_scale: What the adapter is multiplied with; once for all, or once for each adapter. Default: 1.0.
    """
    checkpoint = open_checkpoint(str(src), **adapters(lora, lora_scale))
    source, target = Source(checkpoint, dtype, context, shards, quantize), Path(str(dst)).expanduser()
    write_checkpoint(source, target, to, force)
    print(printable(f"{target}: {to}, {gigabytes(sum(path.stat().st_size for path in target.iterdir()))}"))
