"""Installs the package `llama`; tool settings are in pyproject.toml."""

from pathlib import Path

from setuptools import setup

here = Path(__file__).parent

setup(
    name="llama",
    version="0.1.0",
    description="The Llama 2 reference library: the published interface, right, fast and readable",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="MIT",
    python_requires=">=3.10",
    packages=["llama"],
    package_data={"llama": ["py.typed", "*.html"]},
    install_requires=(here / "requirements.txt").read_text(encoding="utf-8").split(),
    extras_require={
        "dev": [
            "pytest>=7.4",
            "ruff==0.17.6",
            "mypy>=1.13",
            "types-tqdm",
            "numpy",
            "safetensors>=0.4.3",
            "transformers>=4.45",
            "protobuf",
        ],
    },
)
