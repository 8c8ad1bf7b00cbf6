"""The sampling functions under the name they are documented by; they live in `llama.engine.sampling`."""

from .engine.sampling import Sampling, distribution, nucleus, sample_top_p

__all__ = ["Sampling", "distribution", "nucleus", "sample_top_p"]
