"""python -m llama: one file per command, and what several of them share."""
