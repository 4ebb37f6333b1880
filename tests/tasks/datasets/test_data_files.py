import gzip
import hashlib
import lzma
import os
import sys

import pytest

from lintra.io.files import refuse_folder
from lintra.tasks import DataError
from lintra.tasks.datasets import data_files

CONTENT = bytes(range(256)) * 400
SHA256 = hashlib.sha256(CONTENT).hexdigest()
URL = "https://example.org/some/where/file.bin"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "folder"


def test_a_file_is_downloaded_once(server, folder):
    server.files["file.bin"] = CONTENT
    for _ in range(2):
        assert data_files.fetch(URL, SHA256, folder).read_bytes() == CONTENT
    assert server.asked == ["file.bin"]
    assert [path.name for path in folder.iterdir()] == ["file.bin"]


def truncated(server):
    server.files["file.bin"] = CONTENT
    server.broken.add("file.bin")


def another(server):
    server.files["file.bin"] = CONTENT[:-1] + b"x"


def absent(server):
    server.files.clear()


def gone(server):
    server.stop()


@pytest.mark.parametrize("failure", [truncated, another, absent, gone])
def test_a_failed_download_leaves_nothing(server, folder, failure):
    failure(server)
    with pytest.raises(DataError, match=r"cannot download http://127.*file\.bin.*\$LINTRA_DATA") as caught:
        data_files.fetch(URL, SHA256, folder)
    assert "\n" not in str(caught.value)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("failure", [truncated, another, absent, gone])
def test_a_failed_download_takes_nothing_away(server, folder, failure):
    failure(server)
    folder.mkdir()
    (folder / "file.bin").write_bytes(b"an older one")
    with pytest.raises(DataError):
        data_files.fetch(URL, SHA256, folder)
    assert (folder / "file.bin").read_bytes() == b"an older one"

    (folder / "file.bin").write_bytes(CONTENT)
    assert data_files.fetch(URL, SHA256, folder).read_bytes() == CONTENT


def test_a_wrong_file_is_replaced(server, folder):
    server.files["file.bin"] = CONTENT
    folder.mkdir()
    (folder / "file.bin").write_bytes(b"an older one")
    assert data_files.fetch(URL, SHA256, folder).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_made(server, folder):
    server.files["file.bin"] = CONTENT
    folder.write_text("a file")
    with pytest.raises(DataError, match="cannot download"):
        data_files.fetch(URL, SHA256, folder)


def test_pooch_is_optional(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(ModuleNotFoundError, match=r"lintra\[train\]"):
        data_files.fetch(URL, SHA256, folder)


@pytest.mark.parametrize(("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".xz", lzma.compress)])
def test_unpack(tmp_path, suffix, pack):
    path = tmp_path / f"file{suffix}"
    path.write_bytes(pack(CONTENT))
    assert data_files.unpack(path) == CONTENT


@pytest.mark.parametrize(("suffix", "pack"), [(".gz", gzip.compress), (".xz", lzma.compress)])
def test_damaged_files_are_named(tmp_path, suffix, pack):
    path = tmp_path / f"file{suffix}"
    whole = pack(CONTENT)
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    for content in (whole[:-20], whole[:5], flipped, b"something else"):
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"file\{suffix} cannot be read.*fetch it again"):
            data_files.unpack(path)


def test_linked_folders_are_read_once(tmp_path):
    for name in ("all/a.txt", "far/b.txt", "far/deep/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "all" / "link").symlink_to(tmp_path / "far")
    (tmp_path / "all" / "other").symlink_to(tmp_path / "far" / "deep")
    (tmp_path / "far" / "round").symlink_to(tmp_path / "all")
    (tmp_path / "all" / "up").symlink_to("..")
    found = sorted(str(x.relative_to(tmp_path / "all")) for x in data_files.walk(tmp_path / "all"))
    assert found == ["a.txt", "link/b.txt", "link/deep/c.txt"]


@pytest.mark.parametrize(
    "mark", ["run.json", "model.safetensors", "model.safetensors.index.json", "shards.json"]
)
def test_what_was_made_of_data_is_no_data(tmp_path, mark):
    for name in ("a.txt", f"made/{mark}", "made/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(data_files.walk(tmp_path)) == [tmp_path / "a.txt"]


def test_prepared_tokens_are_no_data(tmp_path):
    """Tokens beside their ends are; texts that are called *.tokens are texts."""
    for name in ("a.tokens", "made/index.json", "made/b.tokens", "made/b.ends"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert list(data_files.walk(tmp_path)) == [tmp_path / "a.tokens"]
    for name in ("tokenizer.json", "index.json", "b.ends", "b.tokens"):
        with pytest.raises(ValueError, match="which is a part of a run, model or prepared text"):
            refuse_folder("out", tmp_path / "made" / name)
        refuse_folder("out", tmp_path / name)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_a_folder_that_may_not_be_read_is_named(tmp_path):
    (tmp_path / "closed").mkdir(mode=0)
    with pytest.raises(DataError, match=r"closed cannot be read: Permission denied"):
        list(data_files.walk(tmp_path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="nowhere cannot be read"):
        data_files.unpack(tmp_path / "nowhere")


def test_all_or_none(tmp_path):
    assert data_files.all_or_none(tmp_path, ["a", "b"]) is None
    (tmp_path / "a").touch()
    with pytest.raises(DataError, match="only a part of a, b: b missing"):
        data_files.all_or_none(tmp_path, ["a", "b"])
    (tmp_path / "b").touch()
    assert data_files.all_or_none(tmp_path, ["a", "b"]) == [tmp_path / "a", tmp_path / "b"]
