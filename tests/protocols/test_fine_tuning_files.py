"""Uploaded files: their names lead nowhere, their sizes are limited, and what arrives in part leaves nothing behind."""

import asyncio
import hashlib
import resource
from functools import partial
from pathlib import Path

import aiohttp
import openai
import pytest

from reinforge.config.policy import PolicyConfig
from reinforge.protocols.openai.server.api import FineTuningSettings
from reinforge.protocols.openai.server.contents import FileContents
from reinforge.protocols.openai.server.files import FileLimits
from reinforge.protocols.openai.server.forms import clean_name
from reinforge.serving.routes import ApiError
from tests.protocols.fine_tuning import CopyLauncher, FineTuningServer, NamesOnly
from tests.serving.serving import async_openai

LIMITS = FileLimits(max_file_bytes=1 << 20, max_part_bytes=1 << 12, max_total_bytes=3 << 20, chunk_timeout_s=1.0)
ATTACKS = (
    "../../../etc/passwd",
    "..%2f..%2fjobs.sqlite",
    "%2e%2e%2fjobs.sqlite",
    "/etc/passwd",
    "file-1\0.jsonl",
    "C:\\Windows\\win.ini",
    "....//....//x",
    "~/.ssh/id_rsa",
    "aux.jsonl\r\nX-Evil: 1",
)


def make_server(folder):
    settings, bases = FineTuningSettings(folder / "data", files=LIMITS), {"tiny": PolicyConfig(model="/nowhere")}
    doubles = {"launcher": CopyLauncher(folder), "host": NamesOnly()}
    return FineTuningServer(folder, bases, settings=settings, serve_bases=False, **doubles)


@pytest.fixture
async def server(tmp_path):
    async with make_server(tmp_path) as server:
        yield server


@pytest.fixture
async def client(server):
    async with async_openai(server.app) as client:
        yield client


def stored(server):
    return sorted(path.name for path in (server.api.settings.folder / "files").iterdir())


async def send(server, content, name="rows.jsonl", purpose="fine-tune", **headers):
    boundary = "frontier"
    head = f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n'
    head += f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n'
    body = head.encode("utf-8", "surrogateescape") + content + f"\r\n--{boundary}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={boundary}", **headers}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{server.url}/files", data=body, headers=headers) as response,
    ):
        return response.status, await response.json()


@pytest.mark.filterwarnings("ignore::aiohttp.BadContentDispositionHeader")
async def test_a_clients_name_of_a_file_is_never_part_of_a_path(server):
    root = Path(server.api.settings.folder).parent
    for name in ATTACKS:
        before = set(root.rglob("*"))
        status, answer = await send(server, b"x", name)
        assert status in (200, 400), answer
        made = [root / "data" / "files" / answer["id"]] if status == 200 else []
        assert set(root.rglob("*")) - before == set(made)
        assert not set(answer.get("filename", "")) & set("/\\\0\r\n")


async def test_an_id_that_the_server_has_not_made_leads_to_no_file(server):
    async with aiohttp.ClientSession() as session:
        for id_ in ("..%2fjobs.sqlite", "%2e%2e/jobs.sqlite", "....", "FILE-1", "a" * 65, "x%00y", "~root"):
            for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                async with session.request(method, f"{server.url}/files/{id_}{path}") as response:
                    assert response.status in (404, 405), id_
                    assert "format" not in await response.text()


def test_paths_stay_inside_the_folder_and_follow_no_link(tmp_path):
    contents = FileContents(tmp_path / "files")
    (tmp_path / "secret").write_text("s")
    (tmp_path / "files" / "file-1").symlink_to(tmp_path / "secret")
    for id_ in ("../secret", "file-1", "", ".", "..", "a/b"):
        with pytest.raises(ApiError) as refused:
            contents.path(id_)
        assert refused.value.status == 404


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("a.jsonl", "a.jsonl"), ("../../b.jsonl", "b.jsonl"), ("c\\d.jsonl", "d.jsonl"), ("\x1b[31me\n", "[31me"),
        ("", "file"), (None, "file"), ("/", "file"), ("x" * 999, "x" * 255),
    ],
)  # fmt: skip
def test_names_are_cleaned(name, clean):
    assert clean_name(name) == clean


async def test_a_file_that_is_too_long_is_refused_while_it_arrives(server):
    """200 MiB in chunks to a server that allows one: its memory does not grow with what is sent."""

    async def endless():
        yield (b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n')
        for _ in range(200):
            yield b"x" * (1 << 20)

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with aiohttp.ClientSession() as session:
        headers = {"Content-Type": "multipart/form-data; boundary=b"}
        try:
            async with session.post(f"{server.url}/files", data=endless(), headers=headers) as response:
                assert response.status == 413
                assert (await response.json())["error"]["code"] == "file_too_large"
        except aiohttp.ClientConnectionError:
            pass  # the server has hung up before the client had sent all
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 64 << 10, f"{grown} KiB"
    assert stored(server) == []
    assert server.api.store.count_bytes() == 0


async def test_all_files_together_have_a_limit(server, client):
    for _ in range(3):
        await client.files.create(file=("a", b"x" * (1 << 20)), purpose="fine-tune")
    with pytest.raises(openai.APIStatusError) as refused:
        await client.files.create(file=("a", b"x"), purpose="fine-tune")
    assert (refused.value.status_code, refused.value.code) == (413, "quota_exceeded")
    first = (await client.files.list()).data[0]
    await client.files.delete(first.id)
    await client.files.create(file=("a", b"x"), purpose="fine-tune")


async def test_a_client_that_stops_sending_is_given_up(server):
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.port)
    head = "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    part = '--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\nabc'
    writer.write(f"{head}Content-Length: 9999\r\n\r\n{part}".encode())
    async with asyncio.timeout(60):
        line = await reader.readline()
    writer.close()
    assert b" 408 " in line
    assert stored(server) == []


async def test_a_form_that_is_not_one_is_refused(server):
    form, purpose = "multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'
    async with aiohttp.ClientSession() as session:
        for body, kind, message in (
            (b"{}", "application/json", "expected multipart/form-data"),
            (b"nonsense", form, "the form"),
            (b"", "multipart/form-data", "the form is not valid"),
            (purpose + b"fine-tune\r\n--b--\r\n", form, "the form has no file"),
            (purpose + b"x" * 9999 + b"\r\n--b--\r\n", form, "longer than 4096 bytes"),
        ):
            async with session.post(f"{server.url}/files", data=body, headers={"Content-Type": kind}) as response:
                assert response.status == 400
                assert message in (await response.json())["error"]["message"]
    assert stored(server) == []


async def test_files_have_a_purpose_an_order_and_an_end(server, client):
    made = [await client.files.create(file=(f"{n}", b"x"), purpose="fine-tune") for n in range(3)]
    other = await client.files.create(file=("o", b"y"), purpose="batch")
    assert [each.id async for each in client.files.list(purpose="fine-tune", limit=2)] == [m.id for m in made[::-1]]
    assert [each.id async for each in client.files.list(order="asc", limit=3)] == [*(m.id for m in made), other.id]
    assert (await client.files.wait_for_processing(other.id)).status == "processed"
    assert (await client.files.content(other.id)).read() == b"y"
    assert (await client.files.delete(other.id)).deleted is True
    with pytest.raises(openai.NotFoundError):
        await client.files.retrieve(other.id)
    assert other.id not in stored(server)
    status, answer = await send(server, b"x", purpose="magic")
    assert (status, answer["error"]["param"]) == (400, "purpose")
    expiring = await client.files.create(
        file=("e", b"x"), purpose="fine-tune", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert expiring.expires_at == expiring.created_at + 3600
    with server.api.store._transaction() as database:
        database.execute("UPDATE files SET expires_at = 1 WHERE id = ?", (expiring.id,))
    with pytest.raises(openai.NotFoundError):
        await client.files.content(expiring.id)
    assert expiring.id not in [each.id async for each in client.files.list()]
    assert expiring.id not in stored(server)


async def test_files_that_arrive_at_once_share_the_limit(server):
    """Four of 1 MiB where three fit: each reserves its room while it arrives."""
    answers = await asyncio.gather(*(send(server, bytes([n]) * (1 << 20)) for n in range(4)))
    assert sorted(status for status, _ in answers) == [200, 200, 200, 413]
    assert server.api.store.count_bytes() == 3 << 20
    assert server.api.files._arriving == 0


async def test_a_name_that_is_no_text_is_stored_as_one(server, client):
    status, answer = await send(server, b"x", "a\udcff.jsonl")
    assert (status, answer["filename"]) == (200, "a?.jsonl")
    body = {"bytes": 1, "filename": "\ud800.jsonl", "mime_type": "t", "purpose": "fine-tune"}
    async with aiohttp.ClientSession() as session, session.post(f"{server.url}/uploads", json=body) as response:
        assert (response.status, (await response.json())["filename"]) == (200, "?.jsonl")


async def test_a_form_has_few_fields_and_does_not_wait_for_the_next(server):
    field = b'--b\r\nContent-Disposition: form-data; name="%d"\r\n\r\nx\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=b"}
    async with aiohttp.ClientSession() as session:
        many = b"".join(field % n for n in range(100)) + b"--b--\r\n"
        async with session.post(f"{server.url}/files", data=many, headers=headers) as response:
            assert response.status == 400
            assert "more than 16 fields" in (await response.json())["error"]["message"]
    reader, writer = await asyncio.open_connection("127.0.0.1", server.app.port)
    head = "POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=b\r\n"
    writer.write(f"{head}Content-Length: 9999\r\n\r\n--b\r\n".encode())
    async with asyncio.timeout(60):
        assert b" 408 " in await reader.readline()
    writer.close()


class TestUploads:
    async def test_uploads_reserve_their_room(self, server, client):
        """Three of 1 MiB fit; what is announced counts, before its parts arrive."""
        create = partial(client.uploads.create, bytes=1 << 20, filename="x", mime_type="t", purpose="fine-tune")
        first, *_ = [await create() for _ in range(3)]
        with pytest.raises(openai.APIStatusError) as refused:
            await create()
        assert refused.value.code == "quota_exceeded"
        await client.uploads.cancel(first.id)
        await create()

    async def test_what_a_client_sends_again_is_stored_once(self, server, client):
        retry = {"x-stainless-retry-count": "1"}
        settings = {"bytes": 6, "filename": "x", "mime_type": "t", "purpose": "fine-tune"}
        upload = await client.uploads.create(**settings)
        assert (await client.uploads.create(**settings, extra_headers=retry)).id == upload.id
        parts = [await client.uploads.parts.create(upload.id, data=data) for data in (b"abc", b"def")]
        again = await client.uploads.parts.create(upload.id, data=b"def", extra_headers=retry)
        assert again.id == parts[1].id
        with pytest.raises(openai.APIStatusError, match="bytes that the upload announced"):
            await client.uploads.parts.create(upload.id, data=b"x", extra_headers=retry)
        done = await client.uploads.complete(upload.id, part_ids=[part.id for part in parts])
        assert (await client.files.content(done.file.id)).read() == b"abcdef"
        assert stored(server) == [done.file.id]

    async def test_a_part_that_arrives_after_the_end_is_not_kept(self, server, client, monkeypatch):
        upload = await client.uploads.create(bytes=6, filename="x", mime_type="t", purpose="fine-tune")
        store_content = server.api.contents.store

        async def cancel_meanwhile(*arguments):
            made = await store_content(*arguments)
            await client.uploads.cancel(upload.id)
            return made

        monkeypatch.setattr(server.api.contents, "store", cancel_meanwhile)
        with pytest.raises(openai.NotFoundError, match="is cancelled"):
            await client.uploads.parts.create(upload.id, data=b"abc")
        assert stored(server) == []
        assert server.api.store.list_part_ids() == set()

    async def test_parts_become_a_file(self, server, client):
        content = bytes(range(256)) * 40
        upload = await client.uploads.create(
            bytes=len(content), filename="big.jsonl", mime_type="text/jsonl", purpose="fine-tune"
        )
        assert upload.status == "pending"
        parts = [
            await client.uploads.parts.create(upload.id, data=content[start : start + 4096])
            for start in range(0, len(content), 4096)
        ]
        md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
        done = await client.uploads.complete(upload.id, part_ids=[part.id for part in parts], md5=md5)
        assert (done.status, done.file.bytes, done.file.filename) == ("completed", len(content), "big.jsonl")
        assert (await client.files.content(done.file.id)).read() == content
        assert stored(server) == [done.file.id], "the parts are gone"
        again = await client.uploads.complete(upload.id, part_ids=[part.id for part in parts])
        assert again.file.id == done.file.id, "a retry gets the same file"

    async def test_what_does_not_fit_is_refused(self, server, client):
        with pytest.raises(openai.APIStatusError, match="too large"):
            await client.uploads.create(bytes=2 << 20, filename="x", mime_type="t", purpose="fine-tune")
        upload = await client.uploads.create(bytes=10, filename="x", mime_type="t", purpose="fine-tune")
        with pytest.raises(openai.APIStatusError, match="longer than 10 bytes"):
            await client.uploads.parts.create(upload.id, data=b"x" * 11)
        part = await client.uploads.parts.create(upload.id, data=b"x" * 9)
        with pytest.raises(openai.BadRequestError, match="have 9 bytes, but the upload was announced with 10"):
            await client.uploads.complete(upload.id, part_ids=[part.id])
        with pytest.raises(openai.BadRequestError, match="has no part"):
            await client.uploads.complete(upload.id, part_ids=["part-gone"])
        last = await client.uploads.parts.create(upload.id, data=b"y")
        for md5 in ("0" * 32, "\xe9"):
            with pytest.raises(openai.BadRequestError, match="MD5"):
                await client.uploads.complete(upload.id, part_ids=[part.id, last.id], md5=md5)
        for part_ids in ([{}], [[1]], None):
            with pytest.raises(openai.BadRequestError):
                await client.post(f"/uploads/{upload.id}/complete", body={"part_ids": part_ids}, cast_to=object)
        assert (await client.uploads.cancel(upload.id)).status == "cancelled"
        assert stored(server) == []
        with pytest.raises(openai.BadRequestError, match="is cancelled"):
            await client.uploads.parts.create(upload.id, data=b"x")


async def test_an_upload_that_nobody_completes_expires(server, client):
    upload = await client.uploads.create(bytes=10, filename="x", mime_type="t", purpose="fine-tune")
    await client.uploads.parts.create(upload.id, data=b"x" * 9)
    with server.api.store._transaction() as database:
        database.execute("UPDATE uploads SET expires_at = 1")
    with pytest.raises(openai.BadRequestError, match="is expired"):
        await client.uploads.parts.create(upload.id, data=b"x")
    await client.files.list()
    assert stored(server) == []


async def test_what_a_killed_server_left_is_removed_at_the_next_start(tmp_path):
    async with make_server(tmp_path) as server:
        _, kept = await send(server, b"x")
    folder = server.api.settings.folder
    for name in (".tmp-file-1", "file-2"):
        (folder / "files" / name).write_text("half")
    (folder / "models" / "ftjob-gone").mkdir()
    async with make_server(tmp_path) as again:
        assert stored(again) == [kept["id"]]
        assert list((folder / "models").iterdir()) == []


async def test_the_data_belong_to_their_owner_alone(server, client):
    await client.files.create(file=("a", b"x"), purpose="fine-tune")
    folder = server.api.settings.folder
    for path in [folder, *folder.rglob("*")]:
        assert path.stat().st_mode & 0o077 == 0, path
