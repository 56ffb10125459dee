"""Tiles in a real S3 server on this machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from centerlines import list_s3_files, s3_store
from centerlines.errors import TileReadError, UsageError
from centerlines.jobs import build_tile_jobs
from centerlines.storage import TileSource, find_tiles
from tests.support.s3 import S3Server, running_s3

ODD_KEYS = [
    "odd/a space.tif",
    "odd/plus+.tif",
    "odd/hash#1.tif",
    "odd/question?2.tif",
    "odd/percent%20.tif",
    "odd/percent%zz.tif",
    "odd/é 漢.tif",
    "odd/e\u0301.tif",
    "odd/a&b=c;d,e:f@$.tif",
    "odd/~'()*!|^`[]{}.tif",
    "odd/back\\slash.tif",
]
PLAIN_KEYS = ["a.tif", "town/a.tif", "town/b.TIFF", "town/deep/c.tif", "town2/d.tif"]
OTHER_KEYS = ["town/notes.txt", "town/._a.tif", "town/a.tif.aux.xml"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server whose bucket `tiles` holds objects that contain their own key."""
    with running_s3(tmp_path_factory.mktemp("s3")) as running:
        for key in (*ODD_KEYS, *PLAIN_KEYS, *OTHER_KEYS):
            path = running.buckets / "tiles" / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(key.encode())
        (running.buckets / "empty").mkdir()
        yield running


@pytest.fixture(autouse=True)
def _credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("prefix", "expected"),
    [
        ("", sorted(ODD_KEYS + PLAIN_KEYS)),
        ("town", ["town/a.tif", "town/b.TIFF", "town/deep/c.tif"]),
        ("town/", ["town/a.tif", "town/b.TIFF", "town/deep/c.tif"]),
        ("town/deep/", ["town/deep/c.tif"]),
        ("town/a.tif", ["town/a.tif"]),
        ("tow", ["town/a.tif", "town/b.TIFF", "town/deep/c.tif", "town2/d.tif"]),
        ("town/b", ["town/b.TIFF"]),
        ("odd/hash#", ["odd/hash#1.tif"]),
        ("nothing", []),
    ],
)
def test_a_prefix_is_a_folder_a_key_or_the_beginning_of_one(prefix: str, expected: list[str]) -> None:
    """All three are what people write behind the bucket."""
    assert list_s3_files(s3_store("tiles"), prefix) == expected


def test_every_listed_key_can_be_read() -> None:
    """A key that is encoded once too often, or not at all, reads another object or none."""
    store = s3_store("tiles")
    for key in list_s3_files(store, ""):
        assert TileSource(store).open(key) == key.encode()


def test_arguments_of_the_command_line_are_found(server: S3Server) -> None:
    """Whole keys and prefixes, in the order given; every tile gets its own name."""
    paths, source = find_tiles(["s3://tiles/town2", "s3://tiles/odd/hash#1.tif", "s3://tiles/town/"])
    assert paths == ["town2/d.tif", "odd/hash#1.tif", "town/a.tif", "town/b.TIFF", "town/deep/c.tif"]
    assert source.open("town2/d.tif") == b"town2/d.tif"
    names = [job.tile_id for job in build_tile_jobs(find_tiles(["s3://tiles"])[0], "job")]
    assert len(set(names)) == len(ODD_KEYS + PLAIN_KEYS)
    assert server.buckets.is_dir()


@pytest.mark.parametrize("source", ["s3://empty", "s3://empty/", "s3://tiles/town/notes", "s3://tiles/nothing/"])
def test_a_prefix_without_tiles_is_named(source: str) -> None:
    """A run of nothing would look like a success."""
    with pytest.raises(UsageError, match=f"{source}: no GeoTIFF"):
        find_tiles([source])


def test_a_missing_object_is_one_line_in_the_servers_words() -> None:
    """It stands in progress.csv as the reason."""
    with pytest.raises(TileReadError) as caught:
        TileSource(s3_store("tiles")).open("town/gone.tif")
    assert str(caught.value) == "tile town/gone.tif: cannot be fetched: NoSuchKey: The specified key does not exist."


def test_a_missing_bucket_is_named() -> None:
    """The name of the bucket is the first thing to look at."""
    with pytest.raises(UsageError, match=r"^s3://no-such-bucket/x: cannot be listed: NoSuchBucket: .*\.$"):
        find_tiles(["s3://no-such-bucket/x"])


@pytest.mark.parametrize("variable", ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"])
def test_wrong_credentials_are_told_without_telling_them(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """Messages end up in logs that others read."""
    monkeypatch.setenv(variable, "WRONGANDPRIVATE")
    with pytest.raises(UsageError, match=r"^s3://tiles/town: cannot be listed: \w+: .+") as listing:
        find_tiles(["s3://tiles/town"])
    with pytest.raises(TileReadError, match=r"^tile town/a\.tif: cannot be fetched: \w+: .+") as reading:
        TileSource(s3_store("tiles")).open("town/a.tif")
    for error in (listing, reading):
        message = str(error.value)
        assert "\n" not in message
        assert "PRIVATE" not in message
        assert "secret-of-the-tests" not in message


def test_no_server_at_all_is_one_line(server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong endpoint is a matter of seconds, and its address is in the message."""
    with running_s3(tmp_path) as other:
        gone = other.url
    assert gone != server.url
    monkeypatch.setenv("AWS_ENDPOINT_URL", gone)
    with pytest.raises(UsageError, match=f"^s3://tiles/town: cannot be listed: .*{gone}") as caught:
        find_tiles(["s3://tiles/town"])
    assert "\n" not in str(caught.value)
