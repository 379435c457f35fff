"""Files that appear whole or not at all."""

import errno
import os
import resource

import pytest
import torch
from safetensors.torch import save_file

from ssm_trn.files import remove_unfinished, replacing, write_whole


def test_a_file_is_replaced_at_once(tmp_path):
    path = tmp_path / "näme of a file.txt"
    write_whole(path, "before")
    with replacing(path) as unfinished:
        unfinished.write_text("after")
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there_and_nothing_else(tmp_path, error):
    path = tmp_path / "file"
    write_whole(path, "before")
    with pytest.raises(type(error)), replacing(path) as unfinished:
        unfinished.write_text("half of it")
        raise error
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def save_open(weights, path):
    with open(path, "wb") as file:
        torch.save(weights, file)


@pytest.mark.parametrize("save", [save_file, save_open], ids=["safetensors", "torch"])
def test_a_disk_without_room_is_told_with_the_path_whoever_writes(tmp_path, save):
    path, limits = tmp_path / "file", resource.getrlimit(resource.RLIMIT_FSIZE)
    write_whole(path, "before")
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(OSError) as raised, replacing(path) as unfinished:
            save({"weight": torch.zeros(100_000)}, unfinished)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (raised.value.errno, raised.value.filename) == (errno.EFBIG, str(path))
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_an_error_of_another_file_keeps_its_name(tmp_path):
    with pytest.raises(FileNotFoundError) as raised, replacing(tmp_path / "file"):
        (tmp_path / "source").read_text()
    assert raised.value.filename == str(tmp_path / "source")


def test_what_was_left_unfinished_is_removed(tmp_path):
    for name in (".a.unfinished", "b.unfinished", "c"):
        (tmp_path / name).touch()
    (tmp_path / ".folder.unfinished").mkdir()
    remove_unfinished(tmp_path)
    remove_unfinished(tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".folder.unfinished", "b.unfinished", "c"]


def test_a_link_stays_one_and_its_file_is_replaced(tmp_path):
    (tmp_path / "folder").mkdir()
    link = tmp_path / "link"
    link.symlink_to("folder/file")
    for text in ("before", "after"):
        write_whole(link, text)
        assert link.is_symlink() and (tmp_path / "folder" / "file").read_text() == text
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "link"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)
    for place in (tmp_path / "pipe", f"/dev/fd/{writer}"):
        write_whole(place, "text")
        assert os.read(reader, 100) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    os.close(writer)


def test_a_folder_in_its_place_is_left_alone(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError):
        write_whole(tmp_path / "folder", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
