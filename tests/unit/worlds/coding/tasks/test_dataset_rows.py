import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentic_opd.core.errors import DatasetError
from agentic_opd.worlds.coding.tasks.rows import read_rows


def write(path: Path, *names: str) -> Path:
    """A data file with a row of each name."""
    text = "".join(json.dumps({"name": name}) + "\n" for name in names)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def names(path: Path | str, split: str = "train") -> list[Any]:
    return [row.fields["name"] for row in read_rows(str(path), split)]


@pytest.fixture
def hf(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The `datasets` library, off line, without its bars, and with a cache of its own."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    yield datasets
    datasets.enable_progress_bars()


def test_rows_say_where_they_stand(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"name": "a"}\n\n{"name": "b"}\n')
    assert [(row.location, row.fields) for row in read_rows(str(path), "train")] == [
        ("a.jsonl, line 1", {"name": "a"}),
        ("a.jsonl, line 3", {"name": "b"}),
    ]


def test_what_is_no_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}\n" * 1000)[:20])
    (tmp_path / "not.jsonl.gz").write_text("{}\n")
    (tmp_path / "not.parquet").write_text("{}\n")
    (tmp_path / "tasks.csv").write_text("a,b\n")
    (tmp_path / "pointer.jsonl").write_text("version https://git-lfs.github.com/spec/v1\nsize 3\n")
    (tmp_path / "nothing" / "in" / "it").mkdir(parents=True)
    for name, message in {
        "nope.jsonl": "there is no such file",
        "cut.jsonl.gz": "cannot be read after line 0",
        "not.jsonl.gz": "cannot be read after line 0",
        "not.parquet": "cannot be read",
        "pointer.jsonl": "a pointer of Git LFS: `git lfs pull` fetches the file",
        "tasks.csv": r"expected a file that ends in \.jsonl, \.jsonl\.gz, \.parquet, \.json, \.json\.gz, or a folder",
        "nothing": "the folder is empty",
        "../x/y z": "neither a file or folder here nor a name on the hub",
    }.items():
        with pytest.raises(DatasetError, match=message):
            names(name)


def test_a_json_file_is_read_where_it_is_named_and_not_in_a_folder(tmp_path: Path) -> None:
    write(tmp_path / "part.jsonl", "a")
    (tmp_path / "rows.json").write_text('[{"name": "b"}, {"name": "c"}]')
    assert names(tmp_path / "rows.json") == ["b", "c"]
    assert names(tmp_path) == ["a"]


# -------------------------------------------------------------------------------------------------------------- folders


def test_a_folder_of_files_is_read_in_sorted_order(tmp_path: Path) -> None:
    write(tmp_path / "part-2.jsonl", "c")
    write(tmp_path / "part-1.jsonl.gz", "a", "b")
    write(tmp_path / "tests.jsonl", "d")
    (tmp_path / "notes.txt").write_text("no data")
    assert names(tmp_path) == ["a", "b", "c", "d"]


def test_files_named_after_splits_are_told_apart(tmp_path: Path) -> None:
    write(tmp_path / "x_train.jsonl", "a")
    write(tmp_path / "test-00000-of-00002.jsonl", "b")
    write(tmp_path / "test-00001-of-00002.jsonl.gz", "c")
    assert names(tmp_path) == ["a"]
    assert names(tmp_path, "test") == ["b", "c"]
    with pytest.raises(
        DatasetError,
        match=r"no file of the split 'dev'; there is test-00000-of-00002.jsonl, test-.*, x_train.jsonl. Name another",
    ):
        names(tmp_path, "dev")


@pytest.mark.slow
def test_folders_that_datasets_saved(tmp_path: Path, hf: Any) -> None:
    rows = hf.Dataset.from_list([{"name": "a"}, {"name": "b"}])
    rows.save_to_disk(str(tmp_path / "one"))
    hf.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "two"))
    assert names(tmp_path / "one") == ["a", "b"]
    assert names(tmp_path / "two", "test") == ["b"]
    with pytest.raises(DatasetError, match=r"two': no split 'dev'; there is train, test"):
        names(tmp_path / "two", "dev")
    (tmp_path / "one" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(
        DatasetError, match=r"one' cannot be loaded: .* In the folder there is dataset_info.json, state"
    ):
        names(tmp_path / "one")


@pytest.mark.slow
def test_a_copy_of_a_dataset_on_the_hub(tmp_path: Path, hf: Any) -> None:
    rows = hf.Dataset.from_list([{"name": "a"}, {"name": "b"}])
    (tmp_path / "copy" / "data").mkdir(parents=True)
    rows.to_parquet(str(tmp_path / "copy" / "data" / "train-00000-of-00001.parquet"))
    rows.select([1]).to_parquet(str(tmp_path / "copy" / "data" / "test-00000-of-00001.parquet"))
    assert [(row.location, row.fields["name"]) for row in read_rows(str(tmp_path / "copy"), "test")] == [
        ("copy, row 1", "b")
    ]
    assert names(tmp_path / "copy") == ["a", "b"]
    with pytest.raises(DatasetError, match=r"split 'dev', cannot be loaded: .*'train', 'test'.* there is data/\."):
        names(tmp_path / "copy", "dev")


def test_a_copy_whose_card_says_which_file_is_which_split(tmp_path: Path, hf: Any) -> None:
    write(tmp_path / "card" / "x.jsonl", "a")
    write(tmp_path / "card" / "y.jsonl", "b")
    splits = "".join(
        f"  - split: {split}\n    path: {file}\n" for split, file in (("train", "x.jsonl"), ("eval", "y.jsonl"))
    )
    (tmp_path / "card" / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{splits}---\n")
    assert names(tmp_path / "card") == ["a"]
    assert names(tmp_path / "card", "eval") == ["b"]


def test_a_folder_that_nothing_can_read(tmp_path: Path, hf: Any) -> None:
    for name in "abcdefghijklmnopqrstuvw":
        (tmp_path / f"{name}.what").write_text("x")
    with pytest.raises(
        DatasetError, match=r"cannot be loaded: .* In the folder there is a.what, .*, t.what and 3 more\."
    ):
        names(tmp_path)


# ------------------------------------------------------------------------------------------------------------------ hub


@pytest.mark.parametrize("name", ["nobody/nothing", "nobody/nothing:config"])
def test_a_name_the_hub_does_not_give(hf: Any, name: str) -> None:
    with pytest.raises(DatasetError) as caught:
        names(name)
    assert f"dataset {name!r}, split 'train', cannot be loaded from the hub: " in str(caught.value)
    assert "There is no file or folder of that name here either." in str(caught.value)
