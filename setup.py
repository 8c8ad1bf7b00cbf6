"""Installs the package `llama`; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent


class BuildWithDemo(build_py):
    """Puts the demo model into the package, so that `python -m llama complete` has one wherever it is installed."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # there it is found in the checkout
            self.copy_tree(str(here / "checkpoints" / "demo"), str(Path(self.build_lib, "llama", "demo")))


setup(
    name="llama",
    version="0.1.0",
    description="The Llama 2 reference library: the published interface, right, fast and readable",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=find_packages(include=["llama", "llama.*"]),
    package_dir={"": "."},  # said aloud, an editable install is a plain path, which type checkers can follow
    package_data={"llama": ["py.typed", "cli/*.html"]},
    cmdclass={"build_py": BuildWithDemo},
    install_requires=(here / "requirements.txt").read_text(encoding="utf-8").split(),
    extras_require={
        "jinja2": ["jinja2>=3.1.6"],  # a checkpoint's own chat template
        "tiktoken": ["tiktoken>=0.7"],  # Llama 3's tokenizer.model
        "tokenizers": ["tokenizers>=0.19"],  # Hugging Face's tokenizer.json
        "dev": [
            "pytest>=7.4",
            "pytest-xdist>=3.5",
            "ruff==0.17.6",
            "mypy>=1.13",
            "types-tqdm",
            "numpy",
            "safetensors>=0.4.3",
            "gguf>=0.13",
            "jinja2>=3.1.6",
            "transformers>=4.45",
            "peft>=0.17",
            "protobuf",
            "tiktoken>=0.7",
            "tokenizers>=0.19",
        ],
    },
)
