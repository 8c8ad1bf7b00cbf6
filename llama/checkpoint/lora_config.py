"""adapter_config.json: which method an adapter is of, and the scale of each module's matrices."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .files import format_error, read_json

EXPECTED = "a LoRA adapter as PEFT saves it (adapter_config.json, adapter_model.safetensors)"
MAX_RANK = 1 << 14
MAX_EXPRESSIONS = 16  # in rank_pattern and in alpha_pattern, besides names

# Fields that ask for more than W + scale * B A (PEFT 0.21), and what they are.
METHODS = {
    "use_dora": "DoRA, which scales the rows of W",
    "lora_bias": "biases of B",
    "fan_in_fan_out": "weights (in, out), as GPT-2's",
    "layer_replication": "repeated layers",
    "target_parameters": "parameters that are no module's weight",
    "trainable_token_indices": "single rows of the embedding",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "alora_invocation_tokens": "aLoRA, which acts only behind its tokens",
    "arrow_config": "Arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "loftq_config": "LoftQ, which changes the base model",
    "corda_config": "CorDA, which changes the base model",
    "lora_ga_config": "LoRA-GA, which changes the base model",
}
INITS = ("gaussian", "eva", "orthogonal", "mica")  # these leave the base model as it is
# What is read here, and what the matrices do not depend on.
KNOWN = {
    *("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"),
    *("ensure_weight_tying", "target_modules", "exclude_modules", "modules_to_save", "layers_to_transform"),
    *("layers_pattern", "lora_dropout", "inference_mode", "base_model_name_or_path", "revision", "task_type"),
    *("auto_mapping", "peft_version", "megatron_core", "qalora_group_size", "eva_config", "runtime_config"),
}
NAME = re.compile(r"(\^?)((?:[\w-]|\\?\.)+)\$?", re.ASCII)
# An expression is a stranger's and could take years to match: at most three of `.*` and `(a|b)`, and no repeated group.
EXPRESSION = re.compile(r"\^?(?:[\w-]|\\?\.(?!\*)|\.\*|\\d\+?|\[0-9\]\+?|\(\w+(?:\|\w+)*\))+\$?", re.ASCII)


class Patterns:
    """rank_pattern or alpha_pattern: the value of the first key that matches the end of a module's name."""

    def __init__(self, path: Path, field: str, given: Any) -> None:
        if not isinstance(given or {}, dict):
            raise format_error(path, f"{field} is {given!r:.60}", "an object: name of a module to a number")
        self._names: dict[tuple[bool, str], tuple[int, Any]] = {}  # (whole name?, name) to (place in the order, value)
        self._expressions: list[tuple[int, Any, re.Pattern[str]]] = []
        for place, (key, value) in enumerate((given or {}).items()):
            name = NAME.fullmatch(key)
            if name is not None:
                self._names.setdefault((bool(name[1]), name[2].replace("\\.", ".")), (place, value))
            elif EXPRESSION.fullmatch(key) and len(key) <= 200 and key.count(".*") + key.count("(") <= 3:
                self._expressions.append((place, value, re.compile(rf"(.*\.)?({key})$")))
            else:
                raise format_error(
                    path, f"{field} has the key {key!r:.80}", "names of modules, or `.*`, `\\d`, `(a|b)`"
                )
        if len(self._expressions) > MAX_EXPRESSIONS:
            found = f"{field} has {len(self._expressions)} regular expressions"
            raise format_error(path, found, f"{MAX_EXPRESSIONS} at most: write the names of the modules out")

    def find(self, module: str, default: Any) -> Any:
        """The value for a module, by its name within the model."""
        parts = module.split(".")
        ends = [(False, ".".join(parts[start:])) for start in range(len(parts))]
        found = [self._names[end] for end in [(True, module), *ends] if end in self._names]
        found += [(place, value) for place, value, expression in self._expressions if expression.match(module)]
        return min(found, key=lambda one: one[0])[1] if found else default


@dataclass
class LoraConfig:
    """What an adapter's settings say, checked."""

    path: Path
    rank: Any
    alpha: Any
    root: bool  # scales are alpha / sqrt(r)
    ranks: Patterns
    alphas: Patterns
    keeps_tied: bool  # an embedding and its head are changed as one

    def scale(self, module: str, rank: int) -> float:
        """What B A is multiplied with. LlamaError where the settings say another rank than the matrices have."""
        stated, alpha = self.ranks.find(module, self.rank), self.alphas.find(module, self.alpha)
        if type(stated) is not int or stated != rank or not 0 < rank <= MAX_RANK:
            found = f"r is {stated!r:.40} for {module}, whose matrices have rank {rank}"
            raise format_error(self.path, found, f"one rank, from 1 to {MAX_RANK}")
        if type(alpha) not in (int, float) or not abs(alpha) < 1e30:
            raise format_error(self.path, f"lora_alpha is {alpha!r:.40} for {module}", "a number")
        return float(alpha) / (math.sqrt(rank) if self.root else rank)


def read_config(path: Path) -> LoraConfig:
    """An adapter_config.json. LlamaError names what is not plain LoRA, and fields that are not known and not empty."""
    config = read_json(path, EXPECTED)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise format_error(path, f"peft_type is {kind!r:.40}", "'LORA': adapters of no other method are merged")
    for field, what in METHODS.items():
        if config.get(field):
            raise format_error(path, f"{field} is {config[field]!r:.40}: {what}", "plain LoRA: W + scale * B A")
    if config.get("bias", "none") not in ("none", None):
        raise format_error(path, f"bias is {config['bias']!r:.40}", "'none': an adapter without biases")
    init = config.get("init_lora_weights", True)
    if not (init is None or isinstance(init, bool) or (isinstance(init, str) and init.lower() in INITS)):
        changed = f"init_lora_weights is {init!r:.40}, which changes the base model"
        raise format_error(
            path, changed, "matrices for the base as it is: save with path_initial_model_for_weight_conversion"
        )
    unknown = [name for name in config if config[name] and name not in KNOWN and name not in METHODS]
    if unknown:
        listed = ", ".join(f"{name:.60} = {config[name]!r:.40}" for name in unknown[:3])
        raise format_error(
            path, f"fields that are not known here: {listed}", "fields of PEFT up to 0.21, or empty ones"
        )
    if not isinstance(config.get("use_rslora") or False, bool):
        raise format_error(path, f"use_rslora is {config['use_rslora']!r:.40}", "true or false")
    return LoraConfig(
        path,
        config.get("r", 8),
        config.get("lora_alpha", 8),
        bool(config.get("use_rslora")),
        Patterns(path, "rank_pattern", config.get("rank_pattern")),
        Patterns(path, "alpha_pattern", config.get("alpha_pattern")),
        bool(config.get("ensure_weight_tying")),
    )
