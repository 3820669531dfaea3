"""SQLite's write lock of the servers that we start: a transaction that begins with a read waits, and is not failed."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy

from cairn.flows.orchestrator.prefect_server import _take_write_locks_at_once


async def read_then_write(configuration: Any, name: str) -> None:
    """Read, let the other one go on, and write, in one transaction as Prefect's services do."""
    engine = await configuration.engine()
    session = await configuration.session(engine)
    async with session, configuration.begin_transaction(session):
        await session.execute(sqlalchemy.text("SELECT count(*) FROM written"))
        await asyncio.sleep(0.05)
        await session.execute(sqlalchemy.text("INSERT INTO written VALUES (:name)"), {"name": name})


def test_two_transactions_that_read_and_then_write_both_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Takes a second, which every worker's collection would spend.
    from prefect.server.database.configurations import AioSqliteConfiguration

    monkeypatch.setattr(AioSqliteConfiguration, "begin_transaction", AioSqliteConfiguration.begin_transaction)
    _take_write_locks_at_once()
    path = tmp_path / "prefect.db"
    with sqlite3.connect(path) as made:
        made.execute("CREATE TABLE written (name TEXT)")
    made.close()
    configuration = AioSqliteConfiguration(f"sqlite+aiosqlite:///{path}")

    async def both() -> None:
        await asyncio.gather(*(read_then_write(configuration, name) for name in ("a", "b")))
        await (await configuration.engine()).dispose()

    asyncio.run(both())
    with sqlite3.connect(path) as found:
        assert sorted(found.execute("SELECT name FROM written")) == [("a",), ("b",)]
    found.close()
