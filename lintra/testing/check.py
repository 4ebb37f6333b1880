"""All laws about a mechanism of lintra's interface: one report, or one test for each."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from lintra.attention import AttentionConfig
from lintra.config.fields import spelled
from lintra.testing import laws as book
from lintra.testing._apply import Law, check_assertions, find, select
from lintra.testing.laws import TIME, Case
from lintra.testing.report import Report

# Laws about long sequences, and the sizes they choose themselves.
_ALONE = {"batch": 1, "heads": 1, "kv_heads": 1}
FIXED: dict[Law, dict[str, int]] = {
    book.long_sequences_do_not_drift: {"time": 65_536, **_ALONE},
    book.no_array_is_square: {"time": 16_384, **_ALONE},
    book.memory_is_linear: {"time": 4096, **_ALONE},
    book.constant_states_keep_no_tokens: {"time": 512},
}
BEYOND = 9  # tokens that laws of padding append to a sequence

Dense = Callable[..., Tensor]


def check_attention(
    config: AttentionConfig,
    *,
    causal: bool | None = None,
    dense: Dense | None = None,
    laws: list[Any] | None = None,
    heads: int = 4,
    kv_heads: int | None = None,
    dim: int = 6,
    value_dim: int | None = None,
    seed: int = 0,
) -> Report:
    """Return which laws hold for a mechanism, in every mode that its configuration can be built in.

    Modes are causal and bidirectional, or the one that `causal` names, each with a rotary embedding too where
    it takes one. `dense` is its definition, `dense(attention, q, k, v, *extra) -> y`, which three laws
    compare with. `laws` are functions of `lintra.testing.laws` or their names, by default all. Where
    `kv_heads` or `value_dim` is None the first that can be built is taken, of half the heads and all, of 4
    and `dim`. Parameters are float64. A mechanism takes seconds, most of them for long sequences.

    Raises ValueError where no mode can be built, with the reason, or for a law that does not exist.
    """
    check_assertions()
    cases = _cases(config, causal, heads, kv_heads, dim, value_dim, seed)
    chosen = select([*book.LAWS, *book.WITH_DEFINITION], laws)
    found = [
        find(law, _call(law, dense), case, _mode(case), partial(_applies, law, dense), FIXED.get(law))
        for law in chosen
        for case in cases
    ]
    return Report(f"{cases[0].name} {config}", tuple(found))


def laws_of(
    config: AttentionConfig, *, dense: Dense | None = None, laws: list[Any] | None = None, **options: Any
) -> list[tuple[str, Callable[[], None]]]:
    """Return (name, test) of each law and mode that apply; a test takes nothing and raises AssertionError.

    For `pytest.mark.parametrize(("name", "test"), laws_of(config))`, or a loop. Options and errors are those
    of `check_attention`."""
    check_assertions()
    shape = {"causal": None, "heads": 4, "kv_heads": None, "dim": 6, "value_dim": None, "seed": 0}
    unknown = options.keys() - shape.keys()
    if unknown:
        raise TypeError(f"laws_of takes {', '.join(shape)}; got {', '.join(sorted(unknown))}")
    cases = _cases(config, **(shape | options))
    return [
        (f"{law.__name__}-{_mode(case)}", partial(_call(law, dense), case))
        for law in select([*book.LAWS, *book.WITH_DEFINITION], laws)
        for case in cases
        if _applies(law, dense, case)
    ]


def _cases(
    config: Any,
    causal: bool | None,
    heads: int,
    kv_heads: int | None,
    dim: int,
    value_dim: int | None,
    seed: int,
) -> list[Case]:
    name = type(config).__module__.rpartition(".")[2]
    longest = getattr(config, "max_length", None)
    time = TIME if longest is None else min(TIME, max(1, longest - BEYOND))
    shapes: list[dict[str, Any]] = [
        {"heads": heads, "kv_heads": groups, "dim": dim, "value_dim": width, "time": time, "seed": seed}
        for groups in ([kv_heads] if kv_heads else [max(1, heads // 2), heads])
        for width in ([value_dim] if value_dim else [4, dim])
    ]
    found = []
    for mode in (True, False) if causal is None else (causal,):
        for rotary in (False, True):
            possible = (Case(name, config, mode, rotary=rotary, **shape) for shape in shapes)
            found += [case for case in possible if case.possible()][:1]
    if not found:
        mode = True if causal is None else causal
        Case(name, config, mode, **shapes[-1]).build()  # which raises the reason
        raise ValueError(f"{spelled(config)} cannot be built in any mode")
    return found


def _mode(case: Case) -> str:
    return f"{'causal' if case.causal else 'bidirectional'}{'-rotary' if case.rotary else ''}"


def _call(law: Law, dense: Dense | None) -> Law:
    return partial(_with_definition, law, dense) if law in book.WITH_DEFINITION else law


def _with_definition(law: Law, dense: Dense | None, case: Case) -> None:
    law(case, dense)


def _applies(law: Law, dense: Dense | None, case: Case) -> bool:
    if law in book.WITH_DEFINITION and dense is None:
        return False
    return case.possible() and book.APPLIES.get(law, book.always)(case)
