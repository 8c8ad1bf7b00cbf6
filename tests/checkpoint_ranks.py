"""Run by torchrun: every checkpoint of a folder, loaded on all ranks, against the logits of wanted.pt."""

import sys
from pathlib import Path

import torch

from llama import parallel
from llama.checkpoint import load, open_checkpoint
from llama.model import ModelArgs, Transformer

folder = Path(sys.argv[1])
wanted = torch.load(folder / "wanted.pt")
groups = parallel.set_up(None, torch.device("cpu"), "gloo", 60)
for path in sorted(path for path in folder.iterdir() if path.name != "wanted.pt"):
    checkpoint = open_checkpoint(path)
    rows = checkpoint.shape("tok_embeddings.weight")[0]
    model = Transformer(ModelArgs(**{**checkpoint.params, "vocab_size": rows, "max_seq_len": 24, "max_batch_size": 3}))
    load(model, checkpoint, rank=parallel.rank(), world=parallel.world_size())
    difference = float((model(wanted["tokens"], 0) - wanted["logits"]).abs().max())
    assert difference < 1e-5, (path, difference)
    print(path.name, "within 1e-5:", difference)
groups.close()
