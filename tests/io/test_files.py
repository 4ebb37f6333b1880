"""Files are written whole, and replace nothing that they should not."""

import os
import subprocess
import sys
import threading
import time

import pytest

from lintra.io import files


@pytest.mark.parametrize("place", [".", "..", "here"])
def test_the_folder_that_a_program_runs_in_is_not_exchanged(tmp_path, monkeypatch, place):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    path = tmp_path / place if place == "here" else files.Path(place)
    with pytest.raises(files.Error, match="this program runs in it, so name another folder"):
        files.write_atomically(path, lambda folder: folder.mkdir())
    assert os.listdir(tmp_path) == ["here"]
    assert os.listdir(".") == []


def test_what_is_written_is_flushed_before_it_appears(tmp_path, monkeypatch):
    """The folder entry is flushed after that: after a power cut the files are whole."""
    path, flushed, fsync = tmp_path / "model", [], os.fsync

    def write(folder):
        folder.mkdir()
        (folder / "part").touch()

    def noted(handle):
        flushed.append((os.fstat(handle).st_ino, path.exists()))
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", noted)
    files.write_atomically(path, write)
    assert {(path.stat().st_ino, False), ((path / "part").stat().st_ino, False)} <= set(flushed)
    assert flushed[-1] == (tmp_path.stat().st_ino, True)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_outlives_the_holder_of_a_lock_does_not_hold_it(tmp_path):
    """As data workers do when training is killed."""
    come, go = os.pipe()
    forked, begun = os.pipe()
    program = f"""
import os, sys
from pathlib import Path
from lintra.io.files import locked
with locked(Path({str(tmp_path)!r})):
    if os.fork():
        os._exit(0)
    os.write({begun}, b"x")
    os.read({come}, 1)
"""
    subprocess.run([sys.executable, "-c", program], check=True, pass_fds=[come, begun])
    os.close(begun)
    try:
        assert os.read(forked, 1) == b"x"  # the holder may end before the other process has let go
        with files.locked(tmp_path):
            pass
    finally:
        os.write(go, b"x")
        for end in (go, come, forked):
            os.close(end)


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_who_waits_for_its_turn_finds_what_the_other_has_made(tmp_path):
    path, found = tmp_path / "new" / "cache", []

    def look():
        with files.in_turn(path):
            found.append(path.exists())

    with files.in_turn(path):
        other = threading.Thread(target=look)
        other.start()
        assert sorted(os.listdir(path.parent)) == [".cache.lock"]
        path.touch()
    other.join()
    assert found == [True]
    assert os.listdir(path.parent) == ["cache"]


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_turns_do_not_overlap_though_each_removes_its_lock(tmp_path):
    inside, most = [], []

    def turn(number):
        for _ in range(50):
            with files.in_turn(tmp_path / "cache"):
                inside.append(number)
                most.append(len(inside))
                time.sleep(1e-4)
                inside.remove(number)

    threads = [threading.Thread(target=turn, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 200 * [1]
    assert os.listdir(tmp_path) == []


@pytest.mark.skipif(os.name == "nt", reason="no locks")
def test_nobody_waits_where_nothing_can_be_locked(tmp_path, monkeypatch):
    import fcntl

    (tmp_path / "file").touch()
    with files.in_turn(tmp_path / "file" / "cache"):
        pass

    def without_locks(handle, how):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    with files.in_turn(tmp_path / "cache"):
        pass


def test_what_killed_programs_left_is_removed_after_a_day(tmp_path):
    old, new, other = (tmp_path / f".{name}.x1" for name in ("a.npy", "b.npy", "c.txt"))
    for work in (old, new, other):
        work.mkdir()
        (work / "part").touch()
    for path in (old / "part", old, other / "part", other):
        os.utime(path, (time.time() - 90_000,) * 2)
    files.remove_abandoned(tmp_path / "d.npy", of="*.npy")
    assert sorted(os.listdir(tmp_path)) == [".b.npy.x1", ".c.txt.x1"]
    files.remove_abandoned(tmp_path / "c.txt")
    assert os.listdir(tmp_path) == [".b.npy.x1"]
