"""python -m llama: one file for each command."""
