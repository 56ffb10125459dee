"""Finding tiles on this machine, and writing results whole."""

import pickle
import re
import threading
from pathlib import Path

import pytest

from centerlines.errors import CenterlinesError, UsageError
from centerlines.storage import TileSource, find_tiles, s3_store, write_whole


def make(folder: Path, *names: str) -> None:
    """Make empty files, with their folders."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()


def found(*sources: Path | str) -> list[str]:
    """The paths found, and that they are read from this machine."""
    paths, source = find_tiles([str(source) for source in sources])
    assert source == TileSource()
    return paths


def test_a_file_is_taken_whatever_it_is_called(tmp_path: Path) -> None:
    """Who names a file means it."""
    make(tmp_path, "tile.img", "a.tif")
    assert found(tmp_path / "tile.img", tmp_path / "a.tif") == [f"{tmp_path}/tile.img", f"{tmp_path}/a.tif"]


def test_a_folder_gives_its_tiles_sorted_and_with_those_of_folders_in_it(tmp_path: Path) -> None:
    """The same folder must give the same order on every machine."""
    make(tmp_path, "b.tif", "a.TIF", "x/y/c.tiff", "x/d.TiFf", "notes.txt", "tif", "a.tif.aux.xml", "odd #1?%20 é.tif")
    names = ["a.TIF", "b.tif", "odd #1?%20 é.tif", "x/d.TiFf", "x/y/c.tiff"]
    assert found(tmp_path) == [f"{tmp_path}/{name}" for name in names]


def test_hidden_files_and_folders_called_like_tiles_are_left_out(tmp_path: Path) -> None:
    """Other systems leave `._name` files beside the real ones, and copies under way have hidden names."""
    make(tmp_path, "a.tif", "._a.tif", ".a.tif.123.partial", ".b.tif")
    (tmp_path / "folder.tif").mkdir()
    assert found(tmp_path) == [f"{tmp_path}/a.tif"]


def test_several_arguments_keep_their_order(tmp_path: Path) -> None:
    """Results are listed in the order asked for."""
    make(tmp_path, "2/b.tif", "1/a.tif", "1/z.tif")
    assert found(tmp_path / "2", tmp_path / "1") == [f"{tmp_path}/{name}" for name in ("2/b.tif", "1/a.tif", "1/z.tif")]


def test_links_are_followed(tmp_path: Path) -> None:
    """Folders of links are how people select tiles."""
    make(tmp_path, "store/a.tif")
    (tmp_path / "chosen").mkdir()
    (tmp_path / "chosen/b.tif").symlink_to(tmp_path / "store/a.tif")
    (tmp_path / "chosen/broken.tif").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(tmp_path / "chosen")
    assert found(tmp_path / "chosen") == [f"{tmp_path}/chosen/b.tif"]
    assert found(tmp_path / "linked") == [f"{tmp_path}/linked/b.tif"]


@pytest.mark.parametrize("name", ["missing", "missing/deeper.tif", "file.tif/below", "n" * 300, ""])
def test_what_is_not_there_is_named(tmp_path: Path, name: str) -> None:
    """A mistyped path is one clear line."""
    make(tmp_path, "file.tif")
    source = str(tmp_path / name) if name else str(tmp_path / "no" / "")
    with pytest.raises(UsageError, match=re.escape(source)) as caught:
        found(source)
    assert "\n" not in str(caught.value)


def test_a_folder_without_tiles_is_named(tmp_path: Path) -> None:
    """A run of nothing would look like a success."""
    make(tmp_path, "notes.txt")
    with pytest.raises(UsageError, match=f"{tmp_path}: no GeoTIFF"):
        found(tmp_path)


@pytest.mark.parametrize("others", [["s3://one/b"], ["s3://one/b", "s3://two/c"]])
def test_kinds_and_buckets_are_not_mixed(tmp_path: Path, others: list[str]) -> None:
    """All loaders of a run read from one place."""
    make(tmp_path, "a.tif")
    sources = [str(tmp_path), *others] if len(others) == 1 else others
    with pytest.raises(UsageError, match="must be local, or all in one bucket"):
        find_tiles(sources)


@pytest.mark.parametrize("source", ["s3://", "s3:///a.tif", "s3://buck et/a", "s3://b?x/a", "s3://[b/a"])
def test_a_bucket_needs_a_name(source: str) -> None:
    """It would end deep in the S3 client."""
    with pytest.raises(UsageError, match="s3 bucket"):
        find_tiles([source])


def test_the_endpoint_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The AWS tools' own variables: S3's own wins, and plain http is allowed where it is written."""
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert "endpoint" not in s3_store("tiles").config
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    store = s3_store("tiles")
    assert store.config["endpoint"] == "http://127.0.0.1:9"
    assert str((store.client_options or {})["allow_http"]).lower() == "true"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://127.0.0.1:10")
    store = s3_store("tiles")
    assert store.config["endpoint"] == "https://127.0.0.1:10"
    assert str((store.client_options or {})["allow_http"]).lower() == "false"


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "not a url", "ftp://host"])
def test_an_endpoint_that_is_no_url_is_refused(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    """The S3 client would end the program with a stack trace."""
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", endpoint)
    with pytest.raises(UsageError, match=f"AWS_ENDPOINT_URL '{endpoint}'"):
        s3_store("tiles")


def test_half_of_the_credentials_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten variable is the most common mistake with S3."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    with pytest.raises(UsageError, match=r"^s3 bucket 'tiles': check the AWS_\* variables: .*AccessKeyId$"):
        s3_store("tiles")


def test_a_source_travels_to_other_processes_without_the_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors get it pickled; credentials belong to each machine's environment."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "somebody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    content = pickle.dumps(TileSource(s3_store("tiles")))
    assert b"do-not-tell" not in content
    assert pickle.loads(content).store.config["bucket"] == "tiles"  # noqa: S301  our own
    assert pickle.loads(pickle.dumps(TileSource())) == TileSource()  # noqa: S301


def test_a_local_tile_is_given_by_its_path() -> None:
    """Reading a whole file into memory for nothing would double what a tile costs."""
    assert TileSource().open("x/a.tif") == "x/a.tif"


def test_a_file_is_written_and_replaced(tmp_path: Path) -> None:
    """Nothing but the file is left in its folder."""
    path = tmp_path / "a.geojson"
    for content in (b"old and longer", b"new", b""):
        write_whole(path, content)
        assert path.read_bytes() == content
        assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    """A full disk must not cost the results of the last run, nor leave half a file under a real name."""
    taken = tmp_path / "a.geojson"
    make(taken, "kept")
    with pytest.raises(CenterlinesError, match=r"a\.geojson: cannot be written: "):
        write_whole(taken, b"new")
    assert [path.name for path in tmp_path.rglob("*")] == ["a.geojson", "kept"]
    with pytest.raises(TypeError):
        write_whole(tmp_path / "b.geojson", "text")  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["a.geojson"]


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    """Others read progress.csv while it is written anew every few seconds."""
    path = tmp_path / "progress.csv"
    contents = {letter * 3_000_000 for letter in (b"a", b"b")}
    write_whole(path, b"a" * 3_000_000)

    def write() -> None:
        for _ in range(20):
            for content in contents:
                write_whole(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        reads = 0
        while writer.is_alive():
            assert path.read_bytes() in contents
            reads += 1
    finally:
        writer.join()
    assert reads
