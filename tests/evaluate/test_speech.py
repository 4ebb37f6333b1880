"""Error rates over several models: more models do not mean more speech."""

import dataclasses

from lintra.evaluate import ScoredUtterance, error_rates

ONCE = [ScoredUtterance(id=str(i), reference="ABCD", hypothesis="ABCD"[: i % 5]) for i in range(20)]


def test_hearing_the_same_again_narrows_no_interval():
    others = [dataclasses.replace(each) for each in 2 * ONCE]
    once, thrice = error_rates(ONCE, "character"), error_rates(ONCE + others, "character")
    assert thrice.keys() == once.keys()
    for kind, rate in once.items():
        again = dataclasses.asdict(thrice[kind])
        assert [again[name] for name in ("rate", "low", "high")] == [rate.rate, rate.low, rate.high]
        assert again["length"] == 3 * rate.length


def test_other_utterances_narrow_it():
    others = [dataclasses.replace(each, id=f"{each.id}-{i}") for i in range(3) for each in ONCE]
    once, more = error_rates(ONCE, "character")["character"], error_rates(others, "character")["character"]
    assert once.rate == more.rate
    assert more.high - more.low < 0.75 * (once.high - once.low)
