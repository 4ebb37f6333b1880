"""State dicts of other libraries under the names that models have here: rules, and mappers that apply them.

A rule has `matches(key)`, and `apply(key, value)` that gives the new items [(key, value), ...].
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch

Item = tuple[str, Any]


class MappingRule:
    """Base of the rules."""

    def matches(self, key: str) -> bool:
        raise NotImplementedError

    def apply(self, key: str, value: Any) -> list[Item]:
        raise NotImplementedError


class IdentityRule(MappingRule):
    """Keep everything."""

    def matches(self, key: str) -> bool:
        return True

    def apply(self, key: str, value: Any) -> list[Item]:
        return [(key, value)]


class NotRule(IdentityRule):
    """Keep what a rule does not match."""

    def __init__(self, rule: MappingRule):
        self.rule = rule

    def matches(self, key: str) -> bool:
        return not self.rule.matches(key)


class OrRule(MappingRule):
    """Matches what any of the rules matches; those that do are applied one after the other."""

    def __init__(self, *rules: MappingRule):
        self.rules = rules

    def matches(self, key: str) -> bool:
        return any(rule.matches(key) for rule in self.rules)

    def apply(self, key: str, value: Any) -> list[Item]:
        items = [(key, value)]
        for rule in self.rules:
            items = [
                new for item in items for new in (rule.apply(*item) if rule.matches(item[0]) else [item])
            ]
        return items


class RegexRule(MappingRule):
    """Replaces every match of a regular expression in a key; `replace` as in re.sub."""

    def __init__(self, search: str, replace: str | Callable[[re.Match[str]], str]):
        self.pattern, self.replace = re.compile(search), replace

    def matches(self, key: str) -> bool:
        return self.pattern.search(key) is not None

    def apply(self, key: str, value: Any) -> list[Item]:
        return [(self.pattern.sub(self.replace, key), value)]


class PytorchAttentionWeightsRule(MappingRule):
    """Splits the projection [3 c ...] of nn.MultiheadAttention into those of queries, keys and values."""

    pattern = re.compile(r"self_attn\.in_proj_(weight|bias)")

    def matches(self, key: str) -> bool:
        return self.pattern.search(key) is not None

    def apply(self, key: str, value: Any) -> list[Item]:
        names = (rf"attention.{one}_projection.\1" for one in ("query", "key", "value"))
        return [(self.pattern.sub(name, key), part) for name, part in zip(names, value.chunk(3), strict=True)]


class SimpleMapper:
    """Applies to every item of a state dict the first rule that matches; what none matches is left out.

    With `add_identity` what the rules do not match stays as it is.
    """

    def __init__(self, rules: Sequence[MappingRule] = (), add_identity: bool = True):
        self._rules = [*rules, *([IdentityRule()] if add_identity else [])]

    def map(self, state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """The state dict under its new names; the tensors are shared with the old one."""
        mapped: dict[str, Any] = {}
        for key, value in state_dict.items():
            rule = next((rule for rule in self._rules if rule.matches(key)), None)
            mapped.update(rule.apply(key, value) if rule else ())
        return mapped

    @classmethod
    def load_file(
        cls,
        filepath: Any,
        model_root: str | None = None,
        map_location: Any = None,
        **other_args: Any,
    ) -> dict[str, Any]:
        """Return what torch.load reads from a file, with its state dict mapped.

        The state dict is the content of the file, or its entry under the key `model_root`. Only tensors and
        plain values are unpickled; other arguments go to torch.load.

        Raises ValueError for weights_only=False.
        """
        if not other_args.setdefault("weights_only", True):
            raise ValueError(
                f"load_file unpickles only tensors and plain values, got weights_only="
                f"{other_args['weights_only']}: torch.load a file you trust, then .map its state dict"
            )
        state = torch.load(filepath, map_location=map_location, **other_args)
        if model_root is None:
            return cls().map(state)
        state[model_root] = cls().map(state[model_root])
        return state


class PytorchMapper(SimpleMapper):
    """Mapper of the weights of `nn.TransformerEncoder`."""

    def __init__(self):
        rules = (
            PytorchAttentionWeightsRule(),
            RegexRule(
                r"layers\.(\d+)\.self_attn\.([a-z]+)_proj(ection)?\.", r"layers.\1.attention.\2_projection."
            ),
            NotRule(RegexRule(r"\.softmax_temp$", "")),
        )
        super().__init__(rules, add_identity=False)


class HugginfaceBertEncoderMapper(SimpleMapper):
    """Mapper of the weights of Hugging Face's BERT: BertModel's `encoder`."""

    RULES: ClassVar[list[MappingRule]] = [
        RegexRule(rf"layer\.(\d+)\.{theirs}", rf"layers.\1.{ours}")
        for theirs, ours in (
            (r"attention\.self\.(query|key|value)\b", r"attention.\2_projection"),
            (r"attention\.output\.dense", "attention.out_projection"),
            (r"attention\.output\.LayerNorm", "norm1"),
            (r"intermediate\.dense", "linear1"),
            (r"output\.dense", "linear2"),
            (r"output\.LayerNorm", "norm2"),
        )
    ]

    def __init__(self):
        super().__init__(self.RULES)


class LongformerMapper(SimpleMapper):
    """Mapper of the weights of a Longformer's encoder. The projections of its global attention are left
    out."""

    def __init__(self):
        left_out = RegexRule(r"layer\.(\d+)\.attention\.self\.(query|key|value)_global", "")
        super().__init__([*HugginfaceBertEncoderMapper.RULES, NotRule(left_out)], add_identity=False)
