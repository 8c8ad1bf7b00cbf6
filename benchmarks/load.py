"""How quickly and leanly a checkpoint is loaded on a CPU, against reading its file into fresh memory.

`python benchmarks/load.py [--folder DIR] [--layers 22] [--repeat 5]` writes a bfloat16 Meta checkpoint of 1.1 billion
random weights (2.2 GB; as one file and as four), measures each case in processes of its own with the files in the page
cache, and prints the ratios to the baseline; the last line is JSON. Times are the best of `repeat`.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

PARAMS = {"dim": 2048, "n_heads": 32, "n_kv_heads": 4, "multiple_of": 256, "vocab_size": 32000}
# name: shards, dtype, bounds on time and memory (issue 3, point 6)
CASES = {
    "own dtype, 1 file": (1, "bfloat16", 0.5, 1.1),
    "4 files on 1 rank": (4, "bfloat16", 1.5, 1.2),
    "float16, 1 file": (1, "float16", 1.5, 1.2),
    "float32, 1 file": (1, "float32", 1.5, 1.2),
    "float32, 4 files": (4, "float32", 1.5, 1.2),
}


def write(folder: Path, layers: int) -> None:
    """The checkpoint in one file, then, through `convert`, in four."""
    from llama.cli.convert import convert
    from llama.model import ModelArgs, Transformer

    torch.set_default_dtype(torch.bfloat16)
    model = Transformer(ModelArgs(**PARAMS, n_layers=layers, max_seq_len=8, max_batch_size=1))
    for parameter in model.parameters():
        parameter.data.normal_()
    (folder / "1").mkdir()
    torch.save(model.state_dict(), folder / "1" / "consolidated.00.pth")
    (folder / "1" / "params.json").write_text(json.dumps({**PARAMS, "n_layers": layers}))
    convert(str(folder / "1"), str(folder / "4"), "meta", shards=4)


def memory(key: str) -> int:
    return int(re.findall(rf"{key}:\s*(\d+)", Path("/proc/self/status").read_text())[0]) * 1024


def baseline(folder: Path) -> dict[str, float]:
    """Read every file of weights into memory that the process did not have before."""
    start = time.perf_counter()
    held = []
    for path in sorted(folder.glob("*.pth")):
        buffer = memoryview(torch.empty(path.stat().st_size, dtype=torch.uint8).numpy())
        with path.open("rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                done += file.readinto(buffer[done:])
        held.append(buffer)
    return {"seconds": time.perf_counter() - start}


def load(folder: Path, dtype: str) -> dict[str, float]:
    """Open, make the model, load; then use every weight once, and take the peak of the memory."""
    from llama.checkpoint import load as load_weights
    from llama.checkpoint import open_checkpoint
    from llama.model import ModelArgs, Transformer

    torch.set_default_dtype(getattr(torch, dtype))
    before = memory("VmRSS")
    start = time.perf_counter()
    checkpoint = open_checkpoint(folder)
    model = Transformer(ModelArgs(**checkpoint.params, max_seq_len=8, max_batch_size=1))
    load_weights(model, checkpoint)
    seconds = time.perf_counter() - start
    for parameter in model.parameters():  # mapped pages count once they are used
        torch.mv(parameter.view(-1, parameter.shape[-1]), torch.ones(parameter.shape[-1]))
    size = sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    return {"seconds": seconds, "memory": (memory("VmHWM") - before) / size, "bytes": size}


def measure(folder: Path, *arguments: str) -> dict[str, float]:
    """One run in a fresh process; the files are read once before, so that they are cached."""
    for path in folder.glob("*.pth"):
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 24):
                pass
    command = [sys.executable, str(Path(__file__).resolve()), "--folder", str(folder), "--one", *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return dict(json.loads(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", help="where to write (default: a temporary folder, removed at the end)")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        folder = Path(options.folder)
        print(json.dumps(baseline(folder) if options.one == "baseline" else load(folder, options.one)))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        write(folder, options.layers)
        report(folder, options.repeat)


def report(folder: Path, repeat: int) -> None:
    """All cases in turn, `repeat` times, so that a busy moment of the machine hits them alike; the best of each."""
    size = (folder / "1" / "consolidated.00.pth").stat().st_size
    print(f"{size / 1e9:.2f} GB, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, torch {torch.__version__}")
    wanted = {f"baseline {shards}": (shards, "baseline") for shards in (1, 4)}
    wanted |= {case: (shards, dtype) for case, (shards, dtype, _, _) in CASES.items()}
    runs: dict[str, list[dict[str, float]]] = {case: [] for case in wanted}
    for _ in range(repeat):
        for case, (shards, dtype) in wanted.items():
            runs[case].append(measure(folder / str(shards), dtype))
    best = {case: min(found, key=lambda run: run["seconds"]) for case, found in runs.items()}
    base = {shards: best[f"baseline {shards}"]["seconds"] for shards in (1, 4)}
    print(f"{'reading into fresh memory':<28}{base[1]:6.2f} s   ({base[4]:.2f} s as 4 files)")
    result, good = {}, True
    for case, (shards, _, most_time, most_memory) in CASES.items():
        run = best[case]
        ratio = run["seconds"] / base[shards]
        good &= ratio <= most_time and run["memory"] <= most_memory
        print(
            f"{case:<28}{run['seconds']:6.2f} s = {ratio:.2f} x (at most {most_time}), "
            f"memory {run['memory']:.2f} x the weights' {run['bytes'] / 1e9:.2f} GB (at most {most_memory})"
        )
        result[case] = {"seconds": run["seconds"], "ratio": ratio, "memory": run["memory"]}
    print(json.dumps({"baseline_seconds": base, "cases": result, "load": os.getloadavg()[0], "within_bounds": good}))


if __name__ == "__main__":
    main()
