"""Other libraries beside the mechanisms of lintra: which are missing, and what each is compared with."""

from benchmarks import peers, scaling
from lintra.bench import points
from lintra.bench.points import Cost, Point


def test_peers_that_are_not_there_are_said_so(monkeypatch):
    def absent(inputs):
        import no_such_library  # noqa: F401

    found = {"not there": absent, "there": lambda inputs: lambda: None}
    monkeypatch.setattr(peers, "PEERS", found)
    assert peers.missing() == ["not there"]


def test_every_peer_has_its_counterpart():
    assert peers.COUNTERPARTS.keys() == peers.PEERS.keys()
    assert set(peers.COUNTERPARTS.values()) <= set(points.ours())


def test_contestants_are_lintra_s_own_and_with_peers_what_can_be_imported(monkeypatch):
    monkeypatch.setattr(peers, "missing", lambda: [*peers.PEERS][1:])
    own = scaling.QUICK.contestants()
    assert own == list(scaling.scaling.QUICK.names)
    assert scaling.Sizes(names=tuple(own), peers=True).contestants() == [*own, next(iter(peers.PEERS))]


def test_the_cost_of_a_point_is_told_by_a_process_that_knows_the_peers():
    point = Point(who="linear", batch=1, tokens=64, heads=2, dim=16, device="cpu")
    assert isinstance(points.cost(point, 2**31, peers.TELL), Cost)
