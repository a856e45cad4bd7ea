"""Do tars and parquet files behind a URL arrive as they are needed, whole and once?"""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import random
import time
from pathlib import Path

import psutil
import pytest

from sdbench import data
from sdbench.base.errors import RunError
from sdbench.cli import main
from sdbench.data.formats import webdataset_stream
from sdbench.data.places import remote_files
from sdbench.data.source import SourceConfig
from tests.data import datasets
from tests.data.datasets import NUM_SAMPLES, TAR_SIZES, indices, read_epoch
from tests.data.s3_server import BUCKET, S3Server
from tests.refusals import PLACE_FLAGS, TOO_FEW_FLAG, printed_refusal, refused

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.usefixtures("temporary_folder", "impatient", "small_pieces"),
]

NAMES = {"webdataset": "{00000..00002}.tar", "parquet": "{0..1}.parquet"}


@pytest.fixture
def small_pieces(monkeypatch):
    """Tars of a few samples are read in many parts, and have several blocks."""
    monkeypatch.setattr(remote_files, "PART_BYTES", 4096)
    monkeypatch.setattr(webdataset_stream, "SAMPLES_PER_BLOCK", 4)


@pytest.fixture
def folder(tmp_path):
    """A function from a kind of data to a folder of it, tars with their sizes."""

    def make(kind: str) -> Path:
        path = tmp_path / kind
        datasets.WRITERS[kind](path)
        if kind.startswith("webdataset"):
            (path / "sizes.json").write_text(json.dumps(TAR_SIZES))
        return path

    return make


@pytest.fixture
def place(s3: S3Server, folder, tmp_path):
    """A function from a kind of data to the URL of its files in the bucket.

    Their keys have the marks that begin the query and the fragment of a web address.
    """

    def put(kind: str) -> str:
        url = s3.upload(folder(kind), f"{tmp_path.name}/why?#/{kind}")
        return f"{url}/{NAMES[kind.split()[0]]}"

    return put


def make_config(place: str, kind: str = "webdataset", **changes) -> SourceConfig:
    return datasets.make_source(kind, place, **{"remote_files": "stream", **changes})


def open_ranks(place: str, kind: str, *, num_ranks: int, num_workers: int, **changes):
    """The loader of each rank, of a global batch of 4."""
    shared = {"world_size": num_ranks, "num_workers": num_workers, **changes}
    size = 4 // num_ranks
    return [
        data.build(make_config(place, kind, rank=rank, device_batch_size=size, **shared))
        for rank in range(num_ranks)
    ]


def check_stored_order(place: str, kind: str = "webdataset", **changes) -> None:
    """An epoch of the place has its samples once, in their stored order."""
    assert read_epoch(make_config(place, kind, shuffle=False, **changes)) == list(range(48))


def files_below(folder: Path) -> list[Path]:
    """Whatever lies there, but for what torch writes when it is imported."""
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and path.name != "_remote_module_non_scriptable.py"
    ]


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_the_first_batch_comes_before_the_rest_is_read(kind, place, s3, tmp_path, monkeypatch):
    small = datasets.make_png
    noise = random.Random(0).randbytes(32_000)  # is not compressed
    monkeypatch.setattr(datasets, "make_png", lambda index: small(index) + noise)
    # No answer comes whole that is longer than a part: a row group has eight.
    monkeypatch.setattr(remote_files, "PART_BYTES", 2**15)
    s3.cut_after = 2**15
    batches = iter(data.build(make_config(place(kind), kind)))
    batch = next(batches)
    # Of a tar a block of 4, and of parquet the footers with the 64 KiB before, and a group of 8.
    stored = [path for path in (tmp_path / kind).iterdir() if path.suffix != ".json"]
    num_bytes = sum(path.stat().st_size for path in stored)
    assert num_bytes > NUM_SAMPLES * 32_000
    assert s3.num_bytes < num_bytes / 3
    assert len(set(indices([batch, *batches]))) == 48
    assert num_bytes * 0.9 < s3.num_bytes < num_bytes + 2 * 2**16 + 10_000


def test_row_groups_are_shuffled_over_all_files(place):
    loader = data.build(make_config(place("parquet"), "parquet"))
    rows = indices([*loader, *loader])
    # 30 rows and 19, in groups of 8.
    groups = [(row // 8 if row < 30 else 4 + (row - 30) // 8) for row in rows]
    files = [group >= 4 for group, _ in itertools.groupby(groups)]
    # File by file there would be one change in each epoch, and one between them.
    assert sum(one != other for one, other in itertools.pairwise(files)) > 3


def test_the_next_part_comes_while_one_is_used(place, s3):
    samples = data.open_samples(make_config(place("webdataset")))
    num_before = s3.num_requests
    samples.read(0)
    # Of a tar its length, the part with the sample, and the next one, which nobody waits for.
    deadline_s = time.monotonic() + 20
    while s3.num_requests < num_before + 3 and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert s3.num_requests == num_before + 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_ranks", "num_workers"), [("webdataset", 2, 0), ("parquet", 1, 2)]
)
def test_a_resumed_epoch_neither_repeats_nor_drops(
    kind, num_ranks, num_workers, place, temporary_folder, monkeypatch
):
    monkeypatch.setattr(remote_files, "PART_BYTES", 2**16)  # in fewer parts, as each takes its time
    where = place(kind)
    options = {"num_ranks": num_ranks, "num_workers": num_workers}
    whole = [list(loader) for loader in open_ranks(where, kind, **options)]
    stopped = open_ranks(where, kind, **options)
    seen = [list(itertools.islice(loader, 5)) for loader in stopped]
    (state, *others) = [pickle.loads(pickle.dumps(loader.state_dict())) for loader in stopped]
    assert others == [state] * len(others)
    del stopped

    resumed = open_ranks(where, kind, **options)
    for loader, expected in zip(resumed, whole, strict=True):
        loader.load_state_dict(state)
        assert indices(list(loader)) == indices(expected[5:])

    before = [number for part in seen for number in indices(part)]
    epoch = [number for part in whole for number in indices(part)]
    assert len(set(epoch)) == len(epoch) == 48
    for other_ranks, other_workers in ((1, 0), (4, 1)):
        loaders = open_ranks(where, kind, num_ranks=other_ranks, num_workers=other_workers)
        after = []
        for loader in loaders:
            loader.load_state_dict(state)
            after += indices(list(loader))
            assert loader.state_dict()["lanes"] == [other_ranks, max(other_workers, 1)]
        assert sorted(before + after) == sorted(epoch)
    assert files_below(temporary_folder) == []  # no copy is made


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(2, 0), (1, 2)])
def test_lanes_that_are_read_in_turn_have_a_reader_each(num_ranks, num_workers, folder, tmp_path):
    path = folder("webdataset")
    log = tmp_path / "log"
    place = f"pipe:echo x >> {log}; exec cat {path}/{{00000..00002}}.tar"
    options = {"num_workers": num_workers, "tar_sizes": str(path / "sizes.json")}
    loaders = open_ranks(place, "webdataset", num_ranks=num_ranks, **options)
    # As from 4 ranks with 3 workers: 12 lanes of 4 samples. One process reads all of them, each of
    # two ranks half, and each of two workers all.
    state = {**loaders[0].state_dict(), "num_images": 4, "lanes": [4, 3]}
    found = []
    for loader in loaders:
        loader.load_state_dict(state)
        found += indices(list(loader))
    assert len(set(found)) == len(found) == 44
    # Each lane opens the tar in which it begins, and those behind it.
    assert len(log.read_text().split()) <= 12 * max(num_workers, 1) + 3


def test_a_tar_that_was_left_is_closed(folder, tmp_path):
    path = folder("webdataset")
    place = f"pipe:exec cat {path}/{{00000..00002}}.tar"
    options = {"num_workers": 0, "tar_sizes": str(path / "sizes.json")}
    loader, _ = open_ranks(place, "webdataset", num_ranks=2, **options)
    others, most = set(psutil.Process().children()), 0
    for _ in range(4):
        for _ in loader:
            most = max(most, len(set(psutil.Process().children()) - others))
    assert most == 1


@pytest.mark.slow
def test_past_samples_are_named_by_tar_and_position(place):
    loader = data.build(make_config(place("webdataset"), num_workers=2))
    seen = [*loader, *itertools.islice(loader, 3)]
    starts = dict(zip(TAR_SIZES, (0, 5, 35), strict=True))
    for back in range(len(seen)):
        names = loader.names_before(loader.state_dict(), num_back=back)
        found = [name.rsplit("/", 1)[1].split(", sample ") for name in names]
        assert [starts[tar] + int(at) for tar, at in found] == indices([seen[-1 - back]])


def test_a_position_in_other_sizes_or_in_copied_data_is_refused(folder, tmp_path):
    path, sizes = folder("webdataset"), tmp_path / "sizes.json"
    place = f"pipe:cat {path}/{{00000..00002}}.tar"
    loaders = [data.build(make_config(place, remote_files="copy"))]
    for moved in (0, 1):  # with the same sum
        sizes.write_text(json.dumps({**TAR_SIZES, "00000.tar": 5 + moved, "00001.tar": 30 - moved}))
        loaders.append(data.build(make_config(place, tar_sizes=str(sizes))))
    copied, before, after = loaders
    for here, there in ((after, before), (copied, before), (before, copied)):
        with refused(f"--remote_files, --shuffle, --tar_sizes, --buckets or {PLACE_FLAGS}"):
            here.load_state_dict(there.state_dict())


def sign(s3: S3Server, keys: list[str]) -> str:
    """Web addresses of objects, in braces."""
    urls = [
        s3.client().generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key})
        for key in keys
    ]
    return "{" + ",".join(urls).replace(f"http://127.0.0.1:{s3.port}", s3.url) + "}"


def test_web_files_that_their_server_calls_packed_are_streamed(s3, folder, tmp_path):
    path = folder("webdataset")
    keys = [f"{tmp_path.name}/{name}.gz" for name in TAR_SIZES]
    for name, key in zip(TAR_SIZES, keys, strict=True):
        packed = gzip.compress((path / name).read_bytes())
        s3.client().put_object(Bucket=BUCKET, Key=key, Body=packed, ContentEncoding="gzip")
    sizes = tmp_path / "sizes.json"
    sizes.write_text(json.dumps({f"{name}.gz": size for name, size in TAR_SIZES.items()}))
    check_stored_order(sign(s3, keys), tar_sizes=str(sizes))


@pytest.mark.parametrize("pack", ["", " | gzip -c"])
def test_commands_are_streamed(pack, folder):
    path = folder("webdataset")
    place = f"pipe:cat {path}/{{00000..00002}}.tar{pack}"
    check_stored_order(place, tar_sizes=str(path / "sizes.json"))


@pytest.mark.parametrize("kind", ["webdataset", "parquet"])
def test_parts_that_break_off_are_asked_for_again(kind, place, s3):
    batches = iter(data.build(make_config(place(kind), kind)))
    seen = [next(batches)]
    s3.cut_after, s3.num_cuts, s3.num_busy = 100, 2, 2
    assert len(set(indices([*seen, *batches]))) == 48
    assert s3.num_busy == s3.num_cuts == 0


@pytest.mark.parametrize(("kind", "num_workers"), [("webdataset", 2), ("parquet", 0)])
def test_a_shard_that_fails_half_way_is_named(kind, num_workers, place, s3):
    config = make_config(place(kind), kind, num_workers=num_workers, prefetch_factor=1)
    batches = iter(data.build(config))
    next(batches)
    s3.cut_after = 100
    with pytest.raises(RunError, match=r"/[0-9]+\..*, from byte \d+ on, .* in 3 attempts"):
        list(batches)


@pytest.mark.parametrize(
    ("change", "is_open", "message"),
    [
        (lambda tar: tar + b"\0", True, r"/00001.tar has been changed since it was opened"),
        (lambda tar: tar[:20_000], False, r"/00001.tar is damaged"),
        (None, False, r"/00001.tar cannot be read: .*404"),
    ],
)
def test_a_damaged_or_changed_shard_is_named(change, is_open, message, place, s3, tmp_path):
    loader = data.build(make_config(place("webdataset").replace("{00000..00002}", "00001")))
    batches = iter(loader)
    if is_open:
        next(batches)
    tar = {"Bucket": BUCKET, "Key": f"{tmp_path.name}/why?#/webdataset/00001.tar"}
    if change is None:
        s3.client().delete_object(**tar)
    else:
        whole = (tmp_path / "webdataset" / "00001.tar").read_bytes()
        s3.client().put_object(Body=change(whole), **tar)
    with pytest.raises(RunError, match=message):
        list(batches)


@pytest.mark.parametrize("declared", [29, 31])
def test_another_number_of_samples_than_declared_is_named(declared, place, tmp_path):
    sizes = tmp_path / "other.json"
    sizes.write_text(json.dumps({**TAR_SIZES, "00001.tar": declared}))
    # In stored order, which has the tar's end in its epoch.
    config = make_config(place("webdataset"), shuffle=False, tar_sizes=str(sizes))
    with pytest.raises(RunError, match=rf"/00001.tar holds 30 samples, not the {declared} decl"):
        list(data.build(config))


def test_tars_of_latents_are_streamed(place):
    check_stored_order(place("webdataset latents"), "webdataset latents")


def test_what_cannot_be_streamed_is_refused(folder, tmp_path):
    tars = folder("webdataset")
    url = "s3://pictures/a/{0..1}.tar"
    sizes = tmp_path / "sizes.json"
    sizes.write_text('{"0.tar": 8, "1.tar": 8}')
    told = {"tar_sizes": str(sizes)}
    for place, kind, changes, flag, value in (
        (str(tars), "webdataset", {}, "--remote_files", str(tars / "00000.tar")),
        ("gs://a/0.tar", "webdataset", {}, "--remote_files", "gs://a/0.tar"),
        ("pipe:cat a", "parquet", {}, "--remote_files", "pipe:cat a"),
        ("s3://pictures/a", "mds", {}, "--remote_files", "stream"),
        (url, "webdataset", {**told, "local": "copies"}, "--local", "copies"),
        (url, "webdataset", {**told, "filters": {"a": ">=5"}}, "--filters", {"a": ">=5"}),
        (url, "webdataset", {**told, "remote_files": "copy"}, "--tar_sizes", str(sizes)),
        ("pipe:cat a", "webdataset", {}, "--tar_sizes", None),
        ("s3://p/a/{0..2}.tar", "webdataset", told, "--tar_sizes", "s3://p/a/2.tar"),
        ("s3://p/{a,b}/0.tar", "webdataset", told, "--tar_sizes", "s3://p/b/0.tar"),
    ):
        with refused(flag, value=value):
            data.check(make_config(place, kind, **changes))
    assert data.check(make_config("https://h/0.parquet", "parquet")) is None
    assert data.check(make_config(url, **told)) == 16
    with refused(TOO_FEW_FLAG, value=17, allowed="at most 16"):
        data.check(make_config(url, device_batch_size=17, **told))


def test_tars_are_known_by_the_end_of_their_path(tmp_path):
    sizes = tmp_path / "sizes.json"
    sizes.write_text('{"my-0.tar": 8}')
    for place in (
        "pipe:curl -s 'https://h/my-0.tar?sig=1&by=me'",
        "pipe:curl -s https://h/my%2D0.tar | cat",
        "https://h/my%2D0.tar?sig=1",
        "s3://h/my-0.tar",
    ):
        assert data.check(make_config(place, tar_sizes=str(sizes))) == 8


def test_sizes_that_cannot_be_read_are_refused(s3, tmp_path):
    sizes = tmp_path / "sizes.json"
    for content in (
        None,
        b"{",
        b"[1]",
        b'{"0.tar": -1}',
        b'{"0.tar": true}',
        gzip.compress(b'{"0.tar": 8}')[:-9],
        gzip.compress(b"")[:10] + b"\xff" * 20,
    ):
        if content is not None:
            sizes.write_bytes(content)
        with refused("--tar_sizes", value=str(sizes)):
            data.check(make_config("s3://pictures/a/0.tar", tar_sizes=str(sizes)))
    with refused("--tar_sizes", value="s3://pictures/nowhere/sizes.json"):
        data.check(make_config("s3://pictures/nowhere/0.tar"))


@pytest.mark.parametrize("remote_files", ["copy", "stream"])
def test_fewer_samples_than_a_batch_are_refused_when_they_are_counted(remote_files, place):
    changes = {"remote_files": remote_files, "device_batch_size": 50}
    config = make_config(place("parquet"), "parquet", **changes)
    assert data.check(config) is None
    with refused(TOO_FEW_FLAG, value=50, allowed="at most 49"):
        data.build(config)


def test_tars_are_counted_where_they_are(s3, folder, tmp_path, capsys, temporary_folder):
    path = folder("webdataset")
    packed = gzip.compress((path / "00001.tar").read_bytes())
    (path / "00001.tar").unlink()
    (path / "00001.tar.gz").write_bytes(packed)
    sizes = {"00000.tar": 5, "00001.tar.gz": 30, "00002.tar": 14}
    out = tmp_path / "counted.json"
    for place in (str(path), s3.upload(path, f"{tmp_path.name}/counted")):
        assert main(["verify-data", place, "--count", "--out", str(out)]) == 0
        assert json.loads(out.read_text()) == sizes
        assert capsys.readouterr().out == f"49 samples in 3 tars: {out}\n"
    assert files_below(temporary_folder) == []
    check_stored_order(place, tar_sizes=str(out))
    latents = folder("webdataset latents")
    assert main(["verify-data", str(latents), "--count", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == TAR_SIZES
    # Names that are not told apart by their last part.
    both = f"{{{path}/00000.tar,{place}/00000.tar}}"
    assert main(["verify-data", both, "--count", "--out", str(out)]) == 0
    assert json.loads(out.read_text()) == {"webdataset/00000.tar": 5, "counted/00000.tar": 5}
    (path / "00002.tar").write_bytes((path / "00002.tar").read_bytes()[:9000])
    capsys.readouterr()
    assert main(["verify-data", str(path), "--count", "--out", str(out)]) == 1
    told = capsys.readouterr().err
    assert told.count(f"{path}/00002.tar is damaged") == 1
    assert f"error: 1 of 3 tars cannot be counted (see above); {out} has the 2 others." in told
    assert json.loads(out.read_text()) == {"00000.tar": 5, "00001.tar.gz": 30}


@pytest.mark.parametrize(
    ("argv", "flag"),
    [
        ("pipe:cat@a.tar --count --out sizes.json", "PLACE"),
        ("{https://a/b.tar,https://c/b.tar} --count --out sizes.json", "PLACE"),
        # Before the tars are looked for.
        ("pipe:cat@a.tar --count --out nowhere/sizes.json", "--out"),
        ("a.tar --count", "--out or --count"),
        ("a.tar --out sizes.json", "--count or --out"),
        ("a.tar --count --out sizes.json --deep", "--deep or --count"),
        ("a.tar --count --out sizes.json --data_format mds", "--data_format or --count"),
    ],
)
def test_what_cannot_be_counted_is_bad_input(argv, flag, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["verify-data", *(word.replace("@", " ") for word in argv.split())]) == 2
    assert printed_refusal(capsys.readouterr().err).flag == flag
